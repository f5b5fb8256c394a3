"""Which settings of a machine to change for smooth decoding: from facts to a list of changes, each with its reason.

Never among them: real-time throttling (a looping thread would take a CPU for good) and taking CPUs offline (it takes
them from everybody).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from llamaops.core.cpuset import CpuSet
from llamaops.core.notes import Findings
from llamaops.core.placement import choose_cpus, usable_cpus
from llamaops.core.profile import PlacementSection
from llamaops.core.topology import Host

CPU = "sys/devices/system/cpu"
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
SWAPPINESS = "proc/sys/vm/swappiness"
IRQBALANCE_FILES = ("etc/default/irqbalance", "etc/sysconfig/irqbalance", "etc/irqbalance.env")
"""Where the daemon's unit reads its environment: Debian, Fedora and SUSE, Arch."""

ALLOWED = re.compile(
    rf"{CPU}/cpu\d+/cpufreq/(scaling_governor|energy_performance_preference)|{HUGE_PAGES}|{SWAPPINESS}"
    rf"|proc/irq/\d+/smp_affinity_list|{'|'.join(IRQBALANCE_FILES)}")
"""All that is ever written, whatever a journal says."""

LOW_SWAPPINESS, HIGH_SWAPPINESS = 1, 10
_BANNED = re.compile(r"^[ \t]*IRQBALANCE_BANNED_CPULIST=(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Change:
    """One file to write, its path relative to ``/``: what is there, what shall be, and why."""

    path: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True, slots=True)
class Frequency:
    """One CPU's cpufreq: governor now, those it could have, and the energy preference where the driver has one."""

    governor: str
    available: frozenset[str]
    preference: str | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What tuning looks at; None where the machine has no such thing.

    ``interrupts`` maps a device interrupt to the CPUs it may fire on. ``irqbalance`` tells whether the daemon runs;
    ``irqbalance_file`` is the path and text of its environment file. ``swap`` lists the areas in use.
    """

    frequencies: Mapping[int, Frequency] = field(default_factory=dict)
    huge_pages: str | None = None
    swappiness: int | None = None
    swap: tuple[str, ...] = ()
    interrupts: Mapping[int, CpuSet] = field(default_factory=dict)
    irqbalance: bool = False
    irqbalance_file: tuple[str, str] | None = None


def changes(host: Host, settings: Settings) -> list[Change]:
    """Return what would make decoding smoother here; nothing where all is well or nothing can be had."""
    decode = decode_cpus(host)
    return [*_governors(decode, settings), *_interrupts(host, decode, settings), *_huge_pages(settings),
            *_swappiness(settings)]


def decode_cpus(host: Host) -> CpuSet:
    """Return the CPUs that a profile which says ``auto`` decodes on."""
    usable = usable_cpus(host, Findings())
    if not usable:
        return CpuSet()
    return choose_cpus(PlacementSection(), host, usable, need_bytes=None, real_time=False,
                       findings=Findings()).cpus or CpuSet()


def _governors(decode: CpuSet, settings: Settings) -> Iterator[Change]:
    """Set the governor first: while it is ``performance`` drivers take no other preference, also on the way back."""
    for cpu in sorted(decode & settings.frequencies.keys()):
        now, folder = settings.frequencies[cpu], f"{CPU}/cpu{cpu}/cpufreq"
        if now.governor == "performance" or "performance" not in now.available:
            continue
        yield Change(f"{folder}/scaling_governor", now.governor, "performance",
                     "the clock need not rise again at each token")
        if now.preference not in (None, "performance"):
            yield Change(f"{folder}/energy_performance_preference", str(now.preference), "performance",
                         "goes with the governor")


def _interrupts(host: Host, decode: CpuSet, settings: Settings) -> Iterator[Change]:
    """Keep device interrupts off the decode CPUs, if there is anywhere else for them."""
    spare = CpuSet((host.online or CpuSet()) - decode)
    if not decode or not spare:
        return
    if settings.irqbalance:
        if settings.irqbalance_file:
            yield from _ban(host, decode, *settings.irqbalance_file)
        return  # it would undo what is written to single interrupts
    for number, allowed in sorted(settings.interrupts.items()):
        if allowed & decode:
            elsewhere = CpuSet(allowed & spare) or spare
            yield Change(f"proc/irq/{number}/smp_affinity_list", str(allowed), str(elsewhere),
                         f"interrupt {number} stays off decode CPUs {decode}")


def _ban(host: Host, decode: CpuSet, path: str, text: str) -> Iterator[Change]:
    """Add the decode CPUs to irqbalance's ban, in the last line that sets it (that one counts) or in a new one.

    A ban that is stated replaces the daemon's own one of isolated and nohz_full CPUs, so these are named too.
    """
    found = list(_BANNED.finditer(text))
    banned = _parsed(found[-1][1]) if found else CpuSet()
    wanted = CpuSet(banned | decode | host.isolated | host.nohz_full)
    if wanted == banned or not (host.online or CpuSet()) - wanted:
        return
    line = f"IRQBALANCE_BANNED_CPULIST={wanted}"
    if found:
        after = text[: found[-1].start()] + line + text[found[-1].end() :]
    else:
        after = text + ("\n" if text and not text.endswith("\n") else "") + line + "\n"
    yield Change(path, text, after, f"irqbalance puts no interrupt on decode CPUs {decode}")


def _parsed(value: str) -> CpuSet:
    try:
        return CpuSet.parse(value.strip().strip("\"'"))
    except ValueError:
        return CpuSet()


def _huge_pages(settings: Settings) -> Iterator[Change]:
    if settings.huge_pages == "never":
        yield Change(HUGE_PAGES, "never", "madvise", "fewer TLB misses for programs that ask for huge pages")


def _swappiness(settings: Settings) -> Iterator[Change]:
    """Keep an idle model in memory; swap in compressed memory (zram) is quick and wants its high value."""
    areas = [area for area in settings.swap if "zram" not in area]
    if areas and settings.swappiness is not None and settings.swappiness > HIGH_SWAPPINESS:
        yield Change(SWAPPINESS, str(settings.swappiness), str(LOW_SWAPPINESS),
                     "an idle model is not swapped out, so its next token need not wait for the disk")
