"""Which headers travel on: hop-by-hop ones never, and each side only what is meant for it."""

from __future__ import annotations

from llamaops.serve.engine_client import Headers

# RFC 9110 §7.6.1 and the older spellings still seen.
_HOP = frozenset({b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
                  b"te", b"trailer", b"transfer-encoding", b"upgrade"})
# Not for the engine. Keys are ours to check; nothing may be compressed on the way back; we set length and connection;
# origin is answered by our own allow-list. With x-conversation-id llama-server keeps generating after the client has
# gone (its resumable streams), which would break the promise that what nobody reads is not computed.
_REQUEST_DROP = _HOP | {b"content-length", b"expect", b"accept-encoding", b"authorization", b"x-api-key", b"origin",
                        b"x-conversation-id"}
_RESPONSE_DROP = _HOP | {b"date", b"x-request-id"}
STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"),
]
"""What a stream is marked with; the first is for those that begin before the engine's own."""


def request_headers(headers: Headers) -> Headers:
    """Return a client's headers as the engine gets them, without length and connection."""
    return _forwarded(headers, _REQUEST_DROP)


def _forwarded(headers: Headers, drop: frozenset[bytes]) -> Headers:
    """Return the headers that travel on: all but ``drop`` and those that a ``Connection`` header names."""
    named = {
        token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")
    }
    return [(name, value) for name, value in headers if name not in drop and name not in named]


def response_headers(headers: Headers, *, streaming: bool) -> Headers:
    """Return the engine's headers as the client gets them; a stream is marked against caches and buffering proxies."""
    kept = [h for h in _forwarded(headers, _RESPONSE_DROP) if not h[0].startswith(b"access-control-")]
    if not streaming:
        return kept
    marks = STREAM_HEADERS[1:]
    return [h for h in kept if h[0] not in (b"cache-control", b"x-accel-buffering")] + marks
