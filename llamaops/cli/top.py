"""``llamaops top``: the live picture of one instance in the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import click

from llamaops.cli.picture import Document, picture
from llamaops.cli.run import ask, json_option, name_argument, the_one
from llamaops.errors import LlamaopsError, NotRunning, UsageError

_KEYS = "q quit · ↑ ↓ choose a request · c cancel it · r reload · d drain and stop"
_UP, _DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j")
_SURE = "drain and stop {name}? press d again, or any other key to go on"
_MIN_S = 0.2


@click.command()
@name_argument
@click.option("--interval", type=click.FloatRange(_MIN_S), default=1.0, show_default=True, metavar="S",
              help="Seconds between looks.")
@click.option("--once", is_flag=True, help="Print one picture and end.")
@json_option
def top(name: str | None, interval: float, once: bool, as_json: bool) -> None:
    """Watch the instance NAME (or the only one) live: streams, rates, queue, CPUs, and what limits it.

    Each CPU's bar shows who uses it: █ the engine, ▓ the relay, ░ others, × the hypervisor. Keys: q quits, r reloads
    the profile, the arrows (or k, j) choose a request in the engine and c cancels it, d drains and stops (asks first).
    What does not fit the terminal is left out from the end of each list.

    \b
    Examples:
      llamaops top
      llamaops top qwen --interval 0.5
      llamaops top --once --json | jq .now.explain

    Exit codes: 0 · 2 no terminal (use --once) · 64 not running.
    """
    name = the_one(name)
    if once or as_json:
        document = _settled(name)
        click.echo(json.dumps(document, indent=2) if as_json else _plain(document))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top needs a terminal", fix="llamaops top --once, or --once --json")
    _Screen(name, interval).run()


def _settled(name: str) -> Document:
    """Return a status whose window is of now: who asks first wakes the sampler, which then needs two looks."""
    document: Document = ask(name, "status")
    until = time.monotonic() + 3
    while time.monotonic() < until and ((now := document.get("now")) is None or now["age_s"] > 2):
        time.sleep(0.2)
        document = ask(name, "status")
    return document


def _plain(document: Document) -> str:
    from rich.console import Console

    console = Console(width=min(Console().width, 120), no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(picture(document, [document], 100, console.width))
    return capture.get().rstrip()


class _Screen:
    """The loop: ask, draw, wait for a key."""

    def __init__(self, name: str, interval: float) -> None:
        self._name, self._interval = name, interval
        self._past: deque[Document] = deque(maxlen=120)
        self._message = _KEYS
        self._sure = self._stopping = False
        self._chosen: str | None = None

    def run(self) -> None:
        """Draw until q or the end of the instance."""
        from rich.console import Console
        from rich.live import Live

        console = Console(no_color=bool(os.environ.get("NO_COLOR")))
        with _raw_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    document: Document = ask(self._name, "status")
                except NotRunning:
                    if self._stopping:
                        return
                    raise
                self._past.append(document)
                self._choose(document, 0)
                shown = picture(document, list(self._past), console.height - 1, console.width, self._message,
                                self._chosen)
                live.update(shown, refresh=True)
                if not all(self._obey(key, document) for key in _keys(self._interval)):
                    return

    def _obey(self, key: str, document: Document) -> bool:
        """Do what a key asks for; tell whether to go on."""
        was_sure, self._sure, self._message = self._sure, False, _KEYS
        if key == "d" and was_sure:
            ask(self._name, "stop")
            self._stopping = True
            self._message = "draining; top ends with it"
        elif key == "d":
            self._sure, self._message = True, _SURE.format(name=self._name)
        elif key == "r":
            self._message = self._tried("reload")
        elif key == "c":
            self._message = self._tried("cancel", id=self._chosen) if self._chosen else "nothing to cancel"
        elif key in _UP + _DOWN:
            self._choose(document, -1 if key in _UP else 1)
        return key not in ("q", "\x03", "\x1b")

    def _choose(self, document: Document, steps: int) -> None:
        """Move the choice among the requests in the engine; the oldest is chosen where it was none of them."""
        ids = [s["id"] for s in document["streams"] if s["phase"] != "queued"]
        at = ids.index(self._chosen) + steps if self._chosen in ids else 0
        self._chosen = ids[max(0, min(at, len(ids) - 1))] if ids else None

    def _tried(self, command: str, **arguments: Any) -> str:
        try:
            return f"{command}: {ask(self._name, command, timeout_s=60, **arguments)}"
        except LlamaopsError as exc:
            return f"{command} refused: {exc.what}"


@contextlib.contextmanager
def _raw_keys() -> Iterator[None]:
    """Take keys one by one, unseen; Ctrl-C still interrupts."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _keys(within_s: float) -> list[str]:
    """Return the keys pressed, once there are some; an arrow comes as three bytes."""
    ready, _, _ = select.select([sys.stdin], [], [], within_s)
    typed = os.read(sys.stdin.fileno(), 64).decode(errors="replace") if ready else ""
    return re.findall(r"\x1b[\[O][A-Z]|.", typed, re.DOTALL)
