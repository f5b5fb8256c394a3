"""The observing side of one instance, put together: sampler, metrics, and what ``status`` says about now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from llamaops.core.cpuset import CpuSet
from llamaops.core.explain import Stream
from llamaops.core.plan import Plan
from llamaops.core.profile import Profile
from llamaops.serve.app import App
from llamaops.serve.engine_metrics import EngineMetrics, Facts, Restarts
from llamaops.serve.sampler import Place, Sampler, picture, stream_json
from llamaops.serve.supervisor import Supervisor


class Observer:
    """Watches one instance. ``job`` returns the plan and profile that are served now, ``notes`` what is to be noted."""

    def __init__(self, app: App, supervisor: Supervisor, job: Callable[[], tuple[Plan, Profile]],
                 notes: Callable[[], list[dict[str, Any]]], build: Mapping[str, str]) -> None:
        self._app = app
        self._supervisor = supervisor
        self._job = job
        restarts = Restarts()
        supervisor.subscribe(restarts)
        self._sampler = Sampler(supervisor, self._pid, self, self._place)
        facts = Facts(lambda: supervisor.state, lambda: Counter(n["level"] for n in notes()),
                      restarts, build)
        app.metrics.add_collector(EngineMetrics(self._sampler, facts))

    async def run(self) -> None:
        """Look while there is something to see; runs until cancelled."""
        await self._sampler.run()

    def tell(self) -> dict[str, Any]:
        """Return the requests under way and the latest window; who asks is taken to ask again soon."""
        self._sampler.watch()
        rates = self._sampler.rates
        streams = [stream_json(s, rates.get(s.id)) for s in self.streams(time.monotonic())]
        return {"streams": streams, "now": picture(self._sampler)}

    # What the sampler asks (sampler.Relayed).

    def streams(self, now: float) -> list[Stream]:
        """Return the requests that are under way."""
        return self._app.relay.streams(now)

    def ended(self, since: float) -> list[tuple[float, Stream]]:
        """Return the requests that ended since, each with when."""
        return self._app.relay.ended(since)

    def gap_counts(self) -> tuple[tuple[float, ...], list[int]]:
        """Return the bounds and counts of the gaps between events with text."""
        return self._app.metrics.itl.bounds, self._app.metrics.itl.counts()

    def waiting(self) -> int:
        """Return how many requests wait for a slot."""
        return self._app.admission.waiting

    def _pid(self) -> int | None:
        pid: int | None = self._supervisor.status()["pid"]
        return pid

    def _place(self) -> Place:
        plan, profile = self._job()
        decode = plan.placement.cpus or plan.usable_cpus or CpuSet()
        relay = plan.placement.housekeeping_cpus or CpuSet()
        return Place(decode, relay, plan.serving.slots, profile.slo.itl_ms / 1000)
