"""What this process may do to its own scheduling, as the kernel states it, and by trying."""

from __future__ import annotations

import shutil
import subprocess

from llamaops.core.topology import Rights
from llamaops.host.files import Root, fields, to_int

CAP_IPC_LOCK, CAP_SYS_NICE = 14, 23
"""Bit numbers of include/uapi/linux/capability.h."""

RT_FLAGS = {"fifo": "-f", "rr": "-r"}
PROBE_SECONDS = 5


def read_rights(root: Root) -> Rights:
    """Read capabilities, resource limits and niceness of this process."""
    status = fields(root.text("proc/self/status"))
    caps = _capabilities(root, status)
    limits = _soft_limits(root)
    sys_nice = None if caps is None else bool(caps >> CAP_SYS_NICE & 1)
    nice = _niceness(root)
    uid = to_int((status.get("Uid") or "").split()[1] if len((status.get("Uid") or "").split()) > 1 else None)
    return Rights(
        cap_sys_nice=sys_nice,
        lowest_nice=_lowest_nice(sys_nice, limits.get("Max nice priority"), nice),
        rtprio_limit=limits.get("Max realtime priority"),
        memlock_limit=None if caps is not None and caps >> CAP_IPC_LOCK & 1 else limits.get("Max locked memory"),
        root=None if uid is None else uid == 0,
        nice=nice,
    )


def _capabilities(root: Root, status: dict[str, str]) -> int | None:
    """Return the effective set; none of it counts for scheduling inside a user namespace (user_namespaces(7))."""
    try:
        caps = int(status["CapEff"], 16)
    except (KeyError, ValueError):
        return None
    mapped = (root.text("proc/self/uid_map") or "0 0 4294967295").split()
    return caps if mapped == ["0", "0", "4294967295"] else 0


def _soft_limits(root: Root) -> dict[str, int]:
    """Read the soft column of ``/proc/self/limits``; ``unlimited`` is left out."""
    out = {}
    for line in (root.text("proc/self/limits") or "").splitlines():
        name, soft = line[:25].strip(), to_int((line[25:].split() or [""])[0])
        if soft is not None:
            out[name] = soft
    return out


def _niceness(root: Root) -> int:
    """Read field 19 of ``/proc/self/stat`` (proc(5)); the command before it may hold anything but ends in ``)``."""
    words = (root.text("proc/self/stat") or "").rpartition(")")[2].split()
    return to_int(words[16]) or 0 if len(words) > 16 else 0


def _lowest_nice(sys_nice: bool | None, limit: int | None, nice: int) -> int | None:
    """RLIMIT_NICE counts the other way round: a limit of 30 lets niceness go down to -10 (getrlimit(2))."""
    if sys_nice:
        return -20
    if limit is None:
        return None if sys_nice is None else nice
    return min(nice, max(-20, 20 - limit))


def probe_rt(policy: str, priority: int) -> str | None:
    """Try a real-time policy in a child, inside our own cgroup, and return the kernel's refusal; None when it worked.

    ``policy`` is ``fifo`` or ``rr``. Without ``chrt`` or ``true`` there is nothing to try with, which is a refusal too.
    """
    return _try(["chrt", RT_FLAGS[policy], str(priority), "true"])


def probe_memory_policy(node: int) -> str | None:
    """Try to bind memory to a node in a child and return the refusal; None when it worked."""
    return _try(["numactl", f"--membind={node}", "true"])


def _try(argv: list[str]) -> str | None:
    if shutil.which(argv[0]) is None:
        return f"{argv[0]} is not installed"
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return str(exc)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"{argv[0]} ended with {done.returncode}"
