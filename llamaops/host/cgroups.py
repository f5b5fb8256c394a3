"""Limits of this process's cgroup and of every ancestor: v1, v2 and both at once.

Where a controller's files lie: ``/proc/self/cgroup`` gives the path inside the hierarchy, ``/proc/self/mountinfo`` the
mount point and the part of the hierarchy mounted there (cgroups(7), cgroup_namespaces(7)).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from posixpath import normpath

from llamaops.core.cpuset import CpuSet
from llamaops.core.topology import Cgroup
from llamaops.host.files import Root, flat, to_int

NO_LIMIT = 1 << 60
"""v1 spells "no limit" as the largest page-aligned number; anything this large is none."""


@dataclass(frozen=True, slots=True)
class _Mount:
    root: str
    point: str
    v2: bool
    controllers: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Limit:
    """A value and the cgroup folder that sets it."""

    value: float
    folder: str


def read_cgroup(root: Root) -> Cgroup:
    """Gather the tightest limits over the whole ancestry; what is missing stays unknown."""
    cpu, cpuset, memory = (_chain(root, controller) for controller in ("cpu", "cpuset", "memory"))
    quota = min(_quotas(root, cpu), key=lambda limit: limit.value, default=None)
    limit = min(_memory_limits(root, memory), key=lambda limit: limit.value, default=None)
    headroom = min(_headrooms(root, memory), key=lambda limit: limit.value, default=None)
    return Cgroup(
        version=_version(root),
        path=_own_path(root),
        cpuset=_cpuset(root, cpuset),
        quota_cpus=quota.value if quota else None,
        quota_path=quota.folder if quota else None,
        memory_limit=int(limit.value) if limit else None,
        memory_headroom=int(headroom.value) if headroom else None,
        memory_path=headroom.folder if headroom else None,
        rt_runtime_us=root.number(f"{cpu[0]}/cpu.rt_runtime_us") if cpu else None,
        weight_path=_weight_path(root, cpu),
        root_task_group=_root_task_group(root, cpu),
    )


def own_paths(root: Root) -> dict[str, str]:
    """Map each v1 controller, and ``""`` for v2, to this process's path in its hierarchy."""
    out: dict[str, str] = {}
    for line in (root.text("proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and parts[2].startswith("/"):
            out.update(dict.fromkeys(parts[1].split(","), parts[2]))
    return out


def chain(root: Root, controller: str) -> list[str]:
    """Return the folders of this process's cgroup for one controller, own first, the mount point last."""
    return _chain(root, controller)


def _mounts(root: Root) -> list[_Mount]:
    out = []
    for line in (root.text("proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        head, tail = left.split(), right.split()
        if len(head) >= 5 and tail and tail[0] in ("cgroup", "cgroup2"):
            options = frozenset(tail[2].split(",")) if len(tail) > 2 else frozenset()
            out.append(_Mount(_unescape(head[3]), _unescape(head[4]), tail[0] == "cgroup2", options))
    return out or list(_usual_mounts(root))


def _usual_mounts(root: Root) -> Iterator[_Mount]:
    """Guess the mounts of a recording without mountinfo: v2 at the top, or v1 controllers and ``unified`` below it."""
    if any(root.has(f"sys/fs/cgroup/{name}") for name in ("cgroup.controllers", "cpu.max", "memory.max",
                                                          "cpuset.cpus")):
        yield _Mount("/", "/sys/fs/cgroup", True, frozenset())
        return
    for name in root.names("sys/fs/cgroup"):
        yield _Mount("/", f"/sys/fs/cgroup/{name}", name == "unified", frozenset(name.split(",")))


def _unescape(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _chain(root: Root, controller: str) -> list[str]:
    """Choose the hierarchy that carries the controller: v1 where it is mounted there, else v2."""
    mounts, paths = _mounts(root), own_paths(root)
    mount = next((m for m in mounts if not m.v2 and controller in m.controllers), None)
    path = paths.get(controller, "/") if mount else paths.get("", "/")
    mount = mount or next((m for m in mounts if m.v2), None)
    return _folders(root, mount, path) if mount else []


def _folders(root: Root, mount: _Mount, path: str) -> list[str]:
    """List the folders from the process's own cgroup up to the mount point.

    A path outside what is mounted (a container that sees only its own part) means the mount point is ours.
    """
    base = mount.root.rstrip("/")
    inside = path[len(base):] if path == base or path.startswith(base + "/") else path
    parts = [p for p in inside.split("/") if p]
    if ".." in parts:
        parts = []
    folders = [normpath("/".join([mount.point, *parts[:n]])) for n in range(len(parts), -1, -1)]
    return [folder for folder in folders if root.is_dir(folder)]


def _version(root: Root) -> int | None:
    mounts = _mounts(root)
    if any(not m.v2 and "cpu" in m.controllers for m in mounts):
        return 1
    return 2 if any(m.v2 for m in mounts) else None


def _own_path(root: Root) -> str | None:
    paths = own_paths(root)
    return paths.get("cpu", paths.get(""))


def _quotas(root: Root, folders: list[str]) -> Iterator[_Limit]:
    """Read ``cpu.max`` (v2) or ``cpu.cfs_quota_us`` (v1) of every ancestor, in CPUs."""
    for folder in folders:
        words = (root.text(f"{folder}/cpu.max") or "").split()
        quota = to_int(words[0]) if words else root.number(f"{folder}/cpu.cfs_quota_us")
        period = to_int(words[1]) if len(words) > 1 else root.number(f"{folder}/cpu.cfs_period_us")
        if quota is not None and quota > 0 and (period is None or period > 0):
            yield _Limit(quota / (period or 100_000), folder)


def _cpuset(root: Root, folders: list[str]) -> CpuSet | None:
    """Intersect the CPU lists of the ancestry; an empty list inherits (cpuset(7))."""
    found: CpuSet | None = None
    for folder in folders:
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            cpus = root.cpus(f"{folder}/{name}")
            if cpus:
                found = CpuSet(found & cpus) if found is not None else cpus
    return found


def _memory_limits(root: Root, folders: list[str]) -> Iterator[_Limit]:
    """Read the hard limit of every ancestor, and v2's ``memory.high``, above which every allocation is slowed."""
    for folder in folders:
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            value = root.number(f"{folder}/{name}")
            if value is not None and 0 <= value < NO_LIMIT:
                yield _Limit(value, folder)


def _headrooms(root: Root, folders: list[str]) -> Iterator[_Limit]:
    """Return what each limited ancestor can still be charged, page cache not counted as used."""
    for limit in _memory_limits(root, folders):
        used = _used(root, limit.folder)
        if used is not None:
            yield _Limit(min(limit.value, max(0, limit.value - used)), limit.folder)


def _used(root: Root, folder: str) -> int | None:
    current = root.number(f"{folder}/memory.current")
    if current is None:
        current = root.number(f"{folder}/memory.usage_in_bytes")
    return None if current is None else max(0, current - _page_cache(flat(root.text(f"{folder}/memory.stat"))))


def _page_cache(stat: dict[str, int]) -> int:
    """Return the bytes of file pages, which the kernel drops before it refuses memory.

    v1's own numbers leave the children out, its ``total_`` ones do not. ``file`` counts shared memory too, so the two
    LRU lists are better where they are told.
    """
    for prefix in ("total_", ""):
        lists = [stat[name] for name in (f"{prefix}inactive_file", f"{prefix}active_file") if name in stat]
        if lists:
            return sum(lists)
    return max(0, stat.get("file", 0) - stat.get("shmem", 0))


def _weight_path(root: Root, folders: list[str]) -> str | None:
    """Return our own cgroup's weight file if this process may write it and nobody else lives in that cgroup.

    The root group's ``cpu.shares`` exists but refuses every write, so it is no lever.
    """
    if not root.live or not folders or root.has(f"{folders[0]}/release_agent") or not ours_alone(root, folders[0]):
        return None
    names = (f"{folders[0]}/cpu.weight", f"{folders[0]}/cpu.shares")
    return next((name for name in names if os.access(name, os.W_OK) and not _read_only(name)), None)


def ours_alone(root: Root, folder: str) -> bool:
    """Tell whether a cgroup holds only this process, what started it and what it started.

    Raising the weight of a shared one (a login's scope, ``init.scope``) would lift strangers with us.
    """
    above = set(_ancestry(root, os.getpid()))
    members = {int(pid) for pid in (root.text(f"{folder}/cgroup.procs") or "").split() if pid.isdigit()}
    return bool(members) and all(pid in above or os.getpid() in _ancestry(root, pid) for pid in members)


def _ancestry(root: Root, pid: int) -> Iterator[int]:
    """Yield a process and its parents, as far as they can be seen."""
    parent: int | None = pid
    while parent:
        yield parent
        words = (root.text(f"proc/{parent}/stat") or "").rpartition(")")[2].split()
        parent = to_int(words[1]) if len(words) > 1 else None


def _read_only(path: str) -> bool:
    """Root passes access(2) on a read-only mount as well; the mount's flag tells."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _root_task_group(root: Root, folders: list[str]) -> bool | None:
    """Tell whether the cpu controller leaves this process in the root group.

    v1: the hierarchy's top folder alone has ``release_agent``. v2: only groups below the top have ``cpu.weight``, and
    only where the controller is enabled.
    """
    if not folders:
        return None
    if root.has(f"{folders[0]}/cpu.shares"):
        return root.has(f"{folders[0]}/release_agent")
    return not any(root.has(f"{folder}/cpu.weight") for folder in folders)
