"""Who may enter the engine: as many requests as it has slots, the rest in a fair queue.

Turns go round the keys, and within a key round its clients, so that nobody's burst delays everybody.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_FIRST_GUESS_S = 5.0  # how long a request holds a slot, before any has been seen
_WEIGHT = 0.2  # of the newest holding time in the running mean


class QueueFull(Exception):
    """No place to wait. ``scope`` is ``queue`` or ``key``; ``retry_after_s`` follows from how fast slots come free."""

    def __init__(self, scope: str, limit: int, retry_after_s: int) -> None:
        super().__init__(scope)
        self.scope = scope
        self.limit = limit
        self.retry_after_s = retry_after_s


@dataclass(eq=False, slots=True)
class Place:
    """One request, waiting or in the engine. ``admitted`` is done as soon as it may enter."""

    key: str
    client: str
    entered_at: float
    admitted: asyncio.Future[None]
    admitted_at: float | None = None


_Lines = dict[str, dict[str, deque[Place]]]  # key, client, places: both rounds in the order of their next turn


class Admission:
    """The slots and the queue before them; used from one event loop."""

    def __init__(
        self, slots: int, depth: int, per_key: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._lines: _Lines = {}
        self._running: set[Place] = set()
        self._waiting = 0
        self._hold_s: float | None = None
        self.configure(slots, depth, per_key)

    def configure(self, slots: int, depth: int, per_key: int) -> None:
        """Set the limits; places already given stay."""
        self._slots, self._depth, self._per_key = slots, depth, per_key
        self._admit()

    @property
    def running(self) -> int:
        """How many requests are in the engine."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._waiting

    def enter(self, key: str, client: str) -> Place:
        """Take a place: admitted at once where a slot is free, else in the queue. Raises QueueFull.

        The limit for each key is for named keys: clients without one (``""``) are many, not one that asks too much.
        """
        place = Place(key, client, self._clock(), asyncio.get_running_loop().create_future())
        if len(self._running) < self._slots and not self._waiting:
            self._start(place)
            return place
        clients = self._lines.get(key, {})
        if self._waiting >= self._depth:
            raise QueueFull("queue", self._depth, self.retry_after_s())
        if key and sum(map(len, clients.values())) >= self._per_key:
            raise QueueFull("key", self._per_key, self.retry_after_s())
        self._lines.setdefault(key, {}).setdefault(client, deque()).append(place)
        self._waiting += 1
        return place

    def leave(self, place: Place) -> None:
        """Give the place back, from the engine or from the queue; leaving twice is harmless."""
        if place in self._running:
            self._running.discard(place)
            self._learn(self._clock() - (place.admitted_at or place.entered_at))
        else:
            self._forget(place)
        self._admit()

    def retry_after_s(self) -> int:
        """Return in how many seconds a place should be free, from how long requests held theirs of late."""
        ahead = self._waiting + 1
        return max(1, min(3600, math.ceil(ahead * (self._hold_s or _FIRST_GUESS_S) / max(self._slots, 1))))

    def snapshot(self) -> dict[str, object]:
        """Return slots, counts and the queue in the order of its turns (key, client and seconds waited)."""
        now = self._clock()
        order = [
            {"key": place.key, "client": place.client, "waited_s": round(now - place.entered_at, 3)}
            for place in self.turns()
        ]
        return {"slots": self._slots, "running": self.running, "waiting": self.waiting, "queue": order}

    def turns(self) -> list[Place]:
        """Return the waiting places in the order they would be admitted, leaving the queue as it is."""
        lines = {key: {c: deque(p) for c, p in clients.items()} for key, clients in self._lines.items()}
        turns = []
        while lines:
            turns.append(_pop_turn(lines))
        return turns

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            self._waiting -= 1
            self._start(_pop_turn(self._lines))

    def _start(self, place: Place) -> None:
        place.admitted_at = self._clock()
        self._running.add(place)
        place.admitted.set_result(None)

    def _forget(self, place: Place) -> None:
        clients = self._lines.get(place.key, {})
        places = clients.get(place.client, deque())
        if place not in places:
            return
        places.remove(place)
        self._waiting -= 1
        if not places:
            del clients[place.client]
        if not clients:
            del self._lines[place.key]

    def _learn(self, held_s: float) -> None:
        self._hold_s = held_s if self._hold_s is None else self._hold_s + _WEIGHT * (held_s - self._hold_s)


def _pop_turn(lines: _Lines) -> Place:
    """Take the next place: the first client of the first key; both go to the end of their rounds."""
    key = next(iter(lines))
    clients = lines.pop(key)
    client = next(iter(clients))
    places = clients.pop(client)
    place = places.popleft()
    if places:
        clients[client] = places
    if clients:
        lines[key] = clients
    return place
