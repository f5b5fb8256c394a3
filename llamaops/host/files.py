"""Reading the small files in which the kernel describes a machine, below any root folder."""

from __future__ import annotations

from pathlib import Path

from llamaops.core.cpuset import CpuSet

MAX_BYTES = 1 << 20
"""Enough for all but the tail of the largest machines' cpuinfo; a sysctl refuses to be read into 4 MiB at once."""


class Root:
    """A machine's files: ``/`` or a folder with the same relative paths.

    Nothing here raises for what it reads: a file that is missing, unreadable or not what was expected is ``None``.
    """

    def __init__(self, path: Path | str = "/") -> None:
        self.path = Path(path)

    @property
    def live(self) -> bool:
        """Tell whether this is the machine we run on."""
        return self.path == Path("/")

    def text(self, rel: str) -> str | None:
        """Return a file's text without surrounding blanks."""
        try:
            with self._at(rel).open("rb") as file:
                return file.read(MAX_BYTES).decode(errors="replace").strip("\0 \t\r\n")
        except (OSError, ValueError):
            return None

    def number(self, rel: str) -> int | None:
        """Return a file's single decimal number."""
        return to_int(self.text(rel))

    def cpus(self, rel: str) -> CpuSet | None:
        """Return a file's CPU list; an empty list is the empty set."""
        return to_cpus(self.text(rel))

    def names(self, rel: str) -> list[str]:
        """Return the names in a folder, sorted; none when there is no such folder."""
        try:
            return sorted(entry.name for entry in self._at(rel).iterdir())
        except (OSError, ValueError):
            return []

    def is_dir(self, rel: str) -> bool:
        """Tell whether the folder exists."""
        try:
            return self._at(rel).is_dir()
        except (OSError, ValueError):
            return False

    def has(self, rel: str) -> bool:
        """Tell whether the file exists."""
        try:
            return self._at(rel).exists()
        except (OSError, ValueError):
            return False

    def _at(self, rel: str) -> Path:
        return self.path / rel.lstrip("/")


def to_int(text: str | None) -> int | None:
    """Read a decimal number, None for anything else."""
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def to_cpus(text: str | None) -> CpuSet | None:
    """Read a kernel CPU list, None for anything else (``(null)`` is how an empty ``isolated`` list prints)."""
    if text is None or text == "(null)":
        return None
    try:
        return CpuSet.parse(text)
    except ValueError:
        return None


def fields(text: str | None, separator: str = ":") -> dict[str, str]:
    """Read ``key: value`` lines (``/proc/meminfo``, ``/proc/self/status``); of repeated keys the first counts."""
    out: dict[str, str] = {}
    for line in (text or "").splitlines():
        key, found, value = line.partition(separator)
        if found:
            out.setdefault(key.strip(), value.strip())
    return out


def flat(text: str | None) -> dict[str, int]:
    """Read ``key value`` lines of numbers (``memory.stat``)."""
    pairs = (line.split() for line in (text or "").splitlines())
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isdigit()}


def kib(text: str | None) -> int | None:
    """Read ``24684092 kB`` as bytes."""
    words = (text or "").split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else None
