"""What a rendered unit starts, run as systemd would run it: its words, its variables and nothing else."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from running import LLAMAOPS, QUICKSTART

from llamaops.dirs import find_dirs

pytestmark = pytest.mark.engine


def test_the_unit_serves_reloads_and_stops_with_an_empty_environment(env: dict[str, str], model_path: str) -> None:
    runtime = Path(env["XDG_RUNTIME_DIR"])
    done = subprocess.run([*LLAMAOPS, "deploy", "systemd", QUICKSTART, "--set", "serve.port=0"], env=env,
                          capture_output=True, text=True, timeout=120, check=True)
    unit = dict(re.findall(r"^(\w+)=(.*)$", done.stdout, re.MULTILINE))
    argv = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(unit["ExecStart"].removeprefix(":"))]
    variables = dict(word.split("=", 1) for word in shlex.split(unit.get("Environment", "")))
    variables |= {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "RUNTIME_DIRECTORY": str(runtime / "r"),
                  "STATE_DIRECTORY": str(runtime / "s"), "CACHE_DIRECTORY": str(find_dirs(os.environ).cache),
                  "NOTIFY_SOCKET": str(runtime / "notify")}
    assert "MemoryMax" in unit, "the model is here, so its memory is known"

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(variables["NOTIFY_SOCKET"])
        manager.settimeout(60)
        service = subprocess.Popen(argv, env=variables, stdout=subprocess.DEVNULL)
        try:
            await_state(manager, "READY=1")
            service.send_signal(signal.SIGHUP)
            await_state(manager, "RELOADING=1")
            await_state(manager, "READY=1")
            service.send_signal(signal.SIGTERM)
            await_state(manager, "STOPPING=1")
            assert service.wait(int(unit["TimeoutStopSec"])) == 0
        finally:
            service.kill()
            service.wait()
    (runtime / "notify").unlink()


def await_state(manager: socket.socket, state: str) -> None:
    while state not in manager.recv(4096).decode().splitlines():
        pass
