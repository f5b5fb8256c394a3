"""Ctrl-C during the build, the download, the quantization and the load: nothing half-written, no process left."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from running import LLAMAOPS, QUICKSTART, await_true, descendants, gone

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def fresh(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Return an environment with an empty cache."""
    return env | {"LLAMAOPS_CACHE": str(tmp_path / "cache")}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts llamaops; whatever still runs at the end is killed and fails the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*args: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with (tmp_path / "stderr").open("wb") as stderr:
            started.append(subprocess.Popen([*LLAMAOPS, *args], env=env, stdout=subprocess.DEVNULL, stderr=stderr,
                                            start_new_session=True))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            pytest.fail("llamaops did not end")


def interrupt_when(process: subprocess.Popen[bytes], name: str, number: signal.Signals) -> list[psutil.Process]:
    """Send a signal once a descendant of that name runs; return all the descendants there were."""

    def begun() -> list[psutil.Process]:
        assert process.poll() is None, f"llamaops ended before {name} ran"
        family = descendants(process.pid)
        names = []
        for child in family:
            try:
                names.append(f"{child.name()} {' '.join(child.cmdline())}")
            except psutil.Error:
                continue
        return family if any(name in text for text in names) else []

    family: list[psutil.Process] = await_true(begun, within=120, what=f"{name} runs")
    process.send_signal(number)
    return family


def files(folder: str) -> list[Path]:
    return [p for p in Path(folder).rglob("*") if p.is_file()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_during_the_load(start: Start, env: dict[str, str], model_path: str, number: signal.Signals, code: int) -> None:
    process = start("up", str(QUICKSTART), "--set", "serve.port=0", env=env)
    family = interrupt_when(process, "llama-server", number)
    assert process.wait(60) == code
    assert gone(family)


def test_during_the_download(start: Start, fresh: dict[str, str]) -> None:
    process = start("model", "pull", str(QUICKSTART), env=fresh)
    family = interrupt_when(process, "pip", signal.SIGINT)
    assert process.wait(60) == 130
    await_true(lambda: gone(family), what="pip is gone")
    assert not [p for p in files(fresh["LLAMAOPS_CACHE"]) if p.suffix in (".gguf", ".whl")]


def test_during_the_quantization(start: Start, fresh: dict[str, str], tmp_path: Path, engine_path: str,
                                 model_path: str) -> None:
    profile = tmp_path / "q.yaml"
    profile.write_text(f"model: {{source: 'path:{model_path}', quantize: Q3_K_M}}\nengine: {{path: {engine_path}}}\n")
    process = start("up", str(profile), "--set", "serve.port=0", env=fresh)
    family = interrupt_when(process, "llama-quantize", signal.SIGINT)
    assert process.wait(60) == 130
    await_true(lambda: gone(family), what="llama-quantize is gone")
    assert not [p for p in files(fresh["LLAMAOPS_CACHE"]) if p.suffix == ".gguf" or p.stat().st_size > 1 << 20]
    again = subprocess.run([*LLAMAOPS, "model", "pull", str(profile)], env=fresh, stdout=subprocess.PIPE, text=True,
                           timeout=120)
    assert again.returncode == 0
    assert Path(again.stdout.strip()).stat().st_size > 50 << 20


def test_during_the_build(start: Start, fresh: dict[str, str]) -> None:
    process = start("engine", "build", env=fresh)
    family = interrupt_when(process, "cc1plus", signal.SIGINT)
    assert process.wait(60) == 130
    await_true(lambda: gone(family), what="the compilers are gone")
    located = subprocess.run([*LLAMAOPS, "engine", "locate"], env=fresh | {"PATH": "/usr/bin:/bin"}, timeout=120,
                             capture_output=True, text=True)
    assert located.returncode == 69
    assert not list(Path(fresh["LLAMAOPS_CACHE"]).glob("engines/b*"))
