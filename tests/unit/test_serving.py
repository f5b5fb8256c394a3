"""Slots and batch follow from the latency budget and the rates that were measured; notes tell what can be promised."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaops.core.cpuset import CpuSet
from llamaops.core.model import Model
from llamaops.core.plan import Plan, plan
from llamaops.core.profile import parse_profile
from llamaops.core.serving import Calibration, with_context
from llamaops.core.topology import Host

HOST = Host(online=CpuSet({0, 1}), mem_available=24 << 30)


def planned(text: str, rates: Calibration | None) -> Plan:
    profile = parse_profile(f"model: {{source: 'path:/m/q.gguf'}}\n{text}\n", stem="x", base=Path("/"), environ={})
    return plan(profile, HOST, None, None, rates)


@pytest.mark.parametrize(("rates", "ttft_ms", "slots"), [
    (None, 800, 4),
    (Calibration(250, 50), 800, 4),
    (Calibration(100, 20), 1500, 3),  # batches of 8 in 130 ms: 11 of them, with 5, 6 or 7 tokens of the prompt
    (Calibration(100, 20), 1310, 2),
    (Calibration(100, 20), 800, 4),   # not even two keep it: fewer would only make the next one wait
    (Calibration(100, 20), 9000, 4),
])
def test_slots_are_as_many_as_keep_the_first_token_in_time(rates, ttft_ms, slots):
    assert planned(f"slo: {{ttft_ms: {ttft_ms}}}", rates).serving.slots == slots


def test_slots_of_the_profile_stay():
    assert planned("slo: {ttft_ms: 1500}\nserve: {slots: 4}", Calibration(100, 20)).serving.slots == 4


@pytest.mark.parametrize(("text", "rates", "code", "words"), [
    ("", Calibration(250, 50), "latency-promise", ("up to 99 tokens", "3 others run", "about every 68 ms")),
    ("serve: {slots: 2}", Calibration(250, 50), "latency-promise", ("another stream runs",)),
    ("serve: {slots: 1}", Calibration(250, 50), "latency-promise", ("up to 195 tokens", "nothing else runs")),
    ("", Calibration(100, 20), "ttft-budget-unmet", ("only 30 tokens",)),
    ("serve: {slots: 8}", Calibration(100, 20), "ttft-budget-unmet", ("7 others run, only 6 tokens",)),
    ("serve: {slots: 32}", Calibration(100, 20), "ttft-budget-unmet", ("only 0 tokens",)),
])
def test_notes_say_what_the_machine_can_promise(text, rates, code, words):
    notes = {note.code: note.text for note in planned(text, rates).notes}
    assert all(word in notes[code] for word in words), notes[code]
    assert ("latency-promise" in notes) != ("ttft-budget-unmet" in notes)


@pytest.mark.parametrize(("rates", "unmet"), [
    (Calibration(250, 50), False), (Calibration(130, 40), True), (Calibration(50, 5), True),
    (Calibration(174, 43), False), (Calibration(174, 43, 83), True),  # few rows at once are slow: Qwen2.5-0.5B Q4_K_M
])
def test_a_budget_that_the_slowest_gaps_miss_is_told(rates, unmet):
    assert ("itl-budget-unmet" in {note.code for note in planned("", rates).notes}) == unmet


def test_nothing_is_promised_unmeasured():
    assert not {"latency-promise", "ttft-budget-unmet"} & {note.code for note in planned("", None).notes}


def test_batches_cost_what_was_measured_of_small_and_large_ones():
    any_batch, each = Calibration(162, 37.5, 83).batch_costs()
    assert any_batch + 8 * each == pytest.approx(8 / 83)
    assert any_batch + 64 * each == pytest.approx(64 / 162)
    assert any_batch + 16 * each == pytest.approx(16 / 124, rel=0.1)  # llama-bench -ub 16
    assert Calibration(60, 40, 900).batch_costs()[1] > 0  # nonsense, measured on a machine that was disturbed
    assert planned("", Calibration(100, 40, 900)).serving.ubatch >= 8


def test_attention_slows_what_was_measured_without_context():
    small = Model("/m", 90 << 20, "llama", parameters=135_000_000, layers=30, heads=9, head_dim_k=64)
    slow = with_context(Calibration(274, 118), small, 4096)
    assert slow.prefill_tok_s == pytest.approx(181, rel=0.05)  # llama-bench -d 512
    assert with_context(Calibration(274, 118), small, 64).prefill_tok_s > 255
    assert with_context(Calibration(274, 118), None, 4096) == Calibration(274, 118)
