"""At least 200 random faults against the real engine under load, and proof that such a run finds what is broken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from chaos.run import run
from chaos.world import Broken, World

SEED = 20261201
FAULTS = 200


@pytest.mark.timeout(3600)
def test_nothing_is_lost_or_left(tmp_path: Path, engine_path: str, model_path: str,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    report = run(World(tmp_path, engine_path, model_path), SEED, lambda report: report.faults >= FAULTS)
    with capsys.disabled():
        sys.stdout.write(f"\n{report.table()}\n")
    assert report.outcomes["answered"] > FAULTS
    assert report.outcomes["told"] > 0  # else nobody was asking while the faults happened


PLANTED = {
    "a request that is never told": (
        "from llamaops.core.completions import StreamReader\n"
        "StreamReader.failure = lambda self, *words: b''\n",
        "a stream that just ends"),
    "a descriptor for each engine": (
        "import os, llamaops.serve.supervisor as s\n"
        "spawn = s.spawn\n"
        "s.spawn = lambda *a, **k: (os.open('/dev/null', 0), spawn(*a, **k))[1]\n",
        "no descriptor is left"),
    "a socket for each engine": (
        "import llamaops.serve.supervisor as s\n"
        "s.Supervisor._remove_socket = staticmethod(lambda spec: None)\n",
        "no file is left"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_mistake_is_found(tmp_path: Path, engine_path: str, model_path: str, what: str,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    mistake, complaint = PLANTED[what]
    monkeypatch.setattr("chaos.run.LEAK_S", 10)
    program = f"{mistake}\nfrom llamaops.cli import main\nimport sys\nsys.exit(main())"
    world = World(tmp_path, engine_path, model_path, [sys.executable, "-c", program])
    with pytest.raises(Broken, match=complaint):
        run(world, SEED, lambda report: report.faults >= 25)
