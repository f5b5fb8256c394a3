"""Starting and stopping what the benchmarks measure."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROFILE = str(ROOT / "examples" / "quickstart.yaml")
LLAMAOPS = [str(Path(sys.executable).with_name("llamaops"))]


def ask(*words: str, env: Mapping[str, str] | None = None) -> str:
    """Run llamaops, with the environment of a running instance where given, and return what it prints."""
    return subprocess.run([*LLAMAOPS, *words], check=True, stdout=subprocess.PIPE, text=True, env=env).stdout.strip()


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def up(port: int, **sets: object) -> list[str]:
    """Return the command that serves the quick-start profile with some values set (``model__source`` for dots)."""
    words = {"serve.port": port} | {key.replace("__", "."): value for key, value in sets.items()}
    return [*LLAMAOPS, "up", PROFILE, *(word for k, v in words.items() for word in ("--set", f"{k}={v}"))]


def of_file(engine: str, model: str) -> dict[str, object]:
    """Return the values that make a profile serve a model file with an engine, both given by path."""
    return {"engine__path": engine, "model__source": f"path:{model}", "model__sha256": "null"}


def healthy(port: int, *paths: str) -> bool:
    """Tell whether one of the paths answers 200."""
    for path in paths or ("/readyz", "/health"):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            if sock.recv(64).startswith(b"HTTP/1.1 200"):
                return True
    return False


@contextlib.contextmanager
def serving(argv: Sequence[str], port: int, *, every_s: float = 0.05, user: int | None = None,
            new_session: bool = False) -> Iterator[dict[str, str]]:
    """Run a server from here until it answers, yield its environment, and stop it at the end.

    Its sockets and logs lie in a folder of its own.
    """
    runtime = tempfile.mkdtemp(prefix="llo-")
    if user is not None:
        os.chown(runtime, user, user)
    homes = {"XDG_RUNTIME_DIR": runtime, "XDG_STATE_HOME": runtime} | ({"HOME": runtime} if user is not None else {})
    env = {**os.environ, **homes}
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=new_session)
    try:
        while not healthy(port):
            if process.poll() is not None:
                sys.exit(f"the server ended with {process.returncode}: {' '.join(argv)}")
            time.sleep(every_s)
        yield env
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
        shutil.rmtree(runtime, ignore_errors=True)
