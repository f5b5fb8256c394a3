"""What the configuration and the weights of a model in Hugging Face format say about it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from llamaops.core.model import Model

MAX_HEADER = 100_000_000
"""The longest header that the safetensors library itself accepts."""
_QUANTS = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


class CheckpointError(ValueError):
    """Configuration or weights are not what they should be; the text says why."""


def header_length(start: bytes) -> int:
    """Return how many bytes of JSON follow the first eight of a safetensors file."""
    length = int(struct.unpack("<Q", start)[0]) if len(start) == 8 else MAX_HEADER + 1
    if length > MAX_HEADER:
        raise CheckpointError("not a safetensors file")
    return length


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a safetensors file holds: the elements of each data type, and the bytes of data its header speaks of."""

    elements: dict[str, int]
    data_bytes: int


def read_tensors(header: bytes) -> Tensors:
    """Read the JSON at the begin of a safetensors file. Raises CheckpointError."""
    elements: dict[str, int] = {}
    end = 0
    try:
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                elements[tensor["dtype"]] = elements.get(tensor["dtype"], 0) + prod(int(n) for n in tensor["shape"])
                end = max(end, int(tensor.get("data_offsets", (0, 0))[1]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as exc:
        raise CheckpointError(f"the header of the safetensors is broken: {exc}") from exc
    return Tensors(elements, end)


def model_of(config: bytes, elements: Mapping[str, int], path: str, size_bytes: int) -> Model:
    """State the facts of ``config.json`` as a Model; for one with several parts (vision) those of its text part."""
    try:
        top = json.loads(config)
        kind = str(top.get("model_type") or (top.get("architectures") or ["unknown"])[0])
        fields = {**top, **top.get("text_config", {})}
    except (ValueError, TypeError, AttributeError, RecursionError) as exc:
        raise CheckpointError(f"config.json is broken: {exc}") from exc

    def number(*names: str) -> int | None:
        found = (fields.get(name) for name in names)
        return next((n for n in found if isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 40), None)

    embedding, heads = number("hidden_size", "n_embd", "d_model"), number("num_attention_heads", "n_head")
    head_dim = number("head_dim") or (embedding // heads if embedding and heads else None)
    return Model(
        path=path,
        size_bytes=size_bytes,
        architecture=kind,
        quant=_QUANTS.get(max(elements, key=lambda name: elements[name], default="")),
        parameters=sum(elements.values()) or None,
        layers=number("num_hidden_layers", "n_layer", "num_layers"),
        embedding=embedding,
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        feed_forward=number("intermediate_size", "ffn_dim", "n_inner"),
        vocab=number("vocab_size"),
        context_train=number("max_position_embeddings", "n_positions", "max_sequence_length"),
        sliding_window=number("sliding_window") if fields.get("use_sliding_window", True) else None,
    )
