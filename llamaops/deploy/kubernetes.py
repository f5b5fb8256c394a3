"""A kustomize base from a plan: whole CPUs, sized probes, and only references to secrets."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from llamaops.core.plan import Plan
from llamaops.core.profile import Profile
from llamaops.core.source import PathSource, parse_source
from llamaops.deploy import container, limits
from llamaops.deploy.yaml_template import render
from llamaops.errors import WrongProfile

READ_BYTES_PER_S = 25 << 20
"""What a slow network volume delivers; a start may take as long as reading the weights at this rate, and more."""
PAUSE_S = 5
"""From the end of a pod's readiness to the last node that stops sending to it."""
MAX_NAME = 53
"""Names of Services are DNS labels of at most 63 characters; ours get suffixes of at most ten."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
FILES = ("kustomization.yaml", "base/kustomization.yaml", "base/deployment.yaml", "base/service.yaml",
         "base/disruption.yaml", "base/network.yaml", "components/autoscaling/kustomization.yaml",
         "components/autoscaling/autoscaler.yaml", "components/monitoring/kustomization.yaml",
         "components/monitoring/monitor.yaml", "components/monitoring/network.yaml")


def render_kubernetes(profile: Profile, text: str, plan: Plan, *, baseline: str, from_source: bool,
                      overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return file name → content of a kustomize tree that serves ``profile`` with the threads ``plan`` decided.

    CPUs are counted and not listed, as the node decides which. ``text`` is the profile's file, into which ``overrides``
    and what the pod needs are written. Raises WrongProfile where the profile must say more: who may call (keys or
    allow_insecure), and the memory of a model that is not here.
    """
    container.refuse_secret_overrides(overrides)
    _refuse_exposure(profile)
    container.refuse_matrix_file(profile)
    context = _context(profile, plan, baseline)
    pins = container.image_pins(profile) | _pins(profile, plan)
    files = {name: render(f"k8s/{name}.j2", context, str) for name in FILES}
    files["base/profile.yaml"] = container.portable_profile(text, profile, pins, overrides)
    image = container.image_files(baseline, from_source=from_source)
    return files | {f"image/{name}": content for name, content in image.items()}


def resource_name(profile: Profile) -> str:
    """Return the name of the profile's objects, a DNS label; a long one is cut and told apart by a digest."""
    name = f"llamaops-{profile.name}".rstrip("-")
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 9].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def advice(profile: Profile, plan: Plan) -> list[str]:
    """Return what a person must do beside applying the files."""
    name, keys, said = resource_name(profile), profile.serve.api_keys, []
    if keys and keys.file:
        said.append(f"make the secret of the API keys: kubectl create secret generic {name}-keys --from-file=keys="
                    f"{keys.file}  (for monitoring also --from-file=scrape=FILE, a file with one key alone)")
    if keys and keys.env:
        said.append(f"put {keys.env} and other variables the profile names into a secret: kubectl create secret "
                    f"generic {name}-env --from-env-file=FILE  (for monitoring also: kubectl create secret generic "
                    f"{name}-scrape --from-file=scrape=FILE, a file with one key alone)")
    if isinstance(parse_source(profile.model.source), PathSource):
        said.append(f"the model is a path: put it on a volume, claim {name}-models")
    if plan.placement.policy in ("fifo", "rr"):
        said.append("real time is left out: a pod that is not root can't be given it; its CPUs are its own instead")
    return said


def _refuse_exposure(profile: Profile) -> None:
    if profile.serve.api_keys is None and not profile.serve.allow_insecure:
        raise WrongProfile("this profile says nothing of who may call from the cluster", where="serve.api_keys",
                           why="it was made for this machine alone, and a Service listens to the whole cluster",
                           fix="set serve.api_keys, or accept it: --set serve.allow_insecure=true")


def _pins(profile: Profile, plan: Plan) -> dict[str, Any]:
    pins: dict[str, Any] = {}
    if plan.placement.policy in ("fifo", "rr"):
        pins["placement.policy"] = "auto"
    source = parse_source(profile.model.source)
    if isinstance(source, PathSource):
        path = PurePosixPath(source.path)
        pins["model.source"] = f"path:{container.MODEL_FOLDER}" + (f"/{path.name}" if path.suffix == ".gguf" else "")
    return pins


def _context(profile: Profile, plan: Plan, baseline: str) -> dict[str, Any]:
    name, keys = resource_name(profile), profile.serve.api_keys
    labels = {"app.kubernetes.io/name": "llamaops", "app.kubernetes.io/instance": name}
    by_path = isinstance(parse_source(profile.model.source), PathSource)
    inside = f"{container.PROFILE_FOLDER}/profile.yaml"
    memory = container.require_memory(limits.memory_mib(profile, plan))
    weights = plan.memory.weights_bytes or memory << 20
    cpus = max(plan.placement.threads, plan.placement.threads_batch) + 1
    return {
        "name": name, "labels": labels, "selector": labels, "uid": container.UID, "port": container.PORT,
        "tag": container.image_name(baseline).partition(":")[2],
        "arch": ARCHITECTURES[container.BASELINES[baseline].machine],
        "fetch": ["model", "pull", inside],
        "command": ["up", inside, "--no-build", "--offline", *container.thread_args(plan)],
        "resources": {"cpu": cpus, "memory": f"{memory}Mi"},
        "start_seconds": math.ceil(profile.supervise.start_timeout_s + weights / READ_BYTES_PER_S),
        "stop_seconds": limits.stop_seconds(profile), "pause_seconds": PAUSE_S,
        "env": [{"secretRef": {"name": f"{name}-env", "optional": not (keys and keys.env)}}],
        "fence": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
        "mounts": _mounts(by_path=by_path, keys=bool(keys and keys.file)),
        "cache": f"{math.ceil(3 * weights / (1 << 30)) + 1}Gi",
        "claim": f"{name}-models" if by_path else None, "keys": f"{name}-keys" if keys and keys.file else None,
        "scrape": f"{name}-{'keys' if keys.file else 'scrape'}" if keys else None,
        "keyless": keys is None, "clients": {"matchLabels": {"llamaops-client": "true"}} if keys is None else {},
        "slots": plan.serving.slots, "in_flight": f"{800 * plan.serving.slots}m",
    }


def _mounts(*, by_path: bool, keys: bool) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "profile", "mountPath": container.PROFILE_FOLDER, "readOnly": True},
        {"name": "cache", "mountPath": "/var/cache/llamaops"},
        {"name": "run", "mountPath": "/run/llamaops"},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a mount of the pod's own
    ]
    if by_path:
        mounts.append({"name": "models", "mountPath": container.MODEL_FOLDER, "readOnly": True})
    if keys:
        mounts.append({"name": "keys", "mountPath": str(PurePosixPath(container.KEYS_FILE).parent), "readOnly": True})
    return mounts
