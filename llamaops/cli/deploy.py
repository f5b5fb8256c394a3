"""``llamaops deploy``: the same plan as a unit of the machine's service manager."""

from __future__ import annotations

from pathlib import Path

import click

from llamaops.cli.run import profile_argument, set_option


@click.group()
def deploy() -> None:
    """Write service definitions from the same plan that `llamaops up` carries out.

    Nothing is installed or started: the files are for you to read and put in place.
    """


@deploy.command()
@profile_argument
@set_option
@click.option("--output", "-o", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Write the unit into DIR under its name, instead of to stdout.")
@click.option("--user", is_flag=True, help="Render for your own service manager (systemctl --user), without root.")
def systemd(profile: Path, overrides: tuple[str, ...], output: Path | None, user: bool) -> None:
    """Render a systemd unit that serves PROFILE.

    The unit runs `llamaops up PROFILE` with what was planned here: CPU weight and CPUs, niceness, the memory limit,
    time to drain, and a sandbox as tight as the paths in use allow. Values are escaped by systemd's rules, so paths may
    hold any printable character. It builds no engine: make sure with `llamaops engine locate`.

    A system unit runs as the account that renders it; rendered by root, as a dynamic user if everybody may read the
    files it needs. Variables that the profile names go into /etc/llamaops/NAME.env (mode 0600), never into the unit.

    \b
    Examples:
      llamaops deploy systemd qwen.yaml
      llamaops deploy systemd qwen.yaml --user -o ~/.config/systemd/user
      sudo llamaops deploy systemd /etc/llamaops/qwen.yaml -o /etc/systemd/system

    Exit codes: 0 rendered · 2 PROFILE or DIR can't be used · 78 the profile or plan is wrong.
    """
    import os

    from llamaops import prepare
    from llamaops.deploy.site import deploy_unit
    from llamaops.deploy.systemd import unit_name
    from llamaops.files import write_whole

    planned = prepare.plan_only(prepare.load_profile(profile, overrides))
    where = profile.parent.resolve() / profile.name
    unit = deploy_unit(planned.profile, planned.plan, planned.engine, planned.model, where, user=user,
                       overrides=overrides, cgroup_version=planned.host.cgroup.version, environ=os.environ)
    for line in unit.advice:
        click.echo(f"note: {line}", err=True)
    if output is None:
        click.echo(unit.text, nl=False)
        return
    path = output / unit_name(planned.profile)
    write_whole(path, unit.text, replace=True)
    click.echo(path)
