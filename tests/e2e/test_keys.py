"""Keys, and the pages that may call: who gets in, who does not, and that no key shows anywhere."""

from __future__ import annotations

import hashlib
import socket
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest
from running import LLAMAOPS, QUICKSTART, Up, await_true, descendants

PLAIN, HASHED, LATER = "sk-plain-8f2c71", "sk-hashed-51ab09", "sk-later-c0ffee77"
DIGEST = hashlib.sha256(b"salt" + HASHED.encode()).hexdigest()
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_open_the_relay_and_show_nowhere(up: Up, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text(f"# ours\nann:{PLAIN}\nbob:sha256$salt${DIGEST}\n")
    keys.chmod(0o600)
    profile = tmp_path / "quickstart.yaml"
    profile.write_text(QUICKSTART.read_text() + "  api_keys: {file: keys.txt}\n")
    (tmp_path / "units").mkdir()
    running = up(profile=profile)
    with httpx.Client(base_url=running.url, timeout=120) as client:
        for headers in ({}, bearer("sk-wrong"), bearer(DIGEST), {"x-api-key": PLAIN[:-1]}, {"Authorization": "x"}):
            for path in ("/v1/models", "/slots", "/metrics", "/status", "/nowhere"):
                assert client.get(path, headers=headers).status_code == 401, (headers, path)
            refused = client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
        for headers in (bearer(PLAIN), bearer(HASHED), {"x-api-key": PLAIN}, {"x-api-key": HASHED}):
            assert client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200

        engine = running.engine().pid
        keys.write_text(f"bob:sha256$salt${DIGEST}\ncy:{LATER}\n")
        reloaded = running.cli("reload", "quickstart")
        assert reloaded.returncode == 0, reloaded.stderr
        await_true(lambda: client.get("/v1/models", headers=bearer(LATER)).status_code == 200, what="new key")
        assert client.get("/v1/models", headers=bearer(PLAIN)).status_code == 401
        assert client.get("/v1/models", headers=bearer(HASHED)).status_code == 200
        assert running.engine().pid == engine, "keys need no new engine"

    said = [" ".join(p.cmdline()) for p in [psutil.Process(running.process.pid), *descendants(running.process.pid)]]
    for command in (["plan", str(profile)], ["plan", str(profile), "--json"], ["plan", str(profile), "--shell"],
                    ["status", "quickstart", "--json"], ["logs", "quickstart"],
                    ["deploy", "systemd", str(profile), "-o", str(tmp_path / "units")]):
        done = running.cli(*command)
        assert done.returncode == 0, (command, done.stderr)
        said += [done.stdout, done.stderr]
    logs = [running.stderr, *(tmp_path / "state").rglob("*"), *(tmp_path / "units").rglob("*"),
            *Path(running.env["XDG_RUNTIME_DIR"]).rglob("*")]
    said += [file.read_text(errors="replace") for file in logs if file.is_file()]
    assert "key=ann" in "".join(said), "requests are logged under their key's name"
    assert not [text[:200] for text in said for key in (PLAIN, HASHED, LATER, DIGEST) if key in text]


def test_only_pages_on_the_list_may_call(up: Up) -> None:
    ours, other = "https://chat.example", "https://evil.example"
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    with httpx.Client(base_url=up("--set", f"serve.cors_origins=['{ours}']").url, timeout=120) as client:
        for origin, allowed in ((ours, ours), (other, None), ("null", None)):
            preflight = client.options("/v1/chat/completions", headers={"Origin": origin} | ask)
            answers = [preflight, client.post("/v1/chat/completions", json=CHAT | {"stream": True},
                                              headers={"Origin": origin})]
            assert [a.headers.get("access-control-allow-origin") for a in answers] == [allowed, allowed]
            assert all("access-control-allow-credentials" not in a.headers for a in answers)
        assert "POST" in client.options("/v1/chat/completions", headers={"Origin": ours} | ask).headers[
            "access-control-allow-methods"]


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o640, False), (0o600, False)])
def test_keys_that_everybody_can_read_are_warned_of(env: dict[str, str], tmp_path: Path, mode: int,
                                                    warned: bool) -> None:
    """Also where the port is taken: it is told before the long work."""
    keys, profile = tmp_path / "keys.txt", tmp_path / "taken.yaml"
    keys.write_text(f"ann:{PLAIN}\n")
    keys.chmod(mode)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        profile.write_text(f"model: {{source: 'path:/nowhere.gguf'}}\n"
                           f"serve: {{port: {taken.getsockname()[1]}, api_keys: {{file: keys.txt}}}}\n")
        for more in ([], ["--detach"]):
            done = subprocess.run([*LLAMAOPS, "up", str(profile), *more], env=env, capture_output=True, text=True)
            assert done.returncode == 75
            assert (f"chmod 600 {keys}" in done.stderr) == warned
            assert PLAIN not in done.stderr
