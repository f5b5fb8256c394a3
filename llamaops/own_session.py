"""Serving outside the shell's session, where the scheduler shares CPU time between sessions (autogroup, sched(7)).

In the shell's session the relay would share one group with everything else that was started there: lifting the engine
leaves it behind, and lifting the group lifts what it competes with. A process can leave its session only as a new one,
so the caller stays behind and waits: it is what the terminal and whoever started us know.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_PR_SET_PDEATHSIG = 1


def in_own_session(serve: Callable[[], int]) -> int:
    """Run ``serve`` in the leader of a session and return its exit code, 128 + n where signal n ended it.

    Where this process leads its session already, is the first of a container (which must reap what others leave), or
    sessions don't count, it is just called. Otherwise it runs in a child that gets the signals sent to this process and
    dies with it (prctl(2), PR_SET_PDEATHSIG). To be called while there is one thread, as it forks.
    """
    if os.getpid() in (1, os.getsid(0)) or not _sessions_count():
        return serve()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, no child's end would be told
    # Blocked until both sides are ready for them, so that none is lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED | {signal.SIGCHLD})
    parent = os.getpid()
    if child := os.fork():
        try:
            return _wait(child)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.setsid()
    _die_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return serve()


def _sessions_count() -> bool:
    try:
        return Path("/proc/sys/kernel/sched_autogroup_enabled").read_text().strip() == "1"
    except OSError:
        return False


def _die_with(parent: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call, so its death is told no more
        os.kill(os.getpid(), signal.SIGKILL)


def _wait(child: int) -> int:
    """Pass signals on until the child has ended."""
    while True:
        number = signal.sigwait(_FORWARDED | {signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
