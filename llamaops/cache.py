"""What everything that writes to the cache shares: locks, room on disk, names that appear only when whole."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llamaops.child import CancelledError
from llamaops.core.progress import Progress
from llamaops.errors import LlamaopsError, NotPermitted

MARGIN_BYTES = 64 << 20
"""Room left on the disk for everybody else."""


def make_folder(path: Path) -> Path:
    """Make a cache folder and its parents and return it. Raises NotPermitted that names the folder."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise NotPermitted("can't make the cache folder", where=str(path), why=exc.strerror or str(exc),
                           fix="set LLAMAOPS_CACHE to a folder you can write") from exc
    return path


@contextmanager
def locked(path: Path, on_wait: Callable[[], None], cancel: threading.Event | None = None) -> Iterator[None]:
    """Hold the lock file ``path`` (flock); ``on_wait`` is called once if somebody else has it.

    The file stays: removing it would let two holders in. The kernel frees the lock when its holder dies.
    """
    make_folder(path.parent)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise NotPermitted("can't make the lock file", where=str(path), why=exc.strerror,
                           fix="give this user the folder, or set LLAMAOPS_CACHE to one of its own") from exc
    try:
        if not _try_lock(fd):
            on_wait()
            while not _try_lock(fd):
                if cancel is not None and cancel.is_set():
                    raise CancelledError("cancelled")
                time.sleep(0.1)
        yield
    finally:
        os.close(fd)


def is_locked(path: Path) -> bool:
    """Tell whether somebody holds the lock file ``path`` right now."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def require_room(folder: Path, need: int, what: str, error: type[LlamaopsError]) -> None:
    """Refuse, before the first byte, work that would not fit: ``need`` bytes plus a margin in ``folder``."""
    free = shutil.disk_usage(folder).free
    if free < need + MARGIN_BYTES:
        raise error(f"not enough room on the disk for {what}", where=str(folder),
                    why=f"it needs {mib(need + MARGIN_BYTES)}, {mib(free)} are free",
                    fix="free some space there, or set LLAMAOPS_CACHE to a folder on a larger disk")


@contextmanager
def disk_trouble_is(error: type[LlamaopsError], what: str, where: Path) -> Iterator[None]:
    """Turn a disk (or quota) that fills up meanwhile into ``error``, one that may not be written into NotPermitted."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise error(f"the disk filled up during {what}", where=str(where), why=exc.strerror,
                        fix="free some space there and run the same command again") from exc
        if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise NotPermitted(f"{what} may not write its files", where=str(exc.filename or where), why=exc.strerror,
                               fix="give this user the folder, or set LLAMAOPS_CACHE to one of its own") from exc
        raise


@contextmanager
def appearing(final: Path) -> Iterator[Path]:
    """Give a temporary name beside ``final``; on success it is synced and renamed to it, otherwise removed.

    Call it under the lock of what is being made: the temporary name is always the same, so that what a killed run left
    behind is replaced and not hoarded.
    """
    partial = final.with_name(f".{final.name}.part")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(final)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a small JSON document that is either there whole or not at all."""
    with appearing(path) as partial:
        partial.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote; a missing or damaged document is empty."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def finished(path: Path) -> Path | None:
    """Return ``path`` if it is as long as the record beside it, ``<stem>.json``, says; None while it is not made."""
    try:
        return path if path.stat().st_size == read_json(path.with_suffix(".json")).get("size_bytes") else None
    except OSError:
        return None


def make_once(final: Path, work: str, make: Callable[[], object], progress: Progress, error: type[LlamaopsError],
              cancel: threading.Event | None) -> None:
    """Call ``make``, which makes ``final`` and the record beside it, unless it is whole already.

    Of several that want it one makes it, the others wait. Trouble of the disk is raised as ``error`` about ``work``.
    """
    lock = final.with_name(f".{final.name}.lock")
    with locked(lock, lambda: progress.say(f"another llamaops makes {final.name}; waiting …"), cancel):
        if finished(final) is None:
            with disk_trouble_is(error, work, final.parent):
                make()


def files_below(folder: Path) -> Iterator[Path]:
    """Yield what is no folder, in ``folder`` and below.

    Folders that vanish meanwhile are left out; Path.rglob raises FileNotFoundError there up to Python 3.12.
    """
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def stamp(path: Path, sha256: str) -> dict[str, Any]:
    """Return what tells later that a file of this checksum is still the same, without reading it."""
    info = path.stat()
    return {"file": path.name, "size": info.st_size, "mtime_ns": info.st_mtime_ns, "sha256": sha256}


def mark_used(path: Path) -> None:
    """Note the use of a file as its access time, which mounts seldom keep; the time of its content stays."""
    with suppress(OSError):  # another user's, or a disk that can't be written
        info = path.stat()
        os.utime(path, ns=(time.time_ns(), info.st_mtime_ns))


@contextmanager
def unnoticed(path: Path) -> Iterator[None]:
    """Put a file's access time back afterwards: looking at it is no use of it."""
    before = path.stat()
    try:
        yield
    finally:
        with suppress(OSError):
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def is_still(path: Path, stamped: Mapping[str, Any]) -> bool:
    """Tell whether the file is what `stamp` saw; its checksum is only computed when size or time differ."""
    try:
        info = path.stat()
        same = [info.st_size, info.st_mtime_ns] == [stamped["size"], stamped["mtime_ns"]]
        return same or sha256_of(path) == stamped["sha256"]
    except (OSError, KeyError):
        return False


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 as hexadecimal text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def mib(size: int) -> str:
    """Spell a size for people."""
    return f"{size / (1 << 20):.0f} MiB" if size < 10 << 30 else f"{size / (1 << 30):.1f} GiB"
