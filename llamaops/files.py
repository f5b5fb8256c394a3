"""Writing the files people asked for: whole or not at all, and never over theirs unasked."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from llamaops.errors import UsageError


def write_whole(path: Path, text: str, *, replace: bool = False, mode: int = 0o644) -> None:
    """Write ``text`` as UTF-8 to ``path``: readers see the old file or the new one, never a part.

    With ``replace`` a link is followed, and what is no file (a pipe, ``/dev/stdout``) is written to as it is. Raises
    UsageError when the file is there and ``replace`` is false, or when it can't be written.
    """
    try:
        if replace and _is_special(path):
            path.write_text(text, encoding="utf-8", newline="\n")
        else:
            _publish(path.resolve() if replace else path, text, replace, mode)
    except FileExistsError:
        raise UsageError("the file is there already", where=str(path), fix="give another name, or --force") from None
    except OSError as exc:
        raise _unwritable(path, exc.strerror or str(exc)) from exc


def check_writable(path: Path) -> None:
    """Raise the UsageError that replacing ``path`` would end with, before long work whose result goes there."""
    if path.is_dir():
        raise _unwritable(path, os.strerror(errno.EISDIR))
    folder = path.resolve().parent
    if not folder.is_dir():
        raise _unwritable(path, os.strerror(errno.ENOENT if not folder.exists() else errno.ENOTDIR))
    if not os.access(path if _is_special(path) else folder, os.W_OK):
        raise _unwritable(path, os.strerror(errno.EACCES))


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _unwritable(path: Path, why: str) -> UsageError:
    return UsageError("can't write the file", where=str(path), why=why,
                      fix="give a path in a folder that exists and that you can write")


def _publish(path: Path, text: str, replace: bool, mode: int) -> None:
    fd, name = tempfile.mkstemp(prefix=f".{path.name[:200]}.", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode & ~_umask())
            os.fsync(file.fileno())
        if replace:
            Path(name).replace(path)
        else:
            path.hardlink_to(name)  # unlike a rename, a link fails if somebody made the file meanwhile
    finally:
        with suppress(FileNotFoundError):
            Path(name).unlink()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
