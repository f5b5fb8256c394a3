"""Racing, knobs and the editing of profiles."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import PurePath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaops.core.cpuset import CpuSet
from llamaops.core.engine import Engine
from llamaops.core.figures import Figures, Slo, measure
from llamaops.core.knobs import knobs, unsafe
from llamaops.core.plan import plan
from llamaops.core.profile import Profile, parse_profile
from llamaops.core.profile_edit import set_value
from llamaops.core.racing import cost_of, still_racing, winner
from llamaops.core.timing import Timing
from llamaops.core.topology import Cpu, Host, Rights

HOST = Host(online=CpuSet.parse("0-3"), mem_available=8 << 30, cpus=tuple(Cpu(i, CpuSet({i})) for i in range(4)))
ENGINE = Engine("/e", "b11434", frozenset({"--flash-attn"}), "libgomp")


def profile(text: str = "") -> Profile:
    return parse_profile(f"model: {{source: 'path:m.gguf'}}\n{text}", stem="p", base=PurePath("/p"), environ={})


def found(text: str = "", host: Host = HOST, *, streams: int = 1,
          real_time: bool = False) -> dict[str, tuple[str, ...]]:
    asked = profile(text)
    got = knobs(asked, plan(asked, host, None, ENGINE), host, ENGINE, streams=streams, real_time=real_time)
    return {knob.key: knob.values for knob in got}


def test_what_the_profile_sets_is_no_knob() -> None:
    assert {"placement.threads", "placement.spin", "model.kv_type", "engine.args"} <= found().keys()
    kept = found("placement: {threads: 2, spin: 500, threads_batch: 1}\nengine: {args: ['-fa', 'on']}")
    assert not {"placement.threads", "placement.spin", "placement.threads_batch", "engine.args"} & kept.keys()


@pytest.mark.parametrize(("cpus", "threads"), [("0", ()), ("0-1", ("1",)), ("0-3", ("2", "3")), ("0-7", ("4", "7"))])
def test_never_more_threads_than_cpus(cpus: str, threads: tuple[str, ...]) -> None:
    ids = CpuSet.parse(cpus)
    host = replace(HOST, online=ids, cpus=tuple(Cpu(i, CpuSet({i})) for i in ids))
    assert found("placement: {housekeeping: none}", host).get("placement.threads", ()) == threads


def test_knobs_are_those_of_the_machine() -> None:
    assert not {"placement.smt", "placement.cores", "placement.policy", "serve.slots"} & found().keys()
    siblings = tuple(Cpu(i, CpuSet({i, i ^ 1})) for i in range(4))
    assert found(host=replace(HOST, cpus=siblings))["placement.smt"] == ("use",)
    hybrid = tuple(Cpu(i, CpuSet({i}), performance=i < 2) for i in range(4))
    assert found(host=replace(HOST, cpus=hybrid))["placement.cores"] == ("all",)
    assert found(streams=6)["serve.slots"] == ("6",)
    assert found(real_time=True)["placement.policy"] == ("rr", "fifo")
    may = replace(HOST, rights=Rights(lowest_nice=-20), tools={"nice": "/usr/bin/nice"})
    assert "placement.nice" not in found() and found(host=may).get("placement.nice", ("-20",)) == ("-20",)


def test_unbounded_spin_and_lossy_caches_are_never_tried() -> None:
    every = found(streams=4, real_time=True)
    assert "active" not in every["placement.spin"] and every["model.kv_type"] == ("q8_0",)


def test_unsafe_points_are_refused() -> None:
    base = plan(profile(), HOST, None, ENGINE)
    assert unsafe(base, base) is None
    over = replace(base, placement=replace(base.placement, threads=9))
    assert "more threads" in str(unsafe(over, base))
    refused = plan(profile("placement: {policy: rr}"), HOST, None, ENGINE)
    assert "rt-refused" in str(unsafe(refused, base))


def figures(ttft_s: float, gap_s: float, *, failure: str | None = None) -> Figures:
    times = tuple(ttft_s + gap_s * i for i in range(20))
    return measure([Timing(0, 20, 0.0, 0.0, 0.0, times[-1], times, 7, 20, "length", {}, failure)], times[-1], Slo())


def test_limits_come_first_and_speed_after_that() -> None:
    slo = Slo(ttft_ms=500, itl_ms=50)
    runs = (figures(0.4, 0.04), figures(0.4, 0.02), figures(0.6, 0.02))
    quick, quicker, late = (cost_of(run, slo, "slo").value for run in runs)
    assert quicker < quick < late
    assert cost_of(figures(0.1, 0.02, failure="timeout"), slo, "itl").value == math.inf
    assert cost_of(figures(0.1, 0.02), slo, "itl").value == pytest.approx(20)
    assert cost_of(figures(0.1, 0.02), slo, "energy", joules=40.0).value == pytest.approx(2)
    assert cost_of(figures(0.1, 0.02), slo, "energy").value == math.inf


@pytest.mark.parametrize(("costs", "alive"), [
    ({"a": [1.0], "b": [9.0]}, "ab"),
    ({"a": [1.0, 1.0], "b": [1.3, 1.2]}, "a"),
    ({"a": [1.0, 1.0], "b": [1.3, 0.9]}, "ab"),
    ({"a": [1.0, 1.0], "b": [1.001, 1.001]}, "a"),  # two of four rounds lost: most can't be won any more
    ({"a": [1.0, 1.0], "b": [0.9, 0.9], "c": [0.95, 0.95]}, "abc"),
    ({"a": [1.0], "b": [0.9, 0.9, 0.9], "c": [0.8, 0.95, 0.9]}, "bc"),
    ({"a": [1.0, 1.0, 1.0], "b": [1.05, 1.06, 1.05]}, "a"),
    ({"a": [1.0, 1.0, 1.0], "b": [1.2, 0.9, 0.9]}, "ab"),
    ({"a": [1.0, 1.0, 1.0], "b": [1.2, 0.9, 1.1]}, "a"),
    ({"a": [1.0, 1.0], "b": [0.5, math.inf]}, "a"),
    ({"a": [math.inf], "b": [math.inf]}, ""),
])
def test_who_still_races(costs: dict[str, list[float]], alive: str) -> None:
    racing = {name: row for name, row in costs.items() if len(row) == max(map(len, costs.values()))}
    assert "".join(still_racing(racing, costs["a"])) == alive


@pytest.mark.parametrize(("costs", "won"), [
    ({"start": [1.0, 1.0, 1.0], "b": [0.9, 0.9, 0.9]}, "b"),
    ({"start": [1.0, 1.0, 1.0], "b": [0.995, 0.995, 0.995]}, "start"),
    ({"start": [1.0, 1.0], "b": [0.8, 0.8, 0.8]}, "b"),
    ({"start": [1.0, 1.0, 1.0], "b": [0.5, 1.1, 1.1]}, "start"),
    ({"start": [math.inf], "b": [5.0, 5.0]}, "b"),
    ({"start": [1.0, 1.0], "b": [math.inf]}, "start"),
])
def test_who_wins(costs: dict[str, list[float]], won: str) -> None:
    assert winner(costs, "start") == won


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.5, 2), min_size=2, max_size=5), st.integers(0, 99))
def test_a_race_ends_within_a_few_percent_of_the_best(true: list[float], seed: int) -> None:
    rng = random.Random(seed)
    costs: dict[int, list[float]] = {i: [] for i in range(len(true))}
    racing = list(costs)
    for _ in range(4):
        for i in racing:
            costs[i].append(true[i] * math.exp(rng.gauss(0, 0.005)))
        racing = still_racing({i: costs[i] for i in racing}, costs[0])
    assert true[winner(costs, 0)] <= 1.03 * min(true)


TEXTS = [
    "model: {source: 'path:m.gguf'}  # keep\n",
    "model:\n  source: path:m.gguf\nplacement:\n  # why\n  threads: auto   # old\n  spin: auto\nslo: {ttft_ms: 700}\n",
    "placement: {threads: auto, spin: auto}\nmodel: {source: 'path:m.gguf', kv_type: auto}\n",
    "placement: {}\nmodel:\n    source: path:m.gguf\n\nengine:\n    args: []\n",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("key", "value"), [
    ("placement.threads", "2"), ("placement.spin", "passive"), ("model.kv_type", "q8_0"), ("serve.slots", "3"),
    ("engine.args", '["--flash-attn", "off"]'),
])
def test_a_value_is_set_and_the_rest_stays(text: str, key: str, value: str) -> None:
    def read(source: str, *overrides: str) -> Profile:
        return parse_profile(source, stem="p", base=PurePath("/p"), environ={}, overrides=overrides)

    edited = set_value(text, key, value, "tuned")
    assert read(edited) == read(text, f"{key}={value}")
    assert all(word in edited for word in ("# keep", "# why", "ttft_ms: 700") if word in text)
    assert read(set_value(edited, key, value)) == read(edited)
