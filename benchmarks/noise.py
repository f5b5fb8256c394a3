"""One stream while stress-ng fights for every CPU: llamaops with and without permission, and plain llama-server.

    sudo .venv/bin/python benchmarks/noise.py [--runs 6] [--seconds 20] [--where quiet,session,autogroup,cgroup]

Needs root (to lift the measuring client, to place the noise, and to drop privileges for one side), stress-ng, and a
checkout and Python that other users can read. Three arrangements: noise in the same session, in another session
(autogroup), and server and noise each in a cgroup of its own, as services are. Runs of the sides are interleaved; every
run starts its server anew. Two clients stream side by side in each run: one at SCHED_FIFO 99, so that its own waiting
is not counted, and an ordinary one. The quiet rows come first. Prints, for each side, the median and the worst run:
tokens per second of one stream and the 99th percentile of the gap between events; then what that is of the quiet rows,
against what is aimed at. A fair share is half: one noisy worker on each CPU. With ``--results FILE`` each run is kept
there, and a run that was interrupted goes on where it was.
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
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from servers import PROFILE, ask, free_port, of_file, serving, up

NOBODY = 65534
PROMPT = "Tell me a long story about a lighthouse keeper, his daughter and the sea. " * 3
SIDES = ("llamaops", "unprivileged", "plain")
CLIENTS = ("client at FIFO 99", "ordinary client")
FAIR_SHARE = 0.5

Run = tuple["Result", "Result"]
Runs = dict[str, dict[str, list[Run]]]
"""Arrangement → side → its runs, each as the client at FIFO 99 and as the ordinary one saw it."""


@dataclass(frozen=True)
class Aim:
    """The least rate of the median and of the worst run, and the largest gap, each as a share of quiet."""

    rate: float
    worst_rate: float
    p99: tuple[float, float]


AIMS = {"llamaops": Aim(0.85, 0.75, (1.5, 2.5)),
        "unprivileged": Aim(0.75 * FAIR_SHARE, 0.60 * FAIR_SHARE, (4.0, 4.0))}


@dataclass
class Result:
    """One run as one client saw it."""

    rate: float
    p99_ms: float


# ---- the measuring client: a process of its own, so that its priority is its own ----


def client(port: int, seconds: float) -> None:
    """Stream one endless answer and print the arrival time of each event."""
    body = json.dumps({"prompt": PROMPT, "n_predict": 100000, "max_tokens": 100000, "stream": True, "ignore_eos": True,
                       "temperature": 0.8, "seed": 1, "cache_prompt": False}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    times: list[float] = []
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(head.encode() + body)
        sock.settimeout(seconds + 60)
        end = None
        while end is None or time.monotonic() < end:
            data = sock.recv(65536)
            now = time.monotonic()
            if not data:
                break
            count = len(re.findall(rb"data: \{", data))
            if count and end is None:
                end = now + seconds
            times += [now] * count
    print(json.dumps(times))


def measure(port: int, seconds: float) -> tuple[Result, Result]:
    """Run two clients side by side, one at SCHED_FIFO 99 and an ordinary one, and reduce what each saw."""
    argv = [sys.executable, __file__, "--client", str(port), str(seconds)]
    high, ordinary = (subprocess.Popen([*wrap, *argv], stdout=subprocess.PIPE, text=True)
                      for wrap in (["chrt", "-f", "99"], []))
    return seen_by(high, seconds), seen_by(ordinary, seconds)


def seen_by(client: subprocess.Popen[str], seconds: float) -> Result:
    """Wait for a client and reduce the arrival times that it prints."""
    return reduce(json.loads(client.communicate(timeout=seconds + 120)[0]), seconds)


def reduce(times: list[float], seconds: float) -> Result:
    """Turn arrival times into a rate and the 99th percentile of the gaps; hardly any event is one long gap."""
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    if len(gaps) < 3:
        return Result(len(times) / seconds, 1000 * seconds)
    return Result(len(gaps) / (times[-1] - times[0]), 1000 * gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))])


# ---- the servers ----


def command(side: str, port: int, engine: str, model: str) -> list[str]:
    """Return the command line of one side."""
    if side == "plain":
        return [engine, "-m", model, "--port", str(port)]
    ours = up(port, **of_file(engine, model))
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--bounding-set=-all"]
    return ours if side == "llamaops" else [*drop, *ours]


# ---- the noise ----


@contextlib.contextmanager
def noise(where: str) -> Iterator[None]:
    """Run one stress-ng worker for each CPU: in this session, in another one, or in another cgroup."""
    argv = ["stress-ng", "--cpu", str(os.cpu_count()), "--quiet"]
    with cgroup("noise") if where == "cgroup" else contextlib.nullcontext([]) as enter:
        process = subprocess.Popen([*enter, *argv], start_new_session=where != "session")
        try:
            time.sleep(1)  # until every worker has started; there is nothing to ask
            yield
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def cgroup(name: str) -> Iterator[list[str]]:
    """Make a cgroup of default weight (v2, or the cpu controller of v1); yield the words that run a command in it."""
    base = Path("/sys/fs/cgroup")
    group = (base if (base / "cgroup.controllers").exists() else base / "cpu") / f"llamaops-bench-{name}"
    group.mkdir(exist_ok=True)
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        while (group / "cgroup.procs").read_text().strip():
            time.sleep(0.1)
        group.rmdir()


# ---- the runs ----


def one_run(side: str, where: str | None, engine: str, model: str, seconds: float) -> Run:
    """Start a side, add the noise, measure with both clients."""
    port, user = free_port(), NOBODY if side == "unprivileged" else None
    around = noise(where) if where else contextlib.nullcontext()
    with cgroup("server") if where == "cgroup" else contextlib.nullcontext([]) as enter:
        argv = [*enter, *command(side, port, engine, model)]
        with serving(argv, port, user=user, new_session=where != "session"), around:
            return measure(port, seconds)


def row(name: str, runs: list[Run]) -> str:
    """Format the median and the worst of one side's runs, for the high and the ordinary client."""
    cells = []
    for results in zip(*runs, strict=True):
        rates, gaps = [r.rate for r in results], [r.p99_ms for r in results]
        cells.append(f"{statistics.median(rates):>7.1f}{min(rates):>7.1f}{statistics.median(gaps):>9.1f}{max(gaps):>9.1f}")
    return f"{name:<14}" + "  |".join(cells)


def verdicts(done: Runs) -> Iterator[str]:
    """Yield each side's medians as a share of its own quiet ones, and whether that is what is aimed at."""
    quiet = done["quiet"]
    for where, client in itertools.product(done, (0, 1)):
        for side, aim in AIMS.items():
            rates, gaps = seen(done[where][side], client)
            quiet_rates, quiet_gaps = seen(quiet["plain" if where == "quiet" else side], client)
            of_quiet = statistics.median(quiet_rates)
            rate, worst = statistics.median(rates) / of_quiet, min(rates) / of_quiet
            gap = statistics.median(gaps) / statistics.median(quiet_gaps)
            held = rate >= 0.97 if where == "quiet" else (
                rate >= aim.rate and worst >= aim.worst_rate and gap <= aim.p99[client])
            aimed = "0.97 of plain" if where == "quiet" else (
                f"{aim.rate:.2f}, {aim.worst_rate:.2f}, {aim.p99[client]:.1f}")
            yield (f"{where:<10}{CLIENTS[client]:<18}{side:<13}rate {rate:.2f}, worst {worst:.2f}, p99 {gap:.2f} of "
                   f"quiet: {'holds' if held else 'MISSES'} {aimed}")


def seen(runs: list[Run], client: int) -> tuple[list[float], list[float]]:
    """Return the rates and the gaps that one of the two clients saw."""
    return [run[client].rate for run in runs], [run[client].p99_ms for run in runs]


def load(file: Path | None) -> Runs:
    """Return the runs that an earlier call kept."""
    if file is None or not file.exists():
        return {}
    return {where: {side: [(Result(**high), Result(**ordinary)) for high, ordinary in runs]
                    for side, runs in sides.items()} for where, sides in json.loads(file.read_text()).items()}


def keep(file: Path | None, done: Runs) -> None:
    """Write all runs where they outlive an interruption."""
    if file is not None:
        file.write_text(json.dumps(done, default=asdict))


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--runs", type=int, default=6)
    args.add_argument("--seconds", type=float, default=20)
    args.add_argument("--where", default="quiet,session,autogroup,cgroup")
    args.add_argument("--engine")
    args.add_argument("--model")
    args.add_argument("--results", type=Path)
    options = args.parse_args()

    with tempfile.TemporaryDirectory(prefix="llo-noise-") as folder:
        Path(folder).chmod(0o755)
        # Copies that every user can read: the unprivileged side has no other way to them.
        found = Path(options.engine or ask("engine", "locate"))
        engine = shutil.copy(found, folder)
        shutil.copy(found.with_name("llama-bench"), folder)
        model = shutil.copy(options.model or ask("model", "pull", PROFILE), folder)
        print(f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}, {date.today()}; "
              f"{options.runs} runs of {options.seconds:.0f} s a side and client, interleaved; {Path(model).name}")
        print(f"{'':<14}" + "  |".join(f"{client:^32}" for client in CLIENTS))
        print(f"{'':<14}" + "  |".join([f"{'tok/s':>7}{'worst':>7}{'p99 ms':>9}{'worst':>9}"] * 2))
        done = load(options.results)
        for where in options.where.split(","):
            sides = done.setdefault(where, {side: [] for side in SIDES})
            while missing := [side for side in SIDES if len(sides[side]) < options.runs]:
                least = min(len(sides[side]) for side in missing)
                side = random.choice([side for side in missing if len(sides[side]) == least])
                sides[side].append(one_run(side, None if where == "quiet" else where, engine, model, options.seconds))
                keep(options.results, done)
            print(f"-- {'quiet' if where == 'quiet' else f'noise: {where}'}")
            for side, runs in sides.items():
                print(row(side, runs), flush=True)
    if "quiet" in done:
        print(*verdicts(done), sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client(int(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
