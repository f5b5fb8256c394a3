"""``llamaops model compare``: size, speed and quality of models side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamaops.cli.console import make_progress
from llamaops.cli.model_ref import REF, as_json, model_of, profile_of
from llamaops.errors import ModelUnavailable, UsageError

if TYPE_CHECKING:
    from llamaops.core.engine import Engine
    from llamaops.core.model import Model
    from llamaops.core.quality import Quality
    from llamaops.core.serving import Calibration

NAME_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Row:
    """A model with what was found; ``rates`` is None where other work kept the CPUs busy."""

    model: Model
    rates: Calibration | None
    quality: Quality
    base: bool


@click.command(help=f"""Compare models of one vocabulary, such as the quant types of one model.

    {REF} Printed for each: size, bits a weight, tokens a second of prompt and
    answer here, perplexity (PPL, lower is better), and against the base: the Kullback-Leibler divergence (KLD, 0 is the
    same answers) and how often the likeliest token is the same. The text that they are judged by ships with llamaops;
    that takes about a minute for a small model.

    \b
    Examples:
      llamaops model compare ./model-Q8_0.gguf ./model-Q4_K_M.gguf
      llamaops model compare hf:ORG/REPO -q Q8_0 -q Q5_K_M -q Q4_K_M --svg q.svg

    Exit codes: 69 not available, or not comparable · 75 try again (network).
    """)
@click.argument("refs", nargs=-1, required=True, metavar="REF…")
@click.option("-q", "--quantize", "kinds", multiple=True, metavar="TYPE", help="Make this type of the first REF, too.")
@click.option("--base", metavar="REF", help="Judge by this one instead of the one with most bits a weight.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a plot, too.")
@click.option("--offline", is_flag=True, help="Only what is in the cache.")
@click.option("--yes", "-y", is_flag=True, help="Install the converter's Python packages without asking.")
@as_json
def compare(refs: tuple[str, ...], kinds: tuple[str, ...], base: str | None, svg: Path | None, offline: bool, yes: bool,
            json_: bool) -> None:
    """Compare models (the help text is given to the decorator)."""
    wanted: list[tuple[str, str | None]] = [*((ref, None) for ref in refs), *((refs[0], kind) for kind in kinds)]
    if base is not None:
        wanted.append((base, None))
    models = list({model.path: model for model in
                   (model_of(ref, offline=offline, quantize=kind, yes=yes) for ref, kind in wanted)}.values())
    if len(models) < 2:
        raise UsageError("there is only one model to compare", fix="name two, or make types of it: -q Q4_K_M")
    named = model_of(base, offline=offline, yes=yes).path if base is not None else None
    rows = _rows(refs[0], models, named)
    if svg is not None:
        svg.write_text(plot(rows))
    if json_:
        click.echo(json.dumps([_document(row) for row in rows]))
        return
    for line in table(rows):
        click.echo(line)


def _rows(ref: str, models: Sequence[Model], named: str | None) -> list[Row]:
    """Measure speed first, for it wants a quiet machine, then quality. Largest file first."""
    from llamaops.acquire.quality import judge
    from llamaops.core.quality import base_of, check_comparable
    from llamaops.dirs import find_dirs
    from llamaops.prepare import acquire_engine
    from llamaops.provide import all_cpus
    from llamaops.rates import measure_here

    check_comparable(models)
    models = sorted(models, key=lambda model: -model.size_bytes)
    base = next((i for i, model in enumerate(models) if model.path == named), base_of(models))
    progress, profile = make_progress(), profile_of(ref)
    engine = acquire_engine(profile, progress, may_build=False)
    tool = _tool(engine)
    rates = [measure_here(profile, model, engine, progress) for model in models]
    qualities = judge(tool, models, base, find_dirs(os.environ).cache / "tmp", progress, threads=all_cpus())
    return [Row(*found, base=i == base) for i, found in enumerate(zip(models, rates, qualities, strict=True))]


def _tool(engine: Engine) -> Path:
    tool = Path(engine.path).with_name("llama-perplexity")
    if not tool.is_file():
        raise ModelUnavailable("there is no llama-perplexity beside the engine", where=engine.path,
                               fix="llamaops engine build, which makes it")
    return tool


def _document(row: Row) -> dict[str, Any]:
    from llamaops.core.model import bits_per_weight

    model = row.model
    return {"path": model.path, "quant": model.quant, "size_bytes": model.size_bytes, "base": row.base,
            "bits_per_weight": bits_per_weight(model), "prefill_tok_s": row.rates and row.rates.prefill_tok_s,
            "decode_tok_s": row.rates and row.rates.decode_tok_s, **asdict(row.quality)}


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table, at most 80 columns."""
    from llamaops.core.model import bits_per_weight

    yield (f"{'':<{NAME_WIDTH}}{'size':>7}{'bits':>6}{'prompt':>8}{'answer':>8}{'PPL':>8}{'KLD':>9}{'same':>8}")
    yield (f"{'':<{NAME_WIDTH}}{'MiB':>7}{'/wt':>6}{'tok/s':>8}{'tok/s':>8}{'':>8}{'nats':>9}{'top':>8}")
    for row in rows:
        bits, q = bits_per_weight(row.model), row.quality
        speeds = (row.rates.prefill_tok_s, row.rates.decode_tok_s) if row.rates else (None, None)
        prefill, decode = (f"{speed:.0f}" if speed else "-" for speed in speeds)
        against = ("base", "") if row.base else (f"{q.divergence:.4f}", f"{q.same_top:.1%}")
        yield (f"{_name(row.model):<{NAME_WIDTH}}{row.model.size_bytes / (1 << 20):>7.0f}"
               f"{f'{bits:.1f}' if bits else '-':>6}{prefill:>8}{decode:>8}{q.perplexity:>8.2f}{against[0]:>9}"
               f"{against[1]:>8}")
    errors = max(row.quality.perplexity_error for row in rows), max(row.quality.divergence_error for row in rows)
    yield ""
    yield f"PPL ± {errors[0]:.2f} (the same text for all: compare them with KLD), KLD ± {errors[1]:.4f}"
    if any(row.rates is None for row in rows):
        yield "-  other work kept the CPUs busy: no speed was measured"


def _name(model: Model) -> str:
    """Return the quant type first, then as much of the file's name as fits."""
    room = NAME_WIDTH - 2 - len(quant := f"{model.quant or '?'} ")
    stem = Path(model.path).stem
    return quant + (stem if len(stem) <= room else stem[: room - 1] + "…")


def plot(rows: Sequence[Row]) -> str:
    """Return divergence over size as one SVG file: down and left is better."""
    from llamaops.bench.svg import Axis, Plot

    points = [(row.model.size_bytes / (1 << 20), row.quality.divergence) for row in rows]
    drawn = Plot(Axis.over("size, MiB (down and left is better)", [x for x, _ in points]),
                 Axis.over("KLD from the base, nats", [y for _, y in points], zero=True),
                 "KL divergence over file size")
    drawn.line(sorted(points), "a")
    for point, row in zip(points, rows, strict=True):
        speed = f", {row.rates.decode_tok_s:.0f} tok/s" if row.rates else ""
        drawn.dots([point], "a", radius=5)
        drawn.label(point, f"{row.model.quant or '?'}{speed}")
    return drawn.file()
