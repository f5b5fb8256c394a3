"""The profile: what a person asks for. Fields mirror the YAML one to one; ``auto`` stays ``"auto"`` until `plan`.

CPU lists are parsed here (`CpuSet`), sizes become bytes or MiB, ``model.source`` becomes a `Source`. Every model is frozen
and refuses unknown keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from llamaops.core.cpuset import CpuSet


def _cpu_list(value: Any) -> Any:
    if isinstance(value, CpuSet):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError("write CPUs as a list string such as 2-3,6")
    cpus = CpuSet.parse(value)
    if not cpus:
        raise ValueError("the CPU list is empty")
    return cpus


CpuList = Annotated[
    CpuSet,
    BeforeValidator(_cpu_list),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": ["string", "integer"], "pattern": r"^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$"}),
]
KvName = Literal["f16", "q8_0", "q4_0"]


class Section(BaseModel):
    """One mapping of the profile: frozen, strict about keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class KvTypes(Section):
    """KV cache types told apart for keys and values."""

    k: KvName
    v: KvName


class ModelSection(Section):
    """Which model, and how it is served."""

    source: str
    sha256: str | None = None
    quantize: str | None = None
    aliases: tuple[str, ...] = ()
    context: int = Field(4096, ge=64)
    kv_type: Literal["auto"] | KvName | KvTypes = "auto"


class EngineSection(Section):
    """Which llama-server, and how to come by one."""

    path: str = "auto"
    build: Literal["auto", "never", "always"] = "auto"
    cmake: dict[str, str | bool | int] = {}
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}


class PlacementSection(Section):
    """CPUs, threads and priority; every ``auto`` is resolved by `llamaops.core.plan.plan` and nowhere else."""

    cpus: Literal["auto"] | CpuList = "auto"
    threads: Literal["auto"] | int = "auto"
    threads_batch: Literal["auto"] | int = "auto"
    smt: Literal["avoid", "use"] = "avoid"
    cores: Literal["performance", "all"] = "performance"
    housekeeping: Literal["auto", "none"] | CpuList = "auto"
    policy: Literal["auto", "other", "batch", "fifo", "rr"] = "auto"
    rt_priority: int = Field(10, ge=1, le=99)
    nice: Literal["auto"] | int = "auto"
    spin: Literal["auto", "active", "passive"] | int = "auto"
    numa: Literal["auto", "bind", "interleave", "off"] = "auto"
    strict: bool = False


class SloSection(Section):
    """The latency budget, milliseconds."""

    ttft_ms: float = Field(800, gt=0)
    itl_ms: float = Field(120, gt=0)


class ApiKeys(Section):
    """Where the API keys are kept; exactly one of the two."""

    file: str | None = None
    env: str | None = None


class QueueSection(Section):
    """How many requests may wait and how long."""

    depth: int = Field(64, ge=0)
    per_key: int = Field(8, ge=1)
    timeout_s: float = Field(600, gt=0)


class ServeSection(Section):
    """The relay's listening side."""

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    slots: Literal["auto"] | int = "auto"
    api_keys: ApiKeys | None = None
    allow_insecure: bool = False
    cors_origins: tuple[str, ...] = ()
    max_body_mib: float = Field(32, gt=0)
    queue: QueueSection = QueueSection()


class BackoffSection(Section):
    """Delay between restarts: doubles from ``initial_s`` to ``max_s``, forgotten after ``reset_after_s`` of service."""

    initial_s: float = Field(1, gt=0)
    max_s: float = Field(60, gt=0)
    reset_after_s: float = Field(300, gt=0)


class SuperviseSection(Section):
    """Time limits of the supervisor, seconds."""

    start_timeout_s: float = Field(120, gt=0)
    stall_timeout_s: float = Field(60, gt=0)
    drain_timeout_s: float = Field(30, ge=0)
    stop_grace_s: float = Field(10, gt=0)
    backoff: BackoffSection = BackoffSection()


class MemorySection(Section):
    """Memory the engine may use. ``limit`` is in bytes after parsing."""

    limit: Literal["auto"] | int = "auto"
    lock: bool = False
    prompt_cache_mib: Literal["auto"] | int = "auto"


class Profile(Section):
    """One served model: what was asked."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,62})$")
    model: ModelSection
    engine: EngineSection = EngineSection()
    placement: PlacementSection = PlacementSection()
    slo: SloSection = SloSection()
    serve: ServeSection = ServeSection()
    supervise: SuperviseSection = SuperviseSection()
    memory: MemorySection = MemorySection()
