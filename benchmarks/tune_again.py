"""Whether a profile that `llamaops tune` wrote keeps its promise when it is run again.

    .venv/bin/python benchmarks/tune_again.py [PROFILE] [--noise cpu:2] [--objective itl] [--pairs 10]
        [--set KEY=VALUE]

Tunes under the noise, writes the winner as `llamaops tune` does, and compares the written file with the start profile
in new pairs with new requests. Printed: the ratio that the file claims and the one found again, each with its 95 %
interval. Kept means that the two intervals meet and the file wins again. `--set placement.nice=0` starts from where a
user without privileges does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path

import servers

from llamaops.bench import tune as tuner
from llamaops.bench.compare import compare_targets
from llamaops.bench.journal import Journal
from llamaops.bench.load import Server
from llamaops.bench.noise import Noise
from llamaops.bench.run import Conditions, environment
from llamaops.bench.targets import parse_target
from llamaops.bench.winner import write_winner
from llamaops.core.figures import Slo
from llamaops.core.progress import NoProgress
from llamaops.core.workload import Lengths, Workload
from llamaops.prepare import load_profile

NEW_REQUESTS = 1000
"""Added to the seed: the second comparison asks what the first one did not."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", type=Path, default=Path(servers.PROFILE))
    parser.add_argument("--noise", type=Noise.parse, default=Noise(cpu=2))
    parser.add_argument("--objective", choices=["slo", "itl", "throughput"], default="itl")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    args = parser.parse_args()
    overrides = tuple(args.overrides)
    slo = load_profile(args.profile, overrides).slo
    workload = Workload(1, None, 4, None, 1, Lengths(48), Lengths(64))
    conditions = Conditions(workload, Slo(slo.ttft_ms, slo.itl_ms), args.noise, "session", Server("", 0))
    task = tuner.Task(args.profile, overrides, conditions, args.objective, 1200.0, args.pairs)
    with tempfile.TemporaryDirectory() as folder:
        out = tuner.tune(task, Journal(Path(folder) / "j.jsonl", tuner.question(task)), NoProgress(),
                         lambda line: print(f"  {line}", file=sys.stderr, flush=True))
        claimed = out.ratio
        print(f"{environment()['cpu']}, {date.today()}; {' '.join([args.profile.name, *overrides])}, "
              f"noise {args.noise}, objective {args.objective}")
        if claimed is None or not out.better:
            print(f"nothing is surely better than the start profile ({out.runs} runs): nothing is written")
            return
        written = Path(folder) / "tuned.yaml"
        write_winner(out, written, written.with_suffix(".json"))
        again = replace(conditions, workload=replace(workload, seed=workload.seed + NEW_REQUESTS))
        start = parse_target(str(args.profile), overrides)
        found = compare_targets([start, parse_target(str(written))], again, args.pairs)
    ratio = tuner.cost_ratio(task, found.runs)
    if ratio is None:
        sys.exit("a run of the second comparison failed: nothing can be said")
    kept = ratio.high < 1 and ratio.low <= claimed.high and claimed.low <= ratio.high
    print(f"written: {tuner.name_of(out.point)}")
    print(f"  claims  x {claimed.ratio:.3f} ({claimed.low:.3f} - {claimed.high:.3f}, {claimed.pairs} pairs)")
    print(f"  again   x {ratio.ratio:.3f} ({ratio.low:.3f} - {ratio.high:.3f}, {ratio.pairs} pairs): "
          + ("kept" if kept else "NOT kept"))
    for row in found.results[0].rows:
        if row.base is not None and row.other is not None:
            print(f"  {row.metric.name}: {row.base:.1f} -> {row.other:.1f} {row.metric.unit}")


if __name__ == "__main__":
    main()
