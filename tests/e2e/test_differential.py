"""Over 200 requests, good and bad, to the relay and past it to the engine: the answers must be the same bytes.

Left out of the comparison: ids, times, and what the prompt cache had from the run before. Where the relay is meant to
differ (INTENDED) that is named with its reason and held to it, so that no other difference hides there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from running import Up

FIXED: dict[str, Any] = {"temperature": 0, "seed": 7, "cache_prompt": False, "max_tokens": 3}
ID = re.compile(rb"\b(chatcmpl-|cmpl-|resp_|msg_|rs_|fc_|call_)[A-Za-z0-9]{16,}")
VARYING = re.compile(rb'"(id|created|created_at|completed_at|[a-z_]*_ms|[a-z_]*_per_second|cache_n|prompt_n'
                     rb'|cached_tokens|cache_read_input_tokens|input_tokens|n_ctx_used|id_slot|id_task|t_[a-z_]+|tokens_cached)"'
                     rb': ?("[^"]*"|[0-9.e+-]+|null)')
HEADERS_OF_ITS_OWN = {"x-request-id", "date", "server", "keep-alive", "connection", "transfer-encoding",
                      "content-length", "cache-control", "x-accel-buffering"}
"""The relay's, or about one connection only."""
TEXTS = ["Say hi.", "é漢😀 ẞ", "a\u2028b\u2029c\u0085d\x0be", "<|im_end|> &lt; \"quoted\" \\", "\t\n ",
         "xyz " * 90, "0"]


@dataclass(frozen=True)
class Ask:
    """One request; ``raw`` is a body that JSON would not make."""

    method: str
    path: str
    body: Any = None
    raw: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def send(self, client: httpx.Client) -> httpx.Response:
        content = self.raw if self.raw is not None else None if self.body is None else json.dumps(self.body).encode()
        headers = {"content-type": "application/json"} if content is not None else {}
        return client.request(self.method, self.path, content=content, headers=headers | self.headers)


def texts() -> Iterator[Ask]:
    """Yield generations on every route with every text, streamed and not."""
    for text in TEXTS:
        said = [{"role": "user", "content": text}]
        for stream in (False, True):
            more = FIXED | {"stream": stream}
            yield Ask("POST", "/v1/chat/completions", more | {"messages": said})
            yield Ask("POST", "/v1/completions", more | {"prompt": text})
            yield Ask("POST", "/completion", more | {"prompt": text, "n_predict": 3})
            yield Ask("POST", "/v1/messages", more | {"messages": said})
            yield Ask("POST", "/v1/responses", more | {"input": text, "max_output_tokens": 3})
        yield Ask("POST", "/tokenize", {"content": text, "add_special": True, "with_pieces": True})
        yield Ask("POST", "/apply-template", {"messages": said})
        yield Ask("POST", "/v1/messages/count_tokens", {"messages": said})
        yield Ask("POST", "/v1/chat/completions/input_tokens", {"messages": said})


def options() -> Iterator[Ask]:
    """Yield the options that change the form of an answer."""
    said = {"messages": [{"role": "user", "content": "List two fruits."}]}
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    for stream in (False, True):
        for more in (
            {"logprobs": True, "top_logprobs": 2}, {"stream_options": {"include_usage": True}}, {"n": 1},
            {"response_format": {"type": "json_object"}}, {"stop": ["a"]}, {"logit_bias": {"11": -100}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, {"model": "quickstart"},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
            {"timings_per_token": True}, {"return_progress": True}, {"frequency_penalty": 1.5}, {"unknown": {"x": [1]}},
        ):
            yield Ask("POST", "/v1/chat/completions", FIXED | said | more | {"stream": stream})
        for more in ({"logprobs": 2}, {"grammar": 'root ::= "yes" | "no"'}, {"echo": False}, {"n_probs": 1},
                     {"prompt": ["a b", "c d"]}, {"prompt": [1, 2, 3]}, {"prompt": [[4, 5], "six"]}):
            yield Ask("POST", "/v1/completions", FIXED | {"prompt": "One two"} | more | {"stream": stream})
    for tokens in ([], [1, 2, 3], [400, 401, 402, 49151]):
        yield Ask("POST", "/detokenize", {"tokens": tokens})


def readings() -> Iterator[Ask]:
    """Yield what only reads, with query strings and headers that nobody knows."""
    for path in ("/v1/models", "/v1/models?x=1&y=%20", "/props", "/props?a", "/slots", "/slots?fail_on_no_slot=0"):
        yield Ask("GET", path)
        yield Ask("GET", path, headers={"Accept": "text/html", "X-Odd": "a;b=\"c, d\"", "Cookie": "x=y"})
        yield Ask("HEAD", path)


def mistakes() -> Iterator[Ask]:
    """Yield requests that the engine refuses, each in its own words."""
    posts = ["/v1/chat/completions", "/v1/completions", "/completion", "/v1/messages", "/v1/responses", "/infill",
             "/v1/embeddings", "/embedding", "/embeddings", "/rerank", "/v1/rerank", "/tokenize", "/detokenize",
             "/apply-template", "/v1/messages/count_tokens"]
    for path in posts:
        for body in ({}, FIXED | {"messages": "no", "prompt": {"a": 1}, "input": 5, "tokens": "x"}, [1]):
            yield Ask("POST", path, body)
        for raw in (b"", b"{", b'{"a":"\xff\xfe"}'):
            yield Ask("POST", path, raw=raw)
    chat = FIXED | {"messages": [{"role": "user", "content": "Hi"}]}
    for more in ({"messages": []}, {"messages": [{"role": "user"}]}, {"messages": [{"content": "x"}]},
                 {"stream": "yes"},
                 {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
                 {"tools": "none"}, {"tool_choice": "f"}, {"temperature": "hot"}, {"n": 0},
                 {"response_format": {"type": "xml"}}, {"grammar": "root ::= ("}, {"logit_bias": 5}, {"stop": 7},
                 {"messages": [{"role": "user", "content": "tree " * 6000}]}):
        for stream in (False, True):
            yield Ask("POST", "/v1/chat/completions", chat | {"stream": stream} | more)
    yield Ask("POST", "/v1/chat/completions", chat, headers={"Content-Type": "text/plain"})
    yield Ask("POST", "/v1/chat/completions", chat, headers={"X-Very-Long": "y" * 4000, "Accept-Encoding": "gzip, br"})
    yield Ask("POST", "/v1/embeddings", {"input": "hello"})
    yield Ask("POST", "/rerank", {"query": "a", "documents": ["b", "c"]})
    yield Ask("POST", "/infill", {"input_prefix": "def f(", "input_suffix": "return 1", "n_predict": 3})


INTENDED: list[tuple[Ask, int, str, str]] = [
    *((Ask("POST", path, {}), 404, "not_found", "it changes the engine, or shows what others do") for path in
      ("/slots/0?action=erase", "/lora-adapters", "/models/load", "/tools", "/cors-proxy", "/v1/streams/lookup")),
    (Ask("GET", "/lora-adapters"), 404, "not_found", "closed whole"),
    (Ask("POST", "/props", {}), 405, "method_not_allowed", "it changes the engine; reading it is open"),
    (Ask("GET", "/nowhere"), 404, "not_found", "the relay knows the routes, so the engine is not asked"),
    (Ask("GET", "/v1/chat/completions"), 405, "method_not_allowed", "the engine says 404"),
    (Ask("DELETE", "/v1/models"), 405, "method_not_allowed", "the engine says 404"),
    (Ask("POST", "/v1/chat/completions", {"model": "other", "messages": []}), 404, "model_not_found",
     "the engine would answer for any name"),
    (Ask("POST", "/v1/completions", {"model": "other", "prompt": "x"}), 404, "model_not_found", "the same"),
]


def comparable(response: httpx.Response) -> tuple[int, str | None, bytes]:
    """Return status, content type and the body without what differs between two runs."""
    body = VARYING.sub(rb'"\1":0', ID.sub(b"ID", response.content))
    return response.status_code, response.headers.get("content-type"), body


def test_the_relay_adds_nothing(up: Up) -> None:
    asks = [*texts(), *options(), *readings(), *mistakes()]
    assert len(asks) >= 200
    running = up("--set", "serve.slots=1")
    different = []
    statuses: dict[int, int] = {}
    with running.engine_client() as engine, httpx.Client(base_url=running.url, timeout=120) as relay:
        for ask in asks:
            direct, relayed = ask.send(engine), ask.send(relay)
            statuses[direct.status_code] = statuses.get(direct.status_code, 0) + 1
            assert relayed.headers["x-request-id"]
            if comparable(relayed) != comparable(direct) or foreign(relayed) != foreign(direct):
                different.append(f"{ask}\n  engine: {comparable(direct)} {foreign(direct)}\n"
                                 f"  relay:  {comparable(relayed)} {foreign(relayed)}")
    assert not different, f"{len(different)} of {len(asks)}:\n" + "\n".join(text[:1500] for text in different[:12])
    assert statuses[200] >= 120 and statuses[400] >= 30, statuses


def foreign(response: httpx.Response) -> dict[str, str]:
    """Return the headers that the engine alone decides."""
    return {name: value for name, value in response.headers.items()
            if name not in HEADERS_OF_ITS_OWN and not name.startswith("access-control-")}


def test_where_the_relay_is_meant_to_differ(up: Up) -> None:
    with httpx.Client(base_url=up().url, timeout=120) as relay:
        for ask, status, code, why in INTENDED:
            answer = ask.send(relay)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (ask, why)
            assert set(answer.json()["error"]) == {"message", "type", "code", "param"}
