"""https with real clients: curl, httpx, openai and our own; a renewed certificate; what ends a start."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import openai
import pytest
from certificates import make_pair
from running import QUICKSTART, Up

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}


def test_clients_speak_https_and_a_renewed_certificate_is_taken_over(up: Up, tmp_path: Path) -> None:
    pair, later = make_pair(tmp_path), make_pair(tmp_path, "later")
    profile = tmp_path / "quickstart.yaml"
    profile.write_text(QUICKSTART.read_text() + f"  tls: {{cert: {pair.cert.name}, key: {pair.key.name}}}\n")
    running = up(profile=profile)
    assert running.url.startswith("https://127.0.0.1:")

    trusted = httpx.Client(verify=ssl.create_default_context(cafile=str(pair.cert)), timeout=120)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{running.url}/healthz")
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", http_client=trusted) as client:
        whole = client.chat.completions.create(model="quickstart", **CHAT)
        streamed = client.chat.completions.create(model="quickstart", stream=True, **CHAT)
        assert "".join(c.choices[0].delta.content or "" for c in streamed) == whole.choices[0].message.content
    got = subprocess.run(["curl", "-sS", "--cacert", str(pair.cert), f"{running.url}/healthz"], capture_output=True,
                         text=True, timeout=120)
    assert (got.stdout, got.stderr) == ("ok\n", "")

    said = running.cli("chat", "quickstart", "Say hi.", "--max-tokens", "3")
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()
    said = running.cli("chat", running.url, "Say hi.")
    assert said.returncode == 70
    assert "SSL_CERT_FILE" in said.stderr
    running.env["SSL_CERT_FILE"] = str(pair.cert)
    assert running.cli("chat", running.url, "Say hi.", "--max-tokens", "3").returncode == 0
    bench = running.cli("bench", running.url, "--requests", "2", "--max-tokens", "3", "--json", timeout=120)
    assert bench.returncode == 0, bench.stderr

    engine = running.engine().pid
    pair.key.write_bytes(later.key.read_bytes())
    refused = running.cli("reload", "quickstart")
    assert refused.returncode == 78, "a key alone does not fit the old certificate"
    assert str(pair.key) in refused.stderr
    shutil.copy(later.cert, pair.cert)
    assert running.cli("reload", "quickstart").returncode == 0
    assert running.engine().pid == engine
    assert httpx.get(f"{running.url}/healthz", verify=ssl.create_default_context(cafile=str(later.cert))).text == "ok\n"
    assert running.cli("chat", "quickstart", "Say hi.", "--max-tokens", "3").returncode == 0


def test_a_missing_key_ends_the_start_and_https_alone_opens_no_public_port(up: Up, tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    pair.key.unlink()
    files = ["--set", f"serve.tls={{cert: {pair.cert}, key: {pair.key}}}"]
    for sets, said in ((files, str(pair.key)), ([*files, "--set", "serve.host=0.0.0.0"], "serve.host")):
        running = up(*sets, ready=False)
        assert running.process.wait(120) == 78
        assert said in running.stderr.read_text()
