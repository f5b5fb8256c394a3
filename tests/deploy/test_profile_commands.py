"""``init``, ``schema`` and ``deploy systemd`` as a person calls them, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamaops.cli import run
from llamaops.core.profile import parse_profile

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAOPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)


def test_init_writes_a_profile_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init"]) == 0
    text = (tmp_path / "llamaops.yaml").read_text()
    assert parse_profile(text, stem="llamaops", base=tmp_path, environ={}).name == "llamaops"
    assert capsys.readouterr().out == ""
    assert run(["init", "-"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(text)


def test_init_keeps_what_is_there_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "my.yaml"
    mine.write_text("mine")
    assert run(["init", "my.yaml"]) == 2
    assert mine.read_text() == "mine" and "--force" in capsys.readouterr().err
    assert run(["init", "my.yaml", "--force"]) == 0
    assert "model:" in mine.read_text()
    assert run(["init", "none/my.yaml"]) == 2
    assert "none/my.yaml" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


def test_schema_is_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["required"] == ["model"]


def test_deploy_prints_the_unit_or_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").mkdir()
    assert run(["init", "my qwen.yaml"]) == 0
    capsys.readouterr()
    assert run(["deploy", "systemd", "my qwen.yaml", "--user", "--set", "serve.port=0"]) == 0
    answer = capsys.readouterr()
    assert f'up "{tmp_path}/my qwen.yaml" --no-build --set serve.port=0' in answer.out
    assert "engine" in answer.err and "MemoryMax=" not in answer.out
    options = ["--user", "--set", "serve.port=0", "-o", str(tmp_path)]
    assert run(["deploy", "systemd", "cache/../my qwen.yaml", *options]) == 0
    written = tmp_path / "llamaops-my-qwen.service"
    assert capsys.readouterr().out == f"{written}\n" and written.read_text() == answer.out


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["none.yaml"], 2, "none.yaml"),
    (["p.yaml", "--set", "serve.prt=1"], 78, "did you mean port?"),
    (["p.yaml", "--set", "engine.env.TOKEN=abc123"], 2, "EnvironmentFile="),
    (["p.yaml", "-o", "missing"], 2, "missing"),
])
def test_deploy_says_what_is_wrong(arguments: list[str], code: int, words: str, capsys: Any) -> None:
    assert run(["init", "p.yaml"]) == 0
    assert run(["deploy", "systemd", *arguments]) == code
    answer = capsys.readouterr()
    assert words in answer.err and "abc123" not in answer.err + answer.out


def test_a_wrong_profile_ends_with_78_and_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text("model: {source: 'path:x', contxt: 3}\nservo: {}\n")
    assert run(["deploy", "systemd", "p.yaml"]) == 78
    message = capsys.readouterr().err
    assert all(words in message for words in ("p.yaml", "model.contxt", "did you mean context?", "did you mean serve?"))
