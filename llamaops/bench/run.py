"""One bench: a target is put under load, with or without noise, and everything about it ends up in one document."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop

from llamaops import __version__
from llamaops.bench.load import LoadRun, Server, run_load
from llamaops.bench.noise import Noise, Where, making_noise
from llamaops.bench.priority import Client, raised_priority
from llamaops.bench.sampling import Sampler, SystemUse
from llamaops.bench.targets import Live, Target, planned, serving
from llamaops.core.figures import Figures, Slo, document, measure
from llamaops.core.timing import Timing
from llamaops.core.workload import Workload

SCHEMA = "llamaops-bench/1"
WAIT_LIMIT = 0.02


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a target is measured under. ``server`` supplies the API, key and model of the requests."""

    workload: Workload
    slo: Slo
    noise: Noise
    noise_where: Where
    server: Server
    urgent: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one target, with what the machine and the generator did meanwhile."""

    target: Target
    conditions: Conditions
    began: datetime
    figures: Figures
    timings: tuple[Timing, ...]
    origin: float
    system: SystemUse
    client: Client
    model: str | None
    plan: dict[str, Any] | None = None
    invalid: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def bench(target: Target, conditions: Conditions, on_done: Callable[[int], None] = lambda _count: None) -> Measured:
    """Start a target where it has to be started, measure it once, and stop what was started."""
    with serving(target, conditions.server) as live:
        return measure_live(target, live, conditions, on_done)


def measure_live(target: Target, live: Live, conditions: Conditions,
                 on_done: Callable[[int], None] = lambda _count: None) -> Measured:
    """Measure a target that serves, under the noise of the conditions."""
    began, plan = datetime.now(UTC), planned(target)
    with making_noise(conditions.noise, conditions.noise_where):
        sampler = Sampler(live.pid)
        with raised_priority(wanted=conditions.urgent) as client:
            run = _run(live.server, conditions.workload, sampler, on_done)
        system = sampler.finish()
    figures = measure(run.timings, run.window_s, conditions.slo)
    return Measured(target, conditions, began, figures, run.timings, run.began, system, client, live.server.model, plan,
                    system.invalid(), _warnings(figures, system, client))


def _run(server: Server, workload: Workload, sampler: Sampler, on_done: Callable[[int], None]) -> LoadRun:
    async def run() -> LoadRun:
        watch = asyncio.create_task(_look(sampler))
        try:
            return await run_load(server, workload, on_done)
        finally:
            watch.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


async def _look(sampler: Sampler) -> None:
    while True:
        await asyncio.sleep(1)
        sampler.look()


def _warnings(figures: Figures, system: SystemUse, client: Client) -> list[str]:
    out = system.warnings(figures.window_s)
    if client.waited_s and client.waited_s > WAIT_LIMIT * figures.window_s:
        out.append(f"the load generator itself waited {client.waited_s:.2f} s for a CPU: latencies are overstated")
    if figures.burst_ratio and figures.burst_ratio > 0.2:
        out.append(f"{figures.burst_ratio:.0%} of the events came in lumps: read p99 and stalls, not p50")
    if figures.late and figures.late.p99 > 10:
        out.append(f"requests went out up to {figures.late.max:.0f} ms late; latencies count from when they were due")
    if not figures.counted and figures.ok:
        out.append("the server gave no token counts; events with text were counted instead")
    return out


def as_document(measured: Measured, *, detail: bool = True) -> dict[str, Any]:
    """Return a run as a `llamaops-bench` document (docs/bench.md); ``detail`` adds each request's token times."""
    conditions = measured.conditions
    out: dict[str, Any] = {
        "schema": SCHEMA, "kind": "run", "began": measured.began.isoformat(timespec="seconds"),
        "target": {"kind": measured.target.kind, "text": measured.target.text,
                   "overrides": list(measured.target.overrides), "model": measured.model, "plan": measured.plan},
        "workload": workload_document(conditions.workload) | {"api": conditions.server.api,
                                                              "fixed_length": conditions.server.fixed_length},
        "slo": asdict(conditions.slo),
        "noise": {"what": str(conditions.noise), "where": conditions.noise_where} if conditions.noise else None,
        "figures": document(measured.figures),
        "system": measured.system.document(),
        "client": asdict(measured.client),
        "valid": not measured.invalid, "invalid": measured.invalid, "warnings": measured.warnings,
        "environment": environment(),
    }
    if detail:
        out["requests"] = [_request(t, measured.origin) for t in measured.timings]
    return out


def workload_document(workload: Workload) -> dict[str, Any]:
    """Return a workload as JSON values; lengths as the text that reads back."""
    return asdict(workload) | {"prompt_tokens": str(workload.prompt_tokens), "max_tokens": str(workload.max_tokens)}


def _request(timing: Timing, origin: float) -> dict[str, Any]:
    """Return one request in milliseconds since the start of the run."""
    def ms(at: float) -> float:
        return round((at - origin) * 1e3, 3)

    return {"index": timing.index, "due_ms": ms(timing.due), "begun_ms": ms(timing.begun), "ended_ms": ms(timing.ended),
            "text_ms": [ms(at) for at in timing.text_times], "prompt_tokens": timing.prompt_tokens,
            "output_tokens": timing.output_tokens, "finish": timing.finish, "engine": timing.engine,
            "failure": timing.failure}


def environment() -> dict[str, Any]:
    """Return what is needed to tell later whether two documents may be compared: machine, kernel, versions."""
    return {"llamaops": __version__, "python": platform.python_version(), "kernel": platform.release(),
            "machine": platform.machine(), "cpu": _cpu_name(), "cpus": len(os.sched_getaffinity(0)),
            "governor": _read("/sys/devices/system/cpu/cpufreq/policy0/scaling_governor"),
            "load_average": os.getloadavg()[0], "autogroup": _read("/proc/sys/kernel/sched_autogroup_enabled")}


def _cpu_name() -> str | None:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith(("model name", "Model", "Hardware")):
            return line.partition(":")[2].strip()
    return None


def _read(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return None
