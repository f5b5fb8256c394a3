"""Server-sent events, decoded from bytes cut anywhere. Rules: WHATWG HTML, "Server-sent events", parsing a stream."""

from __future__ import annotations

import re
from typing import NamedTuple

_EOL = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One dispatched event. ``complete`` is False when it was longer than the decoder's limit and was cut."""

    type: bytes
    data: bytes
    complete: bool = True


class SSEDecoder:
    """Turn bytes into events, however they are cut; owns no I/O and keeps at most ``limit`` bytes of an event.

    Lines end at LF, CR or CRLF and at nothing else: U+2028, U+0085 and their like are ordinary text.
    """

    __slots__ = ("_after_cr", "_data", "_fresh", "_idle", "_length", "_limit", "_line", "_open", "_room", "_type")

    def __init__(self, limit: int = 1 << 20) -> None:
        self._limit = limit
        self._idle = True  # nothing is pending of what came before, not even half a CRLF or a BOM
        self._fresh = True  # no line has ended yet: the first may start with a BOM
        self._after_cr = False  # an LF that comes next belongs to the CR before it
        self._line = bytearray()  # what is kept of the line that has not ended
        self._length = 0  # how long that line really is
        self._begin_event()

    def _begin_event(self) -> None:
        self._open = False  # something was said since the last blank line
        self._type = b""
        self._data: list[bytes] = []
        self._room = self._limit

    @property
    def at_boundary(self) -> bool:
        """Whether the stream stands between two events, where a comment or another event may be put."""
        return not self._open and not self._length

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that ``chunk`` completes, in order."""
        # One whole event of one line: how engines nearly always write, and the only case that is met once a token.
        if (
            self._idle
            and chunk.find(b"\n") == len(chunk) - 2
            and chunk[-1:] == b"\n"
            and chunk[:6] == b"data: "
            and b"\r" not in chunk
            and len(chunk) <= self._limit
        ):
            self._fresh = False
            return [Event(b"message", chunk[6:-2])]
        events = self._feed_lines(chunk)
        self._idle = not (self._open or self._length or self._after_cr)
        return events

    def _feed_lines(self, chunk: bytes) -> list[Event]:
        events: list[Event] = []
        start = 1 if self._after_cr and chunk[:1] == b"\n" else 0
        for eol in _EOL.finditer(chunk, start):
            self._extend(chunk[start : eol.start()])
            length, line = self._length, bytes(self._line)
            self._length = 0
            self._line.clear()
            self._end_line(line, events, blank=not length)
            start = eol.end()
        self._extend(chunk[start:])
        self._after_cr = chunk[-1:] == b"\r" if chunk else self._after_cr
        return events

    def _extend(self, piece: bytes) -> None:
        kept = piece[: max(self._room, 0)]
        self._line += kept
        self._length += len(piece)
        self._room -= len(piece)

    def _end_line(self, line: bytes, events: list[Event], *, blank: bool = False) -> None:
        if self._fresh:
            self._fresh = False
            line = line.removeprefix(_BOM)
            blank = blank or not line
        if blank or (not line and self._room >= 0):
            self._dispatch(events)
        else:
            self._open = True
            self._field(line)

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"event":
            self._type = value.removeprefix(b" ")

    def _dispatch(self, events: list[Event]) -> None:
        if self._data:
            events.append(Event(self._type or b"message", b"\n".join(self._data), self._room >= 0))
        self._begin_event()
