from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaops.core import engine_life as life
from llamaops.core.causes import Cause, Exit
from llamaops.core.engine_life import State, Status
from llamaops.core.lifecycle import IllegalTransition, step

POLICY = life.Policy(initial_s=1, max_s=8, reset_after_s=100, give_up_after=5)
CRASH = Cause("unknown", "the engine ended with exit code 1")
BAD_FLAG = Cause("unknown-flag", "the engine does not know the flag --nope", mends=False, exit_code=78)
START = life.StartRequested("start")
STOP = life.StopRequested("SIGTERM")
BESIDE = life.RenewRequested("reload", beside=True)
INSTEAD = life.RenewRequested("reload", beside=False)


def exited(generation: int, cause: Cause = CRASH, code: int = 1) -> life.Exited:
    return life.Exited(generation, Exit(code=code), cause)


def froze(generation: int) -> life.Froze:
    return life.Froze(generation, "froze")


FIVE_TIMES = [event for g in range(1, 6) for event in (exited(g, BAD_FLAG), life.BackoffOver())]


def play(*events: life.Event, at: float = 0.0, every: float = 0.0, status: Status | None = None) -> Status:
    """Return the status after the events, ``every`` seconds apart."""
    now, status = at, status or Status()
    for event in events:
        status, _ = step(status, event, now, POLICY)
        now += every
    return status


def last_actions(*events: life.Event) -> list[life.Action]:
    return step(play(*events[:-1]), events[-1], 0.0, POLICY)[1]


@pytest.mark.parametrize(("events", "states"), [
    ([START, life.Ready(1), STOP, life.Drained(), exited(1)], "starting ready draining stopping stopped"),
    ([STOP], "stopped"),
    ([START, STOP, exited(1)], "starting stopping stopped"),
    ([START, exited(1), STOP], "starting back-off stopped"),
    ([START, exited(1, BAD_FLAG)], "starting failed"),
    ([START, exited(1, BAD_FLAG), START], "starting failed starting"),
    ([START, life.Stalled(1, "no progress"), exited(1)], "starting stopping back-off"),
    ([START, life.Ready(1), froze(1), exited(1)], "starting ready stopping back-off"),
    ([START, life.Ready(1), froze(1), STOP, exited(1)], "starting ready stopping stopping stopped"),
    ([START, life.Ready(1), STOP, froze(1), exited(1)], "starting ready draining stopping stopped"),
    ([START, life.Ready(1), STOP, exited(1)], "starting ready draining stopped"),
    ([START, life.Ready(1), STOP, STOP, exited(1)], "starting ready draining stopping stopped"),
    ([START, life.Ready(1), BESIDE, life.Ready(2), exited(1)], "starting ready ready ready"),
    ([START, life.Ready(1), BESIDE, exited(2)], "starting ready ready"),
    ([START, life.Ready(1), BESIDE, exited(1), life.Ready(2)], "starting ready ready starting ready"),
    ([START, life.Ready(1), BESIDE, froze(1), exited(1), life.Ready(2)], "starting ready ready starting ready"),
    ([START, life.Ready(1), BESIDE, STOP, life.Drained(), exited(2), exited(1)],
     "starting ready ready draining stopping stopped"),
    ([START, life.Ready(1), INSTEAD, life.Drained(), exited(1), life.Ready(2)],
     "starting ready draining stopping starting ready"),
    ([START, life.Ready(1), INSTEAD, STOP, life.Drained(), exited(1)],
     "starting ready draining draining stopping stopped"),
    ([START, BESIDE, exited(1), life.Ready(2)], "starting stopping starting ready"),
    ([START, exited(1), BESIDE], "starting back-off starting"),
    ([START, life.Ready(1), *FIVE_TIMES, BESIDE, life.Ready(6)],
     "starting ready " + "back-off starting " * 4 + "failed starting ready"),
    ([START, life.Ready(1), *FIVE_TIMES, BESIDE, exited(6, BAD_FLAG), INSTEAD],
     "starting ready " + "back-off starting " * 4 + "failed starting failed starting"),
    ([START, life.Ready(1), *FIVE_TIMES, STOP],
     "starting ready " + "back-off starting " * 4 + "failed stopped"),
    ([START, life.Ready(1), BESIDE, life.Ready(2), exited(2), STOP, exited(1)],
     "starting ready ready ready back-off stopping stopped"),
])
def test_histories(events: list[life.Event], states: str) -> None:
    status = play(*events, every=10.0)
    assert [line.after.value for line in status.history] == states.split()


@pytest.mark.parametrize(("events", "actions"), [
    ([START], [life.Spawn(1)]),
    ([START, life.Ready(1), STOP], [life.Drain()]),
    ([START, STOP, STOP], [life.Kill(1)]),
    ([START, exited(1)], [life.Abort(1, f"the engine ended: {CRASH.text}"), life.Wait(1)]),
    ([START, life.Ready(1), BESIDE], [life.Spawn(2)]),
    ([START, life.Ready(1), BESIDE, life.Ready(2)], [life.Retire(1)]),
    ([START, life.Ready(1), BESIDE, life.Stalled(2, "slow")], [life.Abort(2, "slow"), life.Terminate(2)]),
    ([START, life.Ready(1), BESIDE, STOP], [life.Terminate(2), life.Drain()]),
])
def test_actions(events: list[life.Event], actions: list[life.Action]) -> None:
    assert last_actions(*events) == actions


@pytest.mark.parametrize(("events", "event"), [
    ([START], START),
    ([START, life.Ready(1)], START),
    ([START, life.Ready(1)], life.Drained()),
    ([START, life.Ready(1), BESIDE], BESIDE),
    ([START, life.Ready(1), STOP], BESIDE),
    ([], BESIDE),
])
def test_illegal_transitions_raise(events: list[life.Event], event: life.Event) -> None:
    with pytest.raises(IllegalTransition):
        step(play(*events), event, 0.0, POLICY)


@pytest.mark.parametrize("event", [life.Ready(7), exited(7), froze(7), life.Stalled(7, "")])
def test_news_of_an_engine_that_is_gone_changes_nothing(event: life.Event) -> None:
    status = play(START, life.Ready(1))
    assert step(status, event, 5.0, POLICY) == (status, [])


def crash_and_retry(status: Status, now: float, cause: Cause = CRASH) -> tuple[Status, float]:
    assert status.engine is not None
    status, _ = step(status, exited(status.engine, cause), now, POLICY)
    now += status.delay_s
    if status.state is State.BACKOFF:
        status, _ = step(status, life.BackoffOver(), now, POLICY)
    return status, now


def test_the_back_off_doubles_up_to_its_cap_and_goes_on_for_ever_once_served() -> None:
    status, now, delays = play(START, life.Ready(1)), 0.0, []
    for _ in range(10):
        status, now = crash_and_retry(status, now)
        delays.append(status.delay_s)
    assert delays == [1, 2, 4, 8, 8, 8, 8, 8, 8, 8]
    assert status.restarts == 10


def test_the_back_off_is_forgotten_after_enough_service() -> None:
    status, now = play(START, life.Ready(1)), 0.0
    for _ in range(3):
        status, now = crash_and_retry(status, now)
    assert status.engine is not None
    status, _ = step(status, life.Ready(status.engine), now, POLICY)
    status, _ = step(status, exited(status.engine or 0), now + 99, POLICY)
    assert status.delay_s == 8
    status, _ = step(status, life.BackoffOver(), now + 107, POLICY)
    status, _ = step(status, life.Ready(status.engine or 0), now + 107, POLICY)
    status, _ = step(status, exited(status.engine or 0), now + 207, POLICY)
    assert status.delay_s == 1


@pytest.mark.parametrize(("ready_first", "cause", "starts"), [
    (False, BAD_FLAG, 1), (True, BAD_FLAG, 5), (False, CRASH, 5),
])
def test_gives_up(ready_first: bool, cause: Cause, starts: int) -> None:
    status, now = play(START, *([life.Ready(1)] if ready_first else [])), 0.0
    while status.state is not State.FAILED:
        status, now = crash_and_retry(status, now, cause)
    assert status.generation == starts
    assert status.cause == cause


@pytest.mark.parametrize(("events", "over"), [
    ([], False),
    ([START, exited(1, BAD_FLAG)], True),
    ([START, life.Ready(1), *FIVE_TIMES], False),
    ([START, life.Ready(1), *FIVE_TIMES, BESIDE, exited(6, BAD_FLAG)], False),
    ([START, life.Ready(1), *FIVE_TIMES, STOP], True),
    ([START, life.Ready(1), STOP, life.Drained()], False),
    ([START, life.Ready(1), STOP, life.Drained(), exited(1)], True),
])
def test_what_failed_before_it_served_is_over_and_what_failed_later_stays(events: list[life.Event], over: bool) -> None:
    assert play(*events, every=10.0).is_over() is over


def test_different_failures_are_not_the_same_again() -> None:
    status, now = play(START), 0.0
    for n in range(12):
        status, now = crash_and_retry(status, now, replace(CRASH, code=f"cause-{n}"))
    assert status.state is State.STARTING


def test_the_history_is_bounded() -> None:
    status, now = play(START, life.Ready(1)), 0.0
    for _ in range(100):
        status, now = crash_and_retry(status, now)
    assert len(status.history) == life.HISTORY


# Properties: the world answers actions in any order and at any time.


@dataclass
class World:
    """Plays the edge: engines that exist, and the events that could come next."""

    status: Status = field(default_factory=Status)
    now: float = 0.0
    engines: set[int] = field(default_factory=set)
    spawned_at: dict[int, float] = field(default_factory=dict)
    told_to_end: set[int] = field(default_factory=set)
    stops: int = 0
    failed_at: float | None = None
    asked: bool = False

    def send(self, event: life.Event) -> None:
        if isinstance(event, life.Exited):
            self.engines.discard(event.generation)
        before = self.status
        try:
            self.status, actions = step(before, event, self.now, POLICY)
        except IllegalTransition:
            assert self.status == before
            return
        self.asked = isinstance(event, life.StartRequested | life.RenewRequested) or before.then == "renew"
        if self.status.state is State.BACKOFF and before.state is not State.BACKOFF:
            self.failed_at = self.now
        for action in actions:
            self.act(action)

    def act(self, action: life.Action) -> None:
        match action:
            case life.Spawn(generation):
                assert not self.stops, "a lost stop"
                assert generation not in self.spawned_at
                self.spawned_at[generation] = self.now
                waited = self.failed_at is None or self.now - self.failed_at >= self.status.delay_s - 0.02
                assert waited or self.asked, "restarted before the back-off was over"
                serving = {g for g in self.engines if g not in self.status.retiring}
                beside = self.status.successor == generation
                assert len(serving) <= (1 if beside else 0), "two engines outside a reload"
                self.engines.add(generation)
                self.failed_at = None
            case life.Terminate(generation) | life.Kill(generation) | life.Retire(generation):
                self.told_to_end.add(generation)


def possible(generation: int) -> list[life.Event]:
    return [life.Ready(generation), exited(generation), exited(generation, BAD_FLAG), froze(generation),
            life.Stalled(generation, "no progress")]


WISHES: list[life.Event] = [START, BESIDE, INSTEAD]
STEPS = st.lists(st.tuples(st.integers(0, 39), st.sampled_from([0.0, 0.5, 1.0, 4.0, 120.0])), min_size=5, max_size=30)


def choose(world: World, number: int) -> life.Event:
    """Pick what happens next: mostly something that the engines there are can do; STOP only now and then."""
    engines = [e for g in sorted(world.engines) for e in possible(g)]
    wishes = [] if world.stops else WISHES
    events = [*engines, *engines, life.BackoffOver(), life.BackoffOver(), life.Drained(), *wishes]
    return STOP if number == 0 else events[number % len(events)]


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_no_sequence_of_events_breaks_the_promises(steps: list[tuple[int, float]]) -> None:
    world = World()
    world.send(START)
    for number, pause in steps:
        world.now += pause
        event = choose(world, number)
        world.stops += event is STOP
        world.send(event)
        assert world.engines == set(world.status.alive())
    # Whatever came before: a stop is carried out, and nothing is left that nobody was told to end.
    world.stops += 1
    world.send(STOP)
    world.send(life.Drained())
    assert world.engines <= world.told_to_end
    for generation in sorted(world.engines):
        world.send(exited(generation))
    assert world.status.state is State.STOPPED
    assert not world.engines
