"""What long work looks like on stderr: bars on a terminal, one line a step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from llamaops.cli import colour
from llamaops.core.progress import Bar, Progress, Unit

if TYPE_CHECKING:
    from llamaops.core.conversion import Consent

LINE_EVERY_S = 10.0
"""How often progress is told where lines are kept: a log, a pipe."""


def say(lines: Iterable[str]) -> None:
    """Print lines for people, on stderr."""
    for line in lines:
        click.echo(line, err=True)


def make_progress() -> Progress:
    """Return bars when stderr is a terminal, else plain lines."""
    return TerminalProgress() if sys.stderr.isatty() else LineProgress()


def asker(yes: bool = False) -> Consent:
    """Return what asks before something large is installed: a person at the terminal, else it is refused."""
    def ask(question: str) -> bool:
        if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return yes
        return click.confirm(question, err=True)

    return ask


class TerminalProgress:
    """Progress as rich's bars, with rate and time left; the bar goes away when its work is done."""

    @contextmanager
    def bar(self, label: str, unit: Unit) -> Iterator[Bar]:
        """Show one bar until the context ends, then one line that tells how long it took."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            ProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as RichProgress

        amount: list[ProgressColumn] = (
            [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
        )
        console = Console(stderr=True, no_color=not colour(sys.stderr))
        columns = [TextColumn("{task.description}"), BarColumn(), *amount, TimeElapsedColumn(), TimeRemainingColumn()]
        started = time.monotonic()
        with RichProgress(*columns, console=console, transient=True) as rich_progress:
            yield _RichBar(rich_progress, rich_progress.add_task(label, total=None))
        self.say(f"{label}: done in {time.monotonic() - started:.1f} s")

    def say(self, text: str) -> None:
        """Print one line."""
        click.echo(text, err=True)


class _RichBar:
    def __init__(self, progress: object, task: object) -> None:
        self._progress, self._task = progress, task

    def update(self, done: int, total: int | None = None) -> None:
        self._progress.update(self._task, completed=done, total=total)  # type: ignore[attr-defined]  # rich is imported late


class LineProgress:
    """Progress for logs and pipes: a line at the start, one every ten seconds, and one at the end."""

    @contextmanager
    def bar(self, label: str, unit: Unit) -> Iterator[Bar]:
        """Print the label now and the time taken when the context ends."""
        self.say(f"{label} …")
        started = time.monotonic()
        yield _LineBar(label, unit)
        self.say(f"{label}: done in {time.monotonic() - started:.1f} s")

    def say(self, text: str) -> None:
        """Print one line."""
        click.echo(text, err=True)


class _LineBar:
    def __init__(self, label: str, unit: Unit) -> None:
        self._label, self._unit = label, unit
        self._begun = self._said = time.monotonic()
        self._first: int | None = None

    def update(self, done: int, total: int | None = None) -> None:
        self._first = done if self._first is None else self._first
        now = time.monotonic()
        if total and now >= self._said + LINE_EVERY_S:
            self._said = now
            click.echo(f"{self._label}: {how_far(done, total, self._unit, done - self._first, now - self._begun)}",
                       err=True)


def how_far(done: int, total: int, unit: Unit, moved: int, seconds: float) -> str:
    """Return share, rate and time left, of work that came ``moved`` further in so many seconds."""
    text = f"{100 * done // total} %"
    if moved <= 0 or seconds <= 0:
        return text
    rate, left = moved / seconds, round((total - done) * seconds / moved)
    speed = f", {rate / 1e6:.1f} MB/s" if unit == "bytes" else ""
    return f"{text}{speed}, {left // 60} min {left % 60:02} s left"
