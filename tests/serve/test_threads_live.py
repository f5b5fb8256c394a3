"""Priorities on live threads: what the kernel says afterwards is what was planned, or a note tells."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llamaops.core.cpuset import CpuSet
from llamaops.core.plan import Placement
from llamaops.serve.threads import apply_priority, read_back, read_threads

HERE = CpuSet.of(os.sched_getaffinity(0))
PLAN = Placement(threads=1, threads_batch=1, cpus=HERE, batch_cpus=HERE, housekeeping_cpus=None, policy="other",
                 rt_priority=None, nice=None, autogroup_nice=None, weight=None, relay_nice=None, spin=1000, numa=None,
                 mem_nodes=None)


@pytest.fixture
def niced() -> Iterator[int]:
    """A process in a session of its own at niceness 7."""
    argv = ["nice", "-n", "7", "sleep", "60"]
    with subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE) as child:
        while Path(f"/proc/{child.pid}/comm").read_text() != "sleep\n":
            os.sched_yield()
        yield child.pid
        child.kill()


def test_every_thread_is_read() -> None:
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        found = {t.tid: t for t in read_threads(os.getpid())}
        assert {t.native_id for t in threads} <= set(found)
        assert {t.cpus for t in found.values()} == {HERE}
        assert found[os.getpid()].nice == os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_drift_of_a_live_process_is_told(niced: int) -> None:
    planned = os.getpriority(os.PRIO_PROCESS, 0) + 7
    assert read_back(niced, replace(PLAN, nice=planned)) == []
    notes = read_back(niced, replace(PLAN, nice=planned - 1, threads=64))
    assert [(n.level, n.code) for n in notes] == [("degraded", "drift-nice"), ("degraded", "drift-threads")]
    assert f"niceness {planned}" in notes[0].text


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel has no autogroups")
def test_the_session_of_the_engine_gets_its_own_niceness(niced: int) -> None:
    plan = replace(PLAN, autogroup_nice=5)
    assert [n.code for n in read_back(niced, plan)] == ["drift-autogroup"]
    assert apply_priority(niced, plan) == []
    assert read_back(niced, plan) == []


def test_a_process_that_is_gone_has_no_drift() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert read_back(child.pid, replace(PLAN, nice=3, autogroup_nice=3)) == []
    assert apply_priority(child.pid, replace(PLAN, autogroup_nice=3)) == []


def test_the_relay_takes_its_priority_for_all_its_threads() -> None:
    """In a process of its own: an ordinary user could not take it back."""
    code = """if True:
        import os, threading
        from dataclasses import replace
        from llamaops.core.cpuset import CpuSet
        from llamaops.serve.threads import read_threads, set_relay_priority
        from llamaops.core.plan import Placement

        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        thread.start()
        cpu = min(os.sched_getaffinity(0))
        nice = os.getpriority(os.PRIO_PROCESS, 0) + 3
        plan = Placement(threads=1, threads_batch=1, cpus=None, batch_cpus=None, housekeeping_cpus=CpuSet.of([cpu]),
                         policy="other", rt_priority=None, nice=None, autogroup_nice=None, weight=None,
                         relay_nice=nice, spin=1000, numa=None, mem_nodes=None)
        assert set_relay_priority(plan) == []
        threads = read_threads(os.getpid())
        assert len(threads) == 2
        assert {(t.nice, t.cpus) for t in threads} == {(plan.relay_nice, CpuSet.of([cpu]))}
        gone = replace(plan, housekeeping_cpus=CpuSet.of([4095]))
        assert [n.code for n in set_relay_priority(gone)] == ["drift-relay-cpus"]
        done.set()
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel has no autogroups")
@pytest.mark.parametrize(("leads", "nice"), [(True, 5), (False, 0)])
def test_only_a_session_of_our_own_is_lifted(leads: bool, nice: int) -> None:
    """What else was started from one terminal must not be lifted against the engine."""
    code = """if True:
        import os, sys
        from pathlib import Path
        from llamaops.core.plan import Placement
        from llamaops.serve.threads import set_relay_priority

        plan = Placement(threads=1, threads_batch=1, cpus=None, batch_cpus=None, housekeeping_cpus=None, policy="other",
                         rt_priority=None, nice=None, autogroup_nice=5, weight=None, relay_nice=None, spin=1000,
                         numa=None, mem_nodes=None)
        if sys.argv[1] == "shared" and os.fork():  # the leader waits, its child does not lead
            os.wait()
            sys.exit()
        assert set_relay_priority(plan) == []
        print(Path("/proc/self/autogroup").read_text().split()[-1])
    """
    words = [sys.executable, "-c", code, "alone" if leads else "shared"]
    done = subprocess.run(words, check=True, timeout=120, start_new_session=True, capture_output=True, text=True)
    assert int(done.stdout) == nice
