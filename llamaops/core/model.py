"""Facts about a model file, as its GGUF header states them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """One GGUF on disk. ``None`` means the header does not say.

    ``quant`` is spelled as llama.cpp spells it (``Q4_K_M``); ``head_dim_k``/``head_dim_v`` are per KV head;
    ``kv_heads`` is the largest over the layers; ``pooling`` is set for embedding models.
    """

    path: str
    size_bytes: int
    architecture: str
    name: str | None = None
    quant: str | None = None
    parameters: int | None = None
    layers: int | None = None
    embedding: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim_k: int | None = None
    head_dim_v: int | None = None
    feed_forward: int | None = None
    vocab: int | None = None
    context_train: int | None = None
    sliding_window: int | None = None
    pooling: int | None = None
    has_chat_template: bool = False
    source: str | None = None
    sha256: str | None = None
    chosen: str | None = None
    """Why ``model.quantize: auto`` took this file."""


POOLING_RANK = 4
"""``LLAMA_POOLING_TYPE_RANK`` of llama.h: the model scores pairs of texts."""

ENCODERS = frozenset({
    "bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert", "eurobert",
    "gemma-embedding", "t5encoder",
})


def bits_per_weight(model: Model) -> float | None:
    """Return how many bits the file takes for each parameter."""
    return 8 * model.size_bytes / model.parameters if model.parameters else None


def is_embedding(model: Model | None) -> bool:
    """Tell whether the model answers with vectors: it says how it pools, or is of an encoder architecture."""
    return model is not None and (bool(model.pooling) or model.architecture in ENCODERS)
