"""Importance matrices: a stand-in llama-imatrix that hangs or fails on request, and files that are none."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_bytes import LLAMA, gguf
from running import await_true

from llamaops.acquire import imatrix
from llamaops.acquire.gguf_file import read_model
from llamaops.acquire.stock import remove, take_stock, verify
from llamaops.child import CancelledError
from llamaops.core.model import Model
from llamaops.core.progress import Bar, NoProgress, Unit
from llamaops.errors import ModelUnavailable

TOOL = """#!{python}
import os, pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + " niceness " + str(os.nice(0)) + "\\n")
target = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
target.write_bytes(b"half")
print("compute_imatrix: computing over 3 chunks, n_ctx=512, batch_size=512, n_seq=1", flush=True)
for chunk in (0, 1, 1, 2, 3):
    print(f"0.00.608.569 D collect_imatrix[{{chunk}}]: blk.0.attn_q.weight, MUL_MAT, 576 x 512 x 1, 0", flush=True)
while (here / "hang").exists():
    time.sleep(0.02)
if (here / "fail").exists():
    print("compute_imatrix: error: the data file you provided tokenizes to only 7 tokens", flush=True)
    sys.exit(1)
shutil.copy(here / "matrix", target)
"""


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "llama-imatrix"
    path.parent.mkdir()
    path.write_text(TOOL.format(python=sys.executable))
    path.chmod(0o755)
    (path.parent / "matrix").write_bytes(gguf({"general.type": "imatrix"}, [("a.weight.in_sum2", (4, 1), 0)]))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Model:
    path = tmp_path / "Tiny-F16.gguf"
    path.write_bytes(gguf({**LLAMA, "general.file_type": 1}))
    return read_model(path, source=f"path:{path}")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("words")
    return path


class Bars(NoProgress):
    """Progress that keeps what its bars were told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int | None]] = []

    @contextmanager
    def bar(self, label: str, unit: Unit) -> Iterator[Bar]:
        yield self

    def update(self, done: int, total: int | None = None) -> None:
        self.told.append((done, total))


def make(tool: Path, model: Model, text: Path, progress: NoProgress | None = None, version: str = "b7",
         cancel: threading.Event | None = None) -> Path:  # fmt: skip
    return imatrix.compute(tool, model, text, tool.parents[1] / "cache", progress or NoProgress(), threads=2,
                           engine_version=version, cancel=cancel)


def calls(tool: Path) -> list[str]:
    log = tool.parent / "calls"
    return log.read_text().splitlines() if log.exists() else []


def files(tool: Path) -> list[str]:
    """Return what is in the cache beside locks."""
    found = (tool.parents[1] / "cache").rglob("*")
    return sorted(p.name for p in found if p.is_file() and not p.name.endswith(".lock"))


def test_computed_once_with_its_provenance_and_progress(tool: Path, model: Model, text: Path) -> None:
    bars = Bars()
    path = make(tool, model, text, bars)
    assert path.name.startswith("Tiny-imatrix-")
    assert imatrix.read_entries(path) == ("a.weight",)
    assert bars.told == [(0, 3), (1, 3), (2, 3)]
    record = json.loads(path.with_suffix(".json").read_text())
    assert record["text_sha256"] == imatrix.identity(text)["text_sha256"]
    assert (record["engine"], record["source_path"], record["source_quant"]) == ("b7", model.path, "F16")
    assert make(tool, model, text) == path
    assert len(calls(tool)) == 1
    assert f"-m {model.path} -f {text}" in calls(tool)[0]
    assert int(calls(tool)[0].split()[-1]) == min(os.nice(0) + 10, 19)
    assert files(tool) == [path.name, path.with_suffix(".json").name]


def test_another_text_engine_or_source_is_another_matrix(tool: Path, model: Model, text: Path) -> None:
    made = {make(tool, model, text), make(tool, model, text, version="b8"),
            make(tool, replace(model, sha256="ab" * 32), text)}
    text.write_text("other words")
    assert len({*made, make(tool, model, text)}) == 4


def test_no_longer_than_the_model_was_trained_for(tool: Path, model: Model, text: Path) -> None:
    make(tool, replace(model, context_train=128), text)
    assert "-c 128 -b 128" in calls(tool)[0]


def test_failure_keeps_the_output_and_leaves_no_matrix(tool: Path, model: Model, text: Path) -> None:
    (tool.parent / "fail").touch()
    with pytest.raises(ModelUnavailable, match="only 7 tokens") as caught:
        make(tool, model, text)
    assert "only 7 tokens" in Path(str(caught.value.where)).read_text()
    assert [name for name in files(tool) if not name.endswith(".log")] == []


def test_cancelled_leaves_nothing(tool: Path, model: Model, text: Path) -> None:
    (tool.parent / "hang").touch()
    cancel = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(make, tool, model, text, None, "b7", cancel)
        await_true(lambda: calls(tool), what="the tool runs")
        cancel.set()
        with pytest.raises(CancelledError):
            work.result(60)
    assert [name for name in files(tool) if not name.endswith(".log")] == []


def test_without_the_tool_or_for_an_encoder_it_is_said_before_work(tool: Path, model: Model, text: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"(?s)no llama-imatrix.*engine build"):
        make(tool.with_name("none"), model, text)
    with pytest.raises(ModelUnavailable, match=r"(?s)left to right, and bert does not"):
        make(tool, replace(model, architecture="bert"), text)
    assert files(tool) == []


def test_files_that_are_none(tmp_path: Path) -> None:
    for name, content, why in (("a", None, "No such file"), ("b", b"", "empty"), ("c", gguf(), "no importance matrix")):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ModelUnavailable, match=rf"(?s){why}.*model.imatrix: auto") as caught:
            imatrix.read_entries(path)
        assert caught.value.where == str(path)


def test_the_stock_has_it(tool: Path, model: Model, text: Path) -> None:
    path = make(tool, model, text)
    (item,) = take_stock(tool.parents[1] / "cache", tool.parents[1] / "hub")
    assert (item.name, item.kind, item.made_from) == (path.name, "imatrix", model.path)
    assert verify(item, NoProgress()).damage is None
    path.write_bytes(path.read_bytes()[:-1])
    assert verify(item, NoProgress()).damage is not None
    remove(item)
    assert files(tool) == []
