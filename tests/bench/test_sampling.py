"""What the machine did: read from a made-up /proc and /sys, and from this process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from llamaops.bench.priority import raised_priority
from llamaops.bench.sampling import Sampler, SystemUse

BEFORE = {
    "proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 40 0 50 300 0 0 0 0 0 0\ncpu1 60 0 50 500\ncpu2 1 2 3\n",
    "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "5\n",
    "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "5\n",
    "sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq": "2000000\n",
    "sys/devices/system/cpu/cpufreq/policy2/scaling_cur_freq": "1000000\n",
    "sys/class/thermal/thermal_zone0/temp": "51000\n",
    "sys/class/thermal/thermal_zone1/temp": "67500\n",
    "sys/class/powercap/intel-rapl:0/energy_uj": "1000000\n",
    "sys/class/powercap/intel-rapl:0:0/energy_uj": "7\n",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def between(root: Path, before: dict[str, str], after: dict[str, str]) -> SystemUse:
    write(root, before)
    sampler = Sampler(None, root)
    write(root, after)
    return sampler.finish()


def test_a_machine_in_two_moments(tmp_path: Path) -> None:
    use = between(tmp_path, BEFORE, {
        "proc/stat": "cpu  150 0 130 1000 0 0 0 20 0 0\ncpu0 90 0 80 300 0 0 0 20 0 0\ncpu1 60 0 50 700\n",
        "sys/class/powercap/intel-rapl:0/energy_uj": "43000000\n",
    })
    assert use.cpu_ratio == pytest.approx(100 / 300) and use.steal_ratio == pytest.approx(20 / 300)
    assert (use.frequency_mhz, use.temperature_c, use.joules) == (1500, 67.5, 42)
    assert use.thermal_throttles == 0 and use.invalid() == []
    assert any("steal" in text for text in use.warnings(10))


def test_a_run_that_was_throttled_for_heat_is_invalid(tmp_path: Path) -> None:
    use = between(tmp_path, BEFORE, {"sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "6\n"})
    assert use.thermal_throttles == 1
    assert use.invalid() == ["the CPU throttled itself for heat during the run"]


@pytest.mark.parametrize(("cgroup", "stat", "before", "after"), [
    ("0::/a/b\n", "sys/fs/cgroup/a/b/cpu.stat", "nr_throttled 1\nthrottled_usec 1000000\n", "throttled_usec 4000000\n"),
    ("0::/a/b\n", "sys/fs/cgroup/a/cpu.stat", "throttled_usec 1000000\n", "throttled_usec 4000000\n"),
    ("3:cpuset:/\n2:cpu,cpuacct:/a\n", "sys/fs/cgroup/cpu,cpuacct/a/cpu.stat", "throttled_time 1000000000\n",
     "throttled_time 4000000000\n"),
])
def test_a_quota_that_held_back_is_told(tmp_path: Path, cgroup: str, stat: str, before: str, after: str) -> None:
    use = between(tmp_path, {f"proc/{os.getpid()}/cgroup": cgroup, stat: before}, {stat: after})
    assert use.quota_throttled_s == pytest.approx(3)
    assert use.invalid() == [] and "quota" in use.warnings(100)[0]


def test_an_energy_counter_that_wrapped_says_nothing(tmp_path: Path) -> None:
    assert between(tmp_path, BEFORE, {"sys/class/powercap/intel-rapl:0/energy_uj": "5\n"}).joules is None


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert between(tmp_path, {}, {}) == SystemUse()


def test_our_own_process_is_seen_at_work() -> None:
    sampler, cpu_s, began = Sampler(os.getpid()), time.process_time(), time.perf_counter()
    while time.process_time() < cpu_s + 0.3:
        pass
    use = sampler.finish()
    expected = (time.process_time() - cpu_s) / (time.perf_counter() - began)  # less than 1 where others run, too
    assert use.target_cpus == pytest.approx(expected, rel=0.25)
    assert use.rss_peak_bytes is not None and use.rss_peak_bytes > 1 << 20
    assert use.involuntary_switches is not None


def test_priority_is_raised_and_given_back() -> None:
    before = (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))
    with raised_priority(wanted=True) as client:
        during = (os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, os.getpriority(os.PRIO_PROCESS, 0))
        sum(range(10**6))
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before
    assert client.cpu_s > 0
    match client.priority:
        case "fifo 90":
            assert during[0] == os.SCHED_FIFO
        case "nice -20":
            assert during[1] == -20
        case other:
            assert other == "ordinary" and during == before
    with raised_priority(wanted=False) as client:
        assert client.priority == "ordinary" and os.sched_getscheduler(0) == before[0]
