"""What is said of an engine's life: to clients it can't serve, in ``status``, and as the error of a failed start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamaops.core.causes import Cause, Exit
from llamaops.core.engine_life import State, Status
from llamaops.errors import EngineFailed

_LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class End:
    """How the engine of a generation ended, with its own last lines; ``ended`` None: it could not be spawned."""

    generation: int
    ended: Exit | None
    cause: Cause
    lines: tuple[str, ...] = ()


def why_unready(status: Status, now: float) -> tuple[str, float | None]:
    """Return why no request can be served, and after how many seconds to come again (None: it won't help)."""
    cause = status.cause.text if status.cause else "unknown"
    match status.state:
        case State.STARTING | State.READY:
            return "the model is being loaded", 2.0
        case State.BACKOFF:
            return f"the engine failed: {cause}", retry_in_s(status, now)
        case State.FAILED:
            return f"not started again before a reload or a change of the profile: {cause}", None
        case State.DRAINING | State.STOPPING if status.then != "stop":
            return "the engine is being restarted", 5.0
        case _:
            return "llamaops is stopping", None


def retry_in_s(status: Status, now: float) -> float | None:
    """Return the seconds until the next start; None when none is waited for."""
    if status.state is not State.BACKOFF:
        return None
    return round(max(status.since + status.delay_s - now, 0.1), 1)


def life_json(status: Status, now: float, epoch: float) -> dict[str, Any]:
    """Return the status as JSON-able data: times in seconds, ``at`` in seconds since the epoch (``epoch`` is now)."""
    return {
        "state": status.state.value,
        "reason": status.history[-1].reason if status.history else "",
        "since_s": round(now - status.since, 3),
        "generation": status.engine,
        "ready_s": round(now - status.ready_at, 3) if status.ready_at is not None else None,
        "restarts": status.restarts,
        "failures_in_a_row": status.failures,
        "retry_in_s": retry_in_s(status, now),
        "last_exit": _last_exit(status),
        "retiring": sorted(status.retiring),
        "history": [{"at": round(line.at + epoch - now, 3), "from": line.before.value, "to": line.after.value,
                     "reason": line.reason} for line in status.history],
    }


def _last_exit(status: Status) -> dict[str, Any] | None:
    cause, ended = status.cause, status.ended
    if cause is None and ended is None:
        return None
    return {
        "how": str(ended) if ended else "not started",
        "code": ended.code if ended else None,
        "signal": ended.signal if ended else None,
        "oom_killed": bool(ended and ended.oom_killed),
        "cause": cause.code if cause else None,
        "text": cause.text if cause else None,
        "fix": cause.fix if cause else None,
    }


def failure(what: str, end: End | None) -> EngineFailed:
    """Return the error of an engine that ended so; without an end, llamaops was stopped before."""
    if end is None:
        return EngineFailed(what, why="llamaops was stopped before the engine was ready")
    how = f" ({end.ended})" if end.ended else ""
    error = EngineFailed(what, why=f"{end.cause.text}{how}", fix=end.cause.fix or "see llamaops logs",
                         detail="\n".join(end.lines[-_LOG_LINES:]))
    error.exit_code = end.cause.exit_code
    return error
