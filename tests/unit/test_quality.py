"""What llama-perplexity (b11434) printed, read; and which models may be compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamaops.core.model import Model, bits_per_weight
from llamaops.core.quality import base_of, check_comparable, parse_against_base, parse_base
from llamaops.errors import ModelUnavailable

BASE = """\
0.02.116.608 I perplexity: saving all logits to base.kld
0.02.123.196 I perplexity: calculating perplexity over 7 chunks, n_ctx=256, batch_size=2048, n_seq=8
[1]21.1234,[2]12.6211,[3]11.7291,[4]10.8926,[5]13.3784,[6]13.3039,[7]15.4828,
0.31.487.309 I Final estimate: PPL = 15.4828 +/- 1.45537
""".splitlines()
AGAINST = """\
   7      21.6111 ±    1.9542       0.33348 ±    0.03409       0.43747 ±    0.01478
====== Perplexity statistics ======
Mean PPL(Q)                   :  21.611104 ±   1.954171
Mean PPL(base)                :  15.482804 ±   1.455367
====== KL divergence statistics ======
Mean    KLD:   0.437466 ±   0.014779
Maximum KLD:   6.218129
Same top p: 61.980 ± 1.629 %
""".splitlines()
MODEL = Model("/m/a.gguf", 100, "llama", parameters=100, vocab=7)


def test_the_base_is_read() -> None:
    found = parse_base(BASE)
    assert found is not None
    assert (found.perplexity, found.perplexity_error, found.divergence, found.same_top) == (15.4828, 1.45537, 0, 1)


def test_another_model_is_read() -> None:
    found = parse_against_base(AGAINST)
    assert found is not None
    assert (found.perplexity, found.divergence, found.divergence_error) == (21.611104, 0.437466, 0.014779)
    assert found.same_top == pytest.approx(0.6198)


@pytest.mark.parametrize("cut", range(len(AGAINST) + 1))
def test_an_answer_that_was_cut_is_none(cut: int) -> None:
    assert (parse_against_base(AGAINST[:cut]) is not None) == (cut == len(AGAINST))


def test_a_divergence_of_nothing_is_read() -> None:
    lines = [line.replace("0.437466", "-1.2e-05") for line in AGAINST]
    found = parse_against_base(lines)
    assert found is not None
    assert found.divergence == -1.2e-05


def test_the_base_is_the_model_with_most_bits() -> None:
    models = [replace(MODEL, size_bytes=size) for size in (50, 200, 100, 200)]
    assert base_of(models) == 1
    assert bits_per_weight(models[0]) == 4
    assert bits_per_weight(replace(MODEL, parameters=None)) is None


def test_only_one_vocabulary_that_generates_is_compared() -> None:
    check_comparable([MODEL, MODEL])
    with pytest.raises(ModelUnavailable, match="same vocabulary"):
        check_comparable([MODEL, replace(MODEL, vocab=8)])
    with pytest.raises(ModelUnavailable, match="embedding"):
        check_comparable([MODEL, replace(MODEL, architecture="bert")])
