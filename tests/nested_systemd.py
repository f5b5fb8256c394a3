"""A real systemd in namespaces of its own, for tests: PID 1 of a tree whose every write is thrown away.

Its root is an overlay over this machine's, its /tmp, /run, network, pids and cgroups are its own; /sys and /proc/sys
are read-only. It must never see the machine's own /tmp: at its start systemd-tmpfiles empties what it finds there. A
unit's sandbox may bring a fresh /proc, where the kernel's settings are the machine's and can be written: fence such a
unit with ReadOnlyPaths=.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

SYSTEMD = Path("/lib/systemd/systemd")
NAMESPACES = ["--cgroup", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child"]

# Enters cgroups of its own first, so that the root of the cgroup namespace is one it may divide as it likes.
OUTER = r"""
set -eu
for folder in /sys/fs/cgroup /sys/fs/cgroup/*; do
    [ -w "$folder/cgroup.procs" ] || continue
    mkdir -p "$folder/$NAME"
    for file in cpuset.cpus cpuset.mems; do
        [ ! -e "$folder/$file" ] || cat "$folder/$file" > "$folder/$NAME/$file" || true
    done
    echo $$ > "$folder/$NAME/cgroup.procs"
done
exec unshare "$@" --propagation private bash -c "$INNER"
"""

INNER = r"""
set -eu
kinds=$(awk '$3 == "cgroup" || $3 == "cgroup2" {print $2 ":" $3}' /proc/self/mounts)
mount -t tmpfs -o size=1g box /mnt
mkdir /mnt/up /mnt/work /mnt/root
root=/mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work overlay $root
mount -t proc proc $root/proc
mount -o bind,ro $root/proc/sys $root/proc/sys
mount -t sysfs -o ro sysfs $root/sys
case "$kinds" in
    /sys/fs/cgroup:cgroup2) mount -t cgroup2 cgroup2 $root/sys/fs/cgroup ;;
    *) mount -t tmpfs -o mode=755 cgroup $root/sys/fs/cgroup ;;
esac
for pair in $kinds; do
    at=${pair%:*}
    name=${at##*/}
    [ "$at" != /sys/fs/cgroup ] || continue
    mkdir -p "$root$at"
    case $name in
        systemd) mount -t cgroup -o none,name=systemd,xattr cgroup "$root$at" ;;
        unified) mount -t cgroup2 cgroup2 "$root$at" ;;
        *) mount -t cgroup -o "$name" cgroup "$root$at" ;;
    esac
done
mount -t tmpfs -o mode=755 dev $root/dev
for name in null zero full random urandom tty; do touch $root/dev/$name; mount --bind /dev/$name $root/dev/$name; done
mkdir $root/dev/pts $root/dev/shm
ln -s pts/ptmx $root/dev/ptmx
ln -s /proc/self/fd $root/dev/fd
for folder in run tmp var/tmp; do mount -t tmpfs tmpfs $root/$folder; done
chmod 755 $root/run
chmod 1777 $root/tmp $root/var/tmp
for path in $NEEDED; do
    [ -e "$root$path" ] || { mkdir -p "$root$path"; mount -o bind,ro "$path" "$root$path"; }
done
ip link set lo up
for unit in tmpfiles-setup tmpfiles-setup-dev tmpfiles-clean udevd sysctl modules-load; do
    ln -sf /dev/null $root/etc/systemd/system/systemd-$unit.service
done
printf '[Unit]\nDescription=nothing but what is asked for\nAllowIsolate=yes\n' > $root/etc/systemd/system/bare.target
cd $root
mkdir -p mnt/old
pivot_root . mnt/old
cd /
umount -l /mnt/old
mount --make-rshared /  # credentials come by a mount that a helper makes
[ "$(stat -f -c %T /)" = overlayfs ] && [ "$(stat -f -c %T /tmp)" = tmpfs ] || exit 9
exec env -i container=nested PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=bare.target \
    --log-target=journal --show-status=no
"""


class Unsupported(Exception):
    """No nested systemd can run here; the text tells why."""


class Nested:
    """A running nested systemd."""

    def __init__(self, needed: list[Path]) -> None:
        if os.geteuid() != 0 or not SYSTEMD.exists() or not shutil.which("unshare"):
            raise Unsupported("it takes root, systemd and unshare")
        self._name = f"nested-{os.getpid()}-{time.monotonic_ns() % 10**6}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in stop()
        env = {"PATH": os.environ["PATH"], "NAME": self._name, "INNER": INNER, "NEEDED": " ".join(map(str, needed))}
        self._process = subprocess.Popen(["bash", "-c", OUTER, "nested", *NAMESPACES], env=env, start_new_session=True,
                                         stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        try:
            self.pid = self._await_child()
            self._await_running()
        except BaseException:
            self.stop()
            raise

    def _await_child(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        until = time.monotonic() + 60
        while time.monotonic() < until and self._process.poll() is None:
            for pid in children.read_text().split():
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(str(SYSTEMD).encode()):
                    return int(pid)
            time.sleep(0.05)
        raise Unsupported(f"it did not start: {self._said()}")

    def _await_running(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if self.run("systemctl", "is-system-running", check=False).strip() in ("running", "degraded"):
                self.run("systemctl", "start", "systemd-journald.service", check=False)
                return
            time.sleep(0.1)
        raise Unsupported(f"it did not come up: {self._said()}")

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-500:]

    def run(self, *argv: str | Path, check: bool = True, timeout: float = 60) -> str:
        """Run a command inside and return its stdout."""
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8", "NO_COLOR": "1",
               **{key: value for key, value in os.environ.items() if key.startswith("LLAMAOPS_")}}
        answer = subprocess.run(["nsenter", "-t", str(self.pid), "-a", "-r", "-w", *argv], env=env, timeout=timeout,
                                stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if check and answer.returncode:
            raise AssertionError(f"{argv} ended with {answer.returncode}: {answer.stdout}{answer.stderr}")
        return answer.stdout

    def code(self, *argv: str | Path) -> tuple[int, str]:
        """Run a command inside and return its exit code and everything it said."""
        script = 'said=$("$@" 2>&1); code=$?; printf "%s\n%s" "$code" "$said"'
        code, _, said = self.run("bash", "-c", script, "-", *argv).partition("\n")
        return int(code), said

    def stop(self) -> None:
        """End it with everything that runs inside, and remove its cgroups."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # --kill-child takes PID 1 along, and that all others
        self._process.wait(60)
        self._log.close()
        for folder in Path("/sys/fs/cgroup").glob(f"**/{self._name}"):
            for inner in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
                _rmdir(inner)
            _rmdir(folder)


def _rmdir(folder: Path) -> None:
    until = time.monotonic() + 60
    while folder.exists() and time.monotonic() < until:
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.05)
