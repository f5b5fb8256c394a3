"""One running instance on disk: a private folder with its lock, its sockets and who holds it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llamaops.dirs import private_dir
from llamaops.errors import LockHeld
from llamaops.serve.procfs import end_strays, read_stat

_LOCK_PATIENCE_S = 0.3
MAX_SOCKET_PATH = 107
"""Bytes of a UNIX socket's path: sun_path holds 108 with its end (unix(7))."""


@dataclass(frozen=True, slots=True)
class Instance:
    """The folder of one instance. ``sockets`` is where its sockets are: the same folder, or a shorter one."""

    name: str
    folder: Path
    sockets: Path
    log_path: Path | None = None

    @property
    def control_socket(self) -> Path:
        """Where the running instance answers commands."""
        return self.sockets / "control.sock"

    @property
    def mark(self) -> str:
        """What its engines carry in their environment, alike from run to run.

        The inode tells apart folders of one path in different mount namespaces (``PrivateTmp=``, containers).
        """
        info = self.folder.stat()
        return f"{self.folder}@{info.st_dev}:{info.st_ino}"

    def is_there(self) -> bool:
        """Tell whether the folder and the lock in it are still there, while this instance runs."""
        return (self.folder / "lock").exists()

    def engine_socket(self, generation: int) -> Path:
        """Where the engine of this generation listens."""
        return self.sockets / f"engine-{generation}.sock"


@dataclass(frozen=True, slots=True)
class Known:
    """An instance found on disk; ``pid`` is None when it is not running."""

    name: str
    pid: int | None
    control_socket: Path


def locate(runtime: Path, name: str) -> Instance:
    """Return where the instance of that name keeps its things; touches nothing."""
    folder = runtime / name
    longest = folder / "engine-4294967295.sock"
    if len(os.fsencode(longest)) <= MAX_SOCKET_PATH:
        return Instance(name, folder, folder)
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    return Instance(name, folder, Path("/tmp") / f"llamaops-{os.geteuid()}-{digest}")  # noqa: S108 - made by private_dir


@contextmanager
def hold(runtime: Path, name: str, log_path: Path | None = None) -> Iterator[Instance]:
    """Be the only running instance of that name, for the length of a ``with`` block.

    Makes the private folders, ends engines that an instance before left behind, and removes its stale files. Leaves
    nothing. Raises LockHeld, naming the pid, when the name is taken.
    """
    found = locate(runtime, name)
    instance = Instance(name, found.folder, found.sockets, log_path)
    private_dir(runtime)
    lock = _lock(instance)
    try:
        private_dir(instance.sockets)
        end_strays(instance.mark)
        _remove_sockets(instance)
        _write_holder(instance)
        yield instance
    finally:
        _remove_sockets(instance)
        for file in ("pid", "lock"):
            (instance.folder / file).unlink(missing_ok=True)
        for folder in {instance.sockets, instance.folder}:
            with contextlib.suppress(OSError):
                folder.rmdir()
        os.close(lock)


def await_gone(runtime: Path, name: str) -> None:
    """Return when no instance of that name runs (any more)."""
    try:
        lock = os.open(runtime / name / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def list_instances(runtime: Path) -> list[Known]:
    """Return the instances that have a folder in ``runtime``, by name, running or not."""
    try:
        folders = sorted(p for p in runtime.iterdir() if (p / "lock").exists())
    except OSError:
        return []
    return [Known(p.name, holder(p), locate(runtime, p.name).control_socket) for p in folders]


def holder(folder: Path) -> int | None:
    """Return the pid of the instance that runs in ``folder``; a pid that is another process by now does not count."""
    try:
        noted = json.loads((folder / "pid").read_text())
        pid, started = int(noted["pid"]), int(noted["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    stat = read_stat(pid)
    return pid if stat is not None and stat.started == started and stat.state not in "ZX" else None


def _lock(instance: Instance) -> int:
    """Take the lock and return its descriptor; tries for a moment, for `await_gone` may hold it just then."""
    until = time.monotonic() + _LOCK_PATIENCE_S
    while (lock := _try_lock(instance)) is None:
        if time.monotonic() > until:
            raise _taken(instance)
        time.sleep(0.02)
    return lock


def check_free(runtime: Path, name: str) -> None:
    """Raise LockHeld, naming the pid, when an instance of that name runs."""
    found = locate(runtime, name)
    if holder(found.folder) is not None:
        raise _taken(found)


def _taken(instance: Instance) -> LockHeld:
    pid = holder(instance.folder)
    return LockHeld(f"{instance.name} is running already", where=f"pid {pid}" if pid else str(instance.folder),
                    fix=f"llamaops stop {instance.name}, or give this one another name: --set name=…")


def _try_lock(instance: Instance) -> int | None:
    private_dir(instance.folder)
    path = instance.folder / "lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:  # an instance that just ended removed the folder
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # An instance that just ended may have removed the file between our opening and locking it.
        if os.path.samestat(path.stat(), os.fstat(lock)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _write_holder(instance: Instance) -> None:
    pid = os.getpid()
    stat = read_stat(pid)
    document = json.dumps({"pid": pid, "started": stat.started if stat else 0})
    written = instance.folder / "pid.new"
    written.write_text(document + "\n")
    written.chmod(0o600)
    written.replace(instance.folder / "pid")


def _remove_sockets(instance: Instance) -> None:
    for path in (instance.control_socket, *instance.sockets.glob("engine-*.sock"), *instance.folder.glob("pid.*")):
        path.unlink(missing_ok=True)
