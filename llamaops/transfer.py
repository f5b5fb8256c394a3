"""Bring a file here over HTTP, continuing what an earlier run began; or read only a part of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING

from llamaops.cache import mib, sha256_of
from llamaops.child import CancelledError
from llamaops.core.progress import Bar, Progress
from llamaops.errors import TryAgain, Unavailable

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


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file on a server: its size in bytes and what ``digest`` must give for it. ``where`` names it in errors."""

    name: str
    url: str
    size: int
    checksum: str
    where: str
    headers: Mapping[str, str]
    digest: Callable[[Path], str] = sha256_of


def fetch_checked(wanted: Wanted, partial: Path, progress: Progress, error: type[Unavailable],
                  cancel: threading.Event | None = None) -> None:
    """Bring ``partial`` to the wanted content; a wrong checksum is given a second chance from the first byte.

    Raises TryAgain, with what has arrived kept, or ``error``, with nothing kept; and what `transfer` raises.
    """
    for last in (False, True):
        with progress.bar(f"download {wanted.name}", "bytes") as bar:
            try:
                transfer(wanted.url, wanted.headers, partial, wanted.size, bar, cancel)
            except BrokenError as exc:
                raise TryAgain(f"the download of {wanted.name} broke off", where=wanted.where, why=str(exc),
                               fix=f"run the same command again: it continues at {mib(size_of(partial))}") from exc
        actual = wanted.digest(partial)
        if actual == wanted.checksum:
            return
        partial.unlink()
        if last:
            raise error(f"{wanted.name} arrived with the wrong checksum, twice", where=wanted.where,
                        why=f"{wanted.checksum} is stated, the bytes give {actual}",
                        fix="check what states it, and try again later; behind a proxy or mirror, have that looked at")
        progress.say(f"{wanted.name}: wrong checksum, fetching it again")


def transfer(
    url: str, headers: Mapping[str, str], partial: Path, size: int, bar: Bar, cancel: threading.Event | None = None
) -> None:
    """Bring ``partial`` to exactly ``size`` bytes, starting from what is there; checksums are the caller's.

    A 200 to a range request, a 416, or too many bytes start it again from the first byte. Credentials in ``headers``
    are not sent on to another host. Raises RefusedError, BrokenError, CancelledError or OSError (disk).
    """
    patience = _Patience(cancel, lambda: size_of(partial))
    with _client(headers) as client:
        while True:
            if size_of(partial) > size:
                partial.unlink()
            with patience.with_server():
                if size_of(partial) < size or not partial.exists():
                    _receive(client, url, partial, size, bar, patience.cancel)
                if size_of(partial) == size:
                    return
                raise _PassingError(f"it ended at {size_of(partial)} of {size} bytes", PAUSE_S)


def read_part(
    url: str, headers: Mapping[str, str], begin: int, end: int, cancel: threading.Event | None = None
) -> tuple[bytes, int | None]:
    """Return the bytes from ``begin`` up to ``end``, fewer where the file ends, and the file's size if it is stated.

    A server that knows no ranges is read up to ``end`` and left. Raises as `transfer` does.
    """
    patience = _Patience(cancel)
    with _client(headers) as client:
        while True:
            with patience.with_server():
                return _part(client, url, begin, end)


def stated_size(url: str, where: str, error: type[Unavailable], cancel: threading.Event | None = None) -> int:
    """Return how large a file on a server is. Raises ``error`` where it does not say, and as `transfer` does."""
    size = read_part(url, {}, 0, 1, cancel)[1]
    if size is None:
        raise error("the server does not say how large the file is", where=where,
                    why="it could not be checked for room, nor continued", fix="use another server")
    return size


@contextmanager
def server_trouble_is(error: type[Unavailable], what: str, where: str) -> Iterator[None]:
    """Turn a refusal of a server that is no hub into ``error``, and what may pass into TryAgain."""
    try:
        yield
    except RefusedError as exc:
        why = {401: ": it wants a login", 403: ": not for everybody, or the link has run out",
               404: ": there is no such file"}.get(exc.status, "")
        raise error(f"the server refused {what}", where=where, why=f"{exc}{why}",
                    fix="check the address; open it in a browser") from None
    except BrokenError as exc:
        raise TryAgain(f"can't fetch {what}", where=where, why=str(exc),
                       fix="check the network and the address, then run the same command again") from exc


@contextmanager
def _client(headers: Mapping[str, str]) -> Iterator[httpx.Client]:
    import httpx

    with httpx.Client(follow_redirects=True, timeout=TIMEOUT_S, headers=dict(headers)) as client:
        yield client


class _Patience:
    """How long a server that fails is asked again: so many times without progress, at the pace it asks for."""

    def __init__(self, cancel: threading.Event | None, arrived: Callable[[], int] = lambda: 0) -> None:
        self.left, self.cancel = ATTEMPTS, cancel or threading.Event()
        self.arrived, self.before = arrived, arrived()

    @contextmanager
    def with_server(self) -> Iterator[None]:
        """Wait after a failure that may pass, and go on; raise BrokenError when there were too many."""
        import httpx

        wait: float | None = PAUSE_S
        try:
            yield
            return
        except httpx.TransportError as exc:
            why = str(exc) or type(exc).__name__
        except _PassingError as exc:
            why, wait = str(exc), exc.wait
        now = self.arrived()
        self.left, self.before = (ATTEMPTS if now > self.before else self.left - 1), now
        if self.left <= 0 or wait is None:
            raise BrokenError(why)
        if self.cancel.wait(wait):
            raise CancelledError("cancelled")


def _receive(client: httpx.Client, url: str, partial: Path, size: int, bar: Bar, cancel: threading.Event) -> None:
    have = size_of(partial)
    with client.stream("GET", url, headers=_ranged(f"bytes={have}-" if have else None)) as reply:
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


def _part(client: httpx.Client, url: str, begin: int, end: int) -> tuple[bytes, int | None]:
    with client.stream("GET", url, headers=_ranged(f"bytes={begin}-{end - 1}")) as reply:
        start = _start(reply, begin)
        if start is None:
            return b"", _total(reply)
        got = bytearray()
        for chunk in reply.iter_raw():
            got += chunk
            if len(got) >= end - start:
                break
        return bytes(got[begin - start : end - start]), _total(reply)


def _ranged(value: str | None) -> dict[str, str]:
    # Compressed on the way, the bytes could not be continued.
    return {"Accept-Encoding": "identity"} | ({"Range": value} if value else {})


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


def _total(reply: httpx.Response) -> int | None:
    """Return the size of the whole file: what stands behind the slash of a range, or the length of a full answer."""
    stated = reply.headers.get("Content-Range", "").rpartition("/")[2]
    if reply.status_code == 200:
        stated = reply.headers.get("Content-Length", "")
    return int(stated) if re.fullmatch(r"\d{1,18}", stated) else None


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
