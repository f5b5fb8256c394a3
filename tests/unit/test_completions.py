"""What is read from the APIs' requests and answers, family by family, as llama-server writes them."""

from __future__ import annotations

import json

import pytest

from llamaops.core.completions import (
    Ask,
    BodyReader,
    Counts,
    Family,
    StreamReader,
    error_body,
    error_message,
    failure_event,
    read_ask,
)


@pytest.mark.parametrize(
    ("body", "ask"),
    [
        (b'{"model":"m","stream":true}', Ask("m", True)),
        (b'{"model":"m"}', Ask("m", False)),
        (b'{"stream":"true","model":3}', Ask(None, False)),
        (b'{"messages":[{"model":"inner","stream":true}]}', Ask(None, False)),
        (b"", Ask(None, False)),
        (b"[1]", Ask(None, False)),
        (b'{"model":', Ask(None, False)),
        (b"\xff\xfe", Ask(None, False)),
        (b"[" * 200_000, Ask(None, False)),
    ],
)
def test_ask(body: bytes, ask: Ask) -> None:
    assert read_ask(body) == ask


STREAMS: dict[Family, list[bytes]] = {
    "chat": [
        b'{"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}]}',
        b'{"choices":[{"finish_reason":null,"index":0,"delta":{"content":"Hi"}}]}',
        b'{"choices":[{"finish_reason":null,"index":0,"delta":{"content":" \\"content\\":\\"x"}}]}',
        b'{"choices":[{"finish_reason":"length","index":0,"delta":{}}],"timings":{"cache_n":4,"prompt_n":31,"predicted_n":2}}',
        b"[DONE]",
    ],
    "completions": [
        b'{"choices":[{"text":"","index":0,"finish_reason":null}]}',
        b'{"choices":[{"text":"Hi","index":0,"finish_reason":null}]}',
        b'{"choices":[{"text":" you","index":0,"finish_reason":null}]}',
        b'{"choices":[{"text":"","finish_reason":"length"}],"usage":{"completion_tokens":2,"prompt_tokens":35}}',
        b"[DONE]",
    ],
    "native": [
        b'{"index":0,"content":"Hi","tokens":[1],"stop":false}',
        b'{"index":0,"content":" you","tokens":[2],"stop":false}',
        b'{"content":"","stop":true,"stop_type":"length","prompt":"\\"usage\\":{","timings":{"prompt_n":35,"predicted_n":2}}',
    ],
    "responses": [
        b'{"type":"response.created","response":{"id":"resp_a1"}}',
        b'{"type":"response.output_text.delta","delta":"Hi"}',
        b'{"type":"response.output_text.delta","delta":" you"}',
        b'{"type":"response.output_text.done","text":"Hi you"}',
        b'{"type":"response.completed","response":{"usage":{"input_tokens":35,"output_tokens":2,"input_tokens_details":{"cached_tokens":1}}}}',
    ],
    "messages": [
        b'{"type":"message_start","message":{"content":[],"usage":{"cache_read_input_tokens":0,"input_tokens":35,"output_tokens":0}}}',
        b'{"type":"content_block_start","content_block":{"type":"text","text":""}}',
        b'{"type":"content_block_delta","delta":{"type":"text_delta","text":"Hi"}}',
        b'{"type":"content_block_delta","delta":{"type":"text_delta","text":" you"}}',
        b'{"type":"content_block_stop"}',
        b'{"type":"message_delta","delta":{"stop_reason":"max_tokens"},"usage":{"output_tokens":2}}',
        b'{"type":"message_stop"}',
    ],
}


@pytest.mark.parametrize("family", STREAMS)
def test_a_stream_is_timed_by_its_text_and_counted_by_the_engine(family: Family) -> None:
    gaps: list[float] = []
    reader = StreamReader(family, gaps.append)
    for second, data in enumerate(STREAMS[family]):
        reader.feed(b"data: " + data + b"\n\n", float(second))
    texts = [i for i, data in enumerate(STREAMS[family]) if b"Hi\"" in data]
    assert reader.text_times() == (texts[0], texts[0] + 1)
    assert gaps == [1.0]
    counts = reader.counts()
    assert (counts.prompt, counts.output) == (35, 2)
    assert counts.finish == {"messages": "max_tokens", "responses": None}.get(family, "length")


def test_counts_of_a_plain_answer() -> None:
    reader = BodyReader()
    body = b'{"choices":[{"finish_reason":"stop"}],"usage":{"completion_tokens":5,"prompt_tokens":31,"x":{"y":1}}}'
    for i in range(0, len(body), 7):
        reader.feed(body[i : i + 7])
    assert reader.counts() == Counts(31, 5, "stop")


def test_a_long_plain_answer_is_not_kept() -> None:
    reader = BodyReader()
    for _ in range(100):
        reader.feed(b"x" * 65536)
    reader.feed(b'"usage":{"prompt_tokens":1,"completion_tokens":9}')
    assert reader.counts() == Counts(1, 9, None)
    assert len(reader._head) + len(reader._tail) <= 2 * 65536


def test_a_stream_without_counts_says_none() -> None:
    assert StreamReader("chat", lambda _: None).counts() == Counts()


def test_errors_are_openai_shaped() -> None:
    assert json.loads(error_body("é", "k", "c")) == {"error": {"message": "é", "type": "k", "code": "c", "param": None}}


@pytest.mark.parametrize("family", ["chat", "completions", "native", "responses", "messages"])
def test_a_failure_is_one_event(family: Family) -> None:
    event = failure_event(family, "line\nbreak\u2028", "engine_died")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1
    assert b"[DONE]" not in event


def test_a_failure_inside_an_event_closes_it_first() -> None:
    reader = StreamReader("chat", lambda _: None)
    reader.feed(b'data: {"a"', 0.0)
    assert reader.failure("chat", "m", "c").startswith(b"\n\ndata: ")
    reader.feed(b":1}\n\n", 0.0)
    assert reader.failure("chat", "m", "c").startswith(b"data: ")


@pytest.mark.parametrize(
    ("body", "message"),
    [(b'{"error":{"message":"m"}}', "m"), (b"", None), (b"[]", None), (b'{"error":"x"}', None)],
)
def test_error_message(body: bytes, message: str | None) -> None:
    assert error_message(body) == message
