"""The relay between scripted engines and raw clients: bytes, failures, cancelling, the queue."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from relay_rig import STREAM_HEAD, EngineRequest, Rig, chunk, json_answer, rig, run, until

from llamaops.serve.traffic import Unready

ASK = b'{"stream":true}'
HELLO = b'data: {"choices":[{"delta":{"content":"h\xc3\xa9llo\xe2\x80\xa8"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


async def stream_hello(request: EngineRequest) -> None:
    await request.send(STREAM_HEAD + chunk(HELLO) + chunk(DONE) + b"0\r\n\r\n")


async def hang(request: EngineRequest) -> None:
    await request.gone()


def test_what_the_engine_says_reaches_the_client_untouched() -> None:
    async def main() -> None:
        async with rig(stream_hello) as r:
            answer = await (await r.post(body=ASK)).answer()
            assert (answer.status, answer.body, answer.complete) == (200, HELLO + DONE, True)
            assert answer.headers["content-type"] == "text/event-stream"
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-accel-buffering"] == "no"
            assert "access-control-allow-origin" not in answer.headers
            assert "keep-alive" not in answer.headers
            assert "content-encoding" not in answer.headers

    run(main())


def test_the_engine_gets_the_request_without_what_is_not_for_it() -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(json_answer(b'{"object":"list"}'))

    async def main() -> None:
        async with rig(script) as r:
            client = await r.post(
                "/v1/embeddings?a=%20b&c", b'{"input":"x"}', "Authorization: Bearer k", "X-Api-Key: k", "X-Own: 1",
                "Connection: keep-alive, X-Secret-Hop", "X-Secret-Hop: 1", "Accept-Encoding: gzip", "TE: trailers",
                "X-Conversation-Id: c", "Origin: http://page", "X-Own: 2",
            )
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b'{"object":"list"}')
            (request,) = r.requests
            assert request.line == b"POST /v1/embeddings?a=%20b&c HTTP/1.1"
            assert request.body == b'{"input":"x"}'
            assert request.headers == [
                (b"host", b"x"), (b"content-type", b"application/json"), (b"x-own", b"1"), (b"x-own", b"2"),
                (b"connection", b"close"), (b"content-length", b"13"),
            ]

    run(main())


def test_events_arrive_one_by_one_as_they_are_sent() -> None:
    steps: asyncio.Queue[bytes]

    async def script(request: EngineRequest) -> None:
        await request.send(STREAM_HEAD)
        while data := await steps.get():
            await request.send(chunk(data))
        await request.send(b"0\r\n\r\n")

    async def main() -> None:
        nonlocal steps
        steps = asyncio.Queue()
        async with rig(script) as r:
            client = await r.post(body=ASK)
            status, _ = await client.head()  # the headers come before any event was sent
            assert status == 200
            for i in range(5):
                piece = b"data: {}\n\n" if i else b"data: {"  # an event cut in two is not waited for
                await steps.put(piece)
                assert await client.chunk() == piece
            await steps.put(b"")
            assert await client.chunk() == b""

    run(main())


OPENAI = b'data: {"error":{"message":"REASON","type":"server_error","code":"engine_died","param":null}}'
FAMILIES = [
    ("/v1/chat/completions", OPENAI),
    ("/v1/completions", OPENAI),
    ("/completion", OPENAI),
    ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"REASON"}}'),
    (
        "/v1/responses",
        b'event: response.failed\ndata: {"type":"response.failed","response":{"id":"resp_1","object":"response",'
        b'"status":"failed","error":{"code":"server_error","message":"REASON"},"output":[]}}',
    ),
]
WHOLE = b'event: x\ndata: {"response":{"id":"resp_1"}}\n\n'
CUT = b'data: {"id":"resp_1"}\n\ndata: {"choi'


@pytest.mark.parametrize(("path", "event"), FAMILIES, ids=[f[0] for f in FAMILIES])
@pytest.mark.parametrize("sent", [WHOLE, CUT], ids=["between", "inside"])
def test_an_engine_that_dies_in_a_stream_becomes_one_error_event(path: str, event: bytes, sent: bytes) -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(STREAM_HEAD + chunk(sent))
        await release.wait()
        request.die()

    async def main() -> None:
        nonlocal release
        release = asyncio.Event()
        async with rig(script) as r:
            client = await r.post(path, ASK)
            await client.head()
            assert await client.chunk() == sent
            release.set()
            last = await client.chunk()
            assert await client.chunk() == b""
            reason = b"the engine closed the connection before its answer was complete"
            assert last == (b"" if sent.endswith(b"\n\n") else b"\n\n") + event.replace(b"REASON", reason) + b"\n\n"
            assert b"[DONE]" not in last
            assert r.traffic.in_flight() == 0
            assert r.app.admission.running == 0

    release: asyncio.Event
    run(main())


def test_the_supervisor_ends_a_stream_with_its_reason() -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(STREAM_HEAD + chunk(HELLO))
        await request.gone()
        seen.set()

    async def main() -> None:
        nonlocal seen
        seen = asyncio.Event()
        async with rig(script) as r:
            client = await r.post(body=ASK)
            await client.head()
            await client.chunk()
            r.traffic.abort_all("the engine made no progress for 60 s")
            assert json.loads((await client.chunk())[6:])["error"]["message"] == "the engine made no progress for 60 s"
            assert await client.chunk() == b""
            await seen.wait()

    seen: asyncio.Event
    run(main())


async def die(request: EngineRequest) -> None:
    request.die()


async def speak_nonsense(request: EngineRequest) -> None:
    await request.send(b"220 mail.example ESMTP\r\n")
    await request.gone()


@pytest.mark.parametrize("script", [die, speak_nonsense])
def test_an_engine_that_fails_before_its_headers_is_502(script: object) -> None:
    async def main() -> None:
        async with rig(script) as r:  # type: ignore[arg-type]
            answer = await (await r.post(body=ASK)).answer()
            assert answer.status == 502
            assert json.loads(answer.body)["error"]["code"] == "engine_died"

    run(main())


def test_an_engine_that_does_not_listen_is_502_and_one_that_is_not_ready_503() -> None:
    async def main() -> None:
        async with rig(hang) as r:
            r.state = Unready("starting", "loading the model, 40 %", 3.2)
            answer = await (await r.post(body=ASK)).answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "3")
            assert "loading the model" in json.loads(answer.body)["error"]["message"]
            ready = await (await r.get("/readyz")).answer()
            assert (ready.status, ready.headers["retry-after"]) == (503, "3")
            assert (await (await r.get("/healthz")).answer()).status == 200
            from llamaops.serve.traffic import Endpoint

            r.state = Endpoint("/nonexistent/engine.sock", None, 2)
            answer = await (await r.post(body=ASK)).answer()
            assert answer.status == 502
            assert (await (await r.get("/readyz")).answer()).status == 200

    run(main())


def test_the_engines_own_refusal_passes_as_it_is() -> None:
    body = b'{"error":{"code":400,"message":"bad","type":"invalid_request_error"}}'

    async def script(request: EngineRequest) -> None:
        await request.send(json_answer(body, "400 Bad Request"))

    async def main() -> None:
        async with rig(script) as r:
            answer = await (await r.post(body=ASK)).answer()
            assert (answer.status, answer.body) == (400, body)
            assert answer.headers["content-type"] == "application/json; charset=utf-8"

    run(main())


def test_a_plain_answer_cut_short_is_not_taken_for_a_whole_one() -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(json_answer(b'{"text":"0123456789"}')[:-5])
        request.die()

    async def main() -> None:
        async with rig(script) as r:
            answer = await (await r.post()).answer()
            assert (answer.status, answer.complete) == (200, False)

    run(main())


@pytest.mark.parametrize("stage", ["prefill", "decode", "plain"])
def test_a_client_that_goes_away_cancels_its_request(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llamaops.request")

    async def script(request: EngineRequest) -> None:
        if stage == "decode":
            await request.send(STREAM_HEAD + chunk(HELLO))
        entered.set()
        await request.gone()
        seen.set()

    async def main() -> None:
        nonlocal seen, entered
        seen, entered = asyncio.Event(), asyncio.Event()
        async with rig(script, slots=1) as r:
            client = await r.post(body=b"{}" if stage == "plain" else ASK)
            if stage == "decode":
                await client.head()
            await entered.wait()
            client.close()
            await seen.wait()
            await until(lambda: r.app.admission.running == 0)
            assert r.traffic.in_flight() == 0

    seen: asyncio.Event
    entered: asyncio.Event
    run(main())
    assert "cancelled=yes" in caplog.text


def test_a_client_that_goes_away_in_the_queue_is_forgotten() -> None:
    async def main() -> None:
        async with rig(hang, slots=1) as r:
            first = await r.post(body=ASK)
            await until(lambda: r.requests)
            second = await r.post(body=ASK)
            await until(lambda: r.app.admission.waiting == 1)
            second.close()
            await until(lambda: r.app.admission.waiting == 0)
            assert len(r.requests) == 1
            first.close()

    run(main())


def test_the_queue_answers_429_and_504_with_retry_after() -> None:
    async def main() -> None:
        async with rig(hang, slots=1, queue_depth=1, queue_timeout_s=0.2) as r:
            await r.post(body=ASK)
            await until(lambda: r.requests)
            waiting = await r.post(body=ASK)
            await until(lambda: r.app.admission.waiting == 1)
            refused = await (await r.post(body=ASK)).answer()
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            late = await waiting.answer()
            assert (late.status, json.loads(late.body)["error"]["code"]) == (504, "queue_timeout")
            assert int(late.headers["retry-after"]) >= 1

    run(main())


def test_a_stream_that_waits_gets_headers_and_comments_and_then_its_events() -> None:
    async def script(request: EngineRequest) -> None:
        if len(r.requests) == 1:
            await release.wait()
        await request.send(STREAM_HEAD + chunk(b'data: {"id"'))
        await release2.wait()
        await request.send(chunk(b":1}\n\n") + b"0\r\n\r\n")

    async def main() -> None:
        nonlocal r, release, release2
        release, release2 = asyncio.Event(), asyncio.Event()
        async with rig(script, slots=1, ping_interval_s=0.05) as r:
            first = await r.post(body=ASK)
            await until(lambda: r.requests)
            queued = await r.post(body=ASK)
            for client in (first, queued):  # one is in prefill, one in the queue
                status, headers = await client.head()
                assert (status, headers["content-type"]) == (200, "text/event-stream")
                assert await client.chunk() == b": ping\n"
            release.set()
            while (data := await first.chunk()) == b": ping\n":
                pass
            assert data == b'data: {"id"'  # and no comment inside an event
            await asyncio.sleep(0.12)
            release2.set()
            assert await first.chunk() == b":1}\n\n"
            assert await first.chunk() == b""
            body = b""
            while data := await queued.chunk():
                body += data
            assert body.replace(b": ping\n", b"") == b'data: {"id":1}\n\n'

    r: Rig
    release: asyncio.Event
    release2: asyncio.Event
    run(main())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
                                  "/completion", "/infill"])
def test_text_asked_of_a_model_that_embeds_is_refused_with_the_way_to_go(path: str) -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(json_answer(b'{"data":[]}', "200 OK"))

    async def main() -> None:
        async with rig(script, embeds=True) as r:
            answer = await (await r.post(path, ASK)).answer()
            assert answer.status == 400
            error = json.loads(answer.body)["error"]
            assert "/v1/embeddings" in error["message"]
            assert not r.requests
            for open_path in ("/v1/embeddings", "/v1/rerank", "/tokenize"):
                assert (await (await r.post(open_path, b"{}")).answer()).status == 200

    run(main())


@pytest.mark.parametrize("mended", [True, False])
def test_what_comes_while_a_reload_leaves_no_engine_waits_for_the_new_one(mended: bool) -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(STREAM_HEAD + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def main() -> None:
        async with rig(script, ping_interval_s=0.05) as r:
            serving, r.state = r.state, Unready("stopping", "the engine is being restarted", 5.0)
            r.awaited = asyncio.get_running_loop().create_future()
            stream, plain = await r.post(body=ASK), await r.post("/tokenize", b"{}")
            assert (await stream.head())[0] == 200
            assert await stream.chunk() == b": ping\n"
            assert (await (await r.get("/readyz")).answer()).status == 503
            assert not r.requests
            r.state = serving if mended else Unready("failed", "the new engine did not start", None)
            r.awaited.set_result(None)
            while (data := await stream.chunk()) == b": ping\n":
                pass
            if mended:
                assert data == b"data: [DONE]\n\n"
                assert (await plain.answer()).status == 200
            else:
                assert json.loads(data[6:])["error"]["code"] == "engine_unavailable"
                assert (await plain.answer()).status == 503

    run(main())


def test_a_refusal_that_comes_after_early_headers_becomes_an_error_event() -> None:
    async def script(request: EngineRequest) -> None:
        await release.wait()
        await request.send(json_answer(b'{"error":{"code":400,"message":"too long"}}', "400 Bad Request"))

    async def main() -> None:
        nonlocal release
        release = asyncio.Event()
        async with rig(script, ping_interval_s=0.05) as r:
            client = await r.post(body=ASK)
            await client.head()
            release.set()
            while (data := await client.chunk()) == b": ping\n":
                pass
            assert json.loads(data[6:])["error"]["message"] == "too long"
            assert await client.chunk() == b""

    release: asyncio.Event
    run(main())


def test_a_model_that_is_not_here_is_404_with_the_names() -> None:
    async def main() -> None:
        async with rig(stream_hello) as r:
            for name in ("smol", "smol-chat", "gpt-x"):
                answer = await (await r.post(body=json.dumps({"model": name, "stream": True}).encode())).answer()
                assert answer.status == 200
            answer = await (await r.post(body=b'{"model":"other"}')).answer()
            error = json.loads(answer.body)["error"]
            assert (answer.status, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert "smol, smol-chat, gpt-x" in error["message"]
            assert len(r.requests) == 3

    run(main())


def test_large_bodies_pass_and_larger_ones_are_413() -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(json_answer(b"%d" % len(request.body)))

    async def main() -> None:
        async with rig(script) as r:
            body = b'{"image":"' + b"A" * (20 << 20) + b'"}'
            answer = await (await r.post(body=body)).answer()
            assert (answer.status, answer.body) == (200, b"%d" % len(body))
            client = await r.ask(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
            answer = await client.answer()
            error = json.loads(answer.body)["error"]
            assert answer.status == 413
            assert "32 MiB" in error["message"]
            assert "serve.max_body_mib" in error["message"]

    run(main())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize"])
def test_chunked_uploads_reach_the_engine_whole(path: str) -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(json_answer(request.body))

    async def main() -> None:
        async with rig(script, max_body_bytes=1 << 20) as r:
            client = await r.ask(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            pieces = [b'{"input":"', "😀é漢".encode()[:3], "😀é漢".encode()[3:], b"x" * 300_000, b'"}']
            for piece in pieces:
                await client.send(chunk(piece))
            await client.send(b"0\r\n\r\n")
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"".join(pieces))
            over = await r.ask(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for _ in range(17):
                await over.send(chunk(b"y" * (1 << 16)))
            assert (await over.answer()).status == 413

    run(main())


def test_the_request_id_is_kept_where_it_is_harmless() -> None:
    async def main() -> None:
        async with rig(stream_hello) as r:
            kept = await (await r.post("/v1/chat/completions", ASK, "X-Request-Id: abc-1.2")).answer()
            assert kept.headers["x-request-id"] == "abc-1.2"
            made = await (await r.post("/v1/chat/completions", ASK, "X-Request-Id: a b=c")).answer()
            assert made.headers["x-request-id"].startswith("req_")
            refused = await (await r.get("/nowhere", "X-Request-Id: xyz")).answer()
            assert (refused.status, refused.headers["x-request-id"]) == (404, "xyz")

    run(main())


def test_a_request_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llamaops.request")
    counts = b'"usage":{"prompt_tokens":7,"completion_tokens":3}'
    usage = b'data: {"choices":[{"finish_reason":"stop","delta":{}}],' + counts + b"}\n\n"
    role = chunk(b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n')

    async def script(request: EngineRequest) -> None:
        await request.send(STREAM_HEAD + role + chunk(HELLO))
        await asyncio.sleep(0.01)
        await request.send(chunk(HELLO) + chunk(usage) + chunk(DONE) + b"0\r\n\r\n")

    async def main() -> None:
        async with rig(script) as r:
            await (await r.post("/v1/chat/completions", ASK, "X-Request-Id: log-me")).answer()
            answer = await (await r.get("/metrics")).answer()
            page = answer.body.decode()
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            for line in (
                'llamaops_requests_total{endpoint="/v1/chat/completions",outcome="ok"} 1.0',
                "llamaops_prompt_tokens_total 7.0",
                "llamaops_output_tokens_total 3.0", "llamaops_ttft_seconds_count 1.0", "llamaops_itl_seconds_count 1.0",
                "llamaops_queue_seconds_count 1.0", "llamaops_requests_in_flight 0.0", "llamaops_queue_depth 0.0",
            ):
                assert line in page.splitlines()

    run(main())
    (line,) = [record.getMessage() for record in caplog.records if "log-me" in record.getMessage()]
    for part in ("status=200", "outcome=ok", "prompt_tokens=7", "output_tokens=3", "finish=stop", "ttft_ms=", "tok_s="):
        assert part in line
