"""The engine's tools beside llama-server: run one on a model, at low priority, with its output kept when it fails."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llamaops.child import run
from llamaops.core.model import Model
from llamaops.errors import ModelUnavailable

_WANTS_MATRIX = re.compile("requires an imatrix|Missing importance matrix")
"""How llama-quantize says, before the first tensor or at one, that the type can't be made without."""


def tool_environment() -> dict[str, str]:
    """Return a tool's environment: plain English, no debugger at an abort, nothing that stands for its own flags."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    return {**kept, "LC_ALL": "C", "GGML_NO_BACKTRACE": "1"}


def provenance(model: Model) -> dict[str, Any]:
    """Tell the source file from any other: by checksum where known, else by place, size and time."""
    if model.sha256:
        return {"sha256": model.sha256.lower()}
    path = Path(model.path).resolve()
    try:
        info = path.stat()
    except OSError:
        return {"path": str(path)}
    return {"path": str(path), "size_bytes": info.st_size, "mtime_ns": info.st_mtime_ns}


def made_name(model: Model) -> str:
    """Return the begin of a result's file name: the source's, without its part number and its type."""
    stem = re.sub(r"[-._]?(?:00001-of-\d{5})$", "", Path(model.path).stem)
    return re.sub(rf"[-._](?:{re.escape(model.quant or '?')}|F16|BF16|F32|fp16|fp32)$", "", stem, flags=re.IGNORECASE)


def run_tool(
    argv: Sequence[str], made: Path, log: Path, work: str, on_line: Callable[[str], None],
    cancel: threading.Event | None = None,
) -> None:  # fmt: skip
    """Run a tool that makes the file ``made``. Raises ModelUnavailable that names ``log``, which is kept then."""
    log.unlink(missing_ok=True)
    done = run(argv, env=tool_environment(), on_line=on_line, log=log, niced=True, cancel=cancel)
    if done.code == 0 and made.exists():
        log.unlink(missing_ok=True)
        return
    if _WANTS_MATRIX.search(done.tail):
        log.unlink(missing_ok=True)
        raise _needs_matrix(work, done.tail)
    raise ModelUnavailable(f"{work} failed", where=str(log), why=failure_reason(done.tail, done.code), detail=done.tail,
                           fix="the whole output is in that file")


def _needs_matrix(work: str, tail: str) -> ModelUnavailable:
    tensor = re.search(r"offending tensor: (\S+)|matrix for tensor (\S+)", tail)
    which = f" (for {tensor[1] or tensor[2]})" if tensor else ""
    return ModelUnavailable(f"{work} needs an importance matrix{which}", where="model.imatrix",
                            why="without one the result of so few bits would be garbage, says llama-quantize",
                            fix="set  model.imatrix: auto  (or --imatrix auto): it is computed once")


def failure_reason(tail: str, code: int) -> str:
    """Return the first line that speaks of a failure: those after it only say that there was one."""
    lines = [line for line in tail.splitlines() if re.search("error|fail|illegal|invalid", line, re.IGNORECASE)]
    return lines[0][:300] if lines else f"it ended with {code}" + (", killed: out of memory?" if code == -9 else "")
