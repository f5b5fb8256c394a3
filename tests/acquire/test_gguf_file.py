"""GGUF files on disk: folders, split models, checksums, big files, and many broken headers."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest
from gguf_bytes import gguf

from llamaops.acquire.gguf_file import find_gguf, read_model
from llamaops.core.gguf_header import parse_header
from llamaops.errors import ModelUnavailable


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_facts_and_origin(tmp_path: Path) -> None:
    path = put(tmp_path / "m.gguf", gguf())
    model = read_model(path, source="path:m.gguf", sha256="ab")
    assert (model.path, model.size_bytes) == (str(path), len(gguf()))
    assert (model.source, model.sha256, model.quant) == ("path:m.gguf", "ab", "Q4_K_M")


def test_a_large_file_with_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    fields = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(150_000)],
        "tokenizer.ggml.merges": [f"a b{i}" for i in range(150_000)],
    }
    began = time.process_time()
    data = gguf(fields)
    making_s = time.process_time() - began
    path = put(tmp_path / "m.gguf", data)
    with path.open("r+b") as file:
        file.truncate(100 << 20)
    began = time.process_time()
    model = read_model(path)
    assert time.process_time() - began < 2 * making_s  # a third of it in truth
    assert model.vocab == 150_000


def test_split_models(tmp_path: Path) -> None:
    first = put(tmp_path / "m-00001-of-00002.gguf", gguf())
    with pytest.raises(ModelUnavailable, match=r"(?s)00002-of-00002.*no such file"):
        read_model(first)
    second = put(tmp_path / "m-00002-of-00002.gguf", gguf({"split.no": 1}))
    model = read_model(first)
    assert model.size_bytes == first.stat().st_size + second.stat().st_size
    assert model.parameters == 2 * parse_header(gguf()).parameters
    with pytest.raises(ModelUnavailable, match=r"(?s)one part.*m-00001-of-00002"):
        read_model(second)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (gguf()[:-40], "truncated"),
        (b"<html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"PK\x03\x04rest", "zip"),
    ],
)
def test_refusals_name_file_and_reason(tmp_path: Path, data: bytes, says: str) -> None:
    path = put(tmp_path / "m.gguf", data)
    with pytest.raises(ModelUnavailable) as caught:
        read_model(path)
    assert caught.value.where == str(path)
    assert says in str(caught.value.why)


def test_no_file_and_a_folder_given_as_file(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no such file"):
        read_model(tmp_path / "none.gguf")
    with pytest.raises(ModelUnavailable, match="directory"):
        read_model(tmp_path)


def test_the_only_model_of_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "mmproj-m.gguf", gguf())
    model = put(tmp_path / "m-Q4_K_M.gguf", gguf())
    assert find_gguf(tmp_path) == model
    put(tmp_path / "m-Q8_0.gguf", gguf())
    with pytest.raises(ModelUnavailable, match=r"(?s)several models.*m-Q4_K_M.gguf \(0 MiB\), m-Q8_0.gguf"):
        find_gguf(tmp_path)


def test_folders_without_one(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ModelUnavailable, match=r"neither a \*\.gguf nor config\.json with \*\.safetensors"):
            find_gguf(tmp_path)
        put(tmp_path / "model.safetensors", b"x")
    put(tmp_path / "config.json", b"{}")
    assert find_gguf(tmp_path) == tmp_path, "to be converted"


def test_a_name_that_is_nearly_right(tmp_path: Path) -> None:
    put(tmp_path / "m.gguf", gguf())
    with pytest.raises(ModelUnavailable, match=r"(?s)no such model file.*the folder has: m.gguf"):
        find_gguf(tmp_path / "n.gguf")


def test_checksum(tmp_path: Path) -> None:
    path = put(tmp_path / "m.gguf", gguf())
    assert find_gguf(path, sha256=hashlib.sha256(gguf()).hexdigest().upper()) == path
    with pytest.raises(ModelUnavailable, match="wrong checksum"):
        find_gguf(path, sha256="0" * 64)
