"""Bring a file here over HTTP, continuing what an earlier run began."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING

from llamaops.child import CancelledError
from llamaops.core.progress import Bar

if TYPE_CHECKING:
    import httpx

ATTEMPTS = 5
"""How often a cut download is continued without a new byte in between, before it is given up for this time."""
PAUSE_S = 1.0
PATIENCE_S = 60.0
"""The longest wait that a server may ask for (``Retry-After``); above it the user is told and decides."""
TIMEOUT_S = 30.0
"""Of silence on an open connection, not of the whole download."""


class RefusedError(Exception):
    """The server answered with a status that another try would not better; ``code`` is the hub's ``X-Error-Code``."""

    def __init__(self, status: int, code: str | None) -> None:
        super().__init__(f"the server answered {status}")
        self.status, self.code = status, code


class BrokenError(Exception):
    """The download was cut and could not be continued now; what has arrived is kept."""


class _PassingError(Exception):
    """An answer that another try may better, after ``wait`` seconds; None: not in the time that anybody looks on."""

    def __init__(self, why: str, wait: float | None) -> None:
        super().__init__(why)
        self.wait = wait


def transfer(
    url: str, headers: Mapping[str, str], partial: Path, size: int, bar: Bar, cancel: threading.Event | None = None
) -> None:
    """Bring ``partial`` to exactly ``size`` bytes, starting from what is there; checksums are the caller's.

    A 200 to a range request, a 416, or too many bytes start it again from the first byte. Credentials in ``headers``
    are not sent on to another host. Raises RefusedError, BrokenError, CancelledError or OSError (disk).
    """
    import httpx

    cancel = cancel or threading.Event()
    left = ATTEMPTS
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT_S, headers=dict(headers)) as client:
        while True:
            have, wait = size_of(partial), PAUSE_S
            try:
                if have > size:
                    partial.unlink()
                elif have < size or not partial.exists():
                    _receive(client, url, partial, size, bar, cancel)
                if size_of(partial) == size:
                    return
                why = f"it ended at {size_of(partial)} of {size} bytes"
            except httpx.TransportError as exc:
                why = str(exc) or type(exc).__name__
            except _PassingError as exc:
                why, left, wait = str(exc), left if exc.wait is not None else 0, exc.wait or 0.0
            left = ATTEMPTS if size_of(partial) > have else left - 1
            if left <= 0:
                raise BrokenError(why)
            if cancel.wait(wait):
                raise CancelledError("cancelled")


def _receive(client: httpx.Client, url: str, partial: Path, size: int, bar: Bar, cancel: threading.Event) -> None:
    have = size_of(partial)
    # Compressed on the way, the bytes could not be continued.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with client.stream("GET", url, headers=headers) as reply:
        start = _start(reply, have)
        if start is None:
            partial.unlink(missing_ok=True)
            return
        with partial.open("ab" if start else "wb") as sink:
            done = start
            for chunk in reply.iter_raw():  # with a chunk size, httpx would lose what it has gathered when it is cut
                done += len(chunk)
                if done > size:
                    raise _PassingError("more bytes arrive than the file has", PAUSE_S)
                sink.write(chunk)
                bar.update(done, size)
                if cancel.is_set():
                    raise CancelledError("cancelled")


def _start(reply: httpx.Response, have: int) -> int | None:
    """Return where the answer's first byte belongs; None when what is here must be dropped."""
    status = reply.status_code
    if status == 206:
        return have if reply.headers.get("Content-Range", "").startswith(f"bytes {have}-") else None
    if status == 200:
        return 0  # to a range request too: the server sends all of it
    if status == 416:
        return None  # what is here is longer than the file
    if is_passing(status):
        wait = asked_to_wait(reply.headers)
        raise _PassingError(f"the server answered {status}" + _longer(reply.headers, wait), wait)
    raise RefusedError(status, reply.headers.get("X-Error-Code"))


def is_passing(status: int) -> bool:
    """Tell whether the same request may be answered better later: too slow, too many, or the server's own trouble."""
    return status in (408, 429) or status >= 500


def asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait before another try: ``Retry-After`` (RFC 9110, 10.2.3), else a short pause.

    None when the server asks for more than `PATIENCE_S`.
    """
    stated = headers.get("Retry-After", "").strip()
    try:
        wait = float(stated) if stated.isdecimal() else _until(stated) if stated else PAUSE_S
    except ValueError:
        return PAUSE_S
    return max(wait, PAUSE_S) if wait <= PATIENCE_S else None


def _until(date: str) -> float:
    then = parsedate_to_datetime(date)
    return (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()


def _longer(headers: Mapping[str, str], wait: float | None) -> str:
    return "" if wait is not None else f" and asks to come back later (Retry-After: {headers['Retry-After'][:40]})"


def size_of(path: Path) -> int:
    """Return a file's size, 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
