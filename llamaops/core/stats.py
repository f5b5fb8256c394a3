"""The statistics of benches: quantiles, summaries, paired ratios with intervals, verdicts. Pure and seeded."""

# ruff: noqa: S311 - resampled from a seed so that a verdict can be repeated; nothing here is a secret

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

Better = Literal["lower", "higher"]
Call = Literal["better", "worse"]
MIN_PAIRS = 4
"""Fewer pairs can't carry a verdict: with three, chance alone puts all on one side in a quarter of all comparisons."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A sample in numbers, all but ``count`` in the sample's unit. ``std`` is the sample standard deviation."""

    count: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the ``q`` quantile of an ascending, non-empty sample, linear between points (Hyndman and Fan, type 7)."""
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(values: Sequence[float]) -> Summary | None:
    """Return the summary of a sample, None of an empty one."""
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    p50, p90, p95, p99 = (quantile(ordered, q) for q in (0.5, 0.9, 0.95, 0.99))
    return Summary(len(ordered), mean, deviation(ordered), ordered[0], p50, p90, p95, p99, ordered[-1])


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation, 0 of fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def jitter(gaps: Sequence[float]) -> float:
    """Return the mean absolute difference of successive gaps, 0 of fewer than two."""
    if len(gaps) < 2:
        return 0.0
    return math.fsum(abs(b - a) for a, b in pairwise(gaps)) / (len(gaps) - 1)


@dataclass(frozen=True, slots=True)
class Ratio:
    """B over A: the geometric mean of the paired ratios, and the interval it lies in at the level asked for."""

    pairs: int
    ratio: float
    low: float
    high: float


def paired_ratio(a: Sequence[float], b: Sequence[float], *, level: float, seed: int = 1,
                 resamples: int = 10_000) -> Ratio | None:
    """Return the ratio of paired, positive measurements with a bootstrap interval; None without two pairs of such.

    Pairs are resampled whole. The percentile interval of so few is too narrow, so its tails are moved out to what
    Student's t asks for (the expanded percentile interval, Hesterberg 2015, "What Teachers Should Know About the
    Bootstrap", section 5.3), and never inside Student's own interval: of six or eight pairs no resample reaches as far.
    """
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True) if x > 0 and y > 0]
    n = len(logs)
    if n < 2 or n < len(a):
        return None
    rng = random.Random(seed)
    means = sorted(math.fsum(rng.choices(logs, k=n)) / n for _ in range(resamples))
    t = t_quantile((1 + level) / 2, n - 1)
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * t)
    middle, reach = math.fsum(logs) / n, t * deviation(logs) / math.sqrt(n)
    low, high = min(quantile(means, tail), middle - reach), max(quantile(means, 1 - tail), middle + reach)
    return Ratio(n, math.exp(middle), math.exp(low), math.exp(high))


def verdict(ratio: Ratio | None, better: Better, *, least: float) -> Call | None:
    """Return what may be said of B: nothing unless the interval excludes 1 and the change is at least ``least``."""
    if ratio is None or ratio.pairs < MIN_PAIRS or ratio.low <= 1 <= ratio.high:
        return None
    if abs(math.log(ratio.ratio)) < math.log1p(least):
        return None
    return "better" if (ratio.ratio < 1) == (better == "lower") else "worse"


def drift(values: Sequence[float]) -> float | None:
    """Return by what factor positive values changed from first to last, None when that may well be chance.

    A straight line through the logarithms, in the order measured, whose slope is significant at 1 %.
    """
    n = len(values)
    if n < 5 or min(values) <= 0:
        return None
    logs, places = [math.log(v) for v in values], [i - (n - 1) / 2 for i in range(n)]
    mean, spread = math.fsum(logs) / n, math.fsum(x * x for x in places)
    slope = math.fsum(x * y for x, y in zip(places, logs, strict=True)) / spread
    rest = math.fsum((y - mean - slope * x) ** 2 for x, y in zip(places, logs, strict=True))
    error = math.sqrt(rest / (n - 2) / spread)
    significant = abs(slope) > t_quantile(0.995, n - 2) * error
    return math.exp(slope * (n - 1)) if significant and slope else None


def t_quantile(p: float, df: int) -> float:
    """Return Student's t quantile for ``0.5 <= p < 1`` and whole degrees of freedom."""
    return _solve(lambda t: (1 + _t_within(t, df)) / 2 - p, 0.0, 1e4)


def _t_within(t: float, df: int) -> float:
    """Return P(|T| < t), by the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(df))
    cos, odd = math.cos(theta), df % 2
    term, total = (cos, cos if df > 1 else 0.0) if odd else (1.0, 1.0)
    for k in range(2 + odd, df - 1, 2):
        term *= cos * cos * (k - 1) / k
        total += term
    inner = math.sin(theta) * total
    return 2 / math.pi * (theta + inner) if odd else inner


def _solve(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where an increasing function crosses zero, by bisection."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2
