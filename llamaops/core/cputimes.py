"""CPU time as /proc/stat tells it (proc_stat(5)): one reading of it for all who look, pure."""

from __future__ import annotations

from dataclasses import dataclass

TICKS_A_SECOND = 100
"""What /proc/stat counts in on every Linux that runs this (USER_HZ is part of the kernel's ABI)."""
_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since boot: at work, taken by the hypervisor, with nothing to do (waiting for a disk included)."""

    busy_s: float = 0.0
    steal_s: float = 0.0
    idle_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.busy_s + self.steal_s + self.idle_s

    @property
    def taken_s(self) -> float:
        """What this CPU could not be given to somebody else: work, and the hypervisor's share."""
        return self.busy_s + self.steal_s

    def __sub__(self, earlier: CpuTimes) -> CpuTimes:
        """Return what came between; counters of a hot-plugged CPU may begin anew, time never runs backwards."""
        return CpuTimes(max(0.0, self.busy_s - earlier.busy_s), max(0.0, self.steal_s - earlier.steal_s),
                        max(0.0, self.idle_s - earlier.idle_s))

    def __add__(self, other: CpuTimes) -> CpuTimes:
        """Return the sum of two CPUs."""
        return CpuTimes(self.busy_s + other.busy_s, self.steal_s + other.steal_s, self.idle_s + other.idle_s)


def parse_cpu_times(stat: str) -> dict[int, CpuTimes]:
    """Return the times of each CPU by its id; lines that are not understood are passed over."""
    found = {}
    for line in stat.splitlines():
        name, *words = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdigit() and len(words) >= 4 and all(map(str.isdigit, words)):
            found[int(name[3:])] = _times([int(word) for word in words])
    return found


def _times(ticks: list[int]) -> CpuTimes:
    """Read the columns user nice system idle iowait irq softirq steal; guest time is part of user. Old kernels stop."""
    user, nice, system, idle, iowait, irq, softirq, steal = (ticks + [0] * _COLUMNS)[:_COLUMNS]
    return CpuTimes((user + nice + system + irq + softirq) / TICKS_A_SECOND, steal / TICKS_A_SECOND,
                    (idle + iowait) / TICKS_A_SECOND)
