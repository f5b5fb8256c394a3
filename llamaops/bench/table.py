"""Benches as a terminal shows them: at most 80 columns, units on every figure."""

from __future__ import annotations

import textwrap

from llamaops.bench.compare import Comparison
from llamaops.bench.run import Measured
from llamaops.core.comparison import FALSE_ALARMS, Row
from llamaops.core.figures import Figures
from llamaops.core.stats import Summary
from llamaops.core.workload import Workload

_HEAD = f"{'milliseconds':<22}{'p50':>9}{'p90':>9}{'p95':>9}{'p99':>9}{'max':>9}{'std':>9}"


def run_text(measured: Measured) -> str:
    """Return one run as a page."""
    conditions, figures = measured.conditions, measured.figures
    noise = f"noise {conditions.noise} (in {_WHERE[conditions.noise_where]})" if conditions.noise else "no noise"
    model = f", model {measured.model.rpartition('/')[2]}" if measured.model else ""
    lines = [_wrapped(measured.target.label + model), _wrapped(f"{workload_text(conditions.workload)}, {noise}")]
    lines += ["", _HEAD]
    lines += [_row(name, summary) for name, summary in _latencies(figures) if summary is not None]
    lines += ["", *_facts(measured)]
    lines += [_wrapped(f"INVALID: {text}") for text in measured.invalid]
    lines += [_wrapped(f"warning: {text}") for text in measured.warnings]
    return "\n".join(lines)


_WHERE = {"session": "its own session", "same": "our session", "cgroup": "its own cgroup"}


def workload_text(workload: Workload) -> str:
    """Return a workload in a line."""
    loop = f"{workload.rate:g} requests/s arriving" if workload.rate else _plural(workload.concurrency, "stream")
    end = _plural(workload.requests, "request") if workload.requests is not None else f"{workload.duration_s:g} s"
    return f"{loop}, {end}, prompts of {workload.prompt_tokens} and answers of {workload.max_tokens} tokens"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80, subsequent_indent="   ", break_on_hyphens=False)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _latencies(figures: Figures) -> list[tuple[str, Summary | None]]:
    return [("TTFT first text", figures.ttft), ("ITL between texts", figures.itl), ("TPOT per token", figures.tpot),
            ("E2E whole answer", figures.e2e), ("engine: prompt", figures.engine_prompt),
            ("engine: per token", figures.engine_token)]


def _row(name: str, s: Summary) -> str:
    return f"{name:<22}" + "".join(f"{number(v):>9}" for v in (s.p50, s.p90, s.p95, s.p99, s.max, s.std))


def number(value: float) -> str:
    """Return a figure with as many digits as it deserves: three or four."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _facts(measured: Measured) -> list[str]:
    figures, system, client = measured.figures, measured.system, measured.client
    slo = measured.conditions.slo
    rows = [("output", f"{number(figures.output_tokens_per_s)} tokens/s, {number(figures.requests_per_s)} requests/s"),
            ("goodput", f"{figures.good} of {figures.sent} requests ({figures.good_ratio:.0%}) within TTFT "
                        f"{slo.ttft_ms:g} ms and ITL {slo.itl_ms:g} ms")]
    if figures.jitter_ms is not None and figures.longest_stall_ms is not None:
        rows.append(("smoothness", f"jitter {number(figures.jitter_ms)} ms, longest stall "
                                   f"{number(figures.longest_stall_ms)} ms"))
    rows += [(f"{count} failed", example[:56]) for count, example in _failures(figures)]
    rows.append(("target used", _target_use(measured)))
    rows.append(("machine", _machine(system.cpu_ratio, system.frequency_mhz, system.temperature_c, system.joules)))
    waited = f", {client.waited_s * 1e3:.0f} ms waiting for one" if client.waited_s is not None else ""
    rows.append(("generator", f"{client.priority}, {client.cpu_s * 1e3:.0f} ms CPU{waited}"))
    return [f"{name:<14}{text}" for name, text in rows if text]


def _failures(figures: Figures) -> list[tuple[int, str]]:
    return [(count, figures.failure_examples[kind]) for kind, count in figures.failures.items()]


def _target_use(measured: Measured) -> str:
    system = measured.system
    parts = [f"{system.target_cpus:.2f} CPUs" if system.target_cpus is not None else "",
             f"{system.rss_peak_bytes / 2**20:.0f} MiB" if system.rss_peak_bytes else "",
             f"{system.involuntary_switches} preemptions" if system.involuntary_switches is not None else "",
             f"{system.migrations} migrations" if system.migrations is not None else ""]
    return ", ".join(filter(None, parts))


def _machine(cpu: float | None, mhz: float | None, celsius: float | None, joules: float | None) -> str:
    parts = [f"{cpu:.0%} busy" if cpu is not None else "", f"{mhz:.0f} MHz" if mhz else "",
             f"{celsius:.0f} °C" if celsius is not None else "", f"{joules:.0f} J" if joules else ""]
    return ", ".join(filter(None, parts))


_VERSUS = f"{'median of runs':<16}{'A':>10}{'':2}{'other':>10}{'':2}{'ratio':>7}{'':2}{'interval':<17}{'verdict'}"


def comparison_text(comparison: Comparison) -> str:
    """Return a comparison as a page: the targets by letter, then each against A."""
    runs = comparison.runs[0]
    lines = [_wrapped(f"{chr(65 + i)}  {target.label}") for i, target in enumerate(comparison.targets)]
    conditions = runs[0].conditions
    noise = f", noise {conditions.noise} (in {_WHERE[conditions.noise_where]})" if conditions.noise else ""
    lines.append(_wrapped(f"{len(runs)} interleaved runs each: {workload_text(conditions.workload)}{noise}"))
    for versus in comparison.results:
        letter = chr(65 + versus.target)
        lines += ["", _VERSUS.replace("other", f"{letter:>5}"), *(_versus_row(row, letter) for row in versus.rows)]
    lines += ["", f"An interval of all ratios {1 - FALSE_ALARMS:.0%} sure together; no verdict where it holds 1."]
    return "\n".join([*lines, *(_wrapped(f"warning: {text}") for text in comparison.warnings)])


def _versus_row(row: Row, letter: str) -> str:
    values = "".join(f"{_with_unit(v, row.metric.unit):>10}  " for v in (row.base, row.other))
    if row.ratio is None:
        return f"{row.metric.name:<16}{values}{'–':>7}"
    r = row.ratio
    interval = f"{r.low:.3f} – {r.high:.3f}"
    said = f"{letter} is {row.verdict}" if row.verdict else "none"
    return f"{row.metric.name:<16}{values}{r.ratio:>7.3f}  {interval:<17}{said}"


def _with_unit(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{number(value)} {unit}"
