"""Writing the files people asked for: whole or not at all, and never over theirs unasked."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from llamaops.errors import UsageError


def write_whole(path: Path, text: str, *, replace: bool = False, mode: int = 0o644) -> None:
    """Write ``text`` as UTF-8 to ``path``: readers see the old file or the new one, never a part.

    Raises UsageError when the file is there and ``replace`` is false, or when the folder can't be written.
    """
    try:
        _publish(path, text, replace, mode)
    except FileExistsError:
        raise UsageError("the file is there already", where=str(path), fix="give another name, or --force") from None
    except OSError as exc:
        raise UsageError("can't write the file", where=str(path), why=exc.strerror or str(exc),
                         fix="give a path in a folder that exists and that you can write") from exc


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
