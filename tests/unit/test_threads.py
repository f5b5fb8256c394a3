from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llamaops.core.cpuset import CpuSet
from llamaops.core.plan import Placement
from llamaops.serve.threads import Thread, compare

PLAN = Placement(threads=2, threads_batch=2, cpus=CpuSet.parse("2-3"), batch_cpus=CpuSet.parse("2-3"),
                 housekeeping_cpus=CpuSet.parse("0"), policy="other", rt_priority=None, nice=-10, autogroup_nice=-10,
                 weight=None, relay_nice=-10, spin=1000, numa=None, mem_nodes=None)
AS_PLANNED = Thread(1, CpuSet.parse("2-3"), "other", -10, 0)


def codes(thread: Thread, plan: Placement = PLAN, autogroup: int | None = -10) -> list[str]:
    return [note.code for note in compare([AS_PLANNED, thread], autogroup, plan)]


@pytest.mark.parametrize(("change", "expected"), [
    ({}, []),
    ({"cpus": CpuSet.parse("3")}, []),  # narrower than planned is within the plan
    ({"cpus": CpuSet.parse("0-3")}, ["drift-cpus"]),
    ({"policy": "fifo", "rt_priority": 90, "nice": 0}, ["drift-policy"]),
    ({"nice": 0}, ["drift-nice"]),
    ({"policy": "batch", "nice": 5}, ["drift-policy", "drift-nice"]),
])
def test_drift(change: dict[str, Any], expected: list[str]) -> None:
    thread = replace(AS_PLANNED, **({"cpus": CpuSet.parse("2")} | change))
    plan = PLAN if change.get("cpus") != CpuSet.parse("0-3") else replace(PLAN, housekeeping_cpus=None)
    assert codes(thread, plan) == expected


@pytest.mark.parametrize(("live", "expected"), [(-10, []), (0, ["drift-autogroup"]), (None, [])])
def test_autogroup_drift(live: int | None, expected: list[str]) -> None:
    assert codes(AS_PLANNED, autogroup=live) == expected


def test_real_time_drift() -> None:
    plan = replace(PLAN, policy="rr", rt_priority=10, nice=None)
    weaker = replace(AS_PLANNED, policy="rr", rt_priority=5)
    assert [n.code for n in compare([replace(weaker, rt_priority=10), weaker], -10, plan)] == ["drift-rt-priority"]


def test_real_time_threads_beside_the_computing_ones_stand_a_step_above() -> None:
    plan = replace(PLAN, policy="rr", rt_priority=10, nice=None)
    computing = [replace(AS_PLANNED, tid=tid, policy="rr", rt_priority=10, run_s=1.0) for tid in (1, 2)]
    beside = replace(AS_PLANNED, tid=3, policy="rr", rt_priority=11, cpus=CpuSet.parse("0"))
    assert compare([*computing, beside], -10, plan) == []
    assert compare([*computing, replace(beside, rt_priority=20)], -10, plan) == []
    (note,) = compare([*computing, replace(beside, rt_priority=10)], -10, plan)
    assert note.code == "drift-rt-priority"
    assert "1 of 3 threads have real-time priority 10, planned were 10 for those that compute and 11" in note.text
    assert [n.code for n in compare([computing[0], replace(computing[1], rt_priority=11)], -10, plan)] == [note.code]


def test_compute_threads_do_not_belong_on_housekeeping_cpus() -> None:
    busy = [replace(AS_PLANNED, tid=tid, run_s=1.0) for tid in (1, 2)]
    idle = replace(AS_PLANNED, tid=3, cpus=CpuSet.parse("0"))
    assert compare([*busy, idle], -10, PLAN) == []
    strays = [busy[0], replace(busy[1], cpus=CpuSet.parse("0")), idle]
    assert [n.code for n in compare(strays, -10, PLAN)] == ["drift-cpus"]


@pytest.mark.parametrize(("cpus", "expected"), [
    (("2", "3"), []), (("2-3", "3"), []), (("3", "3"), ["drift-cpus"]),
])
def test_compute_threads_do_not_share_a_cpu_while_one_is_free(cpus: tuple[str, str], expected: list[str]) -> None:
    busy = [replace(AS_PLANNED, tid=i, run_s=1.0, cpus=CpuSet.parse(text)) for i, text in enumerate(cpus)]
    assert [n.code for n in compare(busy, -10, PLAN)] == expected


def test_more_threads_than_cpus_share_them_as_planned() -> None:
    busy = [replace(AS_PLANNED, tid=i, run_s=1.0, cpus=CpuSet.parse("2")) for i in range(2)]
    assert compare(busy, -10, replace(PLAN, cpus=CpuSet.parse("2"), batch_cpus=CpuSet.parse("2"))) == []


def test_fewer_threads_than_planned() -> None:
    assert [n.code for n in compare([AS_PLANNED], -10, PLAN)] == ["drift-threads"]
    assert compare([], None, PLAN) == []  # the process is gone, or there is no /proc: nothing can be said


def test_a_plan_that_leaves_things_open_is_met_by_anything() -> None:
    plan = replace(PLAN, cpus=None, nice=None, autogroup_nice=None)
    assert codes(replace(AS_PLANNED, nice=7, cpus=CpuSet.parse("9")), plan, autogroup=3) == []
