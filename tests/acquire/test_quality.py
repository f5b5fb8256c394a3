"""Judging models: a stand-in llama-perplexity that loses its figures, hangs or fails on request."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from running import await_true

from llamaops.acquire.quality import ATTEMPTS, judge
from llamaops.child import CancelledError
from llamaops.core.model import Model
from llamaops.core.progress import NoProgress
from llamaops.errors import ModelUnavailable

TOOL = """#!{python}
import pathlib, sys, time
here = pathlib.Path(__file__).parent
calls = here / "calls"
calls.write_text((calls.read_text() if calls.exists() else "") + " ".join(sys.argv[1:]) + "\\n")
logits = pathlib.Path(sys.argv[sys.argv.index("--kl-divergence-base") + 1])
while (here / "hang").exists():
    time.sleep(0.02)
if (here / "fail").exists():
    print("llama_model_load: error loading model: unknown model architecture: 'x'", flush=True)
    sys.exit(1)
lost = here / "lost"
if lost.exists() and int(lost.read_text()):
    lost.write_text(str(int(lost.read_text()) - 1))
    sys.exit(0)
if "--kl-divergence" in sys.argv:
    assert logits.read_bytes() == b"of the base"
    print("Mean PPL(Q) : 20.0 ± 1.0\\nMean KLD: 0.5 ± 0.1\\nSame top p: 62.0 ± 1.0 %")
else:
    logits.write_bytes(b"of the base")
    print("Final estimate: PPL = 10.0 +/- 1.0")
"""
MODELS = [Model("/m/small.gguf", 50, "llama", vocab=7), Model("/m/base.gguf", 100, "llama", vocab=7)]


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "llama-perplexity"
    path.parent.mkdir()
    path.write_text(TOOL.format(python=sys.executable))
    path.chmod(0o755)
    return path


def calls(tool: Path) -> list[str]:
    return (tool.parent / "calls").read_text().splitlines()


def test_the_base_is_asked_first_and_nothing_is_left(tool: Path, tmp_path: Path) -> None:
    small, base = judge(tool, MODELS, 1, tmp_path / "tmp", NoProgress(), threads=2)
    assert (base.perplexity, base.divergence, small.perplexity, small.divergence) == (10.0, 0.0, 20.0, 0.5)
    assert ["/m/base.gguf" in call for call in calls(tool)] == [True, False]
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("times", [1, ATTEMPTS - 1])
def test_figures_that_were_lost_are_asked_again(tool: Path, tmp_path: Path, times: int) -> None:
    (tool.parent / "lost").write_text(str(times))
    assert judge(tool, MODELS, 1, tmp_path, NoProgress(), threads=2)[0].divergence == 0.5
    assert len(calls(tool)) == times + 2


def test_a_tool_that_never_tells_is_given_up(tool: Path, tmp_path: Path) -> None:
    (tool.parent / "lost").write_text("99")
    with pytest.raises(ModelUnavailable, match="can't be judged"):
        judge(tool, MODELS, 1, tmp_path, NoProgress(), threads=2)
    assert len(calls(tool)) == ATTEMPTS


def test_a_failure_is_told_once_with_its_reason(tool: Path, tmp_path: Path) -> None:
    (tool.parent / "fail").touch()
    with pytest.raises(ModelUnavailable, match="unknown model architecture") as told:
        judge(tool, MODELS, 1, tmp_path / "tmp", NoProgress(), threads=2)
    assert told.value.where == "/m/base.gguf"
    assert len(calls(tool)) == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_no_room_is_told_before_the_tool_starts(tool: Path, tmp_path: Path) -> None:
    huge = [Model(f"/m/{name}.gguf", 50, "llama", vocab=1 << 50) for name in "ab"]
    with pytest.raises(ModelUnavailable, match="probabilities of the base"):
        judge(tool, huge, 0, tmp_path, NoProgress(), threads=2)
    assert not (tool.parent / "calls").exists()


def test_cancelling_ends_the_tool(tool: Path, tmp_path: Path) -> None:
    (tool.parent / "hang").touch()
    cancel = threading.Event()
    ended: list[BaseException] = []

    def work() -> None:
        try:
            judge(tool, MODELS, 1, tmp_path / "tmp", NoProgress(), threads=2, cancel=cancel)
        except BaseException as exc:
            ended.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    await_true(lambda: (tool.parent / "calls").exists(), what="the tool runs")
    cancel.set()
    thread.join()
    assert isinstance(ended[0], CancelledError)
    assert list((tmp_path / "tmp").iterdir()) == []
