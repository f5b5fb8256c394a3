"""The tuner: one knob after the other, its values racing against the best so far, then a paired confirmation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llamaops.bench.compare import Comparison, Runs, compare_targets
from llamaops.bench.journal import Journal
from llamaops.bench.run import Conditions, Measured, bench, environment, workload_document
from llamaops.bench.targets import Target
from llamaops.core.knobs import Knob, Setting, knobs, unsafe
from llamaops.core.plan import Plan
from llamaops.core.progress import Progress
from llamaops.core.racing import (
    CLEAR,
    PATIENCE,
    ROUNDS,
    Cost,
    Objective,
    cost_of,
    far_behind,
    gain,
    settled,
    still_racing,
    winner,
)
from llamaops.core.stats import Ratio, paired_ratio
from llamaops.errors import EngineFailed, LlamaopsError, NotPermitted, WrongProfile
from llamaops.prepare import Planned, load_profile, plan_only, prepare

Point = tuple[Setting, ...]
"""Settings that differ from the start profile, sorted by key; () is the start."""
_SEARCH_SHARE = 0.8
_LOOKS = (1, 2, 4)
"""A confirmation looks after so many times the pairs asked for, and ends where more would not change what is said."""
_LOOK_LEVEL = 1 - 0.05 / len(_LOOKS)
"""Each look's interval, so that all of them together are 95 % sure (Bonferroni)."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is tuned, for what, and for how long (seconds of measuring; the first ``pairs`` to confirm always run)."""

    profile: Path
    overrides: tuple[str, ...]
    conditions: Conditions
    objective: Objective
    budget_s: float
    pairs: int
    real_time: bool = False


@dataclass(frozen=True, slots=True)
class Heat:
    """One race, as evidence: the costs of each point, round by round, and who won."""

    knob: str
    costs: dict[str, list[float]]
    texts: dict[str, str]
    won: str


@dataclass(slots=True)
class Tuned:
    """What came out. ``ratio`` is the winner's cost over the start's, in the paired confirmation (None: no winner)."""

    task: Task
    point: Point
    heats: list[Heat] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    runs: int = 0
    seconds: float = 0.0
    out_of_time: bool = False
    confirmation: Comparison | None = None
    ratio: Ratio | None = None

    @property
    def better(self) -> bool:
        """Tell whether the winner is surely better than the start profile."""
        return self.ratio is not None and self.ratio.high < 1


class _OutOfTime(Exception):
    """The budget is spent; the best so far stands."""


def tune(task: Task, journal: Journal, progress: Progress, say: Callable[[str], None] = lambda _line: None) -> Tuned:
    """Search, confirm, and return what was found; ``say`` is told each measurement in a line.

    Measurements in ``journal`` are not made again. Raises what preparing the profile raises, and EngineFailed when the
    start profile itself can't be measured.
    """
    planned = prepare(load_profile(task.profile, task.overrides), progress)
    search = _Search(task, planned, journal, progress, say)
    out = search.run()
    if out.point:
        _confirm(out, say)
    return out


def _confirm(out: Tuned, say: Callable[[str], None]) -> None:
    """Run the winner against the start in pairs: those asked for, and up to four times as many while it is undecided.

    Scatter differs by machine and hour; a fixed number of pairs is too few on the one and a waste on the other. The
    last look comes early where the budget allows no further pair.
    """
    task, began = out.task, time.monotonic()
    say(f"confirming {name_of(out.point)} against the start profile, {task.pairs} to {task.pairs * _LOOKS[-1]} pairs")

    def enough(runs: Runs) -> bool:
        pairs = len(runs[0])
        first, second = (_cost(task, row[-1]).value for row in runs)
        say(f"pair {pairs}: cost × {second / first:.3f}")
        if pairs < task.pairs:
            return False
        next_would_end = (time.monotonic() - began) * (1 + 1 / pairs)
        if next_would_end > task.budget_s - out.seconds:
            return True
        return pairs in [task.pairs * look for look in _LOOKS] and settled(cost_ratio(task, runs, _LOOK_LEVEL))

    targets = [Target("profile", str(task.profile), (*task.overrides, *overrides(p))) for p in ((), out.point)]
    out.confirmation = compare_targets(targets, task.conditions, task.pairs * _LOOKS[-1], enough=enough)
    out.ratio = cost_ratio(task, out.confirmation.runs, _LOOK_LEVEL)


def cost_ratio(task: Task, runs: Runs, level: float = 0.95) -> Ratio | None:
    """Return the second target's cost over the first's, with its interval; None where a run was of no use."""
    a, b = ([_cost(task, m).value for m in row] for row in runs)
    return paired_ratio(a, b, level=level) if all(map(math.isfinite, a + b)) else None


def _cost(task: Task, measured: Measured) -> Cost:
    return cost_of(measured.figures, task.conditions.slo, task.objective, measured.system.joules)


def overrides(point: Point) -> tuple[str, ...]:
    """Return a point as what ``--set`` takes."""
    return tuple(f"{key}={value}" for key, value in point)


def name_of(point: Point) -> str:
    """Return a point as people read it."""
    return ", ".join(overrides(point)) or "the start profile"


class _Search:
    """One pass over the knobs, and after a clear win a second: does an early choice still hold beside the later ones?

    It races only the knobs whose company has changed, and no value that was far behind the first time. Small gains
    change nothing for the others, and many of them are chance.
    """

    def __init__(self, task: Task, planned: Planned, journal: Journal, progress: Progress,
                 say: Callable[[str], None]) -> None:
        self._task, self._journal, self._progress, self._say = task, journal, progress, say
        self._base = planned.plan
        self._knobs = knobs(planned.profile, planned.plan, planned.host, planned.engine,
                            streams=task.conditions.workload.concurrency, real_time=task.real_time)
        self._plans: dict[Point, Plan | None] = {(): planned.plan}
        self._raced_beside: dict[str, Point] = {}
        self._hopeless: set[Setting] = set()
        self._won_clearly = False
        self._longest_s = 0.0
        self._out = Tuned(task, ())

    def run(self) -> Tuned:
        try:
            for number in (1, 2):
                for knob in self._knobs:
                    if self._raced_beside.get(knob.key) != _without(self._out.point, knob):
                        self._race(knob, number)
                if not self._won_clearly:
                    break
        except _OutOfTime:
            self._out.out_of_time = True
        return self._out

    def _race(self, knob: Knob, number: int) -> None:
        incumbent = self._out.point
        self._raced_beside[knob.key] = _without(incumbent, knob)
        racing = self._candidates(knob, incumbent)
        costs: dict[Point, list[float]] = {p: [] for p in racing}
        texts: dict[Point, str] = {}
        for turn in range(ROUNDS):
            if len(racing) < 2:
                break
            for point in racing if turn % 2 == 0 else reversed(racing):
                cost = self._measure(f"{number} {knob.key} {turn} {name_of(point)}", point, turn)
                costs[point].append(cost.value)
                texts[point] = cost.text
            racing = still_racing({p: costs[p] for p in racing}, costs[incumbent])
        if texts:
            self._settle(knob, costs, texts, incumbent)

    def _settle(self, knob: Knob, costs: dict[Point, list[float]], texts: dict[Point, str], incumbent: Point) -> None:
        best = winner(costs, incumbent)
        if best == () and not all(map(math.isfinite, costs[()])):
            raise EngineFailed("the start profile can't be measured", where=str(self._task.profile), why=texts[()])
        self._out.point = best
        self._won_clearly |= best != incumbent and gain(costs[best], costs[incumbent]) > CLEAR
        self._hopeless |= {setting for point in far_behind(costs) for setting in point if setting[0] == knob.key}
        self._out.heats.append(Heat(knob.key, {name_of(p): row for p, row in costs.items()},
                                    {name_of(p): text for p, text in texts.items()}, name_of(best)))

    def _candidates(self, knob: Knob, incumbent: Point) -> list[Point]:
        """Return the incumbent and every value of the knob beside it that is safe and plans to something else."""
        others = _without(incumbent, knob)
        settings = [(knob.key, value) for value in knob.values if (knob.key, value) not in self._hopeless]
        points = [tuple(sorted((*others, setting))) for setting in settings]
        out = [incumbent]
        for point in (*points, others):
            plan = self._plan(point) if point not in out else None
            if plan is not None and (knob.key == "engine.args" or not self._same(plan, [*map(self._plan, out)])):
                out.append(point)
        return out

    @staticmethod
    def _same(plan: Plan, others: Sequence[Plan | None]) -> bool:
        return any(o is not None and (o.placement, o.serving) == (plan.placement, plan.serving) for o in others)

    def _plan(self, point: Point) -> Plan | None:
        """Return what would be run, None (and the reason kept) where that would be unsafe or impossible."""
        if point not in self._plans:
            why: str | None
            try:
                profile = load_profile(self._task.profile, (*self._task.overrides, *overrides(point)))
                plan = plan_only(profile).plan
                why = unsafe(plan, self._base)
                # Calibrated before it races: a plan that changed between its runs would race against itself.
                plan = plan if why else prepare(profile, self._progress).plan
            except (WrongProfile, NotPermitted) as exc:
                plan, why = None, exc.why or exc.what
            if why:
                self._refuse(point, why)
            self._plans[point] = None if why else plan
        return self._plans[point]

    def _refuse(self, point: Point, why: str) -> None:
        self._out.refused[name_of(point)] = why
        self._say(f"refused {name_of(point)}: {why}")

    def _measure(self, key: str, point: Point, turn: int) -> Cost:
        row = self._journal.get(key)
        if row is None:
            if self._out.seconds > self._task.budget_s * _SEARCH_SHARE:
                raise _OutOfTime
            began = time.monotonic()
            row = self._run(point, turn)
            self._out.seconds += time.monotonic() - began
            self._out.runs += 1
            self._journal.put(key, row)
            self._say(f"{self._out.seconds:5.0f} s  {name_of(point)}: {row['text']}")
        if not point:
            self._longest_s = max(self._longest_s, float(row["longest_s"]))
        return Cost(float(row["cost"]), str(row["text"]))

    def _run(self, point: Point, turn: int) -> dict[str, Any]:
        """Measure a point once, as the journal keeps it; each round has requests of its own, the same for all.

        Other points than the start wait for an answer only so long: a hopeless one would eat the budget.
        """
        conditions = self._task.conditions
        workload, server = conditions.workload, conditions.server
        if point and self._longest_s:
            limit_s = PATIENCE * self._longest_s
            server = replace(server, timeout_s=min(limit_s, server.timeout_s or limit_s))
        conditions = replace(conditions, server=server, workload=replace(workload, seed=workload.seed + turn))
        target = Target("profile", str(self._task.profile), (*self._task.overrides, *overrides(point)))
        try:
            measured = bench(target, conditions)
        except LlamaopsError as exc:
            if not point:
                raise
            return {"cost": math.inf, "text": f"failed: {exc.what}", "longest_s": 0.0}
        cost = _cost(self._task, measured)
        return {"cost": cost.value, "text": cost.text, "longest_s": max(t.e2e for t in measured.timings)}


def _without(point: Point, knob: Knob) -> Point:
    return tuple(setting for setting in point if setting[0] != knob.key)


def question(task: Task) -> dict[str, Any]:
    """Return everything that measurements of a task depend on, for its journal."""
    machine = {k: v for k, v in environment().items() if k != "load_average"}
    return {"profile": task.profile.read_text(), "overrides": task.overrides, "objective": task.objective,
            "workload": workload_document(task.conditions.workload), "slo": asdict(task.conditions.slo),
            "noise": str(task.conditions.noise), "where": task.conditions.noise_where, "machine": machine}
