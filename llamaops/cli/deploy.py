"""``llamaops deploy``: the same plan as a unit, a compose project or a Kubernetes tree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamaops.cli.console import say
from llamaops.cli.deploy_host_tune import host_tune
from llamaops.cli.run import profile_argument, set_option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamaops.prepare import Planned

user_option = click.option("--user", is_flag=True, help="For your own manager (systemctl --user), without root.")
run_as_option = click.option("--run-as", metavar="ACCOUNT", help="The system unit's account; it must be able to read "
                             "what the unit needs. Default: a dynamic user, or whoever renders.")
socket_option = click.option("--socket", is_flag=True, help="Also a socket unit, which holds the port over restarts.")
output_option = click.option("--output", "-o", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
                             help="Write the files into DIR, made if need be; else the main one goes to stdout.")
check_option = click.option("--check", "checking", is_flag=True,
                            help="Write nothing: tell where the files in DIR differ, as a diff.")
cpu_option = click.option("--cpu", "baseline", metavar="LEVEL",
                          help="CPU level of the image's engine: x86-64-v2, -v3, -v4, armv8-a, armv8.2-a or armv8.6-a. "
                               "Default: the best that this machine has.")


@click.group()
def deploy() -> None:
    """Write service definitions from the same plan that `llamaops up` carries out.

    Files are for you to read and put in place; only `deploy systemd install` installs. No file holds a secret.
    """


class _Systemd(click.Group):
    """A group whose first word may also be a profile: then it renders."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the command that is meant where none is named."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["render", *args]
        return super().parse_args(ctx, args)


@deploy.group(cls=_Systemd)
def systemd() -> None:
    """Make a systemd unit that serves PROFILE: print it, install it, compare it, take it away.

    `llamaops deploy systemd PROFILE` prints it; that is the command `render`.
    """


@systemd.command()
@profile_argument
@set_option
@click.option("--output", "-o", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Write the unit into DIR under its name, instead of to stdout.")
@user_option
@run_as_option
@socket_option
def render(profile: Path, overrides: tuple[str, ...], output: Path | None, user: bool,
           run_as: str | None, socket: bool) -> None:
    """Render a systemd unit that serves PROFILE.

    The unit runs `llamaops up PROFILE` with what was planned here: CPU weight and CPUs, niceness, the memory limit,
    time to drain, and a sandbox as tight as the paths in use allow. Values are escaped by systemd's rules, so paths may
    hold any printable character. It builds no engine: make sure with `llamaops engine locate`.

    A system unit runs as the account that renders it; rendered by root, as a dynamic user if everybody may read the
    files it needs, or as the one that --run-as names. Variables that the profile names go into /etc/llamaops/NAME.env
    (mode 0600), never into the unit.

    \b
    Examples:
      llamaops deploy systemd qwen.yaml
      llamaops deploy systemd qwen.yaml --user -o ~/.config/systemd/user
      sudo llamaops deploy systemd /etc/llamaops/qwen.yaml -o /etc/systemd/system

    Exit codes: 0 rendered · 2 PROFILE or DIR can't be used · 78 the profile or plan is wrong.
    """
    _, units = _units(profile, overrides, user=user, run_as=run_as, socket=socket)
    _give(units, output)


@systemd.command()
@profile_argument
@set_option
@user_option
@run_as_option
@socket_option
@click.option("--now", is_flag=True, help="Start it (again) at once.")
def install(profile: Path, overrides: tuple[str, ...], user: bool, run_as: str | None, socket: bool,
            now: bool) -> None:
    """Verify the units of PROFILE, put them in place, and enable them at boot.

    systemd-analyze must find nothing to say, else nothing is written. What was installed is listed in a journal, so
    that uninstall removes exactly that. A unit of that name that llamaops did not install, or that was changed by hand,
    is left alone. Where systemd does not run, nothing is loaded, and it says so.

    \b
    Examples:
      sudo llamaops deploy systemd install /etc/llamaops/qwen.yaml --now
      llamaops deploy systemd install qwen.yaml --user --socket

    Exit codes: 0 installed · 2 another unit is there · 77 not root, or systemd refused · 78 the profile is wrong, or
    systemd finds fault with the unit.
    """
    import os

    from llamaops.deploy import install as units_in_place

    place = units_in_place.find_place(os.environ, user=user)
    planned, units = _units(profile, overrides, user=user, run_as=run_as, socket=socket)
    say(units_in_place.install(place, planned.profile.name, units, start=now))


@systemd.command()
@click.argument("name")
@user_option
def uninstall(name: str, user: bool) -> None:
    """Stop, disable and remove what was installed for NAME (a profile's name), and nothing else.

    Models, engines, keys and the profile stay. Exit codes: 0 removed · 2 a unit was changed by hand · 64 nothing was
    installed under that name · 77 not root.
    """
    import os

    from llamaops.deploy import install as units_in_place

    say(units_in_place.uninstall(units_in_place.find_place(os.environ, user=user), name))


@systemd.command()
@profile_argument
@set_option
@user_option
@run_as_option
@socket_option
def check(profile: Path, overrides: tuple[str, ...], user: bool, run_as: str | None, socket: bool) -> int:
    """Tell where the installed units differ from what PROFILE would give now.

    The profile, the machine, llamaops or systemd may have changed since, or somebody edited the unit. Prints a unified
    diff, from the installed to the new; give the same options as when it was installed.

    Exit codes: 0 no difference · 1 differences · 64 nothing is installed.
    """
    import os

    from llamaops.deploy import install as units_in_place

    place = units_in_place.find_place(os.environ, user=user)
    planned, units = _units(profile, overrides, user=user, run_as=run_as, socket=socket)
    found = units_in_place.differences(place, planned.profile.name, units)
    click.echo(found, nl=False)
    return 1 if found else 0


deploy.add_command(check)
deploy.add_command(host_tune)


@deploy.command()
@profile_argument
@set_option
@output_option
@cpu_option
@check_option
def compose(profile: Path, overrides: tuple[str, ...], output: Path | None, baseline: str | None,
            checking: bool) -> int:
    """Make a compose project that serves PROFILE in a container on this machine.

    compose.yaml carries what was planned here: the CPU list and, beside it, the threads that match it; the CPU weight,
    the memory limit without swap, the limits that niceness and real time need, and nothing else of rights: not root, a
    read-only root, no capabilities. A model that is here already is mounted, another is fetched at the first start.
    Keys are mounted from the profile's file. The Dockerfile builds the engine and installs this llamaops.

    \b
    Examples:
      llamaops deploy compose qwen.yaml -o qwen-compose
      cd qwen-compose && docker compose up --build --detach --wait

    Exit codes: 0 made · 1 --check found differences · 2 PROFILE or DIR can't be used · 64 --check found no files ·
    78 the profile or plan is wrong.
    """
    from llamaops.deploy.compose import render_compose
    from llamaops.deploy.container import source_tree
    from llamaops.deploy.site import container_user

    planned = _plan(profile, overrides)
    files = render_compose(
        planned.profile, profile.read_text(encoding="utf-8"), planned.plan, planned.host, planned.model,
        user=container_user(planned.profile, planned.model), folder=str((output or Path()).absolute()),
        source=source_tree(), baseline=_level(baseline, planned), overrides=overrides)
    return _give_or_check(files, output, checking)


@deploy.command()
@profile_argument
@set_option
@output_option
@cpu_option
@check_option
def k8s(profile: Path, overrides: tuple[str, ...], output: Path | None, baseline: str | None,
        checking: bool) -> int:
    """Make a kustomize tree that serves PROFILE on a Kubernetes cluster.

    A Deployment of Guaranteed pods with whole CPUs, one more than threads; probes sized from the model that never
    generate; time to drain; an init container that fetches the model; Service with session affinity, disruption budget,
    network policy; and components for autoscaling on queue and requests in flight and for the Prometheus operator.
    Threads are those planned for this machine: plan on one like the nodes, or --set placement.threads=N.

    \b
    Examples:
      llamaops deploy k8s qwen.yaml --set serve.api_keys.file=keys.txt --cpu x86-64-v3 -o qwen-k8s
      kubectl apply -k qwen-k8s

    Exit codes: 0 made · 1 --check found differences · 2 PROFILE or DIR can't be used · 64 --check found no files ·
    78 the profile or plan is wrong, nobody said who may call, or the memory to ask for is unknown (model pull first).
    """
    from llamaops.deploy import kubernetes
    from llamaops.deploy.container import source_tree

    planned = _plan(profile, overrides)
    files = kubernetes.render_kubernetes(
        planned.profile, profile.read_text(encoding="utf-8"), planned.plan, baseline=_level(baseline, planned),
        from_source=source_tree() is not None, overrides=overrides)
    say(f"note: {line}" for line in kubernetes.advice(planned.profile, planned.plan))
    return _give_or_check(files, output, checking, main="base/deployment.yaml")


def _plan(profile: Path, overrides: tuple[str, ...]) -> Planned:
    from llamaops import prepare

    return prepare.plan_only(prepare.load_profile(profile, overrides))


def _units(profile: Path, overrides: tuple[str, ...], *, user: bool, run_as: str | None,
           socket: bool) -> tuple[Planned, dict[str, str]]:
    """Plan, and return the units by file name; what their reader should know goes to stderr."""
    import os

    from llamaops.deploy.site import deploy_unit
    from llamaops.deploy.systemd import render_socket, socket_name, unit_name

    planned = _plan(profile, overrides)
    where = profile.parent.resolve() / profile.name
    unit = deploy_unit(planned.profile, planned.plan, planned.engine, planned.model, where, user=user, run_as=run_as,
                       overrides=overrides, cgroup_version=planned.host.cgroup.version, environ=os.environ)
    say(f"note: {line}" for line in unit.advice)
    units = {unit_name(planned.profile): unit.text}
    if socket:
        units[socket_name(planned.profile)] = render_socket(planned.profile)
    return planned, units


def _level(baseline: str | None, planned: Planned) -> str:
    from llamaops.deploy.container import BASELINES, best_baseline
    from llamaops.errors import UsageError

    if baseline is not None and baseline not in BASELINES:
        raise UsageError("there is no such CPU level", where=f"--cpu {baseline}", fix=f"one of {', '.join(BASELINES)}")
    return baseline or best_baseline(planned.host)


def _give(files: Mapping[str, str], output: Path | None, main: str | None = None) -> None:
    """Write all files below ``output`` and print their paths, or print the main one (default: the first)."""
    from llamaops.files import write_whole

    if output is None:
        first, *rest = files
        click.echo(files[main or first], nl=False)
        if rest:
            click.echo(f"note: with -o DIR, {len(rest)} more files are written", err=True)
        return
    for name, text in files.items():
        path = output / name
        if path.parent != output:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, replace=True)
        click.echo(path)


def _give_or_check(files: Mapping[str, str], output: Path | None, checking: bool, main: str | None = None) -> int:
    """Return the exit code."""
    from llamaops.deploy.install import folder_differences
    from llamaops.errors import UsageError

    if not checking:
        _give(files, _made(output), main)
        return 0
    if output is None:
        raise UsageError("--check compares with a folder", fix="name it: -o DIR")
    found = folder_differences(output, files)
    click.echo(found, nl=False)
    return 1 if found else 0


def _made(folder: Path | None) -> Path | None:
    """Make ``folder`` where it is missing, and return it."""
    from llamaops.errors import UsageError

    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UsageError("can't make the folder", where=str(folder), why=exc.strerror, fix="give another") from exc
    return folder
