"""What an engine holds is there again for the one that replaces it."""

from __future__ import annotations

from llamaops.core.cpuset import CpuSet
from llamaops.core.topology import NOTHING_HELD, Cgroup, Held, Host, Node

MACHINE = Host(
    mem_available=1000, cgroup=Cgroup(memory_headroom=500, memory_limit=800),
    nodes=(Node(0, CpuSet.parse("0"), mem_free=100), Node(1, CpuSet.parse("1"), mem_free=None)))


def test_private_memory_counts_as_available() -> None:
    later = MACHINE.without(Held(200))
    assert (later.mem_available, later.cgroup.memory_headroom) == (1200, 700)
    assert later.nodes == MACHINE.nodes


def test_a_group_never_has_more_than_its_limit() -> None:
    assert MACHINE.without(Held(900)).cgroup.memory_headroom == 800


def test_the_node_that_the_engine_is_bound_to_gets_it_back() -> None:
    assert [node.mem_free for node in MACHINE.without(Held(200, CpuSet.parse("0"))).nodes] == [300, None]
    assert [node.mem_free for node in MACHINE.without(Held(200, CpuSet.parse("0-1"))).nodes] == [100, None]


def test_nothing_held_and_nothing_known_change_nothing() -> None:
    assert MACHINE.without(NOTHING_HELD) == MACHINE
    assert Host().without(Held(5)) == Host()
