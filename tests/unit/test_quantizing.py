"""Types of single tensors, importance matrices of both formats, and what a profile may ask of them."""

from __future__ import annotations

import struct
from pathlib import PurePosixPath

import pytest
from gguf_bytes import TENSORS, gguf

from llamaops.core.gguf_header import HeaderError, Tensor, parse_header
from llamaops.core.imatrix_file import entry_names
from llamaops.core.profile import Profile, parse_profile
from llamaops.core.quantizing import Extras, check_tensor_type, example_names, fits_model, not_taken, unmatched
from llamaops.errors import WrongProfile


def tensor(name: str, kind: str = "F16", dimensions: int = 2) -> Tensor:
    return Tensor(name, kind, dimensions, 64, 128, 0)


MODEL = (tensor("token_embd.weight"), tensor("blk.0.attn_v.weight"), tensor("blk.1.attn_v.weight"),
         tensor("blk.0.attn_norm.weight", "F32", 1), tensor("blk.0.attn_v.bias", "F32", 1))


def older(*entries: tuple[str, int]) -> bytes:
    """Return a matrix of the older format: (name, number of values) each."""
    body = b"".join(struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 3, n) + b"\0" * 4 * n
                    for name, n in entries)
    return struct.pack("<i", len(entries)) + body


def parse(model: str) -> Profile:
    text = f"model: {{source: 'path:m.gguf', {model}}}"
    return parse_profile(text, stem="x", base=PurePosixPath("/etc/p"), environ={})


@pytest.mark.parametrize("pattern", ["attn_v", r"blk\.[01]\.ffn_(up|down)", "^output.weight$", "blk.1[0-9]."])
def test_patterns(pattern: str) -> None:
    assert check_tensor_type(pattern, "q8_0") == (pattern, "Q8_0")


@pytest.mark.parametrize(("pattern", "kind", "why"), [
    ("Attn_V", "Q8_0", "lower-case"), ("", "Q8_0", "no pattern"), ("a=b", "Q8_0", "no pattern"),
    ("a b", "Q8_0", "no pattern"), ("attn_(v", "Q8_0", "no regular expression"),
    ("attn_v", "Q4_K_M", "did you mean Q4_K?"), ("attn_v", "I32", "no type"),
    ("attn_v", "Q8_K", "no type"), ("attn_v", "", "no type"),
])
def test_what_is_no_pattern_or_no_type(pattern: str, kind: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("?", r"\?")):
        check_tensor_type(pattern, kind)


@pytest.mark.parametrize(("pattern", "found"), [
    ("attn_v", True), (r"blk\.1\.", True), ("embd", True), ("attn_k", False), ("norm", False), ("bias", False),
])
def test_a_pattern_must_match_what_can_be_quantized(pattern: str, found: bool) -> None:
    assert unmatched(Extras(None, (("embd", "Q8_0"), (pattern, "Q8_0"))), MODEL) == (None if found else pattern)


def test_names_of_one_layer_are_shown_once() -> None:
    assert example_names(MODEL) == "token_embd.weight, blk.N.attn_v.weight"


def test_the_first_pattern_wins_and_what_came_out_otherwise_is_said() -> None:
    extras = Extras(None, ((r"blk\.0\.", "Q8_0"), ("attn_v", "Q4_K")))
    made = (tensor("token_embd.weight", "Q6_K"), tensor("blk.0.attn_v.weight", "Q8_0"),
            tensor("blk.1.attn_v.weight", "Q5_0"))
    assert not_taken(extras, made) == ["blk.1.attn_v.weight is Q5_0, not Q4_K"]


def test_matrices_of_both_formats() -> None:
    sums = [("blk.0.attn_v.weight.in_sum2", (64, 1), 0), ("blk.0.attn_v.weight.counts", (1, 1), 0)]
    names = entry_names(gguf({"general.type": "imatrix"}, sums))
    assert names == entry_names(older(("blk.0.attn_v.weight", 64))) == ("blk.0.attn_v.weight",)
    assert fits_model(names, MODEL)
    assert not fits_model(("blk.0.ffn_up.weight",), MODEL)


@pytest.mark.parametrize(("data", "why"), [
    (gguf(), "no importance matrix .it is of type llama"), (older(("blk.0.attn_v.weight", 64))[:-4], "truncated"),
    (b"PK\x03\x04" + b"\0" * 40, "a zip archive"), (b"plain words, and some more of them", "not an importance matrix"),
    (b"\0\0\0\0", "without entries"), (b"\1", "whole importance matrix"), (older(("x" * 300, 1)), "no known format"),
    (older(("a\nb", 1)), "no known format"), (older(("a", 0)), "truncated"),
    (struct.pack("<ii", 2**31 - 1, 1), "whole"),
    (gguf({"general.type": "imatrix"}, data=3), "truncated"),
])
def test_what_is_no_matrix_is_named(data: bytes, why: str) -> None:
    with pytest.raises(HeaderError, match=why):
        entry_names(data)


def test_the_header_lists_its_tensors() -> None:
    assert [(t.name, t.type, t.dimensions) for t in parse_header(gguf()).tensors] == [
        (name, {0: "F32", 8: "Q8_0"}[kind], len(shape)) for name, shape, kind in TENSORS]


def test_a_profile_with_both() -> None:
    model = parse("quantize: IQ2_M, imatrix: auto, tensor_types: {attn_v: q8_0}").model
    assert (model.imatrix, model.imatrix_file, model.tensor_types) == ("auto", None, {"attn_v": "Q8_0"})
    assert parse("quantize: Q4_0, imatrix: sub/m.gguf").model.imatrix_file == "/etc/p/sub/m.gguf"


@pytest.mark.parametrize(("model", "said"), [
    ("imatrix: auto", "model.imatrix: must be left out: it acts only while quantizing"),
    ("quantize: F16, tensor_types: {attn_v: Q8_0}", "model.tensor_types: must be left out: it acts on quantized types"),
    ("quantize: Q4_0, tensor_types: {attn_v: Q4_K_S}", "model.tensor_types: 'Q4_K_S' is no type of a tensor"),
    ("quantize: Q4_0, tensor_types: {Attn: Q4_K}", "model.tensor_types: 'Attn' is no pattern"),
])
def test_a_profile_that_asks_for_what_can_not_be(model: str, said: str) -> None:
    with pytest.raises(WrongProfile) as caught:
        parse(model)
    assert said in str(caught.value.detail)
