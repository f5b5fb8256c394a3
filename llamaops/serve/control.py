"""The control socket as the commands see it: blocking, and light to import.

One JSON document a line. A request is ``{"command": "status", …}``; the answer is ``{"result": …}`` or ``{"error":
{"what", "where", "why", "fix", "detail", "exit_code"}}``. A command that follows something answers any number of
``{"item": …}`` lines first. `llamaops.serve.control_server` is the other side.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llamaops.errors import LlamaopsError, NotPermitted, NotRunning


def call(path: Path, command: str, *, timeout_s: float | None = 10, **arguments: Any) -> Any:
    """Ask the instance at ``path`` and return its result.

    Raises NotRunning when nobody answers there, and the instance's own error as a LlamaopsError with its exit code.
    """
    for document in _ask(path, command, timeout_s, arguments):
        if "result" in document:
            return document["result"]
    raise NotRunning("the instance ended before it answered", where=str(path))


def follow(path: Path, command: str, **arguments: Any) -> Iterator[Any]:
    """Yield the items of a command that follows something, until it or the instance ends. Errors as for `call`."""
    for document in _ask(path, command, None, arguments):
        if "item" not in document:
            return
        yield document["item"]


def _ask(path: Path, command: str, timeout_s: float | None, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(path))
            sock.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            with sock.makefile("rb") as lines:
                for line in lines:
                    yield _checked(json.loads(line))
        except PermissionError as exc:
            raise NotPermitted("the instance is another user's", where=str(path),
                               fix="run as that user or root") from exc
        except (FileNotFoundError, ConnectionError) as exc:
            raise NotRunning("no such instance is running", where=str(path), why=exc.strerror,
                             fix="llamaops status lists those that are") from exc
        except TimeoutError as exc:
            raise NotRunning("the instance does not answer", where=str(path), why=f"waited {timeout_s:g} s",
                             fix="llamaops logs shows what it is doing") from exc


def _checked(document: dict[str, Any]) -> dict[str, Any]:
    if error := document.get("error"):
        failure = LlamaopsError(error["what"], where=error["where"], why=error["why"], fix=error["fix"],
                                detail=error["detail"])
        failure.exit_code = error["exit_code"]
        raise failure
    return document
