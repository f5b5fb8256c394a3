"""``llamaops host``: look at a machine, and tune it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamaops.cli import colour
from llamaops.cli.host_tune import tune

if TYPE_CHECKING:
    from llamaops.core.engine import Engine
    from llamaops.host.doctor import Check

TUNED = ("governor", "interrupts", "irqbalance", "huge-pages", "swap")
"""The checks whose settings `host tune` changes."""

VERDICT_COLOURS = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "red"}


@click.group()
def host() -> None:
    """Look at this machine: what hinders smooth decoding, how to mend it, and a recording of what planning reads."""


host.add_command(tune)


@host.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--host", "recorded", type=click.Path(path_type=Path), metavar="DIR|TAR",
              help="Examine a recorded machine instead of this one.")
def doctor(as_json: bool, recorded: Path | None) -> None:
    """Check this machine for what makes token streams stutter; nothing is changed.

    Each check says ok, info, warn or fail, the reason, and the command that mends it. Measuring how busy the CPUs are
    takes a quarter of a second.

    \b
    Examples:
      llamaops host doctor
      llamaops host doctor --json

    Exit codes: 0 nothing failed, 70 at least one check says fail.
    """
    from llamaops.host.doctor import examine
    from llamaops.host.snapshot import opened

    with opened(recorded) as root:
        checks = examine(root or Path("/"))
    if recorded is None:
        checks[:0] = _engine_checks()
    if as_json:
        click.echo(json.dumps({"checks": [check.document() for check in checks]}, indent=2, ensure_ascii=False))
    else:
        for check in checks:
            verdict = click.style(f"{check.verdict:<5}", fg=VERDICT_COLOURS[check.verdict])
            click.echo(f"{verdict}{check.name:<18}{check.reason}", color=colour(sys.stdout))
            if check.mend:
                click.echo(f"{'':<23}mend: {check.mend}")
        if recorded is None and any(check.mend for check in checks if check.name in TUNED):
            click.echo("settings at once, and reversibly: sudo llamaops host tune apply", err=True)
    if any(check.verdict == "fail" for check in checks):
        sys.exit(70)


def _engine_checks() -> list[Check]:
    """Say which llama-server a profile with engine.path: auto would run, and whether it suits this CPU.

    An old one on PATH is a common surprise; so is one that was built for another machine.
    """
    from llamaops.acquire.locate import find_engine
    from llamaops.core.profile import EngineSection
    from llamaops.dirs import find_dirs
    from llamaops.errors import EngineUnavailable
    from llamaops.host.doctor import Check

    try:
        found = find_engine(EngineSection(), find_dirs(os.environ).cache, os.environ)
    except EngineUnavailable as exc:
        return [Check("engine", "fail", "; ".join(filter(None, (exc.what, exc.where, exc.why))), exc.fix)]
    if found is None:
        return [Check("engine", "info", "none yet; one is built when it is first needed", "llamaops engine build")]
    said = f"{found.path}, version {found.version or 'unknown'}, {found.openmp or 'no OpenMP'}, from {found.origin}"
    return [Check("engine", "ok", said), *_cpu_check(found)]


def _cpu_check(engine: Engine) -> list[Check]:
    from llamaops.core.engine import BASE_FEATURES, unused
    from llamaops.host.doctor import Check
    from llamaops.recipe import cpu_features

    if not engine.features:
        return []
    if idle := unused(engine.features, cpu_features()):
        return [Check("engine-cpu", "warn" if BASE_FEATURES & set(idle) else "info",
                      f"the engine was built without {', '.join(idle)}, which this CPU has: it could be faster",
                      "llamaops engine build   (GGML_NATIVE is on by default; a newer compiler knows more)")]
    return [Check("engine-cpu", "ok", f"built for what this CPU has: {', '.join(engine.features)}")]


@host.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def snapshot(file: Path) -> None:
    """Record what planning reads into FILE (a gzipped tar), for a bug report or for: llamaops plan --host FILE.

    It holds CPU topology, limits and counters from sysfs, procfs and cgroupfs; no command lines, environment, user or
    host names. It appears whole or not at all.

    \b
    Example:
      llamaops host snapshot machine.tar.gz
    """
    from llamaops.host.snapshot import snapshot as record

    count = record(file)
    click.echo(f"{count} files of this machine recorded in {file}", err=True)
