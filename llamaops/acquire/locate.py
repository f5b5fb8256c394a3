"""Find a llama-server: the one that was asked for, one that was built, or one on PATH."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llamaops.core.engine import Engine
from llamaops.engine_binary import read_engine
from llamaops.errors import EngineUnavailable
from llamaops.recipe import built_engines, load_recipe

if TYPE_CHECKING:
    from llamaops.core.profile import EngineSection

__all__ = ["find_engine", "read_engine"]


def find_engine(section: EngineSection, cache: Path, environ: Mapping[str, str]) -> Engine | None:
    """Return the engine to use, or None when there is none and one must be built.

    ``engine.path`` pins it: a missing or unfit file raises EngineUnavailable, nothing else is looked at. Otherwise the
    build cache (source, CMake flags and CPU features of today; newest first), then ``llama-server`` on PATH; one found
    there that can't run is an error that names it, because silence would hide why another one is used.
    """
    if section.path != "auto":
        return read_engine(Path(section.path), "path", cache=cache)
    for folder in built_engines(load_recipe(environ), section.cmake, cache):
        try:
            return read_engine(folder / "bin" / "llama-server", "cache", cache=cache)
        except EngineUnavailable:
            continue  # a library it needs was removed since: building again is the cure
    on_path = shutil.which("llama-server", path=environ.get("PATH"))
    return read_engine(Path(on_path), "PATH", cache=cache) if on_path else None
