"""What the relay understands of the APIs it carries: who was asked, which event has text, how a failure is said.

Families: OpenAI chat, completions and responses, Anthropic messages, llama-server's own ``/completion``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from llamaops.core.sse import SSEDecoder

Family = Literal["chat", "completions", "native", "responses", "messages"]

# In valid JSON a quote inside a string is escaped, so ``"key":"`` can only be a key with a string value.
_TEXT: dict[Family, re.Pattern[bytes]] = {
    "chat": re.compile(rb'"(?:content|reasoning_content|arguments)"\s*:\s*"[^"]'),
    "completions": re.compile(rb'"text"\s*:\s*"[^"]'),
    "native": re.compile(rb'"content"\s*:\s*"[^"]'),
    "responses": re.compile(rb'"delta"\s*:\s*"[^"]'),
    "messages": re.compile(rb'"(?:text|thinking|partial_json)"\s*:\s*"[^"]'),
}
# How llama-server writes the commonest of them: found several times faster than by the pattern.
_USUAL: dict[Family, bytes] = {
    "chat": b'"content":"', "completions": b'"text":"', "native": b'"content":"', "responses": b'"delta":"',
    "messages": b'"text":"',
}
_FLAT = rb"(\{(?:[^{}]|\{[^{}]*\})*\})"
_USAGE = re.compile(rb'"usage"\s*:\s*' + _FLAT)
_TIMINGS = re.compile(rb'"timings"\s*:\s*' + _FLAT)
_FINISH = re.compile(rb'"(?:finish_reason|stop_reason|stop_type)"\s*:\s*"([a-z_]+)"')
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]+)"')
_TAIL = 64 << 10
_LATE_EVENTS, _LATE_BYTES, _LATE_S = 32, 4096, 1.0


@dataclass(frozen=True, slots=True)
class Ask:
    """What a JSON request says about itself; None where it does not say, or is not JSON."""

    model: str | None
    stream: bool


def read_ask(body: bytes) -> Ask:
    """Read ``model`` and ``stream``; a body that can't be read asks for nothing, and the engine says what is wrong."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return Ask(None, False)
    if not isinstance(value, dict):
        return Ask(None, False)
    model = value.get("model")
    return Ask(model if isinstance(model, str) else None, value.get("stream") is True)


@dataclass(slots=True)
class Counts:
    """Tokens of one answer as the engine counted them; None where it did not say."""

    prompt: int | None = None
    output: int | None = None
    finish: str | None = None

    def learn(self, text: bytes) -> None:
        """Take what ``text`` (an answer or an event's data) says; later words replace earlier ones."""
        for usage in _objects(_USAGE, text):
            self._set(usage.get("prompt_tokens", usage.get("input_tokens")),
                      usage.get("completion_tokens", usage.get("output_tokens")))
        if self.output is None:
            for timings in _objects(_TIMINGS, text):
                self._set(_sum(timings.get("prompt_n"), timings.get("cache_n")), timings.get("predicted_n"))
        if found := _FINISH.findall(text):
            self.finish = found[-1].decode()

    def _set(self, prompt: object, output: object) -> None:
        if isinstance(prompt, int) and prompt > 0:
            self.prompt = prompt
        if isinstance(output, int):
            self.output = output


def _sum(first: object, second: object) -> int | None:
    return first + (second if isinstance(second, int) else 0) if isinstance(first, int) else None


def _objects(pattern: re.Pattern[bytes], text: bytes) -> list[dict[str, Any]]:
    found = []
    for raw in pattern.findall(text):
        try:
            found.append(json.loads(raw))
        except ValueError:
            continue
    return found


class StreamReader:
    """Follows one stream beside the relay: when text came, and what the engine counted.

    ``gap`` is called with the seconds between two events with text. What came is read some events late (bounded by
    count, bytes and time) and several at once, which costs a quarter of reading each as it passes; the times are
    those of `feed`, and every question is answered as if nothing were late. Streams that began together catch up at
    different times: all in one moment, they would delay what comes just then.
    """

    __slots__ = ("_decoder", "_first_text_at", "_gap", "_head", "_last", "_last_text_at", "_late", "_text", "_texts",
                 "_usual", "_wait")

    def __init__(self, family: Family, gap: Callable[[float], None]) -> None:
        self._decoder = SSEDecoder()
        self._text = _TEXT[family]
        self._usual = _USUAL[family]
        self._gap = gap
        self._late: list[tuple[bytes, float]] = []
        self._head = b""  # the first event without text: messages counts the prompt there, responses says its id
        self._last = b""  # those since: counts and finish are in the last of them
        self._first_text_at: float | None = None
        self._last_text_at = 0.0
        self._texts = 0
        self._wait = 0  # so many pieces may be late; 0: nothing has come yet

    def feed(self, chunk: bytes, now: float) -> None:
        """Take the next bytes of the stream, received at ``now`` (seconds)."""
        late = self._late
        late.append((chunk, now))
        if not self._wait:
            self._wait = 1 + int(now * 1e6) % _LATE_EVENTS
        if len(late) >= self._wait or len(chunk) > _LATE_BYTES or now - late[0][1] > _LATE_S:
            self._catch_up()
            self._wait = _LATE_EVENTS

    def _catch_up(self) -> None:
        for chunk, now in self._late:
            for event in self._decoder.feed(chunk):
                self._take(event.data, now)
        self._late.clear()

    def _take(self, data: bytes, now: float) -> None:
        if not self._has_text(data):
            self._head = self._head or data[:_TAIL]
            self._last = (self._last + b"\n" + data)[-_TAIL:]
            return
        if self._first_text_at is None:
            self._first_text_at = now
        else:
            self._gap(now - self._last_text_at)
        self._last_text_at = now
        self._texts += 1

    def _has_text(self, data: bytes) -> bool:
        at = data.find(self._usual)
        if at >= 0 and data[at + len(self._usual)] != 0x22:
            return True
        return self._text.search(data) is not None

    @property
    def at_boundary(self) -> bool:
        """Whether a comment may be put into the stream now."""
        self._catch_up()
        return self._decoder.at_boundary

    def text_times(self) -> tuple[float, float] | None:
        """Return when the first and the last event with text came, on the clock of `feed`; None without text."""
        self._catch_up()
        return None if self._first_text_at is None else (self._first_text_at, self._last_text_at)

    @property
    def texts(self) -> int:
        """How many events with text there have been; ask `text_times` first for those that are still late."""
        return self._texts

    def counts(self) -> Counts:
        """Return what the stream has said so far about tokens and its end."""
        self._catch_up()
        counts = Counts()
        counts.learn(self._head)
        counts.learn(self._last)
        return counts

    def failure(self, family: Family, message: str, code: str) -> bytes:
        """Return the bytes that end this stream with an error: the half event closed, then the family's error event."""
        closing = b"" if self.at_boundary else b"\n\n"
        found = _RESPONSE_ID.search(self._head)
        return closing + failure_event(family, message, code, found.group(1).decode() if found else None)


class BodyReader:
    """Keeps enough of an answer that is not a stream to find its counts: the start and the end."""

    __slots__ = ("_head", "_tail")

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the answer."""
        if not self._head:
            self._head = chunk[:_TAIL]
        else:
            self._tail = (self._tail + chunk)[-_TAIL:]

    def counts(self) -> Counts:
        """Return what the answer says about tokens and its end."""
        counts = Counts()
        counts.learn(self._head + self._tail)
        return counts


def error_body(message: str, kind: str, code: str, param: str | None = None) -> bytes:
    """Return an OpenAI-shaped error: ``{"error": {message, type, code, param}}``."""
    return _dump({"error": {"message": message, "type": kind, "code": code, "param": param}})


def error_message(body: bytes) -> str | None:
    """Return the message of an OpenAI-shaped error, None where ``body`` is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def failure_event(family: Family, message: str, code: str, response_id: str | None = None) -> bytes:
    """Return the one event that tells a stream of ``family`` that it failed. No ``[DONE]`` follows: that is success."""
    if family == "messages":
        data = _dump({"type": "error", "error": {"type": "api_error", "message": message}})
        return b"event: error\ndata: " + data + b"\n\n"
    if family == "responses":
        error = {"code": "server_error", "message": message}
        response = {"id": response_id, "object": "response", "status": "failed", "error": error, "output": list[str]()}
        return b"event: response.failed\ndata: " + _dump({"type": "response.failed", "response": response}) + b"\n\n"
    return b"data: " + error_body(message, "server_error", code) + b"\n\n"


def _dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
