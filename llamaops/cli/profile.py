"""``llamaops init`` and ``llamaops schema``: writing a profile, and what may stand in one."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("file", default="llamaops.yaml")
@click.option("--force", "-f", is_flag=True, help="Replace FILE if it is there.")
def init(file: str, force: bool) -> None:
    """Write a commented profile that suits this machine to FILE (default: llamaops.yaml; - for stdout).

    The model is a small one that is fetched at the first start; change model.source to serve another. Comments tell
    what this machine has and what the defaults would do on it. An existing file is left alone unless --force is given.

    \b
    Examples:
      llamaops init
      llamaops init qwen.yaml && llamaops up qwen.yaml
      llamaops init - | less

    Exit codes: 0 written · 2 FILE exists or can't be written.
    """
    from llamaops.core.first_profile import first_profile
    from llamaops.files import write_whole
    from llamaops.host import probe_host

    text = first_profile(probe_host())
    if file == "-":
        click.echo(text, nl=False)
        return
    write_whole(Path(file), text, replace=force)
    click.echo(f"wrote {file}; serve it with: llamaops up {file}", err=True)


@click.command()
def schema() -> None:
    """Print the profile's JSON Schema (draft 2020-12), for editors and checks.

    Every example starts with a line that points editors at ./llamaops.schema.json, so put it beside your profile:

    \b
      llamaops schema > llamaops.schema.json
    """
    from llamaops.core.profile import profile_schema

    click.echo(json.dumps(profile_schema(), indent=2, ensure_ascii=False))
