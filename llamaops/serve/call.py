"""One request on the client's side: its body in, its answer out, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from llamaops.core.completions import error_body
from llamaops.serve.requestlog import Outcome, Record

Headers = list[tuple[bytes, bytes]]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

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
        self.abort: Callable[[], None] = scope["extensions"]["llamaops"]["abort"]
        """Drop the client's connection at once, unsent bytes and all."""
        self.push: Callable[[bytes], bool] = scope["extensions"]["llamaops"]["push"]
        """Write bytes of the body now; False where that would mean to wait, or is no chunked body: use `write`."""

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

    async def whole_body(self, limit: int) -> bytes:
        """Return the body. Raises Refusal (413, 408) and ClientGone."""
        return b"".join([piece async for piece in self.body(limit)])

    @asynccontextmanager
    async def watched(self, upload: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[None]:
        """Inside, a client that goes away ends the block with ClientGone, wherever it waits.

        ``upload``, where given, is run beside the block to take the rest of the body first; what it raises ends the
        block likewise.
        """
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.ensure_future(self._watch(upload))
        fired = False

        def interrupt(_: asyncio.Future[None]) -> None:
            nonlocal fired
            if not watch.cancelled():
                fired = True
                task.cancel()

        watch.add_done_callback(interrupt)
        try:
            yield
        except asyncio.CancelledError:
            if not fired:
                raise
            task.uncancel()
            watch.result()
            raise ClientGone from None
        finally:
            watch.remove_done_callback(interrupt)
            watch.cancel()

    async def _watch(self, upload: Callable[[], Awaitable[None]] | None) -> None:
        if upload is not None:
            await upload()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def too_large(limit: int) -> Refusal:
    """Return the refusal of a body over the cap, naming the cap and its key in the profile."""
    return Refusal(413, f"the request's body is over {limit / (1 << 20):g} MiB, the cap set by serve.max_body_mib",
                   kind="invalid_request_error", code="request_too_large")
