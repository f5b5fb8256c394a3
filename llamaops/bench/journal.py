"""What a tuning run has measured so far, on disk, so that an interrupted one goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_VERSION = 2


class Journal:
    """Measurements by key, one JSON line each, appended and synced as they are made.

    ``question`` is everything the answers depend on; a file that answers another question is begun anew.
    """

    def __init__(self, path: Path, question: Mapping[str, Any], *, fresh: bool = False) -> None:
        self._path = path
        head = {"journal": _VERSION, "question": _digest(question)}
        self._rows = {} if fresh else _read(path, head)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [head, *({"key": k, "value": v} for k, v in self._rows.items())]
        draft = path.with_suffix(".new")
        draft.write_text("".join(json.dumps(line) + "\n" for line in lines))
        draft.replace(path)

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: str) -> dict[str, Any] | None:
        """Return what was measured under ``key``, None where nothing was."""
        return self._rows.get(key)

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Remember a measurement; it is on disk when this returns."""
        self._rows[key] = value
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _digest(question: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()


def _read(path: Path, head: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the measurements of a journal with this head; a half-written last line is left out."""
    try:
        first, *rest = path.read_text().splitlines()
        if json.loads(first) != head:
            return {}
    except (OSError, ValueError):
        return {}
    rows = {}
    for line in rest:
        try:
            row = json.loads(line)
            rows[row["key"]] = row["value"]
        except (ValueError, KeyError, TypeError):
            break
    return rows
