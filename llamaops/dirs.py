"""Where llamaops keeps things on disk: cache (engines, models), runtime (sockets, locks), state (logs)."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamaops.errors import NotPermitted


@dataclass(frozen=True, slots=True)
class Dirs:
    """Three folders; none need exist yet. ``runtime`` is private (0700) once `private_dir` has made it."""

    cache: Path
    runtime: Path
    state: Path


def find_dirs(environ: Mapping[str, str]) -> Dirs:
    """Choose the folders for this user.

    Order: ``LLAMAOPS_CACHE`` (cache only); what systemd hands a unit (``CACHE_DIRECTORY``, ``RUNTIME_DIRECTORY``,
    ``STATE_DIRECTORY``, systemd.exec(5)); the XDG base directories; root's ``/var/cache`` and ``/run``; ``~/.cache``;
    and, with no home at all, a folder of the temporary directory named by user id.
    """
    root = os.geteuid() == 0
    home = environ.get("HOME")

    def choose(systemd: str, xdg: str, under_home: str | None, system: str | None) -> Path:
        if given := environ.get(systemd):
            return Path(given.split(":")[0]).resolve()  # for a dynamic user it is systemd's link into /run/private
        if (given := environ.get(xdg)) and Path(given).is_absolute():
            return Path(given) / "llamaops"
        if home and under_home:
            return Path(home) / under_home / "llamaops"
        if root and system:
            return Path(system) / "llamaops"
        return Path(tempfile.gettempdir()) / f"llamaops-{os.geteuid()}" / xdg.lower()

    cache = environ.get("LLAMAOPS_CACHE")
    return Dirs(
        cache=Path(cache).absolute() if cache else choose("CACHE_DIRECTORY", "XDG_CACHE_HOME", ".cache", "/var/cache"),
        runtime=choose("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR", None, "/run"),
        state=choose("STATE_DIRECTORY", "XDG_STATE_HOME", ".local/state", "/var/lib"),
    )


def private_dir(path: Path) -> Path:
    """Make ``path`` a folder that only this user can enter (0700) and return it.

    Raises NotPermitted when it exists as a link, belongs to somebody else, or is open to others and can't be closed:
    sockets and locks in it would not be ours alone. The folder above must be safe too: who may rename this one could
    put another in its place.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        above = path.parent.stat()
        if above.st_uid not in (0, os.geteuid()) or (above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX):
            raise NotPermitted("the folder above is not safe", where=str(path.parent),
                               why="it belongs to another user, or everybody may write there",
                               fix=f"remove it, or set XDG_RUNTIME_DIR to a folder of your own (ls -ld {path.parent})")
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise NotPermitted("the folder is not ours alone", where=str(path), why="it is a link or another user's",
                               fix=f"remove it, or set XDG_RUNTIME_DIR to a folder of your own (ls -ld {path})")
        if info.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as exc:
        raise NotPermitted("can't make a private folder", where=str(path), why=exc.strerror or str(exc),
                           fix="set XDG_RUNTIME_DIR (sockets) or LLAMAOPS_CACHE to a folder you can write") from exc
    return path
