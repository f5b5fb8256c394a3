"""Which web pages may call us: our own allow-list; the engine's opinion is dropped."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

Headers = list[tuple[bytes, bytes]]
_EXPOSED = b"X-Request-Id, Retry-After"


def cors_headers(origin: bytes | None, allowed: tuple[str, ...]) -> Headers:
    """Return what to add to an answer to a page of ``origin``; ``*`` in ``allowed`` means every page."""
    if not allowed:
        return []
    vary: Headers = [] if "*" in allowed else [(b"vary", b"Origin")]
    if origin is None or not _allows(origin, allowed):
        return vary
    allow = b"*" if "*" in allowed else origin
    return [*vary, (b"access-control-allow-origin", allow), (b"access-control-expose-headers", _EXPOSED)]


def preflight_headers(headers: Headers, allowed: tuple[str, ...], methods: frozenset[str]) -> Headers:
    """Return the answer to a preflight request beside `cors_headers`; nothing for a page that is not allowed."""
    asked = dict(headers)
    origin = asked.get(b"origin")
    if origin is None or not _allows(origin, allowed) or b"access-control-request-method" not in asked:
        return []
    allow = ", ".join(sorted(methods)).encode()
    answer = [(b"access-control-allow-methods", allow), (b"access-control-max-age", b"600")]
    if wanted := asked.get(b"access-control-request-headers"):
        answer.append((b"access-control-allow-headers", wanted))
    return answer


def foreign_page(headers: Headers, allowed: tuple[str, ...]) -> str | None:
    """Tell why a request looks like that of a web page which may not call us; None where it does not.

    For instances without keys, which anything that reaches loopback may use, the user's browser included. What another
    page posts carries its ``Origin``. A page whose own name was made to mean this machine (DNS rebinding) has that name
    as ``Host``; names that strangers can own have a dot.
    """
    asked = dict(headers)
    host = asked.get(b"host", b"").lower()
    if not _is_local(host.decode("latin-1")):
        return "Host is another machine's name"
    origin = asked.get(b"origin")
    if origin is None or _allows(origin, allowed) or origin.lower().partition(b"://")[2] == host:
        return None
    return "Origin is another page's"


def _is_local(authority: str) -> bool:
    if authority.startswith("["):
        return True  # an address
    name = authority.partition(":")[0].rstrip(".")
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return "." not in name or name.endswith(".localhost")


def _allows(origin: bytes, allowed: tuple[str, ...]) -> bool:
    return "*" in allowed or origin.decode("latin-1") in allowed
