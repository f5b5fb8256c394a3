"""What a tuner may turn: profile keys that are still ``auto``, with the values worth a try on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass

from llamaops.core.engine import Engine
from llamaops.core.plan import Plan
from llamaops.core.profile import Profile
from llamaops.core.topology import Host

Setting = tuple[str, str]
"""A dotted profile key and its value as YAML: what ``--set`` takes."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One profile key and the values to try besides the present one."""

    key: str
    values: tuple[str, ...]


def knobs(profile: Profile, plan: Plan, host: Host, engine: Engine | None, *, streams: int,
          real_time: bool) -> list[Knob]:
    """Return the knobs of a profile, those with the largest effect first.

    A key that the profile sets is a person's decision and no knob. Never more threads than CPUs that are ours (spinning
    threads beyond them wreck the speed), never unbounded spin on shared CPUs, never a KV type below q8_0 (that trades
    quality, which no bench of speed sees), and real time only where ``real_time`` asks for it.
    """
    place = profile.placement
    found = [
        Knob("placement.threads", _threads(plan) if place.threads == "auto" else ()),
        Knob("placement.spin", ("passive", "10000", "100000") if place.spin == "auto" else ()),
        Knob("placement.nice", _niceness(plan, host) if place.nice == "auto" else ()),
        Knob("placement.policy", ("rr", "fifo") if real_time and place.policy == "auto" else ()),
        Knob("placement.smt", ("use",) if _has_smt(host) and _unset(place, "smt") else ()),
        Knob("placement.cores", ("all",) if _is_hybrid(host) and _unset(place, "cores") else ()),
        Knob("placement.threads_batch", (str(_most_threads(plan)),) if place.threads_batch == "auto" else ()),
        Knob("serve.slots", (str(streams),) if streams > 1 and profile.serve.slots == "auto" else ()),
        Knob("model.kv_type", ("q8_0",) if profile.model.kv_type == "auto" else ()),
        Knob("engine.args", _flash_attention(profile, engine)),
    ]
    return [knob for knob in found if knob.values]


def _unset(section: object, key: str) -> bool:
    return key not in section.model_fields_set  # type: ignore[attr-defined]  # a pydantic section


def _most_threads(plan: Plan) -> int:
    usable = len(plan.usable_cpus) if plan.usable_cpus else plan.placement.threads
    return max(1, min(usable, int(plan.capacity_cpus or usable)))


def _threads(plan: Plan) -> tuple[str, ...]:
    """Return half, one fewer and all that may be had, without what the plan has already."""
    now, most = plan.placement.threads, _most_threads(plan)
    return tuple(str(n) for n in sorted({(now + 1) // 2, max(1, now - 1), most} - {now}))


def _niceness(plan: Plan, host: Host) -> tuple[str, ...]:
    lowest = host.rights.lowest_nice
    return ("-20",) if lowest is not None and lowest <= -20 and plan.placement.nice != -20 else ()


def _has_smt(host: Host) -> bool:
    return any(cpu.siblings and len(cpu.siblings) > 1 for cpu in host.cpus)


def _is_hybrid(host: Host) -> bool:
    return any(cpu.performance is False for cpu in host.cpus) or len({cpu.capacity for cpu in host.cpus}) > 1


def _flash_attention(profile: Profile, engine: Engine | None) -> tuple[str, ...]:
    given = profile.engine.args
    if engine is None or "--flash-attn" not in engine.flags or {"--flash-attn", "-fa"} & set(given):
        return ()
    return (json.dumps([*given, "--flash-attn", "off"]),)


def unsafe(plan: Plan, base: Plan) -> str | None:
    """Return why a point must not be run: its plan degrades or risks what the start's does not, None where it may."""
    known = {note.code for note in base.notes}
    bad = next((note for note in plan.notes if note.level != "info" and note.code not in known), None)
    if bad:
        return f"{bad.text} [{bad.code}]"
    if max(plan.placement.threads, plan.placement.threads_batch) > _most_threads(base):
        return f"more threads than the {_most_threads(base)} CPUs that are ours"
    return None
