"""What compose and Kubernetes share: the profile as a container sees it, and how its image is made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from llamaops import __version__
from llamaops.core.launch import SECRET_NAME
from llamaops.core.model import Model
from llamaops.core.plan import Plan
from llamaops.core.profile import Profile
from llamaops.core.topology import Host
from llamaops.core.yaml_text import Problem, override, read_yaml
from llamaops.deploy.yaml_template import dump, render_plain
from llamaops.errors import UsageError, WrongProfile
from llamaops.resources import resource

UID = 10001
"""The image's account; a number, so that no passwd entry is needed and runAsNonRoot can be checked."""
PORT = 8080
"""Where the relay listens inside; what is published outside is the profile's."""
ENGINE = "/opt/llamaops/bin/llama-server"
PROFILE_FOLDER = "/etc/llamaops"
MODEL_FOLDER = "/models"
KEYS_FILE = "/run/secrets/llamaops/keys"
HEALTHZ = (f"exec 3<>/dev/tcp/127.0.0.1/{PORT} && printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&3"
           " && read -r -t 4 line <&3 && [[ $line == *' 200 '* ]]")
"""In bash, as a Python that starts every half minute would take its CPU from a stream."""
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class Baseline:
    """A set of CPU features that an image's engine may use: architecture, what /proc/cpuinfo must list, CMake."""

    machine: str
    needs: frozenset[str]
    cmake: Mapping[str, str]


def _x86(*features: str) -> dict[str, str]:
    every = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C", "AVX512")
    return {f"GGML_{name}": "ON" if name in features else "OFF" for name in every}


_V2 = frozenset({"ssse3", "sse4_1", "sse4_2", "popcnt"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BASELINES: dict[str, Baseline] = {
    "x86-64-v4": Baseline("x86_64", _V4, _x86("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C", "AVX512")),
    "x86-64-v3": Baseline("x86_64", _V3, _x86("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")),
    "x86-64-v2": Baseline("x86_64", _V2, _x86("SSE42")),
    "armv8.6-a": Baseline("aarch64", frozenset({"asimddp", "asimdhp", "i8mm"}),
                          {"GGML_CPU_ARM_ARCH": "armv8.2-a+dotprod+fp16+i8mm"}),
    "armv8.2-a": Baseline("aarch64", frozenset({"asimddp", "asimdhp"}),
                          {"GGML_CPU_ARM_ARCH": "armv8.2-a+dotprod+fp16"}),
    "armv8-a": Baseline("aarch64", frozenset(), {"GGML_CPU_ARM_ARCH": "armv8-a"}),
}
"""Best first within an architecture; x86-64 levels are those of the psABI."""


def best_baseline(host: Host) -> str:
    """Return the best baseline this machine's CPUs have; the most common one where they are unknown."""
    fitting = (name for name, line in BASELINES.items() if line.machine == host.machine and line.needs <= host.isa)
    return next(fitting, "x86-64-v3")


def source_tree() -> str | None:
    """Return the source tree that runs, None when llamaops is installed from a wheel."""
    root = resource("pyproject.toml")
    return str(root.parent) if root.is_file() else None


def image_name(baseline: str) -> str:
    """Return the image's name and tag."""
    return f"llamaops:{__version__}-{baseline}"


def image_files(baseline: str, *, from_source: bool) -> dict[str, str]:
    """Return file name → content of what builds the image, from a source tree or from this version's wheel."""
    flags = {"GGML_NATIVE": "OFF", **BASELINES[baseline].cmake}
    context = {
        "baseline": baseline, "definitions": [f"{name}={value}" for name, value in flags.items()],
        "llamaops": "." if from_source else f"llamaops=={__version__}", "image": image_name(baseline), "uid": UID,
        "port": PORT, "profile_folder": PROFILE_FOLDER, "model_folder": MODEL_FOLDER, "healthz": json.dumps(HEALTHZ),
    }
    ignore = resource("templates/container/dockerignore").read_text(encoding="utf-8")
    return {"Dockerfile": render_plain("container/Dockerfile.j2", context), "Dockerfile.dockerignore": ignore}


def variables(text: str) -> list[str]:
    """Return the names of the variables that a profile's text takes from the environment and has no default for."""
    return sorted(set(re.findall(r"(?<!\$)\$\{([A-Za-z_][A-Za-z0-9_]*)\}", text)))


def portable_profile(text: str, profile: Profile, pins: Mapping[str, Any], overrides: Sequence[str] = ()) -> str:
    """Return the profile ``text`` with ``overrides`` and ``pins`` (dotted key → value) in it, as YAML.

    Variables stay unexpanded: their values reach the container as its environment. Raises UsageError when a value in it
    is a secret by its name, since the file is made to be shared.
    """
    data = read_yaml(text).data
    problems: list[Problem] = []
    for assignment in overrides:
        override(data, assignment, problems)
    _refuse_secrets(data)
    data["name"] = profile.name
    for dotted, value in pins.items():
        *sections, key = dotted.split(".")
        inner = data
        for section in sections:
            inner[section] = inner.get(section) or {}
            inner = inner[section]
        inner[key] = value.replace("${", "$${") if isinstance(value, str) else value
    return f"# Made by `llamaops deploy` from the profile {profile.name}.\n{dump(data)}"


def _refuse_secrets(data: Mapping[str, Any]) -> None:
    env = (data.get("engine") or {}).get("env") or {}
    for name, value in env.items():
        if SECRET_NAME.search(name) and "${" not in str(value):
            raise UsageError("this secret would stand in a file that is made to be shared", where=f"engine.env.{name}",
                             fix=f"write {name}: ${{{name}}} in the profile, and give the container that variable")


def image_pins(profile: Profile) -> dict[str, Any]:
    """Return what is so in any container: the image's engine, and a relay that the container's own network shields.

    Raises WrongProfile for a profile with a certificate: in front of containers something else ends TLS.
    """
    keys = profile.serve.api_keys
    if profile.serve.tls:
        raise WrongProfile("a container serves plain http", where="serve.tls",
                           why="certificates are renewed where TLS ends: at the ingress or the proxy before it",
                           fix="end TLS there, and render with --set serve.tls=null")
    pins: dict[str, Any] = {"engine.path": ENGINE, "engine.build": "never", "serve.host": "0.0.0.0",  # noqa: S104
                            "serve.port": PORT}
    if keys and keys.file:
        pins["serve.api_keys"] = {"file": KEYS_FILE}
    if keys is None:
        pins["serve.allow_insecure"] = True
    return pins


def model_pins(profile: Profile, path: str) -> dict[str, Any]:
    """Return what makes the container serve the file at ``path`` as it is."""
    pins: dict[str, Any] = {"model.source": f"path:{path}"}
    if profile.model.quantize:
        pins |= {"model.quantize": None, "model.sha256": None}  # of the file it was made from
    if profile.model.imatrix:
        pins["model.imatrix"] = None
    if profile.model.tensor_types:
        pins["model.tensor_types"] = {}
    return pins


def refuse_matrix_file(profile: Profile) -> None:
    """Raise WrongProfile where the container would have to quantize by a file that it does not have."""
    if profile.model.imatrix_file:
        raise WrongProfile("the container does not have this importance matrix", where="model.imatrix",
                           why=f"{profile.model.imatrix_file} is a file of this machine",
                           fix="set  model.imatrix: auto,  or make the model here first: llamaops model pull PROFILE "
                               "(Kubernetes: serve the result by  path:  or  https:)")


def is_split(model: Model) -> bool:
    """Tell whether the model is the first of several files."""
    return bool(_SPLIT.search(PurePosixPath(model.path).name))


def thread_args(plan: Plan) -> list[str]:
    """Return the threads as arguments, which stand beside whatever limits the CPUs."""
    placed = plan.placement
    return ["--set", f"placement.threads={placed.threads}", "--set", f"placement.threads_batch={placed.threads_batch}"]


def refuse_secret_overrides(overrides: Sequence[str]) -> None:
    """Raise UsageError when an override could carry a secret into a file for all to read."""
    for assignment in overrides:
        if assignment.strip().startswith(("engine.env", "engine.args")):
            raise UsageError("this override would stand in a file for all to read", where="--set engine.…",
                             fix="write ${NAME} in the profile, and give the service that variable")


def require_memory(mib: int | None) -> int:
    """Return ``mib``; raise WrongProfile where the sum is open because nothing is known of the model."""
    if mib is None:
        raise WrongProfile("the memory to ask for is unknown", where="memory.limit",
                           why="the model is not on this machine, so there is no sum",
                           fix="llamaops model pull PROFILE, or --set memory.limit=2GiB")
    return mib
