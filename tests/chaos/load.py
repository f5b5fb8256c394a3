"""Clients that ask one request after another and account for each: answered, told why not, or lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE_S = 300.0
"""A request that is not over after this long counts as lost: far beyond any time limit of the profile."""


@dataclass
class Load:
    """``clients`` tasks against ``url``; `pause` and `resume` hold them between two requests.

    ``outcomes`` counts ``answered``, ``told`` (an error answer, or an error event that ends a stream) and ``cut`` (the
    connection was broken off inside a plain answer, which a client can't take for whole); ``lost`` says what was
    neither.
    """

    url: str
    rng: random.Random
    clients: int = 3
    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    during: str = "start"
    in_flight: int = 0

    def __post_init__(self) -> None:
        self._go = asyncio.Event()
        self._http = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=PATIENCE_S,
                                       limits=httpx.Limits(max_keepalive_connections=0),
                                       headers={"connection": "close"})
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self.clients)]
        self._go.set()

    async def close(self) -> None:
        """End the clients once their requests are over."""
        await self.pause()
        await self.abandon()

    async def abandon(self) -> None:
        """End the clients in whatever they do."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    async def pause(self) -> None:
        """Let the requests under way come to their end, and start no more."""
        self._go.clear()
        while self.in_flight:  # each ends within PATIENCE_S
            await asyncio.sleep(0.005)

    def resume(self) -> None:
        """Go on asking."""
        self._go.set()

    async def served(self) -> None:
        """Return once a request that began now, or later, is answered, or one is lost: then nothing may be there."""
        while not self.lost and await self.ask({"prompt": "a", "max_tokens": 1}) != "answered":
            await asyncio.sleep(0.02)

    async def keep_asking(self, body: dict[str, Any]) -> None:
        """Ask one request after the other, until cancelled."""
        while True:
            await self.ask(body)

    async def refusal(self, path: str) -> str:
        """Return the error message of a path that must not answer 200; else an empty text."""
        response = await self._http.get(path)
        return "" if response.status_code == 200 else str(response.json()["error"]["message"])

    async def ask(self, body: dict[str, Any]) -> str:
        """Send one request, count its outcome and return it."""
        with self._counted():
            asked = time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    outcome = await self._ask(body)
            except (httpx.HTTPError, TimeoutError) as exc:
                outcome = f"{type(exc).__name__}: {exc}"
        if outcome in ("answered", "told", "cut"):
            self.outcomes[outcome] += 1
        else:
            self.lost.append(f"{outcome} (after {time.monotonic() - asked:.1f} s, during {self.during}, {body})")
        return outcome

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def _client(self) -> None:
        while True:
            await self._go.wait()
            body = {"prompt": "Once upon a time", "max_tokens": self.rng.choice((1, 1, 2, 4, 24)),
                    "stream": self.rng.random() < 0.5, "ignore_eos": True}
            await asyncio.sleep(0.02 if await self.ask(body) == "answered" else 0.1)

    async def _ask(self, body: dict[str, Any]) -> str:
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            data = b""
            try:
                async for piece in response.aiter_bytes():
                    data += piece
            except httpx.RemoteProtocolError:
                if not body.get("stream"):
                    return "cut"
                raise
        return _read_stream(data) if response.status_code == 200 and body.get("stream") else _read(response, data)


def _read(response: httpx.Response, data: bytes) -> str:
    try:
        document = json.loads(data)
        if response.status_code == 200 and document["choices"]:
            return "answered"
        if response.status_code != 200 and document["error"]["message"]:
            return "told"
    except (ValueError, LookupError, TypeError):
        pass
    return f"status {response.status_code} with {data[:200]!r}"


def _read_stream(data: bytes) -> str:
    events = [event for event in data.split(b"\n\n") if event and not event.startswith(b":")]
    if events and events[-1] == b"data: [DONE]":
        return "answered"
    if events and events[-1].startswith(b'data: {"error"'):
        return "told"
    return f"a stream that just ends: {data[-200:]!r}"
