"""One engine process: it can't outlive us, its end is told by the kernel, and what it started ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llamaops.core.causes import Exit
from llamaops.serve.procfs import MARK, end_strays, oom_kills

if TYPE_CHECKING:  # the commands that only talk to an instance come by here, and need no profile
    from llamaops.core.launch import LaunchSpec

# Stands in for setpriv, which the launch chain begins with where it is installed. PR_SET_PDEATHSIG is 1 (prctl(2)). A
# parent that died before the call can't be noticed by the signal any more, hence the look at getppid() after it; after
# setpriv, which does not look, the sweep at the next start ends such an orphan.
_GUARD = """
import os, sys
parent, argv = int(sys.argv[1]), sys.argv[2:]
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
except Exception:
    pass
if os.getppid() != parent:
    os._exit(1)
try:
    os.execvp(argv[0], argv)
except OSError as exc:
    os.write(2, f"llamaops: cannot run {argv[0]}: {exc.strerror}\\n".encode())
    os._exit(127)
"""


class EngineProcess:
    """A running engine. Create it with `spawn`; ``exited`` yields how it ended once it and all it started are gone."""

    def __init__(self, popen: subprocess.Popen[bytes], pipe: int, output: Callable[[bytes], None], mark: str) -> None:
        self.pid = popen.pid
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._popen = popen
        self._pipe = pipe
        self._output = output
        self._mark = mark
        self._oom_kills = oom_kills()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe, self._read)
        self._finisher: asyncio.Task[None] | None = None
        self._watch()

    def signal(self, number: int) -> None:
        """Send a signal to the engine's whole group; nothing happens once it is gone."""
        if self._finisher is None:  # until then the leader is not reaped, so the group's number can't be another's
            _kill_group(self.pid, number)

    def _watch(self) -> None:
        try:
            pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # no Linux, or a kernel or sandbox without it
            self._poll()
            return
        self._loop.add_reader(pidfd, self._on_death, pidfd)

    def _poll(self) -> None:
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            self._loop.call_later(0.05, self._poll)
        else:
            self._on_death(None)

    def _on_death(self, pidfd: int | None) -> None:
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        _kill_group(self.pid, signal.SIGKILL)
        returncode = self._popen.wait()
        self._finisher = self._loop.create_task(self._finish(returncode))

    async def _finish(self, returncode: int) -> None:
        try:
            await asyncio.to_thread(end_strays, self._mark, self.pid)
        finally:
            self._loop.remove_reader(self._pipe)
            while self._read():
                pass
            os.close(self._pipe)
            oom = returncode == -signal.SIGKILL and oom_kills() > self._oom_kills
            if not self.exited.done():
                self.exited.set_result(Exit.of(returncode, oom_killed=oom))

    def _read(self) -> bool:
        """Take what is in the pipe; tell whether there may be more."""
        try:
            data = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._pipe)
            return False
        self._output(data)
        return True


def spawn(
    spec: LaunchSpec, *, mark: str, output: Callable[[bytes], None], cpus: frozenset[int] | None = None
) -> EngineProcess:
    """Start an engine in a session of its own, its stdout and stderr going to ``output``.

    Call it from the event loop's thread: the kernel ends the engine when the thread that spawned it ends. ``mark``
    names the instance and generation, ``instance#generation``. ``cpus`` are those the launch chain may start on, for
    the relay may have moved to CPUs of its own (numactl refuses what it can't run on itself). Raises OSError when it
    can't be started at all.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        environ = {**spec.env, MARK: mark}
        with _on_cpus(cpus):
            popen = subprocess.Popen(_guarded(spec.argv), env=environ, stdin=subprocess.DEVNULL, stdout=writer,
                                     stderr=writer, start_new_session=True)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return EngineProcess(popen, reader, output, mark)


@contextlib.contextmanager
def _on_cpus(cpus: frozenset[int] | None) -> Iterator[None]:
    """Let this thread run on ``cpus`` for a moment, as a child inherits them."""
    ours = current_cpus()
    if cpus is None or ours is None or cpus == ours:
        yield
        return
    with contextlib.suppress(OSError):  # they went offline, or a cpuset shrank: then the child starts where we are
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def current_cpus() -> frozenset[int] | None:
    """Return the CPUs this thread may use; None on systems without affinity."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _guarded(argv: Sequence[str]) -> Sequence[str]:
    if Path(argv[0]).name == "setpriv" or not sys.executable or not sys.platform.startswith("linux"):
        return argv
    return [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *argv]


def _kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
