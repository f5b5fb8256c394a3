"""``llamaops deploy host-tune``: the unit that applies ``host tune`` at boot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamaops.cli.console import say

if TYPE_CHECKING:
    from llamaops.deploy.install import Place


@click.group("host-tune", invoke_without_command=True)
@click.pass_context
def host_tune(context: click.Context) -> None:
    """Make the unit that applies `llamaops host tune` at boot: print it, install it, compare it, take it away.

    One for the machine, beside the units of profiles; what lies in /sys and /proc ends with each boot. Without a
    command, it is printed.

    \b
    Examples:
      llamaops deploy host-tune
      sudo llamaops deploy host-tune install --now
      sudo llamaops deploy host-tune uninstall && sudo llamaops host tune revert
    """
    if context.invoked_subcommand is None:
        click.echo("".join(_units().values()), nl=False)


@host_tune.command()
@click.option("--now", is_flag=True, help="Apply it at once.")
def install(now: bool) -> None:
    """Verify the unit, put it in place, and enable it at boot.

    `llamaops host tune apply` shows first what it would change.

    Exit codes: 0 installed · 2 another unit is there · 77 not root, or systemd refused · 78 systemd finds fault.
    """
    from llamaops.deploy import install as units_in_place

    say(units_in_place.install(_place(), _name(), _units(), start=now))


@host_tune.command()
def uninstall() -> None:
    """Disable and remove the unit, and nothing else: the settings stay until `llamaops host tune revert`.

    Exit codes: 0 removed · 2 it was changed by hand · 64 it was not installed · 77 not root.
    """
    from llamaops.deploy import install as units_in_place

    say([*units_in_place.uninstall(_place(), _name()),
          "settings that are in force stay until: llamaops host tune revert"])


@host_tune.command()
def check() -> int:
    """Tell where the installed unit differs from what would be made now, as a unified diff.

    Exit codes: 0 no difference · 1 differences · 64 it is not installed.
    """
    from llamaops.deploy import install as units_in_place

    found = units_in_place.differences(_place(), _name(), _units())
    click.echo(found, nl=False)
    return 1 if found else 0


def _place() -> Place:
    import os

    from llamaops.deploy.install import find_place

    return find_place(os.environ, user=False)


def _units() -> dict[str, str]:
    from llamaops.deploy.site import deploy_host_tune
    from llamaops.deploy.systemd import HOST_TUNE

    return {HOST_TUNE: deploy_host_tune()}


def _name() -> str:
    """Return the name in the journal of installed units; no profile's holds a dot."""
    from llamaops.deploy.systemd import HOST_TUNE

    return Path(HOST_TUNE).stem
