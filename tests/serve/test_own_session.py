"""Leaving the shell's session: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.running import await_true

SERVE = """
import os, signal, sys, time
from llamaops.own_session import in_own_session

def serve():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    signal.signal(signal.SIGHUP, lambda *_: print("hup", flush=True))
    print(os.getpid(), os.getsid(0), flush=True)
    while True:
        signal.pause()

sys.exit(in_own_session(serve))
"""
sessions_count = pytest.mark.skipif(
    not Path("/proc/sys/kernel/sched_autogroup_enabled").exists()
    or Path("/proc/sys/kernel/sched_autogroup_enabled").read_text().strip() != "1",
    reason="this kernel does not share CPU time between sessions")


def start(*, leader: bool) -> tuple[subprocess.Popen[str], int, int]:
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True,
                               start_new_session=leader, process_group=None if leader else 0)
    assert process.stdout is not None
    pid, session = map(int, process.stdout.readline().split())
    return process, pid, session


@sessions_count
def test_it_serves_in_a_session_of_its_own_and_hands_signals_and_exit_code_through() -> None:
    process, pid, session = start(leader=False)
    assert process.stdout is not None
    assert session == pid != process.pid
    assert Path(f"/proc/{pid}/autogroup").read_text() != Path(f"/proc/{process.pid}/autogroup").read_text()
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == "hup\n"
    os.killpg(process.pid, signal.SIGTERM)  # as a terminal does: the whole foreground group
    assert process.wait(60) == 7
    assert not psutil.pid_exists(pid)
    process.stdout.close()


@sessions_count
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_an_end_by_signal_is_told_as_a_shell_tells_it(number: signal.Signals) -> None:
    process, pid, _ = start(leader=False)
    os.kill(pid, number)
    assert process.wait(60) == 128 + number
    assert process.stdout is not None
    process.stdout.close()


@sessions_count
def test_it_dies_with_the_one_who_waits() -> None:
    process, pid, _ = start(leader=False)
    process.kill()
    process.wait()
    await_true(lambda: not psutil.pid_exists(pid), within=60, what="the serving process is gone")
    assert process.stdout is not None
    process.stdout.close()


def test_a_leader_stays_what_it_is() -> None:
    process, pid, _ = start(leader=True)
    assert pid == process.pid
    process.terminate()
    assert process.wait(60) == 7
    assert process.stdout is not None
    process.stdout.close()
