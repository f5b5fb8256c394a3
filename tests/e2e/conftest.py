"""The real engine, the real model and a running llamaops for the end-to-end tests.

The engine is found or built, and the model fetched, by llamaops itself, into its ordinary cache: the first run on a
fresh machine takes the minutes that a user's first run takes, later runs none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from running import LLAMAOPS, QUICKSTART, Running, Up, await_true, descendants, gone


@pytest.fixture(scope="session")
def engine_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Find or build the real engine (minutes on a fresh machine)."""
    done = subprocess.run([*LLAMAOPS, "engine", "build"], stdout=subprocess.PIPE, text=True, timeout=3600)
    assert done.returncode == 0
    located = subprocess.run([*LLAMAOPS, "engine", "locate"], stdout=subprocess.PIPE, text=True, timeout=120)
    assert located.returncode == 0
    return located.stdout.strip()


@pytest.fixture(scope="session")
def model_path(engine_path: str) -> str:
    """Fetch the quick-start model."""
    done = subprocess.run([*LLAMAOPS, "model", "pull", str(QUICKSTART)], stdout=subprocess.PIPE, text=True, timeout=900)
    assert done.returncode == 0
    return done.stdout.strip()


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return an environment whose sockets and logs are this test's own; the cache stays the user's."""
    runtime = Path("/tmp") / f"llo-{os.getpid()}-{time.monotonic_ns() % 10**9}"  # short: socket paths hold 107 bytes
    runtime.mkdir(mode=0o700)
    yield os.environ | {"XDG_RUNTIME_DIR": str(runtime), "XDG_STATE_HOME": str(tmp_path / "state"), "NO_COLOR": "1"}
    left = sorted(str(p.relative_to(runtime)) for p in runtime.rglob("*") if p.is_socket())
    shutil.rmtree(runtime)
    assert not left, f"sockets left behind: {left}"


@pytest.fixture
def up(env: dict[str, str], tmp_path: Path, model_path: str) -> Iterator[Up]:
    """Return a function that starts ``llamaops up`` and waits for its URL; it is stopped after the test."""
    started: list[Running] = []

    def start(*args: str, profile: Path = QUICKSTART, ready: bool = True, from_shell: bool = False,
              within: Sequence[str] = ()) -> Running:
        stderr = tmp_path / f"up-{len(started)}.err"
        command = [*within, *LLAMAOPS, "up", str(profile), "--set", "serve.port=0", *args]
        with stderr.open("w") as file:
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=file, text=True,
                                       start_new_session=not from_shell, process_group=0 if from_shell else None)
        running = Running(process, "", stderr, env)
        started.append(running)
        if ready:
            assert process.stdout is not None
            running.url = process.stdout.readline().strip()
            assert running.url.startswith(("http://127.0.0.1:", "https://127.0.0.1:")), stderr.read_text()
        return running

    yield start
    for running in started:
        children = descendants(running.process.pid)
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(60)
        if running.process.poll() is None:
            running.process.kill()
            pytest.fail(f"llamaops did not stop on SIGTERM: {running.stderr.read_text()}")
        assert running.process.stdout is not None
        running.process.stdout.close()
        await_true(lambda c=children: gone(c), what="every child of llamaops is gone")
