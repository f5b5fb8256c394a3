"""One request on the client's side: its body in, its answer out, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Protocol

from llamaops.core.completions import error_body
from llamaops.serve.bodies import BodyBudget
from llamaops.serve.requestlog import Outcome, Record

Headers = list[tuple[bytes, bytes]]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_ROOM_S = 2.0  # until another body may fit
_BODY_PATIENCE_S = 60.0  # without a byte of the request's body


class Refusal(Exception):
    """An answer of our own with an error status. ``code`` and ``kind`` are OpenAI's words where it has one."""

    def __init__(
        self, status: int, message: str, *, kind: str, code: str, param: str | None = None,
        retry_after_s: float | None = None, outcome: Outcome = "rejected",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.retry_after_s, self.outcome = retry_after_s, outcome

    def headers(self) -> Headers:
        """Return the headers of the answer, without the length."""
        headers = [(b"content-type", b"application/json; charset=utf-8")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, round(self.retry_after_s))))
        if self.status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="llamaops"'))
        return headers

    def body(self) -> bytes:
        """Return the OpenAI-shaped body."""
        return error_body(self.message, self.kind, self.code, self.param)


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class Line(Protocol):
    """The client's connection as far as ASGI does not reach; in the scope's extensions."""

    lost: bool
    """The client has gone, or what it sent can't be followed."""
    on_lost: Callable[[], None] | None
    """Called when ``lost`` becomes true."""

    abort: Callable[[], None]
    """Drop the connection at once, unsent bytes and all."""
    push: Callable[[bytes], bool]
    """Write one chunk, framed already, now; False where that would mean to wait, or in no chunked body."""

    def whole_body(self) -> bytes | None:
        """Return the request's body if all of it is here, and nothing of it was taken."""


class Call:
    """A request and its answer. Everything sent carries ``extra`` headers (request id, CORS)."""

    def __init__(self, scope: Message, receive: Receive, send: Send, record: Record, extra: Headers) -> None:
        self.method: str = scope["method"]
        self.headers: Headers = scope["headers"]
        self.raw_path: bytes = scope["raw_path"]
        self.query: bytes = scope["query_string"]
        client = scope.get("client")
        self.client: str = client[0] if client else ""
        self.record = record
        self.started = False
        self._receive = receive
        self._send = send
        self._extra = extra
        self._held = 0
        self._line: Line = scope["extensions"]["llamaops"]
        self.abort, self.push = self._line.abort, self._line.push

    def header(self, name: bytes) -> bytes | None:
        """Return the first request header of that lower-case name."""
        return next((value for key, value in self.headers if key == name), None)

    # --- the answer

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers."""
        self.started = True
        self.record.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers + self._extra})

    async def write(self, data: bytes) -> None:
        """Send bytes of the body; returns when the client's connection can take more."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Send the last bytes of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.finish(body)

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error of our own."""
        self.record.outcome = refusal.outcome
        self.record.reason = refusal.message
        await self.answer(refusal.status, refusal.headers(), refusal.body())

    # --- the request's body

    async def body(self, limit: int) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises Refusal (413, 408) and ClientGone."""
        length = self.header(b"content-length")
        if length is not None and int(length) > limit:
            raise too_large(limit)
        total = 0
        more = True
        while more:
            message = await self._next()
            piece: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            total += len(piece)
            if total > limit:
                raise too_large(limit)
            if piece:
                yield piece

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout(_BODY_PATIENCE_S):
                message = await self._receive()
        except TimeoutError:
            raise Refusal(408, f"no byte of the request's body came for {_BODY_PATIENCE_S:.0f} s",
                          kind="invalid_request_error", code="request_timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    async def whole_body(self, limit: int, budget: BodyBudget) -> bytes:
        """Return the body, counted in ``budget`` until `release`. Raises Refusal (413, 408, 503) and ClientGone."""
        if (whole := self._line.whole_body()) is not None:
            self._hold(len(whole), limit, budget)
            return whole
        pieces = []
        async for piece in self.body(limit):
            self._hold(len(piece), limit, budget)
            pieces.append(piece)
        return b"".join(pieces)

    def _hold(self, size: int, limit: int, budget: BodyBudget) -> None:
        if self._held + size > limit:
            raise too_large(limit)
        if not budget.take(size, self._held):
            raise Refusal(503, "too many large requests are waiting: there is no room for another body now",
                          kind="server_error", code="bodies_full", retry_after_s=_ROOM_S)
        self._held += size

    def release(self, budget: BodyBudget) -> None:
        """Tell that the body is not held any more; twice is harmless."""
        budget.give_back(self._held)
        self._held = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a client that goes away ends the block with ClientGone, wherever it waits."""
        task = asyncio.current_task()
        assert task is not None
        gone = False

        def interrupt() -> None:
            nonlocal gone
            gone = True
            task.cancel()

        if self._line.lost:
            raise ClientGone
        self._line.on_lost = interrupt
        try:
            yield
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
            raise ClientGone from None
        finally:
            self._line.on_lost = None


def too_large(limit: int) -> Refusal:
    """Return the refusal of a body over the cap, naming the cap and its key in the profile."""
    return Refusal(413, f"the request's body is over {limit / (1 << 20):g} MiB, the cap set by serve.max_body_mib",
                   kind="invalid_request_error", code="request_too_large")
