"""One line for every request, when it is over."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

_log = logging.getLogger("llamaops.request")

Outcome = Literal["ok", "client_error", "rejected", "engine_failed", "cancelled"]


@dataclass(slots=True)
class Record:
    """What happened to one request. Times are seconds; None where it did not come to that. ``key`` is a key's name."""

    id: str
    method: str
    endpoint: str
    started_at: float
    key: str | None = None
    model: str | None = None
    status: int | None = None
    outcome: Outcome = "ok"
    reason: str | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    tokens_per_s: float | None = None
    finish: str | None = None

    def fields(self) -> dict[str, object]:
        """Return what there is to say, by the names of the log line."""
        pairs = {
            "id": self.id, "method": self.method, "endpoint": self.endpoint, "model": self.model, "key": self.key,
            "status": self.status, "outcome": self.outcome, "queue_ms": _ms(self.queue_s), "ttft_ms": _ms(self.ttft_s),
            "e2e_ms": _ms(self.e2e_s), "prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens,
            "tok_s": None if self.tokens_per_s is None else round(self.tokens_per_s, 2), "finish": self.finish,
            "cancelled": "yes" if self.outcome == "cancelled" else None,
            "reason": self.reason,
        }
        return {name: value for name, value in pairs.items() if value is not None}

    def line(self) -> str:
        """Return the record as ``name=value`` pairs, only those there are; nothing a client sent is in it unquoted."""
        return " ".join(f"{name}={value!r}" if name == "reason" else f"{name}={value}"
                        for name, value in self.fields().items())


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def log(record: Record) -> None:
    """Write the record's line; a failure of the engine is a warning."""
    level = logging.WARNING if record.outcome == "engine_failed" else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(level, "%s", record.line(), extra={"request": record.fields()})
