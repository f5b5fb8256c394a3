"""From a client's request to the engine and back: bytes untouched, nothing computed that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from llamaops.core.completions import Ask, read_ask
from llamaops.core.engine_life import State
from llamaops.core.explain import Stream
from llamaops.serve.admission import Admission
from llamaops.serve.auth import KeyRing
from llamaops.serve.bodies import BodyBudget
from llamaops.serve.call import Call, Refusal
from llamaops.serve.metrics import RequestMetrics
from llamaops.serve.passage import Passage
from llamaops.serve.quota import KeyLimits, OverLimit, Quotas
from llamaops.serve.routes import Route
from llamaops.serve.traffic import Backend, Endpoint, Traffic, Unready

_ENDED = 32
_HELD_BODIES = 4
"""How many bodies of the largest size may be held at once, in all."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What the relay needs of the configuration; seconds and bytes."""

    names: tuple[str, ...]
    max_body_bytes: int
    queue_timeout_s: float
    ping_interval_s: float | None
    keys: KeyRing | None = None
    embeds: bool = False

    @property
    def held_bytes(self) -> int:
        """How much all bodies that wait for the engine may take."""
        return _HELD_BODIES * self.max_body_bytes


class Relay:
    """Carries requests of open routes to the engine that serves now."""

    def __init__(self, backend: Backend, traffic: Traffic, admission: Admission, metrics: RequestMetrics) -> None:
        self._backend = backend
        self.traffic = traffic
        self.admission = admission
        self.metrics = metrics
        self.bodies = BodyBudget(0)
        self._quotas = Quotas()
        self._passages: set[Passage] = set()
        self._ended: deque[tuple[float, Stream]] = deque(maxlen=_ENDED)

    def streams(self, now: float) -> list[Stream]:
        """Return the generating requests that are under way at ``now`` (monotonic seconds), oldest first."""
        turns = {place: turn for turn, place in enumerate(self.admission.turns(), 1)}
        return sorted((p.seen(now, turns) for p in self._passages), key=lambda s: -s.age_s)

    def ended(self, since: float) -> list[tuple[float, Stream]]:
        """Return the requests that ended after ``since`` (monotonic seconds), each with when; the last few only."""
        return [(at, stream) for at, stream in self._ended if at > since]

    def cancel(self, request_id: str) -> bool:
        """End a request in the engine with an error towards its client; tell whether there was one of that id."""
        return any(p.cancel() for p in self._passages if p.has_id(request_id))

    async def carry(self, call: Call, route: Route, limits: RelayLimits) -> None:
        """Answer ``call`` with what the engine says. Raises Refusal before the first byte, ClientGone at any time."""
        if limits.embeds:
            check_embeds(route)
        if self.coming() is None:
            self.endpoint()
        self.bodies.limit = limits.held_bytes
        try:
            # What may wait is held whole: a slow upload must not occupy a slot.
            held = route.look or route.generates
            body = await call.whole_body(limits.max_body_bytes, self.bodies) if held else None
            ask = read_ask(body) if body is not None and route.look else Ask(None, False)
            if ask.model is not None:
                check_model(ask.model, limits.names)
            call.record.model = limits.names[0]
            passage = Passage(self, call, route, limits, ask, body)
            del body  # the passage lets go of it once the engine has it
            with self._listed(passage, call, limits) if route.generates else contextlib.nullcontext():
                await passage.run()
        finally:
            call.release(self.bodies)

    @contextlib.contextmanager
    def _listed(self, passage: Passage, call: Call, limits: RelayLimits) -> Iterator[None]:
        """Show the passage while it is under way, and count it to its key. Raises Refusal where the key's is full."""
        key = call.record.key
        allowed = limits.keys.limits(key) if limits.keys is not None and key is not None else None
        if key is not None and allowed is not None:
            self._enter_quota(key, allowed)
        self._passages.add(passage)
        try:
            yield
        finally:
            self._passages.discard(passage)
            self._ended.append(((now := time.monotonic()), passage.seen(now, {})))
            if key is not None and allowed is not None:
                used = (call.record.prompt_tokens or 0) + (call.record.output_tokens or 0)
                self._quotas.leave(key, used, allowed)

    def _enter_quota(self, key: str, limits: KeyLimits) -> None:
        try:
            self._quotas.enter(key, limits)
        except OverLimit as over:
            wait_s = over.retry_after_s or self.admission.retry_after_s()
            raise Refusal(429, f"this key's limit is reached: {over.limit}={over.value}", kind="rate_limit_error",
                          code=f"key_{over.limit}", retry_after_s=wait_s) from over

    def coming(self) -> asyncio.Future[None] | None:
        """Return what to wait for where an engine is on its way (see `Backend`)."""
        return self._backend.coming()

    def endpoint(self) -> Endpoint:
        """Return where the engine listens that serves now. Raises Refusal where none does."""
        endpoint = self._backend.endpoint()
        if isinstance(endpoint, Unready):
            state = "waiting to be restarted" if endpoint.state == State.BACKOFF else endpoint.state
            raise Refusal(503, f"the engine is {state}: {endpoint.reason}", kind="server_error",
                          code="engine_unavailable", retry_after_s=endpoint.retry_after_s)
        return endpoint


def check_embeds(route: Route) -> None:
    """Raise Refusal where text is asked of a model that writes none: the engine would answer 500."""
    if route.family is not None:
        raise Refusal(400, f"this model turns texts into vectors and writes none: POST /v1/embeddings instead of "
                      f"{route.path}", kind="invalid_request_error", code="embedding_model", param="model")


def check_model(name: str, names: tuple[str, ...]) -> None:
    """Raise Refusal where no model of that name is served, with those there are."""
    if name not in names:
        raise Refusal(404, f"the model {name[:100]!r} is not served here; there is: {', '.join(names)}",
                      kind="invalid_request_error", code="model_not_found", param="model")
