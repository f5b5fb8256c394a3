"""The words of an engine's life: states, what happens (events), what to do (actions), and what is known (status).

`llamaops.core.lifecycle.step` puts them together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from llamaops.core.causes import Cause, Exit

HISTORY = 50
"""How many transitions are remembered."""


class State(StrEnum):
    """Where the served engine is in its life."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "back-off"
    FAILED = "failed"


# Events: what happened.


@dataclass(frozen=True, slots=True)
class StartRequested:
    """Somebody wants the engine to serve; earlier failures are forgotten."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Our own child of this generation answers requests."""

    generation: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The engine of this generation and everything it started are gone. ``ended`` None: it could not be spawned."""

    generation: int
    ended: Exit | None
    cause: Cause


@dataclass(frozen=True, slots=True)
class Stalled:
    """The engine of this generation made no progress towards ready for the whole start time-out."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Froze:
    """The engine of this generation has work in flight and does nothing."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants everything to end; the second time quicker."""

    reason: str


@dataclass(frozen=True, slots=True)
class RenewRequested:
    """A reload needs a new engine: ``beside`` the old one, or after it where memory holds only one."""

    reason: str
    beside: bool


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is in flight any more, or the drain time is over."""


@dataclass(frozen=True, slots=True)
class BackoffOver:
    """The delay before the next start has passed."""


Event = (
    StartRequested | Ready | Exited | Stalled | Froze | StopRequested | RenewRequested | Drained | BackoffOver
)


# Actions: what to do about it.


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the engine of this generation and watch it."""

    generation: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM to the engine's group, SIGKILL after the grace."""

    generation: int


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to the engine's group at once."""

    generation: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Report `Drained` when nothing is in flight, at the latest after the drain time."""


@dataclass(frozen=True, slots=True)
class Retire:
    """Let the requests inside this generation finish within the drain time, then terminate it."""

    generation: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End the requests inside this generation (None: in any) with an error that says ``reason``."""

    generation: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Report `BackoffOver` after this delay."""

    delay_s: float


Action = Spawn | Terminate | Kill | Drain | Retire | Abort | Wait


After = Literal["serve", "renew", "stop"]
"""What follows once a stopping engine is gone: serve again (after a back-off), serve anew (a reload), or nothing."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How patient restarts are.

    Delays double from ``initial_s`` to ``max_s``; after ``reset_after_s`` of service earlier failures are forgotten.
    ``give_up_after`` identical failures in a row end in ``failed`` where trying again cannot help (see `_hopeless`).
    """

    initial_s: float = 1.0
    max_s: float = 60.0
    reset_after_s: float = 300.0
    give_up_after: int = 5


@dataclass(frozen=True, slots=True)
class Transition:
    """One line of the history; ``at`` in the clock of the caller's ``now``."""

    at: float
    before: State
    after: State
    reason: str


@dataclass(frozen=True, slots=True)
class Status:
    """All that is known about the engine's life.

    ``engine`` is the generation that serves or is on its way to it, ``successor`` the one a reload is starting beside
    it, ``retiring`` those that finish their last requests. ``then`` is what follows once a stopping engine is gone.
    ``failures`` counts failures in a row, ``alike`` how many of them at the end were the same; ``proven`` tells that an
    engine has been ready since the start (or the reload) was asked for, ``served`` that one ever was.
    """

    state: State = State.STOPPED
    generation: int = 0
    engine: int | None = None
    successor: int | None = None
    retiring: frozenset[int] = frozenset()
    then: After = "serve"
    since: float = 0.0
    ready_at: float | None = None
    proven: bool = False
    served: bool = False
    failures: int = 0
    alike: int = 0
    restarts: int = 0
    delay_s: float = 0.0
    cause: Cause | None = None
    ended: Exit | None = None
    history: tuple[Transition, ...] = field(default=())

    def alive(self) -> frozenset[int]:
        """Return the generations whose processes exist."""
        return self.retiring | {g for g in (self.engine, self.successor) if g is not None}

    def is_over(self) -> bool:
        """Tell whether nothing will happen any more: stopped, or failed before it ever served.

        What failed later stays: a reload may mend it, and meanwhile it tells whoever asks.
        """
        ended = self.state is State.STOPPED or (self.state is State.FAILED and not self.served)
        return ended and bool(self.history) and not self.alive()
