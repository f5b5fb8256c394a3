"""What a tuning leaves behind: the winner as a profile, and the evidence."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from llamaops import __version__
from llamaops.bench.compare import as_comparison
from llamaops.bench.run import environment, workload_document
from llamaops.bench.tune import Heat, Task, Tuned, name_of, overrides
from llamaops.core.profile import Profile, parse_profile
from llamaops.core.profile_edit import set_value
from llamaops.errors import UsageError, WrongProfile
from llamaops.files import write_whole
from llamaops.prepare import load_profile

SCHEMA = "llamaops-tune/1"


def check_place(task: Task, path: Path) -> None:
    """Raise UsageError where the profile would mean something else at ``path``: its relative paths lead elsewhere."""
    start = load_profile(task.profile, task.overrides)
    if not _says(task.profile.read_text(), path, start, task.overrides):
        raise UsageError("the tuned profile would not find there what this one names", where=str(path),
                         why="it names files by relative paths", fix=f"give --out a name in {task.profile.parent}, or "
                         "write absolute paths into the profile")


def write_winner(out: Tuned, path: Path, evidence: Path) -> None:
    """Write the profile with what won, the rest of it as it was tuned, and the evidence as comments at its top.

    Where the text is written in a way that can't be edited in place, the whole profile is written anew without its
    comments. Raises WrongProfile, and writes nothing, only if neither would say what won.
    """
    source = out.task.profile.read_text()
    settings = (*out.task.overrides, *overrides(out.point))
    wanted = load_profile(out.task.profile, settings)
    text = next((t for t in (_edited(source, settings), _anew(source, settings)) if _says(t, path, wanted)), None)
    if text is None:
        raise WrongProfile("the tuned profile can't be written", where=str(path),
                           fix=f"add the values yourself: {name_of(out.point)}")
    write_whole(path, _head(out, evidence) + text, replace=True)


def _says(text: str, path: Path, wanted: Profile, settings: Sequence[str] = ()) -> bool:
    """Tell whether a profile with this text at ``path`` means ``wanted``, but for the name, which follows the path."""
    try:
        return parse_profile(text, stem=path.stem, base=path.absolute().parent, environ=os.environ,
                             overrides=[*settings, f"name={wanted.name}"], where=str(path)) == wanted
    except WrongProfile:
        return False


def _edited(text: str, settings: Sequence[str]) -> str:
    for setting in settings:
        key, _, value = setting.partition("=")
        text = set_value(text, key, value, "tuned")
    return text


def _anew(source: str, settings: Sequence[str]) -> str:
    import yaml

    from llamaops.core.yaml_text import override, read_yaml

    data = read_yaml(source).data
    for setting in settings:
        override(data, setting, [])
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _head(out: Tuned, evidence: Path) -> str:
    """Return the evidence as YAML comments."""
    task = out.task
    noise = f"noise {task.conditions.noise}" if task.conditions.noise else "no noise"
    lines = [f"Tuned by llamaops {__version__} on {date.today()}, {environment()['cpu']}, {noise}.",
             f"Objective {task.objective}: {name_of(out.point)}"]
    if out.ratio:
        lines.append(f"  cost × {out.ratio.ratio:.3f} ({out.ratio.low:.3f} – {out.ratio.high:.3f}), "
                     f"{out.ratio.pairs} paired runs against {task.profile.name}")
    lines += [f"  {line}" for line in confirmed_lines(out)]
    lines.append(f"Evidence: {evidence.name}")
    return "".join(f"# {line}\n" for line in lines)


def confirmed_lines(out: Tuned) -> list[str]:
    """Return what the confirmation measured, a line a metric."""
    if out.confirmation is None:
        return []
    return [f"{row.metric.name}: {row.base:.1f} → {row.other:.1f} {row.metric.unit}"
            for row in out.confirmation.results[0].rows if row.base is not None and row.other is not None]


def as_evidence(out: Tuned) -> dict[str, Any]:
    """Return a tuning as a `llamaops-tune` document."""
    return {"schema": SCHEMA, "profile": out.task.profile.name, "objective": out.task.objective,
            "won": dict(out.point), "better": out.better, "ratio": asdict(out.ratio) if out.ratio else None,
            "races": [_race(heat) for heat in out.heats], "refused": out.refused, "runs": out.runs,
            "seconds": round(out.seconds, 1), "out_of_time": out.out_of_time,
            "workload": workload_document(out.task.conditions.workload), "slo": asdict(out.task.conditions.slo),
            "noise": str(out.task.conditions.noise), "environment": environment(),
            "confirmation": as_comparison(out.confirmation) if out.confirmation else None}


def _race(heat: Heat) -> dict[str, Any]:
    """Return a race as JSON values; a run of no use has no cost."""
    costs = {name: [c if math.isfinite(c) else None for c in row] for name, row in heat.costs.items()}
    return asdict(heat) | {"costs": costs}
