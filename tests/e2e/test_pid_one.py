"""llamaops as the first process of a container: it reaps what others leave, ends on a signal, and all ends with it."""

from __future__ import annotations

import signal
import subprocess

import psutil
import pytest
from running import Running, Up, await_true, descendants, gone

CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
pytestmark = pytest.mark.skipif(subprocess.run([*CONTAINER, "true"], capture_output=True).returncode != 0,
                                reason="not permitted to make a pid namespace")


def first_process(running: Running) -> psutil.Process:
    inner: psutil.Process = psutil.Process(running.process.pid).children()[0]
    return inner


def orphan(of: psutil.Process) -> psutil.Process:
    """Leave a process behind in the container, as a health check or an ``exec`` that ended early would."""
    enter = ["nsenter", "--target", str(of.pid), "--pid", "--mount"]
    subprocess.run([*enter, "sh", "-c", "sleep 3600 & exit"], check=True)
    found: psutil.Process = await_true(lambda: next((p for p in of.children() if p.name() == "sleep"), None), within=30,
                                       what="the orphan belongs to the first process")
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_reaps_orphans_and_ends_on_a_signal(up: Up, number: signal.Signals) -> None:
    running = up(within=CONTAINER)
    inner = first_process(running)
    left = orphan(inner)
    left.kill()
    await_true(lambda: not psutil.pid_exists(left.pid), within=60, what="the orphan is reaped")
    orphan(inner)  # this one lives, and must not keep it from ending
    everybody = descendants(running.process.pid)
    assert {p.name() for p in everybody} >= {"llama-server", "sleep"}
    inner.send_signal(number)
    assert running.process.wait(60) == 0, running.stderr.read_text()
    assert gone(everybody)
