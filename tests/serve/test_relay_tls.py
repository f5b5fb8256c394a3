"""https: which files are fit, what clients see, and a renewed certificate while streams run."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

import pytest
from certificates import Pair, make_pair
from relay_rig import STREAM_HEAD, EngineRequest, chunk, json_answer, rig, run, until

from llamaops.core.profile import TlsFiles
from llamaops.errors import LlamaopsError, NotPermitted, WrongProfile
from llamaops.serve.tls import load_tls, switching, trusting


def files(pair: Pair) -> TlsFiles:
    return TlsFiles(cert=str(pair.cert), key=str(pair.key))


def refused(cert: Path, key: Path) -> LlamaopsError:
    with pytest.raises(LlamaopsError) as caught:
        load_tls(TlsFiles(cert=str(cert), key=str(key)))
    return caught.value


def test_wrong_files_are_told_by_their_path(tmp_path: Path) -> None:
    one, other = make_pair(tmp_path, "one"), make_pair(tmp_path, "other")
    locked = make_pair(tmp_path, "locked", passphrase="sesame")
    rubbish, nowhere = tmp_path / "rubbish", tmp_path / "nowhere"
    rubbish.write_text("-----BEGIN CERTIFICATE-----\nrubbish\n-----END CERTIFICATE-----\n")
    for cert, key, bad in ((nowhere, one.key, nowhere), (one.cert, nowhere, nowhere), (one.cert, other.key, other.key),
                           (rubbish, one.key, rubbish), (one.key, one.key, one.key), (one.cert, rubbish, rubbish),
                           (one.cert, one.cert, one.cert), (locked.cert, locked.key, locked.key),
                           (one.cert, tmp_path, tmp_path)):
        error = refused(cert, key)
        assert (type(error), error.exit_code, error.where) == (WrongProfile, 78, str(bad)), (cert, key, str(error))
        assert "sesame" not in str(error)
        assert error.fix
    assert load_tls(files(one)) is not None
    assert load_tls(None) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_key_of_somebody_else_is_not_permitted(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    pair.key.chmod(0)
    error = refused(pair.cert, pair.key)
    assert (type(error), error.where) == (NotPermitted, str(pair.key))


async def connect(port: int, pair: Pair) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, ssl=trusting(str(pair.cert)))


ASK = b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"stream":true}'


def test_streams_go_through_and_go_on_when_the_certificate_is_renewed(tmp_path: Path) -> None:
    old, new = make_pair(tmp_path, "old"), make_pair(tmp_path, "new")
    contexts = [load_tls(files(old))]
    renewed = asyncio.Event()

    async def script(request: EngineRequest) -> None:
        await request.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await renewed.wait()
        await request.send(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

    async def main() -> None:
        async with rig(script, limits={"tls": switching(lambda: contexts[-1])}) as r:
            reader, writer = await connect(r.port, old)
            writer.write(ASK)
            assert await reader.readuntil(b"data: 1\n\n")
            contexts.append(load_tls(files(new)))
            later, second = await connect(r.port, new)
            with pytest.raises(ssl.SSLCertVerificationError):
                await connect(r.port, old)
            renewed.set()
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"data: 2\n\n\r\n0\r\n\r\n")
            second.write(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert (await later.readline()) == b"HTTP/1.1 200 OK\r\n"
            for each in (writer, second):
                each.close()

    run(main())


def test_a_client_that_leaves_is_noticed_and_plain_http_gets_nothing(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    context = load_tls(files(pair))

    async def script(request: EngineRequest) -> None:
        await request.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await request.gone()

    async def main() -> None:
        async with rig(script, limits={"tls": context}) as r:
            reader, writer = await connect(r.port, pair)
            writer.write(ASK)
            assert await reader.readuntil(b"data: 1\n\n")
            writer.close()
            await until(lambda: r.app.admission.running == 0)
            plain = await r.get("/healthz")
            assert await plain.closed()
            assert len(r.requests) == 1

    run(main())


def test_a_client_that_does_not_read_loses_its_slot(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    sent = 0

    async def script(request: EngineRequest) -> None:
        nonlocal sent
        await request.send(STREAM_HEAD)
        event = chunk(b"data: " + b"x" * 60_000 + b"\n\n")
        while True:  # ends when the relay closes the connection
            await request.send(event)
            sent += len(event)

    async def main() -> None:
        async with rig(script, slots=1, limits={"write_stall_s": 0.3, "tls": load_tls(files(pair))}) as r:
            _, writer = await connect(r.port, pair)
            writer.transport.pause_reading()
            writer.write(ASK)
            await until(lambda: r.app.admission.running == 1)
            await until(lambda: r.app.admission.running == 0)
            assert sent < 32 << 20
            writer.transport.abort()

    run(main())


def test_hostile_heads_are_refused_over_tls_too(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)

    async def script(request: EngineRequest) -> None:
        await request.send(json_answer(b"{}"))

    async def main() -> None:
        async with rig(script, limits={"tls": load_tls(files(pair))}) as r:
            for sent, status in ((b"garbage\r\n\r\n", b"400"),
                                 (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", b"414"),
                                 (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", b"200")):
                reader, writer = await connect(r.port, pair)
                writer.write(sent)
                assert (await reader.readline()).split()[1] == status
                writer.close()

    run(main())
