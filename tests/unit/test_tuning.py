"""Which settings would be changed, on machines made of values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamaops.core.cpuset import CpuSet
from llamaops.core.topology import Cpu, Host
from llamaops.core.tuning import ALLOWED, Change, Frequency, Settings, changes, decode_cpus

ALL = CpuSet.parse("0-7")
SMT = Host(online=ALL, affinity=ALL, cpus=tuple(Cpu(n, siblings=CpuSet([n % 4, n % 4 + 4])) for n in range(8)))
PLAIN = Host(online=CpuSet([0, 1]), affinity=CpuSet([0, 1]), cpus=(Cpu(0), Cpu(1)))
GOVERNORS = frozenset({"performance", "powersave", "ondemand"})


def by_path(host: Host, settings: Settings) -> dict[str, str]:
    return {change.path: change.after for change in changes(host, settings)}


def test_a_machine_without_any_of_it_is_left_alone() -> None:
    assert changes(Host(), Settings()) == []
    assert changes(SMT, Settings()) == []


def test_decode_cpus_are_those_of_a_profile_that_says_auto() -> None:
    assert decode_cpus(SMT) == CpuSet.parse("0-3")


def test_governor_and_preference_of_decode_cpus_only() -> None:
    slow = Frequency("powersave", GOVERNORS, "balance_performance")
    found = changes(SMT, Settings(frequencies=dict.fromkeys(range(8), slow)))
    assert [c.path.split("/")[-3] for c in found[::2]] == ["cpu0", "cpu1", "cpu2", "cpu3"]
    assert [(c.path.rsplit("/")[-1], c.before, c.after) for c in found[:2]] == [
        ("scaling_governor", "powersave", "performance"),
        ("energy_performance_preference", "balance_performance", "performance")]


@pytest.mark.parametrize("frequency", [Frequency("performance", GOVERNORS), Frequency("userspace", frozenset())])
def test_governors_that_need_or_allow_no_change(frequency: Frequency) -> None:
    assert changes(SMT, Settings(frequencies={0: frequency})) == []


@pytest.mark.parametrize(("now", "after"), [("0-7", "4-7"), ("0", "4-7"), ("3-4", "4"), ("5", None)])
def test_interrupts_go_where_they_may_and_nobody_decodes(now: str, after: str | None) -> None:
    found = by_path(SMT, Settings(interrupts={24: CpuSet.parse(now)}))
    assert found == ({"proc/irq/24/smp_affinity_list": after} if after else {})


def test_interrupts_stay_where_decode_takes_every_cpu() -> None:
    file = ("etc/default/irqbalance", "")
    settings = Settings(interrupts={24: CpuSet([0, 1])}, irqbalance=True, irqbalance_file=file)
    assert changes(PLAIN, settings) == []
    assert changes(PLAIN, replace(settings, irqbalance=False)) == []


@pytest.mark.parametrize(("text", "after"), [
    ("", "IRQBALANCE_BANNED_CPULIST=0-3\n"),
    ("# no newline", "# no newline\nIRQBALANCE_BANNED_CPULIST=0-3\n"),
    ('A=1\nIRQBALANCE_BANNED_CPULIST="7"\nB=2\n', "A=1\nIRQBALANCE_BANNED_CPULIST=0-3,7\nB=2\n"),
    ("#IRQBALANCE_BANNED_CPULIST=\n", "#IRQBALANCE_BANNED_CPULIST=\nIRQBALANCE_BANNED_CPULIST=0-3\n"),
    ("IRQBALANCE_BANNED_CPULIST=\nX=1", "IRQBALANCE_BANNED_CPULIST=0-3\nX=1"),
    ("IRQBALANCE_BANNED_CPULIST=zzz\n", "IRQBALANCE_BANNED_CPULIST=0-3\n"),
    ("IRQBALANCE_BANNED_CPULIST=0-4\n", None),
])
def test_irqbalance_is_told_and_single_interrupts_left_to_it(text: str, after: str | None) -> None:
    path = "etc/default/irqbalance"
    settings = Settings(interrupts={24: ALL}, irqbalance=True, irqbalance_file=(path, text))
    assert by_path(SMT, settings) == ({path: after} if after else {})


def test_irqbalance_keeps_its_own_ban_of_isolated_cpus() -> None:
    host = replace(SMT, isolated=CpuSet([7]), nohz_full=CpuSet([6]))
    found = by_path(host, Settings(irqbalance=True, irqbalance_file=("etc/default/irqbalance", "")))
    assert found["etc/default/irqbalance"] == "IRQBALANCE_BANNED_CPULIST=0-3,6-7\n"


def test_irqbalance_without_a_known_file_changes_nothing() -> None:
    assert changes(SMT, Settings(interrupts={24: ALL}, irqbalance=True)) == []


@pytest.mark.parametrize(("now", "after"), [("never", "madvise"), ("always", None), ("madvise", None)])
def test_huge_pages(now: str, after: str | None) -> None:
    assert list(by_path(PLAIN, Settings(huge_pages=now)).values()) == ([after] if after else [])


@pytest.mark.parametrize(("value", "areas", "after"), [
    (60, ("/dev/sda2",), ["1"]), (60, (), []), (180, ("/dev/zram0",), []), (10, ("/swapfile",), []),
    (None, ("/swapfile",), []),
])
def test_swappiness(value: int | None, areas: tuple[str, ...], after: list[str]) -> None:
    assert list(by_path(PLAIN, Settings(swappiness=value, swap=areas)).values()) == after


def test_nothing_else_can_ever_be_written() -> None:
    for path in ("proc/sys/kernel/sched_rt_runtime_us", "sys/devices/system/cpu/cpu1/online", "etc/passwd",
                 "proc/irq/1/../../sys/vm/swappiness", "/proc/sys/vm/swappiness", "proc/sys/vm/swappiness\n"):
        assert not ALLOWED.fullmatch(path)
    settings = Settings({0: Frequency("powersave", GOVERNORS, "power")}, "never", 60, ("/swap",), {24: ALL})
    found = changes(SMT, settings)
    assert len(found) == 5
    assert all(isinstance(c, Change) and ALLOWED.fullmatch(c.path) and c.reason for c in found)
