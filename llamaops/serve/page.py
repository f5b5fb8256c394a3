"""The files of the status page, and the headers that keep a browser from loading anything else."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from llamaops.resources import resource

Headers = list[tuple[bytes, bytes]]

PATHS = {b"/": ("index.html", b"text/html"), b"/page.css": ("page.css", b"text/css"),
         b"/page.js": ("page.js", b"text/javascript")}
"""Path → file under templates/page, and its type."""

_POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
           "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
GUARDS: Headers = [
    (b"content-security-policy", _POLICY.encode()), (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-cache"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


@cache
def page_file(path: bytes) -> tuple[Headers, bytes]:
    """Return headers and body of one of `PATHS`; read from disk once."""
    name, kind = PATHS[path]
    body = Path(resource("templates/page") / name).read_bytes()
    return [(b"content-type", kind + b"; charset=utf-8"), *GUARDS], body
