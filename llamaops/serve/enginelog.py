"""The engine's output: always drained, the last lines kept in memory, the rest in a file of bounded size."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from llamaops.core.engine_lines import Level, bare, is_at_least
from llamaops.logs import masked

MAX_LINE = 4096
"""Longer lines are cut: an engine may print a whole prompt in one."""
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_FOLLOWER_BACKLOG = 1000


class EngineLog:
    """Collects lines from the engines of one instance.

    ``path`` None keeps lines in memory only. The file is renamed to ``<name>.1`` when it exceeds ``max_bytes``; a disk
    that is full or slow loses lines of the file, never the engine's or the event loop's time. A line that repeats the
    one before is counted instead of kept (engine time stamps set aside).
    """

    def __init__(self, path: Path | None = None, *, keep: int = 2000, max_bytes: int = 8 << 20) -> None:
        self._lines: deque[str] = deque(maxlen=keep)
        self._last: str | None = None
        self._repeats = 0
        self._followers: set[asyncio.Queue[str | None]] = set()
        self._file = _FileWriter(path, max_bytes) if path else None

    def writer(self) -> LineWriter:
        """Return the intake for the bytes of one engine."""
        return LineWriter(self.add)

    def add(self, line: str) -> None:
        """Take one whole line."""
        without_time = bare(line)
        if without_time == self._last:
            self._repeats += 1
            return
        self._flush_repeats()
        self._last = without_time
        self._emit(line)

    def last(self, count: int, level: Level = "debug") -> list[str]:
        """Return the last lines that are at least so grave, oldest first."""
        self._flush_repeats()
        return [line for line in self._lines if is_at_least(line, level)][-count:] if count > 0 else []

    async def follow(self, count: int = 0, level: Level = "debug") -> AsyncIterator[str]:
        """Yield the last ``count`` lines and then each new one until the log is closed; a slow reader misses lines.

        Only those that are at least as grave as ``level``.
        """
        feed: asyncio.Queue[str | None] = asyncio.Queue(_FOLLOWER_BACKLOG)
        for line in self.last(count, level):
            yield line
        self._followers.add(feed)
        try:
            while (line_or_end := await feed.get()) is not None:
                if is_at_least(line_or_end, level):
                    yield line_or_end
        finally:
            self._followers.discard(feed)

    def close(self) -> None:
        """Write what is left and end the followers."""
        self._flush_repeats()
        for feed in tuple(self._followers):
            if feed.full():
                feed.get_nowait()
            feed.put_nowait(None)
        if self._file:
            self._file.close()

    def _flush_repeats(self) -> None:
        if self._repeats:
            count, self._repeats = self._repeats, 0
            self._emit(f"(the line above came {count} more times)" if count > 1 else "(the line above came once more)")

    def _emit(self, line: str) -> None:
        self._lines.append(line)
        if self._file:
            self._file.write(line)
        for feed in self._followers:
            with contextlib.suppress(asyncio.QueueFull):
                feed.put_nowait(line)


class LineWriter:
    """Cuts one engine's bytes into lines.

    ``tail`` holds its last ones, ``count`` how many there were; ``spoke`` is set at each line, for who waits for one.
    """

    def __init__(self, sink: Callable[[str], None], tail: int = 60) -> None:
        self._sink = sink
        self._partial = b""
        self.tail: deque[str] = deque(maxlen=tail)
        self.count = 0
        self.spoke = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """Take bytes as they come from the pipe."""
        *whole, rest = (self._partial + data).split(b"\n")
        for raw in whole:
            self._line(raw)
        if len(rest) > MAX_LINE:
            self._line(rest)
            rest = b""
        self._partial = rest

    def close(self) -> None:
        """Take the last line as whole."""
        if self._partial:
            self._line(self._partial)
            self._partial = b""

    def _line(self, raw: bytes) -> None:
        line = masked(_UNPRINTABLE.sub("", raw[:MAX_LINE].decode("utf-8", "replace")).rstrip())
        self.count += 1
        self.spoke.set()
        self.tail.append(line)
        self._sink(line)


class _FileWriter:
    """Writes lines to a file in a thread of its own, so that a slow disk delays nobody."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._queue: queue.Queue[str | None] = queue.Queue(10_000)
        self._thread = threading.Thread(target=self._run, name="engine-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        with contextlib.suppress(queue.Full):  # the disk can't keep up; memory stays bounded
            self._queue.put_nowait(line)

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=1)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            ended = self._gather(batch)
            with contextlib.suppress(OSError):  # full or read-only disk: these lines are lost, the next may fit
                self._append(batch)
            if ended:
                return

    def _gather(self, batch: list[str]) -> bool:
        """Add what else is waiting; tell whether the end is among it."""
        with contextlib.suppress(queue.Empty):
            while len(batch) < 1000:
                line = self._queue.get_nowait()
                if line is None:
                    return True
                batch.append(line)
        return False

    def _append(self, batch: list[str]) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        data = "".join(f"{stamp} {line}\n" for line in batch).encode()
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size + len(data) > self._max_bytes:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
        with self._path.open("ab") as file:
            file.write(data)
