"""What Prometheus sees of the requests. Names and units are promises (docs: operations); labels are bounded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from llamaops.serve.requestlog import Record

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

PREFIX = "llamaops_"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus 3 refuses a scrape without a content type it knows

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 60)
_ITL = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 0.8, 1.5, 3, 5)
_E2E = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600, 1800)
_QUEUE = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Histogram:
    """Counts by upper bound, in seconds. Cheaper per value than a client library's, which matters once per token."""

    __slots__ = ("_bounds", "_counts", "_help", "_name", "_sum")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._help, self._bounds = PREFIX + name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    @property
    def bounds(self) -> tuple[float, ...]:
        """The upper bounds of the buckets but the last, which has none."""
        return self._bounds

    def counts(self) -> list[int]:
        """Return how many values each bucket holds, the last without bound included."""
        return list(self._counts)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """Return the metric as Prometheus wants it: cumulative buckets."""
        from prometheus_client.core import HistogramMetricFamily

        total = 0
        buckets = []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


class Gauges:
    """Gauges read when scraped."""

    def __init__(self, sources: dict[str, tuple[str, Callable[[], float]]]) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        """Return each gauge with its value now."""
        from prometheus_client.core import GaugeMetricFamily

        for name, (text, read) in self._sources.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=read())


class RequestMetrics:
    """The metrics of the relay in a registry of their own; `add_collector` lets the engine's side join the page."""

    def __init__(self, in_flight: Callable[[], float], queue_depth: Callable[[], float]) -> None:
        from prometheus_client import CollectorRegistry, Counter

        self.registry: CollectorRegistry = CollectorRegistry(auto_describe=False)
        self.ttft = self._histogram("ttft_seconds", "From the request to its first event with text.", _TTFT)
        self.itl = self._histogram("itl_seconds", "Between two events with text of one stream.", _ITL)
        self.e2e = self._histogram("e2e_seconds", "From the request to the end of its answer.", _E2E)
        self.queue = self._histogram("queue_seconds", "From the request to its place in the engine.", _QUEUE)
        self._requests = Counter(PREFIX + "requests", "Requests by endpoint and how they ended.",
                                 ["endpoint", "outcome"], registry=self.registry)
        self._ended: dict[tuple[str, str], Counter] = {}
        self._prompt = Counter(PREFIX + "prompt_tokens", "Prompt tokens, as the engine counted them.",
                               registry=self.registry)
        self._output = Counter(PREFIX + "output_tokens", "Generated tokens, as the engine counted them.",
                               registry=self.registry)
        self._by_key = Counter(PREFIX + "key_tokens", "Tokens by the name of the API key, prompt and output apart.",
                               ["key", "kind"], registry=self.registry)
        self.add_collector(Gauges({
            "requests_in_flight": ("Requests in the engine.", in_flight),
            "queue_depth": ("Requests that wait for a slot.", queue_depth),
        }))

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, bounds)
        self.add_collector(histogram)
        return histogram

    def add_collector(self, collector: object) -> None:
        """Show what ``collector.collect()`` yields, at each scrape."""
        joined: Collector = collector  # type: ignore[assignment]  # duck-typed: prometheus_client asks only for collect()
        self.registry.register(joined)

    def count(self, record: Record) -> None:
        """Count a request that is over."""
        ended = (record.endpoint, record.outcome)
        if ended not in self._ended:
            self._ended[ended] = self._requests.labels(*ended)  # looking it up costs more than all the rest here
        self._ended[ended].inc()
        for histogram, value in ((self.queue, record.queue_s), (self.ttft, record.ttft_s), (self.e2e, record.e2e_s)):
            if value is not None:
                histogram.observe(value)
        for kind, tokens in (("prompt", record.prompt_tokens), ("output", record.output_tokens)):
            if record.key is not None and tokens:
                self._by_key.labels(record.key, kind).inc(tokens)
        if record.prompt_tokens:
            self._prompt.inc(record.prompt_tokens)
        if record.output_tokens:
            self._output.inc(record.output_tokens)

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return the scrape page and its content type: OpenMetrics where ``accept`` asks for it, else plain 0.0.4."""
        from prometheus_client import generate_latest
        from prometheus_client.openmetrics import exposition as openmetrics

        if "application/openmetrics-text" in accept:
            page: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]  # theirs has none
            return page, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), PLAIN
