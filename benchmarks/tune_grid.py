"""Whether `llamaops tune` finds what measuring every combination finds, and in which part of the time.

    .venv/bin/python benchmarks/tune_grid.py [PROFILE] [--noise cpu:2] [--rounds 4] [--objective slo]

The grid holds every combination of the tuner's own knobs (at most --knobs of them, those with the largest effect), each
measured once a round, the order turned round every time. Both use the same requests and the same cost. Printed: the
best of the grid, what the tuner keeps (its winner where the confirmation is sure, else the start profile) and what that
cost in the grid, and both times, the tuner's without the confirmation.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import servers

from llamaops.bench import tune as tuner
from llamaops.bench.journal import Journal
from llamaops.bench.load import Server
from llamaops.bench.noise import Noise
from llamaops.bench.run import Conditions, bench, environment
from llamaops.bench.targets import Target
from llamaops.core.figures import Slo
from llamaops.core.knobs import Knob, knobs
from llamaops.core.progress import NoProgress
from llamaops.core.racing import cost_of, middle
from llamaops.core.workload import Lengths, Workload
from llamaops.prepare import load_profile, prepare


def grid_of(found: list[Knob]) -> list[tuner.Point]:
    choices = [[(), *(((knob.key, value),) for value in knob.values)] for knob in found]
    combinations = itertools.product(*choices)
    return [tuple(sorted(setting for part in combination for setting in part)) for combination in combinations]


def measure_grid(task: tuner.Task, points: list[tuner.Point], rounds: int) -> dict[tuner.Point, float]:
    costs: dict[tuner.Point, list[float]] = {point: [] for point in points}
    for turn in range(rounds):
        workload = replace(task.conditions.workload, seed=task.conditions.workload.seed + turn)
        for point in points if turn % 2 == 0 else reversed(points):
            target = Target("profile", str(task.profile), tuple(f"{k}={v}" for k, v in point))
            measured = bench(target, replace(task.conditions, workload=workload))
            cost = cost_of(measured.figures, task.conditions.slo, task.objective)
            costs[point].append(cost.value)
            print(f"  grid {turn + 1} {tuner.name_of(point)}: {cost.text}", file=sys.stderr, flush=True)
    return {point: middle(row) for point, row in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", type=Path, default=Path(servers.PROFILE))
    parser.add_argument("--noise", type=Noise.parse, default=Noise())
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--knobs", type=int, default=4)
    parser.add_argument("--objective", choices=["slo", "itl", "throughput"], default="slo")
    args = parser.parse_args()
    slo = load_profile(args.profile).slo
    workload = Workload(1, None, 4, None, 1, Lengths(48), Lengths(32))
    conditions = Conditions(workload, Slo(slo.ttft_ms, slo.itl_ms), args.noise, "session", Server("", 0))
    task = tuner.Task(args.profile, (), conditions, args.objective, 3600.0, 4)
    planned = prepare(load_profile(args.profile), NoProgress())
    found = knobs(planned.profile, planned.plan, planned.host, planned.engine, streams=1, real_time=False)[: args.knobs]
    tuner.knobs = lambda *_args, **_kwargs: found  # the tuner gets the same knobs as the grid
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "j.jsonl", tuner.question(task))
        out = tuner.tune(task, journal, NoProgress(), lambda line: print(f"  tune {line}", file=sys.stderr, flush=True))
    began = time.monotonic()
    costs = measure_grid(task, grid_of(found), args.rounds)
    seconds = time.monotonic() - began
    best = min(costs, key=costs.__getitem__)
    kept = out.point if out.better else ()  # what is not surely better is not written
    share, behind = out.seconds / seconds, costs[kept] / costs[best] - 1
    print(f"{environment()['cpu']}, {args.profile.name}, noise {args.noise}, objective {args.objective}")
    print(f"grid   {len(costs)} points x {args.rounds} rounds in {seconds:.0f} s; best: {tuner.name_of(best)}")
    print(f"tuner  {out.runs} runs in {out.seconds:.0f} s ({share:.0%} of it); keeps: {tuner.name_of(kept)}")
    print(f"       {behind:+.1%} from the grid's best, by the grid's own measurements")
    if r := out.ratio:
        print(f"       {tuner.name_of(out.point)} against the start profile: cost x {r.ratio:.3f} "
              f"({r.low:.3f} - {r.high:.3f}, {r.pairs} pairs)")


if __name__ == "__main__":
    main()
