"""Interleaved runs of several targets under the same requests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llamaops.bench.run import SCHEMA, Conditions, Measured, as_document, bench, environment, measure_live
from llamaops.bench.targets import Live, Target, serving
from llamaops.core.comparison import Row, Versus, compare, drifts, order_of
from llamaops.errors import EngineFailed

Runs = Sequence[Sequence[Measured]]
"""``runs[target][pair]``."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs and what they say."""

    targets: tuple[Target, ...]
    runs: Runs
    results: list[Versus]
    warnings: list[str]


def compare_targets(targets: Sequence[Target], conditions: Conditions, pairs: int, *, keep: bool = False,
                    on_run: Callable[[int, int], None] = lambda _number, _target: None,
                    enough: Callable[[Runs], bool] = lambda _runs: False) -> Comparison:
    """Run the targets in turn, A B B A …, ``pairs`` times each or until the pairs run are ``enough``, and compare.

    Both runs of a pair get the same requests, each pair others. Unless ``keep``, a target is started anew for each of
    its runs, so that the luck of one start (where its memory lies) is not taken for a difference; ``keep`` starts all
    at once and leaves them running. ``on_run`` is told the run's number and target before each. Raises EngineFailed
    when no request of a run succeeded.
    """
    runs: list[list[Measured]] = [[] for _ in targets]
    with contextlib.ExitStack() as stack:
        lives = [stack.enter_context(serving(t, conditions.server)) for t in targets] if keep else None
        for number, i in enumerate(order_of(len(targets), pairs)):
            on_run(number, i)
            runs[i].append(_one(targets[i], lives[i] if lives else None, _for_pair(conditions, len(runs[i]))))
            if len({*map(len, runs)}) == 1 and enough(runs):
                break
    figures = [[m.figures for m in row] for row in runs]
    return Comparison(tuple(targets), tuple(map(tuple, runs)), compare(figures), drifts(figures) + _warnings(runs))


def _for_pair(conditions: Conditions, pair: int) -> Conditions:
    workload = conditions.workload
    return replace(conditions, workload=replace(workload, seed=workload.seed + pair))


def _one(target: Target, live: Live | None, conditions: Conditions) -> Measured:
    measured = bench(target, conditions) if live is None else measure_live(target, live, conditions)
    if not measured.figures.ok:
        raise EngineFailed("no request succeeded", where=target.label,
                           why=next(iter(measured.figures.failure_examples.values()), None))
    return measured


def _warnings(runs: Runs) -> list[str]:
    """Return what was wrong with any run, each thing once, with the number of runs."""
    every = [m for row in runs for m in row]
    texts = [text for m in every for text in m.invalid]
    out = [f"{text} ({texts.count(text)} runs): the verdict is worth nothing" for text in dict.fromkeys(texts)]
    for row in runs:
        if len({str(m.plan) for m in row}) > 1:
            out.append(f"the plan of {row[0].target.label} changed between its runs (calibrated meanwhile?)")
    if failed := sum(m.figures.sent - m.figures.ok for m in every):
        out.append(f"{failed} requests failed; figures are of those that did not")
    waited = [m for m in every if m.client.waited_s and m.client.waited_s > 0.02 * m.figures.window_s]
    if waited:
        out.append(f"in {len(waited)} runs the load generator itself waited for a CPU")
    return out


def as_comparison(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as a `llamaops-bench` document; its runs without each request's times."""
    return {
        "schema": SCHEMA, "kind": "comparison",
        "targets": [t.label for t in comparison.targets],
        "results": [{"target": comparison.targets[v.target].label, "against": comparison.targets[0].label,
                     "metrics": [_row(row) for row in v.rows]} for v in comparison.results],
        "warnings": comparison.warnings,
        "runs": [[as_document(m, detail=False) for m in row] for row in comparison.runs],
        "environment": environment(),
    }


def _row(row: Row) -> dict[str, Any]:
    return {"name": row.metric.name, "unit": row.metric.unit, "better": row.metric.better, "base": row.base,
            "other": row.other, "ratio": asdict(row.ratio) if row.ratio else None, "verdict": row.verdict}
