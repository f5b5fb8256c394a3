"""The clients people have, against the relay with the real engine: each must find its own service there."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from langchain_openai import ChatOpenAI
from running import Running, Up

NODE = Path(__file__).with_name("node")
TEMPLATE = Path(__file__).with_name("tools.jinja")
SAY: list[Any] = [{"role": "user", "content": "Say hello é漢😀."}]
GREEDY: dict[str, Any] = {"model": "quickstart", "temperature": 0, "max_tokens": 16}
ALONE = {"cache_prompt": False}
"""Two runs of one prompt give the same text only if the second doesn't begin with the first one's cache."""
COLOUR: dict[str, Any] = {
    "type": "object", "required": ["name", "warm"], "additionalProperties": False,
    "properties": {"name": {"enum": ["red", "green", "blue"]}, "warm": {"type": "boolean"}},
}
TOOL: Any = {"type": "function", "function": {
    "name": "set_colour", "description": "Set the colour of the lamp.", "parameters": COLOUR}}


def client(running: Running, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120, **options)


def test_openai_chat_whole_and_streamed(up: Up) -> None:
    with client(up()) as api:
        whole = api.chat.completions.create(messages=SAY, extra_body=ALONE, **GREEDY)
        assert whole.usage is not None
        assert 0 < whole.usage.completion_tokens <= 16
        text, finish, usage = "", None, None
        with api.chat.completions.create(messages=SAY, stream=True, extra_body=ALONE,
                                         stream_options={"include_usage": True}, **GREEDY) as stream:
            for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    finish = choice.finish_reason or finish
        assert text == whole.choices[0].message.content
        assert finish == whole.choices[0].finish_reason
        assert usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens
        raw = api.chat.completions.with_raw_response.create(messages=SAY, extra_headers={"X-Request-Id": "mine-1"},
                                                            **GREEDY)
        assert raw.headers["x-request-id"] == "mine-1"
        scored = api.chat.completions.create(messages=SAY, logprobs=True, top_logprobs=2, **GREEDY).choices[0]
        assert scored.logprobs is not None and scored.logprobs.content
        plain = api.completions.create(prompt="Once upon a time", extra_body=ALONE, **GREEDY)
        pieces = api.completions.create(prompt="Once upon a time", stream=True, extra_body=ALONE, **GREEDY)
        assert "".join(piece.choices[0].text for piece in pieces) == plain.choices[0].text


def test_openai_async_streams_beside_each_other(up: Up) -> None:
    running = up("--set", "serve.slots=2")

    async def ask(api: openai.AsyncOpenAI, word: str) -> str:
        messages: Any = [{"role": "user", "content": f"Say {word}."}]
        stream = await api.chat.completions.create(messages=messages, stream=True, **GREEDY)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as api:
            return await asyncio.gather(*(ask(api, word) for word in ("yes", "no", "tree", "sea")))

    assert all(asyncio.run(run()))


def test_openai_tools_and_structured_output(up: Up) -> None:
    """The small model calls no tool, and this engine does not force it to: the tools must reach the engine's prompt."""
    with client(up("--set", "engine.args=['--chat-template-file', '" + str(TEMPLATE) + "']")) as api:
        options: Any = GREEDY | {"messages": [{"role": "user", "content": "Make the lamp red."}], "extra_body": ALONE}
        without = api.chat.completions.create(**options)
        whole = api.chat.completions.create(tools=[TOOL], tool_choice="auto", **options)
        assert without.usage is not None and whole.usage is not None
        assert whole.usage.prompt_tokens > without.usage.prompt_tokens + 50
        chunks = list(api.chat.completions.create(tools=[TOOL], tool_choice="auto", stream=True, **options))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        call: Any = {"id": "c1", "type": "function",
                     "function": {"name": "set_colour", "arguments": '{"name": "red", "warm": true}'}}
        history: Any = [*options["messages"], {"role": "assistant", "tool_calls": [call]},
                        {"role": "tool", "tool_call_id": "c1", "content": "done"}]
        assert api.chat.completions.create(**options | {"messages": history}, tools=[TOOL]).choices
        form: Any = {"type": "json_schema", "json_schema": {"name": "colour", "strict": True, "schema": COLOUR}}
        content = api.chat.completions.create(response_format=form, **options | {"max_tokens": 96})
        assert set(json.loads(content.choices[0].message.content or "")) == {"name", "warm"}


def test_openai_responses(up: Up) -> None:
    options: Any = {"model": "quickstart", "input": "Say hello.", "temperature": 0, "max_output_tokens": 16}
    with client(up()) as api:
        whole = api.responses.create(**options)
        assert whole.output_text
        with api.responses.create(stream=True, **options) as stream:
            events = list(stream)
        assert events[0].type == "response.created"
        assert events[-1].type == "response.completed"
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == \
            events[-1].response.output_text


def test_openai_understands_what_goes_wrong(up: Up) -> None:
    with client(up("--set", "model.aliases=['small']")) as api:
        assert api.chat.completions.create(messages=SAY, **GREEDY | {"model": "small"}).choices
        with pytest.raises(openai.NotFoundError, match="quickstart, small") as missing:
            api.chat.completions.create(messages=SAY, **GREEDY | {"model": "gpt-5"})
        assert missing.value.code == "model_not_found"
        assert missing.value.request_id
        with pytest.raises(openai.BadRequestError):
            api.chat.completions.create(messages=[], stream=True, extra_body={"messages": "none"}, **GREEDY)
        with pytest.raises(openai.BadRequestError):
            long = "tree " * 6000  # over the context: the engine's own error, before any event
            api.chat.completions.create(messages=[{"role": "user", "content": long}], stream=True, **GREEDY)


def test_anthropic_messages(up: Up) -> None:
    # Not SAY: when the answer's first token is half a character, b11434 sends no message_start, and the client fails.
    said = [{"role": "user", "content": "Say hello."}]
    ask: Any = {"model": "quickstart", "max_tokens": 16, "messages": said, "extra_body": {"temperature": 0} | ALONE}
    with anthropic.Anthropic(base_url=up().url, api_key="none", max_retries=0, timeout=120) as api:
        (block,) = api.messages.create(**ask).content
        assert block.type == "text" and block.text
        with api.messages.stream(**ask) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        assert text and message.content[0].type == "text"
        assert message.content[0].text == text
        assert message.stop_reason in ("max_tokens", "end_turn")
        assert message.usage.output_tokens > 0
        assert api.messages.count_tokens(model="quickstart", messages=SAY).input_tokens > 0
        with pytest.raises(anthropic.NotFoundError):
            api.messages.create(**ask | {"model": "absent"})


def test_langchain(up: Up) -> None:
    model = ChatOpenAI(base_url=f"{up().url}/v1", api_key="none", model="quickstart", temperature=0, max_retries=0,
                       max_completion_tokens=16, stream_usage=True, extra_body=ALONE)
    whole = model.invoke("Say hello.")
    pieces = list(model.stream("Say hello."))
    assert whole.text
    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0
    assert any(piece.usage_metadata for piece in pieces)

    async def streamed() -> str:
        return "".join([piece.text async for piece in model.astream("Say hello.")])

    assert asyncio.run(streamed()) == whole.text


def test_curl(up: Up) -> None:
    running = up()

    def curl(*args: str) -> str:
        done = subprocess.run(["curl", "-sS", "--max-time", "100", *args], capture_output=True, text=True, check=True)
        return done.stdout

    url = f"{running.url}/v1/completions"
    body = json.dumps({"prompt": "Once upon a time", "stream": True, "max_tokens": 4, "ignore_eos": True})
    for flags in ([], ["--http1.0"], ["-H", "Expect: 100-continue"], ["-H", "Transfer-Encoding: chunked"],
                  ["--compressed"]):
        events = [line for line in curl("-N", *flags, url, "-d", body).splitlines() if line]
        assert events[-1] == "data: [DONE]", flags
        assert len(events) >= 5
    head = curl("-I", f"{running.url}/v1/models")
    assert head.startswith("HTTP/1.1 200") and "x-request-id:" in head.lower()
    assert curl("-o", "/dev/null", "-w", "%{http_code}", "-X", "OPTIONS", url) == "204"
    both = curl("-w", "%{num_connects} ", f"{running.url}/healthz", f"{running.url}/v1/models", "-o", "/dev/null",
                "-o", "/dev/null")
    assert both.split() == ["1", "0"], "the second request comes on the first one's connection"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with Node's OpenAI client in it."""
    folder = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(NODE, folder, ignore=shutil.ignore_patterns("node_modules"))
    done = subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder, capture_output=True,
                          text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


def test_openai_for_node(up: Up, node: Path) -> None:
    running = up()
    done = subprocess.run(["node", "chat.mjs", running.url], cwd=node, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["models"] == ["quickstart"]
    assert said["streamed"] == said["whole"] != ""
    assert said["finish"] in ("length", "stop")
    assert said["usage"]["completion_tokens"] > 0
    assert said["chunks"] > 3
    assert (said["refused"]["status"], said["refused"]["code"]) == (404, "model_not_found")
    assert said["refused"]["request_id"].startswith("req_")
