"""The service manager's notification protocol, sd_notify(3); silent where nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Mapping


def notify(environ: Mapping[str, str], *states: str) -> bool:
    """Send state lines such as ``READY=1`` to the service manager; tell whether there is one that took them.

    Never fails: a manager that went away must not end the service.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    target = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        sock.connect(target)
        sock.sendall("\n".join(states).encode())
        return True
    return False


def ready(status: str) -> tuple[str, ...]:
    """Return the lines that say: serving."""
    return ("READY=1", f"STATUS={_one_line(status)}")


def reloading() -> tuple[str, ...]:
    """Return the lines that say: reading the profile again; ``READY=1`` must follow (Type=notify-reload)."""
    return ("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def stopping(reason: str) -> tuple[str, ...]:
    """Return the lines that say: draining and stopping."""
    return ("STOPPING=1", f"STATUS={_one_line(reason)}")


def status(text: str) -> tuple[str, ...]:
    """Return the line that `systemctl status` shows."""
    return (f"STATUS={_one_line(text)}",)


def watchdog_interval_s(environ: Mapping[str, str], pid: int) -> float | None:
    """Return how often to send ``WATCHDOG=1``: half of what the unit allows; None without a watchdog for ``pid``."""
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    usec = environ.get("WATCHDOG_USEC", "")
    return int(usec) / 2e6 if usec.isdigit() and int(usec) > 0 else None


async def feed_watchdog(environ: Mapping[str, str], pid: int) -> None:
    """Tell the manager, where it asks, that the event loop turns: one that hangs feeds nobody. Runs until cancelled."""
    interval = watchdog_interval_s(environ, pid)
    while interval is not None:
        notify(environ, "WATCHDOG=1")
        await asyncio.sleep(interval)


def _one_line(text: str) -> str:
    return " ".join(text.split())
