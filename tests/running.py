"""A running llamaops as a test sees it, and ways to wait for what must come true."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from llamaops.dirs import find_dirs

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
LLAMAOPS = [sys.executable, "-m", "llamaops"]


def await_true(check: Callable[[], Any], *, what: str, within: float = 60, every: float = 0.02) -> Any:
    """Return the first true value of ``check``, or fail after ``within`` seconds; a slow machine must do."""
    deadline = time.monotonic() + within
    while True:
        if value := check():
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within} s: {what}")
        time.sleep(every)


def descendants(pid: int) -> list[psutil.Process]:
    """Return the living children of a process, and theirs."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def gone(processes: list[psutil.Process]) -> bool:
    """Tell whether none of these processes lives (a zombie is dead)."""
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes if p.is_running())


@dataclass
class Running:
    """A `llamaops up` process and what it said."""

    process: subprocess.Popen[str]
    url: str
    stderr: Path
    env: dict[str, str]

    def engine(self) -> psutil.Process:
        """Return the llama-server process."""
        return next(p for p in descendants(self.process.pid) if p.name() == "llama-server")

    def cli(self, *args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run another llamaops command against the same folders."""
        return subprocess.run([*LLAMAOPS, *args], env=self.env, capture_output=True, text=True, timeout=timeout)

    def status(self) -> dict[str, Any]:
        """Return ``llamaops status --json`` of this instance."""
        done = self.cli("status", "quickstart", "--json")
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def engine_client(self) -> httpx.Client:
        """Return a client that talks to the engine past the relay."""
        argv = self.engine().cmdline()
        socket = argv[argv.index("--host") + 1]
        return httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://engine", timeout=120)


@contextlib.contextmanager
def streaming(running: Running, tokens: int = 4000, key: str = "none") -> Iterator[None]:
    """Keep one stream going, read by a client that goes away at the end."""
    body = {"prompt": "Once upon a time", "stream": True, "max_tokens": tokens, "ignore_eos": True}
    ask = ["curl", "-sN", "--max-time", "280", f"{running.url}/v1/completions", "-d", json.dumps(body)]
    with subprocess.Popen([*ask, "-H", f"Authorization: Bearer {key}"], stdout=subprocess.DEVNULL) as reader:
        try:
            yield
        finally:
            reader.kill()


Up = Callable[..., Running]


def with_own_models(env: dict[str, str], folder: Path) -> dict[str, str]:
    """Return an environment in which models are made anew, while what takes minutes to have is the user's own."""
    users, cache = find_dirs(os.environ).cache, folder / "cache"
    for name in ("engines", "downloads", "converters", "calibration", "models/wheel"):
        (users / name).mkdir(parents=True, exist_ok=True)
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(users / name)
    return env | {"LLAMAOPS_CACHE": str(cache)}
