"""How much of requests' bodies may lie in memory at once: many large ones must not add up to a machine's memory."""

from __future__ import annotations

_SMALL = 64 << 10


class BodyBudget:
    """Counts the bytes of bodies that are held, in all; one event loop.

    A body of up to 64 KiB is always taken: what those can add up to is bounded by the number of connections.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, piece: int, so_far: int) -> bool:
        """Count ``piece`` more bytes of a body that has ``so_far``; False, and none counted, where it is too much."""
        if self.held + piece > self.limit and so_far + piece > _SMALL:
            return False
        self.held += piece
        return True

    def give_back(self, size: int) -> None:
        """Count out what is no longer held."""
        self.held -= size
