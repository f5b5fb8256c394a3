"""A hub on loopback that speaks what `huggingface_hub` asks for, and can fail in the known ways."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class Request:
    """One request as it came in, and how many bytes of body went out."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    status: int = 0
    sent: int = 0


@dataclass
class FakeHub:
    """The files of one repository, the switches, and what was asked.

    ``statuses`` are answered to the next downloads, in order; ``api_status`` to every listing. ``cuts`` are byte counts
    after which the next downloads break off; ``then`` are statuses for the downloads that follow. ``redirect`` sends
    downloads to another host name of this machine, ``hold`` makes them wait in the middle. ``moves_to`` is a commit
    and its files, pushed right after the next listing. Failures carry ``retry_after``.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    repo: str = "org/model"
    commit: str = COMMIT
    url: str = ""
    statuses: list[int] = field(default_factory=list)
    api_status: int = 200
    api_statuses: list[int] = field(default_factory=list)
    retry_after: str | None = None
    moves_to: tuple[str, dict[str, bytes]] | None = None
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)
    error_code: str | None = None
    cuts: list[int] = field(default_factory=list)
    then: list[int] = field(default_factory=list)
    corrupt: int = 0
    ignore_range: bool = False
    redirect: bool = False
    hold: threading.Event | None = None
    requests: list[Request] = field(default_factory=list)

    def downloads(self) -> list[Request]:
        """Return the requests for file contents."""
        return [r for r in self.requests if r.method == "GET" and not r.path.startswith("/api/") and r.status != 302]

    def etag(self, name: str) -> str:
        """Return what the hub states for a file: the SHA-256 of a large one, git's object id of a small one."""
        return _etag(name, self.files[name])

    def push(self, commit: str, files: dict[str, bytes]) -> None:
        """Move the branch; what was there stays at its commit."""
        self.history[self.commit] = self.files
        self.commit, self.files = commit, files


def is_large(name: str) -> bool:
    """Tell whether the hub keeps a file outside of git."""
    return name.endswith((".gguf", ".safetensors"))


def _etag(name: str, data: bytes) -> str:
    if is_large(name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve ``hub`` until the context ends."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        if hub.hold is not None:
            hub.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that go away are what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        entry = Request(self.command, path, self.headers.get("Range"), self.headers.get("Authorization"))
        hub.requests.append(entry)
        if path.startswith(f"/api/models/{hub.repo}"):
            self._listing(entry)
        elif path.startswith(f"/{hub.repo}/resolve/"):
            self._file(entry, *path.split("/", 5)[4:])
        else:
            self._fail(entry, 404, "RepoNotFound")

    def _listing(self, entry: Request) -> None:
        hub = self.hub
        if hub.api_statuses or hub.api_status != 200:
            return self._fail(entry, (hub.api_statuses or [hub.api_status]).pop(0), hub.error_code)
        if not entry.path.endswith((f"/{hub.repo}", "/revision/main", f"/revision/{hub.commit}")):
            return self._fail(entry, 404, "RevisionNotFound")
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": "b" * 40 if is_large(name) else hub.etag(name)}
            | ({"lfs": {"sha256": hub.etag(name), "size": len(data), "pointerSize": 130}} if is_large(name) else {})
            for name, data in hub.files.items()
        ]  # fmt: skip
        body = json.dumps({"id": hub.repo, "modelId": hub.repo, "sha": hub.commit, "siblings": siblings}).encode()
        self._send(entry, 200, {"Content-Type": "application/json", "Content-Length": str(len(body))}, body)
        if hub.moves_to:
            hub.push(*hub.moves_to)
            hub.moves_to = None
        return None

    def _file(self, entry: Request, revision: str, name: str) -> None:
        hub = self.hub
        commit, files = (revision, hub.history[revision]) if revision in hub.history else (hub.commit, hub.files)
        if name not in files:
            return self._fail(entry, 404, "EntryNotFound")
        data = files[name]
        etag = _etag(name, data)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "X-Linked-Etag": f'"{etag}"',
                   "X-Linked-Size": str(len(data)), "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            self._send(entry, 200, headers | {"Content-Length": str(len(data))}, b"")
            return None
        if hub.redirect and self.headers["Host"].startswith("127."):
            location = hub.url.replace("127.0.0.1", "localhost") + self.path
            self._send(entry, 302, {"Location": location, "Content-Length": "0"}, b"")
            return None
        if hub.statuses or (hub.then and not hub.cuts):
            return self._fail(entry, (hub.statuses or hub.then).pop(0), hub.error_code)
        if hub.corrupt:
            hub.corrupt -= 1
            data = b"X" + data[1:]
        ranged = entry.range if entry.range and not hub.ignore_range else None
        first, last = (ranged or "bytes=0-")[6:].split("-")
        start, end = int(first), min(int(last) + 1, len(data)) if last else len(data)
        if ranged and start >= len(data):
            return self._fail(entry, 416, None)
        headers["Content-Length"] = str(end - start)
        if ranged:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        stop = hub.cuts.pop(0) if hub.cuts else end
        self._send(entry, 206 if ranged else 200, headers, data[start:stop], cut=stop < end)
        return None

    def _fail(self, entry: Request, status: int, code: str | None) -> None:
        headers = {"Content-Length": "0"} | ({"X-Error-Code": code} if code else {})
        headers |= {"Retry-After": self.hub.retry_after} if self.hub.retry_after else {}
        self._send(entry, status, headers, b"")

    def _send(self, entry: Request, status: int, headers: dict[str, str], body: bytes, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        entry.status = status
        if body:
            self.wfile.write(body[:1000])
            entry.sent += len(body[:1000])
            if self.hub.hold is not None and not entry.path.startswith("/api/"):
                self.wfile.flush()
                self.hub.hold.wait(60)
            self.wfile.write(body[1000:])
            entry.sent += len(body[1000:])
        if cut:
            self.close_connection = True
