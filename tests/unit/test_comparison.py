"""Interleaving, and whole comparisons on simulated runs: quiet about nothing, sure about ten percent."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from llamaops.core.comparison import compare, drifts, order_of
from llamaops.core.figures import Figures, Slo, measure
from llamaops.core.timing import Timing

_TIMES = tuple(0.3 + 0.02 * i for i in range(20))
BASE = measure([Timing(0, 20, 0.0, 0.0, 0.0, 0.8, _TIMES, 7, 20, "length")], 0.8, Slo())


def run(rng: random.Random, slower: float, deviation: float) -> Figures:
    """Return a run whose times all are longer by one factor and scatter on their own."""
    def scaled(name: str) -> object:
        summary, factor = getattr(BASE, name), slower * math.exp(rng.gauss(0, deviation))
        return replace(summary, p50=summary.p50 * factor, p99=summary.p99 * factor)

    window = 0.8 * slower * math.exp(rng.gauss(0, deviation))
    return replace(BASE, ttft=scaled("ttft"), itl=scaled("itl"), window_s=window)


def calls(rng: random.Random, slower: float, deviation: float) -> set[str]:
    a, b = ([run(rng, factor, deviation) for _ in range(8)] for factor in (1.0, slower))
    return {row.verdict for row in compare([a, b])[0].rows if row.verdict}


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamaops.core import comparison

    real = comparison.paired_ratio
    monkeypatch.setattr(comparison, "paired_ratio", lambda a, b, level: real(a, b, level=level, resamples=200))


@pytest.mark.parametrize("deviation", [0.01, 0.1])
def test_a_thing_is_not_different_from_itself(deviation: float) -> None:
    rng = random.Random(4)
    assert sum(bool(calls(rng, 1.0, deviation)) for _ in range(20)) <= 1


def test_ten_percent_slower_is_worse_and_never_better() -> None:
    rng = random.Random(4)
    assert Counter(frozenset(calls(rng, 1.1, 0.02)) for _ in range(20))[frozenset({"worse"})] >= 19


def test_runs_are_interleaved_so_that_drift_cancels() -> None:
    assert order_of(2, 4) == [0, 1, 1, 0, 0, 1, 1, 0]
    assert order_of(3, 2) == [0, 1, 2, 2, 1, 0]


def test_a_run_without_a_figure_takes_the_verdict_with_it() -> None:
    rng = random.Random(4)
    a, b = ([run(rng, factor, 0.001) for _ in range(8)] for factor in (1.0, 2.0))
    b[3] = replace(b[3], ttft=None)
    verdicts = {row.metric.name: row.verdict for row in compare([a, b])[0].rows}
    assert (verdicts["TTFT p50"], verdicts["ITL p50"]) == (None, "worse")


def test_drift_of_the_whole_machine_is_told() -> None:
    rng = random.Random(4)
    hot = [[run(rng, 1.03 ** i, 0.002) for i in range(8)] for _ in range(2)]
    assert any("drifted: ITL p50" in text for text in drifts(hot))
    assert drifts([hot[0], [run(rng, 1.0, 0.01) for _ in range(8)]]) == []
