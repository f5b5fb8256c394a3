"""The load generator: one asyncio protocol per request, stamped as bytes arrive and decoded after the run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import httptools

from llamaops.core.timing import Piece, Raw, Timing, read_timing
from llamaops.core.workload import Ask, Workload, asks, warmup_asks

Api = Literal["chat", "completions"]
_STAGGER_S = 0.001  # between the first requests of a closed loop: at once, they would queue in the generator itself
_PAUSE_S = 0.1  # after a failure: a closed loop on a dead server would spin
clock = time.perf_counter
"""CLOCK_MONOTONIC on Linux: comparable between processes."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go and how they are put. ``path`` is what stands before ``/v1``; ``fixed_length`` sends
    ``ignore_eos``, an extension of llama-server and vLLM that makes answers as long as asked for."""

    host: str
    port: int
    tls: bool = False
    path: str = ""
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api: Api = "chat"
    fixed_length: bool = True
    timeout_s: float | None = None

    @property
    def authority(self) -> str:
        """Return host and port as a URL has them: an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What a run gave. The window lasts from the start until the last answer of it ended, ``began`` on `clock`."""

    timings: tuple[Timing, ...]
    began: float
    window_s: float


class Stream(asyncio.Protocol):
    """One request and its answer, with the time of each piece of body; ``finished`` is done when nothing more comes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._now = 0.0
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.connected = 0.0
        self.ended = 0.0
        self.status: int | None = None
        self.pieces: list[Piece] = []
        self.failure: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connected = clock()
        self._transport = transport  # type: ignore[assignment]  # a stream protocol is given a stream transport
        transport.write(self._request)  # type: ignore[attr-defined]  # the same

    def data_received(self, data: bytes) -> None:
        self._now = clock()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._end(f"not http: {exc}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._now = clock()
        self._end(f"disconnected: {exc or 'the server closed the connection early'}")

    def close(self) -> None:
        """Drop the connection; an answer under way is cancelled by this."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self, failure: str | None) -> None:
        if not self.finished.done():
            self.ended, self.failure = self._now, failure
            self.finished.set_result(None)

    # --- httptools callbacks

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.pieces.append((self._now, data))

    def on_message_complete(self) -> None:
        self._end(None)


def request_bytes(server: Server, ask: Ask) -> bytes:
    """Return the whole HTTP request of one ask: greedy, streamed, with usage."""
    body: dict[str, object] = {"max_tokens": ask.max_tokens, "temperature": 0, "stream": True,
                               "stream_options": {"include_usage": True}}
    if server.fixed_length:
        body["ignore_eos"] = True
    if server.model:
        body["model"] = server.model
    if server.api == "chat":
        body["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        body["prompt"] = ask.prompt
    data = json.dumps(body).encode()
    target = f"{server.path}/v1/{'chat/completions' if server.api == 'chat' else 'completions'}"
    head = [f"POST {target} HTTP/1.1", f"Host: {server.authority}", "Content-Type: application/json",
            f"Content-Length: {len(data)}", "Accept: text/event-stream", "Connection: close"]
    if server.api_key:
        head.append(f"Authorization: Bearer {server.api_key}")
    return "\r\n".join([*head, "", ""]).encode() + data


async def run_load(server: Server, workload: Workload, on_done: Callable[[int], None] = lambda _count: None) -> LoadRun:
    """Put a workload on a server and return every request's timing, in the order sent.

    ``on_done`` is told how many requests have ended, warm-up not counted. Failures are in the timings, never raised.
    """
    context = ssl.create_default_context() if server.tls else None
    send = _Sender(server, context)
    for ask in warmup_asks(workload):
        await send(ask, clock())
    send.on_done = on_done
    send.raws.clear()
    requests = asks(workload)
    with _no_collector():
        began = clock()
        if workload.rate is not None:
            await _open_loop(send, requests, began)
        else:
            await _closed_loop(send, requests, workload, began)
    raws = sorted(send.raws, key=lambda raw: raw.index)
    ended = max((raw.ended for raw in raws), default=began)
    return LoadRun(tuple(read_timing(raw) for raw in raws), began, ended - began)


class _Sender:
    """Sends one request and keeps what came."""

    def __init__(self, server: Server, context: ssl.SSLContext | None) -> None:
        self._server, self._context = server, context
        self.raws: list[Raw] = []
        self.on_done: Callable[[int], None] = lambda _count: None

    async def __call__(self, ask: Ask, due: float) -> bool:
        """Send ``ask`` now and tell whether an answer came; ``due`` is when it should have gone."""
        request, begun = request_bytes(self._server, ask), clock()
        stream = Stream(request)
        try:
            async with asyncio.timeout(self._server.timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: stream, self._server.host, self._server.port, ssl=self._context)
                await stream.finished
            failure, ended = stream.failure, stream.ended
        except TimeoutError:
            failure, ended = f"timeout: {self._server.timeout_s:g} s", clock()
        except OSError as exc:
            failure, ended = f"connect: {exc.strerror or exc}", clock()
        finally:
            stream.close()
        self.raws.append(Raw(ask.index, ask.max_tokens, due, begun, stream.connected or None, ended, stream.status,
                             stream.pieces, failure))
        self.on_done(len(self.raws))
        return failure is None


async def _closed_loop(send: _Sender, requests: Iterator[Ask], workload: Workload, began: float) -> None:
    deadline = began + workload.duration_s if workload.duration_s is not None else float("inf")

    async def client(number: int) -> None:
        await asyncio.sleep(number * _STAGGER_S)
        while clock() < deadline and (ask := next(requests, None)) is not None:
            if not await send(ask, clock()):
                await asyncio.sleep(_PAUSE_S)

    await _together([client(number) for number in range(workload.concurrency)])


async def _open_loop(send: _Sender, requests: Iterator[Ask], began: float) -> None:
    async def arrive(ask: Ask) -> None:
        due = began + ask.at_s
        await asyncio.sleep(due - clock())
        await send(ask, due)

    await _together([arrive(ask) for ask in requests])


async def _together(jobs: list[Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(_await(job))


async def _await(job: Awaitable[None]) -> None:
    await job


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Keep the garbage collector from stopping the clock in the middle of a run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
