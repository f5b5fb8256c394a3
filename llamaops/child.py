"""Run a helper program to its end: pip, cmake, ninja, llama-quantize, ``llama-server --version``.

Each gets a session of its own, so that a Ctrl-C of the terminal reaches us alone and we end the whole group; where
``setpriv`` exists it also dies with us.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

TAIL_LINES = 20
GRACE_S = 3.0
"""How long a group may take to end after SIGTERM before it is killed."""


class CancelledError(Exception):
    """The caller's cancel event was set; the program was ended."""


def llamaops_argv(*words: str) -> list[str]:
    """Return what runs this llamaops with other words: the program that was started, be it a script or the module.

    Inside another program it is the module, but never one that happens to lie in the current folder (-P).
    """
    program = Path(sys.argv[0])
    if program.name == "llamaops" or program.parts[-2:] == ("llamaops", "__main__.py"):
        started = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
        return [sys.executable, *started, *words]
    return [sys.executable, "-P", "-m", "llamaops", *words]


@dataclass(frozen=True, slots=True)
class Done:
    """How a program ended: ``code`` as subprocess gives it (negative: by that signal), and its last lines."""

    code: int
    tail: str


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    on_line: Callable[[str], None] = lambda _line: None,
    on_idle: Callable[[], None] = lambda: None,
    log: Path | None = None,
    niced: bool = False,
    cancel: threading.Event | None = None,
) -> Done:
    """Run a program, output and errors together, one line at a time; ``on_idle`` is called about five times a second.

    ``log`` is appended to. ``niced`` runs it at a low priority. On KeyboardInterrupt, SIGTERM, ``cancel`` or any
    exception of a callback the whole process group is ended before this returns. Raises OSError when the program can't
    be started, CancelledError, and SystemExit(143) on SIGTERM where nobody else handles it.
    """
    chain = [*_wrappers(niced), *argv]
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    with _sigterm_raises(), _log_file(log) as sink:
        sink.write("$ " + " ".join(argv) + "\n")
        process = subprocess.Popen(
            chain, env=dict(env), cwd=cwd, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        try:
            for line in _lines(process, on_idle, cancel):
                tail.append(line)
                sink.write(line + "\n")
                on_line(line)
            return Done(process.wait(), "\n".join(tail))
        except BaseException:
            end_group(process)
            raise
        finally:
            assert process.stdout is not None
            process.stdout.close()


def capture(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> Done:
    """Run a program that answers at once and return all it says. Raises OSError or subprocess.TimeoutExpired."""
    done = subprocess.run(
        argv, env=dict(env), timeout=timeout_s, check=False, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    return Done(done.returncode, done.stdout.decode("utf-8", "replace"))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its session, and everything it started: SIGTERM, then SIGKILL after GRACE_S."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        until = time.monotonic() + patience
        while time.monotonic() < until and _group_lives(process):
            time.sleep(0.02)
    process.wait()


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _wrappers(niced: bool) -> list[str]:
    chain = []
    if setpriv := shutil.which("setpriv"):
        # SIGTERM and not SIGKILL: ninja and make end their compilers on it.
        chain += [setpriv, "--pdeathsig", "TERM", "--"]
    if niced and (nice := shutil.which("nice")):
        chain += [nice, "-n", "10"]
    return chain


def _lines(
    process: subprocess.Popen[bytes], on_idle: Callable[[], None], cancel: threading.Event | None
) -> Iterator[str]:
    """Yield lines as they come; a carriage return ends a line too (progress meters)."""
    assert process.stdout is not None
    fd, rest, due = process.stdout.fileno(), b"", time.monotonic() + 0.2
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while True:
            if cancel is not None and cancel.is_set():
                raise CancelledError("cancelled")
            ready = selector.select(0.2)
            if time.monotonic() >= due:
                on_idle()
                due = time.monotonic() + 0.2
            if not ready:
                # A grandchild may keep the pipe open after the program itself has ended.
                if process.poll() is not None:
                    break
                continue
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                break
            *whole, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            yield from (line.decode("utf-8", "replace").rstrip() for line in whole if line.strip())
    if rest.strip():
        yield rest.decode("utf-8", "replace").rstrip()


@contextmanager
def _log_file(path: Path | None) -> Iterator[IO[str]]:
    with (path or Path(os.devnull)).open("a", encoding="utf-8") as file:
        yield file


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143) while a program runs, unless somebody handles it already."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
