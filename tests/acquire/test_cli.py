"""The commands: ``llamaops engine …`` and ``llamaops model …``, as scripts see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serve
from gguf_bytes import gguf

from llamaops.cli import run


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAOPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LLAMAOPS_RECIPE", str(recipe))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve(FakeHub({"m-Q4_K_M.gguf": gguf()})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def said(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    both = capsys.readouterr()
    return both.out, both.err


def test_engine_from_nothing_to_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert run(["engine", "locate"]) == 69
    out, err = said(capsys)
    assert out == ""
    assert "llamaops engine build" in err
    assert run(["engine", "build", "-D", "GGML_OPENMP=OFF"]) == 0
    assert run(["engine", "build", "--json"]) == 0
    out, err = said(capsys)
    path, document = out.splitlines()
    assert Path(path).name == "llama-server"
    assert json.loads(document)["version"] == "b7"
    assert "engine built" in err
    assert run(["engine", "locate", "--json"]) == 0
    assert json.loads(said(capsys)[0])["origin"] == "cache"
    assert run(["engine", "list", "--json"]) == 0
    rows = json.loads(said(capsys)[0])
    assert [row["fits"] for row in rows] == [True, False], "newest first; the other has flags of its own"
    assert run(["engine", "list"]) == 0
    assert said(capsys)[0].startswith("* b7")
    assert run(["engine", "info"]) == 0
    assert "version      b7" in said(capsys)[0]
    assert run(["engine", "info", "--json", path]) == 0
    facts = json.loads(said(capsys)[0])
    assert facts["tools"] == ["llama-bench", "llama-imatrix", "llama-perplexity", "llama-quantize", "llama-server"]
    assert "--model" in facts["flags"]


def test_a_bad_definition_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["engine", "build", "-D", "GGML_OPENMP"]) == 2
    assert "NAME=VALUE" in said(capsys)[1]


def test_no_builds_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["engine", "list"]) == 0
    assert run(["model", "list"]) == 0
    out, err = said(capsys)
    assert out == ""
    assert "engine build" in err
    assert "model pull" in err


def test_inspect_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf())
    for ref in (str(path), f"path:{path}", str(tmp_path)):
        assert run(["model", "inspect", "--json", ref]) == 0
        facts = json.loads(said(capsys)[0])
        assert (facts["architecture"], facts["quant"], facts["path"]) == ("llama", "Q4_K_M", str(path))
        assert facts["kv_bytes_per_token"]["f16"] == 2 * 2 * (16 + 16) * 2, "layers × KV heads × (K + V) × 2 bytes"
    assert run(["model", "inspect", str(path)]) == 0
    table = said(capsys)[0]
    for line in ("architecture          llama", "heads / KV heads      4 / 2", "chat template         yes",
                 "KV per token, f16     256 bytes", "   context        f16 KV       q8_0 KV"):  # fmt: skip
        assert line in table
    assert max(len(line) for line in table.splitlines() if not line.startswith("path")) <= 80


@pytest.mark.parametrize("ref", ["nothing.gguf", "ftp:x", "path:/nonexistent.gguf"])
def test_what_names_no_model(ref: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "inspect", ref]) == 69
    assert ref.removeprefix("path:") in said(capsys)[1]


def test_pull_follows_the_branch_and_offline_asks_nobody(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "inspect", "--offline", "hf:org/model"]) == 69
    assert hub.requests == []
    assert "llamaops model pull hf:org/model" in said(capsys)[1]
    assert run(["model", "pull", "hf:org/model"]) == 0
    out, err = said(capsys)
    assert Path(out.strip()).read_bytes() == gguf()
    assert "download m-Q4_K_M.gguf" in err
    hub.files["m-Q4_K_M.gguf"], hub.commit = gguf(version=2), "d" * 40
    assert run(["model", "pull", "--offline", "hf:org/model"]) == 0
    assert Path(said(capsys)[0].strip()).read_bytes() == gguf()
    assert run(["model", "pull", "--json", "hf:org/model"]) == 0
    assert Path(json.loads(said(capsys)[0])["path"]).read_bytes() == gguf(version=2)
    assert run(["model", "list"]) == 0
    assert "Q4_K_M" in said(capsys)[0]


def test_pull_of_a_profile(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text("model: {source: 'hf:org/model:Q4_K_M'}\n")
    assert run(["model", "pull", str(profile)]) == 0
    assert said(capsys)[0].strip().endswith("m-Q4_K_M.gguf")
