"""What Prometheus sees of the engine, its CPUs and the plan. Names and units are promises (docs: operations)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamaops.core.engine_life import State, Status
from llamaops.serve.metrics import PREFIX
from llamaops.serve.sampler import Sampler

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

FRESH_S = 3.0
"""A scrape reads the kernel's files only when what is known is older: never while the sampler is looking itself."""
LEVELS = ("info", "degraded", "risk")


class Restarts:
    """Counts engine starts after the first, by the cause of the end before; subscribe it to the supervisor."""

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        self._generation = 0

    def __call__(self, status: Status) -> None:
        """Take a new status."""
        if status.generation > self._generation > 0:
            self.by_reason[status.cause.code if status.cause and status.failures else "reload"] += 1
        self._generation = max(self._generation, status.generation)


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not come from the kernel, read at each scrape."""

    state: Callable[[], State]
    note_levels: Callable[[], Mapping[str, int]]
    restarts: Restarts
    build: Mapping[str, str]


class EngineMetrics:
    """A collector for `RequestMetrics.add_collector`."""

    def __init__(self, sampler: Sampler, facts: Facts) -> None:
        self._sampler = sampler
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """Return every family; one whose source this machine lacks is left out."""
        self._sampler.look_now(at_most_every_s=FRESH_S)
        yield from self._life()
        yield from self._process()
        yield from self._machine()
        yield from self._relayed_counters()

    def _life(self) -> Iterator[Metric]:
        facts, now = self._facts, self._facts.state()
        yield _gauge("engine_state", "1 for the state that the engine is in.", "state",
                     {state.value: float(state is now) for state in State})
        yield _counter("engine_restarts", "Engines started after the first, by why.", "reason",
                       {"reload": 0, **facts.restarts.by_reason})
        levels = facts.note_levels()
        yield _gauge("plan_notes", "Notes of the plan and of what differs from it.", "level",
                     {level: float(levels.get(level, 0)) for level in LEVELS})
        from prometheus_client.core import GaugeMetricFamily

        build = GaugeMetricFamily(f"{PREFIX}build_info", "Versions; always 1.", labels=list(facts.build))
        build.add_metric(list(facts.build.values()), 1.0)
        yield build

    def _process(self) -> Iterator[Metric]:
        reading, totals = self._sampler.reading, self._sampler.totals
        if reading is None or reading.cpu_s is None:
            return
        if reading.rss_bytes is not None:
            yield _gauge("engine_rss_bytes", "Resident memory of the engine, mapped weights included.", None,
                         {"": float(reading.rss_bytes)})
        yield _counter("engine_cpu_seconds", "CPU time of the engine that runs now.", None, {"": reading.cpu_s})
        yield _counter("engine_context_switches", "Context switches of the engine's threads.", "kind",
                       {"voluntary": totals.voluntary, "involuntary": totals.involuntary})
        yield _counter("engine_cpu_migrations", "Moves of the engine's threads to another CPU.", None,
                       {"": totals.migrations})
        yield _gauge("engine_threads", "Threads of the engine by scheduling policy.", "policy",
                     Counter(t.policy for t in reading.engine.values()))

    def _machine(self) -> Iterator[Metric]:
        reading = self._sampler.reading
        if reading is None:
            return
        yield _gauge("cpu_utilization_ratio", "Share of the time that a CPU works, whoever for.", "cpu",
                     {str(c.id): c.busy for c in self._sampler.cpu_use})
        if reading.hertz:
            yield _gauge("cpu_frequency_hertz", "Clock of the CPUs that decode.", "cpu",
                         {str(cpu): value for cpu, value in reading.hertz.items()})
        if reading.thermal_throttles:
            yield _counter("cpu_thermal_throttles", "How often the decode CPUs were slowed for heat since boot.", "cpu",
                           {str(cpu): count for cpu, count in reading.thermal_throttles.items()})
        if reading.throttled_s is not None:
            yield _counter("cpu_throttled_seconds", "Time for which the cgroup's CPU quota stopped it.", None,
                           {"": reading.throttled_s})
        if reading.pressure:
            yield _gauge("pressure_ratio", "Share of the last 10 s in which a task waited for it.", "resource",
                         reading.pressure)
        if reading.available_bytes is not None:
            yield _gauge("memory_available_bytes", "What the machine or the nearest cgroup limit still gives.", None,
                         {"": float(reading.available_bytes)})
        if reading.temperature_celsius is not None:
            yield _gauge("temperature_celsius", "The hottest CPU sensor.", None, {"": reading.temperature_celsius})

    def _relayed_counters(self) -> Iterator[Metric]:
        for name, value in self._sampler.engine_counters.items():
            bare = name.removesuffix("_total")
            yield _counter(f"engine_{bare}", f"The engine's own counter llamacpp:{name}.", None, {"": value})


def _gauge(name: str, text: str, label: str | None, values: Mapping[str, float]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for key, value in values.items():
        family.add_metric([key] if label else [], float(value))
    return family


def _counter(name: str, text: str, label: str | None, values: Mapping[str, float]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for key, value in values.items():
        family.add_metric([key] if label else [], float(value))
    return family
