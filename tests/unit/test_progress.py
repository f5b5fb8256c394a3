"""How progress is told where there is no terminal."""

from __future__ import annotations

import pytest

from llamaops.cli import console
from llamaops.cli.console import LineProgress, how_far
from llamaops.core.progress import Unit


@pytest.mark.parametrize(
    ("done", "total", "unit", "moved", "seconds", "text"),
    [
        (50, 200, "steps", 50, 10.0, "25 %, 0 min 30 s left"),
        (60_000_000, 100_000_000, "bytes", 20_000_000, 8.0, "60 %, 2.5 MB/s, 0 min 16 s left"),
        (50, 100, "bytes", 0, 10.0, "50 %"),
        (90, 9000, "steps", 1, 10.0, "1 %, 1485 min 00 s left"),
    ],
)
def test_share_rate_and_time_left(done: int, total: int, unit: Unit, moved: int, seconds: float, text: str) -> None:
    assert how_far(done, total, unit, moved, seconds) == text


def test_what_an_earlier_run_brought_does_not_count_for_the_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 0.0, 20.0, 20.0, 20.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with LineProgress().bar("download x", "bytes") as bar:
        bar.update(500_000_000, 1_000_000_000)
        bar.update(520_000_000, 1_000_000_000)
    assert "download x: 52 %, 1.0 MB/s, 8 min 00 s left" in capsys.readouterr().err
