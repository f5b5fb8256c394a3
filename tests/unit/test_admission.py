"""The queue's turns, limits and estimate, on a clock of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaops.serve.admission import Admission, Place, QueueFull


def inside(body: Callable[[], None]) -> None:
    """Run ``body`` where a loop runs."""

    async def main() -> None:
        body()

    asyncio.run(main())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def admitted(places: dict[str, Place]) -> set[str]:
    return {name for name, place in places.items() if place.admitted.done()}


def test_slots_are_given_at_once_and_then_on_leaving() -> None:
    def body() -> None:
        admission = Admission(2, 8, 8)
        places = {name: admission.enter("k", "c") for name in "abcd"}
        assert admitted(places) == {"a", "b"}
        assert (admission.running, admission.waiting) == (2, 2)
        admission.leave(places["a"])
        assert admitted(places) == {"a", "b", "c"}
        admission.leave(places["a"])  # twice is harmless
        assert (admission.running, admission.waiting) == (2, 1)

    inside(body)


def test_turns_go_round_keys_then_clients() -> None:
    def body() -> None:
        admission = Admission(1, 64, 64)
        running = admission.enter("x", "x")
        order = []
        for key, client in [("a", "1"), ("a", "1"), ("a", "1"), ("a", "2"), ("b", "1"), ("b", "1"), ("c", "9")]:
            admission.enter(key, client)
        queue = admission.snapshot()["queue"]
        assert isinstance(queue, list)
        expected = ["a1", "b1", "c9", "a2", "b1", "a1", "a1"]
        assert [turn["key"] + turn["client"] for turn in queue] == expected
        while admission.waiting:
            admission.leave(running)
            (running,) = admission._running
            order.append(running.key + running.client)
        assert order == expected

    inside(body)


def test_limits() -> None:
    def body() -> None:
        admission = Admission(1, 3, 2)
        admission.enter("a", "1")
        admission.enter("a", "1")
        admission.enter("a", "2")
        with pytest.raises(QueueFull) as key:
            admission.enter("a", "3")
        assert (key.value.scope, key.value.limit) == ("key", 2)
        admission.enter("b", "1")
        with pytest.raises(QueueFull) as whole:
            admission.enter("c", "1")
        assert (whole.value.scope, whole.value.limit) == ("queue", 3)

    inside(body)


def test_no_depth_means_no_waiting() -> None:
    def body() -> None:
        admission = Admission(1, 0, 8)
        admission.enter("a", "1")
        with pytest.raises(QueueFull):
            admission.enter("a", "1")

    inside(body)


def test_the_estimate_follows_how_long_slots_are_held() -> None:
    def body() -> None:
        clock = Clock()
        admission = Admission(2, 64, 64, clock)
        for _ in range(30):
            place = admission.enter("a", "1")
            clock.now += 12
            admission.leave(place)
        assert admission.retry_after_s() == 6  # one ahead, two slots, 12 s each
        for _ in range(5):
            admission.enter("a", "1")
        assert admission.retry_after_s() == 24

    inside(body)


def test_more_slots_after_a_reload_admit_who_waits() -> None:
    def body() -> None:
        admission = Admission(1, 8, 8)
        places = {name: admission.enter("k", "c") for name in "abc"}
        admission.configure(3, 8, 8)
        assert admitted(places) == {"a", "b", "c"}

    inside(body)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("12"), st.booleans()), max_size=25), st.integers(1, 3))
def test_no_slot_is_lost_and_none_is_given_twice(steps: list[tuple[str, str, bool]], slots: int) -> None:
    def body() -> None:
        admission = Admission(slots, 1000, 1000)
        held: list[Place] = []
        for key, client, leaves in steps:
            if leaves and held:
                admission.leave(held.pop(len(held) // 2))
            else:
                held.append(admission.enter(key, client))
            running = sum(place.admitted.done() for place in held)
            assert running == admission.running == min(slots, len(held))
            assert admission.waiting == len(held) - running
        for place in held:
            admission.leave(place)
        assert (admission.running, admission.waiting, admission._lines) == (0, 0, {})

    inside(body)


def test_clients_without_keys_share_no_limit_but_the_depth() -> None:
    async def main() -> None:
        admission = Admission(slots=1, depth=5, per_key=2)
        for client in ("a", "a", "a", "b", "b", "b"):
            admission.enter("", client)
        assert (admission.running, admission.waiting) == (1, 5)
        with pytest.raises(QueueFull) as full:
            admission.enter("", "c")
        assert full.value.scope == "queue"

    asyncio.run(main())
