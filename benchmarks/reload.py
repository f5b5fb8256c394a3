"""What twenty streaming clients notice of a reload that brings a new engine.

    .venv/bin/python benchmarks/reload.py [--reloads 5] [--clients 20] [--max-tokens 32]

Every client asks for the next stream as soon as it has one. Measured for as long without a reload, with memory for two
engines (the new one starts beside the old one), and with memory for one (the old one's streams end first, then it stops
and the new one starts). Printed for each: answers, failures, the longest time in which no client got a token, the
longest gap inside one stream, and the longest wait for a first token. What came is kept in
benchmarks/results/reload.json, or where ``--out`` says. The exit code is 1 when a stream failed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import httpx
from servers import LLAMAOPS, PROFILE, ask, free_port, serving

RESULTS = Path(__file__).with_name("results") / "reload.json"
BETWEEN_S = 2.0
CALM_S = 20.0


@dataclass
class Seen:
    """When tokens came (monotonic seconds): of all clients together, and what single ones waited, in seconds."""

    arrivals: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    answers: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds."""

    what: str
    reloads: int
    seconds: float
    answers: int
    failures: int
    longest_silence_ms: float
    longest_gap_ms: float
    longest_wait_ms: float


async def stream(http: httpx.AsyncClient, body: Mapping[str, object], seen: Seen) -> None:
    """Ask once and note when each event came."""
    before, first, last = time.monotonic(), True, b""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for chunk in response.aiter_bytes():
            last = chunk if chunk.strip() and not chunk.startswith(b":") else last
            if not chunk.startswith(b"data: {"):
                continue
            now = time.monotonic()
            seen.arrivals.append(now)
            (seen.waits if first else seen.gaps).append(now - before)
            before, first = now, False
    if response.status_code == 200 and last.endswith(b"data: [DONE]\n\n"):
        seen.answers += 1
    else:
        seen.failures.append(f"{response.status_code} {last[-200:]!r}")


async def client(http: httpx.AsyncClient, body: Mapping[str, object], seen: Seen, done: asyncio.Event) -> None:
    while not done.is_set():
        try:
            await stream(http, body, seen)
        except httpx.HTTPError as exc:
            seen.failures.append(repr(exc))


async def watch(url: str, clients: int, tokens: int, during: Callable[[], object]) -> tuple[Seen, float]:
    """Let the clients ask while ``during`` runs in a thread; return what they saw and how long that took."""
    seen, done = Seen(), asyncio.Event()
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as http:
        tasks = [asyncio.create_task(client(http, body, seen, done)) for _ in range(clients)]
        while len(seen.arrivals) < 2 * clients * tokens:  # the start, when the queue fills, is not what is measured
            await asyncio.sleep(0.05)
        seen.arrivals.clear()
        seen.gaps.clear()
        seen.waits.clear()
        began = time.monotonic()
        try:
            await asyncio.to_thread(during)
        finally:
            done.set()
            await asyncio.gather(*tasks)
        seconds = time.monotonic() - began
    return seen, seconds


class Served:
    """A profile of its own, which another ``turn`` turns into one that needs another engine."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.path, self.port, self.limit, self.turn = folder / "reload.yaml", free_port(), limit, 0
        self.renew()

    def renew(self) -> None:
        """Write it for the next turn."""
        self.turn += 1
        text = re.sub(r"(?m)^  port: .*$", f"  port: {self.port}", Path(PROFILE).read_text())
        self.path.write_text(f"{text}name: reload\nengine: {{env: {{TURN: '{self.turn}'}}}}\n"
                             f"memory: {{limit: {self.limit or 'auto'}}}\n")

    def steps(self, reloads: int, env: Mapping[str, str]) -> None:
        """Wait, and reload after each wait."""
        wanted = "a new engine serves" if self.limit is None else "the engine was stopped and a new one serves"
        for _ in range(reloads):
            time.sleep(BETWEEN_S)
            self.renew()
            done = subprocess.run([*LLAMAOPS, "reload", "reload"], env=env, stderr=subprocess.PIPE, text=True)
            if done.stderr.strip() != wanted:
                raise RuntimeError(f"wanted: {wanted}; it said: {done.stderr}")
        time.sleep(BETWEEN_S if reloads else CALM_S)


def measure(what: str, served: Served, reloads: int, clients: int, tokens: int) -> Row:
    """Serve, let the clients ask, reload, and return what they noticed."""
    with serving([*LLAMAOPS, "up", str(served.path)], served.port) as env:
        url = f"http://127.0.0.1:{served.port}"
        seen, seconds = asyncio.run(watch(url, clients, tokens, lambda: served.steps(reloads, env)))
    for failure in seen.failures[:5]:
        print(failure, file=sys.stderr)
    silences = [b - a for a, b in itertools.pairwise(sorted(seen.arrivals))]
    longest = [round(1000 * max(values, default=0.0), 1) for values in (silences, seen.gaps, seen.waits)]
    return Row(what, reloads, round(seconds, 1), seen.answers, len(seen.failures), *longest)


def main() -> None:
    """Measure three times and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reloads", type=int, default=5)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone = Served(Path(folder), None)
        needed = int(json.loads(ask("plan", str(alone.path), "--json"))["memory"]["total_bytes"])
        cases = (("no reload", None, 0), ("beside the old engine", None, args.reloads),
                 ("after the old engine", needed * 11 // 10, args.reloads))
        rows = [measure(what, Served(Path(folder), limit), reloads, args.clients, args.max_tokens)
                for what, limit, reloads in cases]
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}"
    document = {"machine": machine, "date": date.today().isoformat(), "clients": args.clients,
                "rows": [asdict(row) for row in rows]}
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{machine}, {document['date']}, {args.clients} clients\n")
    print("| | reloads | s | answers | failures | longest silence ms | longest gap in a stream ms | longest wait s |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        print(f"| {r.what} | {r.reloads} | {r.seconds} | {r.answers} | {r.failures} | {r.longest_silence_ms:.0f} "
              f"| {r.longest_gap_ms:.0f} | {r.longest_wait_ms / 1000:.1f} |")
    sys.exit(any(r.failures for r in rows))


if __name__ == "__main__":
    main()
