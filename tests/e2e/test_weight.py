"""In a cgroup that is ours alone, the planned CPU weight is written while serving and put back after."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import LLAMAOPS, QUICKSTART, await_true

BASE = Path("/sys/fs/cgroup")
GROUPS = BASE if (BASE / "cgroup.controllers").exists() else BASE / "cpu"


@pytest.fixture
def group() -> Iterator[Path]:
    folder = GROUPS / f"llamaops-weight-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "cgroup.procs").read_text()
    except OSError as exc:
        pytest.skip(f"no cgroup can be made here: {exc}")
    if not any((folder / name).exists() for name in ("cpu.weight", "cpu.shares")):
        folder.rmdir()
        pytest.skip("the cpu controller is not delegated here")
    yield folder
    await_true(lambda: not (folder / "cgroup.procs").read_text().strip(), what="the cgroup is empty")
    folder.rmdir()


def test_the_weight_is_lifted_and_put_back(group: Path, env: dict[str, str], model_path: str) -> None:
    file = next(group / name for name in ("cpu.weight", "cpu.shares") if (group / name).exists())
    before = int(file.read_text())
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    process = subprocess.Popen([*enter, *LLAMAOPS, "up", str(QUICKSTART), "--set", "serve.port=0"], env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline().startswith("http://")
    assert int(file.read_text()) == 100 * before
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert int(file.read_text()) == before
