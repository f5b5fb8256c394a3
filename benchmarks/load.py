"""The two load tests of the articles on the real engine: 50 connections for 30 s, then 5 clients for 10 minutes.

    python benchmarks/load.py [--burst-s 30] [--long-s 600] [--connections 50] [--clients 5] [--max-tokens 16] [--json]

Every connection asks again as soon as it has its answer. Wanted: no failure, and the longest answer at most twice the
mean: what waits must wait about equally long. The start, when the queue fills, counts too. What came is kept in
benchmarks/results/load.json, or where ``--out`` says; 0 seconds leave a load out. The exit code is 1 when an answer
failed, and with ``--strict`` also when one took too long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import httpx
from servers import free_port, serving, up

RATIO = 2.0
"""Longest answer over the mean: at most this."""
RESULTS = Path(__file__).with_name("results") / "load.json"


@dataclass(frozen=True)
class Result:
    """What came of one load; times in seconds."""

    name: str
    connections: int
    seconds: float
    answers: int
    failures: int
    mean_s: float
    longest_s: float
    ratio: float

    def verdict(self) -> str:
        """Say whether it is what is wanted."""
        return "holds" if not self.failures and self.ratio <= RATIO else "MISSES"


async def load(url: str, name: str, connections: int, seconds: float, max_tokens: int) -> Result:
    """Ask over so many connections for so long; what is under way at the end is waited for."""
    took: list[float] = []
    failures: list[str] = []
    end = time.monotonic() + seconds

    async def connection(number: int, client: httpx.AsyncClient) -> None:
        body = {"messages": [{"role": "user", "content": f"Client {number}: say something."}], "temperature": 0,
                "max_tokens": max_tokens, "ignore_eos": True}
        while time.monotonic() < end:
            began = time.monotonic()
            try:
                answer = await client.post("/v1/chat/completions", json=body)
                whole = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == max_tokens
                if not whole:
                    failures.append(f"{answer.status_code} {answer.text[:200]}")
            except httpx.HTTPError as exc:
                failures.append(repr(exc))
            took.append(time.monotonic() - began)

    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await asyncio.gather(*(connection(n, client) for n in range(connections)))
    for failure in failures[:5]:
        print(failure, file=sys.stderr)
    mean = sum(took) / len(took)
    return Result(name, connections, seconds, len(took), len(failures), round(mean, 3), round(max(took), 3),
                  round(max(took) / mean, 2))


def main() -> None:
    """Start the quick-start profile, load it twice and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--burst-s", type=float, default=30)
    parser.add_argument("--long-s", type=float, default=600)
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE")
    args = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    results = []
    # A client without a key counts to the key of nobody: all of them together need the places.
    with serving(up(port), port):
        asyncio.run(load(url, "warm", 2, 0.1, 4))
        loads = (("burst", args.connections, args.burst_s), ("long", args.clients, args.long_s))
        for name, connections, seconds in loads:
            if seconds > 0:
                results.append(asyncio.run(load(url, name, connections, seconds, args.max_tokens)))
    document = {"machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
                "date": date.today().isoformat(), "loads": [asdict(r) | {"verdict": r.verdict()} for r in results]}
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    show(document, results, as_json=args.json)
    if any(r.failures or (args.strict and r.verdict() != "holds") for r in results):
        sys.exit(1)


def show(document: dict[str, object], results: list[Result], *, as_json: bool) -> None:
    """Print a line for each load, or the document."""
    if as_json:
        print(json.dumps(document))
        return
    print(f"{document['machine']}, {document['date']}\n")
    print("| load | connections | s | answers | failures | mean s | longest s | longest / mean | at most 2 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for r in results:
        print(f"| {r.name} | {r.connections} | {r.seconds:g} | {r.answers} | {r.failures} | {r.mean_s:.2f} "
              f"| {r.longest_s:.2f} | {r.ratio:.2f} | {r.verdict()} |")


if __name__ == "__main__":
    main()
