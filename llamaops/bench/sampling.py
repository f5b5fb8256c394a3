"""What the machine did during a run: CPU, context switches, migrations, throttling, frequency, temperature, memory.

Counters are read before and after; only memory and frequency are looked at on the way, once a second.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llamaops import sensors
from llamaops.core.cputimes import CpuTimes, parse_cpu_times

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
STEAL_LIMIT = 0.02
QUOTA_LIMIT = 0.01


@dataclass(slots=True)
class Counters:
    """Counters that only grow, at one moment; a key that this machine does not have is absent."""

    at: float
    machine: dict[str, float] = field(default_factory=dict)
    processes: dict[int, dict[str, float]] = field(default_factory=dict)


@dataclass(slots=True)
class SystemUse:
    """What happened between two moments; None where this machine does not tell.

    ``cpu_ratio`` is of all CPUs, ``target_cpus`` how many CPUs the target kept busy on average, ``waited_s`` how long
    its threads stood in run queues together. ``quota_throttled_s`` is how long its cgroup's CPU quota held it back,
    ``joules`` what the package used (RAPL).
    """

    cpu_ratio: float | None = None
    steal_ratio: float | None = None
    target_cpus: float | None = None
    waited_s: float | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None
    migrations: int | None = None
    rss_peak_bytes: int | None = None
    frequency_mhz: float | None = None
    temperature_c: float | None = None
    thermal_throttles: int | None = None
    quota_throttled_s: float | None = None
    joules: float | None = None

    def document(self) -> dict[str, Any]:
        """Return it as the ``system`` object of a `llamaops-bench` document."""
        return asdict(self)

    def invalid(self) -> list[str]:
        """Return why the run measured the machine's protection and not the target; empty: it did not."""
        return ["the CPU throttled itself for heat during the run"] if self.thermal_throttles else []

    def warnings(self, seconds: float) -> list[str]:
        """Return what a reader must know to believe the figures."""
        out = []
        if self.steal_ratio and self.steal_ratio > STEAL_LIMIT:
            out.append(f"other virtual machines took {self.steal_ratio:.0%} of the CPU time (steal)")
        if self.quota_throttled_s and self.quota_throttled_s > QUOTA_LIMIT * seconds:
            out.append(f"a cgroup CPU quota held the target back for {self.quota_throttled_s:.1f} s")
        return out


class Sampler:
    """Watches the machine whose /proc and /sys lie below ``root``, and the processes below ``pid`` where given."""

    def __init__(self, pid: int | None, root: Path = Path("/")) -> None:
        self._pid, self._root = pid, root
        self._before = _counters(root, pid)
        self._rss = 0
        self._frequencies: list[float] = []

    def look(self) -> None:
        """Take memory and frequency now: a few dozen microseconds."""
        self._rss = max(self._rss, sum(_rss(self._root, pid) for pid in self._before.processes))
        if (mhz := _frequency(self._root)) is not None:
            self._frequencies.append(mhz)

    def finish(self) -> SystemUse:
        """Return what happened since the sampler was made."""
        self.look()
        after = _counters(self._root, self._pid)
        use = _machine_use(self._before, after)
        if self._pid is not None:
            _add_processes(use, self._before, after)
            use.rss_peak_bytes = self._rss or None
        use.frequency_mhz = min(self._frequencies, default=None)
        use.temperature_c = sensors.temperature_celsius(self._root)
        return use


def _machine_use(before: Counters, after: Counters) -> SystemUse:
    diff = {k: after.machine[k] - v for k, v in before.machine.items() if k in after.machine}
    total = diff.get("total") or None
    quota = diff.get("quota_throttled_s")
    thermal, joules = diff.get("thermal"), diff.get("joules")
    return SystemUse(
        cpu_ratio=diff["busy"] / total if total else None,
        steal_ratio=diff["steal"] / total if total else None,
        thermal_throttles=round(thermal) if thermal is not None else None,
        quota_throttled_s=quota,
        joules=joules if joules is not None and joules >= 0 else None,  # the counter wraps around
    )


def _add_processes(use: SystemUse, before: Counters, after: Counters) -> None:
    """Add the sums over the processes that lived through; one that came or went in between is left out."""
    sums: dict[str, float] = {}
    for pid, values in before.processes.items():
        for key, value in values.items():
            if key in after.processes.get(pid, {}):
                sums[key] = sums.get(key, 0.0) + max(after.processes[pid][key] - value, 0.0)
    seconds = after.at - before.at
    if "cpu_s" in sums and seconds > 0:
        use.target_cpus = sums["cpu_s"] / seconds
    use.waited_s = sums.get("waited_s")
    for name in ("voluntary_switches", "involuntary_switches", "migrations"):
        if name in sums:
            setattr(use, name, round(sums[name]))


def _counters(root: Path, pid: int | None) -> Counters:
    processes = {p: _process(root, p) for p in (_tree(pid) if pid else ())}
    return Counters(time.perf_counter(), _machine(root, pid), processes)


def _machine(root: Path, pid: int | None) -> dict[str, float]:
    out: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        if times := parse_cpu_times((root / "proc/stat").read_text()).values():
            all_cpus = sum(times, CpuTimes())
            out |= {"total": all_cpus.total_s, "busy": all_cpus.taken_s, "steal": all_cpus.steal_s}
    if throttles := sensors.thermal_throttles(root):
        out["thermal"] = sum(throttles.values())
    if energy := list(_numbers((root / "sys/class/powercap").glob("intel-rapl:[0-9]/energy_uj"))):
        out["joules"] = sum(energy) / 1e6
    if (throttled := sensors.throttled_s(root, pid or os.getpid())) is not None:
        out["quota_throttled_s"] = throttled
    return out


def _numbers(paths: Iterator[Path]) -> Iterator[float]:
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            yield float(path.read_text())


def _tree(pid: int) -> list[int]:
    """Return a process and everything below it."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def _process(root: Path, pid: int) -> dict[str, float]:
    """Return one process's counters, summed over its threads."""
    out: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = (root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()
        out["cpu_s"] = (int(fields[11]) + int(fields[12])) / _TICKS
        for task in (root / f"proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                _add_thread(out, task)
    return out


def _add_thread(out: dict[str, float], task: Path) -> None:
    for line in (task / "status").read_text().splitlines():
        if "ctxt_switches" in line:
            name, _, value = line.partition(":")
            key = "involuntary_switches" if name.startswith("non") else "voluntary_switches"
            out[key] = out.get(key, 0.0) + int(value)
    with contextlib.suppress(OSError, IndexError, ValueError):
        out["waited_s"] = out.get("waited_s", 0.0) + int((task / "schedstat").read_text().split()[1]) / 1e9
    with contextlib.suppress(OSError, IndexError, ValueError):
        row = next(line for line in (task / "sched").read_text().splitlines() if "nr_migrations" in line)
        out["migrations"] = out.get("migrations", 0.0) + float(row.partition(":")[2])


def _rss(root: Path, pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((root / f"proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def _frequency(root: Path) -> float | None:
    """Return the mean current frequency of the CPUs in MHz, None where cpufreq does not tell."""
    khz = list(_numbers((root / "sys/devices/system/cpu").glob("cpufreq/policy*/scaling_cur_freq")))
    return sum(khz) / len(khz) / 1e3 if khz else None

