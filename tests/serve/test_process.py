"""One engine process: whatever ends it, or us, nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamaops.core.causes import Exit
from llamaops.core.launch import LaunchSpec
from llamaops.serve import process, procfs
from llamaops.serve.process import EngineProcess, spawn
from llamaops.serve.procfs import end_strays, read_stat

STUB = Path(__file__).parents[1] / "fakes" / "stub_engine.py"


def launch(folder: Path, *switches: str) -> LaunchSpec:
    sock = str(folder / "e.sock")
    return LaunchSpec((sys.executable, "-S", str(STUB), "--host", sock, *switches), dict(os.environ), sock, None)


def is_alive(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def await_true(met: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    assert end_strays(str(tmp_path)) == []


async def started(spec: LaunchSpec, mark: str, said: bytearray) -> EngineProcess:
    engine = spawn(spec, mark=f"{mark}#1", output=said.extend)
    while b"initializing" not in said:
        await asyncio.sleep(0.005)
    return engine


@pytest.mark.parametrize("without_pidfd", [False, True])
def test_the_end_is_told_with_all_output(
    tmp_path: Path, mark: str, without_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_pidfd:
        monkeypatch.delattr(os, "pidfd_open")

    async def body() -> None:
        said = bytearray()
        engine = spawn(launch(tmp_path, "--stub-crash", "--stub-end", "3", "--stub-say", "last words"),
                       mark=f"{mark}#1", output=said.extend)
        assert await engine.exited == Exit(code=3)
        assert said.endswith(b"last words\n")
        engine.signal(signal.SIGTERM)  # nobody is there any more, which is no error

    asyncio.run(body())


def test_the_engine_has_its_own_session_and_only_its_own_descriptors(tmp_path: Path, mark: str) -> None:
    async def body() -> None:
        engine = await started(launch(tmp_path), mark, bytearray())
        stat = read_stat(engine.pid)
        assert stat is not None
        assert stat.session == engine.pid
        targets = [str(entry.readlink()) for entry in Path(f"/proc/{engine.pid}/fd").iterdir()]
        assert sum(t.startswith("pipe:") for t in targets) == 2  # stdout and stderr
        assert not [t for t in targets if "pidfd" in t or "eventpoll" in t]
        engine.signal(signal.SIGKILL)
        assert await engine.exited == Exit(signal=signal.SIGKILL)

    asyncio.run(body())


def test_no_descriptor_is_lost(tmp_path: Path, mark: str) -> None:
    async def body() -> None:
        async def once() -> int:
            engine = spawn(launch(tmp_path, "--stub-crash"), mark=f"{mark}#1", output=bytearray().extend)
            await engine.exited
            return len(list(Path("/proc/self/fd").iterdir()))

        await once()
        assert await once() == await once()

    asyncio.run(body())


SUPERVISOR = """
    import asyncio, os, sys
    from llamaops.core.launch import LaunchSpec
    from llamaops.serve.process import spawn

    async def main():
        argv = ({prefix} sys.executable, "-S", {stub!r}, "--host", {sock!r}, *{switches!r})
        engine = spawn(LaunchSpec(argv, dict(os.environ), {sock!r}, None), mark={mark!r} + "#1",
                       output=lambda data: os.write(1, data))
        os.write(1, b"pid %d\\n" % engine.pid)
        await engine.exited

    asyncio.run(main())
"""


def supervise(folder: Path, mark: str, *switches: str, prefix: str = "") -> subprocess.Popen[bytes]:
    code = SUPERVISOR.format(stub=str(STUB), sock=str(folder / "e.sock"), switches=switches, mark=mark, prefix=prefix)
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)


@pytest.mark.parametrize("prefix", ["", '"setpriv", "--pdeathsig", "KILL", "nice", "-n", "1",'])
def test_kill_9_of_the_supervisor_takes_the_engine_along(tmp_path: Path, mark: str, prefix: str) -> None:
    with supervise(tmp_path, mark, "--stub-ignore-term", prefix=prefix) as ours:
        assert ours.stdout
        pid = int(ours.stdout.readline().split()[1])
        assert b"initializing" in ours.stdout.readline()
        assert is_alive(pid)
        ours.kill()
        ours.wait()
        await_true(lambda: not is_alive(pid))


def test_an_engine_whose_parent_died_before_it_could_ask_for_the_signal_ends_itself(tmp_path: Path) -> None:
    """The guard is given the pid of a parent that is gone, as when we are killed between its fork and its prctl."""
    ran = tmp_path / "ran"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", process._GUARD, "1", "touch", str(ran)], check=False)
    assert done.returncode == 1
    assert not ran.exists()


def test_the_next_start_ends_what_the_last_run_left(tmp_path: Path, mark: str) -> None:
    """A child in a session of its own is not reached by the parent-death signal; its mark finds it."""
    with supervise(tmp_path, mark, "--stub-fork", "daemon") as ours:
        assert ours.stdout
        assert b"initializing" in ours.stdout.readline() + ours.stdout.readline()
        await_true(lambda: len([p for p in procfs._pids() if p != ours.pid and marked(p, mark)]) == 2)
        ours.kill()
    assert len(end_strays(mark)) in (1, 2)


def test_an_engine_starts_where_its_launch_may_run_though_the_relay_moved(tmp_path: Path, mark: str) -> None:
    async def body() -> None:
        all_cpus = process.current_cpus()
        assert all_cpus is not None
        os.sched_setaffinity(0, {min(all_cpus)})
        try:
            engine = spawn(launch(tmp_path), mark=f"{mark}#1", output=bytearray().extend, cpus=all_cpus)
            assert os.sched_getaffinity(engine.pid) == all_cpus
            assert process.current_cpus() == frozenset({min(all_cpus)})
        finally:
            os.sched_setaffinity(0, all_cpus)
        engine.signal(signal.SIGKILL)
        await engine.exited

    asyncio.run(body())


def test_as_pid_1_orphans_are_reaped_and_children_of_our_own_are_not() -> None:
    """A subreaper (prctl 36) inherits orphans just as pid 1 does."""
    code = textwrap.dedent("""
        import ctypes, os, subprocess, sys, time
        from llamaops.serve.procfs import read_stat, reap_orphans

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        own = subprocess.Popen(["true"])
        made = subprocess.run(["sh", "-c", "sleep 0.05 & echo $!"], stdout=subprocess.PIPE, check=True)
        orphan = int(made.stdout)
        while not all((stat := read_stat(pid)) and stat.state == "Z" for pid in (own.pid, orphan)):
            time.sleep(0.01)
        seen = reap_orphans(frozenset())
        assert seen == {own.pid, orphan}, seen
        assert own.wait() == 0
        assert reap_orphans(seen) == frozenset()
        assert read_stat(orphan) is None
    """)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def marked(pid: int, mark: str) -> bool:
    return procfs._is_marked(pid, f"{procfs.MARK}={mark}".encode())


def test_a_mark_is_not_taken_for_a_longer_one(tmp_path: Path, mark: str) -> None:
    async def body() -> None:
        engine = await started(launch(tmp_path), mark, bytearray())
        assert end_strays(mark[:-1]) == []
        assert end_strays(f"{mark}#11") == []
        assert end_strays(f"{mark}#1") == [engine.pid]
        await engine.exited

    asyncio.run(body())


def test_a_name_with_parentheses_and_spaces_is_read_right(tmp_path: Path) -> None:
    odd = tmp_path / "a ) S 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "60"]) as sleeper:
        await_true(lambda: Path(f"/proc/{sleeper.pid}/comm").read_text().startswith("a )"))
        stat = read_stat(sleeper.pid)
        assert stat is not None
        assert stat.session == os.getsid(0)
        sleeper.kill()
