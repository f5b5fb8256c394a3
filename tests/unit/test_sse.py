"""The decoder against the rules written out slowly, however the bytes are cut."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaops.core.sse import Event, SSEDecoder


def slowly(stream: bytes) -> list[tuple[bytes, bytes]]:
    """Follow the standard's steps over the whole stream at once."""
    events, data, kind = [], [], b""
    *lines, _unfinished = re.split(rb"\r\n|\r|\n", stream.removeprefix(b"\xef\xbb\xbf"))
    for line in lines:
        if not line:
            if data:
                events.append((kind or b"message", b"\n".join(data)))
            data, kind = [], b""
            continue
        name, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if name == b"data":
            data.append(value)
        elif name == b"event":
            kind = value
    return events


def decode(pieces: list[bytes]) -> list[tuple[bytes, bytes]]:
    decoder = SSEDecoder()
    return [(e.type, e.data) for piece in pieces for e in decoder.feed(piece)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\r\n\r\n", [b"a"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data:  two spaces\n\n", [b" two spaces"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\n\n", [b""]),
        (b": comment\n\ndata: a\n\n", [b"a"]),
        (b":\n\n:\n\n: ping\n", []),
        (b"event: x\n\ndata: a\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
        (b"data: a", []),
        (b"data: a\n", []),
        (b"id: 1\nretry: 5\ndata: a\n\n", [b"a"]),
        ("data: \u2028\u2029\u0085\x0b\x0c\x1c\n\n".encode(), ["\u2028\u2029\u0085\x0b\x0c\x1c".encode()]),
        ("data: 😀é漢\n\n".encode(), ["😀é漢".encode()]),
    ],
)
def test_streams(stream: bytes, events: list[bytes]) -> None:
    assert [data for _, data in decode([stream])] == events
    assert decode([bytes([b]) for b in stream]) == decode([stream])


PARTS = st.sampled_from([
    b"data: ", b"data:", b"data", b"event: x", b"event:", b": c", b"\n", b"\n\n", b"\r", b"\r\n", b"\xef\xbb\xbf",
    b" ", b"a", b"{}", "\u2028é😀".encode(), b"id: 1", b"\x00",
])
STREAMS = st.lists(PARTS, max_size=30).map(b"".join)


@settings(max_examples=50, deadline=None)
@given(STREAMS, st.lists(st.integers(0, 90), max_size=12))
def test_any_cut_gives_the_events_of_the_standard(stream: bytes, cuts: list[int]) -> None:
    at = sorted({min(c, len(stream)) for c in cuts})
    pieces = [stream[a:b] for a, b in zip([0, *at], [*at, len(stream)], strict=True)]
    assert decode(pieces) == slowly(stream)


@settings(max_examples=30, deadline=None)
@given(STREAMS)
def test_at_a_boundary_another_event_stands_alone_and_elsewhere_after_a_blank_line(stream: bytes) -> None:
    decoder = SSEDecoder()
    decoder.feed(stream)
    if decoder.at_boundary and stream:
        assert slowly(stream + b": ping\ndata: new\n\n") == [*slowly(stream), (b"message", b"new")]
    else:
        assert slowly(stream + b"\n\ndata: new\n\n")[-1] == (b"message", b"new")


def test_an_endless_line_is_not_kept() -> None:
    decoder = SSEDecoder(limit=1000)
    for _ in range(100):
        assert decoder.feed(b"data: " + b"x" * 200) == []
    assert not decoder.at_boundary
    assert len(decoder._line) <= 1000
    (event,) = decoder.feed(b"\n\n")
    assert not event.complete
    assert len(event.data) < 1000
    assert decoder.feed(b"data: after\n\n") == [Event(b"message", b"after")]


def test_endless_fields_of_one_event_are_not_kept() -> None:
    decoder = SSEDecoder(limit=1000)
    for _ in range(100):
        assert decoder.feed(b"data: " + b"x" * 50 + b"\n") == []
    (event,) = decoder.feed(b"\n")
    assert not event.complete
    assert len(event.data) <= 1100
    assert decoder.at_boundary
