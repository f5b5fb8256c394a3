"""Which quant type `auto` takes: the best that fits and is fast enough, with as little made as that takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaops.auto_quant import choose
from llamaops.core.cpuset import CpuSet
from llamaops.core.engine import Engine
from llamaops.core.model import Model
from llamaops.core.plan import Plan
from llamaops.core.profile import Profile, parse_profile
from llamaops.core.serving import Calibration
from llamaops.core.topology import Cpu, Host

GIB = 1 << 30
F16 = Model("/m/big-f16.gguf", 14 * GIB, "llama", quant="F16", parameters=7 * GIB, layers=32, embedding=4096, heads=32,
            kv_heads=8, feed_forward=14336, vocab=32000, context_train=8192)
HOST = Host(online=CpuSet.parse("0-3"), affinity=CpuSet.parse("0-3"), cpus=tuple(Cpu(n) for n in range(4)),
            mem_available=64 * GIB)
ENGINE = Engine("/e/llama-server", "b1", frozenset(), None)
BANDWIDTH = 20.0 * GIB
TYPES = ["F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M", "Q2_K"]
BITS = {"Q8_0": 8.5, "Q6_K": 6.57, "Q5_K_M": 5.7, "Q4_K_M": 4.89, "IQ4_XS": 4.46, "Q3_K_M": 4.0, "Q2_K": 3.16}


def profile(more: str) -> Profile:
    text = f"model: {{source: 'path:/m/a.gguf', quantize: auto, context: 2048}}\n{more}"
    return parse_profile(text, stem="x", base=Path("/"), environ={})


def auto(itl_ms: float, host: Host = HOST, rates: bool = True) -> tuple[Model, list[str]]:
    """Choose among the types of a model whose decode rate is bound by bytes; return the choice and what was made."""
    made: list[str] = []

    def make(kind: str) -> Model:
        made.append(kind)
        return replace(F16, quant=kind, path=f"/m/{kind}.gguf", size_bytes=round(7 * GIB * BITS[kind] / 8))

    def measure(model: Model, _plan: Plan) -> Calibration | None:
        return Calibration(1e6, BANDWIDTH / model.size_bytes) if rates else None

    return choose(profile(f"slo: {{itl_ms: {itl_ms}}}\nserve: {{slots: 1}}\n"), F16, host, ENGINE, make, measure), made


@pytest.mark.parametrize(("itl_ms", "quant", "made"), [
    (1000, "F16", []),                       # nothing is made where the file as it is will do
    (400, "Q8_0", ["Q8_0"]),                 # 7.4 GiB at 20 GiB/s: 372 ms
    (250, "Q5_K_M", ["Q6_K", "Q5_K_M"]),     # Q8_0 is far too slow by what F16 said; Q6_K is close enough to be tried
    (1, "Q2_K", ["Q2_K"]),                   # nothing is fast enough: the fastest
])
def test_the_best_that_is_fast_enough(itl_ms: float, quant: str, made: list[str]) -> None:
    model, tried = auto(itl_ms)
    assert (model.quant, tried) == (quant, made)
    assert model.chosen is not None
    assert quant in model.chosen
    assert ("more than slo.itl_ms" in model.chosen) == (itl_ms == 1)


def test_what_does_not_fit_is_not_made() -> None:
    model, tried = auto(1000, replace(HOST, mem_available=6 * GIB))
    assert (model.quant, tried) == ("Q5_K_M", ["Q5_K_M"])
    assert model.chosen is not None
    assert "Q6_K needs" in model.chosen


def test_where_nothing_fits_the_smallest_is_left_to_the_plan() -> None:
    assert auto(1000, replace(HOST, mem_available=None))[0].quant == "F16"
    with pytest.raises(Exception, match="memory"):
        auto(1000, replace(HOST, mem_available=GIB))


def test_a_busy_machine_is_estimated() -> None:
    model, _ = auto(10_000, rates=False)
    assert model.chosen is not None
    assert "estimated" in model.chosen


def test_an_embedding_model_is_chosen_by_memory_alone() -> None:
    bert = replace(F16, architecture="bert")
    chosen = choose(profile(""), bert, HOST, ENGINE, lambda kind: pytest.fail(kind), lambda *_: pytest.fail("measured"))
    assert chosen.quant == "F16"


@given(st.floats(1, 2000), st.floats(1, 2000))
def test_a_looser_budget_never_takes_a_smaller_type(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert TYPES.index(str(auto(high)[0].quant)) <= TYPES.index(str(auto(low)[0].quant))
