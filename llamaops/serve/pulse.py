"""Whether an engine gets anywhere: told by CPU time, bytes read and lines written, not by answered probes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamaops.serve.procfs import bytes_read, read_stat

MIN_CPU_SHARE = 0.01
"""Below this share of one CPU an engine counts as still: answering a probe or pinging costs less, a token more."""


@dataclass(frozen=True, slots=True)
class Sign:
    """What can be seen of a process at one moment; all of it only grows."""

    cpu_s: float
    read: int
    lines: int


def look(pid: int, lines: int) -> Sign:
    """Read the signs of life of a process from /proc; zeros where it can't be read."""
    stat = read_stat(pid)
    return Sign(stat.cpu_s if stat else 0.0, bytes_read(pid), lines)


class Pulse:
    """Tells for how long there has been no progress.

    Time in which nobody looked, because we were stopped ourselves, counts as two intervals at most.
    """

    def __init__(self, now: float, sign: Sign, interval_s: float) -> None:
        self._interval_s = interval_s
        self.reset(now, sign)

    def reset(self, now: float, sign: Sign) -> None:
        """Begin anew: this moment counts as progress."""
        self._seen_at = now
        self._sign = sign
        self._still_s = 0.0

    def feel(self, now: float, sign: Sign, is_starved: Callable[[], bool] = lambda: False) -> float:
        """Take a new look; return the seconds without progress.

        ``is_starved`` is asked where nothing moved: an engine that wants the CPU and is kept from it is not frozen.
        """
        self._still_s += min(now - self._seen_at, 2 * self._interval_s)
        self._seen_at = now
        used = sign.cpu_s - self._sign.cpu_s
        moved = used > MIN_CPU_SHARE * max(self._still_s, self._interval_s)
        if moved or sign.read > self._sign.read or sign.lines > self._sign.lines or is_starved():
            self.reset(now, sign)
        return self._still_s
