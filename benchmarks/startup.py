"""What llamaops adds to a start: `llamaops up` against llama-server started by hand, in turn, everything cached.

    .venv/bin/python benchmarks/startup.py [--runs 15]

By hand means the same llama-server with the same arguments (context, slots, threads: they decide how long it loads), on
a loopback port, without the wrappers. Each run is timed from exec until the server answers a health probe with 200,
polled every 5 ms. llamaops is ready only after one token was generated, and that is in its time. Prints
medians, and what llamaops adds in all and from the moment that everything is prepared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from datetime import date

from servers import PROFILE, ask, free_port, serving, up


def by_hand(port: int) -> list[str]:
    """Return the planned command without its wrappers, listening on ``port``."""
    argv: list[str] = json.loads(ask("plan", PROFILE, "--json"))["launch"]["argv"]
    argv = argv[next(i for i, word in enumerate(argv) if word.endswith("llama-server")) :]
    for flag, value in (("--host", "127.0.0.1"), ("--port", str(port))):
        argv[argv.index(flag) + 1] = value
    return argv


def time_start(argv: list[str], port: int, rows: list[list[float]]) -> None:
    """Add the seconds from exec to the first healthy answer and, of llamaops, from spawning the engine to ready."""
    started = time.perf_counter()
    with serving(argv, port, every_s=0.005) as env:
        rows[0].append(time.perf_counter() - started)
        if len(rows) > 1:
            history = json.loads(ask("status", "quickstart", "--json", env=env))["history"]
            rows[1].append(history[1]["at"] - history[0]["at"])


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--runs", type=int, default=15)
    runs = args.parse_args().runs
    ask("engine", "build")
    ask("model", "pull", PROFILE)
    hand: list[float] = []
    whole: list[float] = []
    spawned: list[float] = []
    for _ in range(runs):
        port = free_port()
        time_start(by_hand(port), port, [hand])
        port = free_port()
        time_start(up(port), port, [whole, spawned])
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, {date.today()}, {runs} runs each, in turn\n")
    print(f"{'ms':<46}{'median':>8}{'min':>8}{'max':>8}{'over by hand':>14}")
    for name, values in (("llama-server by hand: exec to healthy", hand),
                         ("llamaops: all is there, engine spawned to ready", spawned),
                         ("llamaops: exec to ready", whole)):
        middle = statistics.median(values)
        print(f"{name:<48}{middle * 1e3:>6.0f}{min(values) * 1e3:>8.0f}{max(values) * 1e3:>8.0f}"
              f"{(middle - statistics.median(hand)) * 1e3:>+14.0f}")


if __name__ == "__main__":
    main()
