"""What can't work says so: its own message, its own exit code, at once."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from running import LLAMAOPS, QUICKSTART


def llamaops(*args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LLAMAOPS, *args], env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text("model: {source: 'path:absent.gguf'}\nengine: {build: never}\n")
    return path


def test_every_problem_of_a_profile_at_once(tmp_path: Path, env: dict[str, str]) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("model: {source: 'path:m.gguf', contxt: 1}\n"
                    "placement: {threads: none, nicee: 3}\nserve: {port: 99999}\n")
    done = llamaops("up", str(path), env=env)
    assert done.returncode == 78
    for expected in ("model.contxt", "context", "placement.threads", "placement.nicee", "nice", "serve.port", "65535"):
        assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_profile(env: dict[str, str]) -> None:
    done = llamaops("up", "nowhere.yaml", env=env)
    assert done.returncode == 2
    assert "nowhere.yaml" in done.stderr


def test_missing_model(profile: Path, env: dict[str, str], engine_path: str) -> None:
    done = llamaops("up", str(profile), "--set", "serve.port=0", env=env)
    assert done.returncode == 69
    assert "absent.gguf" in done.stderr


def test_model_that_is_none(profile: Path, env: dict[str, str], engine_path: str) -> None:
    (profile.parent / "absent.gguf").write_bytes(b"<html>404</html>" * 100)
    done = llamaops("up", str(profile), "--set", "serve.port=0", env=env)
    assert done.returncode == 69
    assert "web page" in done.stderr


def test_unreadable_model(profile: Path, env: dict[str, str], engine_path: str) -> None:
    model = profile.parent / "absent.gguf"
    model.write_bytes(b"GGUF")
    model.chmod(0)
    # Root may read anything: give up that right, and nothing else, for this one command.
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
    command = [*LLAMAOPS, "up", str(profile), "--set", "serve.port=0"]
    done = subprocess.run([*drop, *command] if os.geteuid() == 0 else command, env=env, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 69
    assert "Permission denied" in done.stderr


def test_taken_port(env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = llamaops("up", str(QUICKSTART), "--set", f"serve.port={port}", env=env)
    assert done.returncode == 75
    assert str(port) in done.stderr
    assert f"pid {os.getpid()}" in done.stderr


def test_no_engine_and_none_may_be_built(profile: Path, env: dict[str, str], tmp_path: Path) -> None:
    env |= {"LLAMAOPS_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    done = llamaops("up", str(profile), "--set", "serve.port=0", env=env)
    assert done.returncode == 69
    assert "llamaops engine build" in done.stderr


def test_unknown_flag_is_named_before_the_start(env: dict[str, str], engine_path: str, model_path: str) -> None:
    done = llamaops("up", str(QUICKSTART), "--set", "serve.port=0", "--set", "engine.args=['--no-such-flag']", env=env)
    assert done.returncode == 78
    assert "--no-such-flag" in done.stderr
    assert "b11434" in done.stderr


def test_traceback_only_with_debug(env: dict[str, str]) -> None:
    assert "Traceback" in llamaops("--debug", "up", "nowhere.yaml", env=env).stderr


def test_what_the_system_refuses_is_told_without_a_traceback(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*LLAMAOPS, "schema"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, "no room is left to write" in done.stderr) == (75, True), done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "file").touch()
    state = os.environ | {"XDG_STATE_HOME": str(tmp_path / "file" / "state")}
    done = subprocess.run([*LLAMAOPS, "up", str(QUICKSTART)], env=state, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "the system refused" in done.stderr, str(tmp_path) in done.stderr) == (70, True, True)
    assert "Traceback" not in done.stderr


def test_chat_refuses_what_it_can_not_send() -> None:
    for words, says in ((["--temperature", "nan"], "takes a number"), (["--api-key", "é"], "can't be sent")):
        done = subprocess.run([*LLAMAOPS, "chat", *words, "http://127.0.0.1:9", "hi"], capture_output=True, text=True,
                              timeout=120)
        assert (done.returncode, says in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
