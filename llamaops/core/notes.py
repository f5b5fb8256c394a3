"""What a plan says about itself: reasons for its decisions, notes about fallbacks and dangers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Level = Literal["info", "degraded", "risk"]


@dataclass(frozen=True, slots=True)
class Note:
    """One fallback or danger. ``code`` is stable and documented in docs/scheduling.md."""

    level: Level
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one decision fell as it did; ``what`` is the dotted plan field (``placement.threads``)."""

    what: str
    text: str


@dataclass(slots=True)
class Findings:
    """Collects reasons and notes while a plan is made; each code is noted once."""

    reasons: list[Reason] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def because(self, what: str, text: str) -> None:
        """Record why ``what`` was decided so; a later reason for the same field replaces the earlier one."""
        self.reasons = [reason for reason in self.reasons if reason.what != what]
        self.reasons.append(Reason(what, text))

    def info(self, code: str, text: str) -> None:
        """Note something worth knowing that costs nothing."""
        self._add(Note("info", code, text))

    def degraded(self, code: str, text: str) -> None:
        """Note that something asked for, or clearly better, can't be had here."""
        self._add(Note("degraded", code, text))

    def risk(self, code: str, text: str) -> None:
        """Note that what was asked for is carried out but may go badly."""
        self._add(Note("risk", code, text))

    def _add(self, note: Note) -> None:
        if all(known.code != note.code for known in self.notes):
            self.notes.append(note)
