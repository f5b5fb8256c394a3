"""Fetch a released llama.cpp, whose checksum the user states, and see whether it runs here."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

from llamaops.cache import disk_trouble_is, locked, make_folder, require_room, write_json
from llamaops.core.engine import Engine
from llamaops.core.progress import Progress
from llamaops.core.source import UrlSource
from llamaops.engine_binary import read_engine
from llamaops.engine_source import unpack
from llamaops.errors import EngineUnavailable
from llamaops.recipe import MANIFEST, engines_folder
from llamaops.transfer import Wanted, fetch_checked, server_trouble_is, size_of, stated_size

UNPACKED = 5
"""What a release takes unpacked, in the size of its archive; they compress to about a third."""


def fetch_release(source: UrlSource, sha256: str, cache: Path, progress: Progress,
                  cancel: threading.Event | None = None) -> Engine:
    """Return the llama-server of a release archive (tar), from the cache or fetched and checked.

    Raises EngineUnavailable (refused, wrong checksum, no room, no llama-server in it, or one that can't run on this
    machine, with the reason) or TryAgain (network).
    """
    engines = make_folder(engines_folder(cache))
    final = engines / f"release-{sha256[:12].lower()}"
    lock = engines / f".lock-{final.name}"
    with locked(lock, lambda: progress.say("another llamaops fetches this release; waiting …"), cancel):
        if not (final / MANIFEST).exists():
            work = make_folder(engines / f".building-{final.name}")
            with disk_trouble_is(EngineUnavailable, "the download of the engine", work):
                _publish(_unpacked(source, sha256.lower(), work, progress, cancel), work / "ready", source, final)
            shutil.rmtree(work, ignore_errors=True)
    return read_engine(final / "bin" / "llama-server", "path", cache=cache)


def _unpacked(source: UrlSource, sha256: str, work: Path, progress: Progress, cancel: threading.Event | None) -> Path:
    """Return the folder with llama-server in it, unpacked below ``work``."""
    archive, tree, where = work / "archive", work / "tree", str(source)
    with server_trouble_is(EngineUnavailable, "the release", where):
        size = stated_size(source.url, where, EngineUnavailable, cancel)
        require_room(work, size - size_of(archive) + UNPACKED * size, "the release", EngineUnavailable)
        wanted = Wanted("llama.cpp release", source.url, size, sha256, where, {})
        fetch_checked(wanted, archive, progress, EngineUnavailable, cancel)
    shutil.rmtree(tree, ignore_errors=True)
    unpack(archive, "", tree)
    found = [path for path in tree.rglob("llama-server") if path.is_file()]
    if len(found) != 1:
        raise EngineUnavailable("this is no release of llama.cpp", where=where, fix="give the archive for this system",
                                why=f"it holds {len(found) or 'no'} llama-server")
    return found[0].parent


def _publish(folder: Path, ready: Path, source: UrlSource, final: Path) -> None:
    """Let a release that runs here appear under its final name in one step."""
    engine = read_engine(folder / "llama-server", "path")
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir()
    folder.replace(ready / "bin")
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_json(ready / MANIFEST, {"version": engine.version, "made": made, "from": str(source)})
    shutil.rmtree(final, ignore_errors=True)  # a folder without manifest: never an engine
    ready.replace(final)
