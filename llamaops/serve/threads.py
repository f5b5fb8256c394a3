"""The priority of live threads: what the launch could not set, and what it came to."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llamaops.core.cpuset import CpuSet
from llamaops.core.plan import Note, Placement

_POLICY_NUMBERS = {"other": 0, "fifo": 1, "rr": 2, "batch": 3}
_REAL_TIME = ("fifo", "rr")
_POLICY_NAMES = {number: name for name, number in _POLICY_NUMBERS.items()} | {5: "idle", 6: "deadline", 7: "ext"}


def apply_priority(pid: int, placement: Placement) -> list[Note]:
    """Give the engine's session its planned autogroup niceness (sched(7)); return what the kernel refused.

    The engine has a session, hence an autogroup, of its own: without this its niceness competes with nobody.
    """
    return _set_autogroup(pid, placement.autogroup_nice, "the engine's session")


def set_relay_priority(placement: Placement) -> list[Note]:
    """Give this process the relay's niceness, autogroup niceness and, where planned, CPUs; return the refusals."""
    notes: list[Note] = []
    if placement.relay_nice is not None:
        try:
            # Without a pid, setpriority acts on one thread only (setpriority(2)): threads made later inherit it.
            for task in _tasks(os.getpid()):
                os.setpriority(os.PRIO_PROCESS, task, placement.relay_nice)
        except OSError as exc:
            notes.append(Note("degraded", "drift-relay-nice",
                              f"the relay could not take niceness {placement.relay_nice}: {exc.strerror}"))
    notes += _set_autogroup(os.getpid(), placement.autogroup_nice, "the relay's session")
    if placement.housekeeping_cpus:
        try:
            for task in _tasks(os.getpid()):
                os.sched_setaffinity(task, set(placement.housekeeping_cpus))
        except OSError as exc:
            notes.append(Note("degraded", "drift-relay-cpus",
                              f"the relay could not move to CPUs {placement.housekeeping_cpus}: {exc.strerror}"))
    return notes


def _set_autogroup(pid: int, nice: int | None, whose: str) -> list[Note]:
    if nice is None:
        return []
    file = Path(f"/proc/{pid}/autogroup")
    try:
        file.write_text(str(nice))
    except FileNotFoundError:
        return []  # a kernel without autogroups: there is nothing to compete in
    except OSError as exc:
        text = f"{whose} could not take autogroup niceness {nice}: {exc.strerror}"
        return [Note("degraded", "drift-autogroup", text)]
    return []


@dataclass(frozen=True, slots=True)
class Thread:
    """One live thread: CPUs it may use, policy name, niceness, real-time priority (0 for the ordinary policies)."""

    tid: int
    cpus: CpuSet
    policy: str
    nice: int
    rt_priority: int


def read_threads(pid: int) -> list[Thread]:
    """Return the threads of a process as they are now; those that end meanwhile are left out."""
    threads = []
    for tid in _tasks(pid):
        with contextlib.suppress(OSError, ValueError):
            threads.append(_read_thread(pid, tid))
    return threads


def _read_thread(pid: int, tid: int) -> Thread:
    stat = Path(f"/proc/{pid}/task/{tid}/stat").read_text(errors="replace")
    field = stat[stat.rindex(")") + 2 :].split()
    status = Path(f"/proc/{pid}/task/{tid}/status").read_text(errors="replace")
    cpus = next(line for line in status.splitlines() if line.startswith("Cpus_allowed_list:")).split(":")[1].strip()
    # proc_pid_stat(5), counted from the state: niceness is the 17th field, rt_priority the 38th, policy the 39th.
    policy = _POLICY_NAMES.get(int(field[38]), field[38])
    return Thread(tid, CpuSet.parse(cpus), policy, int(field[16]), int(field[37]))


def read_back(pid: int, placement: Placement) -> list[Note]:
    """Return a ``degraded`` note for each way in which the engine's live threads differ from the plan."""
    return compare(read_threads(pid), _read_autogroup(pid), placement)


def compare(threads: list[Thread], autogroup_nice: int | None, placement: Placement) -> list[Note]:
    """Compare threads with a plan; pure, for `read_back`."""
    found = (
        _cpus_drift(threads, placement),
        _drift("drift-policy", "policy", (t.policy for t in threads), placement.policy, len(threads)),
        _drift("drift-rt-priority", "real-time priority", (t.rt_priority for t in threads if t.policy in _REAL_TIME),
               placement.rt_priority, len(threads)),
        _drift("drift-nice", "niceness", (t.nice for t in threads if t.policy not in _REAL_TIME), placement.nice,
               len(threads)),
        _count_drift(threads, placement),
        _drift("drift-autogroup", "autogroup niceness", (autogroup_nice,) if autogroup_nice is not None else (),
               placement.autogroup_nice, 1),
    )
    return [note for note in found if note]


def _cpus_drift(threads: list[Thread], placement: Placement) -> Note | None:
    if placement.cpus is None:
        return None
    allowed = set(placement.cpus) | set(placement.batch_cpus or ()) | set(placement.housekeeping_cpus or ())
    strays = [t for t in threads if not set(t.cpus) <= allowed]
    if not strays:
        return None
    text = f"{len(strays)} of {len(threads)} threads may run on CPUs {strays[0].cpus}, planned were {placement.cpus}"
    return Note("degraded", "drift-cpus", text)


def _drift(code: str, what: str, live: Iterable[object], planned: object, total: int) -> Note | None:
    """Compare one property; a plan that leaves it open (None) is met by anything."""
    others = Counter(value for value in live if value != planned)
    if planned is None or not others:
        return None
    value, count = others.most_common(1)[0]
    return Note("degraded", code, f"{count} of {total} threads have {what} {value}, planned was {planned}")


def _count_drift(threads: list[Thread], placement: Placement) -> Note | None:
    """Too few threads for the plan means that the engine took fewer; HTTP and helper threads come on top."""
    if not threads or len(threads) >= placement.threads:
        return None
    return Note("degraded", "drift-threads", f"{len(threads)} threads live, planned were {placement.threads} to decode")


def _read_autogroup(pid: int) -> int | None:
    """Return the niceness of the session's autogroup: the file reads ``/autogroup-25 nice -10``."""
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return None


def _tasks(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
