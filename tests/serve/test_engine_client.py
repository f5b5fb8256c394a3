"""The engine's answer, however it is cut: what travels past the parser and what goes through it are one body."""

from __future__ import annotations

import asyncio
import random

import pytest

from llamaops.serve.engine_client import EngineGone, Exchange

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECES = [b"data: 1\n\n", b"\r\n", b"5\r\nhello\r\n", b"data: \r\n\r\n", b"0\r\n\r\n", b"x" * 300, b"data: [DONE]\n\n"]


def framed(data: bytes, spelling: str = "%x") -> bytes:
    return (spelling % len(data)).encode() + b"\r\n" + data + b"\r\n"


def unframed(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return body


async def receive(pieces: list[bytes], *, refuse: int = 0) -> tuple[bytes, bytes, list[bytes]]:
    """Return body and framed body as a sink and a reader got them; the sink refuses every ``refuse``-th time."""
    exchange, framed_out, out, direct, calls = Exchange(bodiless=False), b"", b"", [], 0

    def sink(whole: bytes, data: bytes) -> bool:
        nonlocal framed_out, out, calls
        calls += 1
        if refuse and calls % refuse == 0:
            return False
        framed_out, out = framed_out + whole, out + data
        direct.append(whole)
        return True

    exchange.data_received(HEAD)
    assert await exchange.head()
    exchange.divert(sink)
    for piece in pieces:
        exchange.data_received(piece)
        while exchange._chunks:
            late = await exchange.read()
            assert late
            out, framed_out = out + late, framed_out + framed(late)
    assert await exchange.read() is None
    return out, framed_out, direct


def test_any_cut_gives_the_same_body() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        chunks = [rng.choice(PIECES) for _ in range(rng.randint(1, 12))]
        wire = b"".join(framed(c, rng.choice(["%x", "%x", "%X", "%06x", "%x;a=b"])) for c in chunks) + b"0\r\n\r\n"
        pieces = []
        while wire:
            size = rng.choice([1, 2, 3, 7, 14, 16, 40, len(wire)])
            pieces.append(wire[:size])
            wire = wire[size:]
        out, framed_out, _ = asyncio.run(receive(pieces, refuse=rng.choice([0, 2, 3])))
        assert out == b"".join(chunks) == unframed(framed_out), seed


def test_a_chunk_that_comes_alone_travels_as_it_is() -> None:
    event = framed(b"data: {}\n\n")
    first, last = framed(b"data: 1\n\n"), b"0\r\n\r\n"
    out, _, direct = asyncio.run(receive([first, event, event, last]))
    assert out == b"data: 1\n\n" + 2 * b"data: {}\n\n"
    assert direct == [first, event, event]


@pytest.mark.parametrize(
    "rubbish", [b"+5\r\nhello\r\n", b"0x5\r\nhello\r\n", b"5 \r\nhel\r\n", b"-1\r\n\r\n", b"zz\r\n"])
def test_bad_framing_is_not_passed_on(rubbish: bytes) -> None:
    with pytest.raises(EngineGone):
        asyncio.run(receive([framed(b"data: 1\n\n"), rubbish]))


def test_nothing_is_passed_on_after_the_end() -> None:
    out, _, _ = asyncio.run(receive([framed(b"data: 1\n\n") + b"0\r\n\r\n", framed(b"data: 2\n\n")]))
    assert out == b"data: 1\n\n"
