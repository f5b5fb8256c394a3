"""Rates are measured once, under the plan's wrappers, and only on a quiet machine."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from llamaops.acquire import calibrate
from llamaops.core.engine import Engine
from llamaops.core.model import Model
from llamaops.core.plan import Placement
from llamaops.core.progress import NoProgress
from llamaops.core.serving import Calibration
from llamaops.errors import EngineUnavailable

BENCH = """#!/bin/sh
echo "$@" >> {log}
echo "a line for people"
case "$*" in
  *"-ub 8 "*) echo '{{"n_prompt": 32, "samples_ts": [90.0, 100.0]}}' ;;
  *"-n 0"*) echo '{{"n_prompt": 128, "samples_ts": [200.0, 250.5, 240.0]}}' ;;
  *) echo '{{"n_gen": 16, "samples_ts": [40.0, 50.0]}}' ;;
esac
"""
PLACEMENT = Placement(threads=2, threads_batch=3, cpus=None, batch_cpus=None, housekeeping_cpus=None, policy="other",
                      rt_priority=None, nice=None, autogroup_nice=None, weight=None, relay_nice=None, spin=1000,
                      numa=None, mem_nodes=None)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    for name, text in (("llama-server", "engine"), ("llama-bench", BENCH.format(log=tmp_path / "calls"))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return Engine(str(tmp_path / "llama-server"), "b1", frozenset(), "libgomp")


@pytest.fixture
def model(tmp_path: Path) -> Model:
    (tmp_path / "m.gguf").write_text("model")
    return Model(str(tmp_path / "m.gguf"), 5, "llama")


def measure(engine: Engine, model: Model, cache: Path) -> Calibration | None:
    return calibrate.calibrate(engine, model, PLACEMENT, ["env", "WRAPPED=1"], {"PATH": "/usr/bin:/bin"}, cache,
                               NoProgress())


def quiet() -> str:
    return ""


def test_best_sample_of_each_is_remembered(engine: Engine, model: Model, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_stat", quiet)
    assert calibrate.find_calibration(engine, model, PLACEMENT, tmp_path) is None
    assert measure(engine, model, tmp_path) == Calibration(250.5, 50.0, 100.0)
    assert measure(engine, model, tmp_path) == Calibration(250.5, 50.0, 100.0)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3
    assert "-t 3" in calls[0] and "-ub 64" in calls[0]
    assert "-t 3" in calls[1] and "-ub 8 -r" in calls[1]
    assert "-t 2" in calls[2]
    assert calibrate.find_calibration(engine, model, PLACEMENT, tmp_path) == Calibration(250.5, 50.0, 100.0)


def test_another_model_is_measured_anew(engine: Engine, model: Model, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_stat", quiet)
    measure(engine, model, tmp_path)
    Path(model.path).write_text("another model")
    assert calibrate.find_calibration(engine, model, PLACEMENT, tmp_path) is None


def test_a_busy_machine_is_not_measured(engine: Engine, model: Model, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(step=1000)  # ten seconds of work between any two looks
    monkeypatch.setattr(calibrate, "_stat", lambda: f"cpu0 {next(ticks)} 0 0 0 0 0 0 0 0 0")
    assert measure(engine, model, tmp_path) is None
    assert not (tmp_path / "calls").exists()


def test_no_bench_no_rates(engine: Engine, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_stat", quiet)
    Path(engine.path).with_name("llama-bench").write_text("#!/bin/sh\nexit 1\n")
    assert measure(engine, model, tmp_path) is None
    Path(engine.path).with_name("llama-bench").unlink()
    assert measure(engine, model, tmp_path) is None


def test_an_engine_for_another_cpu_is_named_before_it_serves(
    engine: Engine, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "_stat", quiet)
    Path(engine.path).with_name("llama-bench").write_text("#!/bin/sh\nkill -ILL $$\n")
    with pytest.raises(EngineUnavailable, match="can't run on this CPU"):
        measure(engine, model, tmp_path)
