"""From injected observations to the one sentence that names the cause."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamaops.core.explain import CpuUse, Gaps, Stream, Use, Window, bucket_gaps, explain

DECODING = Stream("req_a", "alice", "/v1/chat/completions", "decode", age_s=9, silent_s=0.01, events=400, ttft_s=0.2,
                  prefill_s=0.2)
PROMPT = Stream("req_b", "web", "/v1/chat/completions", "prefill", age_s=1.7, silent_s=1.7, prefill_s=1.7)
QUIET = Window(
    seconds=2, in_flight=1, slots=2, engine_cpus=0.98,
    cpus=(CpuUse(2, 0.02, 0, 0.02, housekeeping=True), CpuUse(3, 0.99, 0.98, 0.0, decode=True)),
    delay=0.01, streams=(DECODING,), gaps=Gaps(160, 0, 0.012, 0.014, 0.018, 0.02), events_per_s=80.4,
)
HOG = CpuUse(3, 1.0, 0.58, 0.0, decode=True)


def test_a_smooth_stream_and_an_idle_engine_are_said_to_be_so() -> None:
    assert [(f.code, f.text) for f in explain(QUIET)] == [
        ("smooth", "nothing holds it up: 80 tokens a second is what these CPUs give")]
    assert [f.code for f in explain(Window(seconds=2))] == ["idle"]
    assert [f.code for f in explain(replace(QUIET, streams=(PROMPT,)))] == ["prefill"]


@pytest.mark.parametrize(("changes", "code", "says"), [
    ({"cpus": (HOG,), "delay": 0.41, "others": (Use(77, "cron", 2, 0.9), Use(812, "stress-ng", 3, 0.42))},
     "shared-cpu", "CPU 3 is shared with pid 812 stress-ng, which takes 42 % of a CPU: the engine's threads wait 41 %"),
    ({"cpus": (HOG,), "delay": 0.41}, "shared-cpu", "CPU 3 is shared with other processes, which take 42 % of it"),
    ({"cpus": (HOG,), "delay": 0.41, "others": (Use(812, "cc1", 3, 0.08),)}, "shared-cpu",
     "CPU 3 is shared with many (42 % of it), most of all pid 812 cc1"),
    ({"delay": 0.3}, "own-threads", "more to run than CPUs: the engine's threads wait 30 %"),
    ({"throttled": 0.31}, "quota", "CPU quota stops the engine's threads for 31 % of the time"),
    ({"cpus": (CpuUse(3, 0.8, 0.8, 0, steal=0.2, decode=True),)}, "steal", "the hypervisor gave 20 % of a decode CPU"),
    ({"temperature_celsius": 91.0, "slowest_clock": 0.6}, "heat", "run at 60 % of their clock at 91 °C"),
    ({"thermal_throttles": 3, "slowest_clock": 0.7}, "heat", "run at 70 % of their clock"),
    ({"thermal_throttles": 3}, "heat", "were slowed for heat 3 times in 2 s"),
    ({"pressure": {"memory": 0.23}}, "memory", "memory is short: 23 % of the time"),
    ({"available_bytes": 40 << 20}, "memory", "only 40 MiB of memory are left"),
    ({"major_faults_per_s": 900.0}, "memory", "reads 900 pages a second back from disk"),
    ({"streams": (DECODING, replace(DECODING, id="req_c"), PROMPT), "prompts": (PROMPT,),
      "gaps": Gaps(30, 2, 0.012, 0.9, 1.6, 1.7)}, "prefill-stall",
     "the prompt of key 'web' stalled 2 streams for up to 1.7 s"),
    ({"prompts": (replace(PROMPT, key=None),), "streams": (replace(DECODING, silent_s=0.9),)},
     "prefill-stall", "the prompt of request req_b stalled 1 stream for up to 0.9 s"),
    ({"prompts": (PROMPT,), "gaps": Gaps(30, 0, 0.012, 0.02, 0.1, 0.1)}, "prefill-stall", "for up to 0.1 s"),
    ({"streams": (replace(DECODING, blocked_s=3.0, silent_s=3.0),)}, "slow-client",
     "the client of request req_a has taken nothing for 3.0 s"),
    ({"waiting": 3}, "queue", "3 requests wait because all 2 slots are taken"),
    ({"migrations_per_s": 120.0}, "migrations", "change CPU 120 times a second"),
    ({"engine_cpus": 0.0, "streams": (replace(DECODING, silent_s=7.0),)}, "no-work", "no token for 7 s"),
])
def test_each_cause_is_named_alone(changes: dict[str, object], code: str, says: str) -> None:
    findings = explain(replace(QUIET, **changes))  # type: ignore[arg-type]  # fields of the table
    assert [f.code for f in findings] == [code]
    assert says in findings[0].text
    assert findings[0].fix


@pytest.mark.parametrize("changes", [
    {"cpus": (HOG,), "delay": 0.02},  # others are there and take nothing from us
    {"delay": 0.3, "engine_cpus": 0.2},  # waits of threads that hardly run
    {"prompts": (PROMPT,), "streams": (DECODING, PROMPT)},  # a prompt beside a stream that keeps its SLO
    {"prompts": (DECODING,), "gaps": Gaps(9, 1, 0.1, 0.2, 0.3, 0.4)},  # its own prompt can't stall it
    {"temperature_celsius": 91.0, "slowest_clock": 0.99},
    {"streams": (replace(DECODING, blocked_s=0.4),)},
])
def test_what_costs_nothing_is_not_blamed(changes: dict[str, object]) -> None:
    assert [f.code for f in explain(replace(QUIET, **changes))] == ["smooth"]  # type: ignore[arg-type]  # as above


def test_the_costliest_comes_first() -> None:
    both = replace(QUIET, cpus=(HOG,), delay=0.2, throttled=0.5, waiting=1, slots=1)
    assert [f.code for f in explain(both)] == ["quota", "shared-cpu", "queue"]
    assert "1 request waits because the slot is taken" in [f.text for f in explain(both)]


BOUNDS = (0.01, 0.02, 0.1, 1.0)


def test_gaps_of_a_histogram() -> None:
    gaps = bucket_gaps(BOUNDS, [0, 90, 0, 10, 0], slo_s=0.1)
    assert (gaps.count, gaps.late, gaps.longest_s) == (100, 10, 1.0)
    assert gaps.p50_s == pytest.approx(0.01 + 0.01 * 50 / 90)
    assert gaps.p99_s == pytest.approx(0.1 + 0.9 * 0.9)
    assert bucket_gaps(BOUNDS, [0] * 5, 0.1) == Gaps()
    assert bucket_gaps(BOUNDS, [0, 0, 0, 0, 3], 0.1).p50_s == 1.0  # beyond the last bound


@settings(max_examples=50)
@given(st.lists(st.integers(0, 50), min_size=5, max_size=5))
@example([0, 0, 15, 42, 3])
def test_quantiles_are_ordered_and_inside(counts: list[int]) -> None:
    gaps = bucket_gaps(BOUNDS, counts, 0.1)
    found = [gaps.p50_s, gaps.p95_s, gaps.p99_s, gaps.longest_s]
    assert gaps.count == sum(counts) >= gaps.late
    if counts != [0] * 5:
        assert all(a is not None and b is not None and a <= b for a, b in pairwise(found))
