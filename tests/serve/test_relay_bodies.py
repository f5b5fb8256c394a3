"""Many large bodies at once: within the budget, or refused; small ones always get in."""

from __future__ import annotations

import asyncio
import json

from relay_rig import EngineRequest, json_answer, rig, run, until

MIB = 1 << 20


def test_bodies_that_wait_are_held_within_a_budget() -> None:
    release = asyncio.Event()

    async def script(request: EngineRequest) -> None:
        await release.wait()
        await request.send(json_answer(b"%d" % len(request.body)))

    async def main() -> None:
        async with rig(script, slots=1, max_body_bytes=MIB, queue_depth=100) as r:
            large = b"{%b}" % (b" " * (MIB - 2))
            clients = [await r.post("/v1/completions", b"{}")]  # has the slot
            await until(lambda: r.requests)
            clients += [await r.post("/v1/completions", large) for _ in range(8)]
            refused = 0
            for client in clients[1:]:
                await until(lambda: r.app.admission.waiting == 4)
                if client.reader._buffer:  # type: ignore[attr-defined]  # an answer has come already
                    answer = await client.answer()
                    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "bodies_full")
                    assert int(answer.headers["retry-after"]) >= 1
                    refused += 1
            assert r.app.relay.bodies.held <= 4 * MIB
            small = await r.post("/v1/completions", b'{"prompt": "hi"}')
            await until(lambda: r.app.admission.waiting == 5)
            release.set()
            assert (await small.answer()).status == 200
            await until(lambda: r.app.admission.running == r.app.admission.waiting == 0)
            assert r.app.relay.bodies.held == 0
            assert (await (await r.post("/v1/completions", large)).answer()).body == b"%d" % MIB

    run(main(), within=60)


def test_what_is_held_is_given_back_however_a_request_ends() -> None:
    async def script(request: EngineRequest) -> None:
        await request.gone()

    async def main() -> None:
        async with rig(script, slots=1, max_body_bytes=MIB) as r:
            bodies = r.app.relay.bodies
            leaver = await r.post("/v1/completions", b'{"prompt": "%b"}' % (b"a" * 500_000))
            await until(lambda: r.requests and bodies.held == 0)  # the engine has it
            half = await r.ask(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 600000\r\n\r\n" + b"{" * 300_000)
            await until(lambda: bodies.held >= 200_000)
            half.close()
            await until(lambda: bodies.held == 0)
            queued = await r.post("/v1/completions", b'{"prompt": "%b"}' % (b"a" * 500_000))
            await until(lambda: r.app.admission.waiting == 1)
            assert bodies.held > 500_000
            queued.close()
            await until(lambda: bodies.held == 0)
            wrong = await r.post("/v1/completions", b'{"model": "none", "prompt": "%b"}' % (b"a" * 500_000))
            assert (await wrong.answer()).status == 404
            over = await r.post("/v1/completions", b"a" * (MIB + 1))
            assert (await over.answer()).status == 413
            await until(lambda: bodies.held == 0)
            leaver.close()

    run(main(), within=60)
