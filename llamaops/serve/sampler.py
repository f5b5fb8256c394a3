"""Looks at engine, relay and CPUs while there is something to see, and makes windows and metrics of it.

With requests in flight it looks every two seconds, every second while somebody watches, else only when scraped. It is
the engine's only scraper: each scrape of the engine's own /metrics resets its gauges, so only counters are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from llamaops.core.cpuset import CpuSet
from llamaops.core.explain import CpuUse, Gaps, Stream, Use, Window, bucket_gaps, explain
from llamaops.serve.engine_client import EngineGone, connect, request_head
from llamaops.serve.readings import ProcessReading, Reading, ThreadReading, read, read_processes
from llamaops.serve.traffic import Backend, Endpoint

WATCHED_FOR_S = 10.0
BUSY_EVERY_S, WATCHED_EVERY_S = 2.0, 1.0
SCRAPE_EVERY_S = 5.0
SCRAPE_TIMEOUT_S = 3.0
GAPS_OVER_S = 10.0
"""Quantiles are of the gaps of so many seconds: one window holds too few."""
_COUNTER = re.compile(r"^llamacpp:([a-zA-Z0-9_]+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
_BUSY_THREAD = 0.05
"""From this share of the window on, running or waiting, a thread counts as computing."""


class Relayed(Protocol):
    """The relay's side as the sampler sees it."""

    def streams(self, now: float) -> list[Stream]:
        """Return the requests that are under way."""

    def ended(self, since: float) -> list[tuple[float, Stream]]:
        """Return the requests that ended since, each with when."""

    def gap_counts(self) -> tuple[tuple[float, ...], list[int]]:
        """Return the bounds and counts of the gaps since the start."""

    def waiting(self) -> int:
        """Return how many requests wait for a slot."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the plan says that matters here."""

    decode: CpuSet
    housekeeping: CpuSet
    slots: int
    itl_slo_s: float


@dataclass(slots=True)
class Totals:
    """Counters that only grow, over threads that come and go and engines that are replaced."""

    voluntary: int = 0
    involuntary: int = 0
    migrations: int = 0

    def add(self, before: Mapping[int, ThreadReading], after: Mapping[int, ThreadReading]) -> None:
        """Count what the threads have done between two readings of one engine."""
        for tid, new in after.items():
            old = before.get(tid)
            self.voluntary += max(0, new.voluntary - (old.voluntary if old else 0))
            self.involuntary += max(0, new.involuntary - (old.involuntary if old else 0))
            self.migrations += max(0, new.migrations - (old.migrations if old else 0))


class Sampler:
    """Holds the latest reading, window and engine counters of one instance. Used from one event loop."""

    def __init__(self, backend: Backend, engine_pid: Callable[[], int | None], relayed: Relayed,
                 place: Callable[[], Place], root: Path = Path("/")) -> None:
        self._backend, self._engine_pid, self._relayed, self._place = backend, engine_pid, relayed, place
        self._root = root
        self._watched_until = 0.0
        self._gaps: deque[tuple[float, list[int]]] = deque(maxlen=64)
        self._events: dict[str, int] = {}
        self._processes: tuple[float, dict[int, ProcessReading]] = (0.0, {})
        self._scraped_at = self._asked_at = 0.0
        self._look = asyncio.Lock()
        self.reading: Reading | None = None
        self.window: Window | None = None
        self.totals = Totals()
        self.cpu_use: tuple[CpuUse, ...] = ()
        self.engine_counters: dict[str, float] = {}
        self.rates: dict[str, float] = {}
        """Events with text a second, by request id."""

    def watch(self) -> None:
        """Look every second for a while: somebody reads it."""
        self._watched_until = time.monotonic() + WATCHED_FOR_S

    def _due_s(self) -> float | None:
        """Return in how long to look again, None while idle. A request that came and went in between counts, too."""
        now, before = time.monotonic(), self._asked_at
        self._asked_at = now
        if now < self._watched_until:
            return WATCHED_EVERY_S
        return BUSY_EVERY_S if self._relayed.streams(now) or self._relayed.ended(before) else None

    async def run(self) -> None:
        """Look as long as there is something to see; runs until cancelled."""
        loop = asyncio.get_running_loop()
        scraping: asyncio.Task[None] | None = None
        was_due = True
        while True:
            due_s = self._due_s()
            if due_s is not None or was_due:
                await self.look(at_most_every_s=0.5)
                if (scraping is None or scraping.done()) and (
                        due_s is None or time.monotonic() - self._scraped_at > SCRAPE_EVERY_S):
                    scraping = loop.create_task(self._scrape())
            was_due = due_s is not None
            await asyncio.sleep(due_s or WATCHED_EVERY_S)

    async def look(self, at_most_every_s: float = 0.0) -> None:
        """Take a reading in a thread, so that no stream waits for it, and make a window of it and the one before."""
        async with self._look:
            if self.reading and time.monotonic() - self.reading.at < at_most_every_s:
                return
            pid = self._engine_pid()
            place = self._place()
            self._take(await asyncio.to_thread(read, pid, place.decode, self._root), place)
            if self.window and _worth_naming(self.window):
                await self._name_others()
            elif self.window and self.window.others:
                self.window = replace(self.window, others=())

    def look_now(self, at_most_every_s: float) -> None:
        """Take a reading here and now (some milliseconds), unless the last one is young enough."""
        if self._look.locked() or (self.reading and time.monotonic() - self.reading.at < at_most_every_s):
            return
        place = self._place()
        self._take(read(self._engine_pid(), place.decode, self._root), place)

    # --- windows

    def _take(self, new: Reading, place: Place) -> None:
        old, self.reading = self.reading, new
        same = old is not None and old.pid == new.pid
        self.totals.add(old.engine if old and same else {}, new.engine)
        streams = self._relayed.streams(new.at)
        prompts = _prompts(streams, self._relayed.ended(old.at) if old else [], new.at, new.at - old.at if old else 0.0)
        gaps = self._gaps_of_late(new.at, place.itl_slo_s)
        if old is None or new.at - old.at < 0.05:
            return
        self.cpu_use = _cpu_use(old, new, place)
        self.window = _window(
            old if same else new, new, place, self.cpu_use, streams, prompts, gaps, waiting=self._relayed.waiting(),
            events_per_s=self._count_events(streams, new.at - old.at),
            others=self.window.others if self.window else (),
        )

    def _count_events(self, streams: list[Stream], seconds: float) -> float:
        self.rates = {s.id: max(0, s.events - self._events.get(s.id, 0)) / seconds for s in streams}
        self._events = {s.id: s.events for s in streams}
        return sum(self.rates.values())

    def _gaps_of_late(self, now: float, slo_s: float) -> Gaps:
        bounds, counts = self._relayed.gap_counts()
        self._gaps.append((now, list(counts)))
        while len(self._gaps) > 2 and now - self._gaps[1][0] > GAPS_OVER_S:
            self._gaps.popleft()
        return bucket_gaps(bounds, [n - o for n, o in zip(counts, self._gaps[0][1], strict=True)], slo_s)

    async def _name_others(self) -> None:
        assert self.reading is not None and self.window is not None
        ours = {os.getpid(), self.reading.pid or 0}
        before, self._processes = self._processes, (
            time.monotonic(), await asyncio.to_thread(read_processes, self._root, ours))
        seconds = self._processes[0] - before[0]
        if seconds < 3 * BUSY_EVERY_S:
            self.window = replace(self.window, others=_uses(before[1], self._processes[1], seconds))

    # --- the engine's own metrics

    async def _scrape(self) -> None:
        self._scraped_at = time.monotonic()
        endpoint = self._backend.endpoint()
        if isinstance(endpoint, Endpoint):
            with contextlib.suppress(EngineGone, TimeoutError):
                async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                    self.engine_counters = counters(await _get_metrics(endpoint)) or self.engine_counters


async def _get_metrics(endpoint: Endpoint) -> bytes:
    exchange = await connect(endpoint)
    try:
        exchange.write(request_head(b"GET", b"/metrics", [(b"host", b"engine"), (b"connection", b"close")]))
        head = await exchange.head()
        body = b""
        while (chunk := await exchange.read()) is not None:
            body += chunk
        return body if head is not None and head.status == 200 else b""
    finally:
        exchange.close()


def counters(page: bytes) -> dict[str, float]:
    """Return the counters of llama-server's page that are one series each, by their name without ``llamacpp:``."""
    return {name: float(value) for name, value in _COUNTER.findall(page.decode(errors="replace"))
            if name.endswith("_total") and not name.endswith("_per_pos_total")}


def _window(old: Reading, new: Reading, place: Place, cpus: tuple[CpuUse, ...], streams: list[Stream],
            prompts: list[Stream], gaps: Gaps, *, waiting: int, events_per_s: float, others: tuple[Use, ...]) -> Window:
    seconds = max(new.at - old.at, 1e-3)
    steps = [(t, old.engine[t.tid]) for t in new.engine.values() if t.tid in old.engine]
    run, wait = _computing(steps, seconds)
    stopped = _stopped(old, new, wait)
    return Window(
        seconds=seconds, in_flight=sum(s.phase != "queued" for s in streams), waiting=waiting, slots=place.slots,
        itl_slo_s=place.itl_slo_s, cpus=cpus, engine_cpus=sum(n.run_s - o.run_s for n, o in steps) / seconds,
        delay=(wait - stopped) / (run + wait) if run + wait else 0.0, threads=len(new.engine),
        migrations_per_s=sum(n.migrations - o.migrations for n, o in steps) / seconds,
        switches_per_s=sum(n.voluntary + n.involuntary - o.voluntary - o.involuntary for n, o in steps) / seconds,
        major_faults_per_s=max(0, new.major_faults - old.major_faults) / seconds,
        throttled=stopped / (run + wait) if run + wait else 0.0, pressure=new.pressure,
        thermal_throttles=_thermal_throttles(old, new),
        temperature_celsius=new.temperature_celsius, slowest_clock=new.slowest_clock, rss_bytes=new.rss_bytes,
        available_bytes=new.available_bytes, others=others, streams=tuple(streams), prompts=tuple(prompts),
        gaps=gaps, events_per_s=events_per_s,
    )


def _stopped(old: Reading, new: Reading, wait: float) -> float:
    """Return how much of the threads' waiting was a quota's doing: to the scheduler it looks like any other."""
    if new.throttled_s is None or old.throttled_s is None:
        return 0.0
    return min(wait, max(0.0, new.throttled_s - old.throttled_s))


def _thermal_throttles(old: Reading, new: Reading) -> int:
    return sum(max(0, count - old.thermal_throttles.get(cpu, count)) for cpu, count in new.thermal_throttles.items())


def _prompts(streams: list[Stream], ended: list[tuple[float, Stream]], now: float, seconds: float) -> list[Stream]:
    """Return the requests whose prompt was worked on in the last ``seconds``."""
    seen = [(now, s) for s in streams] + ended
    return [s for at, s in seen
            if s.phase == "prefill" or (s.ttft_s is not None and now - at + s.age_s - s.ttft_s < seconds)]


def _computing(steps: list[tuple[ThreadReading, ThreadReading]], seconds: float) -> tuple[float, float]:
    """Return what the computing threads ran and waited, seconds; the rest hardly want the CPU and would blur it."""
    deltas = [(new.run_s - old.run_s, new.wait_s - old.wait_s) for new, old in steps]
    busy = [(run, wait) for run, wait in deltas if run + wait > _BUSY_THREAD * seconds]
    return sum(run for run, _ in busy), sum(wait for _, wait in busy)


def _cpu_use(old: Reading, new: Reading, place: Place) -> tuple[CpuUse, ...]:
    seconds = new.at - old.at
    engine = _by_cpu(old.engine if old.pid == new.pid else new.engine, new.engine)
    relay = _by_cpu(old.relay, new.relay)
    return tuple(
        CpuUse(cpu, busy=min(1.0, max(0.0, times.busy_s - old.cpus[cpu].busy_s) / seconds),
               engine=min(1.0, engine.get(cpu, 0.0) / seconds), relay=min(1.0, relay.get(cpu, 0.0) / seconds),
               steal=max(0.0, times.steal_s - old.cpus[cpu].steal_s) / seconds, decode=cpu in place.decode,
               housekeeping=cpu in place.housekeeping, hertz=new.hertz.get(cpu))
        for cpu, times in sorted(new.cpus.items()) if cpu in old.cpus
    )


def _by_cpu(old: Mapping[int, ThreadReading], new: Mapping[int, ThreadReading]) -> dict[int, float]:
    """Return the seconds that threads ran, by the CPU they were on last."""
    found: dict[int, float] = {}
    for tid, thread in new.items():
        ran = thread.run_s - (old[tid].run_s if tid in old else 0.0)
        found[thread.cpu] = found.get(thread.cpu, 0.0) + max(0.0, ran)
    return found


def _worth_naming(window: Window) -> bool:
    return bool(window.in_flight) and any(c.decode and c.foreign > 0.1 for c in window.cpus)


def _uses(old: Mapping[int, ProcessReading], new: Mapping[int, ProcessReading], seconds: float) -> tuple[Use, ...]:
    """Return who used most, the processes born in between included."""
    found = [Use(pid, p.name, p.cpu, (p.cpu_s - (old[pid].cpu_s if pid in old else 0.0)) / seconds)
             for pid, p in new.items()]
    return tuple(sorted((u for u in found if u.share > 0.03), key=lambda u: -u.share)[:5])


def picture(sampler: Sampler) -> dict[str, Any] | None:
    """Return the latest window as JSON-able data for the page, ``top`` and ``status``; None before there is one."""
    window = sampler.window
    if window is None:
        return None
    return {
        "seconds": round(window.seconds, 3),
        "age_s": round(time.monotonic() - sampler.reading.at, 3) if sampler.reading else None,
        "explain": [{"code": f.code, "text": f.text, "fix": f.fix} for f in explain(window)],
        "events_per_s": round(window.events_per_s, 2),
        "itl_ms": {"count": window.gaps.count, "p50": _ms(window.gaps.p50_s), "p95": _ms(window.gaps.p95_s),
                   "p99": _ms(window.gaps.p99_s), "late": window.gaps.late},
        "cpus": [_cpu_json(c) for c in window.cpus],
        "engine": {"cpus": round(window.engine_cpus, 3), "delay": round(window.delay, 4), "threads": window.threads,
                   "rss_bytes": window.rss_bytes, "switches_per_s": round(window.switches_per_s, 1),
                   "migrations_per_s": round(window.migrations_per_s, 1),
                   "major_faults_per_s": round(window.major_faults_per_s, 1)},
        "throttled": round(window.throttled, 4), "pressure": dict(window.pressure),
        "temperature_celsius": window.temperature_celsius, "thermal_throttles": window.thermal_throttles,
        "others": [{"pid": u.pid, "name": u.name, "cpu": u.cpu, "share": round(u.share, 3)} for u in window.others],
    }


def _cpu_json(c: CpuUse) -> dict[str, Any]:
    role = [name for name, is_so in (("decode", c.decode), ("housekeeping", c.housekeeping)) if is_so]
    return {"id": c.id, "busy": round(c.busy, 3), "engine": round(c.engine, 3), "relay": round(c.relay, 3),
            "foreign": round(c.foreign, 3), "steal": round(c.steal, 3), "hertz": c.hertz, "role": role}


def stream_json(stream: Stream, rate: float | None) -> dict[str, Any]:
    """Return one request under way as JSON-able data."""
    return {"id": stream.id, "key": stream.key, "endpoint": stream.endpoint, "phase": stream.phase,
            "age_s": round(stream.age_s, 2), "silent_s": round(stream.silent_s, 2), "events": stream.events,
            "events_per_s": None if rate is None else round(rate, 1), "ttft_ms": _ms(stream.ttft_s),
            "blocked_s": round(stream.blocked_s, 2), "turn": stream.turn}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
