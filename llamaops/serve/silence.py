"""Noticing that a stream's client has got nothing for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class SilenceTimer:
    """Calls ``tell`` whenever ``quiet_since()`` lies ``interval`` seconds back; costs nothing per event.

    Times are monotonic seconds; an ``interval`` of None never tells.
    """

    def __init__(self, interval: float | None, quiet_since: Callable[[], float], tell: Callable[[], None]) -> None:
        self._interval, self._quiet_since, self._tell = interval, quiet_since, tell
        self._started_at = time.monotonic()
        self._handle: asyncio.TimerHandle | None = None
        if interval is not None:
            self._arm(interval)

    def _arm(self, delay: float) -> None:
        self._handle = asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        assert self._interval is not None
        quiet = time.monotonic() - max(self._quiet_since(), self._started_at)
        if quiet >= self._interval:
            self._tell()
            quiet = 0.0
        self._arm(self._interval - quiet)

    def stop(self) -> None:
        """Forget the timer."""
        if self._handle is not None:
            self._handle.cancel()
