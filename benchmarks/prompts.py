"""Other people's prompts: four streams decode while another client sends a 400-token prompt every 0.6 s.

    .venv/bin/python benchmarks/prompts.py [--seconds 30] [--runs 3] [--model FILE] [--engine FILE]

llamaops against llama-server as a person would start it (`llama-server -m FILE -np 5 -c …`), in turn. Without --model
the quick-start model is used. The other client waits for its first token before it sends the next prompt. The streams
are read at real-time priority where that is permitted, so that the clients' own waiting for a CPU is not counted.
Prints the victims' gap between tokens and the attacker's time to first token: the price.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import re
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from servers import PROFILE, ask, free_port, of_file, serving, up

VICTIMS, PROMPT_TOKENS, EVERY_S, CONTEXT = 4, 400, 0.6, 2048


@dataclass
class Seen:
    """What the clients of one run saw, milliseconds."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def stream(port: int, prompt: str, tokens: int) -> Iterator[float]:
    """Ask for a completion and yield the arrival time of each event."""
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0.8,
                       "cache_prompt": False}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        while data := sock.recv(65536):
            yield from [time.monotonic()] * len(re.findall(rb"data: \{", data))


def victim(port: int, seen: Seen, until: float) -> None:
    """Stream until the run ends; a finished answer is followed by the next, and their gap does not count."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))  # of this thread
    while time.monotonic() < until:
        times = list(itertools.takewhile(lambda at: at < until, stream(port, "Tell a story.", CONTEXT - 100)))
        seen.gaps += [1000 * (b - a) for a, b in itertools.pairwise(times)]


def attack(port: int, seen: Seen, until: float) -> None:
    """Send a fresh prompt every 0.6 s, or once the last one has its first token."""
    while (started := time.monotonic()) < until:
        words = " ".join(random.choice(("sea", "stone", "lamp", "bird", "wind")) for _ in range(PROMPT_TOKENS))
        for at in stream(port, words, 2):
            seen.first.append(1000 * (at - started))
            break
        time.sleep(max(0.0, started + EVERY_S - time.monotonic()))


def command(side: str, port: int, engine: str, model: str) -> list[str]:
    """Return the command line of one side."""
    if side == "llamaops":
        return up(port, serve__slots=VICTIMS + 1, model__context=CONTEXT, **of_file(engine, model))
    return [engine, "-m", model, "--port", str(port), "-np", str(VICTIMS + 1), "-c", str(CONTEXT * (VICTIMS + 1))]


def one_run(side: str, engine: str, model: str, seconds: float) -> Seen:
    seen, port = Seen(), free_port()
    with serving(command(side, port, engine, model), port):
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=victim, args=(port, seen, until)) for _ in range(VICTIMS)]
        for thread in threads:
            thread.start()
        attack(port, seen, until)
        for thread in threads:
            thread.join()
    return seen


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--seconds", type=float, default=30)
    args.add_argument("--runs", type=int, default=3)
    args.add_argument("--engine")
    args.add_argument("--model")
    options = args.parse_args()

    engine, model = options.engine or ask("engine", "locate"), options.model or ask("model", "pull", PROFILE)
    sides: dict[str, list[Seen]] = {"llamaops": [], "plain": []}
    for _ in range(options.runs):
        for side in random.sample(list(sides), 2):
            sides[side].append(one_run(side, engine, model, options.seconds))
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, {date.today()}, {Path(model).name}; {options.runs} runs of "
          f"{options.seconds:.0f} s a side; {VICTIMS} streams, a prompt of {PROMPT_TOKENS} words every {EVERY_S} s\n")
    print(f"{'':<10}{'gap p50 ms':>12}{'gap p99 ms':>12}{'worst run':>11}{'prompt TTFT p50 ms':>20}")
    for side, runs in sides.items():
        p50, p99 = ([quantile(r.gaps, q) for r in runs] for q in (0.5, 0.99))
        first = statistics.median([t for r in runs for t in r.first])
        print(f"{side:<10}{statistics.median(p50):>12.1f}{statistics.median(p99):>12.1f}{max(p99):>11.1f}{first:>20.0f}")


if __name__ == "__main__":
    main()
