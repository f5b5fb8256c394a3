"""Read what a model that is not here says about itself: headers and configuration, by range request; no weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llamaops.core.checkpoint import CheckpointError, header_length, model_of, read_tensors
from llamaops.core.checkpoint_names import CONFIGS, checkpoint_files
from llamaops.core.fits import Variant
from llamaops.core.gguf_header import Header, HeaderError, MoreNeededError, parse_header, to_model
from llamaops.core.gguf_names import ChoiceError, choose, listed, models_among, part_names, quant_in
from llamaops.core.model import Model
from llamaops.core.source import HubSource, UrlSource
from llamaops.errors import ModelUnavailable
from llamaops.hub_api import Listing, Repo, authorization, download_url, explained, find_repo, list_files
from llamaops.transfer import read_part, server_trouble_is

FIRST_BYTES = 256 << 10
MAX_HEADER = 128 << 20
"""More than the largest vocabulary with its merges takes."""

Read = Callable[[str, int, int], tuple[bytes, int | None]]
"""Reads the bytes of a file by name from begin to end, and tells the file's size."""


@dataclass(frozen=True, slots=True)
class Looked:
    """A model's facts, and the files of it that there are; of several, the facts are the smallest one's."""

    model: Model
    variants: tuple[Variant, ...]


def look_at_url(source: UrlSource) -> Looked:
    """Read the header of a GGUF on a server. Raises ModelUnavailable or TryAgain."""
    with server_trouble_is(ModelUnavailable, "the model file", str(source)):
        read: Read = lambda _name, begin, end: read_part(source.url, {}, begin, end)  # noqa: E731 - as short as it gets
        header, size = _header(read, source.name, str(source))
    model = _model(header, str(source), size)
    return Looked(model, (Variant(model.quant, size, source.name),))


def look_at_hub(source: HubSource, cache: Path, environ: Mapping[str, str] = os.environ) -> Looked:
    """Read what a repository's model says: a GGUF's header, or config.json and the headers of safetensors.

    Raises ModelUnavailable, listing the files where the one that was named is not there, or TryAgain.
    """
    repo = find_repo(source, environ, cache)
    with explained(repo):
        listing = list_files(repo)
        headers = authorization()

        def read(name: str, begin: int, end: int) -> tuple[bytes, int | None]:
            return read_part(download_url(repo, listing.commit, name), headers, begin, end)

        models = models_among(tuple(listing.files))
        if not models and (files := checkpoint_files(listing.files)):
            return _look_at_checkpoint(f"hf:{repo.source.repo}", listing.sizes, files, read)
        return _look_at_gguf(repo, listing, models, read)


def _look_at_gguf(repo: Repo, listing: Listing, models: tuple[str, ...], read: Read) -> Looked:
    sizes = {name: sum(listing.sizes.get(part, 0) for part in part_names(name)) for name in models}
    name = _which(repo, listing, sizes)
    model, shown = None, f"hf:{repo.source.repo}:{name}"
    for part in part_names(name):
        header, size = _header(read, part, shown)
        model = _model(header, shown, size) if model is None else replace(
            model, size_bytes=model.size_bytes + size, parameters=(model.parameters or 0) + header.parameters)
    assert model is not None
    return Looked(model, tuple(Variant(quant_in(each), size, each) for each, size in sizes.items()))


def _which(repo: Repo, listing: Listing, sizes: Mapping[str, int]) -> str:
    """Return the file that is meant, of several the smallest."""
    source = repo.source
    try:
        return choose(tuple(listing.files), source.file, source.quant)
    except ChoiceError as exc:
        fitting = [name for name in exc.candidates if quant_in(name) == source.quant or source.quant is None]
        if fitting and source.file is None:
            return min(fitting, key=lambda name: sizes[name])
        raise ModelUnavailable(f"can't look at {source}: {exc.reason}", where=repo.page, fix="check the name",
                               why=f"there are {listed(exc.candidates, listing.sizes)}" if exc.candidates else None,
                               ) from None


def _header(read: Read, name: str, where: str) -> tuple[Header, int]:
    """Read a header in growing steps; return it and the size of the file."""
    data, size = read(name, 0, FIRST_BYTES)
    size = len(data) if size is None else size
    while True:
        try:
            return parse_header(data, size), size
        except HeaderError as exc:
            raise _unusable(where, str(exc)) from None
        except MoreNeededError as exc:
            want = max(exc.bytes, 4 * len(data))
        more = read(name, len(data), want)[0] if want <= MAX_HEADER else b""
        if not more:
            raise _unusable(where, f"its header does not end within {len(data)} bytes")
        data += more


def look_at_folder(folder: Path) -> Looked | None:
    """Read what a checkpoint in a folder says; None where there is none, or a GGUF. Raises ModelUnavailable."""
    paths = [*folder.glob("*"), *folder.glob("*_Pooling/config.json")]  # not all below it: it may be a home folder
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in paths if path.is_file()}
    files = checkpoint_files(sizes)
    if models_among(tuple(sizes)) or not files:
        return None

    def read(name: str, begin: int, end: int) -> tuple[bytes, int | None]:
        with (folder / name).open("rb") as file:
            file.seek(begin)
            return file.read(end - begin), sizes[name]

    return _look_at_checkpoint(str(folder), sizes, files, read)


def _look_at_checkpoint(where: str, sizes: Mapping[str, int], files: tuple[str, ...], read: Read) -> Looked:
    weights = [name for name in files if name.endswith(".safetensors")]
    config = next(name for name in CONFIGS if name in files)
    elements: dict[str, int] = {}
    try:
        for name in weights:
            length = header_length(read(name, 0, 8)[0])
            for kind, count in read_tensors(read(name, 8, 8 + length)[0]).elements.items():
                elements[kind] = elements.get(kind, 0) + count
        size = sum(sizes[name] for name in weights)
        model = model_of(_small(read, sizes, config), elements, where, size)
    except CheckpointError as exc:
        raise _unusable(where, str(exc)) from None
    template = any(name.startswith("chat_template.") for name in files)
    template = template or b'"chat_template"' in _small(read, sizes, "tokenizer_config.json")
    return Looked(replace(model, source=where, has_chat_template=template), ())


def _small(read: Read, sizes: Mapping[str, int], name: str) -> bytes:
    size = sizes.get(name, 0)
    return read(name, 0, size)[0] if 0 < size < MAX_HEADER else b""


def _model(header: Header, path: str, size: int) -> Model:
    try:
        return to_model(header, path, size, path, None)
    except HeaderError as exc:
        raise _unusable(path, str(exc)) from None


def _unusable(where: str, why: str) -> ModelUnavailable:
    return ModelUnavailable("can't use this model file", where=where, why=why, fix="name another file of the model")
