"""Models in Hugging Face format, made of nothing: safetensors files and the JSON beside them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype (F32, F16 …), shape, data."""


def safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors file: length of the header, JSON header, data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def write_checkpoint(folder: Path, *, shards: int = 1) -> Path:
    """Make a folder that looks like a model, with two tensors of four and six numbers."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["TinyModel"]}')
    (folder / "tokenizer.json").write_text("{}")
    one, two = {"a": ("F32", (2, 2), bytes(16))}, {"b": ("F32", (2, 3), bytes(24))}
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors({**one, **two}))
        return folder
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, tensors in zip(names, (one, two), strict=True):
        (folder / name).write_bytes(safetensors(tensors))
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
