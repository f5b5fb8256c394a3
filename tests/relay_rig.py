"""A relay between raw client sockets and an engine that follows a script, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from llamaops.serve.app import App, RelayConfig, make_app, make_server
from llamaops.serve.traffic import Endpoint, Traffic, Unready

CONFIG = RelayConfig("smol", ("smol-chat", "gpt-x"), slots=4, ping_interval_s=None)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: *\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\nKeep-Alive: timeout=5\r\n\r\n"
)


def run(main: Coroutine[Any, Any, None], within: float = 120) -> None:
    """Run a test on the loop that the product uses; a hang fails."""

    async def bounded() -> None:
        async with asyncio.timeout(within):
            await main

    uvloop.run(bounded())


def chunk(data: bytes) -> bytes:
    """Return ``data`` as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def json_answer(body: bytes, status: str = "200 OK") -> bytes:
    """Return a whole JSON answer of the engine."""
    head = f"HTTP/1.1 {status}\r\nServer: llama.cpp\r\nContent-Type: application/json; charset=utf-8\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


@dataclass
class EngineRequest:
    """What the engine got, and its end of the connection."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def get(self, name: bytes) -> list[bytes]:
        """Return the values of a header, lower-case name."""
        return [value for key, value in self.headers if key.lower() == name]

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Return when the relay has closed the connection."""
        with contextlib.suppress(ConnectionError):
            assert await self.reader.read() == b"", "the relay sent more than its request"

    def die(self) -> None:
        """Break the connection off as a killed process does."""
        self.writer.transport.abort()


Script = Callable[[EngineRequest], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> EngineRequest:
    """Read one HTTP/1.1 request whole."""
    head = await reader.readuntil(b"\r\n\r\n")
    line, *rest = head[:-4].split(b"\r\n")
    headers = [(k, v.strip()) for k, _, v in (h.partition(b":") for h in rest)]
    known = {k.lower(): v for k, v in headers}
    if known.get(b"transfer-encoding") == b"chunked":
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    else:
        body = await reader.readexactly(int(known.get(b"content-length", b"0")))
    return EngineRequest(line, headers, body, reader, writer)


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool


class Client:
    """A raw connection to the relay."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read an answer's head."""
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = raw.strip().split("\r\n")
        return int(line.split()[1]), {k.lower(): v.strip() for k, _, v in (h.partition(":") for h in rest)}

    async def chunk(self) -> bytes:
        """Read one chunk of a chunked body; ``b""`` is its end."""
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """Read a whole answer; ``complete`` is False where it was cut."""
        status, headers = await self.head()
        body, complete = b"", True
        try:
            if bodiless:
                pass
            elif headers.get("transfer-encoding") == "chunked":
                while data := await self.chunk():
                    body += data
            elif "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            complete = False
        return Answer(status, headers, body, complete)

    async def closed(self) -> bool:
        """Return whether the relay closes the connection without another byte."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read() == b""
        return True

    def close(self) -> None:
        """Close the connection."""
        self.writer.close()


@dataclass
class Rig:
    """The parts under test."""

    app: App
    traffic: Traffic
    port: int
    script: Script
    state: Endpoint | Unready
    requests: list[EngineRequest] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    awaited: asyncio.Future[None] | None = None

    def coming(self) -> asyncio.Future[None] | None:
        """Be the relay's backend while an engine is on its way."""
        return None if self.awaited is None or self.awaited.done() else self.awaited

    def endpoint(self) -> Endpoint | Unready:
        """Be the relay's backend."""
        return self.state

    async def connect(self) -> Client:
        """Open a client connection."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26))
        self.clients.append(client)
        return client

    async def ask(self, data: bytes) -> Client:
        """Open a connection and send ``data``."""
        client = await self.connect()
        await client.send(data)
        return client

    async def post(self, path: str = "/v1/chat/completions", body: bytes = b"{}", *headers: str) -> Client:
        """Send a POST with a JSON body."""
        lines = "".join(f"{h}\r\n" for h in headers)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{lines}"
        return await self.ask(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    async def get(self, path: str, *headers: str, method: str = "GET") -> Client:
        """Send a request without a body."""
        lines = "".join(f"{h}\r\n" for h in headers)
        return await self.ask(f"{method} {path} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())

    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one engine connection by the script."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            request = await read_request(reader, writer)
            self.requests.append(request)
            await self.script(request)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.tasks.discard(task)
            writer.close()


@contextlib.asynccontextmanager
async def rig(script: Script, config: RelayConfig = CONFIG, /, *, limits: dict[str, Any] | None = None,
              **changes: Any) -> AsyncIterator[Rig]:
    """Serve with an engine that follows ``script``; ``changes`` are fields of the configuration."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as sock:
        path = str(Path(folder) / "engine.sock")
        traffic = Traffic()
        parts = Rig(None, traffic, 0, script, Endpoint(path, None, 1))  # type: ignore[arg-type]  # set below
        parts.app = make_app(parts, traffic, replace(config, **changes), status=dict)
        engine = await asyncio.start_unix_server(parts.follow, path, limit=1 << 26)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        parts.port = sock.getsockname()[1]
        server = make_server(parts.app, **(limits or {}))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0)
        try:
            yield parts
        finally:
            for client in parts.clients:
                client.writer.transport.abort()
            server.should_exit = server.force_exit = True
            await serving
            engine.close()
            for task in tuple(parts.tasks):
                task.cancel()
            while parts.tasks:
                await asyncio.sleep(0)


async def until(check: Callable[[], Any]) -> None:
    """Return when ``check`` is true; the test's own time limit bounds it."""
    while not check():
        await asyncio.sleep(0.001)
