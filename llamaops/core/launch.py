"""From a plan to the command line: one exec chain, no shell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A process to start.

    ``argv`` is the whole chain, wrappers first, each of which execs its successor, so the pid that is spawned becomes
    the engine's. ``env`` is the complete environment, not a difference. ``socket`` is the UNIX socket the engine will
    listen on; where it has none, ``port`` is the loopback port.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    socket: str | None
    port: int | None
