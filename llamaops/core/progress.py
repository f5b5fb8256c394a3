"""How long work tells how far it is, without knowing who looks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

Unit = Literal["bytes", "steps"]


class Bar(Protocol):
    """One piece of work under way."""

    def update(self, done: int, total: int | None = None) -> None:
        """Tell how much is done, in the bar's unit, absolute; ``total`` where it is known by now."""


class Progress(Protocol):
    """Where progress goes: a terminal, a log, or nowhere."""

    def bar(self, label: str, unit: Unit) -> AbstractContextManager[Bar]:
        """Open a bar for one piece of work; leaving the context ends it."""

    def say(self, text: str) -> None:
        """Print one line about a finished or skipped step."""


class _NoBar:
    def update(self, done: int, total: int | None = None) -> None:
        pass


class NoProgress:
    """Progress that nobody looks at (tests, ``--json``)."""

    def bar(self, label: str, unit: Unit) -> AbstractContextManager[Bar]:
        """Return a bar that shows nothing."""
        return nullcontext(_NoBar())

    def say(self, text: str) -> None:
        """Drop the line."""
