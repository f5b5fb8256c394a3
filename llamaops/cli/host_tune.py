"""``llamaops host tune``: change a machine's settings for smooth decoding, and take it back."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import TYPE_CHECKING

import click

from llamaops.cli import colour
from llamaops.errors import NotPermitted, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llamaops.deploy.host_tuning import Outcome

STATE_COLOURS = {"in force": "green", "as it was": "cyan", "changed since": "yellow"}


@click.group()
def tune() -> None:
    """Change this machine's settings for smooth decoding, reversibly.

    Governor performance on the decode CPUs, device interrupts kept off them, huge pages for programs that ask for
    them, no swapping of idle models. Never touched: real-time throttling, and no CPU is taken offline.
    """


@tune.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
def apply(yes: bool) -> None:
    """Show what would be changed, ask, and change it; the originals go to a journal first.

    What lies in /sys and /proc ends with the next boot; call it again then.

    \b
    Examples:
      sudo llamaops host tune apply
      sudo llamaops host tune apply --yes

    Exit codes: 0 done or nothing to do, 2 shown only (no terminal to ask on and no --yes), 77 not root or all refused.
    """
    from llamaops.core.tuning import changes
    from llamaops.deploy import host_tuning
    from llamaops.host import probe_host

    found = changes(probe_host(), host_tuning.read_settings())
    if not found:
        click.echo("nothing to change: all is well, or not this machine's to set")
        return
    for change in found:
        before, after = (host_tuning.shown(value, change.path) for value in (change.before, change.after))
        click.echo(f"/{change.path}: {before} → {after}\n    {change.reason}")
    _confirm(f"Change {len(found)} settings?", yes)
    _report(host_tuning.apply(found))


@tune.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
def revert(yes: bool) -> None:
    """Put back what was there before; values that somebody else changed since are left as they are.

    \b
    Example:
      sudo llamaops host tune revert

    Exit codes: 0 done or nothing to do, 2 shown only (no terminal to ask on and no --yes), 77 not root or all refused.
    """
    from llamaops.deploy import host_tuning

    found = host_tuning.status()
    if not found:
        click.echo("nothing to put back: the journal is empty")
        return
    for entry, state, now in found:
        shown = host_tuning.shown(now, entry.path)
        what = f"{shown} → {host_tuning.shown(entry.before, entry.path)}" if state == "in force" else state
        click.echo(f"/{entry.path}: {what}")
    _confirm("Put these back?", yes)
    _report(host_tuning.revert())


@tune.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(as_json: bool) -> None:
    """Show each change that was made and whether it still holds.

    \b
    Example:
      llamaops host tune status
    """
    from llamaops.deploy import host_tuning

    found = host_tuning.status()
    if as_json:
        rows = [{"path": f"/{entry.path}", "before": entry.before, "after": entry.after, "now": now, "state": state,
                 "reason": entry.reason} for entry, state, now in found]
        click.echo(json.dumps({"changes": rows}, indent=2, ensure_ascii=False))
        return
    if not found:
        click.echo("nothing changed by llamaops host tune")
    for entry, state, now in found:
        word = click.style(f"{state:<20}", fg=STATE_COLOURS.get(state))
        before, shown = (host_tuning.shown(value, entry.path) for value in (entry.before, now))
        click.echo(f"{word}/{entry.path}: {shown} (was {before})", color=colour(sys.stdout))


def _confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; go on only with root's rights."""
    if not yes and not sys.stdin.isatty():
        raise UsageError("nothing was changed, only shown", why="there is no terminal to ask on",
                         fix="call it with --yes")
    if os.geteuid() != 0:
        raise NotPermitted("only root changes the machine's settings", fix=f"sudo llamaops {shlex.join(sys.argv[1:])}")
    if not yes:
        click.confirm(question, abort=True, err=True)


def _report(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        word = click.style("done   " if outcome.done else "not    ", fg="green" if outcome.done else "yellow")
        name = outcome.path if outcome.path == "irqbalance" else f"/{outcome.path}"
        click.echo(f"{word}{name}: {outcome.text}", color=colour(sys.stdout))
    if outcomes and not any(outcome.done for outcome in outcomes) and any("refused" in o.text for o in outcomes):
        raise NotPermitted("the kernel refused every change", why=outcomes[0].text,
                           fix="in a container, tune the machine that runs it")
