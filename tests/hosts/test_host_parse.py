"""Reading a machine's files: cgroup paths, limits, rights, recordings, and what the doctor makes of them."""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from llamaops.core.cpuset import CpuSet
from llamaops.core.priority import rt_refusal
from llamaops.core.topology import Cgroup, Host, Rights
from llamaops.errors import NotPermitted, UsageError
from llamaops.host import TOOLS, probe_host
from llamaops.host.cgroups import ours_alone, read_cgroup
from llamaops.host.cpus import read_cpuinfo, read_nodes
from llamaops.host.doctor import examine
from llamaops.host.files import Root
from llamaops.host.rights import read_rights
from llamaops.host.snapshot import opened, snapshot

V2_MOUNT = "31 23 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"


def root(tmp_path: Path, files: dict[str, object]) -> Root:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return Root(tmp_path)


def v2(tmp_path: Path, files: dict[str, object], path: str = "/a/b") -> Cgroup:
    below = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return read_cgroup(root(tmp_path, {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": V2_MOUNT, **below}))


@pytest.mark.parametrize(("files", "quota"), [
    ({"a/b/cpu.max": "max 100000"}, None),
    ({"a/b/cpu.max": "150000 100000"}, 1.5),
    ({"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 50000"}, 4.0),
    ({"a/b/cpu.max": "300000 100000", "a/cpu.max": "200000 100000"}, 2.0),
    ({"a/b/cpu.max": "100000"}, 1.0),
    ({"a/b/cpu.max": "0 100000"}, None),
    ({"a/b/cpu.max": "100000 0"}, None),
    ({"a/b/cpu.max": ""}, None),
])
def test_the_tightest_quota_of_the_ancestry(tmp_path, files, quota):
    assert v2(tmp_path, files).quota_cpus == quota


@pytest.mark.parametrize(("files", "cpus"), [
    ({"a/b/cpuset.cpus.effective": "0-3"}, "0-3"),
    ({"a/b/cpuset.cpus.effective": "0-3", "a/cpuset.cpus.effective": "2-7"}, "2-3"),
    ({"a/b/cpuset.cpus": "", "a/cpuset.cpus": "4-5"}, "4-5"),
])
def test_every_ancestors_cpuset(tmp_path, files, cpus):
    assert str(v2(tmp_path, files).cpuset) == cpus


@pytest.mark.parametrize(("files", "headroom", "limit"), [
    ({"a/memory.max": "max", "a/memory.current": 5}, None, None),
    ({"a/memory.max": 100, "a/memory.current": 30}, 70, 100),
    ({"a/memory.max": 100, "a/memory.current": 90, "a/memory.stat": "inactive_file 50\nactive_file 20"}, 80, 100),
    ({"a/memory.max": 100, "a/memory.current": 90, "a/memory.stat": "file 70\nshmem 10"}, 70, 100),
    ({"a/memory.max": 100, "a/memory.current": 130}, 0, 100),
    ({"a/memory.max": 100, "a/memory.current": 50, "a/memory.stat": "inactive_file 60"}, 100, 100),
    ({"a/memory.max": 100, "a/memory.current": 10, "a/b/memory.max": 50, "a/b/memory.current": 10}, 40, 50),
    ({"a/memory.max": 100, "a/memory.high": 60, "a/memory.current": 10}, 50, 60),
    ({"a/memory.max": 100}, None, 100),
])
def test_headroom_leaves_page_cache_out(tmp_path, files, headroom, limit):
    found = v2(tmp_path, files)
    assert (found.memory_headroom, found.memory_limit) == (headroom, limit)


@pytest.mark.parametrize(("mount_root", "path", "folder"), [
    ("/", "/a/b", "a/b"),
    ("/docker/x", "/docker/x", ""),
    ("/docker/x", "/docker/x/inner", "inner"),
    ("/docker/x", "/", ""),
    ("/", "/../../other", ""),
    ("/", "/a/gone", "a"),
    ("/docker/xy", "/docker/x", ""),
    ("/with\\040space", "/with space/c", "c"),
])
def test_where_a_cgroups_files_lie(tmp_path, mount_root, path, folder):
    files = {"proc/self/cgroup": f"0::{path}",
             "proc/self/mountinfo": f"31 23 0:27 {mount_root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
             f"sys/fs/cgroup/{folder}/cpu.max": "100000 100000", "sys/fs/cgroup/cgroup.controllers": "cpu"}
    found = read_cgroup(root(tmp_path, files))
    assert found.quota_cpus == 1.0
    assert found.quota_path == f"/sys/fs/cgroup/{folder}".rstrip("/")


def test_v1_controllers_have_mounts_of_their_own(tmp_path):
    found = read_cgroup(root(tmp_path, {
        "proc/self/cgroup": "3:memory:/m\n2:cpu,cpuacct:/c\n1:name=systemd:/s",
        "sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_quota_us": 250000, "sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_period_us": 100000,
        "sys/fs/cgroup/cpu,cpuacct/c/cpu.rt_runtime_us": 0, "sys/fs/cgroup/cpu,cpuacct/c/cpu.shares": 1024,
        "sys/fs/cgroup/memory/m/memory.limit_in_bytes": 1000, "sys/fs/cgroup/memory/m/memory.usage_in_bytes": 900,
        "sys/fs/cgroup/memory/m/memory.stat": "inactive_file 0\ntotal_inactive_file 300\ntotal_active_file 100",
    }))
    assert (found.version, found.quota_cpus, found.rt_runtime_us, found.memory_headroom) == (1, 2.5, 0, 500)
    assert found.root_task_group is False


@pytest.mark.parametrize(("files", "is_root"), [
    ({"a/b/cpu.weight": 100}, False),
    ({"a/cpu.weight": 100, "a/b/memory.max": "max"}, False),
    ({"a/b/memory.max": "max"}, True),
])
def test_autogroup_acts_where_the_cpu_controller_is_not_enabled(tmp_path, files, is_root):
    assert v2(tmp_path, files).root_task_group is is_root


@pytest.mark.parametrize(("members", "ours"), [
    ("{us}", True), ("{us}\n50", True), ("{us}\n60", True), ("{us}\n70", False), ("", False),
])
def test_a_cgroup_is_ours_when_only_parents_and_children_share_it(tmp_path, members, ours):
    us = os.getpid()
    parents = {us: 50, 50: 1, 60: us, 70: 50}
    files = {f"proc/{pid}/stat": f"{pid} (x) S {parent} 0" for pid, parent in parents.items()}
    assert ours_alone(root(tmp_path, files | {"g/cgroup.procs": members.format(us=us)}), "g") is ours


@pytest.mark.parametrize(("status", "limits", "uid_map", "expected"), [
    ("CapEff:\t000001ffffffffff", "", None, (True, -20, None)),
    ("CapEff:\t0000000000800000", "", None, (True, -20, None)),
    ("CapEff:\t0000000000000000", "Max nice priority         30                   30", None, (False, -10, None)),
    ("CapEff:\t0000000000000000", "Max nice priority         0                    0", None, (False, 0, None)),
    ("CapEff:\t000001ffffffffff", "Max realtime priority     0                    0", "0 1000 1", (False, 0, 0)),
    ("CapEff:\tnonsense", "Max realtime priority     5                    5", None, (None, None, 5)),
    ("", "Max realtime priority     unlimited            unlimited", None, (None, None, None)),
])
def test_rights(tmp_path, status, limits, uid_map, expected):
    files = {"proc/self/status": status, "proc/self/limits": limits}
    found = read_rights(root(tmp_path, files | ({"proc/self/uid_map": uid_map} if uid_map else {})))
    assert (found.cap_sys_nice, found.lowest_nice, found.rtprio_limit) == expected


def test_niceness_is_read_after_any_command_name(tmp_path):
    stat = "1 (a) b) c) S " + " ".join(str(n) for n in range(4, 19)) + " -7 1"
    assert read_rights(root(tmp_path, {"proc/self/stat": stat})).nice == -7


REFUSED = Host(rights=Rights(cap_sys_nice=False, rtprio_limit=5), tools=dict.fromkeys(TOOLS, "x"))
GRANTED = replace(REFUSED, rights=Rights(cap_sys_nice=True), rt_runtime_us=950000)


@pytest.mark.parametrize(("host", "cause"), [
    (REFUSED, "RLIMIT_RTPRIO is 5"),
    (replace(REFUSED, rights=Rights(cap_sys_nice=False, rtprio_limit=10)), None),
    (GRANTED, None),
    (replace(GRANTED, cgroup=Cgroup(path="/docker/a", rt_runtime_us=0)), "cpu.rt_runtime_us of /docker/a"),
    (replace(GRANTED, rt_runtime_us=0), "kernel.sched_rt_runtime_us is 0"),
    (replace(GRANTED, rights=Rights(cap_sys_nice=True, rt_refusal="Operation not permitted")), "seccomp"),
    (replace(GRANTED, tools={}), "chrt is not installed"),
])
def test_a_refusal_of_real_time_names_its_cause(host, cause):
    found = rt_refusal(host, 10)
    assert found is None if cause is None else cause in (found or "")


@pytest.mark.parametrize(("text", "machine", "hypervisor"), [
    ("processor: 0\nmodel name: X\nflags: avx2 hypervisor", "x86_64", True),
    ("processor: 0\nflags: avx2", "x86_64", False),
    ("processor: 0\nFeatures: asimd\nCPU implementer: 0x41", "aarch64", None),
    ("processor: 0\nisa: rv64imafdcv", "riscv64", None),
    ("", None, None),
])
def test_cpuinfo_of_three_families(tmp_path, text, machine, hypervisor):
    found = read_cpuinfo(root(tmp_path, {"proc/cpuinfo": text}))
    assert (found[3], found[2]) == (machine, hypervisor)


def test_page_cache_counts_as_free_on_a_node(tmp_path):
    lines = "Node 1 MemTotal: 100 kB\nNode 1 MemFree: 10 kB\nNode 1 Active(file): 30 kB\nNode 1 Inactive(file): 20 kB"
    nodes = read_nodes(root(tmp_path, {"sys/devices/system/node/node1/meminfo": lines,
                                       "sys/devices/system/node/node1/cpulist": ""}))
    assert [(node.id, node.cpus, node.mem_total, node.mem_free) for node in nodes] == [(1, CpuSet(), 102400, 61440)]


MACHINE = {
    "sys/devices/system/cpu/online": "0-1", "sys/devices/system/cpu/cpu0/topology/core_cpus_list": "0",
    "sys/devices/system/cpu/cpu1/topology/core_cpus_list": "1", "proc/meminfo": "MemAvailable: 4096 kB",
    "proc/self/status": "Name:\tsecret\nUid:\t1\t1\t1\t1\nCapEff:\t0\nCpus_allowed_list:\t0-1",
    "proc/self/cgroup": "0::/a", "proc/self/mountinfo": V2_MOUNT + "\n40 31 0:40 / /home/secret rw - nfs secret:/x rw",
    "sys/fs/cgroup/a/cpu.max": "150000 100000", "proc/self/stat": "1 (secret) S " + "0 " * 40,
    "proc/self/environ": "TOKEN=secret", "proc/sys/kernel/sched_autogroup_enabled": 1,
}


def test_a_recording_plans_like_the_machine_and_tells_nothing_else(tmp_path):
    machine = root(tmp_path / "machine", MACHINE)
    archive = tmp_path / "m.tar.gz"
    snapshot(archive, machine)
    with tarfile.open(archive) as tar:
        assert not [m.name for m in tar if b"secret" in tar.extractfile(m).read()]
    with opened(archive) as folder:
        assert probe_host(folder) == probe_host(tmp_path / "machine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.tar.gz", "machine"]


def test_a_recording_that_can_not_be_written_is_not_half_there(tmp_path):
    with pytest.raises(NotPermitted, match="can't write the snapshot"):
        snapshot(tmp_path / "none" / "m.tar.gz", root(tmp_path, MACHINE))


def archive_of(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


def member(name: str, data: bytes = b"x", **changes: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, data


@pytest.mark.parametrize("name", ["../escape", "a/../../escape", "/etc/escape"])
def test_a_recording_never_writes_outside_its_folder(tmp_path, name):
    archive = archive_of(tmp_path / "bad.tar", [member(name)])
    with pytest.raises(UsageError, match="outside the folder"), opened(archive):
        pass


def test_links_and_devices_in_a_recording_are_left_out(tmp_path):
    archive = archive_of(tmp_path / "links.tar", [
        member("proc/link", b"", type=tarfile.SYMTYPE, linkname="/etc"), member("proc/null", b"", type=tarfile.CHRTYPE),
        member("proc/cpuinfo", b"processor: 0"), member("sys/x", b"1")])
    with opened(archive) as folder:
        assert sorted(path.name for path in folder.rglob("*") if not path.is_dir()) == ["cpuinfo", "x"]


def test_a_huge_recording_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("llamaops.host.snapshot.MAX_TOTAL", 10)
    archive = archive_of(tmp_path / "big.tar", [member("proc/a", b"123456"), member("proc/b", b"123456")])
    with pytest.raises(UsageError, match="too large"), opened(archive):
        pass


@pytest.mark.parametrize("data", [b"", b"no tar at all", b"\x1f\x8b\x08\x00broken"])
def test_what_is_no_recording_is_refused(tmp_path, data):
    path = tmp_path / "x.tar.gz"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="can't read the recorded machine"), opened(path):
        pass
    with pytest.raises(UsageError, match="can't read the recorded machine"), opened(tmp_path / "absent"):
        pass


def test_a_tar_wrapped_in_one_folder_opens_too(tmp_path):
    archive = archive_of(tmp_path / "w.tar", [member("box/sys/devices/system/cpu/online", b"0-3"),
                                              member("box/proc/x")])
    with opened(archive) as folder:
        assert probe_host(folder).online == CpuSet(range(4))


DOCTOR = {
    **MACHINE,
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "ondemand",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance",
    "sys/devices/system/cpu/cpufreq/boost": 0,
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
    "proc/swaps": "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2", "proc/sys/vm/swappiness": 60,
    "proc/self/limits": "Max nice priority         0                    0",
    "sys/fs/cgroup/a/cpu.stat": "nr_periods 10\nnr_throttled 4",
    "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": 7,
    "sys/devices/system/node/node0/cpulist": "0-1", "sys/devices/system/node/node1/cpulist": "",
    "proc/sys/kernel/numa_balancing": 1, "proc/cpuinfo": "flags: hypervisor",
    "proc/stat": "cpu0 50 0 0 40 0 0 0 10 0 0",
}


@pytest.mark.parametrize(("name", "verdict", "reason", "mend"), [
    ("governor", "warn", "CPUs 0 run at ondemand", "scaling_governor"),
    ("boost", "warn", "off", "cpufreq/boost"),
    ("huge-pages", "warn", "off", "madvise"),
    ("swap", "warn", "swappiness 60", "vm.swappiness=1"),
    ("niceness", "warn", "can't be lowered", "limits.conf"),
    ("real-time", "info", "CAP_SYS_NICE", None),
    ("cpu-quota", "warn", "throttled 4 times", "cpuset"),
    ("thermal", "warn", "up to 7 times", "sensors"),
    ("numa-balancing", "warn", "moves pages", "numa_balancing=0"),
    ("hypervisor", "warn", "10.0%", None),
    ("autogroup", "info", "sessions", None),
    ("tools", "ok", "taskset", None),
])
def test_the_doctor_names_what_hinders_and_what_mends(tmp_path, name, verdict, reason, mend):
    root(tmp_path, DOCTOR)
    check = next(check for check in examine(tmp_path) if check.name == name)
    assert check.verdict == verdict and reason in check.reason
    assert check.mend is None if mend is None else mend in (check.mend or "")


def test_the_doctor_finds_interrupts_on_decode_cpus(tmp_path):
    root(tmp_path, {
        "sys/devices/system/cpu/online": "0-3", "sys/devices/system/cpu/cpu0/topology/core_cpus_list": "0-1",
        "sys/devices/system/cpu/cpu1/topology/core_cpus_list": "0-1",
        "sys/devices/system/cpu/cpu2/topology/core_cpus_list": "2-3",
        "sys/devices/system/cpu/cpu3/topology/core_cpus_list": "2-3",
        "proc/interrupts": "     CPU0 CPU1 CPU2 CPU3\n 24: 5000 0 1 0 PCI nic\n 25: 1 9000 0 0 PCI disk\n LOC: 9 9 9 "
                           "9 timer",
        "proc/irq/24/smp_affinity_list": "0-3", "proc/irq/25/smp_affinity_list": "1",
    })
    check = next(check for check in examine(tmp_path) if check.name == "interrupts")
    assert check.verdict == "warn" and "24" in check.reason and "25" not in check.reason
    assert "echo 1,3" in (check.mend or "")
