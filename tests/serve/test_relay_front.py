"""Hostile, old and odd clients; keys; CORS; what is closed."""

from __future__ import annotations

import json

import pytest
from relay_rig import STREAM_HEAD, EngineRequest, chunk, json_answer, rig, run, until

from llamaops.serve.auth import KeyRing

BODY = b'{"object":"list"}'


async def answer_list(request: EngineRequest) -> None:
    await request.send(json_answer(BODY))


HOSTILE = {
    "both lengths": b"POST /v1/embeddings HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /v1/embeddings HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "negative length": b"POST /v1/embeddings HTTP/1.1\r\nContent-Length: -2\r\n\r\n{}",
    "huge length": b"POST /v1/embeddings HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
    "bad chunk": b"POST /v1/embeddings HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "chunk overrun": b"POST /v1/embeddings HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
    "other coding last": b"POST /v1/embeddings HTTP/1.1\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "folded header": b"GET /v1/models HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
    "space before colon": b"GET /v1/models HTTP/1.1\r\nA : b\r\n\r\n",
    "NUL in a header": b"GET /v1/models HTTP/1.1\r\nA: b\x00c\r\n\r\n",
    "bare LF": b"GET /v1/models HTTP/1.1\nA: b\n\n",
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "CONNECT": b"CONNECT example.org:443 HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
def test_bad_framing_is_400_and_reaches_no_engine(sent: bytes) -> None:
    async def main() -> None:
        async with rig(answer_list) as r:
            client = await r.ask(sent)
            answer = await client.answer()
            assert answer.status == 400
            assert json.loads(answer.body)["error"]["code"] == "bad_request"
            assert await client.closed()
            assert r.requests == []

    run(main())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /v1/models HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"GET /v1/models HTTP/1.1\r\nA: " + b"b" * 20_000 + b"\r\n\r\n", 431),
    ],
)
def test_oversized_heads_are_refused(sent: bytes, status: int) -> None:
    async def main() -> None:
        async with rig(answer_list) as r:
            answer = await (await r.ask(sent)).answer()
            assert answer.status == status
            assert r.requests == []

    run(main())


def test_an_endless_header_is_refused_while_it_comes() -> None:
    async def main() -> None:
        async with rig(answer_list) as r:
            client = await r.ask(b"GET /v1/models HTTP/1.1\r\nA: ")
            for _ in range(100):
                await client.send(b"b" * 1000)
            assert (await client.answer()).status == 431

    run(main())


def test_a_head_that_does_not_come_is_408_and_silence_is_closed() -> None:
    async def main() -> None:
        async with rig(answer_list, limits={"head_s": 0.1}) as r:
            assert (await (await r.ask(b"GET /v1/mod")).answer()).status == 408
            assert await (await r.connect()).closed()

    run(main())


def test_connections_are_counted() -> None:
    async def main() -> None:
        async with rig(answer_list, limits={"connections": 2}) as r:
            await r.connect()
            await r.connect()
            assert (await (await r.connect()).answer()).status == 503

    run(main())


def test_a_client_that_does_not_read_loses_its_slot_and_holds_no_memory() -> None:
    sent = 0

    async def script(request: EngineRequest) -> None:
        nonlocal sent
        await request.send(STREAM_HEAD)
        event = chunk(b"data: " + b"x" * 60_000 + b"\n\n")
        while True:  # ends when the relay closes the connection
            await request.send(event)
            sent += len(event)

    async def main() -> None:
        async with rig(script, slots=1, limits={"write_stall_s": 0.3}) as r:
            client = await r.post(body=b'{"stream":true}')
            client.writer.transport.pause_reading()
            await until(lambda: r.app.admission.running == 1)
            await until(lambda: r.app.admission.running == 0)
            assert sent < 32 << 20

    run(main())


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models", "/v1//models", "/v1/models/", "/V1/models", "/v1/./models", "/v1/%6dodels", "/%2e%2e/props",
        "/v1%2fmodels", "/slots/0", "/slots/0?action=erase", "/tools", "/mcp", "/cors-proxy", "/models/load",
        "/lora-adapters", "/v1/chat/completions/control", "/v1/stream?conv_id=x", "/v1/streams/lookup", "/health",
        "/predict", "/props#x/../y", "*",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_only_exact_open_paths_get_through(path: str, method: str) -> None:
    async def main() -> None:
        async with rig(answer_list) as r:
            answer = await (await r.get(path, method=method)).answer()
            if path == "/props#x/../y" and method == "GET":
                assert r.requests[0].line == b"GET /props HTTP/1.1"  # a fragment is not part of the path
                return
            assert answer.status in (400, 404, 405)
            assert json.loads(answer.body)["error"]["type"] == "invalid_request_error"
            assert r.requests == []

    run(main())


def test_methods_that_change_the_engine_are_closed() -> None:
    async def main() -> None:
        async with rig(answer_list) as r:
            for path in ("/props", "/slots", "/v1/models"):
                assert (await (await r.post(path)).answer()).status == 405
            assert r.requests == []

    run(main())


def test_head_options_and_query_strings() -> None:
    async def script(request: EngineRequest) -> None:
        head = json_answer(BODY)
        await request.send(head[: -len(BODY)] if request.line.startswith(b"HEAD") else head)

    async def main() -> None:
        async with rig(script) as r:
            client = await r.get("/v1/models?x=1", method="HEAD")
            answer = await client.answer(bodiless=True)
            assert (answer.status, answer.headers["content-length"]) == (200, str(len(BODY)))
            await client.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")  # nothing of a body came in between
            assert (await client.answer()).body == BODY
            assert r.requests[0].line == b"HEAD /v1/models?x=1 HTTP/1.1"
            options = await (await r.get("/v1/chat/completions", method="OPTIONS")).answer(bodiless=True)
            assert (options.status, options.headers["allow"]) == (204, "OPTIONS, POST")
            for path, body in (("/healthz", b"ok\n"), ("/readyz", b"ready\n")):
                assert (await (await r.get(path)).answer()).body == body
                assert (await (await r.get(path, method="HEAD")).answer(bodiless=True)).status == 200
            assert b"smol" in (await (await r.get("/status")).answer()).body

    run(main())


def test_keep_alive_and_pipelining_answer_in_order() -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(json_answer(request.line))

    async def main() -> None:
        async with rig(script) as r:
            client = await r.ask(b"".join(b"GET /props?%d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(5)))
            for i in range(5):
                assert (await client.answer()).body == b"GET /props?%d HTTP/1.1" % i

    run(main())


def test_a_client_that_pipelines_and_goes_away_is_noticed() -> None:
    async def script(request: EngineRequest) -> None:
        await request.gone()

    async def main() -> None:
        async with rig(script) as r:
            ask = b"POST /v1/embeddings HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
            client = await r.ask(ask + ask)
            await until(lambda: r.app.admission.running == 1 and r.requests)
            await client.send(ask * 3)
            client.close()
            await until(lambda: r.app.admission.running == 0)
            assert len(r.requests) == 1

    run(main())


def test_a_long_pipeline_is_answered_in_order_and_in_small_memory() -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(json_answer(request.line))

    async def main() -> None:
        async with rig(script) as r:
            client = await r.connect()
            for i in range(300):
                await client.send(b"GET /props?%d HTTP/1.1\r\nX: %b\r\n\r\n" % (i, b"x" * 500))
            for i in range(300):
                assert (await client.answer()).body == b"GET /props?%d HTTP/1.1" % i

    run(main())


def test_what_was_asked_before_garbage_is_answered_before_the_end() -> None:
    async def main() -> None:
        async with rig(answer_list) as r:
            client = await r.ask(b"GET /props HTTP/1.1\r\n\r\nGET /slots HTTP/1.1\r\n\r\n\x00garbage\r\n\r\n")
            for _ in range(2):
                assert (await client.answer()).status == 200
            assert await client.closed()

    run(main())


def test_expect_100_continue() -> None:
    async def script(request: EngineRequest) -> None:
        assert request.get(b"expect") == []
        await request.send(json_answer(request.body))

    async def main() -> None:
        async with rig(script) as r:
            head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
            client = await r.ask(head)
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"{}")
            assert (await client.answer()).body == b"{}"

    run(main())


def test_clients_of_http_1_0_get_no_chunks() -> None:
    events = b'data: {"a":1}\n\ndata: [DONE]\n\n'

    async def script(request: EngineRequest) -> None:
        if request.line.startswith(b"GET"):
            await answer_list(request)
            return
        await request.send(STREAM_HEAD + chunk(events[:20]))
        await request.send(chunk(events[20:]) + b"0\r\n\r\n")

    async def main() -> None:
        async with rig(script) as r:
            head = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: 15\r\n\r\n"
            client = await r.ask(head + b'{"stream":true}')
            answer = await client.answer()
            assert "transfer-encoding" not in answer.headers
            assert (answer.body, answer.headers["connection"]) == (events, "close")
            answer = await (await r.ask(b"GET /v1/models HTTP/1.0\r\n\r\n")).answer()
            assert (answer.body, answer.headers["content-length"]) == (BODY, str(len(BODY)))

    run(main())


def test_upgrades_are_served_as_plain_requests() -> None:
    async def main() -> None:
        async with rig(answer_list) as r:
            answer = await (await r.get("/v1/models", "Connection: Upgrade", "Upgrade: websocket")).answer()
            assert (answer.status, answer.body) == (200, BODY)
            assert r.requests[0].get(b"upgrade") == []

    run(main())


KEYS = KeyRing.parse("alice:sesame\nbob:olive\n", "keys")


def test_keys_are_asked_for_everywhere_but_on_health() -> None:
    async def main() -> None:
        async with rig(answer_list, keys=KEYS) as r:
            for path in ("/v1/models", "/metrics", "/status", "/slots", "/nowhere"):
                answer = await (await r.get(path)).answer()
                assert (answer.status, json.loads(answer.body)["error"]["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert (await (await r.get(path, "Authorization: Bearer wrong")).answer()).status == 401
            for path in ("/", "/healthz", "/readyz"):
                assert (await (await r.get(path)).answer()).status == 200
            for header in ("Authorization: Bearer sesame", "X-Api-Key: olive"):
                assert (await (await r.get("/v1/models", header)).answer()).status == 200
            assert all(not q.get(b"authorization") and not q.get(b"x-api-key") for q in r.requests)

    run(main())


def test_keys_change_at_reload() -> None:
    from dataclasses import replace

    from relay_rig import CONFIG

    async def main() -> None:
        async with rig(answer_list, keys=KEYS) as r:
            r.app.configure(replace(CONFIG, keys=KeyRing.parse("alice:other\n", "keys")))
            assert (await (await r.get("/v1/models", "X-Api-Key: sesame")).answer()).status == 401
            assert (await (await r.get("/v1/models", "X-Api-Key: other")).answer()).status == 200

    run(main())


def test_per_key_limit_names_itself() -> None:
    async def script(request: EngineRequest) -> None:
        await request.gone()

    async def main() -> None:
        async with rig(script, keys=KEYS, slots=1, queue_per_key=1) as r:
            alice = "Authorization: Bearer sesame"
            await r.post("/v1/embeddings", b"{}", alice)
            await until(lambda: r.requests)
            await r.post("/v1/embeddings", b"{}", alice)
            await until(lambda: r.app.admission.waiting == 1)
            refused = await (await r.post("/v1/embeddings", b"{}", alice)).answer()
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (429, "key_limit")
            await r.post("/v1/embeddings", b"{}", "X-Api-Key: olive")
            await until(lambda: r.app.admission.waiting == 2)

    run(main())


def test_a_keys_own_limits_are_429_and_its_tokens_counted() -> None:
    keys = KeyRing.parse("alice:sesame concurrency=1\nbob:olive tokens_per_minute=10\n", "keys")

    async def script(request: EngineRequest) -> None:
        if b"hang" in request.body:
            await request.gone()
        await request.send(json_answer(b'{"usage":{"prompt_tokens":9,"completion_tokens":3}}'))

    async def main() -> None:
        async with rig(script, keys=keys) as r:
            alice, bob = "X-Api-Key: sesame", "X-Api-Key: olive"
            await r.post("/v1/embeddings", b'{"input":"hang"}', alice)
            await until(lambda: r.requests)
            refused = await (await r.post("/v1/embeddings", b"{}", alice)).answer()
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (429, "key_concurrency")
            assert (await (await r.post("/v1/completions", b"{}", bob)).answer()).status == 200
            await until(lambda: r.app.admission.running == 1)
            refused = await (await r.post("/v1/completions", b"{}", bob)).answer()
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (429, "key_tokens_per_minute")
            assert 1 <= int(refused.headers["retry-after"]) <= 18
            page = (await (await r.get("/metrics", bob)).answer()).body.decode()
            assert 'llamaops_key_tokens_total{key="bob",kind="prompt"} 9.0' in page.splitlines()

    run(main())


PREFLIGHT = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,content-type")


def test_only_listed_pages_may_call() -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(
            b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\n"
            b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )

    async def main() -> None:
        async with rig(script, keys=KEYS, cors_origins=("https://a.example",)) as r:
            yes, no = "Origin: https://a.example", "Origin: https://a.example.evil"
            answer = await (await r.get("/v1/models", yes, "X-Api-Key: olive")).answer()
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
            assert "access-control-allow-credentials" not in answer.headers
            assert answer.headers["vary"] == "Origin"
            answer = await (await r.get("/v1/models", no, "X-Api-Key: olive")).answer()
            assert not [h for h in answer.headers if h.startswith("access-control-")]
            assert answer.headers["vary"] == "Origin"
            refused = await (await r.get("/v1/models", yes)).answer()  # the page must be able to read the error
            assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
            asked = await r.get("/v1/chat/completions", yes, *PREFLIGHT, method="OPTIONS")
            preflight = await asked.answer(bodiless=True)
            assert preflight.status == 204
            assert preflight.headers["access-control-allow-methods"] == "OPTIONS, POST"
            assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
            denied = await (await r.get("/v1/chat/completions", no, *PREFLIGHT, method="OPTIONS")).answer(bodiless=True)
            assert not [h for h in denied.headers if h.startswith("access-control-")]

    run(main())
