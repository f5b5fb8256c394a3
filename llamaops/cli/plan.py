"""``llamaops plan``: what would run and why."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamaops.cli import colour

if TYPE_CHECKING:
    from llamaops.core.launch import LaunchSpec
    from llamaops.core.notes import Note
    from llamaops.prepare import Planned

LEVEL_COLOURS = {"info": "cyan", "degraded": "yellow", "risk": "red"}


@click.command()
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--host", "recorded", type=click.Path(path_type=Path), metavar="DIR|TAR",
              help="Plan for a recorded machine (a folder or tar made by: llamaops host snapshot).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--shell", is_flag=True, help="Print one line to paste into a shell.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Override one key of the profile, such as placement.threads=2; may be repeated.")
def plan(profile: Path, recorded: Path | None, as_json: bool, shell: bool, overrides: tuple[str, ...]) -> None:
    """Show what would run for PROFILE on this machine, and why.

    Nothing is built, fetched, started or changed. Engine and model are read if they are on this disk; without them the
    plan assumes a current engine and leaves the memory sum open. The page shows the command, each decision with its
    reason, the memory sum, and notes: info (good to know), degraded (a fallback), risk (carried out, may go badly).
    The codes of the notes are explained in docs/scheduling.md.

    \b
    Examples:
      llamaops plan examples/quickstart.yaml
      llamaops plan qwen.yaml --set placement.threads=2 --json
      llamaops plan qwen.yaml --host server.tar.gz
      eval "$(llamaops plan qwen.yaml --shell)"

    Exit codes: 0 planned, 2 no such profile, 77 a right is missing and placement.strict is set, 78 the profile or the
    plan is wrong.
    """
    from llamaops.core.launch import launch, shell_line
    from llamaops.core.plan import plan_json
    from llamaops.host.snapshot import opened
    from llamaops.prepare import load_profile, plan_only

    with opened(recorded) as root:
        planned = plan_only(load_profile(profile, overrides), root)
    spec = launch(planned.plan, planned.profile, planned.engine, planned.model, tools=planned.host.tools,
                  environ=os.environ, socket=None, port=planned.profile.serve.port or None)
    if as_json:
        document = plan_json(planned.profile, planned.host, planned.model, planned.engine, planned.plan, spec)
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    elif shell:
        click.echo(shell_line(spec))
    else:
        click.echo(page(planned, spec), color=colour(sys.stdout))


def page(planned: Planned, spec: LaunchSpec) -> str:
    """Return the readable page: the command, decisions with reasons, the memory sum, notes."""
    from llamaops.core.memory import memory_table

    parts = [_heading("Command"), _command(spec), "", _heading("Decisions"), *_decisions(planned), "",
             _heading("Memory"), _indented(memory_table(planned.plan.memory)), "", _heading("Notes")]
    notes = [_note(note) for note in planned.plan.notes]
    return "\n".join([*parts, *(notes or ["  none"])])


def _heading(text: str) -> str:
    return click.style(text, bold=True)


def _command(spec: LaunchSpec) -> str:
    """Break the line before each flag that starts with a dash, as one would by hand."""
    import shlex

    lines = [f"{name}={shlex.quote(value)}" for name, value in spec.visible_env().items()]
    words: list[str] = []
    for word in map(shlex.quote, spec.argv):
        if words and (word.startswith("-") or "/" in word):
            lines.append(" ".join(words))
            words = []
        words.append(word)
    return _indented(" \\\n".join([*lines, " ".join(words)]))


def _decisions(planned: Planned) -> list[str]:
    from llamaops.core.plan import decisions

    return [f"  {what:<30} {value:<14} {why}".rstrip() for what, value, why in decisions(planned.plan)]


def _note(note: Note) -> str:
    from textwrap import fill

    label = click.style(note.level, fg=LEVEL_COLOURS[note.level], bold=note.level != "info")
    return f"  {label} {note.code}\n" + fill(note.text, 110, initial_indent="    ", subsequent_indent="    ")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
