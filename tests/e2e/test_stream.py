"""From a profile to a live stream: the real engine and model through real clients."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from typing import Any

import httpx
import openai
import pytest
from running import Up

PROMPTS = ["Say hi.", "Name three colours.", "Count to five.", "Why is the sky blue?", "Write one line about é漢😀."]
VARYING = re.compile(rb'"(id|created|[a-z_]*_ms|[a-z_]*_per_second|cache_n|prompt_n)":("[^"]*"|[0-9.e+-]+)')
"""Fields that differ between two runs of one request: ids, times, and what the prompt cache had from the run before."""


def same(body: bytes) -> bytes:
    """Return an answer without ids and times."""
    return VARYING.sub(rb'"\1":0', re.sub(rb'"(cached_tokens)":[0-9]+', rb'"\1":0', body))


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Return 20 requests: five prompts on two routes with two lengths."""
    fixed = {"temperature": 0, "seed": 7, "cache_prompt": False}
    chat = [("/v1/chat/completions", {"messages": [{"role": "user", "content": p}], "max_tokens": n} | fixed)
            for p in PROMPTS for n in (8, 24)]
    plain = [("/v1/completions", {"prompt": p, "max_tokens": n} | fixed) for p in PROMPTS for n in (8, 24)]
    return chat + plain


def test_bytes_equal_the_engines(up: Up) -> None:
    running = up()
    with running.engine_client() as engine, httpx.Client(base_url=running.url, timeout=120) as relay:
        for path, body in requests():
            for stream in (True, False):
                direct = engine.post(path, json=body | {"stream": stream})
                relayed = relay.post(path, json=body | {"stream": stream})
                assert relayed.status_code == direct.status_code == 200
                assert relayed.headers["content-type"] == direct.headers["content-type"]
                assert same(relayed.content) == same(direct.content), body
        assert same(relay.get("/v1/models").content) == same(engine.get("/v1/models").content)


def test_openai_client_streams_and_lists(up: Up) -> None:
    running = up()
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
    with client:
        assert [m.id for m in client.models.list()] == ["quickstart"]
        assert (one := client.models.retrieve("quickstart")).id == "quickstart"
        assert one.object == "model" and one.created > 0 and one.owned_by
        with pytest.raises(openai.NotFoundError, match="quickstart"):
            client.models.retrieve("gpt/x")
        stream = client.chat.completions.create(model="quickstart", stream=True, max_tokens=16, temperature=0,
                                                messages=[{"role": "user", "content": "Say hello."}])
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        whole = client.chat.completions.create(model="quickstart", max_tokens=16, temperature=0,
                                               messages=[{"role": "user", "content": "Say hello."}])
    assert text == whole.choices[0].message.content
    assert len(text) > 5


def test_openai_async_client(up: Up) -> None:
    running = up()

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="quickstart", stream=True, max_tokens=8, messages=[{"role": "user", "content": "Say hello."}],
                stream_options={"include_usage": True})
            usage = None
            async for chunk in stream:
                usage = chunk.usage or usage
            assert usage is not None
            return str(usage.completion_tokens)

    assert asyncio.run(ask()) == "8"


def test_curl_sees_events_and_engine_errors(up: Up) -> None:
    running = up()
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 4})
    done = subprocess.run(["curl", "-sN", f"{running.url}/v1/chat/completions", "-d", body], capture_output=True,
                          text=True, timeout=120, check=True)
    events = [line for line in done.stdout.splitlines() if line]
    assert events[-1] == "data: [DONE]"
    assert len(events) >= 5
    wrong = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": "no list", "stream": True})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"]


def test_health_and_ready(up: Up) -> None:
    running = up()
    assert httpx.get(f"{running.url}/healthz").status_code == 200
    assert httpx.get(f"{running.url}/readyz").status_code == 200
