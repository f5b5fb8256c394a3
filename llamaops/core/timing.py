"""What one streamed answer tells: when its text came, what the engine counted, how it failed. Seconds on one clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from llamaops.core.sse import SSEDecoder

Piece = tuple[float, bytes]
"""Bytes of an answer's body and when they were received."""


@dataclass(frozen=True, slots=True)
class Raw:
    """One request as the wire showed it. ``failure`` is a kind and, after a colon, what was said; None: all well."""

    index: int
    max_tokens: int
    due: float
    begun: float
    connected: float | None
    ended: float
    status: int | None
    pieces: Sequence[Piece]
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, read. Times are seconds on the run's clock, except where the name says milliseconds.

    ``due`` is when the request should have been sent (an open loop's arrival; a closed loop sends at once); latencies
    count from there. ``text_times`` holds when each event with text came. Token counts are the server's own, None where
    it did not say. ``engine`` is llama-server's ``timings`` object, numbers only.
    """

    index: int
    max_tokens: int
    due: float
    begun: float
    connected: float | None
    ended: float
    text_times: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish: str | None = None
    engine: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds until the first text."""
        return self.text_times[0] - self.due if self.text_times else None

    @property
    def e2e(self) -> float:
        """Seconds until the answer was complete."""
        return self.ended - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive events with text."""
        return [b - a for a, b in pairwise(self.text_times)]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first: the stream's length over the server's count, None where it gave none."""
        if not self.text_times or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.output_tokens - 1)


def read_timing(raw: Raw) -> Timing:
    """Read the events of one answer."""
    answer = _Answer()
    decoder = SSEDecoder()
    for when, data in raw.pieces:
        for event in decoder.feed(data):
            answer.take(event.data, when)
    return Timing(raw.index, raw.max_tokens, raw.due, raw.begun, raw.connected, raw.ended, tuple(answer.text_times),
                  answer.prompt_tokens, answer.output_tokens, answer.finish, answer.engine,
                  _failure(raw, answer))


def _failure(raw: Raw, answer: _Answer) -> str | None:
    if raw.failure is not None:
        return raw.failure
    if raw.status != 200:
        return f"status {raw.status}: {_error_text(b''.join(data for _, data in raw.pieces))}"
    if answer.error is not None:
        return f"error event: {answer.error}"
    if not (answer.finish or answer.done):
        return "incomplete: the stream ended without a finish"
    return None if answer.text_times else "no text: the answer was empty"


def _error_text(body: bytes) -> str:
    try:
        return _message(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:200].decode("utf-8", "replace")


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]


class _Answer:
    """Collects what the events say; a document of an unknown shape says nothing."""

    def __init__(self) -> None:
        self.text_times: list[float] = []
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish: str | None = None
        self.engine: dict[str, float] = {}
        self.error: str | None = None
        self.done = False

    def take(self, data: bytes, when: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return
        if isinstance(document, dict):
            self._read(document, when)

    def _read(self, document: dict[str, Any], when: float) -> None:
        if "error" in document:
            self.error = _message(document["error"])
        for choice in _dicts(document.get("choices")):
            if _has_text(choice):
                self.text_times.append(when)
            if isinstance(finish := choice.get("finish_reason"), str):
                self.finish = finish
        usage, timings = document.get("usage"), document.get("timings")
        if isinstance(timings, dict):
            self.engine = {k: v for k, v in timings.items() if isinstance(v, int | float)}
            self._count(timings.get("prompt_n"), timings.get("predicted_n"))
        if isinstance(usage, dict):
            self._count(usage.get("prompt_tokens"), usage.get("completion_tokens"))

    def _count(self, prompt: object, output: object) -> None:
        if isinstance(prompt, int):
            self.prompt_tokens = prompt
        if isinstance(output, int):
            self.output_tokens = output


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _has_text(choice: dict[str, Any]) -> bool:
    """Tell whether a choice of a chat or completion chunk carries something to show: text, reasoning or a tool call."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text"))
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))
