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
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROFILE = str(ROOT / "examples" / "quickstart.yaml")
LLAMAOPS = [str(Path(sys.executable).with_name("llamaops"))]


def output(*args: str) -> str:
    return subprocess.run([*LLAMAOPS, *args], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def by_hand(port: int) -> list[str]:
    """Return the planned command without its wrappers, listening on ``port``."""
    argv: list[str] = json.loads(output("plan", PROFILE, "--json"))["launch"]["argv"]
    argv = argv[next(i for i, word in enumerate(argv) if word.endswith("llama-server")) :]
    for flag, value in (("--host", "127.0.0.1"), ("--port", str(port))):
        argv[argv.index(flag) + 1] = value
    return argv


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def healthy(port: int, path: str) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            return sock.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def time_start(argv: list[str], port: int, path: str, env: dict[str, str]) -> float:
    started = time.perf_counter()
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not healthy(port, path):
            if process.poll() is not None:
                sys.exit(f"{argv[0]} ended with {process.returncode}")
            time.sleep(0.005)
        return time.perf_counter() - started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--runs", type=int, default=15)
    runs = args.parse_args().runs
    output("engine", "build")
    output("model", "pull", PROFILE)
    runtime = tempfile.mkdtemp(prefix="llo-")
    env = os.environ | {"XDG_RUNTIME_DIR": runtime}
    times: dict[str, list[float]] = {"llama-server by hand": [], "llamaops up": []}
    try:
        for _ in range(runs):
            port = free_port()
            times["llama-server by hand"].append(time_start(by_hand(port), port, "/health", env))
            port = free_port()
            ours = [*LLAMAOPS, "up", PROFILE, "--set", f"serve.port={port}"]
            times["llamaops up"].append(time_start(ours, port, "/readyz", env))
    finally:
        shutil.rmtree(runtime, ignore_errors=True)
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, {date.today()}, {runs} runs each, in turn\n")
    print(f"{'exec to healthy':<24}{'median ms':>10}{'min':>8}{'max':>8}")
    for name, values in times.items():
        print(f"{name:<24}{statistics.median(values) * 1e3:>10.0f}{min(values) * 1e3:>8.0f}{max(values) * 1e3:>8.0f}")
    hand_ms, ours_ms = (statistics.median(v) * 1e3 for v in times.values())
    print(f"\nadded by llamaops: {ours_ms - hand_ms:.0f} ms (ratio {ours_ms / hand_ms:.2f})")


if __name__ == "__main__":
    main()
