"""What slows a machine's CPUs down, as /sys and /proc tell it below any root: clock, heat, quota.

Nothing here raises for what it reads: a machine that does not tell gives None, or leaves the CPU out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_CPU_SENSORS = re.compile(r"x86_pkg_temp|cpu|soc|coretemp|k10temp|zenpower", re.IGNORECASE)


def clocks(root: Path, cpus: Iterable[int]) -> tuple[dict[int, float], float | None]:
    """Return the clock of each CPU in hertz, and the lowest relative to its own greatest.

    Only of the CPUs asked for: on some machines each look costs an interrupt there.
    """
    hertz, shares = {}, []
    for cpu in sorted(cpus):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        now, most = _number(folder / "scaling_cur_freq"), _number(folder / "cpuinfo_max_freq")
        if now:
            hertz[cpu] = now * 1000.0
            shares += [now / most] if most else []
    return hertz, min(shares, default=None)


def thermal_throttles(root: Path, cpus: Iterable[int] | None = None) -> dict[int, int]:
    """Return how often each CPU was slowed for heat since boot, its own sensor's and its package's events together.

    None asks for every CPU there is. Only Intel's processors count (Documentation/admin-guide/abi, thermal_throttle).
    """
    folder = root / "sys/devices/system/cpu"
    asked = [folder / f"cpu{cpu}" for cpu in cpus] if cpus is not None else _glob(folder, "cpu[0-9]*")
    counts = {int(cpu.name[3:]): [_number(file) for file in _glob(cpu / "thermal_throttle", "*_throttle_count")]
              for cpu in asked}
    return {cpu: sum(n or 0 for n in found) for cpu, found in counts.items() if found}


def temperature_celsius(root: Path) -> float | None:
    """Return the hottest CPU sensor; where none says that it is one, the hottest of all."""
    zones = [(_text(z / "type") or "", _number(z / "temp")) for z in _glob(root / "sys/class/thermal", "thermal_zone*")]
    zones += [(_text(h / "name") or "", _number(t)) for h in _glob(root / "sys/class/hwmon", "hwmon*")
              for t in _glob(h, "temp*_input")]
    known = [(name, value / 1000) for name, value in zones if value is not None and 0 < value < 150_000]
    of_cpu = [value for name, value in known if _CPU_SENSORS.search(name)]
    return max(of_cpu or [value for _, value in known], default=None)


def throttled_s(root: Path, pid: int | str = "self") -> float | None:
    """Return for how long a CPU quota of a process's cgroup or an ancestor stopped it, the longest of them.

    The kernel adds up what it stopped on every CPU: two CPUs that stand still for a second make two seconds.
    """
    found = []
    for folder in cgroup_folders(root, "cpu", pid):
        stat = dict(line.split() for line in (_text(folder / "cpu.stat") or "").splitlines() if len(line.split()) == 2)
        with suppress(ValueError):
            if "throttled_usec" in stat:
                found.append(int(stat["throttled_usec"]) / 1e6)
            elif "throttled_time" in stat:
                found.append(int(stat["throttled_time"]) / 1e9)
    return max(found, default=None)


def cgroup_folders(root: Path, controller: str, pid: int | str = "self") -> Iterator[Path]:
    """Yield the folders of a process's cgroup and its ancestors for one controller, v1 and v2."""
    for line in (_text(root / f"proc/{pid}/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            folder = top / path.lstrip("/")
            # A container may see only its own part of the tree, then the path leads nowhere and its top is ours.
            yield from (f for f in (folder, *folder.parents) if f == top or f.is_relative_to(top))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []
