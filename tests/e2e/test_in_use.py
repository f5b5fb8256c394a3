"""What a running instance serves stays on the disk."""

from __future__ import annotations

import json
from pathlib import Path

from running import Up


def test_neither_model_nor_engine_of_a_running_instance_is_removed(up: Up, model_path: str, engine_path: str) -> None:
    running = up()
    for what, path in (("model", model_path), ("engine", engine_path)):
        done = running.cli(what, "rm", path)
        assert done.returncode == 75, done.stderr
        assert "is in use" in done.stderr
        assert Path(path).exists()
    listed = json.loads(running.cli("model", "list", "--json").stdout)
    (item,) = [item for item in listed if item["path"] == model_path]
    assert item["used"] > Path(model_path).stat().st_mtime, "the start was noted as a use"
    pruned = running.cli("model", "prune", "--max-size", "0", "--dry-run")
    assert pruned.returncode == 0, pruned.stderr
    assert item["name"] not in pruned.stdout
