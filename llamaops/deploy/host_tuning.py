"""Changes a machine's settings and takes them back: the only place that writes to a host, and all of it is journalled.

Each original goes to the journal, down to the disk, before its file is written. So whatever happens half-way, a crash
or a power cut included, `revert` finds what was there. What lives in sysfs and procfs ends with the boot it was written
in; a journal of an earlier boot knows that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llamaops.core.cpuset import CpuSet
from llamaops.core.tuning import (
    ALLOWED,
    CPU,
    HUGE_PAGES,
    IRQBALANCE_FILES,
    SWAPPINESS,
    Change,
    Frequency,
    Settings,
)
from llamaops.errors import LockHeld, NotPermitted, WrongProfile
from llamaops.files import write_whole

JOURNAL = "var/lib/llamaops-host/tuning.json"
"""One for the machine, wherever root's HOME points under sudo."""

State = Literal["in force", "as it was", "changed since", "ended with the boot", "unreadable"]
Write = Callable[[Path, str], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """One change in the journal; ``before`` is the original. ``boot`` is the boot that ends it, None: it lasts."""

    path: str
    before: str
    after: str
    reason: str
    boot: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one change: ``done``, or why not."""

    path: str
    done: bool
    text: str


def read_settings(root: Path = Path("/")) -> Settings:
    """Read what tuning looks at; what is missing or garbled is left out."""
    file = next((name for name in IRQBALANCE_FILES if (root / name).is_file()), None)
    swappiness = _value(root, SWAPPINESS)
    return Settings(
        frequencies=dict(_frequencies(root)),
        huge_pages=_value(root, HUGE_PAGES),
        swappiness=int(swappiness) if swappiness and swappiness.isdigit() else None,
        swap=tuple(line.split()[0] for line in (_text(root / "proc/swaps") or "").splitlines()[1:] if line.split()),
        interrupts=dict(_interrupts(root)),
        irqbalance=any((_text(comm) or "").strip() == "irqbalance" for comm in root.glob("proc/[0-9]*/comm")),
        irqbalance_file=(file, _text(root / file) or "") if file else None,
    )


def _frequencies(root: Path) -> Iterator[tuple[int, Frequency]]:
    for folder in root.glob(f"{CPU}/cpu[0-9]*/cpufreq"):
        if governor := (_text(folder / "scaling_governor") or "").strip():
            available = frozenset((_text(folder / "scaling_available_governors") or "").split())
            preference = (_text(folder / "energy_performance_preference") or "").strip() or None
            yield int(folder.parent.name[3:]), Frequency(governor, available, preference)


def _interrupts(root: Path) -> Iterator[tuple[int, CpuSet]]:
    """Yield the interrupts in use: /proc/interrupts lists those with a handler, /proc/irq has many without."""
    for line in (_text(root / "proc/interrupts") or "").splitlines()[1:]:
        number = line.partition(":")[0].strip()
        listed = _value(root, f"proc/irq/{number}/smp_affinity_list") if number.isdigit() else None
        with contextlib.suppress(ValueError):
            if listed:
                yield int(number), CpuSet.parse(listed)


def status(root: Path = Path("/")) -> list[tuple[Entry, State, str | None]]:
    """Return each journalled change with what became of it and the value that is there now."""
    return [(entry, *_state(root, entry)) for entry in _Journal(root).entries]


def _state(root: Path, entry: Entry) -> tuple[State, str | None]:
    now = _value(root, entry.path)
    if entry.boot not in (None, _boot(root)):
        return "ended with the boot", now
    if now is None:
        return "unreadable", now
    return ("in force" if now == entry.after else "as it was" if now == entry.before else "changed since"), now


def apply(changes: list[Change], root: Path = Path("/"), *, write: Write | None = None,
          restart: Callable[[], str | None] | None = None) -> list[Outcome]:
    """Carry the changes out, each one's original journalled first; a second time keeps the first originals.

    A value that the kernel refuses (interrupts it manages itself, a read-only /sys) is told and leaves no entry. Raises
    NotPermitted when the journal can't be written, LockHeld when another one is at it.
    """
    with _locked(root) as journal:
        outcomes = [_carry_out(root, journal, change, write or write_value) for change in changes]
        return outcomes + _restarted(journal, restart or restart_irqbalance)


def _carry_out(root: Path, journal: _Journal, change: Change, write: Write) -> Outcome:
    if not ALLOWED.fullmatch(change.path):
        raise WrongProfile("that file is none of tuning's", where=change.path)
    known, now = journal.find(change.path), _value(root, change.path)
    if now is None:
        return Outcome(change.path, False, "gone, left alone")
    ours = known is not None and known.boot in (None, _boot(root)) and now in (known.before, known.after)
    entry = Entry(change.path, known.before if known and ours else now, change.after, change.reason,
                  None if _lasts(change.path) else _boot(root))
    journal.put(entry, restart=change.path in IRQBALANCE_FILES)
    try:
        write(root / change.path, change.after)
    except OSError as exc:
        journal.put(known, restart=journal.restart) if known and ours else journal.drop(change.path)
        return Outcome(change.path, False, f"refused: {exc.strerror or exc}")
    settled = _value(root, change.path)
    if settled is not None and settled != change.after:
        journal.put(replace(entry, after=settled), restart=journal.restart)
    return Outcome(change.path, True, shown(settled, change.path))


def revert(root: Path = Path("/"), *, write: Write | None = None,
           restart: Callable[[], str | None] | None = None) -> list[Outcome]:
    """Put back every original; what somebody else changed since is theirs, told and left as it is.

    In the order of `apply`: an energy preference can be set again only once the governor is. An entry leaves the
    journal when its value is dealt with; one that was refused stays for the next try.
    """
    with _locked(root) as journal:
        outcomes = [_put_back(root, journal, entry, write or write_value) for entry in list(journal.entries)]
        return outcomes + _restarted(journal, restart or restart_irqbalance)


def _put_back(root: Path, journal: _Journal, entry: Entry, write: Write) -> Outcome:
    state, now = _state(root, entry)
    if not ALLOWED.fullmatch(entry.path):
        return Outcome(entry.path, False, "the journal names a file that is none of tuning's; left alone")
    if state == "in force" and entry.before != entry.after:
        try:
            if entry.path in IRQBALANCE_FILES:
                journal.put(entry, restart=True)
            write(root / entry.path, entry.before)
        except OSError as exc:
            return Outcome(entry.path, False, f"refused: {exc.strerror or exc}; it stays in the journal")
        text, done = f"back to {shown(entry.before, entry.path)}", True
    else:
        text, done = {
            "changed since": (f"somebody changed it since to {shown(now, entry.path)}; left as it is", False),
            "ended with the boot": ("ended when the machine was started again", True),
            "unreadable": ("gone, nothing to put back", True),
        }.get(state, ("as it was already", True))
    journal.drop(entry.path)
    return Outcome(entry.path, done, text)


def shown(value: str | None, path: str) -> str:
    """Return a value for people: of a whole file, the line that matters."""
    if value is None or path not in IRQBALANCE_FILES:
        return value or "nothing"
    lines = [line for line in value.splitlines() if line.startswith("IRQBALANCE_BANNED_CPULIST=")]
    return lines[-1] if lines else "no IRQBALANCE_BANNED_CPULIST"


def restart_irqbalance() -> str | None:
    """Make the daemon read its environment file; return what hinders, None when it is done or does not run."""
    by_hand = "restart irqbalance, which reads its file only when it starts"
    if not Path("/run/systemd/system").is_dir() or shutil.which("systemctl") is None:
        return by_hand
    try:
        done = subprocess.run(["systemctl", "try-restart", "irqbalance"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"{by_hand} ({exc})"
    return f"{by_hand} ({done.stderr.strip()})" if done.returncode else None


def _restarted(journal: _Journal, restart: Callable[[], str | None]) -> list[Outcome]:
    """Restart irqbalance where its file was written, now or before a crash came between."""
    if not journal.restart:
        return []
    hindrance = restart()
    if hindrance is None:
        journal.restarted()
    return [Outcome("irqbalance", hindrance is None, hindrance or "restarted")]


def write_value(path: Path, value: str) -> None:
    """Write one setting: a kernel file at one go, a configuration file whole or not at all."""
    if any(path.match(f"/{name}") or str(path).endswith(f"/{name}") for name in IRQBALANCE_FILES):
        real = path.resolve()
        write_whole(real, value, replace=True, mode=real.stat().st_mode & 0o7777)
        return
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, value.encode())
        if path.is_file() and os.fstat(fd).st_size > len(value):
            os.ftruncate(fd, len(value))  # a recorded machine's file; the kernel's own have no size to shrink
    finally:
        os.close(fd)


def _lasts(path: str) -> bool:
    return path.startswith("etc/")


def _value(root: Path, path: str) -> str | None:
    """Return a setting as it would be written: the chosen word of a ``[bracketed]`` list, a file of /etc as it is."""
    text = _text(root / path)
    if text is None or _lasts(path):
        return text
    chosen = re.search(r"\[(\S+)\]", text)
    return chosen[1] if chosen else text.strip()


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return None


def _boot(root: Path) -> str:
    return (_text(root / "proc/sys/kernel/random/boot_id") or "").strip()


class _Journal:
    """The originals on disk: readers see the journal before or after a change, never a part."""

    def __init__(self, root: Path) -> None:
        self._path = root / JOURNAL
        text = _text(self._path)
        try:
            data: dict[str, Any] = json.loads(text) if text else {}
            self.entries = [Entry(**entry) for entry in data.get("entries", [])]
            self.restart = bool(data.get("restart"))
        except (ValueError, TypeError, AttributeError) as exc:
            raise WrongProfile("the journal of host tune can't be read", where=str(self._path), why=str(exc),
                               fix="look at it: it holds the original values; then move it away") from exc

    def find(self, path: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.path == path), None)

    def put(self, entry: Entry, *, restart: bool) -> None:
        self.restart = self.restart or restart
        if self.find(entry.path) == entry and not restart:
            return
        places = [old.path for old in self.entries]
        if entry.path in places:
            self.entries[places.index(entry.path)] = entry
        else:
            self.entries.append(entry)
        self._save()

    def drop(self, path: str) -> None:
        self.entries = [entry for entry in self.entries if entry.path != path]
        self._save()

    def restarted(self) -> None:
        self.restart = False
        self._save()

    def _save(self) -> None:
        text = json.dumps({"version": 1, "restart": self.restart, "entries": [asdict(e) for e in self.entries]},
                          indent=1)
        write_whole(self._path, text + "\n", replace=True)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the rename too must be on the disk before a setting is touched
        finally:
            os.close(folder)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[_Journal]:
    folder = (root / JOURNAL).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise NotPermitted("can't keep the journal, so nothing was changed", where=str(folder), why=exc.strerror,
                           fix="call it with sudo") from exc
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeld("another llamaops host tune is at it", where=str(folder), fix="wait for it") from None
        yield _Journal(root)
    finally:
        os.close(fd)
