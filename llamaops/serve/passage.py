"""One request on its way through: the queue, the engine, the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llamaops.core.completions import Ask, BodyReader, StreamReader, error_message
from llamaops.core.explain import Stream
from llamaops.serve.admission import Place, QueueFull
from llamaops.serve.call import Call, Headers, Refusal
from llamaops.serve.engine_client import EngineGone, Exchange, Head, connect, request_head
from llamaops.serve.headers import STREAM_HEADERS, request_headers, response_headers
from llamaops.serve.requestlog import Outcome
from llamaops.serve.routes import Route
from llamaops.serve.silence import SilenceTimer
from llamaops.serve.traffic import Ticket

if TYPE_CHECKING:
    from llamaops.serve.relay import Relay, RelayLimits

_PING = b": ping\n"


class Passage:
    """One request on its way through: the queue, the engine, the answer."""

    def __init__(
        self, relay: Relay, call: Call, route: Route, limits: RelayLimits, ask: Ask, body: bytes | None
    ) -> None:
        self._relay, self._call, self._route, self._limits = relay, call, route, limits
        self._ask, self._body = ask, body
        self._exchange: Exchange | None = None
        self._stream = StreamReader(route.family, relay.metrics.itl.observe) if route.family else None
        self._whole = BodyReader()
        self._streaming = False
        self._sent_at = 0.0
        self._admitted_at: float | None = None
        self._blocked_since: float | None = None
        self._place: Place | None = None
        self._cancelled = False

    def has_id(self, request_id: str) -> bool:
        """Tell whether this request goes by that id."""
        return self._call.record.id == request_id

    def cancel(self) -> bool:
        """Break it off, if the engine works on it."""
        if self._exchange is None:
            return False
        self._cancelled = True
        self._exchange.fail("cancelled by the operator")
        return True

    def seen(self, now: float, turns: Mapping[Place, int]) -> Stream:
        """Return what can be said of this request at ``now``; ``turns`` are those of the places that wait."""
        record, times = self._call.record, self._stream.text_times() if self._stream else None
        begun_at = self._admitted_at
        quiet_since = times[1] if times else begun_at or record.started_at
        return Stream(
            id=record.id, key=record.key, endpoint=record.endpoint, age_s=now - record.started_at,
            phase="queued" if begun_at is None else "decode" if times else "prefill", silent_s=now - quiet_since,
            events=self._stream.texts if self._stream else 0,
            ttft_s=times[0] - record.started_at if times else None,
            blocked_s=now - self._blocked_since if self._blocked_since is not None else 0.0,
            prefill_s=None if begun_at is None else (times[0] if times else now) - begun_at,
            turn=turns.get(self._place) if self._place else None,
        )

    async def run(self) -> None:
        """Carry the request. Raises Refusal before the first byte, ClientGone at any time."""
        place = self._place = self._enter() if self._route.generates else None
        try:
            with self._call.watched():
                if place is not None:
                    await self._wait(place)
                while (coming := self._relay.coming()) is not None:
                    await self._ping_until(coming)
                self._admitted_at = time.monotonic()
                await self._exchange_with_engine()
        except Refusal as refusal:
            if not self._call.started:
                raise
            await self._fail_stream(refusal.message, refusal.code)
        finally:
            if place is not None:
                self._relay.admission.leave(place)
            self._report()

    # --- the queue

    def _enter(self) -> Place:
        key = self._call.record.key or ""
        try:
            return self._relay.admission.enter(key, self._call.client)
        except QueueFull as full:
            what = f"{full.limit} requests wait already" if full.scope == "queue" else \
                f"{full.limit} requests of this key wait already"
            raise Refusal(429, f"the queue is full: {what}", kind="rate_limit_error",
                          code="queue_full" if full.scope == "queue" else "key_limit",
                          retry_after_s=full.retry_after_s) from full

    async def _wait(self, place: Place) -> None:
        if place.admitted.done():
            self._call.record.queue_s = 0.0
            return
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                await self._ping_until(place.admitted)
        except TimeoutError:
            raise Refusal(504, f"no slot came free within {self._limits.queue_timeout_s:g} s (serve.queue.timeout_s)",
                          kind="server_error", code="queue_timeout",
                          retry_after_s=self._relay.admission.retry_after_s()) from None
        finally:
            self._call.record.queue_s = time.monotonic() - place.entered_at

    async def _ping_until(self, end: asyncio.Future[None]) -> None:
        while not end.done():
            await asyncio.wait({end}, timeout=self._limits.ping_interval_s)
            if not end.done():
                await self._ping()

    # --- the engine

    async def _exchange_with_engine(self) -> None:
        endpoint = self._relay.endpoint()
        try:
            exchange = self._exchange = await connect(endpoint, bodiless=self._call.method == "HEAD")
        except EngineGone as gone:
            raise _bad_gateway(str(gone)) from gone
        ticket = self._relay.traffic.open(endpoint.generation, exchange.fail)
        interval = self._limits.ping_interval_s if self._ask.stream else None
        silence = SilenceTimer(interval, lambda: self._sent_at, exchange.wake)
        try:
            await self._ask_engine(exchange)
            await self._answer(exchange, ticket)
        finally:
            silence.stop()
            exchange.close()
            self._relay.traffic.close(ticket)

    async def _ask_engine(self, exchange: Exchange) -> None:
        call = self._call
        target = call.raw_path + b"?" + call.query if call.query else call.raw_path
        exchange.write(request_head(call.method.encode(), target, self._request_headers()))
        if self._body is None:
            await self._upload(exchange)
            return
        exchange.write(self._body)
        self._body = None
        await exchange.drain()
        call.release(self._relay.bodies)

    async def _upload(self, exchange: Exchange) -> None:
        """Pass the body on as it comes. An engine that answers before its end has closed the connection by that."""
        if self._call.method != "POST":
            return
        chunked = self._call.header(b"content-length") is None
        async for piece in self._call.body(self._limits.max_body_bytes):
            exchange.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await exchange.drain()
        if chunked:
            exchange.write(b"0\r\n\r\n")

    def _request_headers(self) -> Headers:
        headers = request_headers(self._call.headers)
        headers.append((b"connection", b"close"))
        if self._body is not None:
            headers.append((b"content-length", b"%d" % len(self._body)))
        elif self._call.method == "POST":
            length = self._call.header(b"content-length")
            headers.append((b"transfer-encoding", b"chunked") if length is None else (b"content-length", length))
        return headers

    # --- the answer

    async def _answer(self, exchange: Exchange, ticket: Ticket) -> None:
        try:
            while (head := await exchange.head()) is None:
                await self._ping()
            await self._begin(exchange, head)
            await self._pump(exchange, ticket)
        except EngineGone as gone:
            self._call.record.outcome = "engine_failed"
            self._call.record.reason = str(gone)
            if not self._call.started:
                raise _bad_gateway(str(gone)) from gone
            if not self._streaming:
                self._call.abort()  # the client must not take a cut answer for a whole one
                return
            await self._fail_stream(str(gone), "engine_died")

    async def _begin(self, exchange: Exchange, head: Head) -> None:
        streaming = (head.get(b"content-type") or b"").startswith(b"text/event-stream")
        if self._call.started:
            if head.status != 200 or not streaming:
                raise await _late_refusal(exchange, head)
            return
        self._streaming = streaming and self._stream is not None
        self._call.record.outcome = _outcome(head.status)
        await self._call.start(head.status, response_headers(head.headers, streaming=streaming))

    async def _pump(self, exchange: Exchange, ticket: Ticket) -> None:
        feed = self._stream.feed if self._streaming and self._stream is not None else self._feed_whole
        traffic, push, clock = self._relay.traffic, self._call.push, time.monotonic

        def forward(framed: bytes, data: bytes) -> bool:
            if not push(framed):
                return False
            self._sent_at = traffic.last_byte_at = now = clock()
            feed(data, now)
            return True

        if self._streaming:
            exchange.divert(forward)
        while (data := await exchange.read()) is not None:
            if not data:
                await self._ping()
                continue
            self._blocked_since, ticket.blocked = clock(), True
            await self._call.write(data)
            self._blocked_since, ticket.blocked = None, False
            self._sent_at = traffic.last_byte_at = now = clock()
            feed(data, now)
        await self._call.finish()

    def _feed_whole(self, chunk: bytes, _now: float) -> None:
        self._whole.feed(chunk)

    async def _ping(self) -> None:
        """Keep a silent stream's client waiting: headers if it has none yet, and a comment between two events."""
        if not self._ask.stream or self._stream is None:
            return
        if not self._call.started:
            self._streaming = True
            await self._call.start(200, STREAM_HEADERS)
        if self._streaming and self._stream.at_boundary:
            await self._call.write(_PING)
        self._sent_at = time.monotonic()

    async def _fail_stream(self, message: str, code: str) -> None:
        assert self._stream is not None and self._route.family is not None
        self._call.record.outcome = "engine_failed"
        self._call.record.reason = message
        await self._call.finish(self._stream.failure(self._route.family, message, code))

    # --- afterwards

    def _report(self) -> None:
        record, stream = self._call.record, self._stream
        if self._cancelled:
            record.outcome = "cancelled"
        counts = stream.counts() if stream is not None and self._streaming else self._whole.counts()
        record.prompt_tokens, record.output_tokens, record.finish = counts.prompt, counts.output, counts.finish
        if stream is not None and (times := stream.text_times()) is not None:
            first, last = times
            record.ttft_s = first - record.started_at
            if last > first and counts.output is not None and counts.output > 1:
                record.tokens_per_s = (counts.output - 1) / (last - first)


def _outcome(status: int) -> Outcome:
    if status >= 500:
        return "engine_failed"
    return "client_error" if status >= 400 else "ok"


def _bad_gateway(reason: str) -> Refusal:
    return Refusal(502, f"the engine did not answer: {reason}", kind="server_error", code="engine_died",
                   outcome="engine_failed")


async def _late_refusal(exchange: Exchange, head: Head) -> Refusal:
    """Return the engine's refusal of a stream whose headers are already with the client."""
    body = b""
    while (chunk := await exchange.read()) is not None and len(body) < 64 << 10:
        body += chunk
    return Refusal(head.status, error_message(body) or f"the engine answered with status {head.status}",
                   kind="invalid_request_error", code="engine_refused", outcome=_outcome(head.status))
