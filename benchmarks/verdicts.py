"""How often `llamaops bench compare` gives a verdict where there is a difference, and where there is none.

    .venv/bin/python benchmarks/verdicts.py [--times 20] [--slower 1.1] [--noise cpu:1]

A server that streams by script is compared with itself and with one whose delays are all longer by a factor, each so
many times. Wanted: no verdict in at least 19 of 20 with itself, "worse" in at least 19 of 20 with the other.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from llamaops.bench.compare import compare_targets
from llamaops.bench.load import Server
from llamaops.bench.noise import Noise
from llamaops.bench.run import Conditions
from llamaops.bench.targets import parse_target
from llamaops.core.figures import Slo
from llamaops.core.workload import Lengths, Workload

STUB = Path(__file__).parents[1] / "tests" / "bench" / "truth_stub.py"


def stub(slower: float) -> str:
    return f"cmd:{sys.executable} {STUB} --port {{port}} --prefill-ms 40 --token-ms 20 --stall-ms 30 --slow {slower}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--slower", type=float, default=1.1)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--noise", type=Noise.parse, default=Noise())
    args = parser.parse_args()
    for name, slower in (("itself", 1.0), (f"one {args.slower} times slower", args.slower)):
        said: Counter[str] = Counter()
        for number in range(args.times):
            workload = Workload(2, None, 4, None, 0, Lengths(8), Lengths(12), seed=1 + 100 * number)
            conditions = Conditions(workload, Slo(), args.noise, "session", Server("", 0))
            found = compare_targets([parse_target(stub(1.0)), parse_target(stub(slower))], conditions, args.pairs)
            verdicts = {row.verdict for row in found.results[0].rows if row.verdict}
            said[" and ".join(sorted(verdicts)) or "no verdict"] += 1
        print(f"{name}: " + ", ".join(f"{word} {count}" for word, count in said.most_common()), flush=True)
    print(f"({args.times} comparisons each, {args.pairs} pairs of runs of 4 answers of 12 tokens, noise {args.noise})")


if __name__ == "__main__":
    main()
