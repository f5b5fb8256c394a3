"""Random faults for as long as you like, and a table at the end.

    PYTHONPATH=tests .venv/bin/python -m chaos [--minutes 120 | --faults 200] [--seed N]

Serves the quick-start model with the real engine (found or built, as ``llamaops up`` would) and breaks one thing after
another: signals to the engine, refused starts, a full disk, a memory limit, reloads good and bad, clock jumps, slow and
dead clients. After each it awaits that requests are answered and nothing is left behind. Ends with 1 at the first
promise that does not hold. As root it breaks more (disk, memory); what is left out is listed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from running import LLAMAOPS, QUICKSTART

from chaos.run import Report, run
from chaos.world import Broken, World


def _ask(*words: str) -> str:
    return subprocess.run([*LLAMAOPS, *words], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> int:
    """Run and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    _ask("engine", "build")
    engine, model = _ask("engine", "locate"), _ask("model", "pull", str(QUICKSTART))
    until = time.monotonic() + args.minutes * 60 if args.minutes else None

    def enough(report: Report) -> bool:
        if report.faults % 25 == 0:
            print(f"{report.faults} faults, {report.outcomes}", file=sys.stderr, flush=True)
        return time.monotonic() > until if until else report.faults >= args.faults

    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        try:
            print(run(World(Path(folder), engine, model), args.seed, enough).table())
        except Broken as exc:
            print(f"broken: {exc}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
