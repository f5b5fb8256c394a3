"""One served profile, put together: relay, supervisor, control socket and signals in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamaops import __version__
from llamaops.core.engine import Engine
from llamaops.core.engine_life import State, Status
from llamaops.core.engine_lines import LEVELS
from llamaops.core.launch import LaunchSpec
from llamaops.core.model import Model
from llamaops.core.plan import Plan
from llamaops.core.profile import Profile
from llamaops.core.topology import NOTHING_HELD, Held
from llamaops.errors import EngineFailed, LlamaopsError, UsageError, WrongProfile
from llamaops.serve import notify
from llamaops.serve.auth import KeyRing, load_keys
from llamaops.serve.control_server import serve_control
from llamaops.serve.drift import Drift
from llamaops.serve.enginelog import EngineLog
from llamaops.serve.handover import Handover, Upgrade
from llamaops.serve.instance import Instance
from llamaops.serve.loopwatch import LoopWatch
from llamaops.serve.readings import private_bytes
from llamaops.serve.signals import Signals
from llamaops.serve.status import page_status
from llamaops.serve.supervisor import MakeLaunch, Supervisor
from llamaops.serve.threads import set_relay_priority
from llamaops.serve.tls import load_tls, switching
from llamaops.serve.traffic import Traffic
from llamaops.serve.weight import lifted_weight

if TYPE_CHECKING:
    from llamaops.serve.app import App, RelayConfig
    from llamaops.serve.front import Server
    from llamaops.serve.observe import Observer

log = logging.getLogger("llamaops")

READ_BACK_S = 60.0
"""How often the live threads are compared with the plan."""

PROFILE_LOOK_S = 2.0
"""How often a failed instance looks whether its profile has changed."""

FOLDER_LOOK_S = 2.0
"""How often an instance looks whether its folder is still there."""

_TAKES_OVER = "another llamaops takes over"


@dataclass(frozen=True, slots=True)
class Job:
    """What is served: the plan, the facts it was made from, and how to render its launch for a socket or a port."""

    profile: Profile
    plan: Plan
    engine: Engine
    model: Model
    launch: Callable[[str | None, int | None], LaunchSpec]
    document: Mapping[str, Any]
    """The plan as ``llamaops plan --json`` prints it."""
    weight_file: str | None = None
    """The file of ``plan.placement.weight``."""


class Service:
    """Serves one job until told to stop; `run` is its whole life.

    ``profile`` is the file that asks for it; ``prepare_again`` is called in a thread at a reload, with what the engine
    holds, and returns the job that it asks for now; ``announce`` is called once, with the base URL, when requests are
    served. Requests that come before are refused, or wait where ``requests_wait``. ``upgrade`` is what a reload hands
    over to where it is there; ``handover.stands`` tells, after `run`.
    """

    def __init__(self, job: Job, instance: Instance, sock: socket.socket, *, profile: Path,
                 prepare_again: Callable[[Held], Job], upgrade: Upgrade, announce: Callable[[str], object],
                 requests_wait: bool = False) -> None:
        self._job = job
        self._instance = instance
        self._sock = sock
        self._profile = profile
        self._prepare_again = prepare_again
        self.handover = Handover(upgrade)
        self._announce = announce
        self._traffic = Traffic()
        self._log = EngineLog(instance.log_path)
        self._drift = Drift(job.plan.placement)
        self._supervisor = Supervisor(
            self._launcher(job), job.profile.supervise, self._traffic, log=self._log, mark=instance.mark,
            read_back=self._drift.read_back, on_spawn=self._drift.on_spawn, requests_wait=requests_wait)
        self._supervisor.subscribe(self._tell_manager)
        self._keys = load_keys(job.profile.serve.api_keys, os.environ)
        self._tls = load_tls(job.profile.serve.tls)
        self._app: App | None = None
        self._observer: Observer | None = None
        self._loop_watch = LoopWatch()
        self._reload_lock = asyncio.Lock()
        self._queued_reload: asyncio.Task[str] | None = None
        self._hangups: set[asyncio.Task[None]] = set()
        self._signals = Signals(self._stop, self._reload_soon)
        self._served = False
        self._lost: EngineFailed | None = None

    async def run(self) -> int:
        """Serve until stopped and return the exit code: 0, or 130/143 when a signal came before anything was served.

        Raises EngineFailed when the engine can't be kept running. No process, socket or task is left behind.
        """
        self._sock.set_inheritable(False)
        self._drift.note(set_relay_priority(self._job.plan.placement))
        weight = lifted_weight(self._job.weight_file, self._job.plan.placement.weight)
        with self._signals.handled(), weight as refused:
            self._drift.note(refused)
            control = await serve_control(self._instance.control_socket, self._handlers())
            try:
                await self._serve()
            finally:
                control.close()
                self._log.close()
        if self._lost:
            raise self._lost
        return 128 + self._signals.first if self._signals.first and not self._served else 0

    async def _serve(self) -> None:
        supervising = asyncio.create_task(self._supervisor.run())
        try:
            await asyncio.sleep(0)  # the engine is spawned here, so that it loads while the relay is imported
            await self._relay_until_over(supervising)
        finally:  # nothing to cancel unless the relay could not be set up
            supervising.cancel()
            await asyncio.gather(supervising, return_exceptions=True)

    async def _relay_until_over(self, supervising: asyncio.Task[None]) -> None:
        from llamaops.serve.app import make_app, make_server

        self._app = make_app(self._supervisor, self._traffic, _relay_config(self._job, self._keys),
                             status=lambda: page_status(self.status()))
        self._observer = self._observe(self._app)
        self._app.metrics.add_collector(self._loop_watch)
        server = make_server(self._app, switching(lambda: self._tls) if self._tls else None)
        gc.freeze()  # what is there now stays: no collection need ever walk it while tokens wait
        gc.enable()
        serving = asyncio.create_task(server.serve(sockets=[self._sock.dup()]))  # it closes what it is given
        helpers = [asyncio.create_task(work) for work in (
            self._tell_ready(), self._check_threads(), self._try_changed_profile(), self._watch_folder(),
            self._make_way(server), self._observer.run(), self._loop_watch.run(),
            notify.feed_watchdog(os.environ, os.getpid()))]
        try:
            await asyncio.wait({serving, supervising}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not supervising.done():
                self._supervisor.stop(_TAKES_OVER if self.handover.stands else "the HTTP server ended")
            await supervising
        finally:
            server.should_exit = True
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(serving, *helpers, return_exceptions=True)

    # ---- the engine ----

    def _observe(self, app: App) -> Observer:
        """Let somebody look at the engine and its CPUs, and show on /metrics what is seen."""
        from llamaops.serve.observe import Observer

        engine, model = self._job.engine, self._job.model
        build = {"version": __version__, "engine": engine.version or "unknown", "model": self._job.profile.name,
                 "quant": model.quant or "unknown"}
        return Observer(app, self._supervisor, lambda: (self._job.plan, self._job.profile), self._notes, build)

    def _launcher(self, job: Job) -> MakeLaunch:
        def make(generation: int) -> LaunchSpec:
            self._drift.planned = job.plan.placement
            if job.engine.unix_socket:
                return job.launch(str(self._instance.engine_socket(generation)), None)
            return job.launch(None, _free_port())

        return make

    # ---- what goes on beside ----

    async def _make_way(self, server: Server) -> None:
        """Once another llamaops takes over: accept no more, and let what is under way end within the drain time."""
        await self.handover.agreed.wait()
        await server.make_way()
        await asyncio.sleep(self._job.profile.supervise.drain_timeout_s)
        for _ in range(2):  # the second time quicker: the drain time is over
            self._supervisor.stop(_TAKES_OVER)

    async def _tell_ready(self) -> None:
        with contextlib.suppress(EngineFailed):  # run() of the supervisor raises the same
            await self._supervisor.wait_ready()
            self._served = True
            log.info("%s is served at %s", self._job.profile.name, self.url)
            self._announce(self.url)
            notify.notify(os.environ, *notify.ready(f"serving at {self.url}"))

    def _tell_manager(self, status: Status) -> None:
        """Let ``systemctl status`` show where the engine is in its life."""
        if status.history and status.history[-1].at == status.since:
            text = f"serving at {self.url}" if status.state is State.READY else status.history[-1].reason
            notify.notify(os.environ, *notify.status(f"{status.state}: {text}"))

    async def _try_changed_profile(self) -> None:
        """Reload when the profile changes after the engine has failed for good."""
        while True:
            await self._supervisor.reach(State.FAILED)
            failed_with = _version(self._profile)
            while self._supervisor.state is State.FAILED and _version(self._profile) == failed_with:  # noqa: ASYNC110
                await asyncio.sleep(PROFILE_LOOK_S)
            if self._supervisor.state is State.FAILED:
                log.info("the profile has changed: trying again")
                await self._reload_and_log()

    async def _watch_folder(self) -> None:
        """End when somebody removes the instance's folder: nothing can reach the engine or find us any more."""
        while self._instance.is_there():  # noqa: ASYNC110 - the file system sends no event that holds everywhere
            await asyncio.sleep(FOLDER_LOOK_S)
        self._lost = EngineFailed(
            "the instance's folder was removed", where=str(self._instance.folder),
            why="with it went the sockets through which the engine and this instance are reached",
            fix="start it again; where a logout removes the folder: loginctl enable-linger, or set XDG_RUNTIME_DIR")
        log.error("the instance's folder %s was removed: stopping", self._instance.folder)
        self._stop("the instance's folder was removed")

    async def _check_threads(self) -> None:
        while True:
            await asyncio.sleep(READ_BACK_S)
            await self._supervisor.look_again()

    def _stop(self, reason: str) -> None:
        self.handover.give_up()
        notify.notify(os.environ, *notify.stopping(reason))
        self._supervisor.stop(reason)

    def _reload_soon(self) -> None:
        task = asyncio.create_task(self._reload_and_log())
        self._hangups.add(task)
        task.add_done_callback(self._hangups.discard)

    async def _reload_and_log(self) -> None:
        """Reload where nobody waits for the outcome."""
        try:
            await self.reload()
        except LlamaopsError as exc:
            log.error("reload refused, nothing changed: %s", exc)
        except Exception:
            log.exception("reload failed, nothing changed")

    # ---- reload ----

    async def reload(self) -> str:
        """Serve what the profile asks for now and say what changed; nothing changes when it raises.

        Calls that come while one is under way are answered by one further reload.
        """
        if self._queued_reload is None:
            self._queued_reload = asyncio.create_task(self._reload_next())
        return await asyncio.shield(self._queued_reload)

    async def _reload_next(self) -> str:
        async with self._reload_lock:
            self._queued_reload = None
            notify.notify(os.environ, *notify.reloading())
            try:
                version = await self.handover.agree()
                text = await self._reload() if version is None else (
                    f"llamaops {version} takes over: running streams end first, what comes meanwhile waits")
                log.info("reloaded: %s", text)
                return text
            finally:
                if not self.handover.stands:
                    notify.notify(os.environ, *notify.ready(f"serving at {self.url}"))

    async def _reload(self) -> str:
        held = self._held()
        job = await asyncio.to_thread(self._prepare_again, held)
        self._check_fixed(job.profile)
        keys, tls = load_keys(job.profile.serve.api_keys, os.environ), load_tls(job.profile.serve.tls)
        down = self._supervisor.state in (State.BACKOFF, State.FAILED)
        if down or job.launch("-", None) != self._job.launch("-", None) or job.engine != self._job.engine:
            available = job.plan.memory.available_bytes
            beside = available is None or job.plan.memory.total_bytes + held.private_bytes <= available
            await self._replace(job, beside=beside)
            text = "a new engine serves" if beside else "the engine was stopped and a new one serves"
        else:
            text = "keys, certificate, limits and origins were read again; the engine goes on"
        self._job, self._tls = job, tls
        self._drift.start_anew()
        self._drift.note(set_relay_priority(job.plan.placement))
        self._supervisor.configure(job.profile.supervise)
        if self._app:
            self._app.configure(_relay_config(job, keys))
        return text

    def _held(self) -> Held:
        pid = self._supervisor.status()["pid"]
        return Held(private_bytes(pid), self._job.plan.placement.mem_nodes) if pid else NOTHING_HELD

    async def _replace(self, job: Job, *, beside: bool) -> None:
        """Start the new engine from a relay that has the new plan's priority already: its launch counts from there."""
        set_relay_priority(job.plan.placement)
        try:
            await self._supervisor.replace(self._launcher(job), beside=beside)
        except BaseException:
            set_relay_priority(self._job.plan.placement)
            raise

    def _check_fixed(self, profile: Profile) -> None:
        for key, old, new in (
            ("name", self._job.profile.name, profile.name),
            ("serve.host", self._job.profile.serve.host, profile.serve.host),
            ("serve.port", self._job.profile.serve.port, profile.serve.port),
            ("serve.tls", _with_tls(self._job.profile), _with_tls(profile)),
        ):
            if old != new:
                raise WrongProfile(f"{key} can't change while it runs", where=key, why=f"it is {old}, asked: {new}",
                                   fix=f"llamaops stop {self._job.profile.name}, then up again")

    # ---- what it tells ----

    @property
    def url(self) -> str:
        """The base URL for clients on this machine."""
        host, port = self._sock.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - read, not bound
        scheme = "https" if self._tls else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def status(self) -> dict[str, Any]:
        """Return the instance's state as ``llamaops status --json`` prints it."""
        supervisor = self._supervisor.status()
        queue = self._app.admission.snapshot() if self._app else {}
        tls = self._job.profile.serve.tls
        return {
            "name": self._job.profile.name, "url": self.url, "certificate": tls and tls.cert,
            "llamaops": __version__, "llamaops_pid": os.getpid(),
            **supervisor,
            "notes": self._notes(),
            "requests": {"in_flight": self._traffic.in_flight(), **queue},
            "model": {"path": self._job.model.path, "quant": self._job.model.quant, "names": self._names()},
            "engine": {"path": self._job.engine.path, "version": self._job.engine.version},
            "loop": self._loop_watch.tell(),
            **(self._observer.tell() if self._observer else {"streams": [], "now": None}),
        }

    def _notes(self) -> list[dict[str, Any]]:
        """Return what the plan noted and where the live threads differ from it."""
        return [asdict(n) for n in (*self._job.plan.notes, *self._drift.notes(), *self._supervisor.notes())]

    def _names(self) -> list[str]:
        return [self._job.profile.name, *self._job.profile.model.aliases]

    def _handlers(self) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
        async def status(request: Mapping[str, Any]) -> dict[str, Any]:
            return self.status()

        async def plan(request: Mapping[str, Any]) -> dict[str, Any]:
            return dict(self._job.document)

        async def stop(request: Mapping[str, Any]) -> str:
            for _ in range(2 if request.get("now") else 1):
                self._stop("llamaops stop")
            return "stopping"

        async def reload(request: Mapping[str, Any]) -> str:
            return await self.reload()

        async def cancel(request: Mapping[str, Any]) -> bool:
            return self._app is not None and self._app.relay.cancel(str(request.get("id")))

        async def logs(request: Mapping[str, Any]) -> AsyncIterator[str]:
            count, level = int(request.get("lines", 100)), request.get("level", "debug")
            if level not in LEVELS:
                raise UsageError(f"no such level: {level}", why=f"known: {', '.join(LEVELS)}")
            if request.get("follow"):
                async for line in self._log.follow(count, level):
                    yield line
            else:
                for line in self._log.last(count, level):
                    yield line

        return {"status": status, "plan": plan, "stop": stop, "reload": reload, "cancel": cancel, "logs": logs}


def _relay_config(job: Job, keys: KeyRing | None) -> RelayConfig:
    from llamaops.serve.app import RelayConfig

    return RelayConfig.from_profile(job.profile, job.plan.serving, keys)


def _with_tls(profile: Profile) -> str:
    return "set" if profile.serve.tls else "not set"


def _version(file: Path) -> tuple[int, int, int] | None:
    """Return what changes when the file is written; None while it is not there."""
    try:
        info = file.stat()
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns


def _free_port() -> int:
    """Return a loopback port that is free now, for engines without UNIX sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
