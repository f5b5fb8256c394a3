"""A supervisor of stand-in engines, and ways to ask them and to wait; whatever a test does, no engine may be left."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamaops.core.engine_life import Status
from llamaops.core.launch import LaunchSpec
from llamaops.core.profile import BackoffSection, SuperviseSection
from llamaops.serve.enginelog import EngineLog
from llamaops.serve.procfs import MARK
from llamaops.serve.supervisor import Supervisor
from llamaops.serve.traffic import Endpoint, Traffic

STUB = Path(__file__).parent / "fakes" / "stub_engine.py"
QUICK = SuperviseSection(start_timeout_s=1.0, stall_timeout_s=0.6, drain_timeout_s=0.5, stop_grace_s=0.3,
                         backoff=BackoffSection(initial_s=0.1, max_s=0.4, reset_after_s=300))


def marked(mark: str) -> list[int]:
    """Return the live processes that carry the mark of a test's engines."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and wanted in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@dataclass
class Rig:
    """A supervisor of stub engines in one folder; ``switches`` are those of the next engine."""

    folder: Path
    switches: list[str] = field(default_factory=list)
    port: int | None = None
    wrappers: tuple[str, ...] = ()
    traffic: Traffic = field(default_factory=Traffic)
    log: EngineLog = field(default_factory=EngineLog)
    statuses: list[Status] = field(default_factory=list)

    @property
    def mark(self) -> str:
        return str(self.folder)

    def launch(self, generation: int) -> LaunchSpec:
        sock = None if self.port else str(self.folder / f"engine-{generation}.sock")
        address = ["--host", sock] if sock else ["--port", str(self.port)]
        argv = (*self.wrappers, sys.executable, "-S", str(STUB), *address, *self.switches)
        return LaunchSpec(argv, dict(os.environ), sock, self.port)

    def with_switches(self, *switches: str) -> Callable[[int], LaunchSpec]:
        other = Rig(self.folder, list(switches), self.port, self.wrappers)
        return other.launch

    def supervisor(self, settings: SuperviseSection = QUICK, **more: Any) -> Supervisor:
        made = Supervisor(self.launch, settings, self.traffic, log=self.log, mark=self.mark, **more)
        made.subscribe(self.statuses.append)
        return made


def drive(work: Callable[[], Awaitable[None]], *, seconds: float = 120) -> None:
    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await work()

    asyncio.run(limited())


async def run_until_stopped(supervisor: Supervisor, body: Callable[[], Awaitable[None]]) -> None:
    running = asyncio.create_task(supervisor.run())
    try:
        await body()
        supervisor.stop("the test is over")
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(met: Callable[[], object]) -> None:
    """Wait for a condition; the test's own time limit ends it."""
    while not met():
        await asyncio.sleep(0.005)


def engine_pid(supervisor: Supervisor) -> int:
    pid = supervisor.status()["pid"]
    assert isinstance(pid, int)
    return pid


def states(supervisor: Supervisor) -> list[str]:
    return [line["to"] for line in supervisor.status()["history"]]


async def get(endpoint: Endpoint, path: str = "/health", body: str = "") -> bytes:
    if endpoint.socket:
        reader, writer = await asyncio.open_unix_connection(endpoint.socket)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    method = "POST" if body else "GET"
    writer.write(f"{method} {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
    try:
        return await reader.read()
    finally:
        writer.close()


async def ask(rig: Rig, supervisor: Supervisor, told: list[str]) -> asyncio.Task[bytes]:
    """Send a generation to the engine as the relay would, with a ticket."""
    endpoint = supervisor.endpoint()
    assert isinstance(endpoint, Endpoint)
    rig.traffic.open(endpoint.generation, told.append)
    return asyncio.create_task(get(endpoint, "/v1/completions", '{"prompt": "x"}'))
