"""The plan: what was decided, with the reasons. `plan` is the only place where ``auto`` becomes a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llamaops.core.cpuset import CpuSet

Level = Literal["info", "degraded", "risk"]
Policy = Literal["other", "batch", "fifo", "rr"]


@dataclass(frozen=True, slots=True)
class Note:
    """One fallback or danger. ``code`` is stable and documented in docs/scheduling.md."""

    level: Level
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one decision fell as it did; ``what`` is the dotted plan field (``placement.threads``)."""

    what: str
    text: str


@dataclass(frozen=True, slots=True)
class Placement:
    """CPUs and priority. ``cpus`` None: no pinning (machines without affinity)."""

    threads: int
    threads_batch: int
    cpus: CpuSet | None
    batch_cpus: CpuSet | None
    housekeeping_cpus: CpuSet | None
    policy: Policy
    rt_priority: int | None
    nice: int | None
    autogroup_nice: int | None
    weight: int | None
    relay_nice: int | None
    spin: int | Literal["active", "passive"]
    numa: Literal["bind", "interleave"] | None
    mem_nodes: CpuSet | None


@dataclass(frozen=True, slots=True)
class Serving:
    """What llama-server is told about requests; ``context`` is tokens per slot."""

    slots: int
    context: int
    batch: int
    ubatch: int
    kv_type_k: str
    kv_type_v: str


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory sum in bytes; ``available_bytes`` None where unknown."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    prompt_cache_bytes: int
    total_bytes: int
    available_bytes: int | None
    lock: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided for one profile on one machine; contains no ``auto``."""

    placement: Placement
    serving: Serving
    memory: Memory
    usable_cpus: CpuSet | None
    capacity_cpus: float | None
    reasons: tuple[Reason, ...]
    notes: tuple[Note, ...]
