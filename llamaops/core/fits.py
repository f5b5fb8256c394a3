"""What a model would take on a machine: at each context and KV type, and as each quant type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llamaops.core.ggml_types import FULL
from llamaops.core.memory import BYTES_PER_VALUE, LEAST_UBATCH, Sizes, sum_memory
from llamaops.core.model import Model, bits_per_weight

CONTEXT = 4096
"""What the quant types are compared at: the default of a profile."""
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
BITS = {
    "F32": 32.0, "BF16": 16.0, "F16": 16.0, "Q8_0": 8.5, "Q6_K": 6.57, "Q5_K_M": 5.7, "Q4_K_M": 4.89, "IQ4_XS": 4.46,
    "Q3_K_M": 4.0, "Q2_K": 3.16,
}  # fmt: skip
"""Bits per weight as llama-quantize makes them of an 8B model (tools/quantize); small models keep a little more."""


@dataclass(frozen=True, slots=True)
class Need:
    """The memory of one slot with this context and KV type; ``fits`` is None where the machine's is unknown."""

    context: int
    kv_type: str
    total_bytes: int
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Variant:
    """A file of the model, or one that could be made of it (``file`` None: its size is an estimate)."""

    quant: str | None
    size_bytes: int
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """A variant with what serving it takes at `CONTEXT`, f16 KV, one slot."""

    variant: Variant
    total_bytes: int
    fits: bool | None


def needs(model: Model, available: int | None) -> list[Need]:
    """Return the memory at each KV type and context that the model was trained for."""
    most = model.context_train or CONTEXT
    contexts = [context for context in CONTEXTS if context < most] + [most]
    return [Need(context, kind, total, None if available is None else total <= available)
            for context in contexts for kind in BYTES_PER_VALUE for total in [_total(model, context, kind)]]


def compared_at(model: Model) -> int:
    """Return the context that `fits` counts with."""
    return min(CONTEXT, model.context_train or CONTEXT)


def fits(model: Model, variants: Sequence[Variant], available: int | None) -> list[Fit]:
    """Return what each variant would take, largest first."""
    context, out = compared_at(model), []
    for variant in sorted(variants, key=lambda v: -v.size_bytes):
        total = total_at(model, variant, context)
        out.append(Fit(variant, total, None if available is None else total <= available))
    return out


def total_at(model: Model, variant: Variant, context: int) -> int:
    """Return the memory of one slot of so much context, f16 KV, with a variant of the model."""
    return _total(replace(model, quant=variant.quant, size_bytes=variant.size_bytes), context, "f16")


def estimated(model: Model) -> Iterator[Variant]:
    """Yield what could be made of a model: as it is, and every common type with fewer bits than it has."""
    yield Variant(model.quant, model.size_bytes, model.path)
    have = bits_per_weight(model)
    if have and model.parameters and model.quant:
        for quant, bits in BITS.items():
            if bits < have - 0.2 and (quant not in FULL or model.quant == "F32"):
                yield Variant(quant, round(model.parameters * bits / 8))


def _total(model: Model, context: int, kind: str) -> int:
    sizes = Sizes(1, context, LEAST_UBATCH, kind, kind, prompt_cache_mib=0, mmap=False)
    return sum_memory(model, sizes, None, lock=False).total_bytes
