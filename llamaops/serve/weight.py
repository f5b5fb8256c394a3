"""The cgroup's CPU weight: the lever between services, lifted while we serve and put back after."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from llamaops.core.notes import Note

SHARES_PER_WEIGHT = 1024 / 100
"""A v1 ``cpu.shares`` of 1024 and a v2 ``cpu.weight`` of 100 are the defaults, and each other's equal."""


@contextlib.contextmanager
def lifted_weight(file: str | None, weight: int | None) -> Iterator[list[Note]]:
    """Write the planned ``weight`` (v2 units) to the cgroup's file for the length of a ``with`` block.

    Yields what went wrong, as notes; without a plan or a file nothing is touched. What was there comes back at the end;
    after a kill -9 it does not, in a cgroup that holds nobody but us.
    """
    if file is None or weight is None:
        yield []
        return
    path = Path("/") / file
    value = round(weight * SHARES_PER_WEIGHT) if path.name == "cpu.shares" else weight
    try:
        before = path.read_text()
        path.write_text(str(value))
    except OSError as exc:
        yield [Note("degraded", "drift-weight", f"{path} could not be set to {value}: {exc.strerror}")]
        return
    try:
        yield []
    finally:
        with contextlib.suppress(OSError):
            path.write_text(before)
