"""What interleaved runs of several targets say: paired ratios to the first target, intervals, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from llamaops.core.figures import Figures
from llamaops.core.stats import Better, Call, Ratio, Summary, drift, paired_ratio, verdict

FALSE_ALARMS = 0.02
"""Chance that a comparison of a thing with itself gives any verdict at all, over all its metrics together."""
LEAST = 0.01
"""A change smaller than this gets no verdict, however sure it is."""
DRIFT_LIMIT = 0.05


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that targets are compared by; ``of`` returns None where a run has none."""

    name: str
    unit: str
    better: Better
    of: Callable[[Figures], float | None]


def _p50(summary: Summary | None) -> float | None:
    return summary.p50 if summary else None


METRICS = (
    Metric("TTFT p50", "ms", "lower", lambda f: _p50(f.ttft)),
    Metric("ITL p50", "ms", "lower", lambda f: _p50(f.itl)),
    Metric("ITL p99", "ms", "lower", lambda f: f.itl.p99 if f.itl else None),
    Metric("output", "tok/s", "higher", lambda f: f.output_tokens_per_s or None),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of one target against the first; medians over the runs in the metric's unit, None: not measured."""

    metric: Metric
    base: float | None
    other: float | None
    ratio: Ratio | None
    verdict: Call | None


@dataclass(frozen=True, slots=True)
class Versus:
    """One target against the first one."""

    target: int
    rows: tuple[Row, ...]


def order_of(targets: int, pairs: int) -> list[int]:
    """Return which target runs when: A B, B A, A B, … so that a steady drift of the machine falls on all alike."""
    there = list(range(targets))
    return [target for pair in range(pairs) for target in (there if pair % 2 == 0 else reversed(there))]


def compare(runs: Sequence[Sequence[Figures]]) -> list[Versus]:
    """Compare every target's runs with the first target's, run by run; ``runs[target][pair]``."""
    return [Versus(i, tuple(_row(metric, runs[0], runs[i]) for metric in METRICS)) for i in range(1, len(runs))]


def _row(metric: Metric, base: Sequence[Figures], other: Sequence[Figures]) -> Row:
    a, b = [metric.of(f) for f in base], [metric.of(f) for f in other]
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    if len(pairs) < len(a):  # a run without the figure failed: what is left would be a choice of the good ones
        return Row(metric, _median(a), _median(b), None, None)
    ratio = paired_ratio([x for x, _ in pairs], [y for _, y in pairs], level=1 - FALSE_ALARMS / len(METRICS))
    return Row(metric, _median(a), _median(b), ratio, verdict(ratio, metric.better, least=LEAST))


def _median(values: Sequence[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return median(there) if there else None


def drifts(runs: Sequence[Sequence[Figures]]) -> list[str]:
    """Return a warning for each metric that moved by more than 5 % over the runs, in every target alike."""
    out = []
    for metric in METRICS:
        moved = [_drift(metric, row) for row in runs]
        if all(moved) and (len({m > 1 for m in moved if m}) == 1):
            change = max((m for m in moved if m), key=lambda m: abs(m - 1))
            if abs(change - 1) > DRIFT_LIMIT:
                out.append(f"the machine drifted: {metric.name} went to {change:.0%} of what it was at the start")
    return out


def _drift(metric: Metric, runs: Sequence[Figures]) -> float | None:
    values = [v for f in runs if (v := metric.of(f)) is not None]
    return drift(values) if len(values) == len(runs) else None
