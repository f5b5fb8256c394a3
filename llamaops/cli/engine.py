"""``llamaops engine``: find, build, list and inspect llama-server."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamaops.cli import colour
from llamaops.cli.console import make_progress
from llamaops.errors import EngineUnavailable, TryAgain, UsageError

if TYPE_CHECKING:
    from llamaops.core.engine import Engine
    from llamaops.core.profile import EngineSection

as_json = click.option("--json", "json_", is_flag=True, help="Print one JSON document.")
pinned = click.option("--path", "path", type=click.Path(path_type=Path), help="This llama-server and no other.")
cmake = click.option(
    "-D", "cmake", multiple=True, metavar="NAME=VALUE",
    help="A CMake definition, as in the profile's engine.cmake. Repeatable.",
)  # fmt: skip


@click.group()
def engine() -> None:
    """Find, build and inspect llama-server.

    A profile with engine.path: auto uses the first of: a build in the cache that suits this machine's CPU, llama-server
    on PATH, a build made then and there.
    """


@engine.command()
@pinned
@cmake
@as_json
def locate(path: Path | None, cmake: tuple[str, ...], json_: bool) -> None:
    """Print the path of the llama-server that would be used.

    Never builds; exit code 69 when there is none.
    """
    found = _find(path, cmake)
    facts = {"path": found.path, "origin": found.origin, "version": found.version}
    click.echo(json.dumps(facts) if json_ else found.path)


@engine.command()
@cmake
@as_json
def build(cmake: tuple[str, ...], json_: bool) -> None:
    """Build the pinned llama.cpp and print where llama-server is.

    Takes minutes, at low priority, and asks for CMake, Ninja or make, and a C++ compiler (CC, CXX). A build that is
    there already for this compiler, CPU and these definitions is returned at once. Ctrl-C is safe; the next run
    continues.

    \b
    Examples:
      llamaops engine build
      llamaops engine build -D GGML_NATIVE=OFF     # runs on other CPUs too
      llamaops engine build -D GGML_OPENMP=OFF

    The environment variable LLAMAOPS_RECIPE names another recipe than the shipped vendor/llama.cpp.toml: a release
    tarball by URL and sha256, or a source tree on this machine.
    """
    from llamaops.prepare import build_engine

    made = build_engine(_section(None, cmake), make_progress())
    click.echo(json.dumps(_facts(made)) if json_ else made.path)


@engine.command()
@click.argument("url")
@click.option("--sha256", metavar="HEX", required=True, help="The archive's checksum, as its publisher states it.")
@as_json
def pull(url: str, sha256: str, json_: bool) -> None:
    """Fetch a released llama.cpp (a tar archive) into the cache and print where its llama-server is.

    It is used where a profile's engine.path names it. One that needs a newer C library or another CPU is refused with
    the reason. A cut download is continued. Exit codes: 69 unfit or not available, 75 try again (network).

    \b
    Example:
      llamaops engine pull https://example.org/llama-b11434-bin-ubuntu-x64.tar.gz --sha256 HEX
    """
    from llamaops.acquire.release import fetch_release
    from llamaops.core.source import UrlSource, parse_source
    from llamaops.dirs import find_dirs

    try:
        source = parse_source(url)
    except ValueError as exc:
        raise UsageError("this is no URL of a release", why=str(exc)) from exc
    if not isinstance(source, UrlSource) or not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise UsageError("a release is https://HOST/FILE and 64 hexadecimal digits", where=str(source))
    got = fetch_release(source, sha256, find_dirs(os.environ).cache, make_progress())
    click.echo(json.dumps(_facts(got)) if json_ else got.path)


@engine.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def rm(names: tuple[str, ...]) -> None:
    """Remove builds and releases from the cache; NAME is what `llamaops engine list` shows, or a path in it.

    What runs, or what a running instance would start again, stays: exit code 75.
    """
    from llamaops.cli.in_use import in_use
    from llamaops.dirs import find_dirs
    from llamaops.recipe import all_built

    cache, users = find_dirs(os.environ).cache, in_use()
    built = {folder.name: folder for folder, _ in all_built(cache)}
    for name in names:
        folder = built.get(name) or next((f for f in built.values() if Path(name).absolute().is_relative_to(f)), None)
        if folder is None:
            raise EngineUnavailable("there is no such engine in the cache", where=name, fix="llamaops engine list")
        if user := next((user for path, user in users.items() if Path(path).is_relative_to(folder)), None):
            raise TryAgain(f"{folder.name} is in use", where=user, fix="stop it, then run the same command again")
        shutil.rmtree(folder)
        click.echo(f"removed {folder.name}", err=True)


@engine.command("list")
@as_json
def list_(json_: bool) -> None:
    """List the builds and releases in the cache, newest first, with the CMake definitions that are not the recipe's.

    * marks those that suit this machine and the shipped recipe.
    """
    from llamaops.dirs import find_dirs
    from llamaops.recipe import all_built, built_engines, flags, load_recipe

    cache = find_dirs(os.environ).cache
    recipe = load_recipe(os.environ)
    fitting = set(built_engines(recipe, {}, cache))
    rows: list[dict[str, Any]] = [
        {"name": folder.name, "path": str(folder / "bin" / "llama-server"), "fits": folder in fitting,
         "size_bytes": _size(folder / "bin"),
         **{k: manifest.get(k) for k in ("version", "made", "from", "compiler", "cmake", "cpu", "key")}}
        for folder, manifest in all_built(cache)
    ]  # fmt: skip
    if json_:
        click.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        click.echo(f"no builds in {cache}; make one with: llamaops engine build", err=True)
    for row in rows:
        mark, usual = "*" if row["fits"] else " ", flags(recipe, {}).items()
        own = " ".join(f"{k}={v}" for k, v in (row["cmake"] or {}).items() if (k, v) not in usual)
        what = own or (row["from"] if row["cmake"] is None else "as the recipe says")
        click.echo(f"{mark} {row['name']}  {row['version']}  {row['size_bytes'] >> 20} MiB  {row['made'][:10]}  {what}")


@engine.command()
@click.argument("path", required=False, type=click.Path(path_type=Path))
@as_json
def info(path: Path | None, json_: bool) -> None:
    """Show what a llama-server is: PATH, or the one that would be used.

    Real path (links followed), version, OpenMP runtime, number of options, the tools beside it and the newest C library
    it asks for. A binary that can't run here is named with the reason; exit code 69.
    """
    from llamaops.engine_binary import read_engine

    found = _find(path, ())
    facts = _facts(read_engine(Path(found.path), found.origin))
    if json_:
        click.echo(json.dumps({**facts, "flags": sorted(facts["flags"])}, indent=1))
        return
    facts["flags"] = f"{len(facts['flags'])} option spellings"
    for name, value in facts.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        label = click.style(f"{name:12}", bold=True) if colour(sys.stdout) else f"{name:12}"
        click.echo(f"{label} {'-' if shown in (None, '') else shown}")


def _find(path: Path | None, cmake: tuple[str, ...]) -> Engine:
    from llamaops.acquire.locate import find_engine
    from llamaops.dirs import find_dirs

    found = find_engine(_section(path, cmake), find_dirs(os.environ).cache, os.environ)
    if found is None:
        raise EngineUnavailable("no llama-server here", why="none in the build cache and none on PATH",
                                fix="llamaops engine build   (or set engine.path)")
    return found


def _section(path: Path | None, cmake: tuple[str, ...]) -> EngineSection:
    from llamaops.core.profile import EngineSection

    definitions: dict[str, str | bool | int] = {}
    for text in cmake:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(f"-D {text} is not NAME=VALUE", fix="for example: -D GGML_NATIVE=OFF")
        definitions[name.partition(":")[0]] = value
    return EngineSection.model_validate({"path": str(path.absolute()) if path else "auto", "cmake": definitions})


def _facts(engine: Engine) -> dict[str, Any]:
    from llamaops.engine_binary import newest_glibc

    folder = Path(engine.path).parent
    return {
        "path": engine.path,
        "origin": engine.origin,
        "version": engine.version,
        "openmp": engine.openmp,
        "unix_socket": engine.unix_socket,
        "features": list(engine.features),
        "glibc": newest_glibc(Path(engine.path)),
        "tools": sorted(path.name for path in folder.glob("llama-*") if path.is_file()),
        "flags": sorted(engine.flags),
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
