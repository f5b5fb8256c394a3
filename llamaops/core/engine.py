"""Facts about a llama-server binary, read from its own ``--version`` and ``--help``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Engine:
    """One llama-server binary.

    ``path`` is the real path that is executed. ``version`` is spelled ``b11434`` (None when the binary does not say).
    ``flags`` holds every option spelling of ``--help``, long and short. ``openmp`` is ``libgomp``, ``libomp`` or None for
    a build without OpenMP, read from the binary's dynamic section.
    ``origin`` tells how it was found: ``path``, ``cache``, ``PATH`` or ``built``.
    """

    path: str
    version: str | None
    flags: frozenset[str]
    openmp: str | None
    origin: str = "path"
    unix_socket: bool = True
