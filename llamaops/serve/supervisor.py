"""Keeps one engine serving: acts out what `llamaops.core.lifecycle` decides. `Supervisor.run` alone owns the status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamaops.core import engine_life as life
from llamaops.core.causes import Cause, explain
from llamaops.core.engine_life import State, Status
from llamaops.core.engine_words import End, failure, life_json, why_unready
from llamaops.core.launch import LaunchSpec
from llamaops.core.lifecycle import IllegalTransition, step
from llamaops.core.plan import Note
from llamaops.core.profile import SuperviseSection
from llamaops.errors import EngineFailed, LlamaopsError, TryAgain
from llamaops.serve.enginelog import EngineLog, LineWriter
from llamaops.serve.probe import is_serving, warm_up
from llamaops.serve.process import EngineProcess, current_cpus, spawn
from llamaops.serve.procfs import any_runnable, bytes_read, reap_orphans
from llamaops.serve.pulse import Pulse, look
from llamaops.serve.traffic import Endpoint, Traffic, Unready

log = logging.getLogger("llamaops.engine")

MakeLaunch = Callable[[int], LaunchSpec]
"""From a generation (1, 2, …) to what is started: each needs an address of its own."""

_PROBE_FIRST_S = 0.01
_PROBE_SHARE = 0.05
_PROBE_MAX_S = 0.25
"""Without a log line to wake it, a probe comes late by at most this share of the load, at most so long.

Oftener, and what the engine spends on answers would look like progress.
"""
_REAP_S = 2.0


@dataclass(eq=False, slots=True)
class _Running:
    """One engine that has been spawned."""

    generation: int
    spec: LaunchSpec
    process: EngineProcess
    output: LineWriter
    ready: bool = False
    notes: tuple[Note, ...] = ()


class Supervisor:
    """Starts, watches, restarts, replaces and stops the engine of one instance; the relay's `Backend`.

    ``read_back`` tells how a running engine's threads differ from the plan (called in a thread, after ready);
    ``on_spawn`` is called with the pid of each new engine; ``mark`` is this instance's, see `llamaops.serve.process`.
    """

    def __init__(
        self,
        make_launch: MakeLaunch,
        settings: SuperviseSection,
        traffic: Traffic,
        *,
        log: EngineLog,
        mark: str | None = None,
        read_back: Callable[[int], list[Note]] | None = None,
        on_spawn: Callable[[int], object] | None = None,
        warm_up: bool = True,
        requests_wait: bool = False,
    ) -> None:
        self._make_launch = make_launch
        self._traffic = traffic
        self._log = log
        self._mark = mark or f"{os.getpid()}@{time.time_ns()}"
        self._read_back = read_back
        self._on_spawn = on_spawn
        self._warm_up = warm_up
        self.configure(settings)
        self._status = Status(since=time.monotonic())
        self._started_at = time.monotonic()
        self._events: asyncio.Queue[life.Event] = asyncio.Queue()
        self._engines: dict[int, _Running] = {}
        self._last_end: End | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._errands: set[asyncio.Task[None]] = set()
        self._drain: asyncio.Task[None] | None = None
        self._cpus = current_cpus()
        self._requests_wait = requests_wait
        self._opening: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._wanted: tuple[MakeLaunch, bool, str] | None = None
        self._moved = asyncio.Event()
        self._listeners: list[Callable[[Status], None]] = []

    # What others ask.

    async def run(self) -> None:
        """Serve until stopped; return when the last engine is gone.

        Raises EngineFailed, with the cause and the engine's last lines, when nothing was ever served and starting again
        can't help; once it has served it stays, ``failed``, for `replace` to try again. However it ends, cancellation
        included, no engine is left.
        """
        self._post(life.StartRequested("start"))
        if self._requests_wait:
            self._opening = self._errand(self._until(lambda s: s.state is State.READY or s.is_over()))
        if os.getpid() == 1:
            self._errand(_reap_for_ever())
        try:
            while not self._status.is_over():
                self._apply(await self._events.get())
        finally:
            await self._clean_up()
        if self._status.state is State.FAILED:
            raise self._failure("the engine could not be started")

    def stop(self, reason: str) -> None:
        """Begin to drain and stop; called again, make it quicker: first without the drain, then without the grace."""
        self._post(life.StopRequested(reason))

    async def wait_ready(self) -> None:
        """Return when requests are served. Raises EngineFailed when that will not happen any more."""
        await self.reach(State.READY, State.FAILED, State.STOPPED)
        if self.state is not State.READY:
            raise self._failure("the engine could not be started")

    async def reach(self, *states: State) -> None:
        """Return when it is in one of these states."""
        await self._until(lambda s: s.state in states)

    @property
    def state(self) -> State:
        """Where the engine is in its life."""
        return self._status.state

    def endpoint(self) -> Endpoint | Unready:
        """Return where to send a request now, or why not (see `llamaops.serve.traffic.Backend`)."""
        status = self._status
        if status.state is State.READY and (engine := self._engines.get(status.engine or 0)):
            return Endpoint(engine.spec.socket, engine.spec.port, engine.generation)
        return Unready(status.state.value, *why_unready(status, time.monotonic()))

    def coming(self) -> asyncio.Future[None] | None:
        """Return what ends when the engine on its way serves or fails, where requests may wait (see `Backend`)."""
        if self.state is State.READY or self._status.then == "stop":
            return None
        return next((task for task in (self._opening, self._replacing) if task and not task.done()), None)

    async def replace(self, make_launch: MakeLaunch, *, beside: bool = True, reason: str = "reload") -> None:
        """Serve with another launch: start it, switch when it is ready, let the old engine finish and stop it.

        Without ``beside`` the old one is drained and stopped first, for want of memory. Calls that come while one is
        under way are answered by one further replacement. Raises EngineFailed when the new engine does not become ready
        (the old launch goes on serving), TryAgain when llamaops is stopping.
        """
        self._wanted = (make_launch, beside, reason)
        if self._replacing is None or self._replacing.done():
            self._replacing = asyncio.get_running_loop().create_task(self._replace_all())
        await asyncio.shield(self._replacing)

    def configure(self, settings: SuperviseSection) -> None:
        """Take other time limits; they count from the next wait, stop or back-off on."""
        self._settings = settings
        backoff = settings.backoff
        self._policy = life.Policy(backoff.initial_s, backoff.max_s, backoff.reset_after_s)

    def subscribe(self, listener: Callable[[Status], None]) -> None:
        """Call ``listener`` after every change of the status, in the event loop."""
        self._listeners.append(listener)

    def notes(self) -> tuple[Note, ...]:
        """Return how the serving engine's threads differ from the plan."""
        engine = self._engines.get(self._status.engine or 0)
        return engine.notes if engine else ()

    async def look_again(self) -> None:
        """Compare the serving engine with the plan anew; `notes` tells the outcome."""
        engine = self._engines.get(self._status.engine or 0)
        if engine and engine.ready and self._read_back:
            engine.notes = tuple(await asyncio.to_thread(self._read_back, engine.process.pid))

    def status(self) -> dict[str, Any]:
        """Return all of it as JSON-able data; times are seconds, ``at`` is seconds since the epoch."""
        now = time.monotonic()
        engine = self._engines.get(self._status.engine or 0)
        return {
            **life_json(self._status, now, time.time()),
            "pid": engine.process.pid if engine else None,
            "uptime_s": round(now - self._started_at, 3),
            "in_flight": self._traffic.in_flight(),
            "loaded_bytes": bytes_read(engine.process.pid) if engine and not engine.ready else None,
            "notes": [{"level": n.level, "code": n.code, "text": n.text} for n in self.notes()],
        }

    # The owner of the status.

    def _post(self, event: life.Event) -> None:
        self._events.put_nowait(event)

    def _apply(self, event: life.Event) -> None:
        before = self._status
        try:
            self._status, actions = step(before, event, time.monotonic(), self._policy)
        except IllegalTransition as exc:
            log.warning("ignored: %s", exc)
            return
        for line in self._status.history[len(before.history) if len(before.history) < life.HISTORY else -1 :]:
            if line not in before.history:
                self._tell(f"{line.before} → {line.after}: {line.reason}")
        if self._status.state is not before.state:
            self._cancel_timers(before.state)
            if self._status.state is State.FAILED and self._status.served:
                log.error("%s", self._failure("the engine failed for good; a changed profile or a reload tries again"))
        for action in actions:
            self._do(action)
        self._moved.set()
        self._moved = asyncio.Event()
        for listener in self._listeners:
            listener(self._status)

    def _tell(self, text: str) -> None:
        log.info("%s", text)
        self._log.add(f"llamaops: {text}")

    async def _until(self, met: Callable[[Status], bool]) -> None:
        """Wait for a status; one that never started yet counts as none."""
        while not (self._status.history and met(self._status)):
            await self._moved.wait()

    def _cancel_timers(self, left: State) -> None:
        if left is State.BACKOFF:
            while self._timers:
                self._timers.pop().cancel()
        if left is State.DRAINING and self._drain:
            self._drain.cancel()

    # Actions.

    def _do(self, action: life.Action) -> None:
        match action:
            case life.Spawn(generation):
                self._spawn(generation)
            case life.Terminate(generation):
                self._terminate(generation)
            case life.Kill(generation):
                self._signal(generation, "KILL")
            case life.Abort(generation, reason):
                self._traffic.abort_all(reason, generation)
            case life.Wait(delay_s):
                loop = asyncio.get_running_loop()
                self._timers.append(loop.call_later(delay_s, self._post, life.BackoffOver()))
            case life.Drain():
                self._drain = self._errand(self._drain_all())
            case life.Retire(generation):
                self._errand(self._retire(generation))

    def _errand(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task

    def _spawn(self, generation: int) -> None:
        try:
            spec = self._make_launch(generation)
            self._remove_socket(spec)
            output = self._log.writer()
            process = spawn(spec, mark=f"{self._mark}#{generation}", output=output.feed, cpus=self._cpus)
        except (OSError, LlamaopsError) as exc:
            self._report_end(End(generation, None, _cannot_start(exc)))
            return
        engine = _Running(generation, spec, process, output)
        self._engines[generation] = engine
        if self._on_spawn:
            self._on_spawn(process.pid)
        self._errand(self._watch(engine))

    def _signal(self, generation: int, name: str) -> None:
        if engine := self._engines.get(generation):
            engine.process.signal(signal.Signals[f"SIG{name}"])

    def _terminate(self, generation: int) -> None:
        self._signal(generation, "TERM")
        asyncio.get_running_loop().call_later(self._settings.stop_grace_s, self._signal, generation, "KILL")

    async def _drain_all(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._traffic.wait_idle()
        self._post(life.Drained())

    async def _retire(self, generation: int) -> None:
        until = time.monotonic() + self._settings.drain_timeout_s
        while self._traffic.in_flight(generation) and time.monotonic() < until:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)  # for one generation's requests
        self._traffic.abort_all("the engine is being replaced", generation)
        self._terminate(generation)

    # Watching one engine.

    async def _watch(self, engine: _Running) -> None:
        tasks = [asyncio.create_task(self._wait_ready(engine)), asyncio.create_task(self._guard(engine))]
        try:
            ended = await asyncio.shield(engine.process.exited)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        engine.output.close()
        del self._engines[engine.generation]
        self._remove_socket(engine.spec)
        lines = tuple(engine.output.tail)
        self._report_end(End(engine.generation, ended, explain(ended, lines), lines))

    @staticmethod
    def _remove_socket(spec: LaunchSpec) -> None:
        if spec.socket:
            Path(spec.socket).unlink(missing_ok=True)

    def _report_end(self, end: End) -> None:
        self._last_end = end
        self._post(life.Exited(end.generation, end.ended, end.cause))

    async def _wait_ready(self, engine: _Running) -> None:
        """Report ready once our own child answers; `_guard` ends the wait when there is no progress."""
        pid, began = engine.process.pid, time.monotonic()
        while not await self._probe(engine):
            await asyncio.sleep(_PROBE_FIRST_S)
            engine.output.spoke.clear()
            delay = min((time.monotonic() - began) * _PROBE_SHARE, _PROBE_MAX_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await engine.output.spoke.wait()  # a new line may say: ready
        if self._warm_up:
            with contextlib.suppress(OSError, ValueError, EOFError):
                await warm_up(engine.spec, pid)
        if self._read_back:
            engine.notes = tuple(await asyncio.to_thread(self._read_back, pid))
        engine.ready = True
        self._post(life.Ready(engine.generation))

    async def _probe(self, engine: _Running) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                return await is_serving(engine.spec, engine.process.pid)
        return False

    async def _guard(self, engine: _Running) -> None:
        """Report an engine that gets nowhere: on its way to ready, or with requests in flight."""
        interval = min(1.0, self._settings.start_timeout_s / 10, self._settings.stall_timeout_s / 10)
        pid, pulse, still_s = engine.process.pid, None, 0.0
        while still_s < (self._settings.stall_timeout_s if engine.ready else self._settings.start_timeout_s):
            if engine.ready and not self._traffic.owed(engine.generation):
                pulse, still_s = None, 0.0  # it owes us nothing, and looking costs CPU
            else:
                now, sign = time.monotonic(), look(pid, engine.output.count)
                pulse = pulse or Pulse(now, sign, interval)
                still_s = pulse.feel(now, sign, lambda: any_runnable(pid))
            await asyncio.sleep(interval)
        if engine.ready:
            reason = f"the engine froze: requests in flight, and no work done for {still_s:.0f} s"
            self._post(life.Froze(engine.generation, reason))
        else:
            self._post(life.Stalled(engine.generation, f"no progress towards ready for {still_s:.0f} s"))

    # Replacing.

    async def _replace_all(self) -> None:
        while self._wanted is not None:
            (make_launch, beside, reason), self._wanted = self._wanted, None
            await self._replace(make_launch, beside, reason)

    async def _replace(self, make_launch: MakeLaunch, beside: bool, reason: str) -> None:
        old, self._make_launch = self._make_launch, make_launch
        generation = self._status.generation
        if self._status.is_over() or self._status.then == "stop":
            raise TryAgain("llamaops is stopping", fix="start it again with the changed profile")
        self._post(life.RenewRequested(reason, beside))
        await self._until(lambda s: s.generation > generation or s.is_over())
        new = generation + 1
        await self._until(lambda s: new not in s.alive() or (s.engine == new and s.state is State.READY))
        if new not in self._status.alive():
            self._make_launch = old
            raise self._failure("the new engine did not become ready; the old settings stay", new)

    # The end.

    def _failure(self, what: str, generation: int | None = None) -> EngineFailed:
        """Tell how the last engine ended; of another ``generation`` than asked for, it says nothing."""
        end = self._last_end
        told = end is not None and self._status.then != "stop" and generation in (None, end.generation)
        return failure(what, end if told else None)

    async def _clean_up(self) -> None:
        """Leave nothing: whatever still lives is killed and awaited."""
        self._cancel_timers(State.BACKOFF)
        left = list(self._engines.values())
        for engine in left:
            engine.process.signal(signal.SIGKILL)
        if left:
            await asyncio.wait([engine.process.exited for engine in left])
        for task in tuple(self._errands):
            task.cancel()
        await asyncio.gather(*self._errands, return_exceptions=True)
        for engine in left:
            self._remove_socket(engine.spec)


async def _reap_for_ever() -> None:
    seen: frozenset[int] = frozenset()
    while True:
        seen = await asyncio.to_thread(reap_orphans, seen)
        await asyncio.sleep(_REAP_S)


def _cannot_start(exc: OSError | LlamaopsError) -> Cause:
    if isinstance(exc, LlamaopsError):
        return Cause("cannot-start", exc.what, exc.fix, mends=False, exit_code=70)
    return Cause("cannot-start", f"the engine can't be started: {exc.strerror or exc}", mends=True)
