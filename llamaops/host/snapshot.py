"""Recording a machine, so that it can be planned for elsewhere, and opening such a recording."""

from __future__ import annotations

import io
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from llamaops.errors import NotPermitted, UsageError
from llamaops.host.cgroups import chain
from llamaops.host.cpus import CPU, NODE
from llamaops.host.files import Root

PATTERNS = (
    f"{CPU}/online", f"{CPU}/offline", f"{CPU}/possible", f"{CPU}/present", f"{CPU}/isolated", f"{CPU}/nohz_full",
    f"{CPU}/smt/*", f"{CPU}/vulnerabilities/*", f"{CPU}/cpufreq/boost", f"{CPU}/intel_pstate/no_turbo",
    f"{CPU}/cpu[0-9]*/cpu_capacity",
    f"{CPU}/cpu[0-9]*/topology/*_list", f"{CPU}/cpu[0-9]*/topology/*_id",
    f"{CPU}/cpu[0-9]*/cache/index*/level", f"{CPU}/cpu[0-9]*/cache/index*/shared_cpu_list",
    f"{CPU}/cpu[0-9]*/cache/index*/size", f"{CPU}/cpu[0-9]*/cache/index*/type",
    f"{CPU}/cpu[0-9]*/cpufreq/cpuinfo_*_freq", f"{CPU}/cpu[0-9]*/cpufreq/scaling_governor",
    f"{CPU}/cpu[0-9]*/cpufreq/scaling_driver",
    f"{CPU}/cpu[0-9]*/thermal_throttle/*_throttle_count",
    f"{NODE}/online", f"{NODE}/node[0-9]*/cpulist", f"{NODE}/node[0-9]*/meminfo", f"{NODE}/node[0-9]*/distance",
    "sys/devices/cpu_core/cpus", "sys/devices/cpu_atom/cpus",
    "sys/kernel/mm/transparent_hugepage/enabled", "sys/kernel/mm/transparent_hugepage/defrag",
    "sys/class/dmi/id/sys_vendor", "sys/class/dmi/id/product_name",
    "proc/cpuinfo", "proc/meminfo", "proc/stat", "proc/loadavg", "proc/interrupts", "proc/swaps",
    "proc/sys/kernel/osrelease",
    "proc/irq/[0-9]*/smp_affinity_list", "proc/irq/default_smp_affinity",
    "proc/self/cgroup", "proc/self/limits", "proc/self/uid_map",
    "proc/sys/kernel/sched_*", "proc/sys/kernel/numa_balancing", "proc/sys/vm/swappiness",
)
"""What planning and the doctor read, plus a little that explains a plan; no command lines, users or host names."""

STATUS_KEYS = frozenset({
    "Uid", "Cpus_allowed", "Cpus_allowed_list", "Mems_allowed_list", "CapEff", "CapPrm", "CapBnd", "NoNewPrivs",
    "Seccomp",
})
CGROUP_FILES = (
    "cpu.max", "cpu.weight", "cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.rt_runtime_us", "cpu.stat",
    "cpu.pressure", "cpuset.cpus", "cpuset.cpus.effective", "cpuset.effective_cpus", "memory.max", "memory.high",
    "memory.current", "memory.stat", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.pressure",
    "cgroup.controllers", "release_agent",
)
MAX_MEMBER, MAX_TOTAL, MAX_MEMBERS = 4 << 20, 128 << 20, 200_000


def snapshot(target: Path, root: Root | None = None) -> int:
    """Write what planning reads into a gzipped tar and return how many files it holds.

    The file appears whole or not at all. Raises NotPermitted when the target's folder can't be written.
    """
    contents = dict(_contents(root or Root()))
    try:
        handle, name = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.")
    except OSError as exc:
        raise NotPermitted("can't write the snapshot", where=str(target), why=exc.strerror,
                           fix="choose a folder that exists and that you can write") from exc
    try:
        with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for path, text in sorted(contents.items()):
                _add(tar, path, text.encode())
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return len(contents)


def _contents(root: Root) -> Iterator[tuple[str, str]]:
    for pattern in PATTERNS:
        for path in sorted(root.path.glob(pattern)):
            rel = path.relative_to(root.path).as_posix()
            if path.is_file() and (text := root.text(rel)) is not None:
                yield rel, text + "\n"
    status = (root.text("proc/self/status") or "").splitlines()
    yield "proc/self/status", "\n".join(line for line in status if line.partition(":")[0] in STATUS_KEYS) + "\n"
    yield "proc/self/mountinfo", _cgroup_mounts(root)
    stat = root.text("proc/self/stat")
    if stat:
        yield "proc/self/stat", re.sub(r"\(.*\)", "(llamaops)", stat) + "\n"
    for controller in ("cpu", "cpuset", "memory"):
        for folder in chain(root, controller):
            for name in CGROUP_FILES:
                if (text := root.text(f"{folder}/{name}")) is not None:
                    yield f"{folder}/{name}".lstrip("/"), text + "\n"


def _cgroup_mounts(root: Root) -> str:
    """Keep only the cgroup mounts: the others tell of disks, shares and homes."""
    lines = (root.text("proc/self/mountinfo") or "").splitlines()
    return "".join(f"{line}\n" for line in lines if line.partition(" - ")[2].startswith("cgroup"))


def _add(tar: tarfile.TarFile, path: str, data: bytes) -> None:
    info = tarfile.TarInfo(path)
    info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data))


@contextmanager
def opened(recorded: Path | None) -> Iterator[Path | None]:
    """Give the root folder of a recording: None stays None (this machine), a folder is itself, a tar is unpacked.

    Raises UsageError for a path that is neither, or a tar that is no recording.
    """
    if recorded is None or recorded.is_dir():
        yield recorded
        return
    with tempfile.TemporaryDirectory(prefix="llamaops-host-") as folder:
        _unpack(recorded, Path(folder))
        yield _top(Path(folder))


def _top(folder: Path) -> Path:
    """Step into the single folder that some people's tar wraps everything in."""
    inside = list(folder.iterdir())
    wrapped = len(inside) == 1 and inside[0].is_dir() and inside[0].name not in ("sys", "proc")
    return inside[0] if wrapped else folder


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack regular files only, inside the folder only, within a size cap: a recording may come from anybody."""
    try:
        with tarfile.open(archive) as tar:
            total = 0
            for count, member in enumerate(tar):
                total += member.size
                if count >= MAX_MEMBERS or total > MAX_TOTAL:
                    raise _bad(archive, "it is too large for a recording")
                if member.isfile() and member.size <= MAX_MEMBER:
                    _write(tar, member, folder, archive)
    except (OSError, tarfile.TarError, EOFError) as exc:
        raise _bad(archive, str(exc)) from exc


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, archive: Path) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise _bad(archive, f"the member {member.name!r} would be written outside the folder")
    target, source = folder / path, tar.extractfile(member)
    if source is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read())


def _bad(archive: Path, why: str) -> UsageError:
    return UsageError("can't read the recorded machine", where=str(archive), why=why,
                      fix="give a folder, or a tar made by: llamaops host snapshot FILE.tar.gz")
