"""One HTTP/1.1 exchange with the engine over its socket, with back-pressure both ways; closing it cancels the request.

A connection carries one request: llama-server's HTTP library keeps a thread for every idle connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import httptools

from llamaops.serve.traffic import Endpoint

Headers = list[tuple[bytes, bytes]]
Sink = Callable[[bytes, bytes], bool]
"""Takes a piece of a body, as one chunk of a chunked body and bare; False where it can't just now."""
_HIGH_WATER = 256 << 10  # bytes held for a client that reads slowly before the engine is made to wait


class EngineGone(Exception):
    """The engine did not finish its answer: unreachable, died, was ended, or spoke no HTTP."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of the engine's answer; names in lower case, in the order they came."""

    status: int
    headers: Headers

    def get(self, name: bytes) -> bytes | None:
        """Return the first header of that name."""
        return next((value for key, value in self.headers if key == name), None)


class Exchange(asyncio.Protocol):
    """A request in the engine: write the request, await `head`, then `read` until None."""

    def __init__(self, *, bodiless: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._bodiless = bodiless
        self._status = 0
        self._headers: Headers = []
        self._head: Head | None = None
        self._chunks: list[bytes] = []
        self._held = 0
        self._ended = False
        self._error: EngineGone | None = None
        self._sink: Sink | None = None
        self._between = False  # two chunks of the body: what comes next begins one
        self._woken = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._writing_paused = False
        self._reading_paused = False

    # --- towards the engine

    def write(self, data: bytes) -> None:
        """Send bytes of the request; await `drain` between large pieces."""
        if self._transport is not None and self._error is None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Return when the engine has taken enough of what was written."""
        if self._writing_paused and self._error is None:
            self._writer = self._loop.create_future()
            await self._writer

    def close(self) -> None:
        """End the exchange; a request that is not finished is cancelled by this."""
        if self._transport is not None:
            self._transport.abort()

    def fail(self, reason: str) -> None:
        """End the exchange early: `head` and `read` raise EngineGone with ``reason``."""
        if not self._ended and self._error is None:
            self._error = EngineGone(reason)
            self.close()
            self._wake_reader()

    # --- from the engine

    async def head(self) -> Head | None:
        """Return the answer's head once the engine sent it, or None after `wake`. Raises EngineGone."""
        while self._head is None:
            if self._error is not None:
                raise self._error
            if self._woken:
                self._woken = False
                return None
            await self._wait()
        return self._head

    async def read(self) -> bytes | None:
        """Return the bytes of the body that have come, ``b""`` after `wake`, None at its end. Raises EngineGone."""
        while True:
            if self._chunks:
                return self._take()
            if self._ended:
                return None
            if self._error is not None:
                raise self._error
            if self._woken:
                self._woken = False
                return b""
            await self._wait()

    def divert(self, sink: Sink) -> None:
        """Hand bytes of the body to ``sink`` the moment they come, without a task switch.

        Where it returns False, and whenever older bytes are not read yet, they are kept for `read`.
        """
        self._sink = sink

    def wake(self) -> None:
        """Make a waiting `head` or `read` return without news, so that its caller can look at the clock."""
        self._woken = True
        self._wake_reader()

    def _take(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._held = 0
        if self._reading_paused and self._transport is not None and not self._ended and self._error is None:
            self._reading_paused = False
            self._transport.resume_reading()
        return data

    async def _wait(self) -> None:
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream protocol is given a stream transport

    def data_received(self, data: bytes) -> None:
        # Engines write each event as one chunk, and it nearly always comes alone: it travels on as it is, unparsed.
        if self._between and self._sink is not None:
            end = data.find(b"\r\n")
            size = len(data) - end - 4
            if (size > 0 and data[:end] == b"%x" % size and data[-2:] == b"\r\n" and not self._chunks
                    and self._sink(data, data[end + 2 : -2])):
                return
        self._between = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self.fail(f"the engine's answer is not HTTP: {exc}")
        except httptools.HttpParserUpgrade:
            self.fail("the engine wants to switch protocols")
        else:
            self._between = self._between and not self._ended and data[-2:] == b"\r\n"
            if self._chunks or self._ended or self._sink is None:
                self._wake_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head is not None and self._until_close(self._head) and exc is None:
            self._ended = True
        if not self._ended and self._error is None:
            self._error = EngineGone("the engine closed the connection before its answer was complete")
        self._wake_reader()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    @staticmethod
    def _until_close(head: Head) -> bool:
        return head.get(b"content-length") is None and head.get(b"transfer-encoding") is None

    # --- httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue, 103 Early Hints: the answer is still to come
            self._headers = []
            return
        self._head = Head(status, self._headers)
        if self._bodiless:
            self._ended = True

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_body(self, data: bytes) -> None:
        if self._sink is not None and not self._chunks and self._sink(b"%x\r\n%b\r\n" % (len(data), data), data):
            return
        self._chunks.append(data)
        self._held += len(data)
        if self._held > _HIGH_WATER and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._head is not None:
            self._ended = True


async def connect(endpoint: Endpoint, *, bodiless: bool = False) -> Exchange:
    """Open a connection to the engine. ``bodiless``: the answer has no body whatever its headers say (HEAD).

    Raises EngineGone when nobody listens there.
    """
    loop = asyncio.get_running_loop()

    def protocol() -> Exchange:
        return Exchange(bodiless=bodiless)

    try:
        if endpoint.socket is not None:
            _, exchange = await loop.create_unix_connection(protocol, endpoint.socket)
        else:
            _, exchange = await loop.create_connection(protocol, "127.0.0.1", endpoint.port or 0)
    except OSError as exc:
        raise EngineGone(f"the engine can't be reached: {exc.strerror or exc}") from exc
    return exchange


def request_head(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the bytes of a request's head, ended by its blank line."""
    lines = [method, b" ", target, b" HTTP/1.1\r\n"]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)
