"""The noise generator for machines without stress-ng: ``burn.py NOISE FOLDER``; ends on SIGTERM or with its parent.

Run as a file, so that its workers start in milliseconds: it imports nothing of llamaops.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

_SLICE_S = 0.02
_BLOCK = 32 << 20


def burn_cpu(load: int) -> None:
    """Keep one CPU busy for ``load`` percent of each slice."""
    busy = _SLICE_S * load / 100
    while True:
        until = time.monotonic() + busy
        while time.monotonic() < until:
            pass
        if load < 100:
            time.sleep(_SLICE_S - busy)


def burn_mem() -> None:
    """Copy blocks larger than the caches without end."""
    source, target = bytearray(_BLOCK), bytearray(_BLOCK)
    while True:
        target[:] = source
        source[:] = target


def burn_io(folder: str) -> None:
    """Write and sync a file without end."""
    block = os.urandom(1 << 20)
    path = Path(folder) / f"io-{os.getpid()}"
    while True:
        with path.open("wb") as file:
            for _ in range(16):
                file.write(block)
                file.flush()
                os.fsync(file.fileno())


def main() -> None:
    """Fork the workers and wait; SIGTERM ends the whole group."""
    noise, folder = sys.argv[1:3]
    parent = os.getppid()
    children: list[int] = []
    for part in noise.split(","):
        kind, count, *load = part.rstrip("%").split(":")
        for _ in range(int(count)):
            if pid := os.fork():
                children.append(pid)
                continue
            match kind:
                case "cpu":
                    burn_cpu(int(load[0]) if load else 100)
                case "mem":
                    burn_mem()
                case _:
                    burn_io(folder)
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        while os.getppid() == parent:
            time.sleep(0.5)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
