"""What is told about an instance: to its owner through the control socket, to browsers on ``/status``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_PUBLIC = ("name", "state", "reason", "since_s", "llamaops", "uptime_s", "restarts", "retry_in_s", "in_flight", "notes",
           "streams", "now")


def page_status(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a status document that may leave the machine: no paths, pids or client addresses."""
    requests = {k: v for k, v in document["requests"].items() if k != "queue"}
    by_key = Counter(place["key"] for place in document["requests"].get("queue", ()))
    return {
        **{name: document[name] for name in _PUBLIC},
        "requests": requests | {"waiting_by_key": dict(by_key)},
        "model": {"names": document["model"]["names"], "quant": document["model"]["quant"]},
        "engine": {"version": document["engine"]["version"]},
    }
