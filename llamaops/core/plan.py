"""The plan: what was decided, with the reasons. `plan` is the only place where ``auto`` becomes a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llamaops.core.cpuset import CpuSet
from llamaops.core.engine import Engine
from llamaops.core.memory import (
    Memory,
    Sizes,
    auto_prompt_cache_mib,
    available_memory,
    fit_memory,
    format_bytes,
    kv_types,
    least_bytes,
)
from llamaops.core.model import Model, is_embedding
from llamaops.core.notes import Findings, Level, Note, Reason
from llamaops.core.placement import CpuChoice, capacity, choose_cpus, usable_cpus
from llamaops.core.priority import Policy, permitted_policy, set_priority
from llamaops.core.profile import Profile
from llamaops.core.serving import (
    Calibration,
    choose_batch,
    choose_context,
    choose_slots,
    estimate,
    note_promises,
    with_context,
)
from llamaops.core.source import parse_source
from llamaops.core.topology import Host
from llamaops.errors import NotPermitted, WrongProfile

if TYPE_CHECKING:
    from llamaops.core.launch import LaunchSpec  # launch renders plans, so it imports us

__all__ = ["Calibration", "Level", "Memory", "Note", "Placement", "Plan", "Policy", "Reason", "Serving", "decisions",
           "plan", "plan_json"]

PERMISSION_CODES = frozenset({"rt-refused", "nice-refused", "numa-refused"})
"""Notes whose cause is a right this process lacks: under ``strict`` they end with 77 instead of 78."""


@dataclass(frozen=True, slots=True)
class Placement:
    """CPUs and priority. ``cpus`` None: no pinning (machines without affinity, or without taskset).

    ``nice``, ``autogroup_nice`` and ``relay_nice`` are absolute; ``weight`` is in cgroup v2 ``cpu.weight`` units
    (1-10000).
    """

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
    embeddings: bool = False


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


def plan(profile: Profile, host: Host, model: Model | None, engine: Engine | None,
         calibration: Calibration | None = None) -> Plan:
    """Decide everything for one profile on one machine.

    Without ``model`` or ``engine`` facts the plan assumes a current llama-server and leaves the memory sum open. Raises
    WrongProfile (78) for an explicit value that can't be carried out, for a sum that does not fit, and, under
    ``placement.strict``, for every degraded note; NotPermitted (77) when such a note is about a missing right.
    """
    findings = Findings()
    usable = usable_cpus(host, findings)
    found = capacity(host, usable, findings)
    policy = permitted_policy(profile.placement, host, usable, findings)
    context = choose_context(profile, model, findings)
    choice = _choose(profile, host, usable, found, least_bytes(model, context), policy, findings)
    placement = _place(profile, host, policy, choice, usable, engine, findings)
    if model is not None and model.chosen is not None:
        findings.because("model.quantize", model.chosen)
    serving, memory = _serve(profile, host, model, placement, context, calibration, findings)
    _general_notes(host, memory, findings)
    if profile.placement.strict:
        _refuse_degraded(findings.notes)
    return Plan(placement, serving, memory, usable, found, tuple(findings.reasons), tuple(findings.notes))


def _choose(profile: Profile, host: Host, usable: CpuSet | None, found: float | None, need: int | None, policy: Policy,
            findings: Findings) -> CpuChoice:
    section = profile.placement
    if host.system == "linux" and usable is not None and found is not None:
        return choose_cpus(section, host, usable, need_bytes=need, real_time=policy in ("fifo", "rr"),
                           findings=findings)
    count = len(host.online) if host.online else 1
    threads = count if section.threads == "auto" else section.threads
    findings.because("placement.threads", f"{count} CPUs are there; which of them are cores is unknown"
                     if section.threads == "auto" else "as the profile says")
    if host.system == "linux":
        findings.degraded("cpus-unknown", "nothing tells which CPUs there are, so nothing is pinned; state "
                          "placement.threads")
    else:
        findings.info("no-affinity", f"{host.system} has no CPU affinity, niceness classes or cgroups that llamaops "
                      "uses: planned without pinning and priority")
    batch = threads if section.threads_batch == "auto" else section.threads_batch
    return CpuChoice(threads, batch, None, None, None, None)


def _place(profile: Profile, host: Host, policy: Policy, choice: CpuChoice, usable: CpuSet | None,
           engine: Engine | None,
           findings: Findings) -> Placement:
    alone = bool(usable and choice.cpus and usable - choice.cpus)
    priority = set_priority(profile.placement, host, policy, alone=alone, engine=engine, findings=findings)
    cpus = _pinned(choice, host, usable, findings)
    return Placement(
        threads=choice.threads, threads_batch=choice.threads_batch, cpus=cpus, batch_cpus=cpus,
        housekeeping_cpus=choice.housekeeping, policy=priority.policy, rt_priority=priority.rt_priority,
        nice=priority.nice, autogroup_nice=priority.autogroup_nice, weight=priority.weight,
        relay_nice=priority.relay_nice, spin=priority.spin, numa=choice.numa, mem_nodes=choice.mem_nodes,
    )


def _pinned(choice: CpuChoice, host: Host, usable: CpuSet | None, findings: Findings) -> CpuSet | None:
    """Return the CPUs that a wrapper can pin to: numactl where memory is bound too, else taskset."""
    if choice.cpus is None or choice.numa == "bind" or "taskset" in host.tools:
        return choice.cpus
    if choice.cpus != usable:
        findings.degraded("tool-missing-taskset", "taskset is not installed, so the engine is not pinned to "
                          f"{choice.cpus}; install util-linux")
    return None


def _serve(profile: Profile, host: Host, model: Model | None, placement: Placement, context: int,
           calibration: Calibration | None, findings: Findings) -> tuple[Serving, Memory]:
    """Size slots, batch and memory; what memory takes away from the slots or the context changes the batch."""
    threads = min(placement.threads_batch, len(placement.cpus) if placement.cpus else placement.threads_batch)
    known = calibration or estimate(model, threads, host)
    rates = with_context(known, model, context) if known else None
    measured = rates if calibration else None

    def batch(slots: int, context: int) -> int:
        return choose_batch(profile, model, slots, context, rates, measured=measured is not None, findings=findings)

    slots = choose_slots(profile, placement.threads, context, measured, findings)
    type_k, type_v = kv_types(profile)
    cache = _prompt_cache_mib(profile, host, model, context, findings)
    sizes = Sizes(slots, context, batch(slots, context), type_k, type_v, cache)
    sizes, memory = fit_memory(profile, model, sizes, host, batch, findings)
    _explain_sizes(sizes, memory, batch(sizes.slots, sizes.context), findings)
    if measured is not None and not is_embedding(model):
        note_promises(profile, sizes.slots, sizes.ubatch, measured, findings)
    serving = Serving(sizes.slots, sizes.context, sizes.ubatch, sizes.ubatch, sizes.kv_type_k, sizes.kv_type_v,
                      is_embedding(model))
    return serving, memory


def _explain_sizes(sizes: Sizes, memory: Memory, wanted: int, findings: Findings) -> None:
    if sizes.ubatch < wanted:
        findings.because("serving.ubatch", f"less than the {wanted} wanted, to fit into memory")
    if memory.available_bytes is not None:
        findings.because("memory", f"{format_bytes(memory.total_bytes)} of {format_bytes(memory.available_bytes)}")


def _prompt_cache_mib(profile: Profile, host: Host, model: Model | None, context: int, findings: Findings) -> int:
    asked = profile.memory.prompt_cache_mib
    if asked != "auto":
        return asked
    findings.because("memory.prompt_cache", "two full contexts, at most 512 MiB; llama-server's own default is 8192 "
                     "MiB")
    available, _ = available_memory(host, None if profile.memory.limit == "auto" else profile.memory.limit)
    return auto_prompt_cache_mib(model, context, available)


def _general_notes(host: Host, memory: Memory, findings: Findings) -> None:
    if host.hypervisor:
        findings.info("virtual-machine", "a hypervisor is below this machine: cores and caches may be invented, and "
                      "the host may give CPUs to others")
    limit = host.rights.memlock_limit
    enough = memory.weights_bytes > 0 and limit is not None and limit >= memory.total_bytes
    if memory.lock and limit is not None and not enough:
        findings.risk("memlock-limited", f"memory.lock is asked for and RLIMIT_MEMLOCK is {limit // 1024} KiB: what is "
                      "beyond it is not locked (systemd: LimitMEMLOCK=infinity, Docker: --ulimit memlock=-1)")
    if "setpriv" not in host.tools and host.system == "linux":
        findings.info("tool-missing-setpriv", "setpriv is not installed; the engine ends with its supervisor by other "
                      "means")


def _refuse_degraded(notes: list[Note]) -> None:
    found = [note for note in notes if note.level == "degraded"]
    if not found:
        return
    denied = any(note.code in PERMISSION_CODES for note in found)
    raise (NotPermitted if denied else WrongProfile)(
        "the plan falls short of what was asked, and placement.strict is set",
        where="placement.strict",
        why="; ".join(f"{note.code}: {note.text}" for note in found),
        fix="mend the cause, or set placement.strict: false to serve with the fallback",
    )


def plan_json(profile: Profile, host: Host, model: Model | None, engine: Engine | None, planned: Plan,
              spec: LaunchSpec | None = None) -> dict[str, Any]:
    """Return the document of ``llamaops plan --json``: CPU sets as Linux lists, sizes in bytes, unknown as None."""
    p, s, m = planned.placement, planned.serving, planned.memory
    return {
        "profile": {"name": profile.name, "source": str(parse_source(profile.model.source))},
        "host": {
            "system": host.system, "machine": host.machine, "cpu_model": host.cpu_model, "hypervisor": host.hypervisor,
            "online_cpus": _list(host.online), "usable_cpus": _list(planned.usable_cpus),
            "isolated_cpus": _list(host.isolated), "capacity_cpus": planned.capacity_cpus,
            "quota_cpus": host.cgroup.quota_cpus, "cgroup_version": host.cgroup.version,
            "numa_nodes": [node.id for node in host.nodes], "memory_available_bytes": m.available_bytes,
        },
        "engine": None if engine is None else {
            "path": engine.path, "version": engine.version, "openmp": engine.openmp, "origin": engine.origin},
        "model": None if model is None else {
            "path": model.path, "architecture": model.architecture, "name": model.name, "quant": model.quant,
            "size_bytes": model.size_bytes, "context_train": model.context_train},
        "placement": {
            "threads": p.threads, "threads_batch": p.threads_batch, "cpus": _list(p.cpus),
            "batch_cpus": _list(p.batch_cpus), "housekeeping_cpus": _list(p.housekeeping_cpus), "policy": p.policy,
            "rt_priority": p.rt_priority, "nice": p.nice, "autogroup_nice": p.autogroup_nice, "weight": p.weight,
            "relay_nice": p.relay_nice, "spin": p.spin, "numa": p.numa, "mem_nodes": _list(p.mem_nodes)},
        "serving": {"slots": s.slots, "context": s.context, "batch": s.batch, "ubatch": s.ubatch,
                    "kv_type_k": s.kv_type_k, "kv_type_v": s.kv_type_v, "embeddings": s.embeddings},
        "memory": {
            "weights_bytes": m.weights_bytes, "kv_bytes": m.kv_bytes, "compute_bytes": m.compute_bytes,
            "prompt_cache_bytes": m.prompt_cache_bytes, "process_bytes": m.process_bytes,
            "repack_bytes": m.repack_bytes, "total_bytes": m.total_bytes, "available_bytes": m.available_bytes,
            "lock": m.lock, "mmap": m.mmap},
        "launch": None if spec is None else {"argv": list(spec.argv), "env": spec.visible_env()},
        "reasons": [{"what": reason.what, "text": reason.text} for reason in planned.reasons],
        "notes": [{"level": note.level, "code": note.code, "text": note.text} for note in planned.notes],
    }


def _list(cpus: CpuSet | None) -> str | None:
    return None if cpus is None else str(cpus)


def decisions(planned: Plan) -> list[tuple[str, str, str]]:
    """Return (field, value, reason) of every decision, for people; fields without a reason of their own have ``""``."""
    p, s = planned.placement, planned.serving
    why = {reason.what: reason.text for reason in planned.reasons}
    values: dict[str, object] = {
        "usable_cpus": planned.usable_cpus, "capacity_cpus": planned.capacity_cpus,
        **{f"placement.{name}": getattr(p, name) for name in p.__dataclass_fields__},
        **{f"serving.{name}": getattr(s, name) for name in s.__dataclass_fields__},
    }
    rows = [(what, _shown(value), why.get(what, "")) for what, value in values.items()]
    return [row for row in rows if row[1] != "-" or row[2]]


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
