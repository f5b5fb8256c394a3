"""What is known of a machine: plain values, ``None`` where unknown. `llamaops.host.probe_host` fills them in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from llamaops.core.cpuset import CpuSet

NO_CPUS = CpuSet()


@dataclass(frozen=True, slots=True)
class Cpu:
    """One logical CPU.

    ``siblings`` holds the SMT siblings, this CPU included; ``None`` where sysfs does not say. ``capacity`` is arm64's
    ``cpu_capacity`` (0-1024), ``max_khz`` cpufreq's ``cpuinfo_max_freq``, ``performance`` membership of
    ``/sys/devices/cpu_core/cpus`` (hybrid x86; None on machines without that file).
    """

    id: int
    siblings: CpuSet | None = None
    package: int | None = None
    node: int | None = None
    capacity: int | None = None
    max_khz: int | None = None
    performance: bool | None = None
    llc: CpuSet | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node; ``cpus`` may be empty (memory-only), memory in bytes.

    ``usable`` is False where the cpuset keeps this process from the node's memory (``Mems_allowed_list``).
    """

    id: int
    cpus: CpuSet
    mem_total: int | None = None
    mem_free: int | None = None
    usable: bool = True


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The tightest limits over this process's whole cgroup ancestry.

    ``quota_cpus`` is quota/period of the tightest ancestor (None: no limit). ``memory_headroom`` is bytes that can
    still be charged in the tightest ancestor, page cache not counted as used. ``rt_runtime_us`` is
    ``cpu.rt_runtime_us`` of the process's own v1 cpu cgroup (None where RT_GROUP_SCHED is absent).
    ``weight_path`` is the ``cpu.weight`` or ``cpu.shares`` file that this process may write, relative to /.
    ``root_task_group`` tells whether the process sits in the scheduler's root group, the only one that autogroup splits
    by session (kernel/sched/autogroup.c). ``quota_path`` and ``memory_path`` name the tightest ancestors.
    """

    version: int | None = None
    path: str | None = None
    cpuset: CpuSet | None = None
    quota_cpus: float | None = None
    memory_headroom: int | None = None
    memory_limit: int | None = None
    rt_runtime_us: int | None = None
    weight_path: str | None = None
    root_task_group: bool | None = None
    quota_path: str | None = None
    memory_path: str | None = None


@dataclass(frozen=True, slots=True)
class Rights:
    """What this process may do to its own scheduling.

    ``lowest_nice`` is the smallest niceness allowed (-20 with CAP_SYS_NICE, else 20 - RLIMIT_NICE, at most the present
    one). ``rtprio_limit`` is RLIMIT_RTPRIO's soft value. ``memlock_limit`` is bytes, None for unlimited or unknown.
    ``rt_refusal`` and ``numa_refusal`` are what the kernel answered when real-time scheduling or a memory policy was
    tried in a child (None: permitted, or not tried, as on a recorded machine).
    """

    cap_sys_nice: bool | None = None
    lowest_nice: int | None = None
    rtprio_limit: int | None = None
    memlock_limit: int | None = None
    root: bool | None = None
    nice: int = 0
    rt_refusal: str | None = None
    numa_refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Memory of an engine that ends: private bytes (file pages count as free already), and the nodes it is bound to."""

    private_bytes: int = 0
    nodes: CpuSet | None = None


NOTHING_HELD = Held()


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as planning sees it. Every field may be unknown; CPUs are those of sysfs, usable or not."""

    system: str = "linux"
    machine: str | None = None
    cpu_model: str | None = None
    hypervisor: bool | None = None
    online: CpuSet | None = None
    affinity: CpuSet | None = None
    isolated: CpuSet = NO_CPUS
    nohz_full: CpuSet = NO_CPUS
    cpus: tuple[Cpu, ...] = ()
    nodes: tuple[Node, ...] = ()
    cgroup: Cgroup = Cgroup()
    rights: Rights = Rights()
    autogroup: bool | None = None
    rt_runtime_us: int | None = None
    rr_timeslice_ms: int | None = None
    mem_total: int | None = None
    mem_available: int | None = None
    isa: frozenset[str] = frozenset()
    tools: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Absolute paths of the launch tools that exist: taskset, chrt, nice, numactl, setpriv."""

    def without(self, held: Held) -> Host:
        """Return the machine as it will be once what an engine holds is free again."""
        group = self.cgroup
        headroom = None if group.memory_headroom is None else min(group.memory_headroom + held.private_bytes,
                                                                   group.memory_limit or sys.maxsize)
        nodes = tuple(replace(node, mem_free=node.mem_free + held.private_bytes)
                      if node.mem_free is not None and held.nodes == CpuSet.of([node.id]) else node
                      for node in self.nodes)
        available = None if self.mem_available is None else self.mem_available + held.private_bytes
        return replace(self, mem_available=available, cgroup=replace(group, memory_headroom=headroom), nodes=nodes)
