"""What a running engine is compared with every minute, on files of machines that change meanwhile."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import Rig, drive, run_until_stopped

from llamaops.core.cpuset import CpuSet
from llamaops.core.plan import Note, Placement
from llamaops.serve.drift import DriftWatch, memory_nodes
from llamaops.serve.threads import Thread, beside_priority, compute_threads, lift_threads, read_threads

PLAN = Placement(threads=2, threads_batch=2, cpus=CpuSet.parse("2-3"), batch_cpus=CpuSet.parse("2-3"),
                 housekeeping_cpus=None, policy="other", rt_priority=None, nice=None, autogroup_nice=None, weight=None,
                 relay_nice=None, spin=1000, numa=None, mem_nodes=None)
GONE = 2**22 + 1
"""No process has this id: pid_max is at most 2^22."""
MAPS = """\
55d8 default file=/opt/llama-server mapped=3 N0=2 N1=1 kernelpagesize_kB=4
7f00 bind:0 file=/models/q.gguf mapped=1000 active=0 N1=1000 kernelpagesize_kB=4
7f80 bind:0 anon=2 dirty=2 N0=2 kernelpagesize_kB=2048
7fff default stack:N0 anon=1 dirty=1 N0=1
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in {"sys/devices/system/cpu/online": "0-3\n", "proc/self/cgroup": "0::/a\n",
                       "sys/fs/cgroup/a/cpu.stat": "nr_throttled 0\nthrottled_usec 0\n",
                       f"proc/{GONE}/numa_maps": MAPS}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def codes(watch: DriftWatch, placement: Placement = PLAN) -> list[str]:
    return [note.code for note in watch.look(GONE, placement)]


def test_cpus_that_go_offline_make_the_plan_stale_until_they_are_back(root: Path) -> None:
    watch, online = DriftWatch(root), root / "sys/devices/system/cpu/online"
    assert codes(watch) == []
    online.write_text("0-2\n")
    (note,) = watch.look(GONE, PLAN)
    assert (note.level, note.code) == ("degraded", "plan-stale")
    assert "CPUs 3 of the plan" in note.text
    online.write_text("0-3\n")
    assert codes(watch) == []


@pytest.mark.parametrize("text", ["", "garbage", None])
def test_what_can_not_be_read_says_nothing(root: Path, text: str | None) -> None:
    for name in ("sys/devices/system/cpu/online", "sys/fs/cgroup/a/cpu.stat"):
        (root / name).unlink()
        if text is not None:
            (root / name).write_text(text)
    assert codes(DriftWatch(root), replace(PLAN, numa="bind", mem_nodes=CpuSet([0]))) == ["drift-memory-node"]
    assert codes(DriftWatch(root / "nowhere"), replace(PLAN, numa="bind", mem_nodes=CpuSet([0]))) == []


def test_a_quota_that_stops_the_engine_is_told_while_it_does(root: Path) -> None:
    now, stat = [0.0], root / "sys/fs/cgroup/a/cpu.stat"
    watch = DriftWatch(root, lambda: now[0])
    now[0], _ = 60.0, stat.write_text("nr_throttled 90\nthrottled_usec 4200000\n")
    (note,) = watch.look(GONE, PLAN)
    assert (note.level, note.code) == ("degraded", "throttled")
    assert "took 4.2 CPU seconds of the last 60 s" in note.text
    now[0], _ = 120.0, stat.write_text("nr_throttled 91\nthrottled_usec 4500000\n")
    assert codes(watch) == []  # half a per cent is not felt
    now[0] = 180.0
    assert codes(watch) == []


def test_memory_on_another_node_than_planned(root: Path) -> None:
    bound = replace(PLAN, numa="bind", mem_nodes=CpuSet([0]))
    (note,) = DriftWatch(root).look(GONE, bound)
    assert note.code == "drift-memory-node"
    assert "49%" in note.text
    assert "drop_caches" in note.text
    assert codes(DriftWatch(root), replace(bound, mem_nodes=CpuSet([0, 1]))) == []
    assert codes(DriftWatch(root)) == []


def test_resident_bytes_by_node() -> None:
    assert memory_nodes(MAPS) == {0: (3 + 1024) * 4096, 1: 1001 * 4096}
    assert memory_nodes("") == {}


def test_the_busiest_threads_are_those_that_compute() -> None:
    threads = [Thread(tid, CpuSet([0]), "other", 0, 0, run_s) for tid, run_s in
               [(10, 2.5), (11, 0.001), (12, 0.4), (13, 0.0), (14, 0.002)]]
    assert compute_threads(threads, PLAN) == {10, 12}
    assert compute_threads(threads[:1], PLAN) == {10}
    assert compute_threads(threads[3:4], PLAN) == frozenset()
    assert compute_threads(threads, replace(PLAN, threads_batch=3)) == {10, 12, 14}


def test_the_step_above_the_compute_threads() -> None:
    assert beside_priority(PLAN) is None
    assert beside_priority(replace(PLAN, policy="rr", rt_priority=10)) == 11
    assert beside_priority(replace(PLAN, policy="fifo", rt_priority=99)) == 99


@pytest.fixture
def worker() -> Iterator[int]:
    """A process with one thread that computes now and then and two that wait."""
    code = ("import threading, time\n"
            "for _ in range(2): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
            "print(flush=True)\n"
            "while True:\n  sum(range(100000)); time.sleep(0.01)\n")
    with subprocess.Popen(["python3", "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


def test_other_threads_are_lifted_or_the_refusal_is_told(worker: int) -> None:
    plan = replace(PLAN, threads=1, threads_batch=1, cpus=None, batch_cpus=None, policy="rr", rt_priority=3)
    refused = lift_threads(worker, plan)
    threads = read_threads(worker)
    if refused:  # no right to it, or no budget in this cgroup
        assert [note.code for note in refused] == ["rt-lift-refused"]
        assert {t.policy for t in threads} == {"other"}
    else:
        assert sorted(t.rt_priority for t in threads) == [3, 4, 4]
        assert next(t for t in threads if t.rt_priority == 3).tid == worker
        assert not {note.code for note in DriftWatch().look(worker, plan)} & {"drift-policy", "drift-rt-priority"}


def test_ordinary_plans_and_dead_processes_are_left_alone() -> None:
    assert lift_threads(os.getpid(), PLAN) == []
    assert lift_threads(GONE, replace(PLAN, policy="rr", rt_priority=3)) == []


def test_a_difference_is_told_only_as_long_as_it_lasts(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    found = [Note("degraded", "throttled", "for now")]
    supervisor = rig.supervisor(read_back=lambda pid: list(found))

    async def body() -> None:
        await supervisor.look_again()  # nothing serves yet
        await supervisor.wait_ready()
        assert [note.code for note in supervisor.notes()] == ["throttled"]
        found.clear()
        await supervisor.look_again()
        assert supervisor.notes() == ()

    drive(lambda: run_until_stopped(supervisor, body))
