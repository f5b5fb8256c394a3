"""Converting: a stand-in for the engine's converter that writes, hangs or fails on request; files as they come."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from running import ROOT, await_true, descendants, gone
from safetensors_bytes import write_checkpoint

from llamaops.acquire import converter as converters
from llamaops.acquire.convert import Conversion, convert, find_converted
from llamaops.child import CancelledError
from llamaops.core.conversion import Converter
from llamaops.core.progress import NoProgress
from llamaops.errors import ModelUnavailable
from llamaops.recipe import load_recipe

SCRIPT = """
import json, os, pathlib, sys, time
here = pathlib.Path(__file__).parent
folder, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1])
seen = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())
secret = [name for name in os.environ if "TOKEN" in name and name != "TOKENIZERS_PARALLELISM"]
with (here / "calls").open("a") as calls:
    facts = {"argv": sys.argv[2:], "seen": seen, "secret": secret, "offline": os.environ["HF_HUB_OFFLINE"],
             "nice": os.getpriority(os.PRIO_PROCESS, 0)}
    calls.write(json.dumps(facts) + "\\n")
target.write_bytes(b"half")
print("Writing:  40%|####      | 4/10", flush=True)
while (here / "hang").exists():
    time.sleep(0.02)
if (here / "fail").exists():
    print("a first line\\n" + (here / "fail").read_text(), file=sys.stderr)
    sys.exit(1)
target.write_bytes(b"GGUF whole")
"""


@pytest.fixture
def converter(tmp_path: Path) -> Converter:
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        (folder / name).write_text(SCRIPT)
    return Converter(sys.executable, str(folder), "b7")


def calls(converter: Converter) -> list[dict[str, object]]:
    log = Path(converter.scripts) / "calls"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def make(work: Conversion, converter: Converter, tmp_path: Path, cancel: threading.Event | None = None,
         **environ: str) -> Path:  # fmt: skip
    return convert(work, converter, tmp_path / "cache", NoProgress(), dict(os.environ) | environ, threads=1,
                   cancel=cancel)


def left(tmp_path: Path) -> list[str]:
    """Return what is there beside locks and logs."""
    found = (tmp_path / "cache").rglob("*")
    return sorted(p.name for p in found if not p.is_dir() and not p.name.endswith((".lock", ".log")))


@pytest.mark.parametrize("shards", [1, 2])
def test_made_once_from_the_needed_files_alone_with_its_provenance(
    converter: Converter, tmp_path: Path, shards: int
) -> None:
    folder = write_checkpoint(tmp_path / "hf" / "Tiny Model", shards=shards)
    for foreign in ("modeling_tiny.py", "pytorch_model.bin", "picture.png"):
        (folder / foreign).write_text("x")
    work = Conversion(folder, folder.name, source="hf:org/Tiny")
    path = make(work, converter, tmp_path, HF_TOKEN="hf_secret")
    assert path.name.startswith("Tiny-Model-F16-")
    assert path.read_bytes() == b"GGUF whole"
    record = json.loads(path.with_suffix(".json").read_text())
    weights = sorted(name for name in record["made_from"] if name.endswith(".safetensors"))
    assert len(weights) == shards
    assert (record["type"], record["engine"], record["source"]) == ("F16", "b7", "hf:org/Tiny")
    assert make(work, converter, tmp_path) == path == find_converted(work, tmp_path / "cache", "b7")
    (call,) = calls(converter)
    assert call["seen"] == sorted(record["made_from"])
    assert not {"modeling_tiny.py", "pytorch_model.bin", "picture.png"} & set(record["made_from"])
    assert (call["secret"], call["offline"]) == ([], "1")
    assert call["nice"] == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert left(tmp_path) == sorted([path.name, path.with_suffix(".json").name])


def test_another_type_converter_or_weights_is_another_result(converter: Converter, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    first = make(Conversion(folder, "m"), converter, tmp_path)
    assert make(Conversion(folder, "m", "F32"), converter, tmp_path) != first
    assert find_converted(Conversion(folder, "m"), tmp_path / "cache", "b8") is None
    os.utime(folder / "model.safetensors", (1, 1))
    assert find_converted(Conversion(folder, "m"), tmp_path / "cache", "b7") is None


def test_a_projector_and_an_adapter(converter: Converter, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    assert make(Conversion(folder, "m", projector=True), converter, tmp_path).name.startswith("mmproj-m-F16-")
    adapter = tmp_path / "lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelUnavailable, match=r"(?s)LoRA adapter.*--base REF"):
        make(Conversion(adapter, "lora"), converter, tmp_path)
    assert make(Conversion(adapter, "lora", base=folder), converter, tmp_path).name.startswith("lora-lora-F16-")
    projector, lora = calls(converter)
    assert "--mmproj" in projector["argv"]  # type: ignore[operator]  # parsed JSON
    assert str(folder) in lora["argv"]  # type: ignore[operator]  # parsed JSON
    assert lora["seen"] == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("ERROR:hf-to-gguf:Model TinyModel is not supported", "architecture TinyModel is not supported by engine b7"),
        ("NotImplementedError: BPE pre-tokenizer was not recognized", "pre-tokenizer is not known to engine b7"),
        ("Traceback …\nKeyError: 'architectures'", "config.json names no architecture"),
        ("ValueError: one odd thing", "ValueError: one odd thing"),
        ("The repository contains custom code which must be executed", "code of its own, which is never run"),
    ],
)  # fmt: skip
def test_failure_keeps_the_output_and_leaves_no_model(
    converter: Converter, tmp_path: Path, said: str, why: str
) -> None:
    (Path(converter.scripts) / "fail").write_text(said)
    with pytest.raises(ModelUnavailable, match=why) as caught:
        make(Conversion(write_checkpoint(tmp_path / "m"), "m"), converter, tmp_path)
    assert "a first line" in Path(str(caught.value.where)).read_text(), "all of it is kept"
    assert left(tmp_path) == []


def test_damage_is_seen_before_the_converter_runs(converter: Converter, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "cut")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for data, why in ((whole[:-1], r"has \d+ bytes, its header says"),
                      (b"version https://git-lfs.github.com/spec/v1", "Git LFS"),
                      (whole[:8] + b"[" + whole[9:], "no description of tensors"), (b"", "no safetensors file")):
        weights.write_bytes(data)
        with pytest.raises(ModelUnavailable, match=why):
            make(Conversion(folder, "m"), converter, tmp_path)
    split = write_checkpoint(tmp_path / "split", shards=2)
    (split / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match=r"(?s)weights are missing.*model-00002-of-00002"):
        make(Conversion(split, "m"), converter, tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelUnavailable, match="no whole model"):
        make(Conversion(folder, "m"), converter, tmp_path)
    assert calls(converter) == []


def test_no_room(converter: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamaops import cache

    monkeypatch.setattr(cache, "MARGIN_BYTES", 1 << 60)
    with pytest.raises(ModelUnavailable, match="not enough room"):
        make(Conversion(write_checkpoint(tmp_path / "m"), "m"), converter, tmp_path)
    assert calls(converter) == []


def test_cancelled_leaves_nothing(converter: Converter, tmp_path: Path) -> None:
    (Path(converter.scripts) / "hang").touch()
    work, cancel = Conversion(write_checkpoint(tmp_path / "m"), "m"), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(make, work, converter, tmp_path, cancel)
        await_true(lambda: calls(converter), within=60, what="the converter runs")
        cancel.set()
        with pytest.raises(CancelledError):
            running.result(60)
    assert left(tmp_path) == []


def test_interrupted_leaves_nothing_and_no_process(converter: Converter, tmp_path: Path) -> None:
    (Path(converter.scripts) / "hang").touch()
    folder = write_checkpoint(tmp_path / "m")
    code = (
        "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); from pathlib import Path;"
        "from llamaops.acquire.convert import Conversion, convert; from llamaops.core.conversion import Converter;"
        "from llamaops.core.progress import NoProgress;"
        f"convert(Conversion(Path({str(folder)!r}), 'm'), Converter({sys.executable!r}, {converter.scripts!r}, 'b7'),"
        f"Path({str(tmp_path / 'cache')!r}), NoProgress(), os.environ, threads=1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    await_true(lambda: calls(converter), within=60, what="the converter runs")
    children = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    await_true(lambda: gone(children), within=60, what="the converter is gone")
    assert left(tmp_path) == []


def test_nothing_large_is_installed_without_consent(tmp_path: Path, recipe: Path) -> None:
    asked: list[str] = []

    def refuse(question: str) -> bool:
        asked.append(question)
        return False

    found = load_recipe({"LLAMAOPS_RECIPE": str(recipe)})
    with pytest.raises(ModelUnavailable, match=r"(?s)nobody agreed.*llamaops model convert REF --yes"):
        converters.ready_converter(found, tmp_path / "cache", os.environ, NoProgress(), refuse)
    assert "1.2 GiB" in asked[0]
    assert not list((tmp_path / "cache").rglob("python"))
