"""Requests mutated by seed: no crash, no hang, nothing left behind.

``LLAMAOPS_FUZZ=100000 .venv/bin/python -m pytest --timeout 0 tests/serve/test_relay_fuzz.py`` runs that many (some
minutes), and ``LLAMAOPS_FUZZ_SEED`` chooses others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random

import pytest
from relay_rig import STREAM_HEAD, EngineRequest, Rig, chunk, json_answer, rig, run, until

COUNT = int(os.environ.get("LLAMAOPS_FUZZ", "1500"))
FIRST = int(os.environ.get("LLAMAOPS_FUZZ_SEED", "0"))
SEEDS = [
    b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 44\r\n\r\n'
    b'{"model":"smol","stream":true,"messages":[]}',
    b"POST /v1/embeddings?a=b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n7\r\n{\"a\":1}\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n3;a=b\r\n{}\n\r\n0\r\nX: y\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: abc\r\nAuthorization: Bearer k\r\nX-Api-Key: k\r\n\r\n",
    b"GET /props HTTP/1.1\r\nConnection: x, keep-alive\r\nX: 1\r\n\r\nGET /slots HTTP/1.1\r\n\r\n",
    b"OPTIONS /v1/messages HTTP/1.1\r\nOrigin: http://a\r\nAccess-Control-Request-Method: POST\r\n\r\n",
    b"HEAD /metrics HTTP/1.0\r\nAccept: application/openmetrics-text\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"GET http://x/v1/models HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nCookie: a=\xff\r\n\r\n",
]
PIECES = [
    b"\r\n", b"\n", b"\r\n\r\n", b"\x00", b"\xff", b" ", b":", b"%00", b"../", b"//", b"?", b"#", b"HTTP/1.1",
    b"0\r\n\r\n",
    b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"fffffffffffffffff\r\n",
    b'{"model":3}',
]


def mutate(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(SEEDS))
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if data:
                data[at % len(data)] = rng.randrange(256)
            case 1:
                data[at:at] = rng.choice(PIECES)
            case 2:
                del data[at : at + rng.randint(1, 20)]
            case 3:
                data[at:at] = data[rng.randrange(len(data) + 1) :][: rng.randint(1, 60)]
            case _:
                del data[at:]
    return bytes(data)


async def engine(request: EngineRequest) -> None:
    if b"stream" in request.body:
        await request.send(STREAM_HEAD + chunk(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n') + b"0\r\n\r\n")
    else:
        await request.send(json_answer(b"{}"))


async def attack(r: Rig, seed: int) -> None:
    rng = random.Random(seed)
    data = mutate(rng)
    reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
    with contextlib.suppress(ConnectionError):
        cut = rng.randrange(len(data) + 1)
        writer.write(data[:cut])
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        writer.write(data[cut:])
        writer.write_eof()
        if rng.random() < 0.3:
            await reader.read(rng.randint(1, 300))
            writer.transport.abort()
        async with asyncio.timeout(60):
            await reader.read()
    writer.transport.abort()


def test_no_mutated_request_crashes_hangs_or_leaks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)

    async def main() -> None:
        async with rig(engine, limits={"head_s": 5}) as r:
            before = len(asyncio.all_tasks())
            for start in range(0, COUNT, 50):
                await asyncio.gather(*(attack(r, FIRST + n) for n in range(start, min(start + 50, COUNT))))
            await until(lambda: r.traffic.in_flight() == 0 and r.app.admission.running == 0)
            await until(lambda: len(asyncio.all_tasks()) <= before)
            assert r.app.admission.waiting == 0
            assert (await (await r.get("/v1/models")).answer()).status == 200

    run(main(), within=200 + COUNT / 10)
    assert caplog.text == ""
