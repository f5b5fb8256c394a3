"""One engine process: it can't outlive us, its end is told by the kernel, and what it started ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamaops.core.causes import Exit
from llamaops.core.launch import LaunchSpec

MARK = "LLAMAOPS_INSTANCE"
"""Environment variable of every engine: whose it is. Finds a child that left the group, and the last run's orphan."""

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
