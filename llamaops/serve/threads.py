"""The priority of live threads: what the launch could not set, and what it came to."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from llamaops.core.cpuset import CpuSet
from llamaops.core.plan import Note, Placement

_POLICY_NUMBERS = {"other": 0, "fifo": 1, "rr": 2, "batch": 3}
_REAL_TIME = ("fifo", "rr")
_HIGHEST_RT = 99
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
    notes += _set_relay_policy(placement)
    # A session that a shell leads holds what else was started there: that would be lifted against the engine too.
    if os.getsid(0) == os.getpid():
        notes += _set_autogroup(os.getpid(), placement.autogroup_nice, "the relay's session")
    if placement.housekeeping_cpus:
        try:
            for task in _tasks(os.getpid()):
                os.sched_setaffinity(task, set(placement.housekeeping_cpus))
        except OSError as exc:
            notes.append(Note("degraded", "drift-relay-cpus",
                              f"the relay could not move to CPUs {placement.housekeeping_cpus}: {exc.strerror}"))
    return notes


def _set_relay_policy(placement: Placement) -> list[Note]:
    """Give this thread, which relays, the real-time priority of the engine's own HTTP threads; none where none is
    planned.

    Other threads and children do not inherit it (SCHED_RESET_ON_FORK, sched(7)): they may have long work to do.
    """
    wanted = beside_priority(placement)
    if wanted is None and not (hasattr(os, "sched_getscheduler") and _is_real_time(0)):
        return []
    try:
        _schedule(0, placement.policy if wanted else "other", wanted or 0, reset_on_fork=bool(wanted))
    except OSError as exc:
        text = f"the relay could not take policy {placement.policy}, priority {wanted or 0}: {exc.strerror}"
        return [Note("degraded", "drift-relay-policy", text)]
    return []


def _is_real_time(task: int) -> bool:
    return os.sched_getscheduler(task) & ~os.SCHED_RESET_ON_FORK in (os.SCHED_FIFO, os.SCHED_RR)


def _schedule(task: int, policy: str, priority: int, *, reset_on_fork: bool = False) -> None:
    flag = os.SCHED_RESET_ON_FORK if reset_on_fork else 0
    os.sched_setscheduler(task or threading.get_native_id(), _POLICY_NUMBERS[policy] | flag, os.sched_param(priority))


def beside_priority(placement: Placement) -> int | None:
    """Return the real-time priority of what serves the compute threads: one step above theirs; None without any.

    At the same one the engine's HTTP threads would wait behind a spinning compute thread for a whole time slice.
    """
    if placement.policy not in _REAL_TIME:
        return None
    return min((placement.rt_priority or 1) + 1, _HIGHEST_RT)


def lift_threads(pid: int, placement: Placement) -> list[Note]:
    """Lift the engine's other threads one real-time step above its compute threads, which get what is planned.

    To be called once it has computed something, as only CPU time tells which threads compute. Threads made later
    inherit from the one that made them, so HTTP threads stay above. Returns what the kernel refused.
    """
    beside = beside_priority(placement)
    if beside is None:
        return []
    threads = read_threads(pid)
    computing = compute_threads(threads, placement)
    refused: set[str] = set()
    for thread in threads:
        priority = (placement.rt_priority or 1) if thread.tid in computing else beside
        if (thread.policy, thread.rt_priority) == (placement.policy, priority):
            continue
        try:
            _schedule(thread.tid, placement.policy, priority)
        except ProcessLookupError:
            continue  # it has ended
        except OSError as exc:
            refused.add(exc.strerror or str(exc))
    if not refused:
        return []
    text = (f"the engine's other threads could not be lifted to real-time priority {beside}, above its compute threads "
            f"({', '.join(sorted(refused))}): streams may come in bursts. A lower placement.rt_priority leaves room "
            "below RLIMIT_RTPRIO")
    return [Note("degraded", "rt-lift-refused", text)]


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
    """One live thread: CPUs it may use, policy name, niceness, real-time priority (0 for the ordinary policies), and
    the CPU seconds it has used.
    """

    tid: int
    cpus: CpuSet
    policy: str
    nice: int
    rt_priority: int
    run_s: float = 0.0


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
    return Thread(tid, CpuSet.parse(cpus), policy, int(field[16]), int(field[37]), _run_s(pid, tid, field))


def _run_s(pid: int, tid: int, field: list[str]) -> float:
    """Return the CPU time to the nanosecond where the kernel counts so (sched-stats.rst), else in clock ticks."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0]) / 1e9
    return (int(field[11]) + int(field[12])) / os.sysconf("SC_CLK_TCK")


def compute_threads(threads: Iterable[Thread], placement: Placement) -> frozenset[int]:
    """Tell which threads compute: as many as are planned, those that used the CPU most.

    HTTP threads hardly use any, so this holds from the warm-up on.
    """
    busiest = sorted((t for t in threads if t.run_s > 0), key=lambda t: t.run_s, reverse=True)
    return frozenset(t.tid for t in busiest[: max(placement.threads, placement.threads_batch)])


def read_back(pid: int, placement: Placement) -> list[Note]:
    """Return a ``degraded`` note for each way in which the engine's live threads differ from the plan."""
    return compare(read_threads(pid), _read_autogroup(pid), placement)


def compare(threads: list[Thread], autogroup_nice: int | None, placement: Placement) -> list[Note]:
    """Compare threads with a plan; pure, for `read_back`."""
    computing = compute_threads(threads, placement)
    found = (
        _cpus_drift(threads, computing, placement),
        _drift("drift-policy", "policy", (t.policy for t in threads), placement.policy, len(threads)),
        _rt_drift(threads, computing, placement),
        _drift("drift-nice", "niceness", (t.nice for t in threads if t.policy not in _REAL_TIME), placement.nice,
               len(threads)),
        _count_drift(threads, placement),
        _drift("drift-autogroup", "autogroup niceness", (autogroup_nice,) if autogroup_nice is not None else (),
               placement.autogroup_nice, 1),
    )
    return [note for note in found if note]


def _cpus_drift(threads: list[Thread], computing: Collection[int], placement: Placement) -> Note | None:
    """Compute threads belong on the decode CPUs, one each; the others may use the housekeeping CPUs too."""
    if placement.cpus is None:
        return None
    decode = set(placement.cpus) | set(placement.batch_cpus or ())
    others = decode | set(placement.housekeeping_cpus or ())
    strays = [t for t in threads if not set(t.cpus) <= (decode if t.tid in computing else others)]
    together = {cpu for t in threads if t.tid in computing for cpu in t.cpus}
    if strays:
        text = f"{len(strays)} of {len(threads)} threads may run on CPUs {strays[0].cpus}, planned {placement.cpus}"
    elif len(together) < min(len(computing), len(decode)):
        text = f"{len(computing)} compute threads share CPUs {CpuSet.of(together)}, planned {placement.cpus}"
    else:
        return None
    return Note("degraded", "drift-cpus", text)


def _rt_drift(threads: list[Thread], computing: Collection[int], placement: Placement) -> Note | None:
    """Compute threads have the planned priority; the others at least one step more."""
    beside = beside_priority(placement)
    real_time = [t for t in threads if t.policy in _REAL_TIME]
    if beside is None or not real_time:
        return None
    wrong = [t for t in real_time
             if (t.rt_priority != placement.rt_priority if t.tid in computing else t.rt_priority < beside)]
    if not wrong:
        return None
    text = (f"{len(wrong)} of {len(threads)} threads have real-time priority {wrong[0].rt_priority}, planned were "
            f"{placement.rt_priority} for those that compute and {beside} for the others")
    return Note("degraded", "drift-rt-priority", text)


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
