"""The statistics of benches: quantiles, summaries, paired ratios with intervals, verdicts. Pure and seeded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Better = Literal["lower", "higher"]


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
