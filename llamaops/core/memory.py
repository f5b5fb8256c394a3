"""The memory sum: what the engine will take, what there is, and how a plan is made to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from llamaops.core.model import Model, is_embedding
from llamaops.core.notes import Findings
from llamaops.core.profile import KvTypes, Profile
from llamaops.core.topology import Host
from llamaops.errors import WrongProfile

MIB = 1 << 20

BYTES_PER_VALUE = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""Bytes a KV value takes; quantized types hold blocks of 32 values with one f16 scale (ggml-common.h)."""

PROCESS_BYTES = 24 * MIB
"""Code, thread stacks and HTTP server of llama-server b11434, measured as resident size less all named buffers."""

VOCAB_BYTES = 320
"""Per vocabulary entry: token texts, merges and their hash tables; measured 260 (49 k entries) and 310 (152 k)."""

CHECKPOINTS = 4
"""Saved states per slot of models with a sliding window; llama-server's default of 32 is gigabytes on four slots."""

MAX_PROMPT_CACHE = 512 * MIB
MIN_CONTEXT = 512
LEAST_UBATCH = 64
"""Smaller micro-batches save next to nothing and slow prompts down."""
REPACKED = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "Q2_K")
"""Quant types that llama.cpp copies into another layout at load on at least one CPU family (ggml-cpu/repack.cpp)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory sum in bytes; ``available_bytes`` None where unknown.

    ``process_bytes`` is code, stacks and vocabulary. ``repack_bytes`` is the most that a second copy of the weights in
    the CPU's own layout takes beside the mapped file. ``mmap`` tells whether weights are mapped from the file; without
    it each tensor is in memory once only. ``checkpoints`` is the number of saved states per slot, counted in
    ``kv_bytes``; None where the model needs none.
    """

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    prompt_cache_bytes: int
    total_bytes: int
    available_bytes: int | None
    lock: bool = False
    process_bytes: int = 0
    repack_bytes: int = 0
    mmap: bool = True
    checkpoints: int | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """What decides the sum."""

    slots: int
    context: int
    ubatch: int
    kv_type_k: str
    kv_type_v: str
    prompt_cache_mib: int
    mmap: bool = True


def available_memory(host: Host, limit: int | None) -> tuple[int | None, str]:
    """Return what the engine may take and which limit says so: MemAvailable, every ancestor's headroom, the profile."""
    bounds = [(host.mem_available, "MemAvailable"), (host.cgroup.memory_headroom, "the cgroup's memory limit"),
              (limit, "memory.limit of the profile")]
    if host.cgroup.memory_headroom is None:
        bounds.append((host.cgroup.memory_limit, "the cgroup's memory limit"))
    known = [(value, name) for value, name in bounds if value is not None]
    return min(known, default=(None, "unknown"))


def kv_bytes(model: Model | None, cells: int, type_k: str, type_v: str) -> int:
    """Return the KV cache of ``cells`` tokens: layers × KV heads × head size, keys and values."""
    if model is None or model.layers is None or model.kv_heads is None:
        return 0
    per_key, per_value = _head_dim(model, model.head_dim_k), _head_dim(model, model.head_dim_v)
    values = per_key * BYTES_PER_VALUE[type_k] + per_value * BYTES_PER_VALUE[type_v]
    return round(cells * model.layers * model.kv_heads * values)


def _head_dim(model: Model, stated: int | None) -> int:
    return stated or (model.embedding or 0) // (model.heads or 1)


def compute_bytes(model: Model | None, ubatch: int, context: int, slots: int) -> int:
    """Return the work buffers: activations and attention mask of one micro-batch, and one row of logits per slot.

    Fitted to what b11434 reports ("CPU compute buffer size"): about six rows of the embedding and four of the
    feed-forward width per token, in float32.
    """
    if model is None:
        return 0
    width = model.embedding or 0
    per_token = 4 * (6 * width + 4 * (model.feed_forward or 4 * width)) + 2 * context
    return ubatch * per_token + 4 * slots * (model.vocab or 0)


def process_bytes(model: Model | None) -> int:
    """Return what llama-server takes beside its named buffers."""
    return PROCESS_BYTES + VOCAB_BYTES * ((model.vocab or 0) if model else 0)


def repack_bytes(model: Model | None, *, mmap: bool) -> int:
    """Return the most that repacked weights take beside the mapped file, which stays resident as it was read."""
    doubled = model is not None and mmap and model.quant is not None and model.quant.upper().startswith(REPACKED)
    return model.size_bytes if model and doubled else 0


def checkpoint_bytes(model: Model | None, slots: int, ubatch: int, type_k: str, type_v: str) -> int:
    """Return the saved states of a model with a sliding window: its window's KV, `CHECKPOINTS` times per slot."""
    if model is None or not model.sliding_window:
        return 0
    return CHECKPOINTS * slots * kv_bytes(model, model.sliding_window + ubatch, type_k, type_v)


def least_bytes(model: Model | None, context: int) -> int | None:
    """Return the least the engine takes, with one slot (None without model facts): does a NUMA node hold it?"""
    if model is None:
        return None
    sizes = Sizes(1, context, 64, "f16", "f16", 0, mmap=False)
    return sum_memory(model, sizes, None, lock=False).total_bytes


def sum_memory(model: Model | None, sizes: Sizes, available: int | None, *, lock: bool) -> Memory:
    """Add up what ``sizes`` need."""
    types = sizes.kv_type_k, sizes.kv_type_v
    parts = {
        "weights_bytes": model.size_bytes if model else 0,
        "kv_bytes": kv_bytes(model, sizes.slots * sizes.context, *types)
        + checkpoint_bytes(model, sizes.slots, sizes.ubatch, *types),
        "compute_bytes": compute_bytes(model, sizes.ubatch, sizes.context, sizes.slots),
        "prompt_cache_bytes": sizes.prompt_cache_mib * MIB,
        "process_bytes": process_bytes(model),
        "repack_bytes": repack_bytes(model, mmap=sizes.mmap),
    }
    return Memory(**parts, total_bytes=sum(parts.values()), available_bytes=available, lock=lock, mmap=sizes.mmap,
                  checkpoints=CHECKPOINTS if model and model.sliding_window else None)


def auto_prompt_cache_mib(model: Model | None, context: int, available: int | None) -> int:
    """Return a prompt cache of two full contexts, at most 512 MiB and about an eighth of what there is.

    llama-server's own default of 8192 MiB is more than most machines here have; so it is always given. The eighth is
    rounded down to a power of two: what is free changes all the time, and a reload must not take that for a change.
    """
    two = 2 * kv_bytes(model, context, "f16", "f16") or MAX_PROMPT_CACHE // 2
    eighth = available // 8 if available is not None else MAX_PROMPT_CACHE
    room = 1 << (eighth.bit_length() - 1) if eighth else 0
    return min(two, room, MAX_PROMPT_CACHE) // MIB


Batch = Callable[[int, int], int]
"""Returns the micro-batch wanted for so many slots of so much context."""


def fit_memory(profile: Profile, model: Model | None, sizes: Sizes, host: Host, batch: Batch,
               findings: Findings) -> tuple[Sizes, Memory]:
    """Shrink what is ``auto`` until the sum fits: mapping, prompt cache, slots, micro-batch, KV type, context.

    In this order, dearest last. Without model facts there is nothing to add up. Raises WrongProfile with the sums when
    nothing is left to shrink.
    """
    available, bound = available_memory(host, None if profile.memory.limit == "auto" else profile.memory.limit)
    if available is None:
        findings.info("memory-unknown", "available memory is unknown, so the sum is not checked")

    def total(candidate: Sizes) -> Memory:
        return sum_memory(model, candidate, available, lock=profile.memory.lock)

    def fits(candidate: Sizes) -> bool:
        return model is None or available is None or total(candidate).total_bytes <= available

    if model is None or fits(sizes):
        return sizes, total(sizes)
    steps = list(_steps(profile, model, sizes, batch))
    found = next(filter(fits, steps), None)
    if found is None:
        raise _does_not_fit(model, steps[-1], total(steps[-1]), bound)
    found = _relaxed(found, batch, fits)
    _note_shrinks(sizes, found, f"to stay within {format_bytes(available)} ({bound})", findings)
    return found, total(found)


def _steps(profile: Profile, model: Model, sizes: Sizes, batch: Batch) -> Iterator[Sizes]:
    """Yield ever smaller sizes, each changing only what the profile leaves open.

    A context that the profile does not state is the default's, not the person's, and may shrink last.
    """
    sizes = replace(sizes, mmap=False)
    yield sizes
    if profile.memory.prompt_cache_mib == "auto":
        for part in (sizes.prompt_cache_mib // 2, sizes.prompt_cache_mib // 4, 0):
            sizes = replace(sizes, prompt_cache_mib=part)
            yield sizes
    if profile.serve.slots == "auto":
        for slots in range(sizes.slots - 1, 0, -1):
            sizes = replace(sizes, slots=slots, ubatch=batch(slots, sizes.context))
            yield sizes
    if not is_embedding(model):
        while sizes.ubatch > LEAST_UBATCH:
            sizes = replace(sizes, ubatch=sizes.ubatch // 2)
            yield sizes
    if profile.model.kv_type == "auto" and _quantizable(model) and not _without_flash_attention(profile.engine.args):
        sizes = replace(sizes, kv_type_k="q8_0", kv_type_v="q8_0")
        yield sizes
    if "context" not in profile.model.model_fields_set:
        while sizes.context > MIN_CONTEXT:
            context = sizes.context // 2
            sizes = replace(sizes, context=context, ubatch=min(sizes.ubatch, batch(sizes.slots, context)))
            yield sizes


def _relaxed(found: Sizes, batch: Batch, fits: Callable[[Sizes], bool]) -> Sizes:
    """Take back the cheap concessions for which the dearer ones have made room since."""
    wanted = batch(found.slots, found.context)
    larger = [replace(found, ubatch=size) for size in (wanted, wanted // 2, wanted // 4) if size > found.ubatch]
    found = next(filter(fits, larger), found)
    mapped = replace(found, mmap=True)
    return mapped if fits(mapped) else found


def _note_shrinks(asked: Sizes, got: Sizes, why: str, findings: Findings) -> None:
    if got.prompt_cache_mib < asked.prompt_cache_mib:
        findings.info("memory-prompt-cache-shrunk", f"prompt cache of {got.prompt_cache_mib} instead of "
                      f"{asked.prompt_cache_mib} MiB, {why}; earlier conversations are read again more often")
    if got.mmap is not asked.mmap:
        findings.info("memory-no-mmap", f"weights are read instead of mapped, so that none is in memory twice, {why}; "
                      "a restart takes a little longer")
    if got.slots < asked.slots:
        findings.degraded("memory-slots-shrunk", f"{got.slots} slots instead of {asked.slots}, {why}; more requests "
                          "wait")
    if got.kv_type_k != asked.kv_type_k:
        findings.degraded("memory-kv-type-shrunk", f"KV cache in {got.kv_type_k} instead of {asked.kv_type_k}, {why}; "
                          "a small loss of quality")
    if got.context < asked.context:
        findings.degraded("memory-context-shrunk", f"context of {got.context} tokens a slot instead of the default "
                          f"{asked.context}, {why}; state model.context to keep it")


def _without_flash_attention(args: Sequence[str]) -> bool:
    """Tell whether engine arguments turn flash attention off; a quantized V cache needs it (llama.cpp b11434)."""
    return any(flag in ("-fa", "--flash-attn") and value in ("off", "disabled", "false", "0")
               for flag, value in pairwise(args))


def _quantizable(model: Model) -> bool:
    """Tell whether KV rows divide into blocks of 32, which quantized types need."""
    return all(_head_dim(model, dim) % 32 == 0 for dim in (model.head_dim_k, model.head_dim_v))


def _does_not_fit(model: Model, sizes: Sizes, memory: Memory, bound: str) -> WrongProfile:
    return WrongProfile(
        "the model does not fit into memory",
        where="memory",
        why=f"{format_bytes(memory.total_bytes)} needed, {format_bytes(memory.available_bytes)} there ({bound})",
        fix=f"{_what_saves(model, sizes, memory)}; or raise the limit",
        detail=memory_table(memory),
    )


def _what_saves(model: Model, sizes: Sizes, memory: Memory) -> str:
    """Return what would make a model fit; nothing is named that is as small as it gets, or saves too little."""
    short = memory.total_bytes - (memory.available_bytes or 0)
    other = f"a smaller quant type (now {model.quant or 'unknown'}) or model"
    context = memory.kv_bytes + memory.prompt_cache_bytes
    if short > context:
        fixed = format_bytes(memory.total_bytes - context)
        return f"no context is small enough: the model and the program alone need {fixed}. Take {other}"
    ways = [f"a smaller model.context (now {sizes.context} × {sizes.slots} slots)"]
    ways += ["kv_type q8_0"] if sizes.kv_type_k == "f16" else []
    ways += ["prompt_cache_mib 0"] if sizes.prompt_cache_mib else []
    return f"save {format_bytes(short)}: {', '.join([*ways, other])}"


def memory_table(memory: Memory) -> str:
    """Return the sum as aligned lines with units."""
    rows = [("weights", memory.weights_bytes), ("KV cache", memory.kv_bytes), ("compute buffers", memory.compute_bytes),
            ("prompt cache, at most", memory.prompt_cache_bytes), ("process and vocabulary", memory.process_bytes),
            ("repacked weights, at most", memory.repack_bytes),
            ("sum", memory.total_bytes), ("available", memory.available_bytes)]
    return "\n".join(f"{name:<28}{format_bytes(value):>12}" for name, value in rows)


def format_bytes(value: int | None) -> str:
    """Print bytes in MiB or GiB."""
    if value is None:
        return "unknown"
    return f"{value / MIB:.0f} MiB" if value < 10240 * MIB else f"{value / (1024 * MIB):.1f} GiB"


def kv_types(profile: Profile) -> tuple[str, str]:
    """Return the KV types asked for; ``auto`` starts at f16."""
    asked = profile.model.kv_type
    if isinstance(asked, KvTypes):
        return asked.k, asked.v
    return ("f16", "f16") if asked == "auto" else (asked, asked)
