"""``llamaops top``: the live picture of one instance in the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from llamaops.cli.run import ask, json_option, name_argument, the_one
from llamaops.errors import LlamaopsError, UsageError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

Document = dict[str, Any]
_SPARKS = "▁▂▃▄▅▆▇█"
_KEYS = "q quit · r reload · c cancel the oldest request · d drain and stop"
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
    the profile, c cancels the oldest request in the engine, d drains and stops (asks first). What does not fit the
    terminal is left out from the end of each list.

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
        self._sure = False

    def run(self) -> None:
        """Draw until q or the end of the instance."""
        from rich.console import Console
        from rich.live import Live

        console = Console(no_color=bool(os.environ.get("NO_COLOR")))
        with _raw_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                document: Document = ask(self._name, "status")
                self._past.append(document)
                shown = picture(document, list(self._past), console.height - 1, console.width, self._message)
                live.update(shown, refresh=True)
                if (key := _key(self._interval)) and not self._obey(key, document):
                    return

    def _obey(self, key: str, document: Document) -> bool:
        """Do what a key asks for; tell whether to go on."""
        was_sure, self._sure, self._message = self._sure, False, _KEYS
        if key == "d" and was_sure:
            ask(self._name, "stop")
            self._message = "draining; top ends with it"
        elif key == "d":
            self._sure, self._message = True, _SURE.format(name=self._name)
        elif key == "r":
            self._message = self._tried("reload")
        elif key == "c":
            running = [s for s in document["streams"] if s["phase"] != "queued"]
            self._message = self._tried("cancel", id=running[0]["id"]) if running else "nothing to cancel"
        return key not in ("q", "\x03", "\x1b")

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


def _key(within_s: float) -> str | None:
    ready, _, _ = select.select([sys.stdin], [], [], within_s)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else None


# The picture.


def picture(document: Document, past: list[Document], height: int, width: int, message: str = "") -> Group:
    """Return the whole picture, cut to ``height`` lines; ``past`` are the documents so far, this one last."""
    from rich.console import Group
    from rich.text import Text

    now = document.get("now")
    lines = [_head(document), *_why(now, width, max(2, height // 6)), *_figures(document, past, width)]
    rest = height - len(lines) - (1 if message else 0)
    cpus = _cpus(now, width, max(1, rest // 3))
    streams = _streams(document, width, max(2, rest - len(cpus) - 1))
    notes = _notes(document)[: max(0, rest - len(cpus) - len(streams))]
    lines += [*cpus, *streams, *notes]
    if message:
        lines += [Text("")] * (height - len(lines) - 1) + [Text(message, style="reverse")]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return Group(*lines[:height])


def _head(document: Document) -> Text:
    from rich.text import Text

    state = document["state"]
    line = Text.assemble((document["name"], "bold"), " ", (state, "green" if state == "ready" else "bold red"))
    reason = "" if state == "ready" else f" {document.get('reason') or ''} "
    line.append(f"{reason}  {document['url']}  {document['engine']['version'] or '?'} "
                f"{document['model']['quant'] or ''}  pid {document.get('pid') or '–'}  "
                f"restarts {document.get('restarts', 0)}")
    return line


def _why(now: Document | None, width: int, room: int) -> list[Text]:
    """Return the sentences, wrapped: they are what people came for."""
    from rich.text import Text

    if now is None:
        return [Text("nothing seen yet", style="dim")]
    calm = {"smooth", "idle", "prefill"}
    lines = []
    for finding in now["explain"]:
        first, *more = textwrap.wrap(finding["text"], width - 2)
        lines.append(Text.assemble(("● ", "green" if finding["code"] in calm else "yellow"), first))
        lines += [Text(f"  {line}") for line in more]
    return lines[:room]


def _figures(document: Document, past: list[Document], width: int) -> list[Text]:
    from rich.text import Text

    now, requests = document.get("now"), document["requests"]
    queue = Text(f"requests {requests['in_flight']} of {requests.get('slots', '?')} in the engine, "
                 f"{requests.get('waiting', 0)} waiting{_by_key(requests)}")
    if now is None:
        return [queue]
    itl, engine, room = now["itl_ms"], now["engine"], max(10, width - 46)
    ttfts = [s["ttft_ms"] for s in document["streams"] if s["ttft_ms"] is not None]
    ttft = f", first {max(ttfts):.0f} ms" if ttfts else ""
    rate = f"tokens   {now['events_per_s']:.1f} /s{ttft}"
    gaps = f"gaps     p50 {_ms(itl['p50'])}  p99 {_ms(itl['p99'])} ms"
    seen = [d["now"] for d in past if d.get("now")]
    heat = f" · {now['temperature_celsius']:.0f} °C" if now["temperature_celsius"] else ""
    throttled = f" · quota stops {100 * now['throttled']:.0f} %" if now["throttled"] else ""
    if now["thermal_throttles"]:
        heat += f" · slowed for heat {now['thermal_throttles']} times"
    pressure = " ".join(f"{name} {100 * share:.0f} %" for name, share in now["pressure"].items())
    return [
        Text.assemble(f"{rate:<44}", (sparkline([n["events_per_s"] for n in seen], room), "cyan")),
        Text.assemble(f"{gaps:<44}", (sparkline([n["itl_ms"]["p99"] for n in seen], room), "cyan")),
        queue,
        Text(f"engine   {engine['cpus']:.2f} CPUs, waits {100 * engine['delay']:.0f} %, {_mib(engine['rss_bytes'])}, "
             f"{engine['switches_per_s']:.0f} switches/s, {engine['migrations_per_s']:.0f} moves/s"),
        Text(f"machine  pressure {pressure or 'unknown'}{heat}{throttled}"),
    ]


def _by_key(requests: Document) -> str:
    counts: dict[str, int] = {}
    for place in requests.get("queue", ()):
        counts[place["key"] or "anybody"] = counts.get(place["key"] or "anybody", 0) + 1
    return f" ({', '.join(f'{key}: {count}' for key, count in counts.items())})" if counts else ""


def sparkline(values: list[float | None], width: int) -> str:
    """Return the last ``width`` values as bars, the largest the highest; None is a blank."""
    shown = values[-width:]
    most = max((v for v in shown if v), default=0.0)
    return "".join(" " if v is None else _SPARKS[round((len(_SPARKS) - 1) * v / most)] if most else _SPARKS[0]
                   for v in shown)


def _cpus(now: Document | None, width: int, room: int) -> list[Text]:
    """Return a line for each CPU: those that decode first, then those of the relay, then the busiest."""
    from rich.text import Text

    if now is None:
        return []
    ranked = sorted(now["cpus"], key=lambda c: ("decode" not in c["role"], not c["role"], -c["busy"]))
    shown = sorted(ranked[:room], key=lambda c: c["id"])
    head = Text.assemble(f"{'':<{width - 36}}", ("engine relay other" if width > 60 else "", "bold"))
    lines = [_cpu(c, max(10, width - 46)) for c in shown]
    if len(ranked) > len(shown) and lines:
        lines[-1] = Text(f"… and {len(ranked) - len(shown) + 1} more CPUs", style="dim")
    return [head, *lines]


def _cpu(c: Document, size: int) -> Text:
    from rich.text import Text

    marks = (("engine", "█", "blue"), ("relay", "▓", "cyan"), ("foreign", "░", "yellow"), ("steal", "×", "magenta"))
    bar = Text()
    for name, mark, colour in marks:
        bar.append(mark * min(round(c[name] * size), size - len(bar)), style=colour)
    bar.append(" " * (size - len(bar)))
    clock = f" {c['hertz'] / 1e9:.1f} GHz" if c["hertz"] else ""
    shares = f"{100 * c['engine']:5.0f}% {100 * c['relay']:4.0f}% {100 * c['foreign']:4.0f}%"
    role = " ".join(c["role"]).replace("housekeeping", "relay")
    return Text.assemble(f"CPU {c['id']:<3} ", bar, f" {shares} {role}{clock}")


def _streams(document: Document, width: int, room: int) -> list[Text]:
    from rich.text import Text

    columns = "{:<" + str(max(12, min(36, width - 58))) + "} {:<10} {:<9} {:>5} {:>8} {:>8} {:>8}"
    lines = [Text(columns.format("request", "key", "phase", "tok/s", "first ms", "silent s", "age s"), style="bold")]
    for s in document["streams"][: room - 1]:
        rate = "–" if s["events_per_s"] is None else f"{s['events_per_s']:.1f}"
        text = columns.format(s["id"][: max(12, min(36, width - 58))], (s["key"] or "–")[:10],
                              _phase(s), rate, _ms(s["ttft_ms"]), f"{s['silent_s']:.1f}",
                              f"{s['age_s']:.1f}")
        lines.append(Text(text, style="yellow" if _phase(s) == "client" else ""))
    return lines


def _phase(stream: Document) -> str:
    """Return where a request is; ``client`` where its own reader holds it up, ``queued 1`` for the next."""
    if stream["blocked_s"] >= 1:
        return "client"
    return f"queued {stream['turn']}" if stream["turn"] else str(stream["phase"])


def _notes(document: Document) -> list[Text]:
    from rich.text import Text

    colours = {"degraded": "yellow", "risk": "red"}
    ranked = sorted(document["notes"], key=lambda n: n["level"] not in colours)
    return [Text.assemble((f"{n['level']:<9}", colours.get(n["level"], "dim")), n["text"]) for n in ranked]


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _mib(value: int | None) -> str:
    return "–" if value is None else f"{value / (1 << 20):.0f} MiB"
