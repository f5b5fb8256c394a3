"""The supervisor against a real engine process that fails in every known way."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from engine_rig import QUICK, Rig, ask, drive, engine_pid, get, marked, run_until_stopped, states, until

from llamaops.core.engine_life import State
from llamaops.core.launch import LaunchSpec
from llamaops.core.plan import Note
from llamaops.core.profile import BackoffSection
from llamaops.errors import EngineFailed, TryAgain
from llamaops.serve.probe import is_serving
from llamaops.serve.procfs import any_runnable
from llamaops.serve.traffic import Endpoint, Unready

FOR_EVER = 3600.0
"""Longer than a test may take: what waits for it fails."""
DRAIN_S = 1.0


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    assert marked(made.mark) == []
    assert list(tmp_path.glob("*.sock")) == []


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_serves_and_stops(rig: Rig, run: Callable[[Any], None]) -> None:
    supervisor = rig.supervisor()

    async def body() -> None:
        assert isinstance(supervisor.endpoint(), Unready)
        await supervisor.wait_ready()
        endpoint = supervisor.endpoint()
        assert isinstance(endpoint, Endpoint)
        assert endpoint.generation == 1
        assert b'"ok"' in await get(endpoint)

    run(run_until_stopped(supervisor, body))
    assert states(supervisor) == ["starting", "ready", "draining", "stopping", "stopped"]
    status = supervisor.status()
    assert status["pid"] is None
    assert status["restarts"] == 0
    assert any("initializing" in line for line in rig.log.last(50))


def test_tracked_pid_is_the_engine_behind_every_wrapper(rig: Rig) -> None:
    rig.wrappers = ("setpriv", "--pdeathsig", "KILL", "nice", "-n", "1", "taskset", "-c", "0")
    supervisor = rig.supervisor()

    async def body() -> None:
        await supervisor.wait_ready()
        command = Path(f"/proc/{engine_pid(supervisor)}/cmdline").read_bytes()
        assert command.split(b"\0")[2].endswith(b"stub_engine.py")

    drive(lambda: run_until_stopped(supervisor, body))


@pytest.mark.parametrize("how", ["group", "session", "daemon"])
def test_ends_what_the_engine_started(rig: Rig, how: str) -> None:
    rig.switches = ["--stub-fork", how]
    supervisor = rig.supervisor()

    async def body() -> None:
        await supervisor.wait_ready()
        await until(lambda: len(marked(rig.mark)) == 2)

    drive(lambda: run_until_stopped(supervisor, body))


@pytest.mark.parametrize("how", ["SEGV", "KILL", "3"])
def test_starts_again_after_a_crash(rig: Rig, how: str) -> None:
    rig.switches = ["--stub-fork", "group", "--stub-die-after-bytes", "1", "--stub-end", how]
    supervisor = rig.supervisor()

    async def body() -> None:
        await supervisor.wait_ready()
        rig.switches = []
        await (await ask(rig, supervisor, []))
        await until(lambda: supervisor.status()["state"] == "back-off")
        unready = supervisor.endpoint()
        assert isinstance(unready, Unready)
        assert unready.retry_after_s is not None
        await until(lambda: supervisor.status()["state"] == "ready")
        status = supervisor.status()
        assert status["restarts"] == 1
        assert status["last_exit"]["how"].startswith({"3": "exit code 3"}.get(how, f"SIG{how}"))

    drive(lambda: run_until_stopped(supervisor, body))


def test_streams_are_told_when_the_engine_dies(rig: Rig) -> None:
    supervisor = rig.supervisor()
    told: list[str] = []

    async def body() -> None:
        await supervisor.wait_ready()
        rig.traffic.open(1, told.append)
        os.kill(engine_pid(supervisor), signal.SIGKILL)
        await until(lambda: told)
        assert "SIGKILL" in told[0]

    drive(lambda: run_until_stopped(supervisor, body))


@pytest.mark.parametrize(("say", "end", "code", "exit_code"), [
    ("error: invalid argument: --nope", "1", "unknown-flag", 78),
    ("gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)", "1", "model-missing", 69),
    ("", "ILL", "illegal-instruction", 69),
])
def test_a_start_that_cannot_succeed_fails_at_once(rig: Rig, say: str, end: str, code: str, exit_code: int) -> None:
    rig.switches = ["--stub-crash", "--stub-say", say, "--stub-end", end]
    supervisor = rig.supervisor()

    async def body() -> None:
        waiting = asyncio.create_task(supervisor.wait_ready())
        with pytest.raises(EngineFailed) as failure:
            await supervisor.run()
        assert failure.value.exit_code == exit_code
        assert "initializing" in (failure.value.detail or "")
        assert failure.value.fix
        with pytest.raises(EngineFailed):
            await waiting
        unready = supervisor.endpoint()
        assert isinstance(unready, Unready)
        assert unready.retry_after_s is None

    drive(body)
    assert supervisor.status()["last_exit"]["cause"] == code
    assert states(supervisor) == ["starting", "failed"]


def test_gives_up_after_the_same_unknown_failure_again_and_again(rig: Rig) -> None:
    rig.switches = ["--stub-crash", "--stub-say", "some new trouble"]
    supervisor = rig.supervisor()

    async def body() -> None:
        with pytest.raises(EngineFailed) as failure:
            await supervisor.run()
        assert failure.value.exit_code == 70
        assert "some new trouble" in str(failure.value)

    drive(body)
    assert states(supervisor).count("starting") == 5


@pytest.mark.parametrize("beside", [True, False])
def test_failed_after_it_served_it_stays_until_a_reload_mends_it(rig: Rig, beside: bool) -> None:
    supervisor = rig.supervisor(QUICK.model_copy(update={"backoff": BackoffSection(initial_s=0.01, max_s=0.01)}))

    async def body() -> None:
        await supervisor.wait_ready()
        rig.switches = ["--stub-crash", "--stub-say", "error: invalid argument: --nope"]
        os.kill(engine_pid(supervisor), signal.SIGKILL)
        await supervisor.reach(State.FAILED)
        unready = supervisor.endpoint()
        assert isinstance(unready, Unready)
        assert unready.retry_after_s is None
        assert "--nope" in unready.reason
        with pytest.raises(EngineFailed, match="--nope"):
            await supervisor.replace(rig.launch, beside=beside)
        await supervisor.replace(rig.with_switches(), beside=beside)
        assert isinstance(supervisor.endpoint(), Endpoint)

    drive(lambda: run_until_stopped(supervisor, body))
    assert states(supervisor).count("failed") == 2


def test_failed_after_it_served_it_stops_when_told(rig: Rig) -> None:
    supervisor = rig.supervisor(QUICK.model_copy(update={"backoff": BackoffSection(initial_s=0.01, max_s=0.01)}))

    async def body() -> None:
        await supervisor.wait_ready()
        rig.switches = ["--stub-crash", "--stub-say", "error: invalid argument: --nope"]
        os.kill(engine_pid(supervisor), signal.SIGKILL)
        await supervisor.reach(State.FAILED)

    drive(lambda: run_until_stopped(supervisor, body))
    assert states(supervisor)[-2:] == ["failed", "stopped"]


def test_a_program_that_is_not_there_is_named(rig: Rig) -> None:
    rig.wrappers = ("/nowhere/llama-server",)
    supervisor = rig.supervisor()

    async def body() -> None:
        with pytest.raises(EngineFailed, match="/nowhere/llama-server") as failure:
            await supervisor.run()
        assert failure.value.exit_code == 69

    drive(body)


@pytest.mark.parametrize("switches", [["--stub-load-s", "1.5"], ["--stub-busy-load-s", "1.5"]], ids=["log", "cpu"])
def test_a_slow_load_that_gets_on_is_awaited(rig: Rig, switches: list[str]) -> None:
    rig.switches = switches
    supervisor = rig.supervisor(QUICK.model_copy(update={"start_timeout_s": 0.7}))

    async def body() -> None:
        await supervisor.wait_ready()

    drive(lambda: run_until_stopped(supervisor, body))
    assert states(supervisor)[:2] == ["starting", "ready"]


@pytest.mark.parametrize("switch", ["--stub-never-ready", "--stub-no-listen"])
def test_a_load_that_gets_nowhere_is_ended(rig: Rig, switch: str) -> None:
    rig.switches = [switch]
    supervisor = rig.supervisor()

    async def body() -> None:
        await until(lambda: "stopping" in states(supervisor))
        await until(lambda: "back-off" in states(supervisor))
        history = supervisor.status()["history"]
        assert "no progress towards ready" in next(line["reason"] for line in history if line["to"] == "stopping")

    drive(lambda: run_until_stopped(supervisor, body))


def test_a_silent_load_within_the_time_is_awaited(rig: Rig) -> None:
    rig.switches = ["--stub-silent-load-s", "0.4"]
    supervisor = rig.supervisor(QUICK.model_copy(update={"start_timeout_s": 60}))
    drive(lambda: run_until_stopped(supervisor, supervisor.wait_ready))


def test_a_foreign_server_on_the_address_is_not_taken_for_the_engine(rig: Rig) -> None:
    """Somebody else answers 200 at our port while our own engine does not listen there."""
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        rig.port = foreign.getsockname()[1]
        rig.switches = ["--stub-no-listen"]
        supervisor = rig.supervisor()

        def answer() -> None:
            while True:
                try:
                    conn, _ = foreign.accept()
                except OSError:
                    return
                with conn:
                    conn.recv(4096)
                    conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        server = threading.Thread(target=answer)
        server.start()

        async def body() -> None:
            await until(lambda: "stopping" in states(supervisor))
            assert "ready" not in states(supervisor)

        try:
            drive(lambda: run_until_stopped(supervisor, body))
        finally:
            foreign.shutdown(socket.SHUT_RDWR)
            server.join()


def test_an_engine_without_unix_sockets_serves_on_a_port(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        rig.port = free.getsockname()[1]
    supervisor = rig.supervisor()

    async def body() -> None:
        await supervisor.wait_ready()
        endpoint = supervisor.endpoint()
        assert isinstance(endpoint, Endpoint)
        assert (endpoint.socket, endpoint.port) == (None, rig.port)

    drive(lambda: run_until_stopped(supervisor, body))


def test_an_embedding_model_becomes_ready(rig: Rig) -> None:
    rig.switches = ["--stub-no-completions"]
    supervisor = rig.supervisor()
    drive(lambda: run_until_stopped(supervisor, supervisor.wait_ready))


@pytest.mark.parametrize("ignore_term", [False, True])
def test_a_frozen_engine_with_work_in_flight_is_restarted(rig: Rig, ignore_term: bool) -> None:
    rig.switches = ["--stub-hang-after", "1", *(["--stub-ignore-term"] if ignore_term else [])]
    supervisor = rig.supervisor()
    told: list[str] = []

    async def body() -> None:
        await supervisor.wait_ready()
        asking = await ask(rig, supervisor, told)
        await until(lambda: told)
        assert "froze" in told[0]
        rig.switches = []
        await until(lambda: supervisor.status()["state"] == "ready")
        assert supervisor.status()["generation"] == 2
        await asyncio.gather(asking, return_exceptions=True)

    drive(lambda: run_until_stopped(supervisor, body))


def test_a_stopped_process_counts_as_frozen(rig: Rig) -> None:
    supervisor = rig.supervisor()
    told: list[str] = []

    async def body() -> None:
        await supervisor.wait_ready()
        os.kill(engine_pid(supervisor), signal.SIGSTOP)
        rig.traffic.open(1, told.append)
        await until(lambda: supervisor.status()["generation"] == 2 and supervisor.status()["state"] == "ready")
        assert told

    drive(lambda: run_until_stopped(supervisor, body))


def test_an_idle_engine_is_left_alone(rig: Rig) -> None:
    supervisor = rig.supervisor(QUICK.model_copy(update={"stall_timeout_s": 0.2}))

    async def body() -> None:
        await supervisor.wait_ready()
        os.kill(engine_pid(supervisor), signal.SIGSTOP)  # frozen, but nobody waits for it
        await asyncio.sleep(0.6)
        os.kill(engine_pid(supervisor), signal.SIGCONT)
        assert supervisor.status()["state"] == "ready"

    drive(lambda: run_until_stopped(supervisor, body))


def test_an_engine_whose_clients_take_nothing_is_left_alone(rig: Rig) -> None:
    supervisor = rig.supervisor(QUICK.model_copy(update={"stall_timeout_s": 0.2}))
    told: list[str] = []

    async def body() -> None:
        await supervisor.wait_ready()
        first, second = (rig.traffic.open(1, told.append) for _ in range(2))
        first.blocked = second.blocked = True
        os.kill(engine_pid(supervisor), signal.SIGSTOP)  # it does nothing, for it can't go on
        await asyncio.sleep(0.6)
        assert supervisor.status()["state"] == "ready"
        second.blocked = False
        await until(lambda: told)  # one that waits for it is enough

    drive(lambda: run_until_stopped(supervisor, body))


def test_a_busy_engine_that_answers_nothing_is_kept(rig: Rig) -> None:
    rig.switches = ["--stub-busy-after", "1", "--stub-busy-s", "1.5"]
    supervisor = rig.supervisor(QUICK.model_copy(update={"stall_timeout_s": 0.4}))
    told: list[str] = []

    async def body() -> None:
        await supervisor.wait_ready()
        answer = await (await ask(rig, supervisor, told))
        assert b"200" in answer
        assert supervisor.status()["state"] == "ready"
        assert not told

    drive(lambda: run_until_stopped(supervisor, body))


def test_a_flood_of_log_does_not_block_the_engine(rig: Rig) -> None:
    rig.switches = ["--stub-flood-mib", "10"]
    supervisor = rig.supervisor()
    told: list[str] = []

    async def body() -> None:
        await supervisor.wait_ready()
        assert b"200" in await (await ask(rig, supervisor, told))

    drive(lambda: run_until_stopped(supervisor, body))
    assert len(rig.log.last(10_000)) < 200  # ten thousand alike lines, told once


def test_stop_waits_for_requests_and_then_ends_them(rig: Rig) -> None:
    supervisor = rig.supervisor(QUICK.model_copy(update={"stall_timeout_s": FOR_EVER, "drain_timeout_s": DRAIN_S}))
    told: list[str] = []

    async def body() -> None:
        running = asyncio.create_task(supervisor.run())
        await supervisor.wait_ready()
        tickets = [rig.traffic.open(1, told.append) for _ in range(2)]
        began = time.monotonic()
        supervisor.stop("SIGTERM")
        await until(lambda: supervisor.status()["state"] == "draining")
        assert isinstance(supervisor.endpoint(), Unready)
        rig.traffic.close(tickets[0])
        await running
        assert time.monotonic() - began >= DRAIN_S
        assert told == ["llamaops is stopping"] * 1

    drive(body)


def test_other_time_limits_are_taken_while_running(rig: Rig) -> None:
    supervisor = rig.supervisor(QUICK.model_copy(update={"drain_timeout_s": FOR_EVER, "stall_timeout_s": FOR_EVER}))

    async def body() -> None:
        await supervisor.wait_ready()
        rig.traffic.open(1, lambda reason: None)
        supervisor.configure(QUICK.model_copy(update={"drain_timeout_s": 0.1}))

    drive(lambda: run_until_stopped(supervisor, body))


def test_stop_is_at_once_when_nothing_is_in_flight(rig: Rig) -> None:
    supervisor = rig.supervisor(QUICK.model_copy(update={"drain_timeout_s": FOR_EVER}))

    async def body() -> None:
        await supervisor.wait_ready()

    drive(lambda: run_until_stopped(supervisor, body))


def test_a_second_stop_skips_the_drain_and_a_third_kills(rig: Rig) -> None:
    rig.switches = ["--stub-ignore-term"]
    supervisor = rig.supervisor(QUICK.model_copy(update={"drain_timeout_s": FOR_EVER, "stop_grace_s": FOR_EVER}))

    async def body() -> None:
        running = asyncio.create_task(supervisor.run())
        await supervisor.wait_ready()
        rig.traffic.open(1, lambda reason: None)
        for _ in range(3):
            supervisor.stop("SIGINT")
        await running

    drive(body)


@pytest.mark.parametrize("switches", [["--stub-silent-load-s", "30"], ["--stub-never-ready", "--stub-ignore-term"]])
def test_stop_before_ready(rig: Rig, switches: list[str]) -> None:
    rig.switches = switches
    supervisor = rig.supervisor()

    async def body() -> None:
        running = asyncio.create_task(supervisor.run())
        await until(lambda: supervisor.status()["pid"])
        waiting = asyncio.create_task(supervisor.wait_ready())
        supervisor.stop("SIGTERM")
        await running
        with pytest.raises(EngineFailed, match="stopped before the engine was ready"):
            await waiting

    drive(body)
    assert states(supervisor)[-1] == "stopped"


def test_stop_during_the_back_off(rig: Rig) -> None:
    rig.switches = ["--stub-crash"]
    backoff = BackoffSection(initial_s=FOR_EVER, max_s=FOR_EVER)
    supervisor = rig.supervisor(QUICK.model_copy(update={"backoff": backoff}))

    async def body() -> None:
        await until(lambda: supervisor.status()["state"] == "back-off")

    drive(lambda: run_until_stopped(supervisor, body))


def test_cancelling_leaves_no_engine(rig: Rig) -> None:
    rig.switches = ["--stub-ignore-term", "--stub-fork", "daemon"]
    supervisor = rig.supervisor()

    async def body() -> None:
        running = asyncio.create_task(supervisor.run())
        await supervisor.wait_ready()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    drive(body)


def test_cancelling_every_task_at_once_leaves_no_engine(rig: Rig) -> None:
    """What asyncio.run does when its main task ends early."""
    rig.switches = ["--stub-ignore-term", "--stub-fork", "daemon"]
    supervisor = rig.supervisor()

    async def body() -> None:
        running = asyncio.create_task(supervisor.run())
        await supervisor.wait_ready()
        assert not running.done()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(body())


def test_what_is_read_back_is_shown(rig: Rig) -> None:
    seen: list[int] = []

    def read_back(pid: int) -> list[Note]:
        seen.append(pid)
        return [Note("degraded", "drift-nice", "not as planned")]

    spawned: list[int] = []
    supervisor = rig.supervisor(read_back=read_back, on_spawn=spawned.append)

    async def body() -> None:
        await supervisor.wait_ready()
        assert seen == spawned == [engine_pid(supervisor)]
        assert supervisor.status()["notes"] == [{"level": "degraded", "code": "drift-nice", "text": "not as planned"}]

    drive(lambda: run_until_stopped(supervisor, body))


def test_death_during_load_is_noticed_at_once(rig: Rig) -> None:
    rig.switches = ["--stub-silent-load-s", str(FOR_EVER)]
    supervisor = rig.supervisor(QUICK.model_copy(update={"start_timeout_s": FOR_EVER}))

    async def body() -> None:
        await until(lambda: rig.log.last(5))
        os.kill(engine_pid(supervisor), signal.SIGKILL)
        await until(lambda: supervisor.status()["state"] == "back-off")

    drive(lambda: run_until_stopped(supervisor, body))


# Replacing the engine.


def test_replace_switches_when_the_new_engine_is_ready(rig: Rig) -> None:
    supervisor = rig.supervisor(QUICK.model_copy(update={"stall_timeout_s": 60, "drain_timeout_s": 60}))
    told: list[str] = []

    async def body() -> None:
        await supervisor.wait_ready()
        old_pid = engine_pid(supervisor)
        ticket = rig.traffic.open(1, told.append)
        replacing = asyncio.create_task(supervisor.replace(rig.with_switches("--stub-silent-load-s", "0.3")))
        await until(lambda: len(marked(rig.mark)) == 2)
        endpoint = supervisor.endpoint()
        assert isinstance(endpoint, Endpoint)
        assert endpoint.generation == 1  # the old one serves until the new one is ready
        await replacing
        endpoint = supervisor.endpoint()
        assert isinstance(endpoint, Endpoint)
        assert endpoint.generation == 2
        assert Path(f"/proc/{old_pid}/cmdline").read_bytes()  # it still has a request
        rig.traffic.close(ticket)
        await until(lambda: marked(rig.mark) == [engine_pid(supervisor)])
        assert not told

    drive(lambda: run_until_stopped(supervisor, body))


def test_an_old_engine_that_does_not_finish_is_ended_after_the_drain_time(rig: Rig) -> None:
    supervisor = rig.supervisor()
    told: list[str] = []

    async def body() -> None:
        await supervisor.wait_ready()
        rig.traffic.open(1, told.append)
        await supervisor.replace(rig.launch)
        # The request does nothing, so its engine counts as frozen or its drain time ends, whichever is first.
        await until(lambda: marked(rig.mark) == [engine_pid(supervisor)])
        assert len(told) >= 1
        assert supervisor.status()["state"] == "ready"

    drive(lambda: run_until_stopped(supervisor, body))


def test_a_new_engine_that_fails_leaves_the_old_one_serving(rig: Rig) -> None:
    supervisor = rig.supervisor()

    async def body() -> None:
        await supervisor.wait_ready()
        old_pid = engine_pid(supervisor)
        with pytest.raises(EngineFailed, match="--nope") as failure:
            say = "error: invalid argument: --nope"
            await supervisor.replace(rig.with_switches("--stub-crash", "--stub-say", say))
        assert failure.value.exit_code == 78
        assert engine_pid(supervisor) == old_pid
        assert supervisor.status()["state"] == "ready"
        os.kill(old_pid, signal.SIGKILL)  # what comes next is the old launch again
        await until(lambda: supervisor.status()["restarts"] == 1 and supervisor.status()["state"] == "ready")

    drive(lambda: run_until_stopped(supervisor, body))


def test_five_replacements_at_once_make_one(rig: Rig) -> None:
    supervisor = rig.supervisor()

    async def body() -> None:
        await supervisor.wait_ready()
        await asyncio.gather(*(supervisor.replace(rig.launch) for _ in range(5)))
        assert supervisor.status()["generation"] == 2

    drive(lambda: run_until_stopped(supervisor, body))


def test_replace_without_the_memory_for_two(rig: Rig) -> None:
    supervisor = rig.supervisor()
    at_once: list[int] = []

    async def body() -> None:
        await supervisor.wait_ready()
        supervisor.subscribe(lambda status: at_once.append(len(status.alive())))
        await supervisor.replace(rig.launch, beside=False)
        assert supervisor.status()["generation"] == 2
        assert max(at_once) == 1

    drive(lambda: run_until_stopped(supervisor, body))


def test_replace_without_the_memory_for_two_falls_back_to_the_old_launch(rig: Rig) -> None:
    supervisor = rig.supervisor()

    async def body() -> None:
        await supervisor.wait_ready()
        with pytest.raises(EngineFailed):
            await supervisor.replace(rig.with_switches("--stub-crash", "--stub-say", "error: invalid argument: --nope"),
                                     beside=False)
        await supervisor.wait_ready()

    drive(lambda: run_until_stopped(supervisor, body))


def test_stop_while_replacing(rig: Rig) -> None:
    supervisor = rig.supervisor()

    async def body() -> None:
        running = asyncio.create_task(supervisor.run())
        await supervisor.wait_ready()
        replacing = asyncio.create_task(supervisor.replace(rig.with_switches("--stub-silent-load-s", "60")))
        await until(lambda: len(marked(rig.mark)) == 2)
        supervisor.stop("SIGTERM")
        await running
        with pytest.raises((EngineFailed, TryAgain)):
            await replacing
        with pytest.raises(TryAgain):
            await supervisor.replace(rig.launch)

    drive(body)


def test_the_old_engine_dies_while_the_new_one_starts(rig: Rig) -> None:
    supervisor = rig.supervisor()

    async def body() -> None:
        await supervisor.wait_ready()
        replacing = asyncio.create_task(supervisor.replace(rig.with_switches("--stub-silent-load-s", "0.3")))
        await until(lambda: len(marked(rig.mark)) == 2)
        os.kill(engine_pid(supervisor), signal.SIGKILL)
        await replacing
        status = supervisor.status()
        assert (status["state"], status["generation"], status["restarts"]) == ("ready", 2, 0)

    drive(lambda: run_until_stopped(supervisor, body))


def test_a_runnable_thread_is_told_from_a_sleeping_one() -> None:
    assert any_runnable(os.getpid())


def test_an_engine_that_dies_just_as_a_probe_returns_is_noticed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the probe and of the engine reach the event loop in one turn: neither may hide the other."""
    supervisor = rig.supervisor()
    probed: list[int] = []

    async def ends_with_the_engine(spec: LaunchSpec, pid: int) -> bool:
        if probed:
            return await is_serving(spec, pid)
        probed.append(pid)
        exited = next(engine.process.exited for engine in supervisor._engines.values() if engine.process.pid == pid)
        await asyncio.wait({exited})
        return False

    monkeypatch.setattr("llamaops.serve.supervisor.is_serving", ends_with_the_engine)

    async def body() -> None:
        await until(lambda: probed)
        os.kill(probed[0], signal.SIGKILL)
        await supervisor.wait_ready()
        assert supervisor.status()["restarts"] == 1

    drive(lambda: run_until_stopped(supervisor, body))
