from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import stat
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from llamaops.errors import LlamaopsError, NotRunning, WrongProfile
from llamaops.serve import control_server
from llamaops.serve.control import call, follow
from llamaops.serve.control_server import serve_control


class Answers:
    """The handlers of a test, and what became of its streams."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    async def status(self, request: Mapping[str, Any]) -> Any:
        return {"state": "ready", "asked": request.get("what"), "name": "modèle 漢字"}

    async def reload(self, request: Mapping[str, Any]) -> Any:
        raise WrongProfile("no such key", where="placement.cpu", why="unknown", fix="write placement.cpus")

    async def logs(self, request: Mapping[str, Any]) -> AsyncIterator[str]:
        try:
            for n in range(request["lines"]):
                yield f"line {n}\nwith a break"
            while request.get("follow"):
                yield "more"
                await asyncio.sleep(0.01)
        finally:
            self.ended.set()

    async def broken(self, request: Mapping[str, Any]) -> AsyncIterator[str]:
        yield "first"
        raise WrongProfile("half-way")

    async def hang(self, request: Mapping[str, Any]) -> Any:
        await asyncio.Event().wait()


@contextlib.contextmanager
def serving(path: Path, answers: Answers) -> Iterator[None]:
    """Serve the control socket in a thread of its own, as an instance in another process would."""
    loop = asyncio.new_event_loop()
    handlers: dict[str, control_server.Handler] = {
        "status": answers.status, "reload": answers.reload, "logs": answers.logs, "broken": answers.broken,
        "hang": answers.hang,
    }
    server = loop.run_until_complete(serve_control(path, handlers))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def end() -> None:
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def path(tmp_path: Path, answers: Answers) -> Iterator[Path]:
    with serving(tmp_path / "control.sock", answers):
        yield tmp_path / "control.sock"


def test_only_the_owner_may_connect(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_asks_and_answers(path: Path) -> None:
    assert call(path, "status", what="x") == {"state": "ready", "asked": "x", "name": "modèle 漢字"}


def test_an_error_keeps_its_parts_and_code(path: Path) -> None:
    with pytest.raises(LlamaopsError) as failure:
        call(path, "reload")
    assert failure.value.exit_code == 78
    assert (failure.value.what, failure.value.where, failure.value.fix) == (
        "no such key", "placement.cpu", "write placement.cpus")


def test_follows_to_the_end(path: Path) -> None:
    assert list(follow(path, "logs", lines=2)) == ["line 0\nwith a break", "line 1\nwith a break"]


def test_a_stream_ends_when_its_reader_goes(path: Path, answers: Answers) -> None:
    lines = follow(path, "logs", lines=1, follow=True)
    assert [next(lines), next(lines)] == ["line 0\nwith a break", "more"]
    lines.close()  # type: ignore[attr-defined]  # a generator is an Iterator that can be closed
    assert answers.ended.wait(60)


def test_a_stream_may_fail_on_its_way(path: Path) -> None:
    lines = follow(path, "broken")
    assert next(lines) == "first"
    with pytest.raises(LlamaopsError, match="half-way"):
        next(lines)


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(NotRunning) as failure:
        call(tmp_path / "none.sock", "status")
    assert failure.value.exit_code == 64


def test_a_stale_socket_is_nobody_and_is_replaced(tmp_path: Path, answers: Answers) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NotRunning):
        call(path, "status")
    with serving(path, answers):
        assert call(path, "status")["state"] == "ready"


def test_an_instance_that_does_not_answer(path: Path) -> None:
    with pytest.raises(NotRunning, match="does not answer"):
        call(path, "hang", timeout_s=0.1)


@pytest.mark.parametrize(("line", "says"), [
    (b"not json\n", "not one line of JSON"),
    (b'["status"]\n', 'not an object with a "command"'),
    (b'{"command": 3}\n', 'not an object with a "command"'),
    (b'{"command": "rm"}\n', "no such command: rm"),
    (b'{"command": "' + b"x" * 100_000 + b'"}\n', "not one line of JSON"),
    (b"\xff\xfe\n", "not one line of JSON"),
    (b"", "not one line of JSON"),
])
def test_nonsense_is_refused_and_the_socket_goes_on(path: Path, line: bytes, says: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        with contextlib.suppress(BrokenPipeError):
            client.sendall(line)
        client.shutdown(socket.SHUT_WR)
        answer = json.loads(client.makefile("rb").readline())
    assert says in answer["error"]["what"]
    assert answer["error"]["exit_code"] == 2
    assert call(path, "status")["state"] == "ready"


def test_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stranger(sock: socket.socket) -> int:
        return 12345

    monkeypatch.setattr(control_server, "_peer_uid", stranger)
    with pytest.raises(LlamaopsError) as failure:
        call(path, "status")
    assert failure.value.exit_code == 77


def test_many_at_once(path: Path) -> None:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(call(path, "status"))) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 30
