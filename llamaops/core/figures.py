"""From the timings of a run to its figures: latencies, smoothness, throughput, goodput, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llamaops.core.stats import Summary, jitter, quantile, summarize
from llamaops.core.timing import Timing


@dataclass(frozen=True, slots=True)
class Slo:
    """The latency budget that goodput counts against, milliseconds."""

    ttft_ms: float = 800.0
    itl_ms: float = 120.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run; a Summary is in milliseconds and None where nothing was measured.

    ``itl`` is the gap between events with text, ``tpot`` the stream's time over the tokens the server counted.
    ``jitter_ms`` is the mean difference of successive gaps, ``burst_ratio`` the share of gaps of under 10 % of the mean
    gap: text that came in lumps. ``good`` are requests with TTFT and the 99th percentile of their gaps inside the SLO.
    ``counted`` is False when a server gave no token counts and events were counted instead.
    """

    sent: int
    ok: int
    good: int
    failures: dict[str, int]
    failure_examples: dict[str, str]
    window_s: float
    prompt_tokens: int
    output_tokens: int
    counted: bool
    ttft: Summary | None
    itl: Summary | None
    tpot: Summary | None
    e2e: Summary | None
    connect: Summary | None
    late: Summary | None
    jitter_ms: float | None
    longest_stall_ms: float | None
    burst_ratio: float | None
    engine_prompt: Summary | None
    engine_token: Summary | None

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens generated a second over the window, all streams together."""
        return self.output_tokens / self.window_s if self.window_s else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens taken in a second over the window."""
        return self.prompt_tokens / self.window_s if self.window_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Requests answered well a second."""
        return self.ok / self.window_s if self.window_s else 0.0

    @property
    def goodput_per_s(self) -> float:
        """Requests answered inside the SLO a second."""
        return self.good / self.window_s if self.window_s else 0.0

    @property
    def good_ratio(self) -> float:
        """Share of all requests sent that were answered inside the SLO."""
        return self.good / self.sent if self.sent else 0.0


def measure(timings: Sequence[Timing], window_s: float, slo: Slo) -> Figures:
    """Return the figures of a run. Failed requests count as sent and as failures, and nowhere else."""
    ok = [t for t in timings if t.failure is None]
    failed = [t.failure for t in timings if t.failure is not None]
    gaps = [t.gaps for t in ok]
    flat = [gap for row in gaps for gap in row]
    mean_gap = sum(flat) / len(flat) if flat else 0.0
    return Figures(
        sent=len(timings), ok=len(ok), good=sum(_is_good(t, slo) for t in ok),
        failures=dict(Counter(kind(text) for text in failed).most_common()),
        failure_examples={kind(text): text for text in reversed(failed)},
        window_s=window_s,
        prompt_tokens=sum(t.prompt_tokens or 0 for t in ok),
        output_tokens=sum(len(t.text_times) if t.output_tokens is None else t.output_tokens for t in ok),
        counted=all(t.output_tokens is not None for t in ok),
        ttft=_ms([t.ttft for t in ok]), itl=_ms(flat), tpot=_ms([t.tpot for t in ok]), e2e=_ms([t.e2e for t in ok]),
        connect=_ms([t.connected - t.begun for t in ok if t.connected is not None]),
        late=_ms([t.begun - t.due for t in timings]),
        jitter_ms=1e3 * sum(jitter(row) for row in gaps) / len(gaps) if flat else None,
        longest_stall_ms=1e3 * max(flat) if flat else None,
        burst_ratio=sum(gap < mean_gap / 10 for gap in flat) / len(flat) if flat else None,
        engine_prompt=summarize(_engine(ok, "prompt_ms")),
        engine_token=summarize(_engine(ok, "predicted_per_token_ms")),
    )


def kind(failure: str) -> str:
    """Return the kind of a failure: what stands before its colon."""
    return failure.partition(":")[0]


def _is_good(timing: Timing, slo: Slo) -> bool:
    gaps = sorted(timing.gaps)
    return (timing.ttft or 0.0) * 1e3 <= slo.ttft_ms and (not gaps or quantile(gaps, 0.99) * 1e3 <= slo.itl_ms)


def _engine(timings: Sequence[Timing], name: str) -> list[float]:
    return [t.engine[name] for t in timings if name in t.engine]


def _ms(seconds: Sequence[float | None]) -> Summary | None:
    return summarize([1e3 * s for s in seconds if s is not None])


def document(figures: Figures) -> dict[str, Any]:
    """Return the figures as the ``figures`` object of a `llamaops-bench` document, rates included."""
    rates = ("output_tokens_per_s", "prompt_tokens_per_s", "requests_per_s", "goodput_per_s", "good_ratio")
    return _renamed(asdict(figures)) | {name: getattr(figures, name) for name in rates}


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Give the summaries their unit: ``ttft`` becomes ``ttft_ms``."""
    return {f"{k}_ms" if k in _SUMMARIES else k: v for k, v in values.items()}


_SUMMARIES = ("ttft", "itl", "tpot", "e2e", "connect", "late", "engine_prompt", "engine_token")
