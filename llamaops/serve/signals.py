"""What the signals to this process mean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator


class Signals:
    """SIGTERM and SIGINT stop; SIGHUP reloads, unless it was the terminal that hung up: then it stops, too.

    ``first`` is the first signal that asked for the stop. Under nohup a terminal that goes away is nobody's business.
    """

    def __init__(self, stop: Callable[[str], object], reload: Callable[[], object]) -> None:
        self._stop, self._reload = stop, reload
        self._terminal = [fd for fd in (0, 1, 2) if os.isatty(fd)]
        self._ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        self.first: int | None = None

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle them in the running event loop for the length of a ``with`` block."""
        loop = asyncio.get_running_loop()
        actions: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGTERM: lambda: self._end(signal.SIGTERM),
            signal.SIGINT: lambda: self._end(signal.SIGINT),
            signal.SIGHUP: self._hang_up,
        }
        for number, action in actions.items():
            loop.add_signal_handler(number, action)
        try:
            yield
        finally:
            for number in actions:
                loop.remove_signal_handler(number)

    def _end(self, number: signal.Signals) -> None:
        self.first = self.first or number
        self._stop(number.name)

    def _hang_up(self) -> None:
        if all(os.isatty(fd) for fd in self._terminal):
            self._reload()
        elif self._ends_with_terminal:
            self._end(signal.SIGHUP)
