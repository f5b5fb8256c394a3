"""One reading of /proc/stat for all who look at it."""

from __future__ import annotations

import pytest

from llamaops.core.cputimes import CpuTimes, parse_cpu_times

STAT = """cpu  999 999 999 999 999 999 999 999 0 0
cpu0 100 20 30 400 50 6 4 10 3 0
cpu12 100 0 0 300
cpu5 1 2
cpuset 1 2 3 4
intr 12345 0
"""


def test_columns_are_what_they_are_and_old_kernels_have_fewer() -> None:
    assert parse_cpu_times(STAT) == {0: CpuTimes(busy_s=1.6, steal_s=0.1, idle_s=4.5), 12: CpuTimes(1.0, 0.0, 3.0)}


@pytest.mark.parametrize("text", ["", "\n\n", "cpu0 a b c d\n", "\0\0"])
def test_what_is_not_a_stat_file_has_no_cpus(text: str) -> None:
    assert parse_cpu_times(text) == {}


def test_a_difference_never_runs_backwards() -> None:
    earlier, later = CpuTimes(5.0, 1.0, 10.0), CpuTimes(6.0, 1.5, 9.0)
    spent = later - earlier
    assert (spent.busy_s, spent.steal_s, spent.idle_s) == (1.0, 0.5, 0.0)
    assert (spent.taken_s, spent.total_s) == (1.5, 1.5)
    assert sum([earlier, later], CpuTimes()) == CpuTimes(11.0, 2.5, 19.0)
