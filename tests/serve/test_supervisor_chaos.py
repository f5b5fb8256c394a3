"""Random faults under load: service returns, every request is answered or told, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from engine_rig import QUICK, Rig, get, marked, until

from llamaops.errors import EngineFailed
from llamaops.serve.supervisor import Supervisor
from llamaops.serve.traffic import Endpoint

SETTINGS = QUICK.model_copy(update={"start_timeout_s": 5, "stall_timeout_s": 0.5})


class Clients:
    """Clients that ask one after another, as a relay would let them."""

    def __init__(self, rig: Rig, supervisor: Supervisor) -> None:
        self.rig, self.supervisor = rig, supervisor
        self.answered = self.told = self.refused = 0

    async def one(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            endpoint = self.supervisor.endpoint()
            if not isinstance(endpoint, Endpoint):
                self.refused += 1
                continue
            await self.ask(endpoint)

    async def ask(self, endpoint: Endpoint) -> None:
        asking = asyncio.ensure_future(get(endpoint, "/v1/completions", '{"prompt": "x"}'))

        def abort(reason: str) -> None:
            asking.cancel()

        ticket = self.rig.traffic.open(endpoint.generation, abort)
        try:
            answer = await asking
            self.answered += b"200" in answer
            self.told += b"200" not in answer  # a connection that just ends: the relay tells the client
        except (OSError, asyncio.CancelledError) as exc:
            current = asyncio.current_task()
            if isinstance(exc, asyncio.CancelledError) and current and current.cancelling():
                raise
            self.told += 1
        finally:
            self.rig.traffic.close(ticket)


class Chaos:
    """The faults; each ends once it was done to a serving engine."""

    def __init__(self, rig: Rig, supervisor: Supervisor) -> None:
        self.rig, self.supervisor = rig, supervisor

    def strike(self, number: signal.Signals) -> None:
        if pid := self.supervisor.status()["pid"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def kill(self) -> None:
        self.strike(signal.SIGKILL)

    async def crash(self) -> None:
        self.strike(signal.SIGSEGV)

    async def end(self) -> None:
        self.strike(signal.SIGTERM)

    async def freeze(self) -> None:
        self.strike(signal.SIGSTOP)

    async def hiccup(self) -> None:
        self.strike(signal.SIGSTOP)
        await asyncio.sleep(0.1)
        self.strike(signal.SIGCONT)

    async def refuse_the_next_start(self) -> None:
        block = self.rig.folder / "block"
        block.touch()
        self.strike(signal.SIGKILL)
        await until(lambda: self.supervisor.status()["state"] == "back-off")
        block.unlink()

    async def storm_of_reloads(self) -> None:
        await asyncio.gather(*(self.supervisor.replace(self.rig.launch) for _ in range(5)), return_exceptions=True)

    async def failing_reload(self) -> None:
        with contextlib.suppress(EngineFailed):
            await self.supervisor.replace(self.rig.with_switches("--stub-crash"))

    async def death_during_a_reload(self) -> None:
        replacing = asyncio.ensure_future(self.supervisor.replace(self.rig.launch))
        await asyncio.sleep(0.03)
        self.strike(signal.SIGKILL)
        await asyncio.gather(replacing, return_exceptions=True)

    def faults(self) -> list[Callable[[], Awaitable[None]]]:
        return [self.kill, self.crash, self.end, self.freeze, self.hiccup, self.refuse_the_next_start,
                self.storm_of_reloads, self.failing_reload, self.death_during_a_reload]


@pytest.mark.parametrize("seed", [1])
def test_chaos(tmp_path: Path, seed: int) -> None:
    rig = Rig(tmp_path, ["--stub-crash-if", str(tmp_path / "block"), "--stub-delay-s", "0.002"])
    rng = random.Random(seed)

    async def body() -> None:
        supervisor = rig.supervisor(SETTINGS)
        running = asyncio.create_task(supervisor.run())
        clients = Clients(rig, supervisor)
        load = [asyncio.create_task(clients.one()) for _ in range(3)]
        chaos = Chaos(rig, supervisor)
        await supervisor.wait_ready()
        faults = chaos.faults() * 2
        rng.shuffle(faults)
        for fault in faults:
            before = clients.answered
            await fault()
            await until(lambda n=before: clients.answered > n + 3)  # type: ignore[misc]  # mypy can't type the default
            assert not running.done()
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
        assert rig.traffic.in_flight() == 0
        supervisor.stop("enough")
        await running
        assert clients.answered > 50

    asyncio.run(body())
    assert marked(rig.mark) == []
    assert list(tmp_path.glob("*.sock")) == []
    assert [t for t in threading.enumerate() if t.name.startswith("asyncio")] == []
