from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from llamaops.serve import notify


@pytest.mark.parametrize("abstract", [False, True])
def test_the_manager_is_told(tmp_path: Path, abstract: bool) -> None:
    address = f"@llamaops-test-{tmp_path.name}-{time.time_ns()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        assert notify.notify({"NOTIFY_SOCKET": address}, *notify.ready("serving\nat :8080"))
        assert manager.recv(4096) == b"READY=1\nSTATUS=serving at :8080"
        assert notify.notify({"NOTIFY_SOCKET": address}, *notify.stopping("SIGTERM"))
        assert manager.recv(4096) == b"STOPPING=1\nSTATUS=SIGTERM"
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        assert notify.notify({"NOTIFY_SOCKET": address}, *notify.reloading())
        first, second = manager.recv(4096).decode().split("\n")
        assert first == "RELOADING=1"
        assert before <= int(second.removeprefix("MONOTONIC_USEC=")) <= before + 5_000_000


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/nowhere/notify"},
                                     {"NOTIFY_SOCKET": "vsock:2:1"}])
def test_nobody_listens(environ: dict[str, str]) -> None:
    assert notify.notify(environ, "READY=1") is False


@pytest.mark.parametrize(("environ", "interval"), [
    ({}, None),
    ({"WATCHDOG_USEC": "30000000"}, 15.0),
    ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, 15.0),
    ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "43"}, None),
    ({"WATCHDOG_USEC": "0"}, None),
    ({"WATCHDOG_USEC": "soon"}, None),
])
def test_watchdog_interval(environ: dict[str, str], interval: float | None) -> None:
    assert notify.watchdog_interval_s(environ, 42) == interval
