"""``llamaops model inspect``: what a model is and what it would take here, before anything is fetched."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamaops.cli.console import make_progress
from llamaops.cli.model_ref import REF, as_json, model_of, profile_of, source_of
from llamaops.errors import ModelUnavailable

if TYPE_CHECKING:
    from llamaops.core.fits import Fit, Need
    from llamaops.core.model import Model

KV_TYPES = ("f16", "q8_0", "q4_0")
WIDTH = 80


@dataclass(frozen=True, slots=True)
class Seen:
    """What `inspect` shows."""

    model: Model
    needs: Sequence[Need]
    fits: Sequence[Fit]
    available: int | None
    bound: str


@click.command(help=f"""Show what a model is and what it would take on this machine, before it is fetched.

    {REF}

    Architecture, parameters, training context, chat template; the memory of one slot at each KV type and context; and
    which quant types fit: the files that the hub has, or what could be made of the one that is here (sizes then are
    estimates). Of a model on the hub or at a URL only the header is read, by range request.

    \b
    Examples:
      llamaops model inspect hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF
      llamaops model inspect ~/models/my.gguf

    Exit codes: 69 no such model, 75 try again (network).
    """)
@click.argument("ref")
@click.option("--offline", is_flag=True, help="Ask nobody: only what is on this disk.")
@as_json
def inspect(ref: str, offline: bool, json_: bool) -> None:
    """Show what a model is (the help text is given to the decorator)."""
    seen = _look(ref, offline=offline)
    if json_:
        click.echo(json.dumps(_document(seen), indent=1))
        return
    for line in [*_facts_lines(facts(seen.model)), *_need_lines(seen), *_fit_lines(seen)]:
        click.echo(line)


def _look(ref: str, *, offline: bool) -> Seen:
    from llamaops.core.fits import estimated, fits, needs
    from llamaops.core.memory import available_memory
    from llamaops.host import probe_host

    model, variants = (None if offline else _remote(ref)) or _here(ref)
    available, bound = available_memory(probe_host(), None)
    variants = variants or tuple(estimated(model))
    return Seen(model, needs(model, available), fits(model, variants, available), available, bound)


def _here(ref: str) -> tuple[Model, tuple[Any, ...]]:
    """Look at what is on this disk; at a model in Hugging Face format as it is, for looking converts nothing."""
    from llamaops.acquire.look import look_at_folder
    from llamaops.dirs import find_dirs
    from llamaops.provide import fetch

    section = profile_of(ref).model
    path = fetch(section.source, find_dirs(os.environ).cache, make_progress(), offline=True, sha256=section.sha256)
    looked = look_at_folder(path) if path.is_dir() else None
    return (looked.model, looked.variants) if looked else (model_of(ref, offline=True), ())


def _remote(ref: str) -> tuple[Model, tuple[Any, ...]] | None:
    """Look at the hub or server that REF names; None where it names something else, or a profile's model is here."""
    from llamaops.acquire.look import look_at_hub, look_at_url
    from llamaops.core.source import HubSource, UrlSource, parse_source
    from llamaops.dirs import find_dirs
    from llamaops.hub_api import is_offline
    from llamaops.prepare import load_profile

    if ref.endswith((".yaml", ".yml")):
        try:
            return _here(ref)
        except ModelUnavailable:
            ref = load_profile(Path(ref)).model.source
    source = parse_source(source_of(ref))
    if isinstance(source, UrlSource):
        looked = look_at_url(source)
    elif isinstance(source, HubSource) and not is_offline(os.environ):
        looked = look_at_hub(source, find_dirs(os.environ).cache)
    else:
        return None
    return looked.model, looked.variants


def facts(model: Model) -> dict[str, Any]:
    """Return a model's facts, with what one token takes in the KV cache."""
    from llamaops.core.memory import kv_bytes

    per_token = {kind: kv_bytes(model, 1, kind, kind) for kind in KV_TYPES} if model.layers else None
    return {**asdict(model), "kv_bytes_per_token": per_token}


def _document(seen: Seen) -> dict[str, Any]:
    quants = [{**asdict(fit.variant), "estimated": fit.variant.file is None, "total_bytes": fit.total_bytes,
               "fits": fit.fits} for fit in seen.fits]
    return {**facts(seen.model), "available_bytes": seen.available, "available_bound": seen.bound,
            "memory": [asdict(need) for need in seen.needs], "quants": quants}


def _facts_lines(values: dict[str, Any]) -> Iterator[str]:
    shown = [
        ("path", "path"), ("source", "source"), ("name", "name"), ("architecture", "architecture"),
        ("parameters", "parameters"), ("quant type", "quant"), ("layers", "layers"), ("embedding", "embedding"),
        ("heads / KV heads", "heads"), ("vocabulary", "vocab"), ("training context", "context_train"),
        ("sliding window", "sliding_window"), ("chat template", "has_chat_template"), ("size", "size_bytes"),
    ]  # fmt: skip
    for label, key in shown:
        value = values[key]
        if value is None or (key == "source" and value.removeprefix("path:") == values["path"]):
            continue
        if key == "heads":
            value = f"{value} / {values['kv_heads']}"
        elif key == "size_bytes":
            value = f"{value} bytes ({value / (1 << 20):.0f} MiB)"
        elif key == "parameters":
            value = f"{value / 1e6:.0f} M"
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        yield f"{label:22}{value}"
    for kind, size in (values["kv_bytes_per_token"] or {}).items():
        yield f"{f'KV per token, {kind}':22}{size} bytes"


def _need_lines(seen: Seen) -> Iterator[str]:
    there = "unknown" if seen.available is None else f"{seen.available >> 20} MiB ({seen.bound})"
    yield ""
    yield f"memory of one slot, MiB; available here: {there}"[:WIDTH]
    yield f"{'context':>10}" + "".join(f"{kind + ' KV':>14}" for kind in KV_TYPES)
    for context in dict.fromkeys(need.context for need in seen.needs):
        row = {need.kv_type: need for need in seen.needs if need.context == context}
        yield f"{context:>10}" + "".join(f"{_cell(row[kind]):>14}" for kind in KV_TYPES)
    if any(need.fits is False for need in seen.needs):
        yield "           ! more than there is"


def _cell(need: Need) -> str:
    return f"{'! ' if need.fits is False else ''}{need.total_bytes >> 20}"


def _fit_lines(seen: Seen) -> Iterator[str]:
    from llamaops.core.fits import compared_at

    if not seen.fits:
        return
    yield ""
    yield f"each with {compared_at(seen.model)} tokens of context, f16 KV:"
    yield f"{'quant':10}{'size, MiB':>10}{'needs, MiB':>12}  {'fits':<9}file"
    for fit in seen.fits:
        variant = fit.variant
        verdict = {True: "yes", False: "no", None: "unknown"}[fit.fits]
        size = f"{'' if variant.file else '~'}{variant.size_bytes >> 20}"
        file = _shortened(variant.file.rpartition("/")[2], WIDTH - 43) if variant.file else "can be made of it"
        yield f"{variant.quant or '-':10}{size:>10}{fit.total_bytes >> 20:>12}  {verdict:<9}{file}"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[1 - width :]
