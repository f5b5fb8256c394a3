"""Request plans follow from their seed and have the lengths and arrivals asked for."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from llamaops.core.workload import Lengths, Workload, asks, warmup_asks


@pytest.mark.parametrize(("text", "lengths"), [
    ("64", Lengths(64)), ("32-128", Lengths(80, 48, uniform=True)), ("200~150", Lengths(200, 150)),
    (" 5-5 ", Lengths(5, 0, True)),
])
def test_lengths_are_read(text: str, lengths: Lengths) -> None:
    assert Lengths.parse(text) == lengths
    assert Lengths.parse(str(lengths)) == lengths


@pytest.mark.parametrize("text", ["", "0", "-3", "9-3", "0-4", "1.5", "ten", "5~", "5-", "1-2-3"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no length"):
        Lengths.parse(text)


@pytest.mark.parametrize(("text", "mean", "deviation"), [("64", 64, 0), ("32-128", 80, 28), ("200~150", 200, 150)])
def test_lengths_have_the_mean_and_deviation_named(text: str, mean: float, deviation: float) -> None:
    rng, lengths = random.Random(1), Lengths.parse(text)
    drawn = [lengths.draw(rng) for _ in range(6000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.15, abs=0.1)
    assert min(drawn) >= 1


def test_a_request_depends_on_seed_and_index_alone() -> None:
    few, many = Workload(requests=3), Workload(requests=30, concurrency=8)
    assert list(asks(few)) == list(itertools.islice(asks(many), 3))
    assert next(asks(Workload(seed=2))).prompt != next(asks(few)).prompt


def test_prompts_differ_after_the_shared_prefix() -> None:
    first, second = itertools.islice(asks(Workload(shared_prefix=10, prompt_tokens=Lengths(16))), 2)
    assert first.prompt.split()[:10] == second.prompt.split()[:10]
    assert first.prompt.split()[10:] != second.prompt.split()[10:]
    assert len(first.prompt.split()) == 16


def test_warm_up_prompts_occur_nowhere_else() -> None:
    workload = Workload(requests=20, warmup=4)
    warm = {ask.prompt for ask in warmup_asks(workload)}
    assert len(warm) == 4
    assert not warm & {ask.prompt for ask in asks(workload)}


def test_arrivals_are_poisson_at_the_rate_and_end_with_the_duration() -> None:
    times = [ask.at_s for ask in asks(Workload(rate=50.0, requests=None, duration_s=40.0))]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times == sorted(times) and times[-1] <= 40
    assert len(times) == pytest.approx(2000, rel=0.1)
    assert statistics.pstdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.1)  # as an exponential's


def test_a_closed_loop_is_due_at_once_and_ends_with_its_count() -> None:
    assert [ask.at_s for ask in asks(Workload(requests=5))] == [0.0] * 5
