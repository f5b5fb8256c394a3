"""Units put in place, listed in a journal, compared with what would be made now, and taken away again."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llamaops.errors import NotPermitted, NotRunning, UsageError, WrongProfile
from llamaops.files import write_whole

SYSTEM_UNITS = Path("/etc/systemd/system")
SYSTEM_JOURNAL = Path("/var/lib/llamaops-deploy")
"""Not the service's own StateDirectory=, which systemd gives to a dynamic user."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where units and the journal lie, for the system's manager or a user's own; ``running``: it can be told."""

    units: Path
    journal: Path
    user: bool
    running: bool

    def manager(self, tool: str) -> list[str]:
        """Return the start of a command line of ``systemctl`` or ``systemd-analyze`` for this manager."""
        return [tool, *(["--user"] if self.user else [])]


def find_place(environ: Mapping[str, str], *, user: bool) -> Place:
    """Return the place of this machine's units. Raises NotPermitted for a system's when this is not root."""
    if not user:
        if os.geteuid() != 0:
            raise NotPermitted("only root installs system units", where=str(SYSTEM_UNITS),
                               fix="call it with sudo, or install for yourself: --user")
        return Place(SYSTEM_UNITS, SYSTEM_JOURNAL, False, Path("/run/systemd/system").is_dir())
    home = Path(environ.get("HOME") or Path.home())
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    state = Path(environ.get("XDG_STATE_HOME") or home / ".local/state")
    runtime = environ.get("XDG_RUNTIME_DIR")
    running = bool(runtime) and Path(runtime or "", "systemd/private").exists()
    return Place(config / "systemd/user", state / "llamaops/deploy", True, running)


@dataclass(frozen=True, slots=True)
class Entry:
    """What one installation put in place: unit name → SHA-256 of its text."""

    units: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Entry | None:
        """Read a journal entry, None when there is none."""
        try:
            return cls(json.loads(path.read_text(encoding="utf-8"))["units"])
        except FileNotFoundError:
            return None


def install(place: Place, name: str, units: Mapping[str, str], *, start: bool) -> list[str]:
    """Verify units, put them in place, load and enable them, and return what was done.

    ``units`` is file name → text. The journal is written first, so that an interrupted installation can be undone.
    Raises WrongProfile when systemd finds fault with a unit, UsageError when one of that name is there that is not ours
    or was changed by hand; nothing is written then.
    """
    done = [verify(place, units)]
    journal = place.journal / f"{name}.json"
    before = Entry.read(journal)
    for unit in units:
        _refuse_foreign(place.units / unit, before)
    place.units.mkdir(parents=True, exist_ok=True)
    place.journal.mkdir(parents=True, exist_ok=True)
    left = {unit: digest for unit, digest in (before.units if before else {}).items() if unit not in units}
    entry = Entry({**left, **{unit: _digest(text) for unit, text in units.items()}})
    write_whole(journal, json.dumps(asdict(entry), indent=1) + "\n", replace=True)
    for unit, text in units.items():
        write_whole(place.units / unit, text, replace=True)
        done.append(f"wrote {place.units / unit}")
    return done + _load(place, list(units), start=start)


def _refuse_foreign(path: Path, entry: Entry | None) -> None:
    """Refuse to replace what somebody else wrote; what an interrupted installation left unwritten may be missing."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    if entry is None or path.name not in entry.units:
        raise UsageError("a unit of that name is there and was not installed by llamaops", where=str(path),
                         fix="remove it, or give the profile another name")
    if _digest(text) != entry.units[path.name]:
        raise UsageError("the unit was changed by hand", where=str(path),
                         fix=f"keep the change in a drop-in (systemctl edit {path.name}) and remove the unit, "
                             "then install again")


def verify(place: Place, units: Mapping[str, str]) -> str:
    """Let the installed systemd read the units; raises WrongProfile with what it says when it finds fault."""
    if not shutil.which("systemd-analyze"):
        return "not verified: systemd-analyze is not installed"
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, unit) for unit in units]
        for path in paths:
            path.write_text(units[path.name], encoding="utf-8")
        answer = subprocess.run([*place.manager("systemd-analyze"), "verify", *paths], capture_output=True, text=True,
                                env={**os.environ, "XDG_RUNTIME_DIR": folder, "LC_ALL": "C.UTF-8"}, timeout=60,
                                check=False)
        said = answer.stderr.replace(f"{folder}/", "")
    if answer.returncode or any(unit in said for unit in units):
        raise WrongProfile("systemd finds fault with the unit", where=", ".join(units), detail=said,
                           fix="what it says is below; nothing was installed")
    return "verified by systemd-analyze"


def _load(place: Place, units: Sequence[str], *, start: bool) -> list[str]:
    systemctl = place.manager("systemctl")
    if not place.running:
        after = f"{' '.join(systemctl)} enable --now {' '.join(units)}"
        return [f"systemd does not run here, so nothing was loaded or enabled; once it does: {after}"]
    _call([*systemctl, "daemon-reload"])
    _call([*systemctl, "enable", *units])
    if start:
        # The socket first: the service could not get a port that it already holds itself.
        _call([*systemctl, "restart", *sorted(units, key=lambda unit: unit.endswith(".service"))])
    said = ["loaded, enabled and started" if start else
            f"loaded and enabled; start it: {' '.join(systemctl)} start {units[0]}"]
    if place.user:
        said.append("it ends when you log out, unless: loginctl enable-linger")
    return said


def uninstall(place: Place, name: str) -> list[str]:
    """Stop, disable and remove exactly what was installed under that name, and return what was done.

    Raises NotRunning when nothing was, UsageError when a unit was changed by hand.
    """
    journal = place.journal / f"{name}.json"
    entry = _entry(journal, name)
    paths = [place.units / unit for unit in entry.units]
    for path in paths:
        _refuse_foreign(path, entry)
    here = [path for path in paths if path.exists()]
    done = []
    if place.running and here:
        # The socket first, else a client would start the service again.
        names = sorted((path.name for path in here), key=lambda unit: unit.endswith(".service"))
        _call([*place.manager("systemctl"), "disable", "--now", *names])
        done.append(f"stopped and disabled {' '.join(names)}")
    for path in here:
        path.unlink()
        done.append(f"removed {path}")
    journal.unlink()
    if place.running:
        _call([*place.manager("systemctl"), "daemon-reload"])
    return done


def _entry(journal: Path, name: str) -> Entry:
    entry = Entry.read(journal)
    if entry is None:
        raise NotRunning(f"no unit was installed for {name}", where=str(journal),
                         fix="llamaops deploy systemd install PROFILE (or host-tune install)")
    return entry


def folder_differences(folder: Path, files: Mapping[str, str]) -> str:
    """Return how the files in ``folder`` differ from ``files`` (relative name → text), as a unified diff.

    Files of other names are not looked at: they are somebody's own. Raises NotRunning when none of them is there.
    """
    paths = [folder / name for name in files]
    if not any(path.exists() for path in paths):
        raise NotRunning("none of these files is there", where=str(folder), fix="make them: without --check")
    return "".join(line for path, text in zip(paths, files.values(), strict=True) for line in _diff(path, text))


def _diff(path: Path, new: str) -> Iterable[str]:
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    return difflib.unified_diff(old.splitlines(True), new.splitlines(True), str(path),
                                f"{path.name} as it would be made now")


def differences(place: Place, name: str, units: Mapping[str, str]) -> str:
    """Return how the installed units differ from ``units``, as a unified diff; empty when they do not.

    Drop-ins of an administrator are named, as they change what the unit means. Raises NotRunning when nothing is
    installed.
    """
    entry = _entry(place.journal / f"{name}.json", name)
    parts: list[str] = []
    for unit in sorted({*entry.units, *(unit for unit in units if unit.endswith(".service"))}):
        path = place.units / unit
        parts += _diff(path, units.get(unit, ""))
        parts += [f"# also in force: {dropin}\n" for dropin in sorted(path.with_name(f"{unit}.d").glob("*.conf"))]
    return "".join(parts)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _call(argv: Sequence[str]) -> None:
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    if answer.returncode:
        raise NotPermitted("systemd refused", where=" ".join(argv), why=answer.stderr.strip() or None,
                           fix="systemctl status and journalctl -xe tell more")
