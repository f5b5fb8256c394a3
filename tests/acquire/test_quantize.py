"""Quantizing: a stand-in llama-quantize that copies, hangs or fails on request."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gguf_bytes import LLAMA, gguf
from running import ROOT, await_true, descendants, gone

from llamaops.acquire import quantize as module
from llamaops.acquire.gguf_file import read_model
from llamaops.acquire.quantize import find_quantized, known_types, quantize
from llamaops.child import CancelledError
from llamaops.core.model import Model
from llamaops.core.progress import NoProgress
from llamaops.core.quantizing import PLAIN, Extras
from llamaops.errors import ModelUnavailable

TOOL = """#!{python}
import pathlib, shutil, sys, time
if "--help" in sys.argv:
    print('''usage: llama-quantize [--help] model-f32.gguf [model-quant.gguf] type [nthreads]

 allowed quantization types
   2  or  Q4_0    :  4.34G, +0.4685 ppl @ Llama-3-8B
  15  or  Q4_K    : alias for Q4_K_M
  15  or  Q4_K_M  :  4.58G, +0.1754 ppl @ Llama-3-8B
   7  or  Q8_0    :  7.96G, +0.0026 ppl @ Llama-3-8B
   1  or  F16     : 14.00G, +0.0020 ppl @ Mistral-7B''')
    sys.exit(1)
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
source, target = [a for a in sys.argv[1:] if a.endswith((".gguf", ".part"))]
pathlib.Path(target).write_bytes(b"half")
print("[   1/   2] token_embd.weight - [64, 3], type = f16, converting to q4_0", flush=True)
while (here / "hang").exists():
    time.sleep(0.02)
if (here / "fail").exists():
    print("main: failed to quantize model: tensor 'x' has the wrong shape", flush=True)
    sys.exit(1)
shutil.copy(source, target)
"""


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "llama-quantize"
    path.parent.mkdir()
    path.write_text(TOOL.format(python=sys.executable))
    path.chmod(0o755)
    return path


def model(tmp_path: Path, file_type: int = 1, name: str = "Tiny-F16.gguf") -> Model:
    path = tmp_path / name
    if not path.exists():
        path.write_bytes(gguf({**LLAMA, "general.file_type": file_type}))
    return read_model(path, source=f"path:{path}")


def calls(tool: Path) -> list[str]:
    log = tool.parent / "calls"
    return log.read_text().splitlines() if log.exists() else []


class Said(NoProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def make(tool: Path, of: Model, quant: str, tmp_path: Path, progress: NoProgress | None = None,
         cancel: threading.Event | None = None) -> Path:  # fmt: skip
    return quantize(tool, of, quant, tmp_path / "cache", progress or NoProgress(), threads=2, engine_version="b7",
                    cancel=cancel)


def files(tmp_path: Path) -> list[str]:
    """Return what is there beside locks."""
    return sorted(p.name for p in (tmp_path / "cache").rglob("*") if p.is_file() and not p.name.endswith(".lock"))


def test_made_once_named_by_what_it_is_with_its_provenance(tool: Path, tmp_path: Path) -> None:
    said = Said()
    path = make(tool, model(tmp_path), "Q4_K_M", tmp_path, said)
    assert path.name.startswith("Tiny-Q4_K_M-")
    assert read_model(path).architecture == "llama"
    record = json.loads(path.with_suffix(".json").read_text())
    assert (record["type"], record["engine"], record["source_quant"]) == ("Q4_K_M", "b7", "F16")
    assert record["requantized"] is False
    assert record["made_from"]["path"] == str(tmp_path / "Tiny-F16.gguf")
    assert said.lines == []
    assert files(tmp_path) == sorted([path.name, path.with_suffix(".json").name])
    assert make(tool, model(tmp_path), "Q4_K_M", tmp_path) == path
    assert len(calls(tool)) == 1
    assert "--allow-requantize" not in calls(tool)[0]
    assert calls(tool)[0].endswith("Q4_K_M 2")


def test_an_alias_or_lower_case_is_the_same_thing(tool: Path, tmp_path: Path) -> None:
    first = make(tool, model(tmp_path), "q4_k", tmp_path)
    assert make(tool, model(tmp_path), "Q4_K_M", tmp_path) == first
    assert find_quantized(model(tmp_path), "Q4_K", tmp_path / "cache", "b7") == first


def test_another_source_or_engine_is_another_result(tool: Path, tmp_path: Path) -> None:
    first = make(tool, model(tmp_path), "Q4_0", tmp_path)
    os.utime(tmp_path / "Tiny-F16.gguf", (1, 1))
    assert make(tool, model(tmp_path), "Q4_0", tmp_path) != first
    assert find_quantized(model(tmp_path), "Q4_0", tmp_path / "cache", "b8") is None


def test_downwards_from_a_quantized_model_is_said(tool: Path, tmp_path: Path) -> None:
    said = Said()
    make(tool, model(tmp_path, 7, "m.Q8_0.gguf"), "Q4_0", tmp_path, said)
    assert any(line.startswith("degraded: Q8_0 is quantized again") for line in said.lines)
    assert "--allow-requantize" in calls(tool)[0]


def test_upwards_is_refused(tool: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"(?s)Q4_0 can't be made Q8_0.*quantize: null"):
        make(tool, model(tmp_path, 2, "m.Q4_0.gguf"), "Q8_0", tmp_path)
    assert calls(tool) == []


@pytest.mark.parametrize(("quant", "near"), [("Q4_KM", "did you mean Q4_K_M"), ("int4", "choose one of these")])
def test_unknown_types_list_the_tools_own(tool: Path, tmp_path: Path, quant: str, near: str) -> None:
    with pytest.raises(ModelUnavailable, match=r"(?s)no quant type.*Q4_0, Q4_K, Q4_K_M, Q8_0, F16") as caught:
        make(tool, model(tmp_path), quant, tmp_path)
    assert near in str(caught.value.fix)


def test_failure_keeps_the_output_and_leaves_no_model(tool: Path, tmp_path: Path) -> None:
    (tool.parent / "fail").touch()
    with pytest.raises(ModelUnavailable, match="wrong shape") as caught:
        make(tool, model(tmp_path), "Q4_0", tmp_path)
    assert "wrong shape" in Path(str(caught.value.where)).read_text()
    assert [name for name in files(tmp_path) if not name.endswith(".log")] == []


def test_cancelled_leaves_nothing(tool: Path, tmp_path: Path) -> None:
    (tool.parent / "hang").touch()
    cancel = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(make, tool, model(tmp_path), "Q4_0", tmp_path, None, cancel)
        await_true(lambda: calls(tool), what="the tool runs")
        cancel.set()
        with pytest.raises(CancelledError):
            work.result(10)
    assert [name for name in files(tmp_path) if not name.endswith(".log")] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_leaves_nothing_and_no_process(tool: Path, tmp_path: Path, number: signal.Signals) -> None:
    (tool.parent / "hang").touch()
    of = model(tmp_path)
    code = (
        "from pathlib import Path; from llamaops.acquire.quantize import quantize;"
        "from llamaops.acquire.gguf_file import read_model; from llamaops.core.progress import NoProgress;"
        f"quantize(Path({str(tool)!r}), read_model(Path({of.path!r})), 'Q4_0', Path({str(tmp_path / 'cache')!r}),"
        "NoProgress(), threads=1, engine_version=None)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    await_true(lambda: calls(tool), what="the tool runs")
    children = descendants(process.pid)
    process.send_signal(number)
    process.wait(60)
    await_true(lambda: gone(children), what="the tool is gone")
    assert [name for name in files(tmp_path) if not name.endswith(".log")] == []


def test_two_at_once_make_it_once(tool: Path, tmp_path: Path) -> None:
    (tool.parent / "hang").touch()
    of, said = model(tmp_path), Said()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(make, tool, of, "Q4_0", tmp_path, said) for _ in range(2)]
        await_true(lambda: calls(tool) and said.lines, what="one works and one waits")
        (tool.parent / "hang").unlink()
        assert len({future.result(20) for future in both}) == 1
    assert len(calls(tool)) == 1
    assert "waiting" in said.lines[0]


def test_a_leftover_of_a_killed_run_is_replaced(tool: Path, tmp_path: Path) -> None:
    path = make(tool, model(tmp_path), "Q4_0", tmp_path)
    path.with_name(f".{path.name}.part").write_bytes(b"old")
    path.unlink()
    assert make(tool, model(tmp_path), "Q4_0", tmp_path) == path
    assert not path.with_name(f".{path.name}.part").exists()


def test_a_result_of_another_size_than_recorded_is_not_used(tool: Path, tmp_path: Path) -> None:
    path = make(tool, model(tmp_path), "Q4_0", tmp_path)
    path.write_bytes(b"cut")
    assert find_quantized(model(tmp_path), "Q4_0", tmp_path / "cache", "b7") is None
    assert make(tool, model(tmp_path), "Q4_0", tmp_path) == path
    assert len(calls(tool)) == 2


def test_no_room(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamaops import cache

    monkeypatch.setattr(cache, "MARGIN_BYTES", 1 << 60)
    with pytest.raises(ModelUnavailable, match="not enough room"):
        make(tool, model(tmp_path), "Q4_0", tmp_path)
    assert calls(tool) == []


def test_no_tool(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="can't be run"):
        known_types(tmp_path / "none")
    with pytest.raises(ModelUnavailable, match="does not list its types"):
        known_types(Path(shutil.which("true") or "/bin/true"))


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("m-F16.gguf", "m"),
        ("m.f16.gguf", "m"),
        ("Qwen-fp16-00001-of-00002.gguf", "Qwen"),
        ("plain.gguf", "plain"),
    ],
)
def test_names(name: str, stem: str, tmp_path: Path) -> None:
    of = Model(path=str(tmp_path / name), size_bytes=1, architecture="x", quant="F16")
    assert module._target(of, "Q4_0", tmp_path, None, PLAIN).name.startswith(f"{stem}-Q4_0-")


def test_a_matrix_and_tensor_types_reach_the_tool_the_name_and_the_record(tool: Path, tmp_path: Path) -> None:
    matrix = tmp_path / "m.dat"
    matrix.write_bytes(b"values")
    extras = Extras({"sha256": "ab"}, (("attn_v", "Q8_0"), ("attn_.", "Q4_K")))
    asked = []

    def give() -> Path:
        asked.append(1)
        return matrix

    def made(extras: Extras, give: Callable[[], Path] | None = give) -> Path:
        return quantize(tool, model(tmp_path), "Q4_0", tmp_path / "cache", NoProgress(), threads=2, engine_version="b7",
                        extras=extras, matrix=give)

    path = made(extras)
    assert path.name.startswith("Tiny-Q4_0-im-mixed-")
    assert f"--imatrix {matrix} --tensor-type attn_v=Q8_0 --tensor-type attn_.=Q4_K" in calls(tool)[0]
    record = json.loads(path.with_suffix(".json").read_text())
    assert record["imatrix"]["sha256"] == hashlib.sha256(b"values").hexdigest()
    assert record["tensor_types"] == ["attn_v=Q8_0", "attn_.=Q4_K"]
    assert made(extras) == path
    assert (len(calls(tool)), len(asked)) == (1, 1), "what is there asks for no matrix"
    others = [made(Extras({"sha256": "cd"}, extras.tensor_types)), made(Extras(None, extras.tensor_types), None),
              made(Extras(extras.imatrix, extras.tensor_types[::-1])), made(PLAIN, None)]
    assert len({path, *others}) == 5, "each is another file, the order of patterns too"


def test_a_wrong_type_is_said_before_a_matrix_is_computed(tool: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no quant type"):
        quantize(tool, model(tmp_path), "Q9", tmp_path / "cache", NoProgress(), threads=1, engine_version="b7",
                 extras=Extras({"sha256": "ab"}), matrix=lambda: pytest.fail("asked for"))


def test_a_type_that_needs_a_matrix_names_the_key(tool: Path, tmp_path: Path) -> None:
    (tool.parent / "fail").touch()
    tool.write_text(tool.read_text().replace(
        "tensor 'x' has the wrong shape",
        "this quantization requires an imatrix!\\n - offending tensor: blk.0.attn_k.weight"))
    with pytest.raises(ModelUnavailable, match=r"(?s)needs an importance matrix \(for blk.0.attn_k.weight\).*auto"):
        make(tool, model(tmp_path), "Q4_0", tmp_path)
    assert files(tmp_path) == []
