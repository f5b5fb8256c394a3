"""What llamaops adds to a start: `llamaops up` against llama-server started by hand, in turn, everything cached.

    .venv/bin/python benchmarks/startup.py [--runs 15]

By hand means the same llama-server with the same arguments (context, slots, threads: they decide how long it loads), on
a loopback port, without the wrappers. Each run is timed from exec until the server answers a health probe with 200,
polled every 5 ms. llamaops is ready only after one token was generated, and that is in its time. Prints a table and the
difference of medians.
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


def time_start(argv: list[str], port: int) -> float:
    """Return the seconds from exec to the first healthy answer."""
    started = time.perf_counter()
    with serving(argv, port, every_s=0.005):
        return time.perf_counter() - started


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--runs", type=int, default=15)
    runs = args.parse_args().runs
    ask("engine", "build")
    ask("model", "pull", PROFILE)
    times: dict[str, list[float]] = {"llama-server by hand": [], "llamaops up": []}
    for _ in range(runs):
        port = free_port()
        times["llama-server by hand"].append(time_start(by_hand(port), port))
        port = free_port()
        times["llamaops up"].append(time_start(up(port), port))
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, {date.today()}, {runs} runs each, in turn\n")
    print(f"{'exec to healthy':<24}{'median ms':>10}{'min':>8}{'max':>8}")
    for name, values in times.items():
        print(f"{name:<24}{statistics.median(values) * 1e3:>10.0f}{min(values) * 1e3:>8.0f}{max(values) * 1e3:>8.0f}")
    hand_ms, ours_ms = (statistics.median(v) * 1e3 for v in times.values())
    print(f"\nadded by llamaops: {ours_ms - hand_ms:.0f} ms (ratio {ours_ms / hand_ms:.2f})")


if __name__ == "__main__":
    main()
