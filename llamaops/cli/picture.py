"""What ``llamaops top`` draws: a status document as lines of text that fit a terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

Document = dict[str, Any]
_SPARKS = "▁▂▃▄▅▆▇█"


def picture(document: Document, past: list[Document], height: int, width: int, message: str = "",
            chosen: str | None = None) -> Group:
    """Return the whole picture, cut to ``height`` lines; ``past`` are the documents so far, this one last.

    ``chosen``: the id of the request to be marked.
    """
    from rich.console import Group
    from rich.text import Text

    now = document.get("now")
    lines = [_head(document), *_why(now, width, max(2, height // 6)), *_figures(document, past, width)]
    rest = height - len(lines) - (1 if message else 0)
    cpus = _cpus(now, width, max(1, rest // 3))
    streams = _streams(document, width, max(2, rest - len(cpus) - 1), chosen)
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

    def sentences(with_fix: bool) -> list[Text]:
        lines = []
        for finding in now["explain"]:
            advice = f" → {finding['fix']}" if with_fix and finding["fix"] else ""
            first, *more = textwrap.wrap(finding["text"] + advice, width - 2)
            lines.append(Text.assemble(("● ", "green" if finding["code"] in calm else "yellow"), first))
            lines += [Text(f"  {line}") for line in more]
        return lines

    advised = sentences(with_fix=True)
    return advised if len(advised) <= room else sentences(with_fix=False)[:room]


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


def _streams(document: Document, width: int, room: int, chosen: str | None) -> list[Text]:
    from rich.text import Text

    size = max(12, min(36, width - 60))
    columns = "{:<" + str(size + 2) + "} {:<10} {:<9} {:>5} {:>8} {:>8} {:>8}"
    lines = [Text(columns.format("  request", "key", "phase", "tok/s", "first ms", "silent s", "age s"), style="bold")]
    for s in document["streams"][: room - 1]:
        rate = "–" if s["events_per_s"] is None else f"{s['events_per_s']:.1f}"
        # The ends differ: ids that are made here begin alike.
        name = s["id"] if len(s["id"]) <= size else f"…{s['id'][1 - size:]}"
        text = columns.format(f"{'▸' if s['id'] == chosen else ' '} {name}", (s["key"] or "–")[:10],
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
