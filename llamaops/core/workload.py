"""What a bench asks: prompts, lengths and arrival times, all following from one seed.

Request ``i`` of a workload is the same whatever was asked before it, so two targets can be given the same requests.
"""

# ruff: noqa: S311 - drawn from a seed so that a run can be repeated; nothing here is a secret

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts, never below 1.

    ``spread`` 0 is a fixed length; ``uniform`` draws from ``[middle − spread, middle + spread]``; otherwise lengths are
    log-normal with mean ``middle`` and standard deviation ``spread``, the shape that chat traffic has.
    """

    middle: float
    spread: float = 0.0
    uniform: bool = False

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read ``64`` (fixed), ``32-128`` (uniform) or ``200~150`` (log-normal: mean~deviation). Raises ValueError."""
        found = _LENGTHS.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is no length: write 64, 32-128 or MEAN~DEVIATION")
        first, sign, second = int(found[1]), found[2], int(found[3] or 0)
        if first < 1 or (sign == "-" and second < first):
            raise ValueError(f"{text!r} is no length: lengths begin at 1 and a range goes upwards")
        if sign == "-":
            return cls((first + second) / 2, (second - first) / 2, uniform=True)
        return cls(float(first), float(second))

    def draw(self, rng: random.Random) -> int:
        """Draw one length."""
        if self.spread == 0:
            return round(self.middle)
        if self.uniform:
            return rng.randint(round(self.middle - self.spread), round(self.middle + self.spread))
        variance = math.log1p((self.spread / self.middle) ** 2)
        return max(1, round(rng.lognormvariate(math.log(self.middle) - variance / 2, math.sqrt(variance))))

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        if self.uniform:
            return f"{round(self.middle - self.spread)}-{round(self.middle + self.spread)}"
        return f"{round(self.middle)}" + (f"~{round(self.spread)}" if self.spread else "")


_LENGTHS = re.compile(r"([0-9]{1,7})(?:([-~])([0-9]{1,7}))?")
_DEFAULT = Lengths(64)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked.

    ``rate`` set: an open loop of Poisson arrivals, requests a second, however many are in flight. Otherwise a closed
    loop: ``concurrency`` clients, each sending its next request when its last one has ended. The run ends with
    ``requests`` sent or after ``duration_s`` (at least one is set); requests under way are awaited. ``warmup`` requests
    go first and are not counted. ``shared_prefix`` is how many tokens of each prompt all requests have in common.
    """

    concurrency: int = 1
    rate: float | None = None
    requests: int | None = 16
    duration_s: float | None = None
    warmup: int = 1
    prompt_tokens: Lengths = _DEFAULT
    max_tokens: Lengths = _DEFAULT
    shared_prefix: int = 0
    seed: int = 1


SCENARIOS = {
    "stream": Workload(1, None, None, 8.0, 1, Lengths(64), Lengths(48)),
    "crowd": Workload(50, None, None, 30.0, 1, Lengths(48), Lengths(32)),
    "soak": Workload(5, None, None, 600.0, 1, Lengths(100, 80), Lengths(80, 60)),
}
"""Loads that articles about serving on CPUs measure with: one reader, 50 connections at once, ten minutes of five."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: due ``at_s`` seconds after the start (0 in a closed loop), and its prompt."""

    index: int
    at_s: float
    prompt: str
    max_tokens: int


def asks(workload: Workload) -> Iterator[Ask]:
    """Yield the requests of a workload in order, without end where nothing limits their number."""
    arrivals = random.Random(f"{workload.seed} arrivals")
    at = 0.0
    index = 0
    while workload.requests is None or index < workload.requests:
        if workload.rate is not None:
            at += arrivals.expovariate(workload.rate)
            if workload.duration_s is not None and at > workload.duration_s:
                return
        yield _ask(workload, index, at)
        index += 1


def warmup_asks(workload: Workload) -> list[Ask]:
    """Return the requests that go first; their prompts occur nowhere else."""
    return [_ask(workload, -1 - i, 0.0) for i in range(workload.warmup)]


def _ask(workload: Workload, index: int, at: float) -> Ask:
    rng = random.Random(f"{workload.seed} {index}")
    tokens, answer = workload.prompt_tokens.draw(rng), workload.max_tokens.draw(rng)
    common = min(workload.shared_prefix, tokens)
    words = random.Random(f"{workload.seed} prefix").choices(WORDS, k=common) + rng.choices(WORDS, k=tokens - common)
    return Ask(index, at, " ".join(words), answer)


WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business",
    "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end",
    "member", "law", "car", "city", "community", "name", "president", "team", "minute", "idea", "kid", "body",
    "information", "back", "parent", "face", "others", "level", "office", "door", "health", "person", "art", "war",
    "history", "party", "result", "change", "morning", "reason", "research", "girl", "guy", "moment", "air",
    "teacher", "force", "education",
)
"""Common nouns, each one token (with its space) in the usual vocabularies: a prompt of n words has about n tokens."""
