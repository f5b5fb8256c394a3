"""Seeing a machine, this one or a recorded one: `probe_host` reads what the kernel tells and writes nothing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from llamaops.core.cpuset import CpuSet
from llamaops.core.topology import Host, Rights
from llamaops.host.cgroups import read_cgroup
from llamaops.host.cpus import CPU, read_cpuinfo, read_cpus, read_nodes, read_online
from llamaops.host.files import Root, fields, kib, to_cpus
from llamaops.host.rights import probe_memory_policy, probe_rt, read_rights

__all__ = ["probe_host", "probe_rt"]

TOOLS = ("taskset", "chrt", "nice", "numactl", "setpriv")


def probe_host(root: Path | str = "/", *, affinity: CpuSet | None = None) -> Host:
    """Describe the machine below ``root``: ``/`` is this one, any other folder a recording with the same relative
    paths.

    Reads sysfs, procfs and cgroupfs only. What is missing or garbled is unknown (None), never an error. This machine is
    asked two things more, by trying in a child: whether real time and memory policies are permitted.
    ``affinity`` replaces this process's present mask: a relay that moved to its housekeeping CPUs plans with the mask
    it was started with.
    """
    files = Root(root)
    if files.live and not sys.platform.startswith("linux"):
        return _other_system()
    host = _read(files)
    if affinity is not None:
        host = replace(host, affinity=affinity)
    return replace(host, tools=_find_tools(), rights=_tried(host)) if files.live else host


def _read(files: Root) -> Host:
    name, isa, hypervisor, machine = read_cpuinfo(files)
    online, nodes, meminfo = read_online(files), read_nodes(files), fields(files.text("proc/meminfo"))
    return Host(
        machine=machine or (platform.machine() if files.live else None),
        cpu_model=name,
        hypervisor=hypervisor,
        online=online,
        affinity=_affinity(files),
        isolated=files.cpus(f"{CPU}/isolated") or CpuSet(),
        nohz_full=files.cpus(f"{CPU}/nohz_full") or CpuSet(),
        cpus=read_cpus(files, online, nodes),
        nodes=nodes,
        cgroup=read_cgroup(files),
        rights=read_rights(files),
        autogroup=_switch(files.number("proc/sys/kernel/sched_autogroup_enabled")),
        rt_runtime_us=files.number("proc/sys/kernel/sched_rt_runtime_us"),
        rr_timeslice_ms=files.number("proc/sys/kernel/sched_rr_timeslice_ms"),
        mem_total=kib(meminfo.get("MemTotal")),
        mem_available=kib(meminfo.get("MemAvailable")),
        isa=isa,
        tools=MappingProxyType({tool: tool for tool in TOOLS}),
    )


def _affinity(files: Root) -> CpuSet | None:
    listed = to_cpus(fields(files.text("proc/self/status")).get("Cpus_allowed_list"))
    if not listed and files.live:
        return CpuSet(os.sched_getaffinity(0))
    return listed or None


def _switch(number: int | None) -> bool | None:
    return None if number is None else number != 0


def _find_tools() -> Mapping[str, str]:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    found = {tool: shutil.which(tool, path=path) for tool in TOOLS}
    return MappingProxyType({tool: where for tool, where in found.items() if where})


def _tried(host: Host) -> Rights:
    """Ask the kernel what can't be read: a seccomp filter or a security module shows only when one tries."""
    with_memory = [node.id for node in host.nodes if node.usable and node.cpus and node.mem_total]
    several = len(with_memory) > 1
    return replace(host.rights, rt_refusal=probe_rt("rr", 1),
                   numa_refusal=probe_memory_policy(with_memory[0]) if several else None)


def _other_system() -> Host:
    """Describe a system without procfs: how many CPUs, how much memory, nothing to pin with."""
    import psutil

    memory = psutil.virtual_memory()
    return Host(
        system=platform.system().lower(),
        machine=platform.machine() or None,
        online=CpuSet(range(os.cpu_count() or 1)),
        mem_total=memory.total,
        mem_available=memory.available,
    )
