"""Write small GGUF files by hand, so that tests of the reader do not depend on anybody's writer."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str) -> bytes:
    """Return a GGUF string."""
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Return a typed value: bool, int (uint32), float, str, or a list of one of these."""
    if isinstance(item, bool):
        return struct.pack("<I?", BOOL, item)
    if isinstance(item, int):
        return struct.pack("<II", U32, item)
    if isinstance(item, float):
        return struct.pack("<If", F32, item)
    if isinstance(item, str):
        return struct.pack("<I", STRING) + text(item)
    kind = STRING if item and isinstance(item[0], str) else U32
    body = b"".join(text(x) if kind == STRING else struct.pack("<I", x) for x in item)
    return struct.pack("<IIQ", ARRAY, kind, len(item)) + body


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "general.file_type": 15,
    "llama.block_count": 2,
    "llama.context_length": 2048,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": ["<s>", "a", "b"],
    "tokenizer.chat_template": "{{ messages }}",
}
TENSORS = (("token_embd.weight", (64, 3), 0), ("blk.0.attn_q.weight", (64, 64), 8))


def gguf(
    fields: Mapping[str, Any] = LLAMA,
    tensors: Sequence[tuple[str, Sequence[int], int]] = TENSORS,
    *,
    version: int = 3,
    data: int | None = None,
) -> bytes:
    """Return a whole file; ``tensors`` are (name, dimensions, ggml type 0 or 8); ``data`` overrides the data's size."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    head += b"".join(text(key) + value(item) for key, item in fields.items())
    offset = 0
    for name, dimensions, kind in tensors:
        elements = 1
        for n in dimensions:
            elements *= n
        size = {0: elements * 4, 8: elements // 32 * 34}.get(kind, elements)
        head += text(name) + struct.pack("<I", len(dimensions)) + b"".join(struct.pack("<Q", n) for n in dimensions)
        head += struct.pack("<IQ", kind, offset)
        offset += -(-size // 32) * 32
    head += b"\0" * (-len(head) % 32)
    return head + b"\0" * (offset if data is None else data)
