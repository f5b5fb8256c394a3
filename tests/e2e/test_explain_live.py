"""Causes injected into a running instance, one at a time: ``status`` names the right one first, and no other.

The machine that runs the tests may have other work, so that a shared CPU may be named beside; nothing else may.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import Running, Up, await_true, streaming

CGROUPS = Path("/sys/fs/cgroup")
CALM = {"smooth", "prefill", "idle"}
OF_THE_MACHINE = {"shared-cpu", "steal", "own-threads"}
"""What other work on the machine, or a busy hypervisor, rightly adds."""


def findings(running: Running) -> dict[str, str]:
    """Return what ``status`` says now, by code, the costliest first."""
    return {f["code"]: f["text"] for f in (running.status()["now"] or {}).get("explain", [])}


def await_cause(running: Running, code: str, *, beside: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    """Return the sentence about ``code`` once it comes first; on the way nothing may be blamed but what is allowed."""
    wrong: list[dict[str, str]] = []

    def named() -> str | None:
        found = findings(running)
        if found.keys() - CALM - OF_THE_MACHINE - beside - {code}:
            wrong.append(found)
        first = [c for c in found if c == code or c not in OF_THE_MACHINE]
        return found[code] if first and first[0] == code else None

    text: str = await_true(named, what=f"{code} is named first", every=0.3)
    assert not wrong
    return text


@contextlib.contextmanager
def cgroup(running: Running, controller: str, limit: str) -> Iterator[Path]:
    """Move the instance into a cgroup of the test's own; yield the file of the limit (v1's name, or v2's)."""
    v2 = (CGROUPS / "cgroup.controllers").exists()
    top = CGROUPS if v2 else CGROUPS / controller
    folder, pids = top / f"llamaops-test-{os.getpid()}", (running.process.pid, running.engine().pid)
    before = {pid: own_cgroup(pid, controller, top) for pid in pids}
    try:
        folder.mkdir()
        for pid in pids:
            (folder / "cgroup.procs").write_text(str(pid))
    except OSError as exc:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup can be made here: {exc}")
    try:
        file = folder / limit
        if not file.exists():
            pytest.skip(f"no {limit} here: the {controller} controller is not delegated")
        yield file
    finally:
        for pid, home in before.items():
            with contextlib.suppress(OSError):  # it ended
                (home / "cgroup.procs").write_text(str(pid))
        await_true(lambda: not (folder / "cgroup.procs").read_text().strip(), what="the cgroup is empty")
        folder.rmdir()


def own_cgroup(pid: int, controller: str, top: Path) -> Path:
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    path = next(p for _, names, p in lines if controller in names.split(",") or (not names and top == CGROUPS))
    return top / path.lstrip("/")


LIMITS = {True: ("cpu.max", "30000 100000", "memory.max", "memory.current"),
          False: ("cpu.cfs_quota_us", "30000", "memory.limit_in_bytes", "memory.usage_in_bytes")}
CPU_FILE, CPU_VALUE, MEMORY_FILE, MEMORY_USED = LIMITS[(CGROUPS / "cgroup.controllers").exists()]


def test_a_hog_on_the_decode_cpus_is_named(up: Up) -> None:
    running = up("--set", "placement.nice=0")
    cpus = await_true(lambda: running.status()["now"], what="there is a window")["cpus"]
    decode = [str(c["id"]) for c in cpus if "decode" in c["role"]]
    burn = ["taskset", "-c", ",".join(decode), sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(burn) for _ in range(2 * len(decode))]
    pids = {hog.pid for hog in hogs}

    def blamed() -> str | None:
        """Return the sentence once the hogs are among those known to run there."""
        now = running.status()["now"]
        texts = [f["text"] for f in now["explain"][:1] if f["code"] == "shared-cpu"]
        return texts[0] if texts and pids & {u["pid"] for u in now["others"]} else None

    try:
        with streaming(running):
            assert re.match(r"CPU \d+ is shared with .*pid \d+ .*: the engine's threads wait \d+ % of their time",
                            await_true(blamed, what="a hog is named", every=0.3))
            assert "the engine's threads wait" in running.cli("status").stdout
            assert not findings(running).keys() - CALM - OF_THE_MACHINE
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_a_quota_is_named(up: Up) -> None:
    running = up()
    with cgroup(running, "cpu", CPU_FILE) as quota, streaming(running):
        quota.write_text(CPU_VALUE)
        text = await_cause(running, "quota")
        assert re.match(r"the cgroup's CPU quota stops the engine's threads for \d+ % of the time", text)
        quota.write_text("max" if "max" in quota.name else "-1")
        await_true(lambda: "quota" not in findings(running), what="it is not named any more", every=0.3)


def test_little_memory_is_named(up: Up) -> None:
    running = up()
    with cgroup(running, "memory", MEMORY_FILE) as limit, streaming(running):
        used = int((limit.parent / MEMORY_USED).read_text())
        limit.write_text(str(used + (40 << 20)))
        text = await_cause(running, "memory")
        assert (found := re.match(r"only (\d+) MiB of memory are left", text)) and int(found[1]) <= 40
        limit.write_text("max" if "max" in limit.name else "-1")
        await_true(lambda: "memory" not in findings(running), what="it is not named any more", every=0.3)


def test_someone_elses_prompt_is_named(up: Up, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("reader:open-sesame-1\nweb:open-sesame-2\n")
    keys.chmod(0o600)
    running = up("--set", "serve.slots=2", "--set", "slo.itl_ms=1000",  # lets prompts come in large batches
                 "--set", f"serve.api_keys.file={keys}")

    def blamed() -> str | None:
        """Send a prompt that no cache holds, and look for what is said about it."""
        words = f"{time.monotonic_ns()} " + " ".join(f"kings and {i} queens" for i in range(80))
        answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": words, "max_tokens": 1}, timeout=120,
                            headers={"Authorization": "Bearer open-sesame-2"})
        assert answer.status_code == 200, answer.text
        found = findings(running)
        assert not found.keys() - CALM - OF_THE_MACHINE - {"prefill-stall"}
        return found.get("prefill-stall")

    with streaming(running, key="open-sesame-1"):
        text = await_true(blamed, what="the prompt is blamed")
    assert re.match(r"the prompt of key 'web' stalled 1 stream for up to [\d.]+ s", text)


def test_a_client_that_takes_nothing_is_named(up: Up) -> None:
    running = up()
    host, port = httpx.URL(running.url).host, httpx.URL(running.url).port
    # Every token with the probabilities of a thousand others: what the sockets hold is full within seconds.
    body = b'{"prompt": "Once", "stream": true, "max_tokens": 4000, "ignore_eos": true, "n_probs": 1000}'
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, port))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        assert client.recv(12) == b"HTTP/1.1 200"
        text = await_cause(running, "slow-client")
        assert re.match(r"the client of request req_\w+ has taken nothing for [\d.]+ s \(only its own stream", text)


def test_a_full_house_is_named(up: Up) -> None:
    running = up("--set", "serve.slots=1")
    with streaming(running), streaming(running):
        await_true(lambda: running.status()["requests"]["waiting"] == 1, what="one waits")
        assert await_cause(running, "queue") == "1 request waits because the slot is taken"
        assert sorted(str(s["turn"]) for s in running.status()["streams"]) == ["1", "None"]
        shown = running.cli("top", "--once").stdout
        assert "1 of 1 in the engine, 1 waiting" in shown and re.search(r"^  …\w+ .* queued 1 ", shown, re.MULTILINE)


def test_an_engine_that_does_nothing_is_named(up: Up) -> None:
    running = up()
    with streaming(running):
        await_true(lambda: running.status()["streams"], what="the stream runs")
        running.engine().send_signal(signal.SIGSTOP)
        try:
            assert "no token for" in await_cause(running, "no-work")
        finally:
            running.engine().send_signal(signal.SIGCONT)


def test_a_smooth_stream_is_said_to_be_smooth(up: Up) -> None:
    running = up()

    def smooth() -> dict[str, Any] | None:
        found = findings(running)
        assert not found.keys() - CALM - OF_THE_MACHINE
        return found if "tokens a second" in found.get("smooth", "") or found.keys() & OF_THE_MACHINE else None

    with streaming(running):
        assert await_true(smooth, what="nothing is blamed", every=0.3)
