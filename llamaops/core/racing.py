"""Racing: candidates are measured round by round, and those that have surely lost are measured no more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from llamaops.core.figures import Figures, Slo
from llamaops.core.stats import Ratio, deviation, t_quantile

Objective = Literal["slo", "itl", "throughput", "energy"]
K = TypeVar("K")

ROUNDS = 4
"""A race ends after so many rounds; what is still together then hardly differs."""
CLEAR = 0.15
"""A candidate this much worse in each of two rounds is out at once."""
LEAST = 0.01
"""The incumbent gives way only to something better by at least this."""
PATIENCE = 4
"""An answer this many times as long as the start profile's slowest is not waited for: its candidate has failed."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run cost under an objective; ``text`` is what a person reads. Infinite where the run is of no use."""

    value: float
    text: str


def cost_of(figures: Figures, slo: Slo, objective: Objective, joules: float | None = None) -> Cost:
    """Return the cost of a run.

    ``slo``: seconds per token, times the fourth power of each factor by which TTFT p95 or ITL p99 exceed their limits,
    so that limits are met first and speed decides after that. ``itl``: ITL p99. ``throughput``: seconds per token.
    ``energy``: joules per token. A run with any failed request is of no use.
    """
    if figures.ok < figures.sent or not figures.output_tokens or figures.ttft is None or figures.itl is None:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in figures.failures.items())
        return Cost(math.inf, f"failed: {kinds or 'no text'}")
    per_token = 1 / figures.output_tokens_per_s
    ttft, itl = figures.ttft.p95, figures.itl.p99
    text = f"TTFT p95 {ttft:.0f} ms, ITL p99 {itl:.1f} ms, {figures.output_tokens_per_s:.1f} tok/s"
    match objective:
        case "itl":
            return Cost(itl, text)
        case "throughput":
            return Cost(per_token, text)
        case "energy":
            used = joules / figures.output_tokens if joules else math.inf
            return Cost(used, f"{text}, {used:.2f} J/token")
        case "slo":
            over = max(1.0, ttft / slo.ttft_ms) * max(1.0, itl / slo.itl_ms)
            return Cost(per_token * over**4, text)


def still_racing(costs: Mapping[K, Sequence[float]], incumbent: Sequence[float]) -> list[K]:
    """Return the candidates that may still win, each with as many rounds behind it as the others.

    ``incumbent`` are the costs of the best so far, also where it is out itself. Out is what failed, what lost half of a
    race's rounds to the incumbent (it can't win most of them any more), what was worse than the best by 15 % in each of
    two rounds, and from three rounds on what is worse with 95 % confidence, paired by round (one-sided t on the
    logarithms).
    """
    alive = [k for k, row in costs.items() if all(map(math.isfinite, row))]
    if not alive:
        return []
    best = min(alive, key=lambda k: middle(costs[k]))
    return [k for k in alive if k == best or not (_lost(costs[k], costs[best]) or _beaten(costs[k], incumbent))]


def _beaten(row: Sequence[float], incumbent: Sequence[float]) -> bool:
    """Tell whether a candidate can't win most rounds against the incumbent any more; it never beats itself."""
    return row is not incumbent and 2 * sum(a >= b for a, b in zip(row, incumbent, strict=False)) >= ROUNDS


def _lost(row: Sequence[float], best: Sequence[float]) -> bool:
    worse = [math.log(a / b) for a, b in zip(row, best, strict=True)]
    n = len(worse)
    if n < 2:
        return False
    if min(worse) > math.log1p(CLEAR):
        return True
    return n > 2 and sum(worse) / n > t_quantile(0.95, n - 1) * deviation(worse) / math.sqrt(n)


def far_behind(costs: Mapping[K, Sequence[float]]) -> list[K]:
    """Return the candidates that failed, or were 15 % worse than the best in every round they ran."""
    best = costs[winner(costs, next(iter(costs)))]
    return [k for k, row in costs.items()
            if row and all(not math.isfinite(a) or a > b * (1 + CLEAR) for a, b in zip(row, best, strict=False))]


def settled(ratio: Ratio | None) -> bool:
    """Tell whether more pairs would change nothing: the costs are surely better, surely not, or of no use."""
    return ratio is None or ratio.high < 1 or ratio.low > 1 - LEAST


def winner(costs: Mapping[K, Sequence[float]], incumbent: K) -> K:
    """Return who won: the cheapest that ran all rounds, but the incumbent unless beaten by 1 % and in most rounds."""
    longest = max(map(len, costs.values()))
    best = min((k for k, row in costs.items() if len(row) == longest), key=lambda k: middle(costs[k]))
    if best == incumbent or not all(map(math.isfinite, costs[best])):
        return incumbent
    if not all(map(math.isfinite, costs[incumbent])):
        return best
    pairs = list(zip(costs[best], costs[incumbent], strict=False))
    won = sum(b < a for b, a in pairs) > len(pairs) / 2
    return best if won and gain(costs[best], costs[incumbent]) > LEAST else incumbent


def gain(row: Sequence[float], other: Sequence[float]) -> float:
    """Return by which part of its costs ``row`` undercuts another one, over the rounds that both ran; 0.1 is 10 %."""
    pairs = list(zip(row, other, strict=False))
    return math.expm1(math.fsum(math.log(b / a) for a, b in pairs) / len(pairs))


def middle(row: Sequence[float]) -> float:
    """Return the geometric mean of costs."""
    return math.exp(math.fsum(map(math.log, row)) / len(row))
