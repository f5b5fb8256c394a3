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

WIDTH = 118
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
    from llamaops.core.plan import decisions

    model = planned.model
    chosen = [_row("model.quantize", model.quant or "as it is", model.chosen)] if model and model.chosen else []
    rows = chosen + [_row(*decision) for decision in decisions(planned.plan)]
    notes = [_note(note) for note in planned.plan.notes] or ["  none"]
    sections = {"Command": _command(spec), "Decisions": "\n".join(rows),
                "Memory": _indented(memory_table(planned.plan.memory)), "Notes": "\n".join(notes)}
    return "\n\n".join(f"{click.style(title, bold=True)}\n{body}" for title, body in sections.items())


def _command(spec: LaunchSpec) -> str:
    """Break the command into lines that still paste into a shell, never between a flag and its value."""
    import re
    import shlex
    from itertools import pairwise

    flag = re.compile("--?[A-Za-z]").match
    groups = [f"{name}={shlex.quote(value)}" for name, value in spec.visible_env().items()]
    for before, word in pairwise(("", *spec.argv)):
        if flag(before) and not flag(word):
            groups[-1] += f" {shlex.quote(word)}"
        else:
            groups.append(shlex.quote(word))
    lines = [""]
    for group in groups:
        if lines[-1] and len(lines[-1]) + len(group) > WIDTH - 5:
            lines.append("")
        lines[-1] += f" {group}" if lines[-1] else group
    return _indented(" \\\n  ".join(lines))


def _row(what: str, value: str, why: str) -> str:
    """Align one decision; a long value pushes its reason to the next line."""
    from textwrap import wrap

    head = f"  {what:<28} {value:<12}"
    lines = wrap(why, WIDTH - 44) or [""]
    first = f"{head} {lines[0]}" if len(head) <= 43 else f"{head}\n{'':<44}{lines[0]}"
    return "\n".join([first.rstrip(), *(f"{'':<44}{line}" for line in lines[1:])])


def _note(note: Note) -> str:
    from textwrap import fill

    label = click.style(note.level, fg=LEVEL_COLOURS[note.level], bold=note.level != "info")
    return f"  {label} {note.code}\n" + fill(note.text, WIDTH, initial_indent="    ", subsequent_indent="    ")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
