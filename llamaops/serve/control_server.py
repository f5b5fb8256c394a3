"""The running instance's side of the control socket; the protocol is told in `llamaops.serve.control`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from llamaops.errors import LlamaopsError, NotPermitted, UsageError

Handler = Callable[[Mapping[str, Any]], Awaitable[Any] | AsyncIterator[Any]]
"""Takes the request and returns the result, or yields the items of a stream."""

_MAX_REQUEST = 1 << 16


async def serve_control(path: Path, handlers: Mapping[str, Handler]) -> asyncio.Server:
    """Answer commands on the UNIX socket ``path`` (made 0600, a stale one replaced) until the server is closed.

    Only this user and root are answered. Hold the instance's lock: an existing socket is taken to be stale.
    """
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # so that there is no moment in which others could connect
    try:
        sock.bind(str(path))
    finally:
        os.umask(before)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await _answer(reader, writer, handlers)
        writer.close()

    return await asyncio.start_unix_server(answer, sock=sock, limit=_MAX_REQUEST)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handlers: Mapping[str, Handler]) -> None:
    try:
        request = await _read_request(reader)  # first, for closing on unread bytes would take the answer away
        if _peer_uid(writer.get_extra_info("socket")) not in (0, os.geteuid()):
            raise NotPermitted("only the user who runs the instance may control it")
        handler = handlers.get(request["command"])
        if handler is None:
            raise UsageError(f"no such command: {request['command']}", why=f"known: {', '.join(sorted(handlers))}")
        await _run(handler(request), reader, writer)
    except LlamaopsError as exc:
        await _send(writer, {"error": {**_parts(exc), "exit_code": exc.exit_code}})


async def _run(
    answering: Awaitable[Any] | AsyncIterator[Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    if isinstance(answering, AsyncIterator):
        work = asyncio.ensure_future(_stream(answering, writer))
        gone = asyncio.ensure_future(reader.read(1))  # a client that follows sends nothing more, so this is its end
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(results[0], LlamaopsError):
            raise results[0]
    else:
        await _send(writer, {"result": await answering})


async def _stream(items: AsyncIterator[Any], writer: asyncio.StreamWriter) -> None:
    async for item in items:
        await _send(writer, {"item": item})
    await _send(writer, {"result": None})


async def _read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    try:
        async with asyncio.timeout(10):
            line = await reader.readline()
        request = json.loads(line)
    except (ValueError, TimeoutError) as exc:
        raise UsageError("the request is not one line of JSON") from exc
    if not isinstance(request, dict) or not isinstance(request.get("command"), str):
        raise UsageError('the request is not an object with a "command"')
    return request


async def _send(writer: asyncio.StreamWriter, document: Mapping[str, Any]) -> None:
    writer.write(json.dumps(document, ensure_ascii=False).encode() + b"\n")
    await writer.drain()


def _peer_uid(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _parts(exc: LlamaopsError) -> dict[str, str | None]:
    return {"what": exc.what, "where": exc.where, "why": exc.why, "fix": exc.fix, "detail": exc.detail}
