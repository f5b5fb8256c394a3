"""What a running instance writes: one JSON document a line, every request by its id, no secret; the engine's apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from running import Running, Up, await_true

SECRET = "open-sesame-1-open-sesame"


def documents(running: Running) -> list[dict[str, Any]]:
    """Return the lines from the first JSON one on, each of which must be JSON; progress of the preparation is text."""
    lines = running.stderr.read_text().split("\n")[:-1]
    begun = next((i for i, line in enumerate(lines) if line.startswith("{")), len(lines))
    return [json.loads(line) for line in lines[begun:]]


def test_json_lines_tell_every_request_by_its_id(up: Up, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text(f"alice:{SECRET}\n")
    keys.chmod(0o600)
    running = up("--log-format", "json", "--log-level", "debug", "--set", f"serve.api_keys.file={keys}")
    with httpx.Client(base_url=running.url, headers={"Authorization": f"Bearer {SECRET}"}, timeout=120) as client:
        body = {"prompt": "a prompt that nobody logs", "max_tokens": 3, "ignore_eos": True}
        kept = client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
        made = client.post("/v1/completions", json=body, headers={"X-Request-Id": 'no"{}\\ id'})
        wrong = client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {SECRET[:-1]}"})
        client.get(f"/v1/models?api_key={SECRET}")
    ids = [answer.headers["x-request-id"] for answer in (kept, made, wrong)]
    assert ids[0] == "mine-1" and ids[1].startswith("req_")
    assert [kept.status_code, made.status_code, wrong.status_code] == [200, 200, 401]
    await_true(lambda: {d["request"]["id"] for d in documents(running) if "request" in d} >= set(ids),
               what="all is told")
    told = {d["request"]["id"]: d["request"] for d in documents(running) if "request" in d}
    assert [told[i]["status"] for i in ids] == [200, 200, 401]
    assert (told["mine-1"]["key"], told["mine-1"]["output_tokens"]) == ("alice", 3)
    assert told["mine-1"]["e2e_ms"] > 0
    assert all({"time", "level", "logger", "message"} <= d.keys() for d in documents(running))
    everything = running.stderr.read_text() + "".join(p.read_text() for p in tmp_path.rglob("*.log"))
    assert SECRET[:-1] not in everything and "that nobody logs" not in everything


def test_the_engines_lines_by_their_weight(up: Up) -> None:
    running = up()
    everything = running.cli("logs", "quickstart").stdout.splitlines()
    grave = running.cli("logs", "quickstart", "--level", "warning").stdout.splitlines()
    assert any(" I srv " in line for line in everything)
    assert set(grave) < set(everything) and not [line for line in grave if " I " in line]
    refused = running.cli("logs", "quickstart", "--level", "loud")
    assert refused.returncode == 2 and "warning" in refused.stderr
