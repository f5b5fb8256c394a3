"""The HTTP server before the relay: uvicorn, with the limits it does not have itself."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from llamaops.core.completions import error_body

_FRESH_S = 1.0
"""How long a connection that was just taken may take to send a request, once no more are taken."""


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """What a connection may do. Sizes in bytes, times in seconds.

    llama-server's HTTP library takes 8 KiB a line and 100 headers: more than that would fail behind us.
    """

    target: int = 8000
    header_count: int = 90
    head_bytes: int = 32 << 10
    connections: int = 2048
    head_s: float = 30.0
    write_stall_s: float = 60.0
    keep_alive_s: int = 75


@dataclass(frozen=True, slots=True)
class _Refused:
    status: int
    message: str
    code: str


_BAD = _Refused(400, "the request is not HTTP/1.1 as RFC 9112 has it", "bad_request")
_LONG_TARGET = _Refused(414, "the request's target is too long", "uri_too_long")
_LARGE_HEAD = _Refused(431, "the request's headers are too large or too many", "headers_too_large")
_LATE_HEAD = _Refused(408, "the request's headers did not come in time", "request_timeout")
_CROWDED = _Refused(503, "too many connections", "too_many_connections")


_LINGER_S = 2.0


class FrontProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol that also bounds heads, connections, and clients that do not read or do not ask."""

    limits = FrontLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._refused = _BAD
        self._answering: RequestResponseCycle | None = None
        self._held = b""  # pipelined requests that are not parsed yet
        self._deaf = False  # the rest of what comes is not read for its meaning
        self._refusing: asyncio.TimerHandle | None = None
        self._head_bytes = self._head_count = 0
        self._stall: _Stall | None = None
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(self.limits.head_s, self._head_late)
        if len(self.connections) > self.limits.connections:
            self._refuse(_CROWDED)

    @property
    def is_fresh(self) -> bool:
        """Whether no request has come yet."""
        return self.cycle is None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._refusing is not None:
            self._refusing.cancel()
        # uvicorn tells only the last request of a pipeline that its client has gone.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.message_event.set()
            _line(self._answering).lose()
        self.resume_writing()
        super().connection_lost(exc)

    # --- the head of a request

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._deaf:
            return
        if self.pipeline:
            self._hold(data)
            return
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn stops reading here, and would not notice that the client has gone
        # One endless header line is collected inside the parser before any callback sees it.
        if self._head_timer is not None and self._head_bytes > self.limits.head_bytes + self.limits.target:
            self._refuse(_LARGE_HEAD)

    def _hold(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > self.limits.head_bytes:
            self.flow.pause_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held and not self.pipeline:
            held, self._held = self._held, b""
            self.data_received(held)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_s, self._head_late)
            self._head_bytes = 0
        self._head_count = self.limits.header_count
        super().on_message_begin()
        extensions: dict[str, Any] = {"llamaops": _Line(self.transport)}
        self.scope["extensions"] = extensions

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.target:
            self._reject(_LONG_TARGET)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_count -= 1
        if self._head_count < 0 or len(value) > self.limits.target:
            self._reject(_LARGE_HEAD)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()
        _line(self.cycle).carry(self.cycle)
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _until_close(self.cycle)  # type: ignore[method-assign, assignment]  # HTTP/1.0 has no chunks

    def _reject(self, refused: _Refused) -> None:
        self._refused = refused
        raise ValueError(refused.message)  # the parser stops and uvicorn calls send_400_response

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            self._refuse(_LATE_HEAD)
        else:
            self.transport.close()

    # --- refusals before there is a request

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refused)

    def _refuse(self, refused: _Refused) -> None:
        """Answer and close; what was asked before on this connection is answered first."""
        self._stop_head_timer()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive = False  # it has all it needs: its answer is the last on this connection
                self._deaf = True
                return
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
            _line(cycle).lose()  # the application must not add to the answer below
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
        body = error_body(refused.message, "invalid_request_error", refused.code)
        self.transport.write(
            STATUS_LINE[refused.status] + b"content-type: application/json; charset=utf-8\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        self._deaf = True
        # Closing on unread bytes resets the connection, and the client would lose the answer: let it read first.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._refusing = self.loop.call_later(_LINGER_S, self.transport.abort)

    # --- a client that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = _Stall(self.transport, self.limits.write_stall_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.stop()
            self._stall = None


class _Line:
    """One request's connection as `call.Line` has it."""

    __slots__ = ("_cycle", "abort", "on_lost", "push")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.abort = transport.abort
        self.on_lost: Callable[[], None] | None = None

    def carry(self, cycle: RequestResponseCycle) -> None:
        """Belong to this request."""
        self._cycle, self.push = cycle, _push(cycle)

    @property
    def lost(self) -> bool:
        return self._cycle.disconnected

    def lose(self) -> None:
        """Tell the application that its client has gone."""
        self._cycle.disconnected = True
        if self.on_lost is not None:
            self.on_lost()

    def whole_body(self) -> bytes | None:
        if self._cycle.more_body:
            return None
        body, self._cycle.body = bytes(self._cycle.body), bytearray()
        self._cycle.flow.resume_reading()  # so that a client that goes away is noticed
        return body


def _push(cycle: RequestResponseCycle) -> Callable[[bytes], bool]:
    """Return a way to write framed chunks past ``send``: no coroutine and no message for each token."""
    flow, write = cycle.flow, cycle.transport.write

    def push(framed: bytes) -> bool:
        if flow.write_paused or not cycle.chunked_encoding or cycle.disconnected:
            return False
        write(framed)
        return True

    return push


def _line(cycle: RequestResponseCycle) -> _Line:
    extensions: dict[str, Any] = cycle.scope["extensions"]
    line: _Line = extensions["llamaops"]
    return line


class _Stall:
    """Drops a connection whose unsent bytes did not become fewer for ``limit`` seconds: its slot is wanted."""

    def __init__(self, transport: asyncio.Transport, limit: float) -> None:
        self._transport = transport
        self._limit = limit
        self._arm()

    def _arm(self) -> None:
        self._unsent = self._transport.get_write_buffer_size()
        self._handle = asyncio.get_running_loop().call_later(self._limit, self._look)

    def _look(self) -> None:
        if self._transport.get_write_buffer_size() >= self._unsent:
            self._transport.abort()
        else:
            self._arm()

    def stop(self) -> None:
        self._handle.cancel()


def _until_close(cycle: RequestResponseCycle) -> Callable[[Any], Any]:
    """Return a ``send`` that ends a body of unknown length by closing, for clients of HTTP/1.0."""
    endless = False

    async def send(message: Any) -> None:
        nonlocal endless
        if message["type"] == "http.response.start":
            endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", []))
            if endless:
                cycle.chunked_encoding = False
        elif endless:
            more: bool = message.get("more_body", False)
            cycle.expected_content_length = (1 << 62) if more else len(message.get("body", b""))
        await RequestResponseCycle.send(cycle, message)

    return send


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: whoever runs it decides when ``should_exit`` is set."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def make_way(self) -> None:
        """Take no more connections, and end as with ``should_exit`` once those just taken have sent a request.

        Sockets given to `serve` are closed; a duplicate goes on queueing what connects.
        """
        for server in self.servers:
            server.close()
        until = time.monotonic() + _FRESH_S
        while time.monotonic() < until and any(  # noqa: ASYNC110 - uvicorn has no event for it
                isinstance(c, FrontProtocol) and c.is_fresh for c in self.server_state.connections):
            await asyncio.sleep(0.01)
        self.should_exit = True


def make_server(app: Any, limits: FrontLimits, tls: ssl.SSLContext | None = None) -> Server:
    """Return a server for ``app``, https where ``tls`` is given; run ``await server.serve(sockets=[sock])``."""
    protocol = type("FrontProtocol", (FrontProtocol,), {"limits": limits})
    config = uvicorn.Config(
        app, http=protocol, ws="none", lifespan="off", interface="asgi3", log_config=None, access_log=False,
        proxy_headers=False, server_header=False, timeout_keep_alive=limits.keep_alive_s, backlog=2048,
    )
    config.load()
    config.ssl = tls
    return Server(config)
