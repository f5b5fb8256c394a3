"""A compose file from a plan: its CPUs, threads, memory and rights as a container runtime spells them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from llamaops.core.model import Model
from llamaops.core.plan import Plan
from llamaops.core.profile import Profile
from llamaops.core.source import PathSource, parse_source
from llamaops.core.topology import Host
from llamaops.deploy import container, limits
from llamaops.deploy.yaml_template import render

STRONGEST_SHARES = 262144
"""The most Docker takes; the default is 1024. It becomes cpu.shares, or the greatest cpu.weight."""


def render_compose(
    profile: Profile,
    text: str,
    plan: Plan,
    host: Host,
    model: Model | None,
    *,
    user: str,
    folder: str,
    source: str | None,
    baseline: str | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, str]:
    """Return file name → content of a compose project that serves ``profile`` as ``plan`` decided.

    ``text`` is the profile's file, into which ``overrides`` and what the container needs are written. ``user`` is
    ``uid:gid``, whom model and keys must be readable to; ``folder`` is where the files will lie, ``source`` the source
    tree to build the image from (None: the wheel of this version). A model that is on this machine is mounted from it,
    another is fetched at the first start. Secrets are referred to, never copied. Raises UsageError where one would be.
    """
    container.refuse_secret_overrides(overrides)
    mounted = _mounts(profile, model)
    pins = container.image_pins(profile) | _placement_pins(plan)
    if mounted:
        pins |= container.model_pins(profile, mounted[1])
    else:
        container.refuse_matrix_file(profile)
    line = baseline or container.best_baseline(host)
    context = _service(profile, plan, host, user, mounted) | {
        "image": container.image_name(line), "context": source or ".",
        "dockerfile": str(PurePosixPath(folder, "Dockerfile")) if source else "Dockerfile",
    }
    return {
        "compose.yaml": render("compose/compose.yaml.j2", context, _literal),
        "profile.yaml": container.portable_profile(text, profile, pins, overrides),
        **container.image_files(line, from_source=source is not None),
    }


def _literal(text: str) -> str:
    """Compose expands variables in every value, and takes ``$$`` for a dollar sign."""
    return text.replace("$", "$$")


def _mounts(profile: Profile, model: Model | None) -> tuple[str, str, str] | None:
    """Return host path, model path inside and mount point; None where the model must be fetched by the container.

    Links are followed, as the hub's cache is made of them. All parts of a split model must lie in one real folder.
    """
    if model is None:
        return None
    path = Path(model.path)
    if container.is_split(model):
        folder = str(path.parent)
        here = isinstance(parse_source(profile.model.source), PathSource)
        return (folder, f"{container.MODEL_FOLDER}/{path.name}", container.MODEL_FOLDER) if here else None
    inside = f"{container.MODEL_FOLDER}/{path.name}"
    return str(path.resolve()), inside, inside


def _placement_pins(plan: Plan) -> dict[str, Any]:
    """The container has this machine's CPU numbers, so what was chosen here is said, not chosen again."""
    placed = plan.placement
    pins: dict[str, Any] = {"placement.policy": placed.policy, "placement.spin": placed.spin}
    if placed.rt_priority is not None:
        pins["placement.rt_priority"] = placed.rt_priority
    if placed.numa == "bind":
        pins["placement.numa"] = "off"  # a container may not bind memory; CPUs of one node take it from there anyway
    if placed.cpus is not None:
        pins["placement.cpus"] = str(placed.cpus)
        pins["placement.housekeeping"] = str(placed.housekeeping_cpus) if placed.housekeeping_cpus else "none"
    return pins


def _service(profile: Profile, plan: Plan, host: Host, user: str,
             mounted: tuple[str, str, str] | None) -> dict[str, Any]:
    keys, cpus = profile.serve.api_keys, limits.all_cpus(plan)
    memory = limits.memory_mib(profile, plan)
    inside = f"{container.PROFILE_FOLDER}/{profile.name}.yaml"
    offline = ["--offline"] if mounted else []
    volumes: list[Mapping[str, Any]] = [{"type": "volume", "source": "cache", "target": "/var/cache/llamaops"}]
    if mounted:
        volumes = [{"type": "bind", "source": mounted[0], "target": mounted[2], "read_only": True,
                    "bind": {"create_host_path": False}}]
    return {
        "project": f"llamaops-{profile.name}", "user": user, "profile_path": inside,
        "command": ["up", inside, "--no-build", *offline, *container.thread_args(plan)],
        "stop": f"{limits.stop_seconds(profile)}s", "published": _published(profile),
        "env_file": {"path": f"./{profile.name}.env", "required": bool(keys and keys.env)},
        "env_needed": bool(keys and keys.env), "keys": keys.file if keys else None, "keys_path": container.KEYS_FILE,
        "volumes": volumes, "cache": mounted is None, "healthz": container.HEALTHZ,
        "cpuset": str(cpus) if cpus else None, "cpus": _quota(plan, host, len(cpus) if cpus else None),
        "shares": _shares(plan), "memory": f"{memory}m" if memory else None, "ulimits": _ulimits(plan),
        "real_time": plan.placement.policy in ("fifo", "rr"), "policy": plan.placement.policy,
    }


def _published(profile: Profile) -> dict[str, Any]:
    host, port = profile.serve.host, profile.serve.port
    return {"target": container.PORT, **({"published": str(port)} if port else {}), "host_ip": host, "protocol": "tcp"}


def _quota(plan: Plan, host: Host, pinned: int | None) -> float | None:
    """Return the CPU time to allow: all of the listed CPUs, which no thread can exceed, so that nothing is throttled.

    Without a list, the threads' and one CPU more for the relay: the slice it would take from a bare quota stops a
    thread all others wait for. A quota of this machine bounds both.
    """
    threads = max(plan.placement.threads, plan.placement.threads_batch)
    wanted = float(pinned or threads + 1)
    allowed = host.cgroup.quota_cpus
    return wanted if allowed is None else max(float(threads), min(wanted, math.floor(allowed * 100) / 100))


def _shares(plan: Plan) -> int | None:
    """Return the weight as cpu.shares (2-262144), from cgroup v2's 1-10000 where the plan names one."""
    placed = plan.placement
    if placed.policy == "batch":
        return None
    return STRONGEST_SHARES if placed.weight is None else 2 + (placed.weight - 1) * (STRONGEST_SHARES - 2) // 9999


def _ulimits(plan: Plan) -> dict[str, int]:
    """A process without capabilities may do what its limits allow (getrlimit(2))."""
    placed, found = plan.placement, {}
    strongest = [nice for nice in (placed.nice, placed.relay_nice, placed.autogroup_nice) if nice is not None]
    if strongest and min(strongest) < 0:
        found["nice"] = 20 - min(strongest)
    if placed.policy in ("fifo", "rr"):
        found["rtprio"] = min(99, (placed.rt_priority or 0) + 1)  # threads that do not compute run one step above
    if plan.memory.lock:
        found["memlock"] = -1
    return found
