"""Requests to this machine never go through a proxy, whatever the environment says: it could not reach us."""

from __future__ import annotations

from typing import Final

DIRECT: Final = {"all://127.0.0.1": None, "all://localhost": None, "all://[::1]": None}
"""For ``mounts`` of an httpx client."""
