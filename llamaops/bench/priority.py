"""The generator's own priority and cost: a client that waits for a CPU measures itself."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FIFO = 90  # above an engine at chrt -r 50 and llama-server's --prio 3, below the kernel's own 99


@dataclass(slots=True)
class Client:
    """The generator's priority, the CPU time it used and how long it was runnable without a CPU (None: unknown)."""

    priority: str
    cpu_s: float = 0.0
    waited_s: float | None = None


@contextlib.contextmanager
def raised_priority(*, wanted: bool) -> Iterator[Client]:
    """Run the calling thread as urgently as this user may, and measure it; children keep the ordinary priority.

    Tries real time (FIFO, above any engine), then niceness −20. It sleeps nearly always, so nobody else loses time.
    """
    with contextlib.ExitStack() as stack:
        client = Client(_raise(stack) if wanted else "ordinary")
        cpu, waited = _cpu_s(), _waited_s()
        try:
            yield client
        finally:
            client.cpu_s = _cpu_s() - cpu
            now = _waited_s()
            client.waited_s = now - waited if now is not None and waited is not None else None


def _raise(stack: contextlib.ExitStack) -> str:
    if not hasattr(os, "sched_setscheduler"):
        return "ordinary"
    before = (os.sched_getscheduler(0), os.sched_getparam(0))
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(_FIFO))
        stack.callback(os.sched_setscheduler, 0, *before)
        return f"fifo {_FIFO}"
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        stack.callback(os.setpriority, os.PRIO_PROCESS, 0, nice)
        return "nice -20"
    return "ordinary"


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _waited_s() -> float | None:
    """Return the seconds this thread has stood in a run queue (proc(5), schedstat), None where unknown."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
