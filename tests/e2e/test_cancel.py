"""What nobody reads is not computed: a client that leaves frees its slot in the real engine, wherever it was."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest
from running import Up, await_true

PATIENCE_S = 120.0  # what is waited for takes a second; a busy machine may take its time
TOKENS = 3000


def send(url: str, body: dict[str, object]) -> socket.socket:
    """Begin a request over a connection of its own; closing it is leaving."""
    at = urlsplit(url)
    client = socket.create_connection((at.hostname, at.port), timeout=PATIENCE_S)
    data = json.dumps(body | {"max_tokens": TOKENS, "ignore_eos": True}).encode()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
    return client


def predicted(engine: httpx.Client) -> int:
    """Return how many tokens the engine has generated for answers that it finished."""
    found = re.search(r"^llamacpp:tokens_predicted_total (\d+)", engine.get("/metrics").text, re.M)
    assert found
    return int(found[1])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_leaving_in_any_phase_frees_the_slot(up: Up, stream: bool) -> None:
    running = up("--set", "serve.slots=1", "--set", "placement.threads=1")
    long = "Once upon a time there was a story. " * 350  # some seconds of prefill
    with running.engine_client() as engine, httpx.Client(base_url=running.url, timeout=PATIENCE_S) as relay:

        def slot() -> dict[str, object]:
            return engine.get("/slots").json()[0]

        def decoded() -> bool:
            tokens = slot().get("next_token") or [{}]
            return bool(slot()["is_processing"]) and tokens[0].get("n_decoded", 0) > 0

        def in_prefill() -> bool:
            return bool(slot()["is_processing"]) and not decoded()

        def until(check: Callable[[], object], what: str) -> None:
            await_true(check, within=PATIENCE_S, what=what)

        def idle() -> bool:
            requests = relay.get("/status").json()["requests"]
            return not slot()["is_processing"] and requests["in_flight"] == requests["waiting"] == 0

        before = predicted(engine)
        for prompt, phase in (("Once", decoded), (long, in_prefill)):
            client = send(running.url, {"prompt": prompt, "stream": stream, "cache_prompt": False})
            until(phase, f"the engine is at {phase.__name__}")
            client.close()
            until(idle, f"the slot is free after {phase.__name__}")

        first = send(running.url, {"prompt": "Once", "stream": True})
        until(decoded, "the slot is taken")
        queued = send(running.url, {"prompt": "Twice", "stream": stream})
        until(lambda: relay.get("/status").json()["requests"]["waiting"] == 1, "one waits")
        queued.close()
        until(lambda: relay.get("/status").json()["requests"]["waiting"] == 0, "nobody waits")
        assert decoded(), "the other one goes on"
        first.close()
        until(idle, "the slot is free, and the one that left did not enter")
        assert predicted(engine) - before < TOKENS, "no answer was computed to its end"
