"""Which paths the relay opens, matched on the raw bytes: no decoding, so no spelling of a closed path gets through."""

from __future__ import annotations

from dataclasses import dataclass

from llamaops.core.completions import Family


@dataclass(frozen=True, slots=True)
class Route:
    """One open path. ``generates``: it occupies a slot. ``look``: its JSON names a model, so the body is read first."""

    path: str
    methods: frozenset[str]
    family: Family | None = None
    generates: bool = False
    look: bool = False


def _get(path: str) -> Route:
    return Route(path, frozenset({"GET", "HEAD"}))


def _post(path: str, family: Family | None = None, *, generates: bool = False, look: bool = True) -> Route:
    return Route(path, frozenset({"POST"}), family, generates, look)


_ALL = (
    _post("/v1/chat/completions", "chat", generates=True),
    _post("/v1/completions", "completions", generates=True),
    _post("/v1/responses", "responses", generates=True),
    _post("/v1/messages", "messages", generates=True),
    _post("/v1/embeddings", generates=True),
    _post("/v1/rerank", generates=True),
    _post("/v1/reranking", generates=True),
    _post("/v1/audio/transcriptions", "chat", generates=True, look=False),
    _post("/v1/messages/count_tokens"),
    _post("/v1/chat/completions/input_tokens"),
    _post("/v1/responses/input_tokens"),
    _get("/v1/models"),
    _post("/completion", "native", generates=True),
    _post("/infill", "native", generates=True),
    _post("/embedding", generates=True),
    _post("/embeddings", generates=True),
    _post("/rerank", generates=True),
    _post("/reranking", generates=True),
    _post("/tokenize", look=False),
    _post("/detokenize", look=False),
    _post("/apply-template", look=False),
    _get("/props"),
    _get("/slots"),
)
ROUTES: dict[bytes, Route] = {route.path.encode(): route for route in _ALL}
