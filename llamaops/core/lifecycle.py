"""What happens next to the engine: a table of transitions, pure.

`step` takes what is (`Status`), what happened (an event) and the time, and returns what is now and what must be done.
One task owns the status and performs the actions; nothing else starts or ends an engine.

::

    stopped ──StartRequested──► starting ──Ready──► ready ──StopRequested──► draining ──Drained──► stopping ──► stopped
                                   ▲  │               │                                               ▲
                                   │  └──Exited──┬────┘ Exited                     Froze, Stalled ────┘
                              BackoffOver        ▼
                                   └───────── back-off ── the same failure again and again ──► failed

``failed`` before anything was served is the end; later it stays, until ``RenewRequested`` (a reload) starts anew.
A reload starts a successor beside the engine that serves (``ready`` with ``successor`` set), switches when it is ready
and retires the old one; without the memory for both it drains, stops and starts (``then`` = ``renew``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llamaops.core.causes import Cause, Exit
from llamaops.core.engine_life import (
    HISTORY,
    Abort,
    Action,
    After,
    BackoffOver,
    Drain,
    Drained,
    Event,
    Exited,
    Froze,
    Kill,
    Policy,
    Ready,
    RenewRequested,
    Retire,
    Spawn,
    Stalled,
    StartRequested,
    State,
    Status,
    StopRequested,
    Terminate,
    Transition,
    Wait,
)

_TIMER_SLACK_S = 0.01


class IllegalTransition(Exception):
    """An event that the state has no row for: a mistake of the caller. Nothing has changed."""


Outcome = tuple[Status, list[Action]]


def step(status: Status, event: Event, now: float, policy: Policy) -> Outcome:
    """Return the status after ``event`` and the actions that follow, in order.

    Raises IllegalTransition for an event that has no row in the table; an event about a generation that is gone is
    stale and changes nothing, for a watcher may report just before it is told to stop.
    """
    if (generation := getattr(event, "generation", None)) is not None and generation not in status.alive():
        return status, []
    rule = _TABLE.get((status.state, type(event)))
    if rule is None:
        raise IllegalTransition(f"{type(event).__name__} in state {status.state}")
    return rule(status, event, now, policy)


def backoff_delay(failures: int, policy: Policy) -> float:
    """Return the delay after this many failures in a row, seconds: doubling, capped."""
    return min(policy.initial_s * 2.0 ** min(failures - 1, 32), policy.max_s)


def _move(status: Status, state: State, now: float, reason: str) -> Status:
    line = Transition(now, status.state, state, reason)
    return replace(status, state=state, since=now, history=(*status.history, line)[-HISTORY:])


def _spawn(status: Status, now: float, reason: str) -> Outcome:
    generation = status.generation + 1
    moved = _move(status, State.STARTING, now, reason)
    return replace(moved, generation=generation, engine=generation, ready_at=None, then="serve"), [Spawn(generation)]


def _start(status: Status, event: StartRequested, now: float, policy: Policy) -> Outcome:
    return _spawn(replace(status, failures=0, alike=0, proven=False, cause=None), now, event.reason)


def _retry(status: Status, event: BackoffOver, now: float, policy: Policy) -> Outcome:
    if (rest := status.since + status.delay_s - now) > _TIMER_SLACK_S:  # the timer of an earlier back-off
        return status, [Wait(rest)]
    return _spawn(replace(status, restarts=status.restarts + 1), now, "the back-off is over")


def _become_ready(status: Status, event: Ready, now: float, policy: Policy) -> Outcome:
    if event.generation != status.engine:
        return status, []
    return replace(_move(status, State.READY, now, "the engine answers"), ready_at=now, proven=True, served=True), []


def _ready_again(status: Status, event: Ready, now: float, policy: Policy) -> Outcome:
    """Switch to the successor, and let the old engine finish what it has."""
    if event.generation != status.successor or status.engine is None:
        return status, []
    old = status.engine
    moved = _move(status, State.READY, now, "the new engine answers; the old one retires")
    return replace(moved, engine=event.generation, successor=None, retiring=status.retiring | {old}, ready_at=now,
                   proven=True, served=True, failures=0, alike=0), [Retire(old)]


def _without(status: Status, generation: int) -> Status:
    return replace(
        status,
        engine=None if status.engine == generation else status.engine,
        successor=None if status.successor == generation else status.successor,
        retiring=status.retiring - {generation},
    )


def _exit_while_serving(status: Status, event: Exited, now: float, policy: Policy) -> Outcome:
    """The engine died: a successor under way takes its place, else the next start waits its turn."""
    left = _without(status, event.generation)
    aborts: list[Action] = [Abort(event.generation, f"the engine ended: {event.cause.text}")]
    if event.generation != status.engine:
        return left, aborts
    if left.successor is not None:
        moved = _move(left, State.STARTING, now, f"the old engine ended: {event.cause.text}")
        return replace(moved, engine=left.successor, successor=None, ready_at=None, ended=event.ended), aborts
    after, actions = _fail(left, event, now, policy)
    return after, aborts + actions


def _fail(status: Status, event: Exited, now: float, policy: Policy) -> Outcome:
    served = status.ready_at is not None and now - status.ready_at >= policy.reset_after_s
    failures = 1 if served else status.failures + 1
    same = not served and status.cause is not None and _alike(status.cause, status.ended, event)
    alike = status.alike + 1 if same else 1
    counted = replace(status, failures=failures, alike=alike, cause=event.cause, ended=event.ended, ready_at=None)
    if _hopeless(counted, policy):
        given_up = replace(_move(counted, State.FAILED, now, event.cause.text), delay_s=0.0)
        return given_up, [Terminate(g) for g in sorted(counted.alive())]
    delay = backoff_delay(failures, policy)
    return replace(_move(counted, State.BACKOFF, now, event.cause.text), delay_s=delay), [Wait(delay)]


def _alike(cause: Cause, ended: Exit | None, event: Exited) -> bool:
    return cause.code == event.cause.code and ended == event.ended


def _hopeless(status: Status, policy: Policy) -> bool:
    """Tell whether the same start can't succeed: certain for a launch that never served, else only after many tries.

    A launch that served once and then fails for a reason that may pass is retried for ever, at the capped delay.
    """
    cause = status.cause
    if cause is None:
        return False
    if not cause.mends and not status.proven:
        return True
    return status.alike >= policy.give_up_after and not (cause.mends and status.proven)


def _stall(status: Status, event: Stalled | Froze, now: float, policy: Policy) -> Outcome:
    """End an engine that does nothing. What follows is decided when it is gone."""
    ending: list[Action] = [Abort(event.generation, event.reason), Terminate(event.generation)]
    if event.generation != status.engine:
        return status, ending
    if status.successor is not None:
        moved = _move(status, State.STARTING, now, event.reason)
        return replace(moved, engine=status.successor, successor=None, ready_at=None,
                       retiring=status.retiring | {event.generation}), ending
    return replace(_move(status, State.STOPPING, now, event.reason), then="serve"), ending


def _stall_in_drain(status: Status, event: Froze, now: float, policy: Policy) -> Outcome:
    """There is nothing to wait for any more."""
    if event.generation != status.engine:
        return status, [Abort(event.generation, event.reason), Terminate(event.generation)]
    moved = _move(status, State.STOPPING, now, event.reason)
    return moved, [Abort(None, event.reason), *(Terminate(g) for g in sorted(status.alive()))]


def _drain(status: Status, event: StopRequested, now: float, policy: Policy) -> Outcome:
    rest: list[Action] = [Terminate(status.successor)] if status.successor is not None else []
    return replace(_move(status, State.DRAINING, now, event.reason), then="stop"), [*rest, Drain()]


def _renew(status: Status, event: RenewRequested, now: float, policy: Policy) -> Outcome:
    if status.successor is not None:
        raise IllegalTransition("a new engine is being started already")
    if event.beside:
        generation = status.generation + 1
        moved = _move(status, State.READY, now, event.reason)
        return replace(moved, generation=generation, successor=generation), [Spawn(generation)]
    return replace(_move(status, State.DRAINING, now, event.reason), then="renew"), [Drain()]


def _renew_start(status: Status, event: RenewRequested, now: float, policy: Policy) -> Outcome:
    """Give up the start under way: it runs with the old settings."""
    moved = _move(status, State.STOPPING, now, event.reason)
    return replace(moved, then="renew"), [Terminate(g) for g in sorted(status.alive())]


def _renew_now(status: Status, event: RenewRequested, now: float, policy: Policy) -> Outcome:
    return _spawn(replace(status, failures=0, alike=0, proven=False, cause=None), now, event.reason)


def _stop_engines(status: Status, event: StopRequested | Drained, now: float, policy: Policy) -> Outcome:
    """End all engines; ``then`` says what for."""
    hurried = isinstance(event, StopRequested)
    then: After = "stop" if hurried else status.then
    moved = _move(status, State.STOPPING, now, event.reason if isinstance(event, StopRequested) else "drained")
    why = "llamaops is stopping" if then == "stop" else "the engine is being replaced"
    return replace(moved, then=then), [Abort(None, why), *(Terminate(g) for g in sorted(status.alive()))]


def _hurry(status: Status, event: StopRequested, now: float, policy: Policy) -> Outcome:
    """A stop during a reload's drain takes the drain over; a second stop ends it."""
    if status.then == "stop":
        return _stop_engines(status, event, now, policy)
    return replace(_move(status, State.DRAINING, now, event.reason), then="stop"), []


def _insist(status: Status, event: StopRequested, now: float, policy: Policy) -> Outcome:
    """A stop during a restart is remembered; a second stop kills."""
    if status.then == "stop":
        return status, [Kill(g) for g in sorted(status.alive())]
    return replace(_move(status, State.STOPPING, now, event.reason), then="stop"), []


def _renew_after(status: Status, event: RenewRequested, now: float, policy: Policy) -> Outcome:
    """An engine that is on its way out anyway comes back with the new settings."""
    if status.then == "stop":
        raise IllegalTransition("llamaops is stopping")
    return replace(_move(status, status.state, now, event.reason), then="renew"), []


def _give_in(status: Status, event: StopRequested, now: float, policy: Policy) -> Outcome:
    """Stop while no engine serves; one that still retires is ended first."""
    state = State.STOPPING if status.alive() else State.STOPPED
    moved = replace(_move(status, state, now, event.reason), then="stop")
    return moved, [Terminate(g) for g in sorted(status.alive())]


def _forget(status: Status, event: Exited, now: float, policy: Policy) -> Outcome:
    return _without(status, event.generation), []


def _exit_while_draining(status: Status, event: Exited, now: float, policy: Policy) -> Outcome:
    left = _without(status, event.generation)
    aborts: list[Action] = [Abort(event.generation, f"the engine ended: {event.cause.text}")]
    if left.alive():
        return left, aborts
    after, actions = _all_gone(left, event, now, policy)
    return after, aborts + actions


def _exit_while_stopping(status: Status, event: Exited, now: float, policy: Policy) -> Outcome:
    left = _without(status, event.generation)
    return (left, []) if left.alive() else _all_gone(left, event, now, policy)


def _all_gone(status: Status, event: Exited, now: float, policy: Policy) -> Outcome:
    if status.then == "stop":
        moved = _move(status, State.STOPPED, now, "the engine is gone")
        return replace(moved, ended=event.ended, cause=None, ready_at=None), []
    if status.then == "renew":
        fresh = replace(status, failures=0, alike=0, cause=None, ended=event.ended)
        return _spawn(fresh, now, "the old engine is gone")
    return _fail(status, event, now, policy)


def _ignore(status: Status, event: Event, now: float, policy: Policy) -> Outcome:
    return status, []


_Rule = Callable[[Status, Any, float, Policy], Outcome]

# Rows that say _ignore are races that do happen: a watcher's last word, a timer that fires as a signal arrives.
_TABLE: dict[tuple[State, type], _Rule] = {
    (State.STOPPED, StartRequested): _start,
    (State.STOPPED, StopRequested): _give_in,
    (State.STOPPED, Drained): _ignore,
    (State.STOPPED, BackoffOver): _ignore,
    (State.STARTING, Ready): _become_ready,
    (State.STARTING, Exited): _exit_while_serving,
    (State.STARTING, Stalled): _stall,
    (State.STARTING, Froze): _stall,
    (State.STARTING, RenewRequested): _renew_start,
    (State.STARTING, StopRequested): _stop_engines,
    (State.STARTING, Drained): _ignore,
    (State.STARTING, BackoffOver): _ignore,
    (State.READY, Ready): _ready_again,
    (State.READY, Exited): _exit_while_serving,
    (State.READY, Stalled): _stall,
    (State.READY, Froze): _stall,
    (State.READY, RenewRequested): _renew,
    (State.READY, StopRequested): _drain,
    (State.DRAINING, Ready): _ignore,
    (State.DRAINING, Exited): _exit_while_draining,
    (State.DRAINING, Stalled): _ignore,
    (State.DRAINING, Froze): _stall_in_drain,
    (State.DRAINING, RenewRequested): _renew_after,
    (State.DRAINING, StopRequested): _hurry,
    (State.DRAINING, Drained): _stop_engines,
    (State.STOPPING, Ready): _ignore,
    (State.STOPPING, Exited): _exit_while_stopping,
    (State.STOPPING, Stalled): _ignore,
    (State.STOPPING, Froze): _ignore,
    (State.STOPPING, RenewRequested): _renew_after,
    (State.STOPPING, StopRequested): _insist,
    (State.STOPPING, Drained): _ignore,
    (State.STOPPING, BackoffOver): _ignore,
    (State.BACKOFF, Exited): _forget,
    (State.BACKOFF, Froze): _stall,
    (State.BACKOFF, Ready): _ignore,
    (State.BACKOFF, StartRequested): _start,
    (State.BACKOFF, RenewRequested): _renew_now,
    (State.BACKOFF, StopRequested): _give_in,
    (State.BACKOFF, Drained): _ignore,
    (State.BACKOFF, BackoffOver): _retry,
    (State.FAILED, Exited): _forget,
    (State.FAILED, Froze): _ignore,
    (State.FAILED, StartRequested): _start,
    (State.FAILED, RenewRequested): _renew_now,
    (State.FAILED, StopRequested): _give_in,
    (State.FAILED, Drained): _ignore,
    (State.FAILED, BackoffOver): _ignore,
}
