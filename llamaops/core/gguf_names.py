"""What file names say about GGUF models: quant type, parts of a split model, and which one is meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
"""How llama.cpp names the parts of a split model (tools/gguf-split)."""
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F(?:P)?16|F(?:P)?32))"
    r"(?![A-Za-z0-9_])",
    re.IGNORECASE,
)
_BESIDE = re.compile(r"(?:^|/)(?:mmproj|.*imatrix)[^/]*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ChoiceError(Exception):
    """No file, or more than one, is meant; ``candidates`` are the models there are."""

    reason: str
    candidates: tuple[str, ...]
    near: str | None = None


def quant_in(name: str) -> str | None:
    """Return the quant type that a file name or its folder spells, upper case; ``fp16`` is F16."""
    found = _QUANT.findall(name)
    return re.sub("^FP", "F", found[-1].upper()) if found else None


def part_names(first: str) -> tuple[str, ...]:
    """Return the names of all parts of a split model, or the name alone."""
    part = PART.fullmatch(first)
    if part is None:
        return (first,)
    return tuple(f"{part['stem']}-{i:05d}-of-{part['count']}.gguf" for i in range(1, int(part["count"]) + 1))


def models_among(names: Sequence[str]) -> tuple[str, ...]:
    """Return the GGUF models: no projectors, no importance matrices, of split ones the first part."""
    out = []
    for name in sorted(names):
        part = PART.fullmatch(name)
        first = part is None or int(part["number"]) == 1
        if name.lower().endswith(".gguf") and first and not _BESIDE.search(name):
            out.append(name)
    return tuple(out)


def choose(names: Sequence[str], file: str | None, quant: str | None) -> str:
    """Return the one model that ``file`` or ``quant`` names, or the only one. Raises ChoiceError."""
    models = models_among(names)
    if file is not None:
        if file in names:
            return file
        near = difflib.get_close_matches(file, [n for n in names if n.lower().endswith(".gguf")], n=1, cutoff=0.5)
        raise ChoiceError(f"there is no file {file}", models, near[0] if near else None)
    fitting = [name for name in models if quant is None or quant_in(name) == quant.upper()]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ChoiceError("several files fit" if quant else "it has several models", tuple(fitting))
    raise ChoiceError(f"it has no {quant}" if quant and models else "it has no GGUF file", models)


def listed(names: Sequence[str], sizes: Mapping[str, int | None]) -> str:
    """Spell files with their sizes, one after the other, the sizes of split models summed."""
    out = []
    for name in names:
        known = [size for part in part_names(name) if (size := sizes.get(part)) is not None]
        out.append(f"{name} ({sum(known) >> 20} MiB)" if known else name)
    return ", ".join(out)
