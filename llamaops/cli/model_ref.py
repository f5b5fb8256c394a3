"""The model that a command line names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamaops.cli.console import make_progress
from llamaops.errors import ModelUnavailable

if TYPE_CHECKING:
    from llamaops.core.model import Model

REF = """REF is what a profile's model.source takes (hf:ORG/REPO[@REV][:FILE or QUANT], path:FILE_OR_DIR,
    wheel:PKG==VER[:MEMBER], https://HOST/FILE), the path of a GGUF file or folder, or a profile."""

as_json = click.option("--json", "json_", is_flag=True, help="Print one JSON document.")


def model_of(ref: str, *, offline: bool, sha256: str | None = None) -> Model:
    """Return the model that REF names, fetched unless ``offline``."""
    from llamaops.acquire.gguf_file import read_model
    from llamaops.dirs import find_dirs
    from llamaops.prepare import acquire_engine, load_profile
    from llamaops.provide import acquire_model, fetch

    progress, cache = make_progress(), find_dirs(os.environ).cache
    if ref.endswith((".yaml", ".yml")):
        profile = load_profile(Path(ref))
        section = profile.model
        fetch(section.source, cache, progress, offline=offline, sha256=section.sha256, refresh=not offline)
        engine = acquire_engine(profile, progress, may_build=False) if profile.model.quantize else None
        return acquire_model(profile, engine, progress, offline=offline)
    source = source_of(ref)
    path = fetch(source, cache, progress, offline=offline, sha256=sha256, refresh=not offline)
    return read_model(path, source=source)


def source_of(ref: str) -> str:
    """Return REF as a source: a path becomes ``path:``. Raises ModelUnavailable."""
    from llamaops.core.source import parse_source

    path = Path(ref).expanduser()
    if path.exists():
        return f"path:{path.absolute()}"
    try:
        parse_source(ref)
    except ValueError as exc:
        raise ModelUnavailable("this names no model", where=ref, why=str(exc)) from exc
    return ref
