"""What the kernel says about the engine, the relay and their CPUs at one moment. A file that is missing is not told."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from llamaops import sensors
from llamaops.core.cpuset import CpuSet
from llamaops.core.cputimes import CpuTimes, parse_cpu_times

_POLICIES = {0: "other", 1: "fifo", 2: "rr", 3: "batch", 5: "idle", 6: "deadline", 7: "ext"}
_MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ThreadReading:
    """One thread: where it ran last, what it used and how long it waited on a run queue, in seconds since it began."""

    tid: int
    cpu: int
    policy: str
    run_s: float
    wait_s: float
    voluntary: int
    involuntary: int
    migrations: int


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process: its name, the CPU it ran on last and the CPU seconds it used."""

    name: str
    cpu: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """All of it at ``at`` (monotonic seconds); ``pid`` is the engine's, None when there is none."""

    at: float
    pid: int | None
    cpus: dict[int, CpuTimes]
    engine: dict[int, ThreadReading]
    relay: dict[int, ThreadReading]
    rss_bytes: int | None
    cpu_s: float | None
    major_faults: int
    throttled_s: float | None
    pressure: dict[str, float]
    temperature_celsius: float | None
    available_bytes: int | None
    hertz: dict[int, float]
    slowest_clock: float | None
    thermal_throttles: dict[int, int]


def read(pid: int | None, watched: CpuSet, root: Path = Path("/")) -> Reading:
    """Look once. ``watched`` are the CPUs whose clock is read: on some machines each costs an interrupt."""
    stat = _stat(root / f"proc/{pid}/stat") if pid else None
    hertz, slowest = sensors.clocks(root, watched)
    return Reading(
        at=time.monotonic(), pid=pid, cpus=parse_cpu_times(_text(root / "proc/stat") or ""),
        engine=read_threads(root, pid) if pid else {}, relay=read_threads(root, os.getpid()),
        rss_bytes=_rss(root, pid) if pid else None, cpu_s=(int(stat[11]) + int(stat[12])) * _TICK_S if stat else None,
        major_faults=int(stat[9]) if stat else 0, throttled_s=sensors.throttled_s(root), pressure=_pressure(root),
        temperature_celsius=sensors.temperature_celsius(root), available_bytes=_available(root), hertz=hertz,
        slowest_clock=slowest, thermal_throttles=sensors.thermal_throttles(root, watched),
    )


def read_threads(root: Path, pid: int) -> dict[int, ThreadReading]:
    """Return the threads of a process by id; those that end meanwhile are left out."""
    found = {}
    for tid in _numbers(root / f"proc/{pid}/task"):
        thread = _thread(root / f"proc/{pid}/task/{tid}", tid)
        if thread is not None:
            found[tid] = thread
    return found


def _thread(folder: Path, tid: int) -> ThreadReading | None:
    stat = _stat(folder / "stat")
    if stat is None:
        return None
    run_s, wait_s = (int(stat[11]) + int(stat[12])) * _TICK_S, 0.0
    if len(times := (_text(folder / "schedstat") or "").split()) == 3:
        run_s, wait_s = int(times[0]) / 1e9, int(times[1]) / 1e9
    sched = _pairs(_text(folder / "sched") or _text(folder / "status"))
    voluntary = sched.get("nr_voluntary_switches", sched.get("voluntary_ctxt_switches", 0))
    involuntary = sched.get("nr_involuntary_switches", sched.get("nonvoluntary_ctxt_switches", 0))
    return ThreadReading(tid, int(stat[36]), _POLICIES.get(int(stat[38]), "unknown"), run_s, wait_s, voluntary,
                         involuntary, sched.get("se.nr_migrations", 0))


def read_processes(root: Path, ours: set[int]) -> dict[int, ProcessReading]:
    """Return every process but ``ours`` by pid."""
    found = {}
    for pid in _numbers(root / "proc"):
        if pid not in ours and (text := _text(root / f"proc/{pid}/stat")):
            name = text[text.index("(") + 1 : text.rindex(")")]
            field = text[text.rindex(")") + 2 :].split()
            found[pid] = ProcessReading(name, int(field[36]), (int(field[11]) + int(field[12])) * _TICK_S)
    return found


def _pressure(root: Path) -> dict[str, float]:
    """Return the share of the last 10 s in which some task waited, by resource (Documentation/accounting/psi.rst)."""
    found = {}
    for resource in ("cpu", "memory", "io"):
        match = re.search(r"some avg10=([0-9.]+)", _text(root / f"proc/pressure/{resource}") or "")
        if match:
            found[resource] = float(match.group(1)) / 100
    return found


def _available(root: Path) -> int | None:
    """Return how much memory can still be had: MemAvailable, or less where a cgroup's limit is nearer."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo") or "")
    found = [int(match.group(1)) * 1024] if match else []
    for folder in sensors.cgroup_folders(root, "memory"):
        for limit_name, used_name in _MEMORY_FILES:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                stat = _pairs(_text(folder / "memory.stat"), None)
                droppable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
                found.append(max(0, limit - used + droppable))
    return min(found, default=None)


def _rss(root: Path, pid: int) -> int | None:
    words = (_text(root / f"proc/{pid}/statm") or "").split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else None


def private_bytes(pid: int, root: Path = Path("/")) -> int:
    """Return the resident memory that no file backs: what is free again once the process has ended (proc(5), statm)."""
    words = (_text(root / f"proc/{pid}/statm") or "").split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE") if len(words) > 2 else 0


# Reading files.


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return None


def _stat(path: Path) -> list[str] | None:
    """Return the fields of a stat file from the state on (proc_pid_stat(5)); the name before may hold anything."""
    text = _text(path)
    return text[text.rindex(")") + 2 :].split() if text else None


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _pairs(text: str | None, separator: str | None = ":") -> dict[str, int]:
    """Read ``name : number`` lines; others are passed over."""
    split = [line.split(separator, 1) for line in (text or "").splitlines()]
    return {p[0].strip(): int(p[1]) for p in split if len(p) == 2 and p[1].strip().isdigit()}


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]  # noqa: PTH208 - the cheap way: no stat
    except OSError:
        return []

