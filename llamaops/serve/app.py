"""The ASGI application: request ids, keys, CORS, our own pages, and the relay for everything else."""

from __future__ import annotations

import itertools
import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from llamaops.core.plan import Serving
from llamaops.core.profile import Profile
from llamaops.core.profile_types import is_loopback
from llamaops.serve import requestlog
from llamaops.serve.admission import Admission
from llamaops.serve.auth import KeyRing, presented_key
from llamaops.serve.call import Call, ClientGone, Message, Receive, Refusal, Send
from llamaops.serve.cors import cors_headers, foreign_page, preflight_headers
from llamaops.serve.metrics import RequestMetrics
from llamaops.serve.page import GUARDS, PATHS, page_file
from llamaops.serve.relay import Relay, RelayLimits, check_model
from llamaops.serve.requestlog import Record
from llamaops.serve.routes import ROUTES, Route
from llamaops.serve.traffic import Backend, Traffic

if TYPE_CHECKING:
    import ssl

    from llamaops.serve.front import Server

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_MODEL = b"/v1/models/"
_TEXT = (b"content-type", b"text/plain; charset=utf-8")
_JSON = (b"content-type", b"application/json; charset=utf-8")
_OPEN = frozenset({*PATHS, b"/healthz", b"/readyz"})  # no key needed: they say nothing about requests


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """How the relay listens to its clients; all of it can change at reload. Sizes in bytes, times in seconds.

    ``keyless_local``: anything on this machine may ask, so foreign web pages must be told apart. ``ping_interval_s``: a
    stream that has been silent so long gets its headers and a comment line; None never. ``embeds``: the model writes no
    text.
    """

    model: str
    aliases: tuple[str, ...] = ()
    keys: KeyRing | None = None
    keyless_local: bool = False
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    slots: int = 1
    queue_depth: int = 64
    queue_per_key: int = 8
    queue_timeout_s: float = 600.0
    ping_interval_s: float | None = 10.0
    embeds: bool = False

    @classmethod
    def from_profile(cls, profile: Profile, serving: Serving, keys: KeyRing | None) -> RelayConfig:
        """Take the relay's part of a profile; ``serving`` is the plan's, ``keys`` come from `auth.load_keys`."""
        serve = profile.serve
        return cls(
            model=profile.name, aliases=profile.model.aliases, keys=keys, cors_origins=serve.cors_origins,
            keyless_local=keys is None and is_loopback(serve.host) and not serve.allow_insecure,
            max_body_bytes=int(serve.max_body_mib * (1 << 20)), slots=serving.slots,
            queue_depth=serve.queue.depth, queue_per_key=serve.queue.per_key, queue_timeout_s=serve.queue.timeout_s,
            embeds=serving.embeddings,
        )

    def limits(self) -> RelayLimits:
        """Return what the relay itself needs of this."""
        return RelayLimits((self.model, *self.aliases), self.max_body_bytes, self.queue_timeout_s, self.ping_interval_s,
                           self.keys, self.embeds)


class App:
    """ASGI 3 application of one served model."""

    def __init__(
        self, backend: Backend, traffic: Traffic, config: RelayConfig, status: Callable[[], dict[str, object]]
    ) -> None:
        self._status = status
        self._created = int(time.time())
        self.admission = Admission(config.slots, config.queue_depth, config.queue_per_key)
        self.metrics = RequestMetrics(traffic.in_flight, lambda: self.admission.waiting)
        self.relay = Relay(backend, traffic, self.admission, self.metrics)
        self._own = {b"/healthz": self._healthz, b"/readyz": self._readyz, b"/metrics": self._metrics,
                     b"/status": self._answer_status} | dict.fromkeys(PATHS, self._page)
        # Unique across restarts without asking the kernel for randomness at each request.
        self._id_prefix = secrets.token_hex(8).encode()
        self._id_numbers = itertools.count()
        self.configure(config)

    def configure(self, config: RelayConfig) -> None:
        """Follow ``config`` from the next request on; requests under way keep what they began with."""
        self._config = config
        self._limits = config.limits()
        self.admission.configure(config.slots, config.queue_depth, config.queue_per_key)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        call = self._call(scope, receive, send)
        try:
            await self._serve(call)
        except Refusal as refusal:
            await call.refuse(refusal)
        except ClientGone:
            call.record.outcome = "cancelled"
        finally:
            self._close(call.record)

    def _call(self, scope: Message, receive: Receive, send: Send) -> Call:
        headers = scope["headers"]
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else self._new_id()
        origin = next((value for name, value in headers if name == b"origin"), None)
        extra = [(b"x-request-id", request_id), *cors_headers(origin, self._config.cors_origins)]
        record = Record(request_id.decode(), scope["method"], self._endpoint(scope["raw_path"]), time.monotonic())
        return Call(scope, receive, send, record, extra)

    def _endpoint(self, path: bytes) -> str:
        """Return a path as metrics and log name it: of these there are few, whatever clients ask for."""
        if path in ROUTES or path in self._own:
            return path.decode()
        return "/v1/models/{model}" if path.startswith(_MODEL) else "other"

    def _new_id(self) -> bytes:
        return b"req_%b%08x" % (self._id_prefix, next(self._id_numbers))

    async def _serve(self, call: Call) -> None:
        own, route = self._own.get(call.raw_path), ROUTES.get(call.raw_path)
        if call.raw_path.startswith(_MODEL):
            own = self._model
        if call.method == "OPTIONS":
            await self._options(call, route)
            return
        if call.raw_path not in _OPEN:
            self._authenticate(call)
        if own is not None:
            if call.method not in ("GET", "HEAD"):
                raise _wrong_method(call.method, frozenset({"GET", "HEAD"}))
            await own(call)
        elif route is None:
            raise Refusal(404, "there is no such path here, or it is closed because it changes the engine",
                          kind="invalid_request_error", code="not_found")
        elif call.method not in route.methods:
            raise _wrong_method(call.method, route.methods)
        else:
            await self.relay.carry(call, route, self._limits)

    def _authenticate(self, call: Call) -> None:
        keys = self._config.keys
        if self._config.keyless_local and (why := foreign_page(call.headers, self._config.cors_origins)):
            raise Refusal(403, f"this looks like a web page that may not call here: {why}. Allow it with "
                          "serve.cors_origins, use serve.api_keys, or set serve.allow_insecure: true",
                          kind="invalid_request_error", code="foreign_page")
        if keys is None:
            return
        presented = presented_key(call.headers)
        call.record.key = None if presented is None else keys.match(presented)
        if call.record.key is None:
            raise Refusal(401, "no API key was sent" if presented is None else "the API key is not known here",
                          kind="invalid_request_error", code="invalid_api_key")

    def _close(self, record: Record) -> None:
        record.e2e_s = time.monotonic() - record.started_at
        if record.endpoint.encode() in self._own:
            return  # scrapes and health checks would bury the requests
        self.metrics.count(record)
        requestlog.log(record)

    # --- our own pages

    async def _options(self, call: Call, route: Route | None) -> None:
        methods = (route.methods if route else frozenset({"GET", "HEAD"})) | {"OPTIONS"}
        headers = preflight_headers(call.headers, self._config.cors_origins, methods)
        await call.start(204, [(b"allow", ", ".join(sorted(methods)).encode()), *headers])
        await call.finish()

    async def _healthz(self, call: Call) -> None:
        await call.answer(200, [_TEXT], b"ok\n")

    async def _readyz(self, call: Call) -> None:
        self.relay.endpoint()
        await call.answer(200, [_TEXT], b"ready\n")

    async def _metrics(self, call: Call) -> None:
        page, content_type = self.metrics.page((call.header(b"accept") or b"").decode("latin-1"))
        await call.answer(200, [(b"content-type", content_type.encode())], page)

    async def _answer_status(self, call: Call) -> None:
        document = {"name": self._config.model, **self._status()}
        await call.answer(200, [_JSON, *GUARDS], json.dumps(document, ensure_ascii=False).encode())

    async def _model(self, call: Call) -> None:
        """Answer as OpenAI does for one model; the engine knows only the list."""
        name = unquote_to_bytes(call.raw_path.removeprefix(_MODEL)).decode("utf-8", "replace")
        check_model(name, self._limits.names)
        document = {"id": name, "object": "model", "created": self._created, "owned_by": "llamacpp"}
        await call.answer(200, [_JSON], json.dumps(document, ensure_ascii=False).encode())

    async def _page(self, call: Call) -> None:
        await call.answer(200, *page_file(call.raw_path))


def _wrong_method(method: str, allowed: frozenset[str]) -> Refusal:
    return Refusal(405, f"{method[:20]} is not for this path; it takes {', '.join(sorted(allowed))}",
                   kind="invalid_request_error", code="method_not_allowed")


def make_app(
    backend: Backend, traffic: Traffic, config: RelayConfig, *, status: Callable[[], dict[str, object]]
) -> App:
    """Return the application; ``status`` gives what ``/status`` answers."""
    return App(backend, traffic, config, status)


def make_server(app: App, tls: ssl.SSLContext | None = None, **limits: Any) -> Server:
    """Return a uvicorn server for ``app`` without signal handlers: ``await server.serve(sockets=[sock])``.

    ``limits`` are fields of `front.FrontLimits`. Setting ``server.should_exit`` stops listening and waits for answers.
    """
    from llamaops.serve import front

    return front.make_server(app, front.FrontLimits(**limits), tls)
