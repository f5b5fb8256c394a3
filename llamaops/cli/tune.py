"""``llamaops tune``: find the setting that is best on this machine."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamaops.cli.bench import check_all_writable, load_options, make_conditions, terminate
from llamaops.errors import UsageError

if TYPE_CHECKING:
    from llamaops.bench.tune import Tuned

OBJECTIVES = ["slo", "itl", "throughput", "energy"]


@click.command()
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Override one value of the profile before tuning. Repeatable.")
@click.option("--objective", type=click.Choice(OBJECTIVES), default="slo", show_default=True,
              help="slo: the profile's limits first, then speed. itl: smallest ITL p99. energy: joules per token.")
@click.option("--budget", default="10m", show_default=True, metavar="TIME", help="How long to measure: 90s, 10m, 1h.")
@click.option("--pairs", type=click.IntRange(4, 100), default=6, show_default=True,
              help="Paired runs that confirm the winner against the start profile; up to four times as many, "
              "within the budget, while they do not decide.")
@click.option("--rt", is_flag=True, help="Try real-time scheduling too, where it is permitted.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
              help="Where the winner goes.  [default: PROFILE's name with .tuned.yaml, beside it]")
@click.option("--fresh", is_flag=True, help="Forget what an interrupted run of the same question measured.")
@click.option("--json", "as_json", is_flag=True, help="Print the evidence as one JSON document.")
@load_options
def tune(profile: Path, overrides: tuple[str, ...], objective: str, budget: str, pairs: int, rt: bool,
         out: Path | None, fresh: bool, as_json: bool, **load: Any) -> int:
    """Search this machine's best setting for PROFILE and write it as a profile.

    Only keys that the profile leaves on auto are turned: threads, spin, niceness, SMT, core classes, batch threads,
    slots, KV type, flash attention, and real-time policies with --rt. One knob after the other, its values race against
    the best so far in interleaved short runs, and drop out once they have surely lost; after a clear win a second
    pass sees whether early choices hold. Points whose plan degrades, risks something or needs more threads than there
    are CPUs are refused. At the end the winner is confirmed against the start profile in paired runs, and written only
    if it is surely better: the profile as it was, with what won, and the evidence as comments and, beside it, as JSON.

    An interrupted run goes on where it was when it is called again with the same profile and options.

    \b
    Examples:
      llamaops tune qwen.yaml --noise cpu:2 --budget 10m
      llamaops tune qwen.yaml --objective itl -c 4 --max-tokens 32

    Exit codes: 0 done, whether or not something better was found · 2 usage · 69, 70, 75, 77, 78 the start profile does
    not run · 130 interrupted.
    """
    from llamaops.bench.journal import Journal
    from llamaops.bench.targets import parse_target
    from llamaops.bench.tune import Task, question
    from llamaops.bench.tune import tune as search
    from llamaops.bench.winner import as_evidence, check_place, write_winner
    from llamaops.cli.console import make_progress
    from llamaops.files import write_whole

    signal.signal(signal.SIGTERM, terminate)
    target = parse_target(str(profile), overrides)
    conditions = make_conditions(load, target.profile_slo())
    task = Task(profile, overrides, conditions, objective, read_time(budget), pairs, rt)  # type: ignore[arg-type]  # click checked the word
    out = out or profile.with_suffix(".tuned.yaml")
    evidence = out.with_suffix(".json")
    if evidence == out:
        raise UsageError("--out is the winner's profile", where=str(out), why="the evidence goes into that .json file",
                         fix="give a name that ends in .yaml")
    check_all_writable(out, evidence)
    check_place(task, out)
    tuned = search(task, Journal(_journal_path(profile), question(task), fresh=fresh), make_progress(), _say)
    document = as_evidence(tuned)
    write_whole(evidence, json.dumps(document, indent=1) + "\n", replace=True)
    if tuned.better:
        write_winner(tuned, out, evidence)
    click.echo(json.dumps(document) if as_json else tuned_text(tuned, out, evidence))
    return 0


def _say(line: str) -> None:
    click.echo(line, err=True)


def _journal_path(profile: Path) -> Path:
    import os

    from llamaops.dirs import find_dirs

    return find_dirs(os.environ).state / "tune" / f"{profile.stem}.jsonl"


def read_time(text: str) -> float:
    """Return the seconds of ``90s``, ``10m`` or ``1h``; a bare number is seconds. Raises UsageError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smh]?)", text.strip())
    if not found or float(found[1]) <= 0:
        raise UsageError("--budget can't be read", why=f"{text!r} is no time", fix="write 90s, 10m or 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def tuned_text(tuned: Tuned, out: Path, evidence: Path) -> str:
    """Return what a tuning found, as a page."""
    from llamaops.bench.tune import name_of
    from llamaops.bench.winner import confirmed_lines

    lines = [f"{heat.knob:<24}{heat.won if heat.won != 'the start profile' else 'as it was'}" for heat in tuned.heats]
    lines += [f"refused {name}: {why}"[:200] for name, why in tuned.refused.items()]
    spent = ", the budget is spent" if tuned.out_of_time else ""
    lines += ["", f"{tuned.runs} runs in {tuned.seconds:.0f} s{spent}"]
    if tuned.ratio is not None:
        r = tuned.ratio
        lines += [name_of(tuned.point),
                  f"  cost × {r.ratio:.3f} ({r.low:.3f} – {r.high:.3f}) of the start profile's, {r.pairs} pairs"]
        lines += [f"  {line}" for line in confirmed_lines(tuned)]
    lines.append(f"written: {out}" if tuned.better else "nothing is surely better: not written")
    return "\n".join([*lines, f"evidence: {evidence}"])
