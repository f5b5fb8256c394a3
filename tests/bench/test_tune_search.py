"""The search against simulated machines: it finds what a grid finds, in a fraction of the runs, and resumes."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from llamaops import prepare as prepare_module
from llamaops.bench import compare as compare_module
from llamaops.bench import tune as tune_module
from llamaops.bench.journal import Journal
from llamaops.bench.load import Server
from llamaops.bench.noise import Noise
from llamaops.bench.priority import Client
from llamaops.bench.run import Conditions, Measured
from llamaops.bench.sampling import SystemUse
from llamaops.bench.targets import Target
from llamaops.bench.tune import Task, Tuned, question, tune
from llamaops.bench.winner import as_evidence, check_place, write_winner
from llamaops.core.cpuset import CpuSet
from llamaops.core.engine import Engine
from llamaops.core.figures import Slo, measure
from llamaops.core.plan import plan
from llamaops.core.profile import Profile
from llamaops.core.progress import NoProgress
from llamaops.core.racing import ROUNDS
from llamaops.core.timing import Timing
from llamaops.core.topology import Cpu, Host
from llamaops.core.workload import Workload
from llamaops.errors import EngineFailed, UsageError

HOST = Host(online=CpuSet.parse("0-3"), mem_available=8 << 30, cpus=tuple(Cpu(i, CpuSet({i})) for i in range(4)))
ENGINE = Engine("/e", "b11434", frozenset({"--flash-attn"}), "libgomp")
GRID = {"placement.threads": ("auto", "2", "3"), "placement.spin": ("auto", "passive", "10000", "100000"),
        "model.kv_type": ("auto", "q8_0"), "engine.args": ("[]", "off")}
PROFILE = "# mine\nmodel: {source: 'path:m.gguf'}\nplacement: {housekeeping: none, threads_batch: 4}\n"
Settings = dict[str, str]


def settings_of(overrides: tuple[str, ...]) -> Settings:
    given = dict(text.split("=", 1) for text in overrides)
    return {key: "off" if "off" in given.get(key, "") else given.get(key, values[0]) for key, values in GRID.items()}


def landscape(seed: int) -> Callable[[Settings], float]:
    """Return a machine: the seconds a token takes for each setting; factors multiply, two knobs act on each other."""
    rng = random.Random(seed)
    factor = {(key, value): rng.uniform(0.8, 1.3) for key, values in GRID.items() for value in values}
    pairs = itertools.product(GRID["placement.threads"], GRID["placement.spin"])
    together = {pair: rng.uniform(0.93, 1.07) for pair in pairs}

    def token_s(settings: Settings) -> float:
        own = math.prod(factor[item] for item in settings.items())
        return 0.02 * own * together[settings["placement.threads"], settings["placement.spin"]]

    return token_s


class Machine:
    """Stands in for starting and measuring a profile; each run scatters by half a percent."""

    def __init__(self, token_s: Callable[[Settings], float]) -> None:
        self.token_s, self.runs, self.rng = token_s, 0, random.Random(1)
        self.limits_s: dict[str, float] = {}  # by spin, of the first run

    def __call__(self, target: Target, conditions: Conditions, on_done: object = None) -> Measured:
        self.runs += 1
        gap = self.token_s(settings_of(target.overrides)) * math.exp(self.rng.gauss(0, 0.005))
        times = tuple(0.1 + gap * i for i in range(20))
        limit_s = conditions.server.timeout_s or math.inf
        self.limits_s.setdefault(settings_of(target.overrides)["placement.spin"], limit_s)
        timing = Timing(0, 20, 0.0, 0.0, 0.0, min(limit_s, times[-1]), times, 7, 20, "length",
                        failure="timeout" if times[-1] > limit_s else None)
        figures = measure([timing], times[-1], conditions.slo)
        return Measured(target, conditions, datetime.now(UTC), figures, (timing,), 0.0, SystemUse(), Client("x"), "m")


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    def planned(profile: Profile, *_: object) -> prepare_module.Planned:
        return prepare_module.Planned(profile, HOST, None, ENGINE, plan(profile, HOST, None, ENGINE))

    monkeypatch.setattr(tune_module, "prepare", planned)
    monkeypatch.setattr(tune_module, "plan_only", planned)
    path = tmp_path / "p.yaml"
    path.write_text(PROFILE)
    conditions = Conditions(Workload(), Slo(), Noise(), "session", Server("", 0))
    return Task(path, (), conditions, "itl", 3600.0, 6)


def search(task: Task, machine: Machine, monkeypatch: pytest.MonkeyPatch, said: list[str] | None = None) -> Tuned:
    monkeypatch.setattr(tune_module, "bench", machine)
    monkeypatch.setattr(compare_module, "bench", machine)
    journal = Journal(task.profile.with_suffix(".jsonl"), question(task))
    return tune(task, journal, NoProgress(), said.append if said is not None else lambda _line: None)


@pytest.mark.parametrize("seed", range(8))
def test_as_good_as_the_grid_in_a_quarter_of_its_runs(task: Task, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    token_s = landscape(seed)
    machine = Machine(token_s)
    out = search(task, machine, monkeypatch)
    grid = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    found = token_s(settings_of(tuple(f"{k}={v}" for k, v in out.point)))
    assert found <= 1.03 * min(map(token_s, grid))
    assert out.runs <= len(grid) * ROUNDS / 4  # to tell its points apart, a grid needs as many rounds as a race
    assert out.runs + (2 * len(out.confirmation.runs[0]) if out.confirmation else 0) == machine.runs


@pytest.mark.parametrize(("factor", "passes"), [(0.9, 1), (0.5, 2)])
def test_only_a_clear_win_is_worth_a_second_pass(
    task: Task, monkeypatch: pytest.MonkeyPatch, factor: float, passes: int
) -> None:
    quick = {"model.kv_type": "q8_0"}
    machine = Machine(lambda settings: 0.02 * (factor if quick.items() <= settings.items() else 1))
    out = search(task, machine, monkeypatch)
    assert dict(out.point) == quick
    assert sum(heat.knob == "placement.threads" for heat in out.heats) == passes


@pytest.mark.parametrize(("scatter", "factor", "looks", "better"), [
    (0.002, 0.9, 1, True), (0.06, 0.93, 2, True), (0.06, 1.2, 1, False), (0.5, 0.99, 4, False),
])
def test_a_confirmation_runs_as_many_pairs_as_it_takes(
    task: Task, monkeypatch: pytest.MonkeyPatch, scatter: float, factor: float, looks: int, better: bool
) -> None:
    rng = random.Random(3)
    found = Machine(lambda settings: 0.02 * (0.5 if settings["placement.spin"] == "100000" else 1))
    meant = Machine(lambda settings: 0.02 * math.exp(rng.gauss(0, scatter))
                    * (factor if settings["placement.spin"] == "100000" else 1))
    said: list[str] = []
    monkeypatch.setattr(tune_module, "bench", found)
    monkeypatch.setattr(compare_module, "bench", meant)
    out = tune(task, Journal(task.profile.with_suffix(".jsonl"), question(task)), NoProgress(), said.append)
    assert out.ratio is not None and out.confirmation is not None
    assert (out.ratio.pairs, meant.runs, out.better) == (looks * task.pairs, 2 * looks * task.pairs, better)
    assert f"pair {out.ratio.pairs}: cost × " in said[-1]


@pytest.mark.parametrize(("budget_s", "pairs"), [(100.0, 6), (265.0, 16)])
def test_an_undecided_confirmation_uses_what_is_left_of_the_budget(
    task: Task, monkeypatch: pytest.MonkeyPatch, budget_s: float, pairs: int
) -> None:
    undecided = itertools.cycle([0.02, 0.03])  # runs come A B B A: each wins every other pair
    meant = Machine(lambda _settings: next(undecided))
    monkeypatch.setattr(compare_module, "bench", meant)
    monkeypatch.setattr(tune_module.time, "monotonic", lambda: 5.0 * meant.runs)
    out = Tuned(replace(task, budget_s=budget_s), (("placement.spin", "100000"),), seconds=100.0)
    tune_module._confirm(out, lambda _line: None)
    assert out.ratio is not None and out.ratio.pairs == pairs


def test_nothing_better_is_said_and_not_written(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    out = search(task, Machine(lambda settings: 0.02 * (1.1 if settings != settings_of(()) else 1)), monkeypatch)
    assert (out.point, out.better, out.confirmation) == ((), False, None)


def test_an_interrupted_search_goes_on_where_it_was(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    token_s, machine = landscape(3), Machine(landscape(3))

    def dies(target: Target, conditions: Conditions) -> Measured:
        if machine.runs == 9:
            raise KeyboardInterrupt
        return machine(target, conditions)

    with pytest.raises(KeyboardInterrupt):
        search(task, dies, monkeypatch)  # type: ignore[arg-type]  # it measures as a Machine does
    rest = Machine(token_s)
    out = search(task, rest, monkeypatch)
    again = search(task, Machine(token_s), monkeypatch)
    assert again.runs == 0 and again.point == out.point
    assert out.runs + 9 == len(Journal(task.profile.with_suffix(".jsonl"), question(task)))
    journal = Journal(task.profile.with_suffix(".jsonl"), question(task) | {"noise": "cpu:9"})
    assert len(journal) == 0  # another question


def test_the_budget_ends_the_search_with_the_best_so_far(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 50)
    monkeypatch.setattr(tune_module.time, "monotonic", lambda: float(next(clock)))
    token_s = landscape(1)
    out = search(Task(task.profile, (), task.conditions, "itl", 600.0, 4), Machine(token_s), monkeypatch)
    assert out.out_of_time and out.seconds <= 600
    assert token_s(settings_of(tuple(f"{k}={v}" for k, v in out.point))) <= token_s(settings_of(()))


def test_nobody_waits_for_a_hopeless_value(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = {"auto": 1.0, "passive": 100.0, "10000": 0.9, "100000": 1.0}
    machine = Machine(lambda settings: 0.02 * factor[settings["placement.spin"]])
    out = search(task, machine, monkeypatch)
    heat = next(heat for heat in out.heats if heat.knob == "placement.spin")
    assert heat.texts["placement.spin=passive"] == "failed: 1 x timeout"
    assert heat.costs["placement.spin=passive"] == [math.inf]
    assert machine.limits_s["passive"] == pytest.approx(4 * (0.1 + 19 * 0.02), rel=0.05)
    assert machine.limits_s["auto"] == math.inf
    assert dict(out.point) == {"placement.spin": "10000"}
    again = search(task, Machine(machine.token_s), monkeypatch)
    assert (again.runs, again.heats) == (0, out.heats)


def test_points_that_fail_lose_and_a_start_that_fails_is_told(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(landscape(2))

    def picky(target: Target, conditions: Conditions) -> Measured:
        if any("spin" in text for text in target.overrides):
            raise EngineFailed("it crashed")
        return machine(target, conditions)

    said: list[str] = []
    out = search(task, picky, monkeypatch, said)  # type: ignore[arg-type]  # it measures as a Machine does
    assert not any(key == "placement.spin" for key, _ in out.point)
    assert any("failed: it crashed" in line for line in said)
    json.loads(json.dumps(as_evidence(out), allow_nan=False))

    def broken(target: Target, conditions: Conditions) -> Measured:
        raise EngineFailed("no engine")

    task.profile.with_suffix(".jsonl").unlink()
    with pytest.raises(EngineFailed, match="no engine"):
        search(task, broken, monkeypatch)  # type: ignore[arg-type]  # the same


def test_the_winner_is_the_profile_with_what_won(task: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = search(task, Machine(landscape(4)), monkeypatch)
    assert out.better and out.ratio is not None and out.ratio.high < 1
    path = tmp_path / "p.tuned.yaml"
    write_winner(out, path, tmp_path / "p.tuned.json")
    text = path.read_text()
    assert "# mine\n" in text and "paired runs against p.yaml" in text and "Evidence: p.tuned.json" in text
    overrides = tuple(f"{key}={value}" for key, value in out.point)
    wanted = prepare_module.load_profile(task.profile, overrides)
    assert prepare_module.load_profile(path, ["name=p"]) == wanted


def test_what_was_set_for_the_tuning_is_part_of_the_winner(
    task: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = search(replace(task, overrides=("model.context=2048",)), Machine(landscape(4)), monkeypatch)
    assert out.better
    write_winner(out, tmp_path / "t.yaml", tmp_path / "t.json")
    wanted = prepare_module.load_profile(task.profile, (*out.task.overrides, *tune_module.overrides(out.point)))
    assert prepare_module.load_profile(tmp_path / "t.yaml", ["name=p"]) == wanted
    assert wanted.model.context == 2048


def test_a_winner_is_refused_where_the_profiles_paths_lead_elsewhere(task: Task, tmp_path: Path) -> None:
    check_place(task, tmp_path / "t.yaml")
    with pytest.raises(UsageError, match="would not find there"):
        check_place(task, tmp_path.parent / "t.yaml")
    task.profile.write_text(PROFILE.replace("m.gguf", str(tmp_path / "m.gguf")))
    check_place(task, tmp_path.parent / "t.yaml")


def test_a_profile_that_can_not_be_edited_in_place_is_written_anew(
    task: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    task.profile.write_text("{model: {source: 'path:m.gguf'}, placement: {housekeeping: none, threads_batch: 4}}\n")
    out = search(task, Machine(landscape(4)), monkeypatch)
    write_winner(out, tmp_path / "t.yaml", tmp_path / "t.json")
    overrides = tuple(f"{key}={value}" for key, value in out.point)
    wanted = prepare_module.load_profile(task.profile, overrides)
    assert prepare_module.load_profile(tmp_path / "t.yaml", ["name=p"]) == wanted
