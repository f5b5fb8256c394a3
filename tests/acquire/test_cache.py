"""Looking at folders that others change meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamaops.cache import files_below


def test_a_folder_that_vanishes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gone/a", "kept/b", "c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    scandir = os.scandir

    def vanishing(path: str) -> object:
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert {path.name for path in files_below(tmp_path)} == {"b", "c"}
