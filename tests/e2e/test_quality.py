"""SmolLM2 in three types: the engine's own tools judge them, and the table tells which is best."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from running import LLAMAOPS, Up, with_own_models

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.fixture
def env(env: dict[str, str], tmp_path: Path, engine_path: str) -> dict[str, str]:
    return with_own_models(env, tmp_path)


def llamaops(*words: str, env: dict[str, str], code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*LLAMAOPS, *words], env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == code, done.stderr
    return done


def compare(*words: str, env: dict[str, str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(llamaops("model", "compare", *words, "--json", env=env).stdout)
    return rows


def test_fewer_bits_are_further_from_the_base(env: dict[str, str], model_path: str, tmp_path: Path) -> None:
    plot = tmp_path / "q.svg"
    rows = compare(model_path, "-q", "Q3_K_M", "-q", "Q2_K", "--svg", str(plot), env=env)
    assert [row["quant"] for row in rows] == ["Q4_1", "Q3_K_M", "Q2_K"]
    assert [row["base"] for row in rows] == [True, False, False]
    divergences, same = [row["divergence"] for row in rows], [row["same_top"] for row in rows]
    assert divergences == sorted(divergences) and divergences[0] == 0 < divergences[1]
    assert same == sorted(same, reverse=True) and 0 < same[2] < same[1] < same[0] == 1
    assert [row["perplexity"] for row in rows] == sorted(row["perplexity"] for row in rows)
    labels = "".join(ElementTree.fromstring(plot.read_text()).itertext())
    assert all(row["quant"] in labels for row in rows)
    assert list((Path(env["LLAMAOPS_CACHE"]) / "tmp").iterdir()) == []
    text = llamaops("model", "compare", model_path, rows[2]["path"], env=env).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert f"{rows[2]['divergence']:.4f}" in text


def test_the_base_that_was_named_is_the_base(env: dict[str, str], model_path: str) -> None:
    small = llamaops("model", "quantize", model_path, "Q2_K", env=env).stdout.strip()
    rows = compare(model_path, "--base", small, env=env)
    assert [(row["base"], row["divergence"] > 0) for row in rows] == [(False, True), (True, False)]


@pytest.mark.parametrize(("words", "code", "said"), [
    ([], 2, "only one model"), (["./nowhere.gguf"], 69, "names no model"), (["-q", "Q5_X"], 69, "Q5_X")])
def test_what_cant_be_compared(env: dict[str, str], model_path: str, words: list[str], code: int,
                               said: str) -> None:
    assert said in llamaops("model", "compare", model_path, *words, env=env, code=code).stderr


def chosen(folder: Path, model: str, itl_ms: float, env: dict[str, str]) -> tuple[str, str]:
    """Return the file that auto makes or takes for so much time between tokens, and the plan's reason."""
    profile = folder / "auto.yaml"
    profile.write_text(f"model: {{source: 'path:{model}', quantize: auto, context: 512}}\nslo: {{itl_ms: {itl_ms}}}\n"
                       "serve: {slots: 1, port: 0}\n")
    path = llamaops("model", "pull", str(profile), env=env).stdout.strip()
    plan = json.loads(llamaops("plan", str(profile), "--json", env=env).stdout)
    assert plan["model"]["path"] == path
    assert "model.quantize" in llamaops("plan", str(profile), env=env).stdout
    return path, next(reason["text"] for reason in plan["reasons"] if reason["what"] == "model.quantize")


def test_auto_takes_what_the_table_says(env: dict[str, str], model_path: str, tmp_path: Path, up: Up) -> None:
    """Where every type is fast enough, the best of the table; where none is, its smallest."""
    small, why = chosen(tmp_path, model_path, 1, env)
    assert "Q2_K" in why and "more than slo.itl_ms" in why
    best, why = chosen(tmp_path, model_path, 60_000, env)
    assert "within slo.itl_ms" in why
    rows = compare(best, small, env=env)
    assert min(rows, key=lambda row: row["divergence"])["path"] == best
    assert min(rows, key=lambda row: row["size_bytes"])["path"] == small
    running = up(profile=tmp_path / "auto.yaml")
    answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "Once", "max_tokens": 4}, timeout=120)
    assert answer.status_code == 200, answer.text
