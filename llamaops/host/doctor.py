"""What on this machine makes token streams stutter: one function a check, each with its reason and what mends it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from llamaops.core.cpuset import CpuSet
from llamaops.core.cputimes import CpuTimes, parse_cpu_times
from llamaops.core.notes import Findings
from llamaops.core.placement import usable_cpus
from llamaops.core.priority import rt_refusal
from llamaops.core.topology import Host
from llamaops.core.tuning import decode_cpus
from llamaops.host import TOOLS, probe_host
from llamaops.host.cgroups import chain
from llamaops.host.cpus import CPU
from llamaops.host.files import Root, flat, to_cpus, to_int

Verdict = Literal["ok", "info", "warn", "fail"]

SAMPLE_SECONDS = 0.25
BUSY_SHARE = 0.2
"""A CPU that others use this much costs a barrier of two threads more than a tenth of its speed."""

PACKAGES = {"taskset": "util-linux", "chrt": "util-linux", "setpriv": "util-linux", "nice": "coreutils",
            "numactl": "numactl"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``mend`` is a command, or None where nothing is to be done or nothing can be."""

    name: str
    verdict: Verdict
    reason: str
    mend: str | None = None

    def document(self) -> dict[str, str | None]:
        """Return the check as a JSON object."""
        return asdict(self)


def examine(root: Path | str = "/") -> list[Check]:
    """Run every check on a machine; what can't be told is left out. Only reads, and sleeps a quarter second on `/`."""
    files, host = Root(root), probe_host(root)
    return [check for examiner in CHECKS for check in examiner(files, host)]


def _governor(files: Root, host: Host) -> Iterator[Check]:
    """A governor that lowers the clock between tokens makes every token start slow."""
    found = {cpu: files.text(f"{CPU}/cpu{cpu}/cpufreq/scaling_governor") for cpu in sorted(decode_cpus(host))}
    slow = CpuSet(cpu for cpu, name in found.items() if name in ("powersave", "conservative", "ondemand", "userspace"))
    drivers = {files.text(f"{CPU}/cpu{cpu}/cpufreq/scaling_driver") for cpu in slow}
    mend = f"for c in {' '.join(map(str, sorted(slow)))}; do echo performance | " \
           f"sudo tee /{CPU}/cpu$c/cpufreq/scaling_governor; done"
    if not any(found.values()):
        yield Check("governor", "info", "no frequency control here: a virtual machine, or the firmware decides")
    elif slow and drivers <= {"intel_pstate", "amd-pstate-epp"} and all(found[cpu] == "powersave" for cpu in slow):
        yield Check("governor", "info", f"powersave of {' and '.join(sorted(d for d in drivers if d))} still raises "
                    "the clock under load; performance saves the ramp-up", mend)
    elif slow:
        yield Check("governor", "warn", f"CPUs {slow} run at {found[min(slow)]}: the clock lags behind each token",
                    mend)
    else:
        yield Check("governor", "ok", f"{'/'.join(sorted({name for name in found.values() if name}))} on CPUs "
                    f"{CpuSet(found)}")


def _boost(files: Root, host: Host) -> Iterator[Check]:
    boost, no_turbo = files.number(f"{CPU}/cpufreq/boost"), files.number(f"{CPU}/intel_pstate/no_turbo")
    if boost == 0:
        yield Check("boost", "warn", "boost clocks are off", f"echo 1 | sudo tee /{CPU}/cpufreq/boost")
    elif no_turbo == 1:
        yield Check("boost", "warn", "turbo is off", f"echo 0 | sudo tee /{CPU}/intel_pstate/no_turbo")
    elif boost == 1 or no_turbo == 0:
        yield Check("boost", "ok", "boost clocks are on")


def _interrupts(files: Root, host: Host) -> Iterator[Check]:
    """Which devices interrupt decode CPUs more than a little: counts since boot, allowed CPUs now."""
    decode, usable = decode_cpus(host), usable_cpus(host, Findings()) or CpuSet()
    spare = CpuSet((host.online or usable) - decode)
    if not spare:
        if decode:
            yield Check("interrupts", "info", f"decode takes every usable CPU ({usable}), so interrupts land there too")
        return
    on_decode = [irq for irq, count in _irq_counts(files, decode)
                 if count > 1000 and (to_cpus(files.text(f"proc/irq/{irq}/smp_affinity_list")) or CpuSet()) & decode]
    if on_decode:
        yield Check("interrupts", "warn", f"{len(on_decode)} device interrupts may fire on decode CPUs {decode}: "
                    f"{', '.join(on_decode[:8])}{' …' if len(on_decode) > 8 else ''}",
                    f"for i in {' '.join(on_decode)}; do echo {spare} | sudo tee /proc/irq/$i/smp_affinity_list; done")
    else:
        yield Check("interrupts", "ok", f"no busy device interrupt is bound to decode CPUs {decode}")


def _irq_counts(files: Root, cpus: CpuSet) -> Iterator[tuple[str, int]]:
    lines = (files.text("proc/interrupts") or "").splitlines()
    columns = [to_int(name[3:]) for name in lines[0].split()] if lines else []
    for line in lines[1:]:
        number, _, rest = line.partition(":")
        if number.strip().isdigit():
            counts = rest.split()[: len(columns)]
            yield number.strip(), sum(int(n) for cpu, n in zip(columns, counts, strict=False)
                                      if cpu in cpus and n.isdigit())


def _irqbalance(files: Root, host: Host) -> Iterator[Check]:
    """Look for the daemon by name; a recording holds no process list."""
    if not files.live:
        return
    names = (files.text(f"proc/{pid}/comm") for pid in files.names("proc") if pid.isdigit())
    decode, spare = decode_cpus(host), (host.online or CpuSet()) - decode_cpus(host)
    if "irqbalance" in names and spare:
        yield Check("irqbalance", "warn", f"irqbalance moves interrupts onto decode CPUs {decode} as it sees fit",
                    f"echo 'IRQBALANCE_BANNED_CPULIST={decode}' | sudo tee -a /etc/default/irqbalance && sudo "
                    "systemctl restart irqbalance")
    else:
        yield Check("irqbalance", "ok", "not running" if spare else "nothing to gain: decode takes every CPU")


def _huge_pages(files: Root, host: Host) -> Iterator[Check]:
    text = files.text("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text or "")
    if chosen and chosen[1] == "never":
        yield Check("huge-pages", "warn", "transparent huge pages are off: more TLB misses while reading weights and "
                    "KV",
                    "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled")
    elif chosen:
        yield Check("huge-pages", "ok", f"transparent huge pages: {chosen[1]}")


def _swap(files: Root, host: Host) -> Iterator[Check]:
    areas = (files.text("proc/swaps") or "").splitlines()[1:]
    swappiness = files.number("proc/sys/vm/swappiness")
    if not areas:
        yield Check("swap", "ok", "no swap: weights can't be swapped out")
    elif swappiness is not None and swappiness > 10:
        yield Check("swap", "warn", f"swap is on with swappiness {swappiness}: an idle model may be swapped out, and "
                    "the next token waits for the disk", "sudo sysctl vm.swappiness=1   (or memory: {lock: true})")
    else:
        yield Check("swap", "ok", f"swap is on, swappiness {swappiness}")


def _real_time(files: Root, host: Host) -> Iterator[Check]:
    refusal = rt_refusal(host, 10)
    if refusal:
        yield Check("real-time", "info", f"policy fifo or rr can't be had: {refusal}")
    elif host.rt_runtime_us is not None and host.rt_runtime_us < 0:
        yield Check("real-time", "warn", "real-time threads may use a CPU whole: one that loops stops it for good",
                    "sudo sysctl kernel.sched_rt_runtime_us=950000")
    elif host.rt_runtime_us is not None:
        yield Check("real-time", "ok", f"permitted; the kernel grants it {host.rt_runtime_us / 1000:g} ms of each "
                    "second (threads that spin on lose the rest in one piece)")


def _quota(files: Root, host: Host) -> Iterator[Check]:
    quota = host.cgroup.quota_cpus
    if quota is None:
        yield Check("cpu-quota", "ok", "no CPU quota in the cgroup ancestry")
        return
    stats = [flat(files.text(f"{folder}/cpu.stat")) for folder in chain(files, "cpu")]
    throttled = max((stat.get("nr_throttled", 0) for stat in stats), default=0)
    level: Verdict = "fail" if quota < 1 else "warn" if throttled else "info"
    yield Check("cpu-quota", level, f"{quota:g} CPUs ({host.cgroup.quota_path}), throttled {throttled} times so far: "
                "each time all threads stop for the rest of a period",
                "give a whole number of CPUs, or a cpuset instead (Docker: --cpuset-cpus, systemd: AllowedCPUs=)")


def _memory(files: Root, host: Host) -> Iterator[Check]:
    headroom = host.cgroup.memory_headroom
    if headroom is not None and host.cgroup.memory_limit:
        yield Check("memory-limit", "info", f"{headroom >> 20} of {host.cgroup.memory_limit >> 20} MiB of the cgroup "
                    f"({host.cgroup.memory_path}) are free, page cache not counted as used")


def _tools(files: Root, host: Host) -> Iterator[Check]:
    if host.system != "linux":
        return
    needed = [tool for tool in TOOLS if tool != "numactl" or len(host.nodes) > 1]
    missing = [tool for tool in needed if tool not in host.tools]
    if missing:
        packages = " ".join(sorted({PACKAGES[tool] for tool in missing}))
        yield Check("tools", "warn", f"missing: {', '.join(missing)}; what they set is left as it is",
                    f"sudo apt install {packages}")
    else:
        yield Check("tools", "ok", ", ".join(needed))


def _hypervisor(files: Root, host: Host) -> Iterator[Check]:
    if host.hypervisor:
        times = sum(_cpu_times(files).values(), CpuTimes())
        share = times.steal_s / times.total_s if times.total_s else 0.0
        yield Check("hypervisor", "warn" if share > 0.02 else "info", "a virtual machine: cores and caches may be "
                    f"invented, and the host took {share:.1%} of the CPU time since boot")


def _cpu_times(files: Root) -> dict[int, CpuTimes]:
    return parse_cpu_times(files.text("proc/stat") or "")


def _load(files: Root, host: Host) -> Iterator[Check]:
    """Measure how busy the decode CPUs are right now with other work."""
    if not files.live or not (before := _cpu_times(files)):
        return
    time.sleep(SAMPLE_SECONDS)
    now = _cpu_times(files)
    busy = {cpu: _busy(now[cpu] - before[cpu]) for cpu in decode_cpus(host) if cpu in before and cpu in now}
    loaded = CpuSet(cpu for cpu, share in busy.items() if share > BUSY_SHARE)
    if loaded:
        yield Check("idle-load", "warn", f"CPUs {loaded} are busy with other work ({max(busy.values()):.0%}): decode "
                    "shares them", "top -o %CPU")
    elif busy:
        yield Check("idle-load", "ok", f"decode CPUs are {1 - max(busy.values()):.0%} idle or more")


def _busy(spent: CpuTimes) -> float:
    """Return the share of time that was neither idle nor waiting for a disk."""
    return spent.taken_s / spent.total_s if spent.total_s else 0.0


def _autogroup(files: Root, host: Host) -> Iterator[Check]:
    if host.autogroup and host.cgroup.root_task_group is not False:
        yield Check("autogroup", "info", "CPU time is shared between sessions first, and niceness counts only inside "
                    "one; llamaops sets its session's niceness where it may")
    elif host.autogroup is not None:
        yield Check("autogroup", "ok", "does not act on this process")


def _nice(files: Root, host: Host) -> Iterator[Check]:
    lowest = host.rights.lowest_nice
    if lowest is not None and lowest >= 0:
        yield Check("niceness", "warn", "niceness can't be lowered: only bounded spin protects decode from other "
                    "programs",
                    "echo \"$USER - nice -15\" | sudo tee -a /etc/security/limits.conf   (then log in again)")
    elif lowest is not None:
        yield Check("niceness", "ok", f"may be lowered to {lowest}")


def _numa(files: Root, host: Host) -> Iterator[Check]:
    balancing = files.number("proc/sys/kernel/numa_balancing")
    if len(host.nodes) > 1 and balancing:
        yield Check("numa-balancing", "warn", f"{len(host.nodes)} NUMA nodes, and automatic balancing moves pages "
                    "under running threads: pauses of milliseconds", "sudo sysctl kernel.numa_balancing=0")
    elif len(host.nodes) > 1:
        yield Check("numa-balancing", "ok", "off")


def _mitigations(files: Root, host: Host) -> Iterator[Check]:
    folder = f"{CPU}/vulnerabilities"
    active = [name for name in files.names(folder) if (files.text(f"{folder}/{name}") or "").startswith("Mitigation")]
    if active:
        yield Check("mitigations", "info", f"{len(active)} CPU mitigations are active; they hardly touch decode, which "
                    "makes few system calls")


def _throttling(files: Root, host: Host) -> Iterator[Check]:
    counts = {cpu: files.number(f"{CPU}/cpu{cpu}/thermal_throttle/core_throttle_count") for cpu in decode_cpus(host)}
    hot = {cpu: count for cpu, count in counts.items() if count}
    if hot:
        yield Check("thermal", "warn", f"CPUs {CpuSet(hot)} were slowed by heat up to {max(hot.values())} times since "
                    "boot",
                    "check fans and dust; sensors   (package lm-sensors)")
    elif any(count is not None for count in counts.values()):
        yield Check("thermal", "ok", "not slowed by heat since boot")


CHECKS: tuple[Callable[[Root, Host], Iterator[Check]], ...] = (
    _tools, _nice, _autogroup, _real_time, _quota, _memory, _load, _governor, _boost, _throttling, _interrupts,
    _irqbalance, _huge_pages, _swap, _numa, _hypervisor, _mitigations,
)
