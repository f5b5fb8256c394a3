"""CPUs and NUMA nodes from sysfs and ``/proc/cpuinfo``."""

from __future__ import annotations

import re

from llamaops.core.cpuset import CpuSet
from llamaops.core.topology import Cpu, Node
from llamaops.host.files import Root, fields, kib, to_cpus

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"


def read_online(root: Root) -> CpuSet | None:
    """Return the CPUs that are online: sysfs's list, else those it shows a topology for, else those of ``cpuinfo``.

    The topology folder is there only while a CPU is online (Documentation/admin-guide/cputopology.rst).
    """
    if online := root.cpus(f"{CPU}/online"):
        return online
    found = CpuSet(cpu for cpu in _numbered(root, CPU, "cpu") if root.is_dir(f"{CPU}/cpu{cpu}/topology"))
    listed = re.findall(r"^processor\s*:\s*(\d+)\s*$", root.text("proc/cpuinfo") or "", re.MULTILINE)
    return found or CpuSet(int(cpu) for cpu in listed) or None


def _numbered(root: Root, folder: str, prefix: str) -> list[int]:
    """Return the numbers of the folders named ``cpu0``, ``cpu1`` …"""
    names = root.names(folder)
    return sorted(int(name[len(prefix):]) for name in names if re.fullmatch(rf"{prefix}\d{{1,5}}", name))


def read_cpus(root: Root, online: CpuSet | None, nodes: tuple[Node, ...]) -> tuple[Cpu, ...]:
    """Describe every CPU that sysfs has a folder for; without sysfs, the online ones by number alone."""
    found = set(_numbered(root, CPU, "cpu"))
    performance = root.cpus("sys/devices/cpu_core/cpus")
    node_of = {cpu: node.id for node in nodes for cpu in node.cpus}
    return tuple(_read_cpu(root, cpu, performance, node_of.get(cpu)) for cpu in sorted(found | (online or CpuSet())))


def _read_cpu(root: Root, cpu: int, performance: CpuSet | None, node: int | None) -> Cpu:
    folder = f"{CPU}/cpu{cpu}"
    siblings = root.cpus(f"{folder}/topology/core_cpus_list") or root.cpus(f"{folder}/topology/thread_siblings_list")
    return Cpu(
        id=cpu,
        siblings=siblings or None,
        package=root.number(f"{folder}/topology/physical_package_id"),
        node=node,
        capacity=root.number(f"{folder}/cpu_capacity"),
        max_khz=root.number(f"{folder}/cpufreq/cpuinfo_max_freq"),
        performance=cpu in performance if performance else None,
        llc=_last_level_cache(root, folder),
    )


def _last_level_cache(root: Root, folder: str) -> CpuSet | None:
    """Return the CPUs that share the highest-level cache of this one."""
    best: tuple[int, CpuSet] | None = None
    for name in root.names(f"{folder}/cache"):
        level, shared = root.number(f"{folder}/cache/{name}/level"), root.cpus(f"{folder}/cache/{name}/shared_cpu_list")
        if level is not None and shared and (best is None or level > best[0]):
            best = (level, shared)
    return best[1] if best else None


def read_nodes(root: Root) -> tuple[Node, ...]:
    """Describe the NUMA nodes, those without CPUs included."""
    allowed = to_cpus(fields(root.text("proc/self/status")).get("Mems_allowed_list"))
    return tuple(_read_node(root, node, allowed) for node in _numbered(root, NODE, "node"))


def _read_node(root: Root, node: int, allowed: CpuSet | None) -> Node:
    """Read one node; page cache counts as free, as MemAvailable counts it for the whole machine."""
    text = re.sub(r"^Node \d+ ", "", root.text(f"{NODE}/node{node}/meminfo") or "", flags=re.MULTILINE)
    memory = {key: kib(value) for key, value in fields(text).items()}
    free, cache = memory.get("MemFree"), [memory.get("Inactive(file)"), memory.get("Active(file)")]
    return Node(
        id=node,
        cpus=root.cpus(f"{NODE}/node{node}/cpulist") or CpuSet(),
        mem_total=memory.get("MemTotal"),
        mem_free=None if free is None else free + sum(size for size in cache if size),
        usable=allowed is None or node in allowed,
    )


def read_cpuinfo(root: Root) -> tuple[str | None, frozenset[str], bool | None, str | None]:
    """Return model name, ISA flags, whether a hypervisor is below us, and the machine (``x86_64``, ``aarch64``).

    x86 lists ``flags``, arm64 ``Features``, RISC-V ``isa``; only x86 tells of the hypervisor.
    """
    text = root.text("proc/cpuinfo")
    if not text:
        return None, frozenset(), None, None
    info = fields(text)
    words = frozenset((info.get("flags") or info.get("Features") or info.get("isa") or "").split())
    name = info.get("model name") or info.get("Model") or info.get("Hardware") or info.get("uarch")
    if "flags" in info:
        return name, words, "hypervisor" in words, "x86_64"
    machine = "aarch64" if "CPU implementer" in info else "riscv64" if "isa" in info else None
    return name, words, None, machine
