"""What one key may use: requests at a time, and tokens a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key; None where there is none. Tokens are prompt and output together."""

    concurrency: int | None = None
    tokens_per_minute: int | None = None


class OverLimit(Exception):
    """The key has used what it may. ``limit`` says which: ``concurrency`` or ``tokens_per_minute``."""

    def __init__(self, limit: str, value: int, retry_after_s: int | None) -> None:
        super().__init__(limit)
        self.limit, self.value, self.retry_after_s = limit, value, retry_after_s


class Quotas:
    """What each key uses now. A minute's tokens come back evenly; the last request may overdraw them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, int] = {}
        self._spent: dict[str, tuple[float, float]] = {}  # tokens still owed, as of when

    def enter(self, key: str, limits: KeyLimits) -> None:
        """Count a request in. Raises OverLimit, and then does not count it."""
        held = self._open.get(key, 0)
        if limits.concurrency is not None and held >= limits.concurrency:
            raise OverLimit("concurrency", limits.concurrency, None)
        if limits.tokens_per_minute is not None:
            over = self._owed(key, limits.tokens_per_minute) - limits.tokens_per_minute
            if over >= 0:
                wait_s = math.ceil((over + 1) * 60 / limits.tokens_per_minute)
                raise OverLimit("tokens_per_minute", limits.tokens_per_minute, wait_s)
        self._open[key] = held + 1

    def leave(self, key: str, tokens: int, limits: KeyLimits) -> None:
        """Count a request out, with the tokens it took."""
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]
        if limits.tokens_per_minute is not None:
            self._spent[key] = (self._owed(key, limits.tokens_per_minute) + tokens, self._clock())

    def _owed(self, key: str, per_minute: int) -> float:
        owed, at = self._spent.get(key, (0.0, 0.0))
        return max(0.0, owed - (self._clock() - at) * per_minute / 60)
