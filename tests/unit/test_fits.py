"""Which quant types and contexts of a model fit."""

from __future__ import annotations

from llamaops.core.fits import Variant, compared_at, estimated, fits, needs
from llamaops.core.model import Model

MIB = 1 << 20
MODEL = Model(
    "/m.gguf", 988 * MIB, "qwen2", quant="F16", parameters=494_000_000, layers=24, embedding=896, heads=14, kv_heads=2,
    head_dim_k=64, head_dim_v=64, feed_forward=4864, vocab=151936, context_train=32768,
)  # fmt: skip


def test_memory_grows_with_context_and_shrinks_with_the_kv_type() -> None:
    found = {(need.context, need.kv_type): need.total_bytes for need in needs(MODEL, None)}
    assert {context for context, _ in found} == {2048, 4096, 8192, 16384, 32768}
    kv = 2 * 24 * 2 * 64 * 2
    assert found[32768, "f16"] - found[16384, "f16"] >= 16384 * kv
    assert found[32768, "f16"] > found[32768, "q8_0"] > found[32768, "q4_0"]


def test_what_does_not_fit_is_told_and_unknown_memory_is_unknown() -> None:
    most = needs(MODEL, None)[-1].total_bytes
    assert [need.fits for need in needs(MODEL, most)][-1] is True
    assert [need.fits for need in needs(MODEL, most - 1)][-1] is False
    assert {need.fits for need in needs(MODEL, None)} == {None}


def test_variants_are_compared_at_one_context_largest_first() -> None:
    small, large = Variant("Q4_K_M", 400 * MIB, "a"), Variant("Q8_0", 530 * MIB, "b")
    least = fits(MODEL, [small], None)[0].total_bytes
    both = fits(MODEL, [small, large], least + MIB)
    assert [fit.variant for fit in both] == [large, small]
    assert [fit.fits for fit in both] == [False, True]
    assert both[0].total_bytes - both[1].total_bytes == 130 * MIB
    assert compared_at(MODEL) == 4096


def test_only_smaller_types_can_be_made() -> None:
    made = [variant.quant for variant in estimated(MODEL)]
    assert made[:2] == ["F16", "Q8_0"]
    assert "BF16" not in made
    q4 = Model("/m.gguf", 302_000_000, "qwen2", quant="Q4_K_M", parameters=494_000_000)
    assert [v.quant for v in estimated(q4)] == ["Q4_K_M", "IQ4_XS", "Q3_K_M", "Q2_K"]
    assert [v.quant for v in estimated(Model("/m.gguf", 5, "x"))] == [None]
