"""Make a smaller GGUF of one of higher precision with llama-quantize, once."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from llamaops.cache import appearing, finished, make_once, require_room, sha256_of, write_json
from llamaops.child import capture
from llamaops.core.ggml_types import FULL
from llamaops.core.model import Model
from llamaops.core.progress import Bar, Progress
from llamaops.core.quantizing import PLAIN, Extras
from llamaops.engine_tool import made_name, provenance, run_tool
from llamaops.errors import ModelUnavailable

_TYPE = re.compile(r"^\s*\d+\s+or\s+(\S+)\s*:\s*(.*)$", re.MULTILINE)
_BITS = re.compile(r"(\d+)")
_STEP = re.compile(r"^\[\s*(\d+)/\s*(\d+)\]")


def quantize(
    tool: Path,
    model: Model,
    quant: str,
    cache: Path,
    progress: Progress,
    *,
    threads: int,
    engine_version: str | None,
    extras: Extras = PLAIN,
    matrix: Callable[[], Path] | None = None,
    cancel: threading.Event | None = None,
) -> Path:
    """Return ``model`` as ``quant``: from the cache at once, or made by ``tool`` (llama-quantize) at low priority.

    ``matrix`` gives the importance matrix that ``extras`` identifies; it is called only when there is work to do, after
    the checks. From a model that is quantized already this is allowed downwards only, and said, because the loss adds
    up. The result appears when it is whole; beside it lies a JSON file that tells what it was made of. Raises
    ModelUnavailable (unknown type, upwards, no room, the tool's failure).
    """
    done = find_quantized(model, quant, cache, engine_version, extras)
    if done is not None:
        return done
    kind = _known(quant, known_types(tool))
    requantize = _check_direction(model, kind, progress)
    final = _target(model, kind, cache, engine_version, extras)

    def make() -> None:
        _make(tool, model, kind, final, progress, threads, requantize, engine_version, extras,
              matrix() if matrix else None, cancel)

    make_once(final, "quantizing", make, progress, ModelUnavailable, cancel)
    return final


def find_quantized(
    model: Model, quant: str, cache: Path, engine_version: str | None, extras: Extras = PLAIN
) -> Path | None:
    """Return the cached result of `quantize` for this file, type, engine and extras, or None."""
    return finished(_target(model, _spelled(quant), cache, engine_version, extras))


def known_types(tool: Path) -> dict[str, str]:
    """Return the tool's own types, as it spells them, with what it says about each."""
    try:
        said = capture([str(tool), "--help"], env={**os.environ, "LC_ALL": "C"}, timeout_s=15)
    except OSError as exc:
        raise ModelUnavailable("llama-quantize can't be run", where=str(tool), why=exc.strerror,
                               fix="llamaops engine build") from exc
    kinds = {match[1]: match[2].strip() for match in _TYPE.finditer(said.tail)}
    if not kinds:
        raise ModelUnavailable("llama-quantize does not list its types", where=str(tool), detail=said.tail[-500:],
                               fix="llamaops engine build")
    return kinds


def _known(quant: str, kinds: Mapping[str, str]) -> str:
    name = _spelled(quant)
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.4)
        raise ModelUnavailable(f"this engine has no quant type {quant!r}", where="model.quantize",
                               why=f"it has {', '.join(kinds)}",
                               fix=f"did you mean {near[0]}?" if near else "choose one of these")
    return name


def _spelled(quant: str) -> str:
    """Return llama.cpp's full spelling: upper case, and ``Q4_K`` means ``Q4_K_M`` (tools/quantize)."""
    name = quant.upper()
    return f"{name}_M" if name in ("Q3_K", "Q4_K", "Q5_K") else name


def _check_direction(model: Model, kind: str, progress: Progress) -> bool:
    """Return whether the tool must be told to requantize. Raises ModelUnavailable for a step upwards."""
    if model.quant in FULL:
        return False
    have, want = _bits(model.quant), _bits(kind)
    if want > have:
        raise ModelUnavailable(f"{model.quant} can't be made {kind}", where="model.quantize",
                               why="it is quantized already: more bits would make it larger, not better",
                               fix=f"set  quantize: null  to serve it as {model.quant}, or start from an F16 file")
    progress.say(f"degraded: {model.quant} is quantized again to {kind}; made from F16 or BF16 it would be better")
    return True


def _bits(quant: str | None) -> int:
    found = _BITS.search(quant or "")
    return int(found[1]) if found else 32


def _target(model: Model, kind: str, cache: Path, engine_version: str | None, extras: Extras) -> Path:
    """Name the result by what it is and by what it depends on, without reading the source file's gigabytes."""
    more = [] if extras == PLAIN else [extras.imatrix, extras.tensor_types]
    key = json.dumps([provenance(model), kind, engine_version, *more], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return cache / "models" / "quantized" / f"{made_name(model)}-{kind}{extras.mark}-{digest}.gguf"


def _make(
    tool: Path, model: Model, kind: str, final: Path, progress: Progress, threads: int, requantize: bool,
    engine_version: str | None, extras: Extras, matrix: Path | None, cancel: threading.Event | None,
) -> None:  # fmt: skip
    _require_room(model, kind, final.parent)
    with progress.bar(f"quantize to {kind}", "steps") as bar, appearing(final) as partial:
        more = ["--allow-requantize"] if requantize else []
        more += ["--imatrix", str(matrix)] if matrix else []
        for pattern, tensor_type in extras.tensor_types:
            more += ["--tensor-type", f"{pattern}={tensor_type}"]
        argv = [str(tool), *more, model.path, str(partial), kind, str(threads)]
        run_tool(argv, partial, final.with_name(f".{final.name}.log"), f"quantizing to {kind}", _Steps(bar), cancel)
        # The record comes first: a file without one is never used, one with a record is used by size.
        write_json(final.with_suffix(".json"), {
            "source": model.source, "made_from": provenance(model), "source_path": model.path,
            "source_quant": model.quant, "requantized": requantize, "type": kind, "engine": engine_version,
            "imatrix": {**extras.imatrix, "sha256": sha256_of(matrix)} if extras.imatrix and matrix else None,
            "tensor_types": [f"{pattern}={tensor_type}" for pattern, tensor_type in extras.tensor_types],
            "size_bytes": partial.stat().st_size, "sha256": sha256_of(partial),
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        })  # fmt: skip


def _require_room(model: Model, kind: str, folder: Path) -> None:
    """Refuse early: the result is at most the parameters at its bits plus a third for the tensors kept larger."""
    by_bits = (model.parameters or 0) * (_bits(kind) + 1) // 8
    need = min(by_bits + by_bits // 3, model.size_bytes) if by_bits else model.size_bytes
    require_room(folder, need, f"a {kind} of this model", ModelUnavailable)


class _Steps:
    """llama-quantize's ``[  12/ 290]`` before each tensor, as a bar."""

    def __init__(self, bar: Bar) -> None:
        self.bar = bar

    def __call__(self, line: str) -> None:
        if found := _STEP.match(line):
            self.bar.update(int(found[1]), int(found[2]))
