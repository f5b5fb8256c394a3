"""The watch on the event loop, in a loop that really hangs."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llamaops.serve import notify
from llamaops.serve.loopwatch import LoopWatch


def block_until(met: Callable[[], object]) -> None:
    """Hold the event loop until a thread has seen something."""
    while not met():
        time.sleep(0.01)


def test_a_hang_is_named_while_it_lasts_and_its_end_told(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch(interval_s=0.02, hang_s=0.1)

    async def body() -> None:
        watching = asyncio.create_task(watch.run())
        await asyncio.sleep(0)
        block_until(lambda: watch.hangs)  # a loop that nobody watches would stand here for ever
        block_until(lambda: watch.longest_s > 0.2)
        while not any("turns again" in line for line in caplog.messages):
            await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    with caplog.at_level(logging.WARNING, "llamaops.relay"):
        asyncio.run(body())
    assert "hangs in" in caplog.messages[0]
    assert "block_until" in caplog.messages[0]
    told = watch.tell()
    assert told["longest_hang_s"] > 0.2
    assert "test_loopwatch.py" in told["last_hang"]["where"]
    assert [m.name for m in watch.collect()] == ["llamaops_loop_lag_seconds", "llamaops_loop_hangs"]
    assert [t.name for t in threading.enumerate() if t.name == "loop-watch"] == []


def test_the_watchdog_is_not_fed_while_the_loop_hangs(tmp_path: Path) -> None:
    watch = LoopWatch(interval_s=0.05, hang_s=0.3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "40000"}  # fed every 20 ms

        def empty() -> int:
            count = 0
            while True:
                try:
                    manager.recv(100, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return count
                count += 1

        async def body() -> None:
            tasks = [asyncio.create_task(watch.run()), asyncio.create_task(notify.feed_watchdog(environ, 1))]
            fed = 0
            while fed < 3:
                await asyncio.sleep(0.01)
                fed += empty()
            empty()
            block_until(lambda: watch.hangs)
            assert empty() == 0
            while not empty():
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(body())
