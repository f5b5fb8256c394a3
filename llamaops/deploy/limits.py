"""What a plan allows one instance, engine and supervisor together: CPUs and memory, for any renderer."""

from __future__ import annotations

import math

from llamaops.core.cpuset import CpuSet
from llamaops.core.plan import Plan
from llamaops.core.profile import Profile

MIB = 1 << 20
SUPERVISOR_BYTES = 256 * MIB
"""Room for Python, the relay and request bodies in flight, beside the engine."""
MEMORY_MARGIN = 1.15
"""What the sum may be wrong by before the kernel kills the engine."""
STOP_MARGIN_S = 10


def all_cpus(plan: Plan) -> CpuSet | None:
    """Return the CPUs of the whole instance: those that compute, and those the relay may use; None: not pinned."""
    placed = plan.placement
    if placed.cpus is None:
        return None
    relay = placed.housekeeping_cpus or plan.usable_cpus or CpuSet()
    return CpuSet(placed.cpus | (placed.batch_cpus or CpuSet()) | relay)


def memory_mib(profile: Profile, plan: Plan) -> int | None:
    """Return the limit in MiB: the profile's or the plan's sum, with room for the supervisor; None: sum unknown."""
    limit, planned = profile.memory.limit, plan.memory
    engine = planned.total_bytes * MEMORY_MARGIN if planned.weights_bytes else 0.0
    if limit != "auto":
        engine = limit
    return math.ceil((engine + SUPERVISOR_BYTES) / MIB) if engine else None


def stop_seconds(profile: Profile) -> int:
    """Return how long a stop may take before it is forced: draining, the engine's grace, and a margin."""
    return math.ceil(profile.supervise.drain_timeout_s + profile.supervise.stop_grace_s) + STOP_MARGIN_S
