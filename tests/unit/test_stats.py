"""Quantiles against known values; verdicts that are rare without a cause and sure with one."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaops.core.stats import Ratio, drift, jitter, paired_ratio, quantile, summarize, t_quantile, verdict

values = st.lists(st.floats(0.001, 1e6), min_size=2, max_size=40)


@settings(max_examples=15, deadline=None)
@given(values)
def test_quantiles_are_those_of_the_standard_library(sample: list[float]) -> None:
    ordered = sorted(sample)
    cuts = statistics.quantiles(sample, n=100, method="inclusive")
    for percent in (1, 50, 90, 95, 99):
        assert quantile(ordered, percent / 100) == pytest.approx(cuts[percent - 1])


@settings(max_examples=15, deadline=None)
@given(values)
def test_a_summary_holds_together(sample: list[float]) -> None:
    s = summarize(sample)
    assert s is not None and s.count == len(sample)
    assert s.min <= s.p50 <= s.p90 <= s.p95 <= s.p99 <= s.max
    assert s.std == pytest.approx(statistics.stdev(sample), abs=1e-6)
    assert s.mean == pytest.approx(statistics.fmean(sample))


def test_small_samples() -> None:
    assert summarize([]) is None
    one = summarize([3.0])
    assert one is not None and (one.p99, one.std) == (3.0, 0.0)
    assert (jitter([]), jitter([5.0]), jitter([1.0, 3.0, 2.0])) == (0.0, 0.0, 1.5)


@pytest.mark.parametrize(("p", "df", "t"), [  # from printed tables of Student's t
    (0.975, 1, 12.706), (0.975, 2, 4.303), (0.995, 3, 5.841), (0.995, 7, 3.499), (0.95, 10, 1.812), (0.975, 30, 2.042),
])
def test_student_quantiles(p: float, df: int, t: float) -> None:
    assert t_quantile(p, df) == pytest.approx(t, abs=5e-4)


def runs(rng: random.Random, n: int, slower: float, deviation: float) -> tuple[list[float], list[float]]:
    a = [20 * math.exp(rng.gauss(0, deviation)) for _ in range(n)]
    return a, [20 * slower * math.exp(rng.gauss(0, deviation)) for _ in range(n)]


def verdicts(slower: float, deviation: float, times: int = 60) -> list[str | None]:
    rng = random.Random(7)
    ratios = [paired_ratio(*runs(rng, 8, slower, deviation), level=0.995, resamples=400) for _ in range(times)]
    return [verdict(ratio, "lower", least=0.01) for ratio in ratios]


@pytest.mark.parametrize("deviation", [0.005, 0.02, 0.1])
def test_no_verdict_on_the_same_thing(deviation: float) -> None:
    assert sum(v is not None for v in verdicts(1.0, deviation)) <= 1


@pytest.mark.parametrize("deviation", [0.005, 0.02])
def test_ten_percent_slower_is_told(deviation: float) -> None:
    assert sum(v == "worse" for v in verdicts(1.1, deviation)) >= 58


def test_a_ratio_lies_in_its_interval_and_turns_round() -> None:
    a, b = runs(random.Random(3), 8, 1.2, 0.05)
    there, back = paired_ratio(a, b, level=0.95), paired_ratio(b, a, level=0.95)
    assert there is not None and back is not None
    assert there.low < there.ratio < there.high
    assert back.ratio == pytest.approx(1 / there.ratio)


@pytest.mark.parametrize(("ratio", "better", "call"), [
    (Ratio(8, 0.8, 0.7, 0.9), "lower", "better"), (Ratio(8, 0.8, 0.7, 0.9), "higher", "worse"),
    (Ratio(8, 1.2, 1.1, 1.3), "lower", "worse"), (Ratio(8, 1.2, 1.1, 1.3), "higher", "better"),
    (Ratio(8, 1.2, 0.9, 1.3), "lower", None), (Ratio(8, 1.005, 1.001, 1.009), "lower", None),
    (Ratio(3, 1.2, 1.1, 1.3), "lower", None), (None, "lower", None),
])
def test_verdicts(ratio: Ratio | None, better: str, call: str | None) -> None:
    assert verdict(ratio, better, least=0.01) == call  # type: ignore[arg-type]  # the table's words are the literals


def test_ratios_need_positive_pairs() -> None:
    assert paired_ratio([1.0], [1.0], level=0.95) is None
    assert paired_ratio([1.0, 0.0, 2.0], [1.0, 1.0, 2.0], level=0.95) is None


def test_drift_is_told_and_chance_is_not() -> None:
    rng = random.Random(5)
    steady = [[math.exp(rng.gauss(0, 0.02)) for _ in range(16)] for _ in range(50)]
    assert sum(drift(s) is not None for s in steady) <= 2
    rising = drift([1.02 ** i * math.exp(rng.gauss(0, 0.01)) for i in range(16)])
    assert rising == pytest.approx(1.02 ** 15, rel=0.05)
    assert drift([1.0] * 8) is None
