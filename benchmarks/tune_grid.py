"""Whether `llamaops tune` finds what measuring every combination finds, and in which part of the time.

    .venv/bin/python benchmarks/tune_grid.py [PROFILE] [--noise cpu:2] [--rounds 4] [--objective slo] [--knobs N]
        [--journal FILE]

The grid holds every combination of the tuner's own knobs (all of them, or the N with the largest effect) that plans to
something else, each measured once a round, the order turned round every time; a race's rounds, so that it tells its
points apart as well as the tuner does, and no further rounds for a point that does not run. Both use the same requests
and the same cost. Of many points the best looks better than it is, so what the tuner found and what it keeps (the same
where the confirmation is sure, else the start profile) run against the grid's best once more, in pairs. Printed: all
three, how far they are apart, and both times: the tuner's with its calibrations and its confirmation.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import servers

from llamaops.bench import tune as tuner
from llamaops.bench.compare import compare_targets
from llamaops.bench.journal import Journal
from llamaops.bench.load import Server
from llamaops.bench.noise import Noise
from llamaops.bench.run import Conditions, bench, environment
from llamaops.bench.targets import Target
from llamaops.core.figures import Slo
from llamaops.core.knobs import Knob, knobs
from llamaops.core.progress import NoProgress
from llamaops.core.racing import ROUNDS, Cost, cost_of, middle
from llamaops.core.stats import Ratio
from llamaops.core.workload import Lengths, Workload
from llamaops.errors import LlamaopsError
from llamaops.prepare import load_profile, plan_only, prepare


def grid_of(profile: Path, found: list[Knob]) -> list[tuner.Point]:
    """Return every combination, without those that plan to the same as one before."""
    choices = [[(), *(((knob.key, value),) for value in knob.values)] for knob in found]
    plans: dict[tuner.Point, object] = {}
    for combination in itertools.product(*choices):
        point = tuple(sorted(setting for part in combination for setting in part))
        plan = plan_only(load_profile(profile, tuner.overrides(point))).plan
        runs = (plan.placement, plan.serving, dict(point).get("engine.args"))
        if runs not in plans.values():
            plans[point] = runs
    return list(plans)


def target_of(task: tuner.Task, point: tuner.Point) -> Target:
    return Target("profile", str(task.profile), tuner.overrides(point))


def measure_grid(task: tuner.Task, points: list[tuner.Point], rounds: int,
                 journal: Journal) -> tuple[dict[tuner.Point, float], float]:
    """Return each point's cost and the seconds that measuring took; what the journal holds is not measured again."""
    costs: dict[tuner.Point, list[float]] = {point: [] for point in points}
    seconds = 0.0
    for turn in range(rounds):
        for point in points if turn % 2 == 0 else reversed(points):
            if math.inf in costs[point]:
                continue
            key = f"{turn + 1} {tuner.name_of(point)}"
            row = journal.get(key) or measure_point(task, point, turn)
            journal.put(key, row)
            costs[point].append(float(row["cost"]))
            seconds += float(row["seconds"])
            print(f"  grid {key}: {row['text']}", file=sys.stderr, flush=True)
    return {point: middle(row) for point, row in costs.items()}, seconds


def measure_point(task: tuner.Task, point: tuner.Point, turn: int) -> dict[str, float | str]:
    workload = replace(task.conditions.workload, seed=task.conditions.workload.seed + turn)
    began = time.monotonic()
    try:
        measured = bench(target_of(task, point), replace(task.conditions, workload=workload))
        cost = cost_of(measured.figures, task.conditions.slo, task.objective)
    except LlamaopsError as exc:
        cost = Cost(math.inf, f"failed: {exc.what}")
    return {"cost": cost.value, "text": cost.text, "seconds": time.monotonic() - began}


def against(task: tuner.Task, points: list[tuner.Point], best: tuner.Point, pairs: int) -> list[Ratio | None]:
    """Run each point against the best once more, in pairs, and return its cost over that of the best."""
    targets = [target_of(task, point) for point in (best, *points)]
    runs = compare_targets(targets, task.conditions, pairs).runs
    return [tuner.cost_ratio(task, [runs[0], row]) for row in runs[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", type=Path, default=Path(servers.PROFILE))
    parser.add_argument("--noise", type=Noise.parse, default=Noise())
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--knobs", type=int)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--objective", choices=["slo", "itl", "throughput"], default="slo")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="Keep the grid's measurements, and go on with "
                        "those that are there.")
    args = parser.parse_args()
    slo = load_profile(args.profile).slo
    workload = Workload(1, None, 4, None, 1, Lengths(48), Lengths(32))
    conditions = Conditions(workload, Slo(slo.ttft_ms, slo.itl_ms), args.noise, "session", Server("", 0))
    task = tuner.Task(args.profile, (), conditions, args.objective, 3600.0, 4)
    planned = prepare(load_profile(args.profile), NoProgress())
    found = knobs(planned.profile, planned.plan, planned.host, planned.engine, streams=1, real_time=False)[: args.knobs]
    tuner.knobs = lambda *_args, **_kwargs: found  # the tuner gets the same knobs as the grid
    points = grid_of(args.profile, found)

    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        out = tuner.tune(task, Journal(Path(folder) / "j.jsonl", tuner.question(task)), NoProgress(),
                         lambda line: print(f"  tune {line}", file=sys.stderr, flush=True))
        tuned_s = time.monotonic() - began
        journal = Journal(args.journal or Path(folder) / "grid.jsonl", tuner.question(task))
        costs, grid_s = measure_grid(task, points, args.rounds, journal)
    best = min(costs, key=costs.__getitem__)
    kept = out.point if out.better else ()  # what is not surely better is not written
    print(f"{environment()['cpu']}, {date.today()}; {args.profile.name}, noise {args.noise}, "
          f"objective {args.objective}; knobs: " + ", ".join(f"{knob.key} ({len(knob.values) + 1})" for knob in found))
    print(f"grid   {len(costs)} points x {args.rounds} rounds in {grid_s:.0f} s; best: {tuner.name_of(best)}")
    print(f"tuner  {out.runs} runs and its confirmation in {tuned_s:.0f} s ({tuned_s / grid_s:.0%} of it); "
          f"keeps: {tuner.name_of(kept)}")
    others = [point for point in dict.fromkeys((kept, out.point)) if point != best]
    for point, r in zip(others, against(task, others, best, args.pairs) if others else [], strict=True):
        by_grid = costs[point] / costs[best] - 1
        line = f"{tuner.name_of(point)} against the grid's best: {by_grid:+.1%} by the grid's own measurements"
        if r:
            line += f"; {r.ratio - 1:+.1%} ({r.low - 1:+.1%} to {r.high - 1:+.1%}) run again in {r.pairs} pairs"
        print(f"       {line}")
    if r := out.ratio:
        print(f"       {tuner.name_of(out.point)} against the start profile: cost x {r.ratio:.3f} "
              f"({r.low:.3f} - {r.high:.3f}, {r.pairs} pairs)")


if __name__ == "__main__":
    main()
