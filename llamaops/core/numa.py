"""On which NUMA nodes the engine's CPUs and pages lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from llamaops.core.cpuset import CpuSet
from llamaops.core.notes import Findings
from llamaops.core.profile import PlacementSection
from llamaops.core.topology import Host

Numa = Literal["bind", "interleave"]


def nodes_of(host: Host, cpus: CpuSet) -> CpuSet:
    """Return the nodes that the CPUs belong to."""
    return CpuSet(node.id for node in host.nodes if node.cpus & cpus)


def _fits(host: Host, node: int, need_bytes: int | None) -> bool:
    """Tell whether a node's free memory holds the engine; a node that states no memory is taken at its word of none."""
    found = next(n for n in host.nodes if n.id == node)
    room = found.mem_free if found.mem_free is not None else found.mem_total
    return found.usable and found.mem_total != 0 and (room is None or need_bytes is None or need_bytes <= room)


def best_node(section: PlacementSection, host: Host, pool: CpuSet, need_bytes: int | None,
              size: Callable[[CpuSet], int]) -> CpuSet:
    """Narrow the pool to the largest node among those that hold the model; leave it whole where none does.

    ``size`` counts the decode cores of a part of the pool.
    """
    nodes = nodes_of(host, pool)
    if section.numa in ("off", "interleave") or len(nodes) < 2:
        return pool
    parts = {node.id: CpuSet(node.cpus & pool) for node in host.nodes if node.id in nodes}
    free = {node.id: node.mem_free or 0 for node in host.nodes}
    holding = [node for node in nodes if _fits(host, node, need_bytes)]
    if not holding and section.numa == "auto":
        return pool
    return parts[max(holding or nodes, key=lambda node: (size(parts[node]), free[node], -node))]


def memory_policy(section: PlacementSection, host: Host, cpus: CpuSet, need_bytes: int | None,
          findings: Findings) -> tuple[Numa | None, CpuSet | None]:
    """Bind memory to the decode CPUs' node if it holds the model, else spread it over their nodes.

    Nodes without CPUs (CXL memory, a far tier) are never bound: the first touch of a page there would slow every token.
    """
    nodes = nodes_of(host, cpus)
    with_memory = [node for node in host.nodes if node.usable and node.mem_total != 0]
    if section.numa == "off" or not nodes or len(host.nodes) < 2 or len(with_memory) < 2:
        if section.numa in ("bind", "interleave"):
            findings.info("numa-single-node", "there is one NUMA node, so there is nothing to bind or interleave")
        findings.because("placement.numa", "off, as the profile says" if section.numa == "off" else "one NUMA node")
        return None, None
    if "numactl" not in host.tools:
        findings.degraded("tool-missing-numactl", "numactl is not installed, so only CPUs are bound and memory comes "
                          "from wherever it is first touched; install numactl")
        return None, None
    if host.rights.numa_refusal:
        findings.degraded("numa-refused", f"memory can't be placed: {host.rights.numa_refusal}; only CPUs are bound. "
                          "Allow set_mempolicy (Docker: --cap-add SYS_NICE)")
        return None, None
    fits = len(nodes) == 1 and all(_fits(host, node, need_bytes) for node in nodes)
    if section.numa == "bind" or (section.numa == "auto" and fits):
        if not fits and len(nodes) == 1:
            findings.risk("numa-bind-tight", f"node {nodes} has less free memory than the engine needs; numa: bind is "
                          "kept because the profile says so")
        findings.because("placement.numa", f"CPUs and memory on node {nodes}")
        return "bind", nodes
    spread = CpuSet(node.id for node in with_memory if node.cpus and (node.id in nodes or len(nodes) == 1)) or nodes
    findings.because("placement.numa", f"no single node holds CPUs and model: pages are spread over nodes {spread}")
    return "interleave", spread
