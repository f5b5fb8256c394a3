"""Which CPUs decode, how many threads, which CPUs are left for everything else, and where memory lies.

Each rule is one function; its reason goes to the `Findings`. CPU ids are only ever taken from sets, never computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from llamaops.core.cpuset import CpuSet
from llamaops.core.notes import Findings
from llamaops.core.numa import Numa, best_node, memory_policy
from llamaops.core.profile import PlacementSection
from llamaops.core.topology import Cpu, Host
from llamaops.errors import WrongProfile

RESERVE_FROM_CORES = 8
"""With this many physical cores, giving one away costs decode less than sharing one with interrupts does."""

CLASS_GAP = {"capacity": 0.8, "max_khz": 0.8, "max_khz_x86": 0.7}
"""A slower class is told apart when it reaches less than this share of the next faster one.

x86 cores of one class differ by a few per cent (favoured cores), and Zen 4c, the same core at 0.7 to 0.75 of the clock,
still earns its place; arm64's slowest gap between clusters by frequency alone is near 0.78 (RK3399).
"""


@dataclass(frozen=True, slots=True)
class CpuChoice:
    """CPUs and threads, before priority."""

    threads: int
    threads_batch: int
    cpus: CpuSet | None
    housekeeping: CpuSet | None
    numa: Numa | None
    mem_nodes: CpuSet | None


def usable_cpus(host: Host, findings: Findings) -> CpuSet | None:
    """Return online ∩ affinity ∩ every ancestor's cpuset; None where none of them is known.

    In an LXC container sysfs and cgroupfs may show other CPUs than the kernel allows; then the affinity mask, which is
    what the kernel enforces, wins.
    """
    views = [view for view in (host.online, host.affinity, host.cgroup.cpuset) if view]
    if not views:
        return None
    usable = CpuSet(frozenset.intersection(*views))
    if host.affinity and not usable:
        findings.info("cpu-views-disagree", f"sysfs says CPUs {host.online} are online and the cgroup allows "
                      f"{host.cgroup.cpuset}, but this process may run on {host.affinity}: the affinity mask is "
                      "believed")
        return host.affinity
    if not usable:
        return views[0]
    findings.because("usable_cpus", _usable_reason(host, usable))
    return usable


def _usable_reason(host: Host, usable: CpuSet) -> str:
    text = f"online {host.online}"
    if host.affinity and host.online and not host.online <= host.affinity:
        text += f", affinity mask {host.affinity}"
    if host.cgroup.cpuset and host.online and not host.online <= host.cgroup.cpuset:
        text += f", cgroup cpuset {host.cgroup.cpuset}"
    return f"{text}: {len(usable)} CPUs on {len(cores(host, usable))} cores"


def cores(host: Host, cpus: Iterable[int]) -> list[CpuSet]:
    """Group CPUs into physical cores (only the members given), ordered by their lowest CPU."""
    left, known, out = set(cpus), {cpu.id: cpu for cpu in host.cpus}, []
    for cpu in sorted(left):
        if cpu in left:
            siblings = known[cpu].siblings if cpu in known else None
            core = CpuSet(left & (siblings or {cpu}) | {cpu})
            left -= core
            out.append(core)
    return out


def capacity(host: Host, usable: CpuSet | None, findings: Findings) -> float | None:
    """Return how many CPUs' worth of time we get: usable cores, or the ancestry's tightest quota if that is less."""
    if usable is None:
        return None
    found, quota = float(len(cores(host, usable))), host.cgroup.quota_cpus
    if quota is not None and quota < found:
        found = quota
        findings.info("quota-limits-threads", f"the cgroup's CPU quota is {quota:g} of {len(usable)} CPUs "
                      f"({host.cgroup.quota_path or 'cgroup'}): more threads than that are stopped at every barrier")
    if found < 1:
        findings.risk("quota-below-one-cpu", f"the CPU quota of {quota:g} is less than one CPU: the engine is stopped "
                      "in every period, so tokens come in bursts; raise the quota to at least 1")
    return found


def performance_cpus(host: Host, cpus: CpuSet, findings: Findings) -> CpuSet:
    """Return the CPUs of the performance class, by the kernel's hybrid list, by capacity or by top frequency."""
    known = [cpu for cpu in host.cpus if cpu.id in cpus]
    hybrid = CpuSet(cpu.id for cpu in known if cpu.performance)
    if hybrid and hybrid != cpus:
        findings.because("cores", f"P cores {hybrid} by sys/devices/cpu_core; the E cores would hold up every barrier")
        return hybrid
    if any(cpu.performance is not None for cpu in known):
        return cpus
    frequency_gap = CLASS_GAP["max_khz_x86" if host.machine in ("x86_64", "i686") else "max_khz"]
    for name, gap in (("capacity", CLASS_GAP["capacity"]), ("max_khz", frequency_gap)):
        fast = _faster_class(known, name, gap)
        if fast and fast != cpus and len(known) == len(cpus):
            findings.because("cores", f"CPUs {fast} by {_CLASS_SOURCE[name]}; slower ones would hold up every barrier")
            return fast
    return cpus


_CLASS_SOURCE = {"capacity": "cpu_capacity", "max_khz": "cpuinfo_max_freq"}


def _faster_class(known: list[Cpu], name: str, gap: float) -> CpuSet | None:
    """Split at the widest relative step between the values, so that prime and gold stay together above silver."""
    values = {cpu.id: value for cpu in known if (value := getattr(cpu, name))}
    if not values or len(values) < len(known):
        return None
    levels = sorted(set(values.values()), reverse=True)
    steps = [(below / above, above) for above, below in pairwise(levels)]
    ratio, least = min(steps, default=(1.0, levels[-1]))
    return CpuSet(cpu for cpu, value in values.items() if ratio >= gap or value >= least)


def choose_cpus(section: PlacementSection, host: Host, usable: CpuSet, *, need_bytes: int | None, real_time: bool,
                findings: Findings) -> CpuChoice:
    """Decide CPUs, threads, housekeeping and memory nodes on a machine whose CPUs are known.

    ``need_bytes`` is the least memory the engine takes (None: unknown), for the question whether one node holds it.
    ``real_time`` keeps one usable CPU free of us. Raises WrongProfile for an explicit value that can't be carried out.
    """
    cpus = (_auto_cpus(section, host, usable, need_bytes, real_time, findings) if section.cpus == "auto"
            else _explicit_cpus(section.cpus, host, usable, findings))
    threads, batch = _threads(section, host, cpus, findings)
    if section.cpus == "auto":
        cpus = _widened(host, usable, cpus, max(threads, batch), section, findings)
    _check_counts(section, host, cpus, max(threads, batch), findings)
    if real_time and not usable - cpus:
        raise WrongProfile("no CPU would be left free of real-time threads",
                           where="placement.cpus" if section.cpus != "auto" else "placement.threads",
                           why=f"the engine would take all of {usable}; real-time threads that spin there stop "
                           "everything else, the login shell included",
                           fix="leave one usable CPU out of placement.cpus, ask for fewer threads, or drop policy: "
                           f"{section.policy}")
    housekeeping = _housekeeping(section, host, usable, cpus, findings)
    numa, nodes = memory_policy(section, host, cpus, need_bytes, findings)
    return CpuChoice(threads, batch, cpus, housekeeping, numa, nodes)


def _explicit_cpus(asked: CpuSet, host: Host, usable: CpuSet, findings: Findings) -> CpuSet:
    """Check a CPU list against the machine; nothing is dropped silently."""
    _check_cpus(asked, host, usable, "placement.cpus")
    if isolated := CpuSet(asked & host.isolated):
        findings.risk("isolated-not-balanced", f"CPUs {isolated} are isolated from the scheduler's load balancing "
                      "(isolcpus): threads placed there stay on the CPU where they started, and may share one")
    findings.because("placement.cpus", "as the profile says")
    return asked


def _check_cpus(asked: CpuSet, host: Host, usable: CpuSet, where: str) -> None:
    if host.online and (offline := CpuSet(asked - host.online)):
        present = {cpu.id for cpu in host.cpus}
        why = "offline" if offline <= present else "not there, or offline"
        raise WrongProfile(f"CPU {offline} can't be used", where=where, why=f"it is {why}; online are {host.online}",
                           fix=f"choose from {usable}")
    reachable = usable | (host.isolated & (host.cgroup.cpuset or host.isolated))
    if refused := CpuSet(asked - reachable):
        inside = host.cgroup.cpuset is not None and not refused <= host.cgroup.cpuset
        limit = f"the cgroup's cpuset is {host.cgroup.cpuset}" if inside else f"the affinity mask is {host.affinity}"
        raise WrongProfile(f"CPU {refused} may not be used by this process", where=where, why=limit,
                           fix=f"choose from {usable}, or widen the limit (systemd: AllowedCPUs=, container: "
                           "--cpuset-cpus)")


def _auto_cpus(section: PlacementSection, host: Host, usable: CpuSet, need_bytes: int | None, real_time: bool,
               findings: Findings) -> CpuSet:
    """Take one CPU per performance core, inside one NUMA node where the model fits there."""
    pool = CpuSet(usable - host.isolated) or usable
    if pool != usable:
        findings.info("isolated-cpus-left-alone", f"CPUs {CpuSet(usable & host.isolated)} are isolated (isolcpus) and "
                      "not load-balanced; name them in placement.cpus to use them")
    if isinstance(section.housekeeping, CpuSet):
        _check_cpus(section.housekeeping, host, usable, "placement.housekeeping")
        pool = _without(pool, section.housekeeping)
    pool = best_node(section, host, pool, need_bytes, lambda part: len(_wanted(section, host, part, Findings())))
    decode = _wanted(section, host, pool, findings)
    reserved = _reserved_core(section, host, usable, decode, real_time)
    if reserved:
        decode = CpuSet(decode - reserved)
    findings.because("placement.cpus", _cpus_reason(section, host, pool, decode, reserved, real_time))
    return decode


def _without(pool: CpuSet, housekeeping: CpuSet) -> CpuSet:
    left = CpuSet(pool - housekeeping)
    if not left:
        raise WrongProfile("housekeeping takes every usable CPU", where="placement.housekeeping",
                           why=f"usable are {pool}", fix="leave at least one CPU for the engine")
    return left


def _wanted(section: PlacementSection, host: Host, pool: CpuSet, findings: Findings) -> CpuSet:
    fast = pool if section.cores == "all" else performance_cpus(host, pool, findings)
    if section.smt == "use":
        return fast
    return CpuSet(min(core) for core in cores(host, fast))


def _reserved_core(section: PlacementSection, host: Host, usable: CpuSet, decode: CpuSet,
                   real_time: bool) -> CpuSet | None:
    """Return what decode gives up: a core for housekeeping on large machines, or what real time must leave free.

    Nothing is given up when decode leaves usable CPUs anyway (E cores, SMT siblings, other nodes).
    """
    found = cores(host, decode)
    if usable - decode or len(decode) < 2:
        return None
    if real_time:
        return found[0] if len(found) > 1 else CpuSet({min(decode)})
    many = len(found) >= RESERVE_FROM_CORES and section.housekeeping == "auto"
    return found[0] if many else None


def _cpus_reason(section: PlacementSection, host: Host, pool: CpuSet, decode: CpuSet, reserved: CpuSet | None,
                 real_time: bool) -> str:
    fast = "" if section.cores == "all" else "performance "
    text = "every CPU (smt: use)" if section.smt == "use" else f"one CPU for each {fast}core"
    if section.smt != "use" and len(cores(host, pool)) == len(pool):
        text = f"every {fast}core (no SMT siblings among them)"
    if reserved:
        text += f"; core {reserved} is left {'free of real-time threads' if real_time else 'for housekeeping'}"
    return text


def _threads(section: PlacementSection, host: Host, cpus: CpuSet, findings: Findings) -> tuple[int, int]:
    """Return decode and prefill threads, both positive: llama-server's own default ignores masks and quotas."""
    places = len(cpus) if section.smt == "use" else len(cores(host, cpus))
    limit = max(1, math.floor(host.cgroup.quota_cpus)) if host.cgroup.quota_cpus is not None else places
    if section.threads == "auto":
        threads = min(places, limit)
        unit = "CPU" if section.smt == "use" else "core"
        findings.because("placement.threads", f"the CPU quota of {host.cgroup.quota_cpus:g}, rounded down"
                         if threads < places else f"one for each {unit} of {cpus}")
    else:
        threads = section.threads
        findings.because("placement.threads", "as the profile says")
    batch = threads if section.threads_batch == "auto" else section.threads_batch
    findings.because("placement.threads_batch", "as decode" if section.threads_batch == "auto" else "as the profile "
                     "says")
    return threads, batch


def _widened(host: Host, usable: CpuSet, cpus: CpuSet, threads: int, section: PlacementSection,
             findings: Findings) -> CpuSet:
    """Add CPUs for explicitly asked threads that have no core of their own: siblings first, then the rest."""
    if threads <= len(cpus) or cpus == usable:
        return cpus
    spare = usable - host.isolated - (section.housekeeping if isinstance(section.housekeeping, CpuSet) else CpuSet())
    near = {cpu for core in cores(host, usable) if core & cpus for cpu in core}
    ranked = sorted(spare - cpus, key=lambda cpu: (cpu not in near, cpu))
    wider = CpuSet(cpus | set(ranked[: threads - len(cpus)]))
    findings.because("placement.cpus", f"widened to {len(wider)} CPUs for the {threads} threads asked for")
    return wider


def _check_counts(section: PlacementSection, host: Host, cpus: CpuSet, threads: int, findings: Findings) -> None:
    if threads > len(cpus):
        findings.risk("threads-above-cpus", f"{threads} threads on {len(cpus)} CPUs ({cpus}): threads that wait for "
                      "each other share a CPU, which costs most of the speed; the count is kept because the profile "
                      "says so")
    elif threads > len(cores(host, cpus)) and section.smt != "use":
        findings.risk("threads-above-cores", f"{threads} threads on {len(cores(host, cpus))} physical cores: SMT "
                      "siblings share one core's arithmetic; the count is kept because the profile says so")
    if host.cgroup.quota_cpus is not None and threads > max(1, host.cgroup.quota_cpus):
        findings.risk("threads-above-quota", f"{threads} threads on a CPU quota of {host.cgroup.quota_cpus:g}: the "
                      "cgroup is stopped in every period; the count is kept because the profile says so")


def _housekeeping(section: PlacementSection, host: Host, usable: CpuSet, cpus: CpuSet,
                  findings: Findings) -> CpuSet | None:
    """Return CPUs for the relay, the engine's HTTP threads and interrupts: those that decode does not want."""
    if section.housekeeping == "none":
        findings.because("placement.housekeeping_cpus", "none, as the profile says")
        return None
    if isinstance(section.housekeeping, CpuSet):
        _check_cpus(section.housekeeping, host, usable, "placement.housekeeping")
        if shared := CpuSet(section.housekeeping & cpus):
            findings.risk("housekeeping-shared", f"CPUs {shared} are both for housekeeping and for decode")
        findings.because("placement.housekeeping_cpus", "as the profile says")
        return section.housekeeping
    spare = CpuSet(usable - cpus - host.isolated)
    quiet = Findings()
    slow = CpuSet(spare - performance_cpus(host, CpuSet(usable - host.isolated) or usable, quiet))
    beside = CpuSet(cpu for core in cores(host, usable) if core & cpus for cpu in core if cpu in spare)
    for found, why in ((slow, "the slower cores, which decode does not want"),
                       (CpuSet(spare - beside), "cores that decode leaves free"),
                       (beside, "SMT siblings of the decode cores")):
        if found:
            findings.because("placement.housekeeping_cpus", why)
            return found
    findings.because("placement.housekeeping_cpus", "none: too few cores to give one away; priorities decide instead")
    return None
