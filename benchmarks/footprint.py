"""What llamaops itself costs beside the engine: memory, CPU time, threads and descriptors of its one process.

    .venv/bin/python benchmarks/footprint.py [--seconds 60] [--requests 200]

Serves the quick-start profile and looks at the supervisor's process: idle and unwatched, after requests, and while one
stream after another is relayed. The engine is not counted. The project's own limits: 60 MB of memory, 0.5 % of a CPU
when idle.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import date

import httpx
import psutil
from servers import PROFILE, ask, free_port, serving, up

UNWATCHED_S = 15.0
"""After a question for its status, it looks at the machine for a while, for the asker may ask again."""


def measure(process: psutil.Process, seconds: float, work: Callable[[], object]) -> str:
    """Do ``work`` over and over for so long; return memory, CPU share, threads and descriptors as one line."""
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    while time.monotonic() < began + seconds:
        work()
    share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
    rss = process.memory_info().rss / 1e6
    return f"{rss:>8.1f} MB{share * 100:>9.2f} %{process.num_threads():>9}{process.num_fds():>13}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args()
    ask("engine", "build")
    ask("model", "pull", PROFILE)
    port = free_port()
    with serving(up(port), port) as env, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        process = psutil.Process(json.loads(ask("status", "quickstart", "--json", env=env))["llamaops_pid"])

        def complete(tokens: int) -> None:
            body = {"prompt": "Once", "max_tokens": tokens, "stream": True, "ignore_eos": True}
            client.post("/v1/completions", json=body).raise_for_status()

        print(f"{platform.machine()}, {os.cpu_count()} CPUs, {date.today()}\n")
        print(f"{'llamaops':<28}{'memory':>11}{'of a CPU':>11}{'threads':>9}{'descriptors':>13}")
        time.sleep(UNWATCHED_S)
        print(f"{'idle after the start':<28}{measure(process, args.seconds, lambda: time.sleep(1))}")
        for _ in range(args.requests):
            complete(1)
        time.sleep(UNWATCHED_S)
        print(f"{f'idle after {args.requests} requests':<28}{measure(process, args.seconds, lambda: time.sleep(1))}")
        print(f"{'one stream at a time':<28}{measure(process, args.seconds, lambda: complete(100))}")


if __name__ == "__main__":
    main()
