"""Fetch a GGUF from a URL, whose checksum the user states."""

from __future__ import annotations

import threading
from pathlib import Path

from llamaops.cache import disk_trouble_is, is_still, locked, make_folder, read_json, require_room, stamp, write_json
from llamaops.core.gguf_names import PART
from llamaops.core.progress import Progress
from llamaops.core.source import UrlSource
from llamaops.errors import ModelUnavailable
from llamaops.transfer import Wanted, fetch_checked, server_trouble_is, size_of, stated_size

RECORD = "url.json"


def fetch_url(source: UrlSource, cache: Path, progress: Progress, *, offline: bool, sha256: str | None,
              cancel: threading.Event | None = None) -> Path:
    """Return the model file of a URL, from the cache or fetched; a cut download is continued, by the next run too.

    It is kept by its checksum, so another address of the same file needs no download. Raises ModelUnavailable (no
    checksum stated, refused, wrong, no room, not cached while offline) or TryAgain (network).
    """
    if sha256 is None:
        raise ModelUnavailable("a model from a URL needs its checksum", where=str(source),
                               why="nothing else tells whether what arrives is the model",
                               fix="state the publisher's in the profile, model.sha256, or as --sha256")
    if PART.fullmatch(source.name):
        raise ModelUnavailable("a split model can't be fetched by URL", where=str(source),
                               why="model.sha256 is the checksum of one file", fix="fetch the parts, then use path:")
    folder = cache / "models" / "url" / sha256.lower()
    here = _cached(folder)
    if here is None and offline:
        raise ModelUnavailable(f"{source} is not in the cache", where=str(folder), why="offline: nothing is fetched",
                               fix="llamaops model pull PROFILE   (with a network)")
    return here or _fetch(source, make_folder(folder), sha256.lower(), progress, cancel)


def _cached(folder: Path) -> Path | None:
    record = read_json(folder / RECORD)
    path = folder / record.get("file", RECORD)
    return path if is_still(path, record) else None


def _fetch(source: UrlSource, folder: Path, sha256: str, progress: Progress, cancel: threading.Event | None) -> Path:
    with (
        locked(folder / ".lock", lambda: progress.say(f"another llamaops fetches {source}; waiting …"), cancel),
        disk_trouble_is(ModelUnavailable, "the download", folder),
        server_trouble_is(ModelUnavailable, "the model file", str(source)),
    ):
        here = _cached(folder)
        if here is None:
            final, partial = folder / source.name, folder / ".llamaops.incomplete"
            size = stated_size(source.url, str(source), ModelUnavailable, cancel)
            require_room(folder, size - size_of(partial), f"{source}", ModelUnavailable)
            fetch_checked(Wanted(source.name, source.url, size, sha256, str(source), {}), partial, progress,
                          ModelUnavailable, cancel)
            here = partial.replace(final)
            write_json(folder / RECORD, {**stamp(final, sha256), "url": str(source)})
    return here
