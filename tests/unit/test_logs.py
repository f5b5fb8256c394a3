"""Log lines: JSON that machines can read, and no secrets."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaops.logs import JsonLines, Text, masked
from llamaops.serve import requestlog
from llamaops.serve.requestlog import Record


@pytest.mark.parametrize(("line", "shown"), [
    ("Authorization: Bearer sk-abcdef123456", "Authorization: Bearer …"),
    ("got hf_AbCdEf0123456789 from the hub", "got … from the hub"),
    ("https://u/x?token=abcd1234&y=1", "https://u/x?token=…&y=1"),
    ('{"api_key": "s3cr3t-s3cr3t", "n": 1}', '{"api_key": "…", "n": 1}'),
    ("HF_TOKEN=abcd-1234 LLAMA_API_KEY=xyz98765", "HF_TOKEN=… LLAMA_API_KEY=…"),
    ("x-api-key: s3cr3t-s3cr3t", "x-api-key: …"),
    ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic …"),
    ("via http://alice:open-sesame@proxy:3128/x", "via http://alice:…@proxy:3128/x"),
    ("llama-server --api-key s3cr3t-s3cr3t --port 1", "llama-server --api-key … --port 1"),
    ("basic usage: http://127.0.0.1:8080/v1, a@b", "basic usage: http://127.0.0.1:8080/v1, a@b"),
    ("prompt_tokens=40 output_tokens=900 tok_s=13.86", "prompt_tokens=40 output_tokens=900 tok_s=13.86"),
    ("the token after next: fine, key=alice", "the token after next: fine, key=alice"),
])
def test_secrets_are_masked_and_nothing_else(line: str, shown: str) -> None:
    assert masked(line) == shown


SECRET = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.~+/=", min_size=8, max_size=60)


@settings(max_examples=60)
@given(SECRET, st.sampled_from(["Authorization: Bearer {}", '{{"api_key": "{}"}}', "HF_TOKEN={}", "?token={}&x=1",
                                "password: {}", "--api-key {} -c 1", "secret='{}'"]), st.text(max_size=20))
def test_no_secret_leaves_in_any_form(secret: str, form: str, around: str) -> None:
    """Whatever stands around it; in a plain line, a JSON line and an exception."""
    line = f"{around.replace(secret, '')} {form.format(secret)}"
    assert secret not in masked(line)
    entry = logging.LogRecord("llamaops", logging.INFO, __file__, 1, "%s", (line,), None)
    assert secret not in Text().format(entry) and secret not in JsonLines().format(entry)
    assert len(JsonLines().format(entry).splitlines()) >= 1
    (line,) = JsonLines().format(entry).splitlines()  # wherever a reader ends its lines
    assert json.loads(line)["level"] == "info"


def record(**changes: object) -> logging.LogRecord:
    entry = logging.LogRecord("llamaops.request", logging.INFO, __file__, 1, "%s", ("Bearer abcdefgh é\n",), None)
    entry.created, entry.msecs = 0.25, 250
    for name, value in changes.items():
        setattr(entry, name, value)
    return entry


def test_json_lines_are_one_object_each() -> None:
    line = JsonLines().format(record())
    assert "\n" not in line
    assert json.loads(line) == {"time": "1970-01-01T00:00:00.250Z", "level": "info", "logger": "llamaops.request",
                                "message": "Bearer … é\n"}
    assert "…" in Text().format(record())


def test_a_requests_fields_stay_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llamaops.request"):
        requestlog.log(Record("req_1", "POST", "/v1/completions", 0.0, key="alice", status=200, ttft_s=0.1234,
                              output_tokens=7, outcome="cancelled", reason="it's over"))
    entry = json.loads(JsonLines().format(caplog.records[0]))
    assert entry["request"] == {"id": "req_1", "method": "POST", "endpoint": "/v1/completions", "key": "alice",
                                "status": 200, "outcome": "cancelled", "ttft_ms": 123.4, "output_tokens": 7,
                                "cancelled": "yes", "reason": "it's over"}
    assert caplog.messages[0].endswith('''cancelled=yes reason="it's over"''')


def test_an_exception_is_in_its_line() -> None:
    try:
        raise ValueError("password=hunter22")
    except ValueError:
        entry = json.loads(JsonLines().format(record(exc_info=sys.exc_info())))
    assert entry["exception"].endswith("ValueError: password=…")
