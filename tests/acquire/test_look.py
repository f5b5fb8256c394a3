"""``llamaops model inspect`` of what is not here: only headers cross the network."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, serve
from gguf_bytes import LLAMA, gguf

from llamaops.acquire import look
from llamaops.acquire.look import look_at_hub, look_at_url
from llamaops.cli import run
from llamaops.core.source import HubSource, UrlSource
from llamaops.errors import ModelUnavailable, TryAgain

WEIGHTS = 3_000_000
SMALL = {**LLAMA, "general.name": "Small", "tokenizer.ggml.merges": ["ab cd"] * 22_000}
CONFIG = {
    "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "max_position_embeddings": 32768,
    "sliding_window": 32768, "use_sliding_window": False,
}  # fmt: skip


def safetensors(dtype: str, *shapes: list[int]) -> bytes:
    header: dict[str, Any] = {f"t{i}": {"dtype": dtype, "shape": shape} for i, shape in enumerate(shapes)}
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(raw)) + raw + b"\0" * WEIGHTS


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setattr("llamaops.transfer.PAUSE_S", 0.01)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("LLAMAOPS_CACHE", str(tmp_path / "cache"))
    files = {"m-Q4_K_M.gguf": gguf(SMALL) + b"\0" * WEIGHTS, "m-Q8_0.gguf": gguf() + b"\0" * 2 * WEIGHTS,
             "mmproj-m.gguf": b"no", "README.md": b"hello"}  # fmt: skip
    with serve(FakeHub(files)) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def sent(hub: FakeHub) -> int:
    return sum(request.sent for request in hub.downloads())


def test_of_a_repository_the_header_of_the_smallest_and_every_file(hub: FakeHub, tmp_path: Path) -> None:
    looked = look_at_hub(HubSource("org/model"), tmp_path)
    assert (looked.model.name, looked.model.architecture, looked.model.context_train) == ("Small", "llama", 2048)
    assert looked.model.size_bytes == len(hub.files["m-Q4_K_M.gguf"])
    assert [(v.quant, v.file) for v in looked.variants] == [("Q4_K_M", "m-Q4_K_M.gguf"), ("Q8_0", "m-Q8_0.gguf")]
    assert len(gguf(SMALL)) < sent(hub) <= 4 * look.FIRST_BYTES, "a header of 290 kB takes two requests"
    assert [r.range for r in hub.downloads()] == [f"bytes=0-{look.FIRST_BYTES - 1}",
                                                  f"bytes={look.FIRST_BYTES}-{4 * look.FIRST_BYTES - 1}"]
    assert not (tmp_path / "hf").exists() or not list((tmp_path / "hf").rglob("*.gguf"))


@pytest.mark.parametrize(("source", "name"), [
    (HubSource("org/model", quant="Q8_0"), "Tiny"), (HubSource("org/model", file="m-Q8_0.gguf"), "Tiny"),
    (HubSource("org/model", quant="Q4_K_M"), "Small"),
])
def test_the_file_that_is_named(hub: FakeHub, tmp_path: Path, source: HubSource, name: str) -> None:
    assert look_at_hub(source, tmp_path).model.name == name


def test_parts_of_a_split_model_are_added_up(hub: FakeHub, tmp_path: Path) -> None:
    part = gguf()
    hub.files = {f"m-Q8_0-0000{i}-of-00002.gguf": part for i in (1, 2)}
    looked = look_at_hub(HubSource("org/model"), tmp_path)
    assert (looked.model.size_bytes, looked.model.parameters) == (2 * len(part), 2 * (64 * 3 + 64 * 64))
    assert [v.size_bytes for v in looked.variants] == [2 * len(part)]


def test_a_checkpoint_tells_by_configuration_and_headers(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {
        "config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"chat_template": "{{ x }}"}',
        "model-00001-of-00002.safetensors": safetensors("BF16", [896, 100], [7]),
        "model-00002-of-00002.safetensors": safetensors("BF16", [896, 100]),
    }  # fmt: skip
    model = look_at_hub(HubSource("org/model"), tmp_path).model
    assert (model.architecture, model.quant, model.parameters) == ("qwen2", "BF16", 2 * 89600 + 7)
    assert (model.layers, model.kv_heads, model.head_dim_k, model.context_train) == (24, 2, 64, 32768)
    assert (model.sliding_window, model.has_chat_template) == (None, True)
    assert sent(hub) < 5000


def test_a_checkpoint_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(safetensors("F16", [896, 100]))
    profile = tmp_path / "p.yaml"
    profile.write_text(f"model: {{source: 'path:{tmp_path}'}}\n")
    for ref in (str(tmp_path), f"path:{tmp_path}", str(profile)):
        assert run(["model", "inspect", "--json", "--offline", ref]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["architecture"], document["parameters"], document["quant"]) == ("qwen2", 89600, "F16")
        assert [q["quant"] for q in document["quants"]][:2] == ["F16", "Q8_0"]
    (tmp_path / "model.gguf").write_bytes(gguf())
    assert run(["model", "inspect", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "llama", "a ready file wins"


@pytest.mark.parametrize(("change", "says"), [
    ({"config.json": b"{"}, "config.json is broken"),
    ({"model.safetensors": b"\xff" * 20}, "not a safetensors file"),
    ({"model.safetensors": struct.pack("<Q", 2) + b"[]"}, "header of the safetensors is broken"),
    ({"model.safetensors": struct.pack("<Q", 9) + b'{"t": {}}'}, "header of the safetensors is broken"),
])
def test_a_broken_checkpoint(hub: FakeHub, tmp_path: Path, change: dict[str, bytes], says: str) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors": safetensors("F16", [2]), **change}
    with pytest.raises(ModelUnavailable, match=says):
        look_at_hub(HubSource("org/model"), tmp_path)


def test_a_header_that_goes_on_and_on_is_left(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "MAX_HEADER", look.FIRST_BYTES)
    with pytest.raises(ModelUnavailable, match="does not end within"):
        look_at_hub(HubSource("org/model"), tmp_path)


@pytest.mark.parametrize(("source", "says"), [
    (HubSource("org/model", quant="Q2_K"), "has no Q2_K"),
    (HubSource("org/model", file="x.gguf"), "there is no file x.gguf"),
    (HubSource("org/other"), "no repository org/other"),
])
def test_what_is_not_there(hub: FakeHub, tmp_path: Path, source: HubSource, says: str) -> None:
    with pytest.raises(ModelUnavailable, match=says):
        look_at_hub(source, tmp_path)


def test_a_url(hub: FakeHub) -> None:
    source = UrlSource(f"{hub.url}/org/model/resolve/main/m-Q8_0.gguf")
    assert look_at_url(source).model.quant == "Q4_K_M", "as the header says, not the name"
    hub.ignore_range = True
    assert look_at_url(source).model.name == "Tiny"
    hub.files["m-Q8_0.gguf"] = b"<html>"
    with pytest.raises(ModelUnavailable, match="web page"):
        look_at_url(source)
    with pytest.raises(TryAgain):
        look_at_url(UrlSource("http://127.0.0.1:9/x.gguf"))


def test_the_table_and_the_document(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "inspect", "hf:org/model"]) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= 80
    assert "Q8_0" in table
    assert "m-Q8_0.gguf" in table
    assert run(["model", "inspect", "--json", "hf:org/model"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {(n["context"], n["kv_type"]) for n in document["memory"]} == {
        (2048, kind) for kind in ("f16", "q8_0", "q4_0")
    }
    q8, q4 = document["quants"]
    assert (q8["quant"], q8["estimated"], q8["fits"]) == ("Q8_0", False, True)
    assert q8["total_bytes"] - q4["total_bytes"] == q8["size_bytes"] - q4["size_bytes"]


def test_a_profile_whose_model_is_not_here_is_looked_at(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text("model: {source: 'hf:org/model:Q8_0'}\n")
    assert run(["model", "inspect", "--json", str(profile)]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "Tiny"
    assert run(["model", "inspect", "--offline", str(profile)]) == 69
