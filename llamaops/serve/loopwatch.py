"""Whether the relay's event loop turns: watched from a thread, for a loop that hangs can't say so itself."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger("llamaops.relay")

_CALLS = 4


@dataclass(frozen=True, slots=True)
class Hang:
    """A time in which the loop did not turn. ``at`` is in seconds since the epoch, ``where`` the innermost calls."""

    at: float
    seconds: float
    where: str


class LoopWatch:
    """Watches the event loop that `run` runs in: every ``interval_s``, and complains when it stands for ``hang_s``.

    ``lag_s`` is how late the latest turn was, ``hangs`` how often the loop has hung, ``last`` and ``longest_s`` tell of
    those. Time in which the whole process stood (suspended, stopped) is not the loop's and counts little.
    """

    def __init__(self, interval_s: float = 0.5, hang_s: float = 1.0) -> None:
        self.lag_s = 0.0
        self.hangs = 0
        self.longest_s = 0.0
        self.last: Hang | None = None
        self._interval_s = interval_s
        self._hang_s = hang_s
        self._turns = 0
        self._over = threading.Event()

    async def run(self) -> None:
        """Watch until cancelled."""
        watcher = threading.Thread(target=self._watch, args=(threading.get_ident(),), name="loop-watch", daemon=True)
        watcher.start()
        try:
            while True:
                due = time.monotonic() + self._interval_s
                await asyncio.sleep(self._interval_s)
                self._turns += 1
                self.lag_s = max(time.monotonic() - due, 0.0)
        finally:
            self._over.set()
            watcher.join()

    def tell(self) -> dict[str, Any]:
        """Return what is known as ``status`` shows it."""
        return {"lag_s": round(self.lag_s, 4), "hangs": self.hangs, "longest_hang_s": round(self.longest_s, 3),
                "last_hang": asdict(self.last) if self.last else None}

    def collect(self) -> Iterable[Metric]:
        """Return what is known as Prometheus wants it."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        yield GaugeMetricFamily("llamaops_loop_lag_seconds", "How late the event loop's latest turn was.",
                                value=self.lag_s)
        yield CounterMetricFamily("llamaops_loop_hangs", "Times that the event loop stood still.", value=self.hangs)

    # In the thread.

    def _watch(self, loop_thread: int) -> None:
        turns, still_s, looked_at, hang = self._turns, 0.0, time.monotonic(), None
        while not self._over.wait(self._interval_s):
            now = time.monotonic()
            still_s += min(now - looked_at, 2 * self._interval_s)
            looked_at = now
            if self._turns != turns:
                if hang is not None:
                    log.warning("the relay's event loop turns again after %.1f s", hang.seconds)
                turns, still_s, hang = self._turns, 0.0, None
            elif still_s > self._hang_s:
                hang = replace(hang or self._begin(still_s, loop_thread), seconds=still_s)
                self.last, self.longest_s = hang, max(self.longest_s, still_s)

    def _begin(self, still_s: float, loop_thread: int) -> Hang:
        hang = Hang(round(time.time() - still_s, 3), still_s, _calls(loop_thread))
        log.warning("the relay's event loop hangs in %s", hang.where)
        self.hangs += 1
        return hang


def _calls(thread: int) -> str:
    """Name the innermost calls of a thread."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "a thread that is gone"
    calls = islice(walk_stack(frame), _CALLS)
    return " ← ".join(f"{f.f_code.co_filename}:{line} {f.f_code.co_name}" for f, line in calls)
