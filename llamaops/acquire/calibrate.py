"""How fast this engine reads and writes with this model on these CPUs: measured once by llama-bench, then remembered.

Only a quiet machine is measured: rates taken beside other work would be too low for ever after.
"""

from __future__ import annotations

import hashlib
import json
import resource
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from llamaops.cache import locked, read_json, write_json
from llamaops.child import run
from llamaops.core.cpuset import CpuSet
from llamaops.core.cputimes import parse_cpu_times
from llamaops.core.engine import Engine
from llamaops.core.model import Model
from llamaops.core.plan import Placement
from llamaops.core.progress import Progress
from llamaops.core.serving import MEASURED_UBATCH, MIN_UBATCH, Calibration
from llamaops.engine_binary import BUILD_HINT, ILLEGAL_WHY
from llamaops.errors import EngineUnavailable

PROMPT_TOKENS = 128
GENERATED_TOKENS = 16
SMALL_PROMPT_TOKENS = 32
"""A prompt of a few of the least batches."""
REPEATS = 3
LOOK_S = 0.1
BUSY_SHARE = 0.15
"""Share of the planned CPUs used by others from which on a measurement says more about them than about the engine."""


def find_calibration(engine: Engine, model: Model, placement: Placement, cache: Path) -> Calibration | None:
    """Return what was measured for exactly this engine, model and placement, None where nothing was."""
    kept = read_json(_file(engine, model, placement, cache))
    with suppress(KeyError, TypeError, ValueError):
        return Calibration(*(float(kept[name]) for name in ("prefill_tok_s", "decode_tok_s", "small_tok_s")))
    return None


def calibrate(engine: Engine, model: Model, placement: Placement, wrappers: Sequence[str], env: Mapping[str, str],
              cache: Path, progress: Progress, cancel: threading.Event | None = None) -> Calibration | None:
    """Return the rates of prefill and decode, measured the first time under the planned wrappers and environment.

    Takes a few seconds once. None, and nothing is remembered, where other work keeps the CPUs busy, there is no
    llama-bench beside the engine, or it fails. Raises EngineUnavailable where it meets an illegal instruction.
    """
    if (kept := find_calibration(engine, model, placement, cache)) is not None:
        return kept
    tool = Path(engine.path).with_name("llama-bench")
    if not tool.is_file():
        return None
    file = _file(engine, model, placement, cache)
    with locked(file.with_suffix(".lock"), lambda: progress.say("another llamaops measures; waiting"), cancel):
        if (kept := find_calibration(engine, model, placement, cache)) is not None:
            return kept
        found = _measure_quiet(tool, model, placement, wrappers, env, progress, cancel)
        if found is not None:
            write_json(file, asdict(found) | {"engine": engine.version, "model": model.path,
                                              "threads": placement.threads})
        return found


def _measure_quiet(tool: Path, model: Model, placement: Placement, wrappers: Sequence[str], env: Mapping[str, str],
                   progress: Progress, cancel: threading.Event | None) -> Calibration | None:
    """Measure unless others use the CPUs, before or meanwhile."""
    before = _Usage.now(placement.cpus)
    time.sleep(LOOK_S)  # a look at the load needs a span of time to look at
    begun = _Usage.now(placement.cpus)
    if begun.foreign_since(before) > BUSY_SHARE:
        progress.say("other work keeps the CPUs busy: rates are estimated now and measured at a later start")
        return None
    with progress.bar("measure prefill and decode", "steps"):
        found = _measure(tool, model, placement, wrappers, env, cancel)
    if _Usage.now(placement.cpus).foreign_since(begun) > BUSY_SHARE:
        progress.say("other work disturbed the measurement: rates are estimated now and measured at a later start")
        return None
    return found


@dataclass(frozen=True, slots=True)
class _Usage:
    """CPU seconds used so far on some CPUs, by everybody and by our finished children, and the time it was read."""

    busy_s: float
    own_s: float
    cpus: int
    at: float

    @classmethod
    def now(cls, cpus: CpuSet | None) -> _Usage:
        times = [used.taken_s for cpu, used in parse_cpu_times(_stat()).items() if cpus is None or cpu in cpus]
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(sum(times), own.ru_utime + own.ru_stime, len(times), time.monotonic())

    def foreign_since(self, before: _Usage) -> float:
        """Return the share of these CPUs that others used since ``before``; 0 where /proc/stat is missing."""
        foreign = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return max(0.0, foreign) / (self.cpus * (self.at - before.at)) if self.cpus else 0.0


def _stat() -> str:
    try:
        return Path("/proc/stat").read_text()
    except OSError:
        return ""


def _measure(tool: Path, model: Model, placement: Placement, wrappers: Sequence[str], env: Mapping[str, str],
             cancel: threading.Event | None) -> Calibration | None:
    def best(threads: int, ubatch: int, *what: str) -> float | None:
        lines: list[str] = []
        argv = [*wrappers, str(tool), "-m", model.path, "-t", str(threads), "-b", str(ubatch), "-ub", str(ubatch),
                "-r", str(REPEATS), "-o", "jsonl", *what]
        done = run(argv, env=env, on_line=lines.append, cancel=cancel)
        if done.code == -signal.SIGILL:  # the code that would serve: better told now than as a crash loop
            raise EngineUnavailable("this engine can't run on this CPU", where=str(tool), why=ILLEGAL_WHY,
                                    fix=BUILD_HINT)
        return _best_rate(lines)

    prefill = best(placement.threads_batch, MEASURED_UBATCH, "-p", str(PROMPT_TOKENS), "-n", "0")
    small = best(placement.threads_batch, MIN_UBATCH, "-p", str(SMALL_PROMPT_TOKENS), "-n", "0")
    decode = best(placement.threads, MEASURED_UBATCH, "-p", "0", "-n", str(GENERATED_TOKENS))
    return Calibration(prefill, decode, small) if prefill and decode and small else None


def _best_rate(lines: Sequence[str]) -> float | None:
    """Return the fastest sample, tokens a second, of llama-bench's one JSON line among what it logs."""
    for line in lines:
        if line.startswith("{"):
            with suppress(ValueError, KeyError, TypeError):
                return float(max(json.loads(line)["samples_ts"]))
    return None


def _file(engine: Engine, model: Model, placement: Placement, cache: Path) -> Path:
    """Name the result by all that it depends on; a file that was replaced has another size or time."""
    facts = [_identity(engine.path), _identity(model.path), placement.threads, placement.threads_batch,
             str(placement.cpus), placement.spin, placement.numa, PROMPT_TOKENS, SMALL_PROMPT_TOKENS, GENERATED_TOKENS,
             MEASURED_UBATCH, MIN_UBATCH]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache / "calibration" / f"{digest}.json"


def _identity(path: str) -> list[str | int]:
    info = Path(path).stat()
    return [path, info.st_size, info.st_mtime_ns]
