"""Start, stop, kill, detach, status and logs of a real llamaops with the real engine."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest
from running import LLAMAOPS, QUICKSTART, Up, await_true, descendants, gone


def test_ctrl_c_stops_everything(up: Up) -> None:
    running = up()
    children = descendants(running.process.pid)
    assert [p.name() for p in children] == ["llama-server"]
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(60) == 0, running.stderr.read_text()
    assert gone(children)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_started_in_a_shells_session_it_stops_with_the_foreground_group(up: Up, number: signal.Signals) -> None:
    running = up(from_shell=True)
    family = descendants(running.process.pid)
    os.killpg(running.process.pid, number)
    assert running.process.wait(60) == 0, running.stderr.read_text()
    assert gone(family)


def test_a_terminal_that_goes_away_stops_it(env: dict[str, str], model_path: str) -> None:
    command = " ".join([*LLAMAOPS, "up", str(QUICKSTART), "--set", "serve.port=0"])
    shell, terminal = pty.fork()
    if shell == 0:
        os.execvpe("sh", ["sh", "-c", f"{command}; echo ended"], env)
    said = b""
    while not re.search(rb"(?m)^http://127.0.0.1:\d+\r?$", said):
        said += os.read(terminal, 4096)
    family = descendants(shell)
    assert "llama-server" in [p.name() for p in family]
    os.close(terminal)
    await_true(lambda: gone(family), what="llamaops and its engine are gone")
    os.kill(shell, signal.SIGKILL)
    os.waitpid(shell, 0)


def test_nohup_outlives_its_terminal(env: dict[str, str], model_path: str, tmp_path: Path) -> None:
    command = " ".join(["nohup", *LLAMAOPS, "up", str(QUICKSTART), "--set", "serve.port=0"])
    out = tmp_path / "out"
    shell, terminal = pty.fork()
    if shell == 0:
        os.execvpe("sh", ["sh", "-c", f"{command} >{out} 2>{out}.err & wait"], env)
    await_true(lambda: out.exists() and out.read_text().endswith("\n"), what="it serves")
    family = [p for p in descendants(shell) if p.name() != "nohup"]
    os.close(terminal)
    os.kill(shell, signal.SIGKILL)
    os.waitpid(shell, 0)
    url = out.read_text().split()[-1]
    assert httpx.get(f"{url}/readyz").status_code == 200
    done = subprocess.run([*LLAMAOPS, "stop"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    await_true(lambda: gone(family), what="llamaops and its engine are gone")


def test_it_ends_when_its_folder_is_removed(up: Up) -> None:
    running = up()
    family = descendants(running.process.pid)
    shutil.rmtree(Path(running.env["XDG_RUNTIME_DIR"]) / "llamaops")
    assert running.process.wait(120) == 70
    assert "folder was removed" in running.stderr.read_text()
    assert "enable-linger" in running.stderr.read_text()
    assert gone(family)


def test_other_pages_of_the_browser_can_not_use_it(up: Up) -> None:
    url = up().url
    body = {"prompt": "Hi", "max_tokens": 1}
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
        refused = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_page")
    assert httpx.get(f"{url}/status", headers={"host": "evil.example"}).status_code == 403
    assert httpx.post(f"{url}/v1/completions", json=body, headers={"origin": url}, timeout=120).status_code == 200


def test_a_second_detached_one_is_told_of_the_first(up: Up) -> None:
    running = up()
    done = running.cli("up", str(QUICKSTART), "--detach")
    assert done.returncode == 75
    assert "running already" in done.stderr
    assert str(running.process.pid) in done.stderr


def test_chat_goes_past_the_proxy_to_this_machine(up: Up) -> None:
    running = up()
    proxied = running.env | {"http_proxy": "http://127.0.0.1:9", "all_proxy": "http://127.0.0.1:9"}
    done = subprocess.run([*LLAMAOPS, "chat", "Say hello.", "--max-tokens", "4"], env=proxied, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_logs_name_the_file_once_the_instance_has_ended(up: Up) -> None:
    running = up()
    assert running.cli("stop").returncode == 0
    done = running.cli("logs", "quickstart")
    assert done.returncode == 64
    assert Path(done.stderr.split("last run: ")[1].strip()).read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may lift a session")
def test_engine_and_relay_are_lifted_and_the_shells_session_is_not(up: Up) -> None:
    groups = {p.name(): Path(f"/proc/{p.pid}/autogroup") for p in descendants(up(from_shell=True).process.pid)}
    shells, *shells_nice = Path("/proc/self/autogroup").read_text().split() or ["the root group, of init's own session"]
    lifted = {file.read_text().split()[-1] for file in groups.values()}
    planned = json.loads(subprocess.run([*LLAMAOPS, "plan", str(QUICKSTART), "--json"], check=True, text=True,
                                        stdout=subprocess.PIPE).stdout)["placement"]["autogroup_nice"]
    assert lifted == {str(planned or 0)}
    assert shells_nice[-1:] in ([], ["0"])
    assert len({file.read_text().split()[0] for file in groups.values()} | {shells}) == 3


@pytest.mark.parametrize("from_shell", [False, True])
def test_kill_nine_leaves_no_engine(up: Up, from_shell: bool) -> None:
    running = up(from_shell=from_shell)
    children = descendants(running.process.pid)
    running.process.kill()
    await_true(lambda: gone(children), what="the engine is gone")
    again = up()
    assert httpx.get(f"{again.url}/readyz").status_code == 200


def test_a_killed_engine_comes_back(up: Up) -> None:
    running = up()
    first = running.engine().pid
    os.kill(first, signal.SIGKILL)
    await_true(lambda: httpx.get(f"{running.url}/readyz").status_code == 503, what="death is noticed")
    await_true(lambda: httpx.get(f"{running.url}/readyz").status_code == 200, what="service is back")
    status = running.status()
    assert status["restarts"] == 1
    assert "SIGKILL" in json.dumps(status["last_exit"])
    assert running.engine().pid != first


def test_streams_finish_on_sigterm(up: Up) -> None:
    running = up()
    body = {"prompt": "Once upon a time", "max_tokens": 100, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert running.process.wait(60) == 0


def test_status_logs_stop_and_chat(up: Up) -> None:
    running = up()
    assert running.status()["state"] == "ready"
    text = running.cli("status")
    assert "quickstart: ready" in text.stdout
    assert running.url in text.stdout
    assert "llama_server" in running.cli("logs", "quickstart").stdout
    answer = running.cli("chat", "quickstart", "Say hello.", "--max-tokens", "8")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    taken = running.cli("up", str(QUICKSTART))
    assert taken.returncode == 75
    assert str(running.process.pid) in taken.stderr
    stopped = running.cli("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert running.process.wait(60) == 0
    assert running.cli("status", "quickstart").returncode == 64
    assert running.cli("chat", "Hi").returncode == 64


def test_detach_returns_when_ready(env: dict[str, str], model_path: str) -> None:
    done = subprocess.run([*LLAMAOPS, "up", str(QUICKSTART), "--set", "serve.port=0", "--detach"], env=env, text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    url = done.stdout.strip()
    assert httpx.get(f"{url}/readyz").status_code == 200
    status = json.loads(subprocess.run([*LLAMAOPS, "status", "quickstart", "--json"], env=env, capture_output=True,
                                       text=True, timeout=120, check=True).stdout)
    engine = psutil.Process(status["pid"])
    assert subprocess.run([*LLAMAOPS, "stop"], env=env, timeout=120).returncode == 0
    assert gone([engine])


def test_reload_keeps_serving(up: Up, tmp_path: Path) -> None:
    profile = tmp_path / "quickstart.yaml"
    profile.write_text(QUICKSTART.read_text())
    running = up(profile=profile)
    profile.write_text(QUICKSTART.read_text() + "\nnonsense: 1\n")
    refused = running.cli("reload")
    assert refused.returncode == 78
    assert "nonsense" in refused.stderr
    assert httpx.get(f"{running.url}/readyz").status_code == 200


def test_the_relay_is_the_only_way_in(up: Up) -> None:
    running = up()
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in
                 {running.process.pid, running.engine().pid}}
    assert listening == {int(running.url.rsplit(":", 1)[1])}
    socket = Path(running.engine().cmdline()[running.engine().cmdline().index("--host") + 1])
    assert socket.parent.stat().st_mode & 0o077 == 0
