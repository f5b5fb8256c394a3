"""A report that stands alone: one HTML file made from `llamaops-bench` documents, plots inside, nothing fetched."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamaops.bench.svg import Axis, Plot, intervals
from llamaops.errors import UsageError
from llamaops.files import write_whole
from llamaops.resources import resource

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with what it shows and how to read it."""

    title: str
    reading: str
    svg: str
    name: str


@dataclass(frozen=True, slots=True)
class Section:
    """One document of the report as its page shows it."""

    heading: str
    text: str
    tiles: list[tuple[str, str, str]] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def write_report(path: Path, documents: Sequence[Document]) -> None:
    """Write the report of one or several documents to ``path``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(resource("templates/report"))
    env = Environment(loader=loader, undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    data = json.dumps(list(documents)).replace("<", "\\u003c")
    page = env.get_template("report.html.j2").render(
        sections=[_section(d) for d in documents], figures=figures(documents), data=data,
        environment=_environment(documents))
    write_whole(path, page, replace=True)


def check_document(document: Document) -> None:
    """Raise ValueError where a report of the document can't be made, saying what it lacks."""
    try:
        _section(document)
        figures([document])
        _environment([document])
    except (LookupError, TypeError, AttributeError) as exc:
        raise ValueError(f"it lacks or garbles {exc}") from exc


def write_plots(folder: Path, documents: Sequence[Document]) -> None:
    """Write each plot of the report to a file of its own, ``NAME.svg``, with colours for a white page."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UsageError("can't make the folder", where=str(folder), why=exc.strerror,
                         fix="give --plots a folder that you can write") from exc
    style = f"<style>{_STYLE}</style>"
    for figure in figures(documents):
        write_whole(folder / f"{figure.name}.svg", figure.svg.replace(">", f">{style}", 1), replace=True)


_STYLE = ("text{font:12px sans-serif;fill:#444}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}.limit{stroke:#c22}"
          "text.limit{stroke:none;fill:#c22}.s0{stroke:#1763c6;fill:#1763c6}.s1{stroke:#c2570c;fill:#c2570c}"
          ".s2{stroke:#15803d;fill:#15803d}.s3{stroke:#7c3aed;fill:#7c3aed}.line{fill:none}.dots{stroke:none}"
          ".better{stroke:#15803d;fill:#15803d}.worse{stroke:#c22;fill:#c22}.none{stroke:#777;fill:#777}")


def figures(documents: Sequence[Document]) -> list[Figure]:
    """Return the plots that these documents allow."""
    runs = [d for d in documents if d["kind"] == "run" and d["figures"]["itl_ms"]]
    out = [_ratios(d, i) for i, d in enumerate(documents) if d["kind"] == "comparison"]
    if runs:
        out += [_timeline(runs), _spread(runs, "itl"), _spread(runs, "ttft"), _load(runs)]
    return out


def _gaps(run: Document) -> list[tuple[float, float]]:
    """Return (seconds since the start, gap in ms) of each text after a request's first."""
    return [(b / 1e3, b - a) for r in run["requests"] if not r["failure"]
            for a, b in zip(r["text_ms"], r["text_ms"][1:], strict=False)]


def _ttfts(run: Document) -> list[tuple[float, float]]:
    """Return (due, TTFT), both in ms, of the requests that succeeded."""
    return [(r["due_ms"], r["text_ms"][0] - r["due_ms"]) for r in run["requests"] if r["text_ms"] and not r["failure"]]


def _timeline(runs: Sequence[Document]) -> Figure:
    points = [_gaps(run) for run in runs]
    every = [p for row in points for p in row]
    limit = runs[0]["slo"]["itl_ms"]
    plot = Plot(Axis.over("seconds since the start", [x for x, _ in every], zero=True),
                Axis.over("gap before the text, ms", [*(y for _, y in every), limit], log=True), "gaps over time")
    for i, row in enumerate(points):
        plot.dots(row, f"s{i % 4}")
    plot.level(limit, f"limit {limit:g} ms")
    stalls = sum(y > limit for _, y in every)
    told = f"{stalls} of {len(every)} gaps are longer than the limit." if stalls else "No gap is longer than the limit."
    reading = f"Each dot is one piece of text: low and level is smooth, high is a stall. {told}"
    return Figure("Every token on the clock", reading, plot.svg(), "timeline")


def _spread(runs: Sequence[Document], which: str) -> Figure:
    """Draw how many per cent of the latencies are shorter than x."""
    rows = [sorted(y for _, y in (_gaps(run) if which == "itl" else _ttfts(run))) for run in runs]
    limit = runs[0]["slo"][f"{which}_ms"]
    name = "gap between texts" if which == "itl" else "time to first text"
    plot = Plot(Axis.over(f"{name}, ms", [*(v for row in rows for v in row), limit], log=True),
                Axis("share of all, %", 0, 100), f"distribution of {name}")
    for i, row in enumerate(rows):
        plot.line(_steps(row), f"s{i % 4}")
    plot.level(limit, f"limit {limit:g} ms", vertical=True)
    title = "How long the gaps are" if which == "itl" else "How long until the first text"
    reading = "The further left and the steeper, the better; what lies right of the red line breaks the limit."
    return Figure(title, reading, plot.svg(), which)


def _steps(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """Return a curve of at most 400 points through a sorted sample."""
    step = max(1, len(ordered) // 400)
    return [(v, 100 * (i + 1) / len(ordered)) for i, v in enumerate(ordered) if i % step == 0 or i == len(ordered) - 1]


def _load(runs: Sequence[Document]) -> Figure:
    points = [_busy(run) for run in runs]
    every = [p for row in points for p in row]
    plot = Plot(Axis.over("requests already under way", [x for x, _ in every] + [1.0], zero=True),
                Axis.over("time to first text, ms", [y for _, y in every], log=True), "TTFT against load")
    for i, row in enumerate(points):
        plot.dots(row, f"s{i % 4}", 3.5)
    return Figure("First text against load", "Each dot is one request: how many others were under way when it was due.",
                  plot.svg(), "load")


def _busy(run: Document) -> list[tuple[float, float]]:
    begins = sorted(r["due_ms"] for r in run["requests"])
    ends = sorted(r["ended_ms"] for r in run["requests"])
    return [(bisect_left(begins, due) - bisect_left(ends, due), ttft) for due, ttft in _ttfts(run)]


def _ratios(comparison: Document, number: int) -> Figure:
    rows = [(f"{row['name']}, {chr(66 + i)}", r["low"], r["ratio"], r["high"], row["verdict"] or "none")
            for i, versus in enumerate(comparison["results"]) for row in versus["metrics"] if (r := row["ratio"])]
    return Figure("What changed", "Ratios to A with their intervals. One that touches the red line at 1 is no "
                  "difference; green is better, red is worse.", intervals(rows, "ratio to A"), f"ratios-{number}")


def _section(document: Document) -> Section:
    return _comparison_section(document) if document["kind"] == "comparison" else _run_section(document)


def _run_section(run: Document) -> Section:
    f, slo, w = run["figures"], run["slo"], run["workload"]
    target = " ".join([run["target"]["text"], *run["target"]["overrides"]])
    loop = f"{w['rate']:g} requests/s arriving" if w["rate"] else f"{w['concurrency']} in parallel"
    noise = f"noise {run['noise']['what']}" if run["noise"] else "no noise"
    lengths = f"prompts of {w['prompt_tokens']}, answers of {w['max_tokens']} tokens"
    text = f"{f['sent']} requests, {loop}, {lengths}, {noise}"
    tiles = [("first text, p95", *_tile(f["ttft_ms"], "p95", slo["ttft_ms"])),
             ("gap, p99", *_tile(f["itl_ms"], "p99", slo["itl_ms"])),
             ("output", f"{f['output_tokens_per_s']:.1f} tok/s", ""),
             ("within limits", f"{f['good_ratio']:.0%}", "good" if f["good_ratio"] >= 0.99 else "bad")]
    if f["failures"]:
        tiles.append(("failed", str(sum(f["failures"].values())), "bad"))
    head = ["milliseconds", "p50", "p90", "p95", "p99", "max", "std"]
    rows = [[name, *(f"{s[q]:.1f}" for q in head[1:])] for key, name in _ROWS if (s := f[key])]
    failures = [f"{count} × {f['failure_examples'][kind]}" for kind, count in f["failures"].items()]
    return Section(target, text, tiles, [head, *rows], run["invalid"] + run["warnings"] + failures)


_ROWS = (("ttft_ms", "first text"), ("itl_ms", "gap between texts"), ("tpot_ms", "per token"),
         ("e2e_ms", "whole answer"), ("engine_prompt_ms", "engine: prompt"), ("engine_token_ms", "engine: per token"))


def _tile(summary: dict[str, float] | None, which: str, limit: float) -> tuple[str, str]:
    if summary is None:
        return "–", ""
    value = summary[which]
    return (f"{value:.1f} ms" if value < 1000 else f"{value / 1e3:.2f} s"), "good" if value <= limit else "bad"


def _comparison_section(document: Document) -> Section:
    head = ["median of runs", "A", "other", "ratio", "interval", "verdict"]
    rows = [[f"{row['name']}, {chr(66 + i)}", *(_value(row[k], row["unit"]) for k in ("base", "other")),
             *_ratio(row["ratio"]), row["verdict"] or "none"]
            for i, versus in enumerate(document["results"]) for row in versus["metrics"]]
    names = " · ".join(f"{chr(65 + i)}: {label}" for i, label in enumerate(document["targets"]))
    return Section("Comparison", f"{names}; {len(document['runs'][0])} interleaved runs each", [], [head, *rows],
                   document["warnings"])


def _ratio(ratio: dict[str, float] | None) -> tuple[str, str]:
    return (f"{ratio['ratio']:.3f}", f"{ratio['low']:.3f} – {ratio['high']:.3f}") if ratio else ("–", "–")


def _value(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.1f} {unit}"


def _environment(documents: Sequence[Document]) -> list[tuple[str, str]]:
    """Return the environment's rows; where documents differ, all values."""
    keys = list(dict.fromkeys(k for d in documents for k in d["environment"]))
    values = {k: list(dict.fromkeys(str(d["environment"].get(k)) for d in documents)) for k in keys}
    return [(key, " | ".join(v for v in row if v != "None")) for key, row in values.items() if row != ["None"]]
