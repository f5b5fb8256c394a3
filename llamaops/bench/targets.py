"""What is measured: a profile or a command line, started for it, or a URL that serves already."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

from llamaops.bench.load import Server
from llamaops.child import end_group, llamaops_argv
from llamaops.direct import DIRECT
from llamaops.errors import EngineFailed, TryAgain, UsageError

if TYPE_CHECKING:
    from llamaops.core.progress import Progress

Kind = Literal["profile", "url", "cmd"]
_TAIL = 30


@dataclass(frozen=True, slots=True)
class Target:
    """What a person named; ``overrides`` are ``--set`` values of a profile."""

    kind: Kind
    text: str
    overrides: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Return a short name for tables."""
        if self.kind == "profile":
            return " ".join([Path(self.text).stem, *self.overrides])
        return self.text

    def profile_slo(self) -> tuple[float, float] | None:
        """Return the profile's TTFT and ITL limits in milliseconds, None for what is no profile."""
        if self.kind != "profile":
            return None
        from llamaops.prepare import load_profile

        slo = load_profile(Path(self.text), self.overrides).slo
        return slo.ttft_ms, slo.itl_ms


@dataclass(frozen=True, slots=True)
class Live:
    """A target that serves. ``pid`` leads its processes, None where they are not on this machine or not ours to see."""

    server: Server
    pid: int | None


def make_ready(target: Target, progress: Progress) -> None:
    """Build, fetch and calibrate here, where it can be seen, what a profile needs; other targets need nothing."""
    if target.kind == "profile":
        from llamaops.prepare import load_profile, prepare

        prepare(load_profile(Path(target.text), target.overrides), progress)


def planned(target: Target) -> dict[str, Any] | None:
    """Return engine, model, placement and serving of a profile's plan, as ``plan --json`` has them; else None."""
    if target.kind != "profile":
        return None
    from llamaops.core.plan import plan_json
    from llamaops.prepare import load_profile, plan_only

    p = plan_only(load_profile(Path(target.text), target.overrides))
    document = plan_json(p.profile, p.host, p.model, p.engine, p.plan)
    return {key: document[key] for key in ("engine", "model", "placement", "serving")}


def parse_target(text: str, overrides: Sequence[str] = ()) -> Target:
    """Read ``URL``, ``cmd:COMMAND LINE with {port}`` or a profile's path. Raises UsageError."""
    if text.startswith(("http://", "https://")):
        _split(text)
        kind: Kind = "url"
    elif text.startswith("cmd:"):
        kind = "cmd"
        _argv(text, 0)
    else:
        return Target("profile", text, tuple(overrides))
    if overrides:
        raise UsageError("--set belongs to a profile", where=text, fix="leave it out, or bench a profile")
    return Target(kind, text)


def _split(url: str) -> tuple[str, int, bool, str]:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    try:
        port = parts.port or (443 if tls else 80)
    except ValueError:
        port = 0
    if not parts.hostname or not port or parts.username is not None:
        raise UsageError("not a base URL", where=parts.hostname or "URL", fix="write it as http://HOST:PORT[/v1]")
    return parts.hostname, port, tls, parts.path.rstrip("/").removesuffix("/v1")


def _argv(text: str, port: int) -> list[str]:
    """Split a ``cmd:`` target as a shell would, without running one."""
    try:
        words = shlex.split(text.removeprefix("cmd:"))
    except ValueError as exc:
        raise UsageError("can't read the command line", where=text, why=str(exc), fix="balance its quotes") from exc
    if not any("{port}" in word for word in words):
        raise UsageError("the command line names no port", where=text,
                         fix="write {port} where the port goes: cmd:llama-server -m FILE --port {port}")
    return [word.replace("{port}", str(port)) for word in words]


@contextlib.contextmanager
def serving(target: Target, server: Server, *, start_timeout_s: float = 600.0) -> Iterator[Live]:
    """Yield the target serving; what was started for it is gone afterwards, however the context ends.

    ``server`` supplies everything but the address. Raises EngineFailed when it does not come to serve, and whatever
    `llamaops up` would end with for a profile.
    """
    if target.kind == "url":
        host, port, tls, path = _split(target.text)
        live = Live(replace(server, host=host, port=port, tls=tls, path=path), None)
        yield replace(live, server=_named(live.server), pid=_listener(port) if _is_local(host) else None)
    elif target.kind == "cmd":
        with _command(target, start_timeout_s) as (port, pid):
            yield Live(_named(replace(server, host="127.0.0.1", port=port)), pid)
    else:
        with _profile(target) as (url, pid):
            host, port, _, _ = _split(url)
            yield Live(_named(replace(server, host=host, port=port)), pid)


@contextlib.contextmanager
def _command(target: Target, start_timeout_s: float) -> Iterator[tuple[int, int]]:
    port = free_port()
    with _Process(_argv(target.text, port), os.environ, target.text) as process:
        _await_healthy(process, port, time.monotonic() + start_timeout_s)
        yield port, process.popen.pid


@contextlib.contextmanager
def _profile(target: Target) -> Iterator[tuple[str, int]]:
    """Serve a profile that was made ready by `llamaops up`, under a name, port and runtime folder of its own."""
    from llamaops.prepare import load_profile

    name = f"{load_profile(Path(target.text), target.overrides).name[:40]}-bench-{os.getpid()}".strip("-")
    ours = [f"name={name}", "serve.port=0", "serve.host=127.0.0.1", "serve.api_keys=null",
            "serve.tls=null"]
    sets = [word for override in (*target.overrides, *ours) for word in ("--set", override)]
    argv = llamaops_argv("up", target.text, *sets, "--offline", "--no-build", "--log-level", "warning")
    runtime = tempfile.mkdtemp(prefix="llo-")
    private = {"XDG_RUNTIME_DIR": runtime, "XDG_STATE_HOME": runtime}  # its sockets and logs go with it
    try:
        with _Process(argv, os.environ | private, target.text, out=True) as process:
            assert process.popen.stdout is not None
            url = process.popen.stdout.readline().decode().strip()
            if not url:
                error = process.ended()
                error.exit_code = max(process.popen.returncode, 0) or EngineFailed.exit_code  # the same codes as ours
                raise error
            yield url, process.popen.pid
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


class _Process:
    """A program in a session of its own, its last words kept; on leaving: SIGTERM, patience, then its whole group."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], where: str, *, out: bool = False) -> None:
        if shutil.which(argv[0]) is None:
            raise UsageError("can't run the command", where=argv[0], why="there is no such program",
                             fix="check its path")
        dies_with_us = [setpriv, "--pdeathsig", "TERM", "--"] if (setpriv := shutil.which("setpriv")) else []
        self._where = where
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self.popen = subprocess.Popen([*dies_with_us, *argv], env=dict(env), stdin=subprocess.DEVNULL,
                                      stdout=subprocess.PIPE if out else subprocess.DEVNULL, stderr=subprocess.PIPE,
                                      start_new_session=True)
        self._drain = Thread(target=self._keep_tail, daemon=True)
        self._drain.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(15)
        end_group(self.popen)
        self._drain.join(1)
        for pipe in (self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                pipe.close()

    def _keep_tail(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self._tail.append(line.decode("utf-8", "replace").rstrip())

    def failed(self, what: str, why: str) -> EngineFailed:
        return EngineFailed(what, where=self._where, why=why, detail="\n".join(self._tail))

    def ended(self) -> EngineFailed:
        """Await its end and return that as an error, with its last words."""
        code = self.popen.wait()
        self._drain.join(1)  # not for ever: what it started may hold the pipe
        return self.failed("it ended before it served", f"exit code {code}")


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _await_healthy(process: _Process, port: int, until: float) -> None:
    """Return when the port answers ``/health`` or ``/v1/models`` with 200."""
    while not any(_status(port, path) == 200 for path in ("/health", "/v1/models")):
        if process.popen.poll() is not None:
            raise process.ended()
        if time.monotonic() > until:
            raise process.failed("the command does not serve",
                                 f"neither /health nor /v1/models answered on port {port}")
        time.sleep(0.05)


def _status(port: int, path: str) -> int | None:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            return int(sock.recv(64).split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _named(server: Server) -> Server:
    """Return ``server`` with the first model it lists, unless one was given. Raises TryAgain when nothing answers."""
    import httpx

    headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    base = f"{'https' if server.tls else 'http'}://{server.authority}{server.path}"
    try:
        with httpx.Client(headers=headers, timeout=30, mounts=DIRECT) as client:
            answer = client.get(f"{base}/v1/models")
    except httpx.HTTPError as exc:
        raise TryAgain("nothing answers there", where=base, why=str(exc), fix="check that it serves") from exc
    if answer.status_code == 401:
        raise UsageError("the server wants an API key", where=base, fix="set LLAMAOPS_API_KEY, or give --api-key")
    if server.model:
        return server
    try:
        return replace(server, model=str(answer.json()["data"][0]["id"]))
    except (ValueError, KeyError, IndexError, TypeError):
        return server


def _is_local(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


def _listener(port: int) -> int | None:
    """Return the pid that listens on a local TCP port, None where we may not see it."""
    import psutil

    try:
        found: list[int | None] = [c.pid for c in psutil.net_connections("tcp")
                                   if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port]
    except (psutil.AccessDenied, OSError):
        return None
    return next((pid for pid in found if pid), None)


