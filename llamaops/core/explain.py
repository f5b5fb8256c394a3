"""What limits the streams now, in words: rules from one short window of observations to sentences, pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["queued", "prefill", "decode"]

DELAY = 0.05
"""Share of their time that the engine's threads may wait for a CPU before it is worth a word."""
FOREIGN = 0.1
"""Share of a CPU that others may use before they are named."""
THROTTLED = 0.02
STEAL = 0.05
MEMORY_PRESSURE = 0.05
MAJOR_FAULTS_PER_S = 50.0
LITTLE_BYTES = 64 << 20
MIGRATIONS_PER_S = 50.0
BLOCKED_S = 1.0
HOT_CELSIUS, SLOWED = 80.0, 0.85
SILENT_S = 5.0
FELT_S = 0.1
"""A gap that a reader notices."""
_LESS_MEMORY = "free memory, or lower model.context, serve.slots or memory.prompt_cache_mib"


@dataclass(frozen=True, slots=True)
class Stream:
    """One request that is under way. ``events`` counts those with text; ``blocked_s``: the client takes nothing.

    ``turn``: 1 for the one that gets the next slot; None for one that has a slot.
    """

    id: str
    key: str | None
    endpoint: str
    phase: Phase
    age_s: float
    silent_s: float
    events: int = 0
    ttft_s: float | None = None
    blocked_s: float = 0.0
    prefill_s: float | None = None
    """From its slot to its first text, or until now; None while it waits for a slot."""
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """What one process outside llamaops took: ``share`` in CPUs, ``cpu`` where it ran last."""

    pid: int
    name: str
    cpu: int
    share: float


@dataclass(frozen=True, slots=True)
class CpuUse:
    """How one CPU was used, as shares of the window; what is neither the engine's nor the relay's is foreign."""

    id: int
    busy: float
    engine: float
    relay: float
    steal: float = 0.0
    decode: bool = False
    housekeeping: bool = False
    hertz: float | None = None

    @property
    def foreign(self) -> float:
        """The share that others used."""
        return max(0.0, self.busy - self.engine - self.relay)


@dataclass(frozen=True, slots=True)
class Gaps:
    """The times between events with text in the window: how many, how many over the SLO, quantiles and the longest."""

    count: int = 0
    late: int = 0
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    longest_s: float | None = None
    """The upper bound of the longest, as the histogram has it."""


@dataclass(frozen=True, slots=True)
class Window:
    """What was seen between two looks, ``seconds`` apart. Shares are of the window, times in seconds.

    Of the time in which the engine's busy threads wanted to run, ``delay`` is how much they waited for a CPU that
    others had, ``throttled`` how much a quota stopped them.
    """

    seconds: float
    in_flight: int = 0
    waiting: int = 0
    slots: int = 1
    itl_slo_s: float = 0.12
    cpus: tuple[CpuUse, ...] = ()
    engine_cpus: float = 0.0
    delay: float = 0.0
    threads: int = 0
    migrations_per_s: float = 0.0
    switches_per_s: float = 0.0
    major_faults_per_s: float = 0.0
    throttled: float = 0.0
    pressure: Mapping[str, float] = field(default_factory=dict)
    temperature_celsius: float | None = None
    thermal_throttles: int = 0
    """How often the decode CPUs were slowed for heat."""
    slowest_clock: float | None = None
    """The lowest clock of the decode CPUs, relative to what it can be."""
    rss_bytes: int | None = None
    available_bytes: int | None = None
    others: tuple[Use, ...] = ()
    streams: tuple[Stream, ...] = ()
    prompts: tuple[Stream, ...] = ()
    """Requests whose prompt was worked on in this window; some may have ended since."""
    gaps: Gaps = Gaps()
    events_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence. ``code`` is stable, ``cost`` orders (share of the time lost), ``fix`` says what to do about it."""

    code: str
    text: str
    fix: str | None = None
    cost: float = 0.0


def explain(window: Window) -> list[Finding]:
    """Say what holds the streams up, the costliest first; one sentence says so when nothing does."""
    if not window.in_flight and not window.waiting:
        return [Finding("idle", "nothing to do: no request is under way")]
    found = sorted((f for rule in _RULES for f in rule(window)), key=lambda f: -f.cost)
    return found or [_smooth(window)]


def _smooth(window: Window) -> Finding:
    if not any(s.phase == "decode" for s in window.streams):
        return Finding("prefill", "a prompt is being worked on")
    if not window.events_per_s:
        return Finding("smooth", "a stream has begun")
    return Finding("smooth", f"nothing holds it up: {window.events_per_s:.0f} tokens a second is what these CPUs give")


def _shared_cpus(window: Window) -> Iterator[Finding]:
    """Others on the CPUs that decode, and threads of ours that wait for them."""
    decode = [c for c in window.cpus if c.decode]
    crowded = [c for c in decode if c.foreign >= FOREIGN]
    if window.delay < DELAY:
        return
    lost = f"the engine's threads wait {_percent(window.delay)} of their time for a CPU"
    if not crowded:
        if window.engine_cpus > 0.9 * len(decode):
            yield Finding("own-threads", f"the engine has more to run than CPUs: {lost}",
                          "lower placement.threads, or give it more placement.cpus", window.delay)
        return
    worst = max(crowded, key=lambda c: c.foreign)
    culprit = max((u for u in window.others if u.cpu in {c.id for c in crowded} and u.share >= FOREIGN / 2),
                  key=lambda u: u.share, default=None)
    yield Finding("shared-cpu", f"{_sharers(worst, culprit)}: {lost}",
                  "move it away (taskset), or raise the engine: placement.nice, placement.cpus, CPUWeight= of its unit",
                  window.delay)


def _sharers(worst: CpuUse, culprit: Use | None) -> str:
    """Name who has the CPU: one process where it is mostly one, else that there are many."""
    if culprit is None:
        return f"CPU {worst.id} is shared with other processes, which take {_percent(worst.foreign)} of it"
    name = f"pid {culprit.pid} {culprit.name}"
    if culprit.share < worst.foreign / 3:
        return f"CPU {worst.id} is shared with many ({_percent(worst.foreign)} of it), most of all {name}"
    return f"CPU {culprit.cpu} is shared with {name}, which takes {_percent(culprit.share)} of a CPU"


def _throttled(window: Window) -> Iterator[Finding]:
    if window.throttled >= THROTTLED:
        yield Finding("quota", f"the cgroup's CPU quota stops the engine's threads for {_percent(window.throttled)} of "
                               "the time in which they want to run",
                      "raise the quota (CPUQuota=, --cpus, limits.cpu), or lower placement.threads to fit it",
                      window.throttled)


def _stolen(window: Window) -> Iterator[Finding]:
    steal = max((c.steal for c in window.cpus if c.decode), default=0.0)
    if steal >= STEAL:
        yield Finding("steal", f"the hypervisor gave {_percent(steal)} of a decode CPU to other machines",
                      "use a machine with dedicated CPUs", steal)


def _heat(window: Window) -> Iterator[Finding]:
    heat, clock, count = window.temperature_celsius, window.slowest_clock, window.thermal_throttles
    is_hot = heat is not None and heat >= HOT_CELSIUS
    at = f" at {heat:.0f} °C" if heat is not None else ""
    if clock is not None and clock <= SLOWED and (is_hot or count):
        yield Finding("heat", f"the decode CPUs run at {_percent(clock)} of their clock{at}",
                      "cool it, or use fewer placement.threads", 1 - clock)
    elif count:
        yield Finding("heat", f"the decode CPUs were slowed for heat {count} times in {window.seconds:.0f} s{at}",
                      "cool it, or use fewer placement.threads", 0.05)


def _memory(window: Window) -> Iterator[Finding]:
    waited, faults = window.pressure.get("memory", 0.0), window.major_faults_per_s
    if faults >= MAJOR_FAULTS_PER_S:
        yield Finding("memory", f"memory is short: the engine reads {faults:.0f} pages a second back from disk",
                      "free memory, lower model.context or serve.slots, or set memory.lock", max(waited, 0.5))
    elif waited >= MEMORY_PRESSURE:
        yield Finding("memory", f"memory is short: {_percent(waited)} of the time something waits for it",
                      _LESS_MEMORY, waited)
    elif window.available_bytes is not None and window.available_bytes < LITTLE_BYTES:
        yield Finding("memory", f"only {window.available_bytes >> 20} MiB of memory are left", _LESS_MEMORY, 0.04)


def _prefill(window: Window) -> Iterator[Finding]:
    """Another prompt's batches between the tokens of running streams."""
    prompts = [s for s in window.prompts if (s.prefill_s or 0.0) > min(FELT_S, window.itl_slo_s)]
    held = [s for s in window.streams if s.phase == "decode" and s.id not in {p.id for p in prompts}]
    if not prompts or not held or not _is_held_up(window, held):
        return
    prompt = max(prompts, key=lambda s: s.prefill_s or 0.0)
    longest = max([window.gaps.longest_s or 0.0, *(s.silent_s for s in held)])
    whose = f"the prompt of key {prompt.key!r}" if prompt.key else f"the prompt of request {prompt.id}"
    yield Finding("prefill-stall", f"{whose} stalled {_streams(len(held))} for up to {longest:.1f} s",
                  "lower slo.itl_ms (it sets the prompt batch, ubatch)", min(1.0, longest / window.seconds))


def _is_held_up(window: Window, held: list[Stream]) -> bool:
    """Tell whether gaps broke the SLO, or kept it and can still be felt: five times the usual and over 0.1 s."""
    usual, longest = window.gaps.p50_s, window.gaps.longest_s
    felt = usual is not None and longest is not None and longest >= max(5 * usual, FELT_S)
    return felt or window.gaps.late > 0 or any(s.silent_s > window.itl_slo_s for s in held)


def _slow_clients(window: Window) -> Iterator[Finding]:
    slow = [s for s in window.streams if s.blocked_s >= BLOCKED_S]
    if slow:
        worst = max(slow, key=lambda s: s.blocked_s)
        yield Finding("slow-client", f"the client of request {worst.id} has taken nothing for {worst.blocked_s:.1f} s "
                                     "(only its own stream waits)", "look at that client and the network to it",
                      min(1.0, worst.blocked_s / 10) * 0.1)


def _queue(window: Window) -> Iterator[Finding]:
    if window.waiting:
        waiting = "1 request waits" if window.waiting == 1 else f"{window.waiting} requests wait"
        slots = "the slot is" if window.slots == 1 else f"all {window.slots} slots are"
        yield Finding("queue", f"{waiting} because {slots} taken", "raise serve.slots if memory allows", 0.05)


def _migrations(window: Window) -> Iterator[Finding]:
    if window.migrations_per_s >= MIGRATIONS_PER_S:
        yield Finding("migrations", f"the engine's threads change CPU {window.migrations_per_s:.0f} times a second",
                      "pin them: placement.cpus", 0.03)


def _silent(window: Window) -> Iterator[Finding]:
    running = [s for s in window.streams if s.phase != "queued"]
    if running and window.engine_cpus < 0.02 and all(s.silent_s >= SILENT_S for s in running):
        silent = min(s.silent_s for s in running)
        yield Finding("no-work", f"the engine does nothing: no token for {silent:.0f} s and no CPU time",
                      "llamaops logs shows what it said last; supervise.stall_timeout_s restarts it", 1.0)


_RULES: tuple[Callable[[Window], Iterator[Finding]], ...] = (
    _shared_cpus, _throttled, _stolen, _heat, _memory, _prefill, _slow_clients, _queue, _migrations, _silent,
)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"


def bucket_gaps(bounds: tuple[float, ...], counts: list[int], slo_s: float) -> Gaps:
    """Return the gaps that a window added to a histogram: ``counts`` per bucket, the last one without upper bound.

    Quantiles are linear inside their bucket; those beyond the last bound are that bound.
    """
    total = sum(counts)
    if not total:
        return Gaps()
    edges = (*bounds, bounds[-1])
    late = sum(n for low, n in zip((0.0, *bounds), counts, strict=True) if low >= slo_s)
    longest = max(edge for edge, n in zip(edges, counts, strict=True) if n)
    p50, p95, p99 = (_bucket_quantile(edges, counts, q * total) for q in (0.5, 0.95, 0.99))
    return Gaps(total, late, p50, p95, p99, longest)


def _bucket_quantile(edges: tuple[float, ...], counts: list[int], rank: float) -> float:
    seen, low = 0, 0.0
    for edge, count in zip(edges, counts, strict=True):
        if count and seen + count >= rank:
            return min(edge, low + (edge - low) * (rank - seen) / count)  # rounding may go beyond
        seen, low = seen + count, edge
    return low
