"""Importance matrices: computed once with llama-imatrix from a text, or read from a person's file."""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import threading
import time
from pathlib import Path
from typing import NoReturn

from llamaops.cache import appearing, finished, make_once, require_room, sha256_of, write_json
from llamaops.core.gguf_header import HeaderError
from llamaops.core.imatrix_file import entry_names
from llamaops.core.model import ENCODERS, Model
from llamaops.core.progress import Bar, Progress
from llamaops.engine_tool import made_name, provenance, run_tool
from llamaops.errors import ModelUnavailable

CHUNK_TOKENS = 512
"""Tokens that are computed at a time, llama-imatrix's own default; the text's length bounds how many chunks."""

_CHUNKS = re.compile(r"computing over (\d+) chunks")
_AT_CHUNK = re.compile(r"collect_imatrix\[(\d+)\]")


def read_entries(path: Path) -> tuple[str, ...]:
    """Return the tensors that a matrix has values for. Raises ModelUnavailable: missing, or no importance matrix."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return entry_names(data)
    except HeaderError as exc:
        _refuse(path, str(exc))
    except (OSError, ValueError) as exc:
        _refuse(path, getattr(exc, "strerror", None) or "the file is empty")


def _refuse(path: Path, why: str) -> NoReturn:
    raise ModelUnavailable("can't use this importance matrix", where=str(path), why=why,
                           fix="set  model.imatrix: auto  (or --imatrix auto) to have one computed, or name another")


def identity(text: Path) -> dict[str, str | int]:
    """Return what the computed matrix depends on beside model and engine."""
    return {"text_sha256": sha256_of(text), "chunk_tokens": CHUNK_TOKENS}


def compute(
    tool: Path, model: Model, text: Path, cache: Path, progress: Progress, *, threads: int, engine_version: str | None,
    cancel: threading.Event | None = None,
) -> Path:  # fmt: skip
    """Return the importance matrix of ``model``: from the cache at once, or made by ``tool`` at low priority.

    It appears when it is whole, a JSON file beside it tells what it was made of. Raises ModelUnavailable (no tool, an
    encoder, no room, the tool's failure).
    """
    final = _target(model, text, cache, engine_version)
    if (done := finished(final)) is not None:
        return done
    _check_can(tool, model)
    make_once(final, "computing the importance matrix",
              lambda: _make(tool, model, text, final, progress, threads, engine_version, cancel), progress,
              ModelUnavailable, cancel)
    return final


def _target(model: Model, text: Path, cache: Path, engine_version: str | None) -> Path:
    key = json.dumps([provenance(model), engine_version, identity(text)], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return cache / "models" / "imatrix" / f"{made_name(model)}-imatrix-{digest}.gguf"


def _check_can(tool: Path, model: Model) -> None:
    if model.architecture in ENCODERS:
        raise ModelUnavailable("no importance matrix can be computed for this model", where="model.imatrix",
                               why=f"llama-imatrix reads text from left to right, and {model.architecture} does not",
                               fix="take model.imatrix out; for types that need none: Q4_K_M, Q5_K_M, Q6_K, Q8_0")
    if not tool.is_file():
        raise ModelUnavailable("the importance matrix can't be computed", where="model.imatrix",
                               why="there is no llama-imatrix beside the engine",
                               fix="llamaops engine build, or name a matrix: model.imatrix: FILE")


def _make(
    tool: Path, model: Model, text: Path, final: Path, progress: Progress, threads: int, engine_version: str | None,
    cancel: threading.Event | None,
) -> None:  # fmt: skip
    # Four bytes a column of each matrix, which has hundreds of rows: far below a fiftieth even of a two-bit model.
    require_room(final.parent, model.size_bytes // 50, "an importance matrix", ModelUnavailable)
    tokens = min(CHUNK_TOKENS, model.context_train or CHUNK_TOKENS)
    with progress.bar("compute the importance matrix", "steps") as bar, appearing(final) as partial:
        # Verbosity 5 names each tensor it comes by, the only sign of life without computing the perplexity too.
        argv = [str(tool), "-m", model.path, "-f", str(text), "-o", str(partial), "--output-format", "gguf", "-c",
                str(tokens), "-b", str(tokens), "-t", str(threads), "--no-ppl", "-lv", "5"]
        run_tool(argv, partial, final.with_name(f".{final.name}.log"), "computing the importance matrix", _Steps(bar),
                 cancel)
        write_json(final.with_suffix(".json"), {
            "source": model.source, "made_from": provenance(model), "source_path": model.path,
            "source_quant": model.quant, "type": "imatrix", "engine": engine_version, **identity(text),
            "size_bytes": partial.stat().st_size, "sha256": sha256_of(partial),
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        })  # fmt: skip


class _Steps:
    """llama-imatrix's chunks as a bar: ``computing over 11 chunks``, then ``collect_imatrix[3]: …`` for each tensor."""

    def __init__(self, bar: Bar) -> None:
        self.bar, self.total, self.done = bar, 0, -1

    def __call__(self, line: str) -> None:
        if found := _CHUNKS.search(line):
            self.total = int(found[1])
        elif (found := _AT_CHUNK.search(line)) and (at := max(int(found[1]) - 1, 0)) != self.done:
            self.done = at
            self.bar.update(at, self.total or None)
