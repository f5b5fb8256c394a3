"""What the supervisor and the relay know of each other: where the engine is, and which requests are in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the engine that serves now listens: a UNIX socket path, or a loopback port where it has none.

    ``generation`` grows with every engine started, so that a request knows which engine it was sent to.
    """

    socket: str | None
    port: int | None
    generation: int


@dataclass(frozen=True, slots=True)
class Unready:
    """Why no request can be served now. ``retry_after_s`` None: it will not help to wait."""

    state: str
    reason: str
    retry_after_s: float | None


class Backend(Protocol):
    """The supervisor as the relay sees it."""

    def endpoint(self) -> Endpoint | Unready:
        """Return where to send a request now, or why not. Never blocks."""

    def coming(self) -> asyncio.Future[None] | None:
        """Return what ends when the engine on its way serves or fails: after a reload, or behind a socket that was
        open before us. None where there is one, or requests shall not wait.
        """


@dataclass(eq=False, slots=True)
class Ticket:
    """One request inside the engine. ``abort`` ends it early with an error towards its client.

    ``blocked``: its client takes nothing now, so the engine owes it nothing either.
    """

    generation: int
    abort: Callable[[str], None]
    opened_at: float = field(default_factory=time.monotonic)
    blocked: bool = False


class Traffic:
    """The requests in flight: the relay opens and closes, the supervisor counts, waits and aborts."""

    def __init__(self) -> None:
        self._tickets: set[Ticket] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.last_byte_at = time.monotonic()
        """When the engine last sent a byte to anybody (monotonic seconds); the relay sets it."""

    def open(self, generation: int, abort: Callable[[str], None]) -> Ticket:
        """Count a request in; ``abort`` is called with a reason if it must end early."""
        ticket = Ticket(generation, abort)
        self._tickets.add(ticket)
        self._idle.clear()
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Count a request out; closing twice is harmless."""
        self._tickets.discard(ticket)
        if not self._tickets:
            self._idle.set()

    def in_flight(self, generation: int | None = None) -> int:
        """Return how many requests are in the engine (of one generation, or in all)."""
        if generation is None:
            return len(self._tickets)
        return sum(t.generation == generation for t in self._tickets)

    def owed(self, generation: int) -> bool:
        """Tell whether a request in this generation waits for the engine, and not for its own client."""
        return any(t.generation == generation and not t.blocked for t in self._tickets)

    async def wait_idle(self) -> None:
        """Return once no request is in flight."""
        await self._idle.wait()

    def abort_all(self, reason: str, generation: int | None = None) -> None:
        """End every request in flight (of one generation, or in all) with an error that says ``reason``."""
        for ticket in tuple(self._tickets):
            if generation in (None, ticket.generation):
                ticket.abort(reason)
