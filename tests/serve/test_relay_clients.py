"""The official `openai` client, sync types and all, through the relay."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from relay_rig import STREAM_HEAD, EngineRequest, chunk, json_answer, rig, run

from llamaops.serve.auth import KeyRing

KEYS = KeyRing.parse("alice:sesame\n", "keys")


def delta(text: str) -> bytes:
    choice = {"index": 0, "finish_reason": None, "delta": {"role": "assistant", "content": text}}
    event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "smol", "choices": [choice]}
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


def client(port: int, key: str = "sesame") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


def test_a_stream_with_our_pings_between_its_events() -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(STREAM_HEAD)
        for text in ("Hé", "llo\u2028", "😀"):
            await asyncio.sleep(0.12)  # longer than the ping interval below
            await request.send(chunk(delta(text)))
        await request.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def main() -> None:
        async with rig(script, keys=KEYS, ping_interval_s=0.05) as r, client(r.port) as api:
            stream = await api.chat.completions.create(model="smol-chat", messages=[], stream=True)
            assert [event.choices[0].delta.content async for event in stream] == ["Hé", "llo\u2028", "😀"]

    run(main())


def test_a_stream_that_fails_raises() -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(STREAM_HEAD + chunk(delta("Hé")))
        request.die()

    async def main() -> None:
        async with rig(script, keys=KEYS) as r, client(r.port) as api:
            stream = await api.chat.completions.create(model="smol", messages=[], stream=True)
            with pytest.raises(openai.APIError, match="the engine closed the connection"):
                async for _ in stream:
                    pass

    run(main())


def test_errors_become_the_clients_own() -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(json_answer(b'{"error":{"code":400,"message":"no","type":"x"}}', "400 Bad"))

    async def main() -> None:
        async with rig(script, keys=KEYS) as r, client(r.port) as api, client(r.port, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
            with pytest.raises(openai.BadRequestError, match="no"):
                await api.chat.completions.create(model="smol", messages=[])
            with pytest.raises(openai.NotFoundError, match="smol, smol-chat, gpt-x") as caught:
                await api.chat.completions.create(model="gpt-4", messages=[])
            assert caught.value.code == "model_not_found"
            assert caught.value.request_id is not None

    run(main())


def test_leaving_a_stream_early_cancels_it() -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(STREAM_HEAD + chunk(delta("Hé")))
        await request.gone()
        cancelled.set()

    async def main() -> None:
        nonlocal cancelled
        cancelled = asyncio.Event()
        async with rig(script, keys=KEYS) as r, client(r.port) as api:
            stream = await api.chat.completions.create(model="smol", messages=[], stream=True)
            async with stream:
                async for _ in stream:
                    break
            await cancelled.wait()

    cancelled: asyncio.Event
    run(main())
