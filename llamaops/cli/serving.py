"""What ``llamaops up`` does, in order: profile, name, port, engine, model, plan, then service until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from llamaops import logs, prepare
from llamaops.child import llamaops_argv
from llamaops.cli.console import asker, make_progress, say
from llamaops.core.profile import Profile
from llamaops.core.progress import NoProgress
from llamaops.core.topology import Held
from llamaops.dirs import find_dirs
from llamaops.errors import EngineFailed, UsageError
from llamaops.serve.auth import load_keys
from llamaops.serve.handover import Upgrade, become
from llamaops.serve.instance import Instance, check_free, hold
from llamaops.serve.listening import listen, was_passed
from llamaops.serve.service import Job, Service
from llamaops.serve.tls import load_tls


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of ``llamaops up``."""

    profile: Path
    overrides: tuple[str, ...]
    may_build: bool
    offline: bool
    log_level: str
    log_format: logs.Format
    log_file: Path | None = None


def up(options: Options) -> int:
    """Serve a profile in the foreground and return the exit code."""
    _configure_log(options)
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # under nohup it is ignored, and stays so
        signal.signal(signal.SIGHUP, _terminate)
    profile = prepare.load_profile(options.profile, options.overrides)
    _check_files(profile)
    runtime, log_path = find_dirs(os.environ).runtime, _log_folder(profile) / "engine.log"
    with hold(runtime, profile.name, log_path) as instance, listen(profile.serve) as sock:
        planned = prepare.prepare(profile, make_progress(), may_build=options.may_build, offline=options.offline,
                                  consent=asker())
        code, kept = _run(planned, instance, sock, options)
    if kept is not None:
        become(_words(options), kept, planned.host.affinity, planned.host.rights.nice)
    return code


def _check_files(profile: Profile) -> None:
    """Tell of keys and certificates that can't be used, or that others can read, before the long work."""
    load_tls(profile.serve.tls)
    keys = profile.serve.api_keys
    load_keys(keys, os.environ)
    if keys is not None and keys.file is not None and Path(keys.file).stat().st_mode & stat.S_IROTH:
        say([f"warning: everybody on this machine can read the API keys: chmod 600 {keys.file}"])


def _configure_log(options: Options) -> None:
    try:
        logs.configure(options.log_level, options.log_format, options.log_file)
    except OSError as exc:
        raise UsageError("can't write the log file", where=str(options.log_file), why=exc.strerror,
                         fix="check the path, or leave out --log-file") from exc


def make_job(planned: prepare.Planned) -> Job:
    """Return what the service starts engines from."""
    assert planned.engine is not None
    assert planned.model is not None
    return Job(planned.profile, planned.plan, planned.engine, planned.model, prepare.launcher(planned, os.environ),
               prepare.document(planned), planned.host.cgroup.weight_path)


def _run(planned: prepare.Planned, instance: Instance, sock: socket.socket,
         options: Options) -> tuple[int, socket.socket | None]:
    """Serve; return the exit code, and the listening socket where another llamaops is to go on with it."""
    import uvloop

    def again(held: Held) -> Job:
        """Prepare once more, for a reload, with the CPUs we came with: by now the relay may be pinned to a few."""
        profile = prepare.load_profile(options.profile, options.overrides)
        return make_job(prepare.prepare(profile, NoProgress(), may_build=options.may_build, offline=options.offline,
                                        affinity=planned.host.affinity, held=held))

    async def main() -> tuple[int, socket.socket | None]:
        upgrade = Upgrade(options.profile, planned.profile.name, _sets(options), fetch=not options.offline,
                          build=options.may_build)
        service = Service(make_job(planned), instance, sock, profile=options.profile, prepare_again=again,
                          upgrade=upgrade, announce=_announce, requests_wait=was_passed(os.environ))
        return await service.run(), sock.dup() if service.handover.stands else None

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _announce(url: str) -> None:
    """Print the URL; whoever started us may not read on."""
    with contextlib.suppress(BrokenPipeError):
        click.echo(url)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """End the preparation as Ctrl-C would, so that every ``finally`` runs."""
    raise SystemExit(128 + signum)


def detach(options: Options) -> int:
    """Prepare here, where progress can be seen, then serve in a process of its own; return once it serves."""
    signal.signal(signal.SIGTERM, _terminate)
    profile = prepare.load_profile(options.profile, options.overrides)
    _check_files(profile)
    check_free(find_dirs(os.environ).runtime, profile.name)
    listen(profile.serve).close()
    prepare.prepare(profile, make_progress(), may_build=options.may_build, offline=options.offline,
                    consent=asker())
    log_path = options.log_file or _log_folder(profile) / "llamaops.log"
    again = replace(options, may_build=False, offline=True, log_file=log_path)
    with log_path.open("ab") as log:
        start = log.tell()
        child = subprocess.Popen(llamaops_argv(*_words(again)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=log, start_new_session=True)
    try:
        assert child.stdout is not None
        url = child.stdout.readline().decode().strip()
    except BaseException:
        child.terminate()
        child.wait()
        raise
    if url:
        click.echo(url)
        return 0
    code = child.wait()
    with log_path.open("rb") as log:
        log.seek(start)
        tail = log.read()[-4000:].decode(errors="replace")
    error = EngineFailed("the background process ended before it served", where=str(log_path), detail=tail)
    error.exit_code = code or EngineFailed.exit_code
    raise error


def _log_folder(profile: Profile) -> Path:
    folder = find_dirs(os.environ).state / profile.name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _words(options: Options) -> list[str]:
    """Return the words that start the same again, from any folder."""
    flags = [*(["--offline"] if options.offline else []), *([] if options.may_build else ["--no-build"])]
    log = ["--log-file", str(options.log_file)] if options.log_file else []
    return ["up", str(options.profile.absolute()), *_sets(options), *flags, "--log-level", options.log_level,
            "--log-format", options.log_format, *log]


def _sets(options: Options) -> list[str]:
    return [word for override in options.overrides for word in ("--set", override)]
