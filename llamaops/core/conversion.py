"""What converting a Hugging Face model needs, and what its failures mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

BYTES_PER_PARAMETER = {"F32": 4.0, "F16": 2.0, "BF16": 2.0, "Q8_0": 34 / 32}
"""The types that the converter writes by itself; every other is llama-quantize's work."""


Consent = Callable[[str], bool]
"""Asks a person the question and returns the answer; False where nobody is there."""


@dataclass(frozen=True, slots=True)
class Converter:
    """The converter of one engine source: its scripts, the Python that runs them, and the engine's build number."""

    python: str
    scripts: str
    build: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the converter failed, and what mends it."""

    why: str
    fix: str


_UNSUPPORTED = re.compile(r"Model (\S+) is not supported|Architecture '?([\w.-]+)'? not supported")
_READY = "use a ready GGUF of this model, or a newer engine (the converter is part of its source)"


def explain_failure(output: str, code: int, build: str | None) -> Failure:
    """Say what the converter's last lines mean; ``code`` is negative where a signal ended it."""
    engine = f"engine {build}" if build else "this engine"
    if found := _UNSUPPORTED.search(output):
        return Failure(f"architecture {found[1] or found[2]} is not supported by {engine}", _READY)
    if "pre-tokenizer was not recognized" in output:
        return Failure(f"its pre-tokenizer is not known to {engine}", _READY)
    if "KeyError: 'architectures'" in output:
        return Failure("config.json names no architecture", "check that the folder is a whole model")
    if "trust_remote_code" in output or "contains custom code" in output:
        return Failure("it needs Python code of its own, which is never run", "use a ready GGUF of this model")
    if code == -9 or "MemoryError" in output or "can't allocate memory" in output:
        return Failure("it ran out of memory", "close other programs, or convert on a larger machine")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else f"it ended with {code} and said nothing"
    return Failure(last, "the whole output is in that file; " + _READY)


def converter_variables(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the converter's whole environment: no tokens, no network, no other Python's modules."""
    kept = {name: environ[name] for name in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in environ}
    return kept | {
        "LC_ALL": "C.UTF-8", "PYTHONUNBUFFERED": "1", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip
