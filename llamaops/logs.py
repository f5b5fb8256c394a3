"""How our own log lines look on stderr: text for people or JSON for machines, and no secret in either."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from pathlib import Path
from typing import Literal

Format = Literal["text", "json"]
MAX_BYTES = 8 << 20
"""A log file that grows beyond this is renamed to ``<name>.1``, in place of the one before."""
_SECRETS = re.compile(
    r"(?P<keep>\b(?:Bearer|Authorization:\s*Basic)\s+|(?<![a-z])(?:api[-_]?key|token|password|secret)\b[\"']?\s*[=:]\s*[\"']?"
    r"|--api-key\s+|://[^\s/@:]*:(?=[^\s/@]+@))[^\s\"',;&@]{4,}"
    r"|\b(?:sk-|hf_|ghp_|xox[abp]-)[A-Za-z0-9_-]{8,}", re.IGNORECASE)
_CHATTY = ("httpx", "httpcore", "uvicorn.error", "asyncio")


def configure(level: str, form: Format, file: Path | None = None) -> None:
    """Send log lines of ``level`` and above to stderr in that form; libraries are heard from warnings on.

    With ``file``, stderr as a whole (tracebacks too) goes there from now on, and the file is kept below `MAX_BYTES`.
    """
    handler = BoundedStderr(file) if file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)


def masked(text: str) -> str:
    """Return ``text`` with what looks like a key, token or password replaced by ``…``."""
    return _SECRETS.sub(lambda found: f"{found['keep'] or ''}…", text)


class BoundedStderr(logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only before 3.12
    """Turns stderr into the file ``path``, and into a new one whenever that has grown too large.

    A disk that is full loses lines, no more. Raises OSError when the file can't be opened at all.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(sys.stderr)
        self._path = path
        self._open()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        super().emit(record)
        with contextlib.suppress(OSError):
            if os.fstat(sys.stderr.fileno()).st_size > MAX_BYTES:
                with contextlib.suppress(FileNotFoundError):  # removed by others, or a full disk held no new one before
                    self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._open()

    def _open(self) -> None:
        opened = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.dup2(opened, sys.stderr.fileno())
        os.close(opened)


class Text(logging.Formatter):
    """One line for people: time, level, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, masked."""
        return masked(super().format(record))


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``.

    A request's line has its fields as numbers and words under ``request``; an exception has its traceback as
    ``exception``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the object, masked."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name,
            "message": masked(record.getMessage()),
        }
        if isinstance(request := getattr(record, "request", None), dict):
            entry["message"] = "request"
            entry["request"] = {k: masked(v) if isinstance(v, str) else v for k, v in request.items()}
        if record.exc_info:
            entry["exception"] = masked(self.formatException(record.exc_info))
        return json.dumps(entry)  # ASCII: some readers end a line at U+2028, too
