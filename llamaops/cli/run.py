"""``llamaops up``, and the commands that talk to a running instance."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import click

from llamaops.cli import colour
from llamaops.core.engine_lines import LEVELS
from llamaops.errors import NotRunning, UsageError

LOG_LEVELS = ["debug", "info", "warning", "error"]
profile_argument = click.argument("profile", type=click.Path(path_type=Path))
set_option = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
                          help="Override one profile value, such as placement.threads=2. Repeatable.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
name_argument = click.argument("name", required=False)


@click.command()
@profile_argument
@set_option
@click.option("--detach", "-d", is_flag=True, help="Prepare here, then serve in the background; returns when ready.")
@click.option("--no-build", is_flag=True, help="Fail rather than build an engine.")
@click.option("--offline", is_flag=True, help="Fetch nothing: use what is on this disk.")
@click.option("--dry-run", is_flag=True, help="Only show the plan (the same as: llamaops plan PROFILE).")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
              help="Log lines on stderr for people, or one JSON object each for machines.")
@click.option("--log-file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Log to FILE instead of stderr; it is kept below 8 MiB, with one file before it.")
@click.pass_context
def up(ctx: click.Context, profile: Path, overrides: tuple[str, ...], detach: bool, no_build: bool, offline: bool,
       dry_run: bool, log_level: str, log_format: Literal["text", "json"], log_file: Path | None) -> int:
    """Prepare everything and serve PROFILE.

    Finds or builds llama-server, fetches (and quantizes) the model, plans CPUs, threads and priority for this machine,
    starts the engine, checks that it answers, and relays its OpenAI-style API. Progress goes to stderr; when requests
    are served, the base URL is printed on stdout. Ctrl-C or SIGTERM drains the running streams and stops everything; a
    second one is quicker.

    \b
    Examples:
      llamaops up examples/quickstart.yaml
      llamaops up qwen.yaml --set serve.port=9000 --detach

    Exit codes: 0 stopped after serving · 2 usage, or no such profile · 69 engine or model not available · 70 the engine
    failed · 75 port or name taken, try again · 77 not permitted · 78 the profile or plan is wrong · 130/143 interrupted
    before it served.
    """
    if dry_run:
        from llamaops.cli.plan import plan

        return int(ctx.invoke(plan, profile=profile, overrides=overrides) or 0)
    from llamaops.own_session import in_own_session

    def serve() -> int:
        import gc

        gc.disable()  # imports make no garbage, and looking for it costs a start some 10 ms; the service turns it on
        from llamaops.cli import serving

        options = serving.Options(profile, overrides, may_build=not no_build, offline=offline,
                                  log_level=log_level, log_format=log_format,
                                  log_file=log_file.absolute() if log_file else None)
        return serving.detach(options) if detach else serving.up(options)

    return serve() if detach else in_own_session(serve)


@click.command()
@name_argument
@json_option
def status(name: str | None, as_json: bool) -> None:
    """Show the state of the instance NAME, or of all.

    \b
    Examples:
      llamaops status
      llamaops status qwen --json

    Exit codes: 0 running · 64 not running.
    """
    documents = [ask(n, "status") for n in ([name] if name else _running_names())]
    if as_json:
        click.echo(json.dumps(documents[0] if name else documents, indent=2))
        return
    for document in documents:
        click.echo(status_text(document))


@click.command()
@name_argument
@click.option("--now", is_flag=True, help="Do not wait for running streams; they end with an error.")
def stop(name: str | None, now: bool) -> None:
    """Drain and stop the instance NAME (or the only one), and wait until it is gone.

    Running streams get the profile's drain time to finish. Exit codes: 0 stopped · 64 not running.
    """
    from llamaops.serve.instance import await_gone

    name = the_one(name)
    ask(name, "stop", now=now)
    await_gone(_runtime(), name)
    click.echo(f"{name} stopped", err=True)


@click.command()
@name_argument
def reload(name: str | None) -> None:
    """Make the instance NAME (or the only one) read its profile again.

    The profile is checked first and nothing changes if it does not hold. Keys, limits and CORS change at once; a change
    that needs a new engine starts it beside the old one and switches when it is ready.

    Exit codes: 0 done · 64 not running · 78 the profile is wrong.
    """
    # A new engine may have to be fetched, built or loaded first: no time-out.
    click.echo(ask(the_one(name), "reload", timeout_s=None), err=True)


@click.command()
@name_argument
@click.option("--lines", "-n", type=click.IntRange(0), default=100, show_default=True, help="This many last lines.")
@click.option("--follow", "-f", is_flag=True, help="Go on as the engine writes, until Ctrl-C.")
@click.option("--level", type=click.Choice(LEVELS), default="debug", show_default="everything",
              help="Only lines at least so grave.")
def logs(name: str | None, lines: int, follow: bool, level: str) -> None:
    """Show the engine's log of the instance NAME (or the only one). Exit codes: 0 · 64 not running."""
    from llamaops.serve import control

    try:
        for line in control.follow(_socket(the_one(name)), "logs", lines=lines, follow=follow, level=level):
            click.echo(line)
    except NotRunning as exc:
        raise _with_last_log(exc, name) from exc


def _with_last_log(exc: NotRunning, name: str | None) -> NotRunning:
    """Say where the logs of instances that have ended are: that is when one wants them."""
    import os

    from llamaops.dirs import find_dirs

    kept = [str(file) for file in sorted(find_dirs(os.environ).state.glob(f"{name or '*'}/engine.log"))]
    if not kept:
        return exc
    return NotRunning(exc.what, where=exc.where, why=exc.why, fix=f"of the last run: {', '.join(kept)}")


def instance_urls() -> dict[str, tuple[str, str | None]]:
    """Return name → base URL and certificate file (None: http) of every running instance of this user."""
    documents = ((n, ask(n, "status")) for n in _names())
    return {n: (str(d["url"]), d.get("certificate")) for n, d in documents if d.get("url")}


def status_text(document: dict[str, Any]) -> str:
    """Return the state of one instance as a person reads it."""
    lines = [
        click.style(f"{document['name']}: {document['state']}", bold=colour(sys.stdout))
        + (f" — {document['reason']}" if document.get("reason") else ""),
        f"  url       {document['url']}",
        f"  llamaops  pid {document['llamaops_pid']}, {document['llamaops']}, up {_duration(document.get('uptime_s'))}",
        f"  engine    pid {document.get('pid') or '–'}, {document['engine']['version'] or 'unknown version'}, "
        f"{document.get('restarts', 0)} restarts",
        f"  model     {document['model']['path']} ({document['model']['quant'] or 'unknown type'})",
        f"  requests  {document['requests']['in_flight']} in the engine, "
        f"{document['requests'].get('waiting', 0)} waiting",
    ]
    lines += [f"  now       {text}" for text in _explanations(document)]
    if hang := document["loop"]["last_hang"]:
        lines.append(f"  relay     its event loop stood still {document['loop']['hangs']} times, last for "
                     f"{hang['seconds']:.1f} s in {hang['where']}")
    lines += [f"  {note['level']:<9} {note['text']} [{note['code']}]" for note in document["notes"]]
    return "\n".join(lines)


def _explanations(document: dict[str, Any]) -> list[str]:
    """Return what limits the streams now, each with what to do about it; nothing while idle."""
    found = (document.get("now") or {}).get("explain", [])
    return [f["text"] + (f" → {f['fix']}" if f["fix"] else "") for f in found if f["code"] != "idle"]


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min {secs} s"


def _runtime() -> Path:
    import os

    from llamaops.dirs import find_dirs

    return find_dirs(os.environ).runtime


def _names() -> list[str]:
    from llamaops.serve.instance import list_instances

    return [known.name for known in list_instances(_runtime()) if known.pid]


def _running_names() -> list[str]:
    names = _names()
    if not names:
        raise NotRunning("nothing is running", fix="start it: llamaops up PROFILE")
    return names


def the_one(name: str | None) -> str:
    """Return ``name``, or the only running instance's."""
    if name:
        return name
    names = _running_names()
    if len(names) > 1:
        raise UsageError("several instances are running", why=", ".join(names), fix="name the one you mean")
    return names[0]


def _socket(name: str) -> Path:
    from llamaops.serve.instance import locate

    return locate(_runtime(), name).control_socket


def ask(name: str, command: str, **arguments: Any) -> Any:
    """Ask the running instance ``name`` over its control socket; see `llamaops.serve.control.call`."""
    from llamaops.serve import control

    return control.call(_socket(name), command, **arguments)
