"""The priority ladder: the strongest lever that is permitted, safe, and effective where the competition is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llamaops.core.cpuset import CpuSet
from llamaops.core.engine import Engine
from llamaops.core.notes import Findings
from llamaops.core.profile import PlacementSection
from llamaops.core.topology import Host

Policy = Literal["other", "batch", "fifo", "rr"]
Spin = int | Literal["active", "passive"]

NICE_ALONE, NICE_SHARED = -20, -15
"""Niceness where other programs have CPUs of their own, and where decode covers every usable CPU.

-20 is the best single lever inside one cgroup (measurements: 40 of 42 tok/s under noise). Where nothing is left to the
others, -15 still gives decode 28 shares to their one, and lets a shell on the machine answer three times sooner.
"""

WEIGHT = 10_000
"""The largest cgroup v2 ``cpu.weight``, a hundred times the default."""

SPIN = 500
"""Iterations a waiting compute thread spins before it sleeps.

Measured on two CPUs (AMD EPYC, SmolLM2-135M, an ordinary client in the same session as the noise): 300, 500, 1000 and
10000 iterations give an ITL p99 of 45, 53, 67 and 167 ms at 54, 58, 60 and 65 tok/s: what spins keeps the client
waiting. Quiet, Qwen2.5-0.5B loses 7 % with 300 and 2 % with 500 against 1000, SmolLM2 nothing.
"""

RT_CAP = 20
"""Real-time priorities above this may outrank the kernel's own threads (threaded interrupts run at 50)."""


@dataclass(frozen=True, slots=True)
class Priority:
    """How strongly engine and relay compete for CPU time; niceness is absolute, weight in ``cpu.weight`` units."""

    policy: Policy
    rt_priority: int | None
    nice: int | None
    autogroup_nice: int | None
    weight: int | None
    relay_nice: int | None
    spin: Spin


def permitted_policy(section: PlacementSection, host: Host, usable: CpuSet | None, findings: Findings) -> Policy:
    """Return the policy that can be had: real time only where asked for, permitted, and a CPU stays free of it."""
    wanted: Policy = "other" if section.policy == "auto" else section.policy
    if wanted not in ("fifo", "rr"):
        findings.because("placement.policy", "as the profile says" if section.policy != "auto" else
                         "niceness and bounded spin do better than real time unless the tuner proves otherwise")
        if wanted == "batch" and "chrt" not in host.tools:
            findings.degraded("tool-missing-chrt", "chrt is not installed, so policy batch can't be set; install "
                              "util-linux")
            return "other"
        return wanted
    refusal = rt_refusal(host, section.rt_priority)
    if refusal:
        findings.degraded("rt-refused", f"policy {wanted} can't be had: {refusal}. Planned with ordinary scheduling "
                          "instead")
    elif usable is None or len(usable) < 2:
        findings.degraded("rt-needs-free-cpu", f"policy {wanted} needs one usable CPU left free of real-time threads, "
                          "and there is only one; planned with ordinary scheduling instead")
    else:
        findings.because("placement.policy", "real time, as the profile says; permitted here")
        return wanted
    findings.because("placement.policy", f"{wanted} was asked for and can't be had (see the notes)")
    return "other"


def rt_refusal(host: Host, priority: int) -> str | None:
    """Explain by its true cause why real time is refused, with what mends it; None where it should work.

    Checked in the order in which the kernel does (sched(7)): rights, the RLIMIT_RTPRIO ceiling, then the RT budget of
    this very cgroup (CONFIG_RT_GROUP_SCHED), which refuses root too. What is left is a filter that only trying shows.
    """
    rights, tried = host.rights, host.rights.rt_refusal
    if "chrt" not in host.tools:
        return "chrt is not installed; install util-linux"
    if rights.cap_sys_nice is False and (rights.rtprio_limit or 0) < priority:
        return (f"this process has no CAP_SYS_NICE and its RLIMIT_RTPRIO is {rights.rtprio_limit or 0}, below priority "
                f"{priority}; a systemd unit mends it with LimitRTPRIO={priority}, a login with '<user> - rtprio "
                f"{priority}' in /etc/security/limits.conf, Docker with --cap-add SYS_NICE --ulimit rtprio={priority}")
    if host.cgroup.rt_runtime_us == 0:
        return (f"the RT budget of this cgroup (cpu.rt_runtime_us of {host.cgroup.path or '/'}) is 0, which refuses "
                "root too; give it a share of its parent's budget, or run in the root cgroup")
    if host.rt_runtime_us == 0:
        return "kernel.sched_rt_runtime_us is 0, so no real-time thread ever runs; its default is 950000"
    if tried:
        return (f"the kernel refused it when tried ({tried}) though rights and budget allow it: a seccomp filter or "
                "security module says no (Docker: --cap-add SYS_NICE)")
    return None


def set_priority(section: PlacementSection, host: Host, policy: Policy, *, alone: bool, engine: Engine | None,
                 findings: Findings) -> Priority:
    """Decide niceness, autogroup niceness, weight, the relay's niceness and spin for the policy that can be had.

    ``alone``: usable CPUs remain outside the decode CPUs. The relay is never weaker than the engine: a proxy that waits
    behind the compute threads makes the stream worse than it looks.
    """
    real_time = policy in ("fifo", "rr")
    nice = _nice(section, host, alone=alone, findings=findings)
    engine_nice = None if real_time else nice
    priority = Priority(
        policy=policy,
        rt_priority=section.rt_priority if real_time else None,
        nice=engine_nice,
        autogroup_nice=_autogroup_nice(host, nice, findings),
        weight=_weight(host, findings),
        relay_nice=nice,
        spin=_spin(section, host, real_time=real_time, engine=engine, findings=findings),
    )
    findings.because("placement.relay_nice", "as strong as the engine: a relay that waits makes every token late"
                     if nice is not None else "as the engine")
    if real_time:
        _rt_notes(section, host, findings)
    return priority


def _nice(section: PlacementSection, host: Host, *, alone: bool, findings: Findings) -> int | None:
    """Return the absolute niceness, None where it stays as it is."""
    lowest = host.rights.nice if host.rights.lowest_nice is None else host.rights.lowest_nice
    target = (NICE_ALONE if alone else NICE_SHARED) if section.nice == "auto" else section.nice
    if host.system != "linux":
        return None
    if "nice" not in host.tools:
        findings.degraded("tool-missing-nice", "nice is not installed, so the engine's niceness stays as it is; "
                          "install coreutils")
        return None
    if not (lowest < 0 if section.nice == "auto" else lowest <= target):
        _nice_refused(section, host, findings)
        return None
    reached = max(target, lowest)
    findings.because("placement.nice", _nice_reason(section, reached, target, alone=alone))
    if host.cgroup.root_task_group is False and reached < 0:
        findings.info("nice-own-cgroup-only", f"niceness {reached} counts only against programs in the same cgroup; "
                      "against other services the cgroup's weight decides (llamaops deploy systemd writes CPUWeight=)")
    return reached


def _nice_reason(section: PlacementSection, reached: int, target: int, *, alone: bool) -> str:
    if section.nice != "auto":
        return "as the profile says"
    if reached > target:
        return f"the lowest that RLIMIT_NICE permits (wanted {target})"
    return ("the strongest: other programs have CPUs of their own" if alone else
            "strong, but not the strongest: decode covers every usable CPU, and a shell must still answer")


def _nice_refused(section: PlacementSection, host: Host, findings: Findings) -> None:
    mend = ("run with CAP_SYS_NICE (systemd: AmbientCapabilities=CAP_SYS_NICE or LimitNICE=-15, a login: '<user> - "
            "nice -15' in /etc/security/limits.conf, Docker: --cap-add SYS_NICE)")
    if section.nice == "auto":
        findings.because("placement.nice", "unchanged: a lower one is not permitted")
        findings.info("nice-not-permitted", "no permission to lower niceness, so only bounded spin protects decode "
                      f"from other programs; to have more, {mend}")
        return
    findings.because("placement.nice", f"{section.nice} was asked for and is not permitted")
    findings.degraded("nice-refused", f"niceness {section.nice} is not permitted (lowest here: "
                      f"{host.rights.lowest_nice}); niceness stays as it is. To have it, {mend}")


def _autogroup_nice(host: Host, nice: int | None, findings: Findings) -> int | None:
    """Return our session's niceness, where the scheduler shares CPU time between sessions first (sched(7))."""
    if not host.autogroup or host.cgroup.root_task_group is False or nice is None or nice >= 0:
        return None
    findings.because("placement.autogroup_nice", "autogroup shares CPU time between sessions before niceness counts; "
                     "the engine's session gets the same niceness")
    return nice


def _weight(host: Host, findings: Findings) -> int | None:
    if host.cgroup.weight_path is None:
        return None
    findings.because("placement.weight", f"{host.cgroup.weight_path} is ours to write: the one lever against other "
                     "cgroups")
    return WEIGHT


def _spin(section: PlacementSection, host: Host, *, real_time: bool, engine: Engine | None, findings: Findings) -> Spin:
    """Bound the spin unless told otherwise: an unbounded one burns a neighbour's whole time slice at every barrier."""
    if section.spin == "auto":
        findings.because("placement.spin", "bounded: nearly free when quiet, several times the speed when CPUs are "
                         "shared")
        return SPIN
    findings.because("placement.spin", "as the profile says")
    if section.spin == "active":
        findings.risk("spin-unbounded", "compute threads that never sleep lose whole time slices to each other as "
                      "soon as anything else "
                      "runs" + (", and real-time ones are stopped about 50 ms in every second by the kernel"
                                              if real_time else ""))
    if isinstance(section.spin, int) and engine is not None and engine.openmp != "libgomp":
        findings.info("spin-approximate", "this engine is not built on libgomp, which alone counts spin in "
                      "iterations; the nearest setting of its own runtime is used")
    return section.spin


def _rt_notes(section: PlacementSection, host: Host, findings: Findings) -> None:
    if section.rt_priority > RT_CAP:
        findings.risk("rt-priority-high", f"rt_priority {section.rt_priority} is above {RT_CAP}: at 50 and more the "
                      "engine outranks the kernel's interrupt threads, and the network with them")
    if host.rt_runtime_us is None or host.rt_runtime_us < 0:
        unlimited = "is unlimited" if host.rt_runtime_us is not None else "is unknown"
        findings.risk("rt-budget-unlimited", f"kernel.sched_rt_runtime_us {unlimited}: a real-time thread that loops "
                      "stops its CPU for good; 950000 is the kernel's default")
    else:
        findings.info("rt-throttling", f"the kernel grants real-time threads {host.rt_runtime_us / 1000:g} of 1000 ms "
                      "on each CPU; threads that use it up pause for the rest, which bounded spin avoids")
