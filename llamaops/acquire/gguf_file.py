"""Read what a GGUF file on disk says about itself, and find the one that a path means."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from llamaops.cache import sha256_of
from llamaops.core.checkpoint_names import checkpoint_files
from llamaops.core.gguf_header import Header, HeaderError, Tensor, parse_header, to_model
from llamaops.core.gguf_names import listed, models_among, part_names
from llamaops.core.model import Model
from llamaops.errors import ModelUnavailable


def read_model(path: Path, *, source: str | None = None, sha256: str | None = None) -> Model:
    """Read a model's facts from its header; of a split model give the first part, the others must lie beside it.

    Milliseconds whatever the size, no tensor data is read. Raises ModelUnavailable when the file is missing,
    unreadable, truncated or not a GGUF, naming what it is instead.
    """
    first, *others = part_names(path.name)
    if path.name != first:
        _refuse(path, "it is one part of a split model", f"give the first part: {first}")
    header, size = _read_header(path)
    model = _model(header, path, size, source, sha256)
    for name in others:
        more, more_size = _read_header(path.with_name(name))
        model = replace(model, size_bytes=model.size_bytes + more_size,
                        parameters=(model.parameters or 0) + more.parameters)
    return model


def read_tensors(path: Path) -> tuple[Tensor, ...]:
    """Return every tensor of a model as its header (the headers of all its parts) announces it."""
    return tuple(tensor for name in part_names(path.name) for tensor in _read_header(path.with_name(name))[0].tensors)


def find_gguf(path: Path, *, sha256: str | None = None) -> Path:
    """Return the model file that ``path`` means: itself, the only GGUF in the folder, or a folder with safetensors.

    Projectors (``mmproj-*``) and the later parts of a split model do not count. Raises ModelUnavailable when there is
    none, when there are several, or when ``sha256`` is given and differs.
    """
    found = _only_model(path) if path.is_dir() else path
    if not found.exists():
        near = sorted(p.name for p in found.parent.glob("*.gguf"))[:8] if found.parent.is_dir() else []
        raise ModelUnavailable("there is no such model file", where=str(found), fix="check model.source",
                               why=f"the folder has: {', '.join(near)}" if near else None)
    if sha256 and not found.is_dir() and (actual := _checksum(found)) != sha256.lower():
        raise ModelUnavailable("the model file has the wrong checksum", where=str(found),
                               why=f"model.sha256 is {sha256.lower()}, the file's is {actual}",
                               fix="get the file again, or correct model.sha256")
    return found


def _checksum(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as exc:
        _refuse(path, exc.strerror or str(exc), "make it readable for this user")


def _only_model(folder: Path) -> Path:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    models = models_among(tuple(sizes))
    if len(models) == 1:
        return folder / models[0]
    if models:
        raise ModelUnavailable("several models are in this folder", where=str(folder), why=listed(models, sizes),
                               fix=f"name one: path:{folder / models[0]}")
    if checkpoint_files(tuple(sizes)):
        return folder  # to be converted
    raise ModelUnavailable("no model is in this folder", where=str(folder),
                           why="it has neither a *.gguf nor config.json with *.safetensors", fix="check model.source")


def _read_header(path: Path) -> tuple[Header, int]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                _refuse(path, "the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return parse_header(data), size
    except HeaderError as exc:
        _refuse(path, str(exc))
    except FileNotFoundError:
        _refuse(path, "there is no such file", "check model.source, or fetch it again: llamaops model pull")
    except (OSError, ValueError) as exc:
        _refuse(path, getattr(exc, "strerror", None) or str(exc), "make it readable for this user")


def _model(header: Header, path: Path, size: int, source: str | None, sha256: str | None) -> Model:
    try:
        return to_model(header, str(path), size, source, sha256)
    except HeaderError as exc:
        _refuse(path, str(exc))


def _refuse(path: Path, why: str, fix: str | None = None) -> NoReturn:
    raise ModelUnavailable("can't use this model file", where=str(path), why=why,
                           fix=fix or "get the file again, or a GGUF of this model")
