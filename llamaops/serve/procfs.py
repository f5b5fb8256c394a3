"""Processes as /proc shows them (proc(5)), and the end of those that carry our mark."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "LLAMAOPS_INSTANCE"
"""Environment variable of every engine: whose it is. Finds a child that left the group, and the last run's orphan."""


def end_strays(mark: str, session: int | None = None, patience_s: float = 2.0) -> list[int]:
    """Kill every process of this pid namespace that carries ``mark`` or belongs to ``session``; return their pids.

    ``mark`` without a generation means all generations. Blocks until they are gone, at most ``patience_s``.
    """
    killed: list[int] = []
    until = time.monotonic() + patience_s
    while (strays := list(_strays(mark, session))) and time.monotonic() < until:
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # ours to reap only if we are pid 1 or a subreaper
                os.waitpid(pid, os.WNOHANG)
        killed += [pid for pid in strays if pid not in killed]
        time.sleep(0.01)
    return killed


def _strays(mark: str, session: int | None) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    ours = _namespace("self")
    for pid in _pids():
        stat = read_stat(pid)
        if pid == os.getpid() or stat is None or stat.state in "ZX":
            continue
        if (stat.session == session or _is_marked(pid, wanted)) and _namespace(pid) == ours:
            yield pid


def _is_marked(pid: int, wanted: bytes) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(entry == wanted or entry.startswith(wanted + b"#") for entry in environ.split(b"\0"))


def _namespace(pid: int | str) -> str:
    """Return the pid namespace: root sees the processes of containers, which may carry the same mark."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _pids() -> list[int]:
    try:
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class Stat:
    """From /proc/<pid>/stat (proc_pid_stat(5)): state letter, session, CPU seconds used, start in ticks since boot."""

    state: str
    session: int
    cpu_s: float
    started: int


def read_stat(pid: int) -> Stat | None:
    """Read a process's stat line; None when there is no such process (or no /proc)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in parentheses may itself contain spaces and parentheses; fields count from after the last one.
    field = text[text.rindex(")") + 2 :].split()
    return Stat(field[0], int(field[3]), (int(field[11]) + int(field[12])) / os.sysconf("SC_CLK_TCK"), int(field[19]))


def bytes_read(pid: int) -> int:
    """Return what the process has read, from disk or by read calls; 0 where it can't be told."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(": ") for line in lines)
    return int(values.get("rchar", 0)) + int(values.get("read_bytes", 0))


def any_runnable(pid: int) -> bool:
    """Tell whether a thread of the process wants the CPU now: kept from it, it is starved, not frozen."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            stat = (task / "stat").read_text(errors="replace")
            if stat[stat.rindex(")") + 2] == "R":
                return True
    return False


def oom_kills() -> int:
    """Return how many processes of our own memory cgroup the kernel has killed so far; 0 where it can't be told."""
    for file in _oom_counters():
        for entry in _lines(file):
            if entry.startswith("oom_kill "):
                return int(entry.split()[1])
    return 0


def _oom_counters() -> Iterator[Path]:
    """Yield where the count may be: cgroup v2 or v1, by our path, or at the top where a container sees only itself."""
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name = Path("/sys/fs/cgroup"), "memory.events"
        elif "memory" in controllers.split(","):
            folder, name = Path("/sys/fs/cgroup/memory"), "memory.oom_control"
        else:
            continue
        yield from (folder / path.lstrip("/") / name, folder / name)


def reap_orphans(seen: frozenset[int]) -> frozenset[int]:
    """Reap the zombies that were ``seen`` before and return those there are now.

    As pid 1 of a container we inherit every orphan. A child of our own is waited for at once by who started it, so one
    that is still a zombie at the next look is nobody's.
    """
    zombies = frozenset(pid for pid in _pids() if (stat := read_stat(pid)) and stat.state == "Z" and _is_child(pid))
    for pid in zombies & seen:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return zombies - seen


def _is_child(pid: int) -> bool:
    return f"PPid:\t{os.getpid()}" in _lines(Path(f"/proc/{pid}/status"))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
