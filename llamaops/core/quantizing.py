"""What may be asked of a quantization beside its type: an importance matrix, and types of single tensors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llamaops.core.ggml_types import FULL, WEIGHT_TYPES
from llamaops.core.gguf_header import Tensor

_PATTERN = re.compile(r"[a-z0-9_.\\*+?()|\[\]{}^$,-]+")


@dataclass(frozen=True, slots=True)
class Extras:
    """How a quantization differs from the plain one of its type; it is part of what tells two results apart.

    ``imatrix`` identifies the matrix by checksums; ``tensor_types`` are (pattern, type), the first match wins.
    """

    imatrix: Mapping[str, str | int] | None = None
    tensor_types: tuple[tuple[str, str], ...] = ()

    @property
    def mark(self) -> str:
        """Return what the result's file name says of it."""
        return ("-im" if self.imatrix else "") + ("-mixed" if self.tensor_types else "")


PLAIN = Extras()


def check_tensor_type(pattern: str, kind: str) -> tuple[str, str]:
    """Return a pattern and the ggml type as llamaops spells it. Raises ValueError.

    llama-quantize searches the pattern, a regular expression that it turns to lower case, in each tensor's name
    (tools/quantize); what is allowed here means the same to it and to Python.
    """
    if not _PATTERN.fullmatch(pattern):
        raise ValueError(f"{pattern!r} is no pattern: lower-case letters, digits, _ . - and the signs of regular "
                         r"expressions, such as attn_v or blk\.[01]\.ffn_down")
    try:
        re.compile(pattern)
    except re.error as exc:
        raise ValueError(f"{pattern!r} is no regular expression: {exc}") from None
    if kind.upper() not in WEIGHT_TYPES:
        near = difflib.get_close_matches(kind.upper(), WEIGHT_TYPES, n=1, cutoff=0.5)
        raise ValueError(f"{kind!r} is no type of a tensor" + (f"; did you mean {near[0]}?" if near else
                                                                f": {', '.join(WEIGHT_TYPES)}"))
    return pattern, kind.upper()


def why_idle(quantize: str | None) -> str | None:
    """Tell why a matrix and tensor types would do nothing under this ``model.quantize``; None where they act."""
    if quantize is None:
        return "it acts only while quantizing, and model.quantize is null"
    return f"it acts on quantized types only, and model.quantize is {quantize}" if quantize in (*FULL, "COPY") else None


def quantizable(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that llama-quantize may give another type: weights of two dimensions, norms aside."""
    for tensor in tensors:
        if tensor.dimensions > 1 and tensor.name.endswith("weight") and not tensor.name.endswith("_norm.weight"):
            yield tensor


def unmatched(extras: Extras, tensors: Sequence[Tensor]) -> str | None:
    """Return the first pattern that no tensor which can be quantized has in its name."""
    names = [tensor.name for tensor in quantizable(tensors)]
    return next((pattern for pattern, _ in extras.tensor_types
                 if not any(re.search(pattern, name) for name in names)), None)


def example_names(tensors: Sequence[Tensor], most: int = 12) -> str:
    """Name the tensors that patterns can be written for, those of one layer once."""
    names = (re.sub(r"^blk\.\d+\.", "blk.N.", tensor.name) for tensor in quantizable(tensors))
    return ", ".join(list(dict.fromkeys(names))[:most])


def not_taken(extras: Extras, made: Sequence[Tensor]) -> list[str]:
    """Say of each tensor of the result that has another type than its pattern asks; its width may not allow it."""
    said = []
    for tensor in quantizable(made):
        wanted = next((kind for pattern, kind in extras.tensor_types if re.search(pattern, tensor.name)), tensor.type)
        if tensor.type != wanted:
            said.append(f"{tensor.name} is {tensor.type}, not {wanted}")
    return said


def fits_model(entries: Sequence[str], tensors: Sequence[Tensor]) -> bool:
    """Tell whether an importance matrix with these entries has any for the model."""
    return not {tensor.name for tensor in tensors}.isdisjoint(entries)
