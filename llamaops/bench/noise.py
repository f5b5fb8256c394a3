"""Competitors on purpose: CPU, memory and disk load beside a bench, always ended with it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamaops.child import end_group
from llamaops.errors import EngineFailed, NotPermitted

Where = Literal["session", "same", "cgroup"]
"""In a session of its own (as another terminal or service would be), in ours, or in a cgroup of its own."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How many workers of each kind; ``load`` is how much of a CPU each ``cpu`` worker takes, percent. False: none."""

    cpu: int = 0
    load: int = 100
    mem: int = 0
    io: int = 0

    @classmethod
    def parse(cls, text: str) -> Noise:
        """Read ``cpu:2``, ``cpu:2:50%,mem:1,io:1``, or ``none``. Raises ValueError."""
        found: dict[str, int] = {}
        for part in () if text.strip() in ("", "none") else text.split(","):
            match = _PART.fullmatch(part.strip())
            if match is None or match[1] in found or (match[3] and match[1] != "cpu"):
                raise ValueError(f"{part.strip()!r} is no noise: write cpu:N[:LOAD%], mem:N, io:N, each once")
            found[match[1]] = int(match[2])
            if match[3]:
                found["load"] = int(match[3])
        if not 1 <= found.get("load", 100) <= 100:
            raise ValueError("the load of a noise worker is 1% to 100%")
        return cls(**found)

    def __bool__(self) -> bool:
        return bool(self.cpu or self.mem or self.io)

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        load = "" if self.load == 100 else f":{self.load}%"
        parts = [f"cpu:{self.cpu}{load}" if self.cpu else "", f"mem:{self.mem}" if self.mem else "",
                 f"io:{self.io}" if self.io else ""]
        return ",".join(filter(None, parts)) or "none"


_PART = re.compile(r"(cpu|mem|io):([0-9]{1,3})(?::([0-9]{1,3})%)?")
_START_S = 15.0


@contextlib.contextmanager
def making_noise(noise: Noise, where: Where = "session") -> Iterator[None]:
    """Make noise while the context lasts; returns once the workers work, and leaves no process and no file behind.

    stress-ng makes it where it is installed, else a generator of our own. Raises EngineFailed when it does not start,
    NotPermitted when ``cgroup`` was asked for and none can be made.
    """
    if not noise:
        yield
        return
    with contextlib.ExitStack() as stack:
        # Only disk noise writes, and a bench that is killed leaves its folder behind.
        folder = (stack.enter_context(tempfile.TemporaryDirectory(prefix="llamaops-noise-")) if noise.io
                  else tempfile.gettempdir())
        enter = stack.enter_context(_own_cgroup()) if where == "cgroup" else None
        process = _start(noise, folder, own_session=where != "same", enter=enter)
        try:
            _await_work(process, noise)
            yield
        finally:
            end_group(process)


def _start(noise: Noise, folder: str, *, own_session: bool, enter: Path | None) -> subprocess.Popen[bytes]:
    argv = _stress_ng(noise, folder) if shutil.which("stress-ng") else _own(noise, folder)
    if setpriv := shutil.which("setpriv"):
        argv = [setpriv, "--pdeathsig", "TERM", "--", *argv]

    def join() -> None:
        if enter is not None:
            enter.write_text(str(os.getpid()))

    # A group of its own in any case, so that all of it can be ended at once.
    return subprocess.Popen(argv, cwd=folder, start_new_session=own_session, process_group=None if own_session else 0,
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            preexec_fn=join if enter is not None else None)


def _stress_ng(noise: Noise, folder: str) -> list[str]:
    argv = ["stress-ng", "--temp-path", folder, "--quiet", "--timeout", "24h"]
    if noise.cpu:
        argv += ["--cpu", str(noise.cpu), "--cpu-load", str(noise.load)]
    if noise.mem:
        argv += ["--vm", str(noise.mem), "--vm-bytes", "128M"]
    if noise.io:
        argv += ["--hdd", str(noise.io), "--hdd-bytes", "64M"]
    return argv


def _own(noise: Noise, folder: str) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("burn.py")), str(noise), folder]


def _await_work(process: subprocess.Popen[bytes], noise: Noise) -> None:
    """Return when every worker has used some CPU time."""
    import psutil

    wanted, until = noise.cpu + noise.mem + noise.io, time.monotonic() + _START_S
    while True:
        with contextlib.suppress(psutil.Error):
            used = [sum(child.cpu_times()[:2]) for child in psutil.Process(process.pid).children(recursive=True)]
            if sum(seconds > 0.02 for seconds in used) >= wanted:
                return
        if process.poll() is not None or time.monotonic() > until:
            raise EngineFailed("the noise generator does not work", where=" ".join(map(str, process.args)),  # type: ignore[arg-type]  # a list here
                               why=f"exit code {process.returncode}" if process.returncode else "it does nothing",
                               fix="try it by hand, or leave out --noise")
        time.sleep(0.02)


@contextlib.contextmanager
def _own_cgroup() -> Iterator[Path]:
    """Make a cgroup beside our own and yield the file that takes pids; removed afterwards."""
    parent, procs = _cpu_cgroup()
    group = parent / f"llamaops-noise-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as exc:
        raise NotPermitted("can't make a cgroup for the noise", where=str(parent), why=exc.strerror,
                           fix="run as root, or use --noise-in session") from exc
    try:
        yield group / procs
    finally:
        _remove(group)


def _cpu_cgroup() -> tuple[Path, str]:
    """Return the folder in which a sibling of our CPU cgroup can be made (our own, at the root) and its pid file."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") and (v1 := Path(f"/sys/fs/cgroup/{controllers}")).is_dir():
            return _parent(v1, path), "cgroup.procs"
    path = next((p for n, c, p in _cgroup_rows() if n == "0" and not c), "/")
    return _parent(Path("/sys/fs/cgroup"), path), "cgroup.procs"


def _cgroup_rows() -> list[Sequence[str]]:
    return [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]


def _parent(mount: Path, path: str) -> Path:
    return mount if path == "/" else (mount / path.lstrip("/")).parent


def _remove(group: Path) -> None:
    """Remove a cgroup whose last process may be a zombie for a moment yet."""
    until = time.monotonic() + 3
    while True:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
