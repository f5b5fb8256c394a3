"""Bring the pinned engine source to this disk: for building it, and for the converter that lies in it."""

from __future__ import annotations

import shutil
import tarfile
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from llamaops.cache import locked, make_folder, sha256_of
from llamaops.child import CancelledError
from llamaops.core.progress import Bar, Progress
from llamaops.errors import BuildFailed, LlamaopsError, TryAgain, Unavailable
from llamaops.pip_download import pip_download
from llamaops.recipe import EngineSource

Cancel = threading.Event | None


class SourceMissingError(Exception):
    """This source can't be had now; the recipe may name another one."""

    def __init__(self, cause: LlamaopsError) -> None:
        super().__init__(cause.what)
        self.cause = cause


def fetch_archive(source: EngineSource, cache: Path, environ: Mapping[str, str], progress: Progress,
                  cancel: Cancel = None) -> Path:
    """Return the verified archive of a source, kept in the cache so that it is downloaded once.

    Raises SourceMissingError when it can't be had, BuildFailed when it is not what the recipe pins.
    """
    downloads = make_folder(cache / "downloads")
    kept = downloads / f"{source.sha256}.tar.gz"
    lock = cache / f".source-{(source.sha256 or '')[:12]}.lock"
    with locked(lock, lambda: progress.say("another llamaops fetches the engine source; waiting …"), cancel):
        if not (kept.exists() and sha256_of(kept) == source.sha256):
            _fetch(source, kept, environ, progress, cancel)
    return kept


def _fetch(source: EngineSource, kept: Path, environ: Mapping[str, str], progress: Progress, cancel: Cancel) -> None:
    folder = kept.with_name(f".{kept.name}.fetch")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        with progress.bar("download engine source", "bytes") as bar:
            get = _from_index if source.kind == "sdist" else _from_url
            got = get(source, folder, environ, bar, cancel)
        if (actual := sha256_of(got)) != source.sha256:
            raise _WrongBytesError(f"expected {source.sha256}, got {actual}")
        got.replace(kept)
    except (Unavailable, TryAgain) as exc:
        raise SourceMissingError(exc) from exc
    except _WrongBytesError as exc:
        raise BuildFailed("the engine source has the wrong checksum", where=source.where, why=str(exc),
                          fix="don't use it; look where it comes from") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _WrongBytesError(Exception):
    pass


def _from_index(source: EngineSource, folder: Path, environ: Mapping[str, str], bar: Bar, cancel: Cancel) -> Path:
    return pip_download(source.where, source.version or "", form="sdist", sha256=source.sha256, folder=folder,
                        environ=environ, bar=bar, error=BuildFailed, cancel=cancel)


def _from_url(source: EngineSource, folder: Path, _environ: Mapping[str, str], bar: Bar, cancel: Cancel) -> Path:
    got, done = folder / "source.tar.gz", 0
    if not source.where.startswith(("https://", "http://", "file://")):
        raise BuildFailed("the engine source is not at a URL", where=source.where)
    try:
        with urllib.request.urlopen(source.where, timeout=60) as reply, got.open("wb") as file:  # noqa: S310  # checked above
            total = int(reply.headers.get("Content-Length") or 0) or None
            while chunk := reply.read(1 << 20):
                file.write(chunk)
                done += len(chunk)
                bar.update(done, total)
                if cancel is not None and cancel.is_set():
                    raise CancelledError("cancelled")
    except OSError as exc:
        raise BuildFailed("can't fetch the engine source", where=source.where, why=str(exc)) from exc
    return got


def unpack(archive: Path, folder: str, tree: Path,
           wanted: Callable[[PurePosixPath], bool] = lambda _path: True) -> None:
    """Unpack what lies in ``folder`` under the archive's one top folder; ``wanted`` is asked for each path in it.

    ``tree`` appears when it is whole. Raises BuildFailed.
    """
    partial = tree.with_name(tree.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            # The stdlib's own guard against absolute names, links outside and devices (PEP 706). Debian 12's Python has
            # none yet; there the archive's checksum, which is always verified, must do.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            for member in tar:
                inner = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                if inner.is_relative_to(folder or ".") and wanted(inner.relative_to(folder or ".")):
                    member.name = str(inner.relative_to(folder or "."))
                    tar.extract(member, partial)
    except (tarfile.TarError, EOFError) as exc:
        raise BuildFailed("the engine's archive can't be unpacked", where=str(archive), why=str(exc)) from exc
    partial.mkdir(exist_ok=True)
    partial.replace(tree)
