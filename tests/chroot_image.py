"""Builds and runs an image where no container engine is at hand: a Dockerfile's steps in a chroot on a Debian base.

The steps are read from the Dockerfile that is shipped, so the two can't drift; an instruction that is not known here
is an error. Layers are overlays. Every command has namespaces of its own, and what it leaves running ends with it.
What depends on the Dockerfile alone (base, packages, cache mounts) is kept for the next time.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

SUITE = "bookworm"  # as the Dockerfile's own base, python:3.12-slim-bookworm
MIRROR = "http://deb.debian.org/debian"
BASE = ["--variant=minbase", "--include=ca-certificates,python3-venv,python-is-python3"]
TOOLS = ("debootstrap", "unshare", "nsenter", "setpriv", "chroot")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

ROOT = r"""
set -eu
mount -t tmpfs -o size=1g box /mnt
mkdir /mnt/diff /mnt/work /mnt/root
root=/mnt/root
mount -t overlay -o "lowerdir=$LOWER,upperdir=${UPPER:-/mnt}/diff,workdir=${UPPER:-/mnt}/work" overlay $root
mount -t proc proc $root/proc
mount -t sysfs -o ro sysfs $root/sys
mount --rbind /sys/fs/cgroup $root/sys/fs/cgroup
mount -t tmpfs -o mode=755 dev $root/dev
for name in null zero full random urandom tty; do touch $root/dev/$name; mount --bind /dev/$name $root/dev/$name; done
mkdir -m 1777 $root/dev/shm
ln -s /proc/self/fd $root/dev/fd
put() {
    mkdir -p "$root$(dirname "$2")"
    if [ -d "$1" ]; then mkdir -p "$root$2"; else touch "$root$2"; fi
    mount --bind "$1" "$root$2"
}
"""


class Unsupported(Exception):
    """No image can be made here; the text tells why."""


@dataclass(frozen=True)
class Step:
    """One instruction of a Dockerfile."""

    word: str
    rest: str


def read_dockerfile(text: str) -> list[Step]:
    """Return the instructions: comments left out, continued lines joined (Dockerfile reference, "Format")."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    parts = (line.strip().partition(" ") for line in lines.replace("\\\n", " ").splitlines() if line.strip())
    return [Step(word, rest.strip()) for word, _, rest in parts]


def ignored(path: PurePosixPath, patterns: Sequence[str]) -> bool:
    """Tell whether a .dockerignore leaves ``path`` out: the last pattern that fits decides."""
    out = False
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        parts, bare = (path.parts, bare[3:]) if bare.startswith("**/") else (path.parts[:1], bare)
        assert "/" not in bare, f"a pattern that is not known here: {pattern}"
        if any(fnmatch.fnmatch(part, bare) for part in parts):
            out = not pattern.startswith("!")
    return out


def context_files(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return what a builder is sent of the context, as paths below it."""
    found = [path.relative_to(folder) for top in folder.iterdir() if not ignored(PurePosixPath(top.name), patterns)
             for path in (top, *top.rglob("*")) if path.is_file()]
    return sorted(str(path) for path in found if not ignored(PurePosixPath(path), patterns))


@dataclass
class Image:
    """A stage of a Dockerfile: its layers, lowest first, and how it is run."""

    layers: list[Path]
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"

    @property
    def lower(self) -> str:
        """The layers as an overlay's ``lowerdir``."""
        return ":".join(map(str, reversed(self.layers)))

    def unshared(self, script: str, upper: Path | None, *namespaces: str) -> list[str]:
        """Return a command line that runs a bash script where $root is this image; changes go to ``upper`` or away."""
        variables = [f"LOWER={self.lower}", f"UPPER={upper or ''}", f"PATH={PATH}"]
        return ["env", "-i", *variables, "unshare", "--mount", "--pid", "--fork", "--kill-child", *namespaces,
                "--propagation", "private", "bash", "-c", ROOT + script]


def network() -> tuple[dict[str, str], str]:
    """Return how this machine reaches package indexes, as a builder hands it on: variables, and files to put there."""
    names = re.compile(r"((https?|no)_proxy|PIP_\w+|SSL_CERT_FILE)", re.IGNORECASE)
    env = {name: value for name, value in os.environ.items() if names.fullmatch(name)}
    paths = {"/etc/resolv.conf", *(value for value in env.values() if Path(value).is_file())}
    return env, "".join(f"put {shlex.quote(path)} {shlex.quote(path)}\n" for path in sorted(paths))


class Builder:
    """Carries out the steps of one Dockerfile in ``context``; ``work`` is a folder that can hold overlays.

    ``instead`` may give another script for a RUN; it gets the builder, to try things, and the script.
    """

    def __init__(self, kept: Path, work: Path, context: Path, ignore: str,
                 instead: Callable[[Builder, str], str] = lambda builder, script: script) -> None:
        self._kept, self._work, self._context, self._instead = kept, work, context, instead
        self._ignore = [line for line in ignore.splitlines() if line and not line.startswith("#")]
        self._upper = work
        self._stages: dict[str, Image] = {}
        self.image = Image([])

    def build(self, dockerfile: str) -> Image:
        """Return the last stage."""
        base, steps = self._base(), read_dockerfile(dockerfile)
        froms = [number for number, step in enumerate(steps) if step.word == "FROM"]
        assert all(step.word == "ARG" for step in steps[: froms[0]])
        for start, end in zip(froms, [*froms[1:], len(steps)], strict=True):
            named, _, name = steps[start].rest.partition(" AS ")
            assert named == "${PYTHON}", "a base that is not chosen by the argument"
            self.image = self._stages[name] = Image([base])
            self._build_stage(steps[start + 1 : end])
        return self.image

    def _build_stage(self, steps: Sequence[Step]) -> None:
        """What comes before the first COPY depends on the Dockerfile alone, so its layer is kept."""
        copy = next((number for number, step in enumerate(steps) if step.word == "COPY"), len(steps))
        text = json.dumps([self.image.layers[0].name, *((step.word, step.rest) for step in steps[:copy])])
        with self._layer(self._kept / f"layer-{hashlib.sha256(text.encode()).hexdigest()[:16]}") as there:
            for step in steps[:copy]:
                if not (there and step.word == "RUN"):
                    self._do(step)
        with self._layer(self._work / f"layer-{len(self._stages)}"):
            for step in steps[copy:]:
                self._do(step)

    @contextmanager
    def _layer(self, final: Path) -> Iterator[bool]:
        """Let what is written become ``final``, once it is whole; yields whether that is there already."""
        there = final.exists()
        self._upper = final.with_name(f"{final.name}.part")
        shutil.rmtree(self._upper, ignore_errors=True)
        if not there:
            for name in ("diff", "work"):
                (self._upper / name).mkdir(parents=True)
        yield there
        if not there:
            self._upper.rename(final)
        self.image.layers.append(final / "diff")

    def _base(self) -> Path:
        final = self._kept / f"base-{hashlib.sha256(json.dumps([SUITE, MIRROR, *BASE]).encode()).hexdigest()[:16]}"
        if not final.exists():
            partial = final.with_name(f"{final.name}.part")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            done = subprocess.run(["debootstrap", *BASE, SUITE, partial, MIRROR], capture_output=True, text=True)
            if done.returncode:
                raise Unsupported(f"debootstrap failed: {done.stdout[-500:]}{done.stderr[-500:]}")
            partial.rename(final)
        return final

    def _do(self, step: Step) -> None:
        carry_out: Callable[[str], None] = getattr(self, f"_{step.word.lower()}")
        carry_out(step.rest)

    def _call(self, script: str) -> None:
        done = subprocess.run(self.image.unshared(script, self._upper), capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"{script}\nended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-4000:]}")

    def run(self, script: str) -> None:
        """Run a script as RUN does, cache mounts included. Raises AssertionError with what it said when it fails."""
        env, files = network()
        while found := re.match(r"--mount=type=cache,target=(\S+)\s+", script):
            kept = self._kept / f"mount{found[1].replace('/', '-')}"
            kept.mkdir(parents=True, exist_ok=True)
            files += f"put {kept} {found[1]}\n"
            script = script[found.end() :]
        assert not script.startswith("--"), f"an option that is not known here: {script}"
        env |= {"PATH": PATH, "HOME": "/root", **self.image.args, **self.image.env}
        words = ["env", "-i", "-C", self.image.workdir, *(f"{name}={value}" for name, value in env.items()),
                 "/bin/sh", "-c", script]
        self._call(f"{files}chroot --userspec={self.image.user} $root {shlex.join(words)}")

    def _run(self, rest: str) -> None:
        self.run(self._instead(self, rest))

    def _copy(self, rest: str) -> None:
        """Copy from the context, or the same path from an earlier stage."""
        *options, source, target = rest.split()
        if options:
            (stage,) = options
            assert source == target
            lower = self._stages[stage.removeprefix("--from=")].lower
            self._call(f"mkdir /mnt/other\nmount -t overlay -o lowerdir={lower} other /mnt/other\n"
                       f"mkdir -p $root{target}\ncp -a /mnt/other{source}/. $root{target}")
            return
        assert source == "."
        names, into = self._work / "context.list", f"$root{os.path.normpath(f'{self.image.workdir}/{target}')}"
        names.write_text("".join(f"{name}\n" for name in context_files(self._context, self._ignore)))
        self._call(f"mkdir -p {into}\ntar -C {self._context} --owner=0 --group=0 -cf- -T {names} | tar -C {into} -xf-")

    def _arg(self, rest: str) -> None:
        self.image.args.update([rest.split("=", 1)])

    def _env(self, rest: str) -> None:
        self.image.env.update(word.split("=", 1) for word in shlex.split(rest))

    def _workdir(self, rest: str) -> None:
        self.image.workdir = rest

    def _user(self, rest: str) -> None:
        self.image.user = rest

    def _healthcheck(self, rest: str) -> None:
        self.image.health = json.loads(rest[rest.index("CMD ") + 4 :])

    def _entrypoint(self, rest: str) -> None:
        self.image.entrypoint = json.loads(rest)

    def _cmd(self, rest: str) -> None:
        self.image.command = json.loads(rest)

    def _stopsignal(self, rest: str) -> None:
        self.image.stop_signal = rest

    def _expose(self, rest: str) -> None:
        assert rest.isdigit()


@dataclass(frozen=True)
class Settings:
    """How a container is run, as compose.yaml says it.

    ``files`` is path inside → file of this machine, read-only; ``tmpfs`` are ``PATH:OPTIONS`` as Docker writes them;
    ``limits`` are options of prlimit(1).
    """

    command: list[str]
    user: str
    files: dict[str, str]
    tmpfs: list[str]
    cpus: str
    limits: list[str]

    def mounts(self) -> str:
        """Return the script that puts files and folders in place and makes the rest read-only."""
        lines = []
        for path, at in self.files.items():
            inside = shlex.quote(path)
            lines += [f"put {shlex.quote(at)} {inside}", f"mount -o remount,bind,ro $root{inside}"]
        for path, _, options in (line.partition(":") for line in self.tmpfs):
            lines += [f"mkdir -p $root{path}", f"mount -t tmpfs -o {options} tmpfs $root{path}"]
        return "\n".join([*lines, "mount -o remount,bind,ro $root", "ip link set lo up", ""])


class Container:
    """A running image: its own PID 1, network and read-only root; no capabilities and no way to new rights."""

    def __init__(self, image: Image, settings: Settings, log: Path, *, entrypoint: list[str] | None = None) -> None:
        uid, _, gid = settings.user.partition(":")
        rights = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--bounding-set=-all",
                  "--inh-caps=-all", "--no-new-privs"]
        limits = ["prlimit", *settings.limits, "taskset", "-c", settings.cpus]
        self._env = ["env", "-i", *(f"{name}={value}" for name, value in image.env.items())]
        words = [*rights, *(image.entrypoint if entrypoint is None else entrypoint), *settings.command]
        script = f"{settings.mounts()}exec {shlex.join(limits)} chroot $root {shlex.join([*self._env, *words])}"
        self.image, self._log, self._as = image, log, [f"-S{uid}", f"-G{gid}"]
        with log.open("w") as out:
            self._process = subprocess.Popen(
                image.unshared(script, None, "--net", "--ipc", "--uts", "--cgroup"), stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True)

    @property
    def said(self) -> str:
        """What it wrote so far."""
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """PID 1 of it, as this machine counts."""
        (pid,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(pid)

    def exec(self, *argv: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command inside as its user, with the image's variables."""
        enter = ["nsenter", "-t", str(self.pid), "-a", "-r", "-w", *self._as, "--", *self._env]
        return subprocess.run([*enter, *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=timeout, check=False)

    def healthy(self) -> bool:
        """Run the image's health check."""
        return self.exec(*self.image.health).returncode == 0

    def alive(self) -> bool:
        """Tell whether it still runs."""
        return self._process.poll() is None

    def stop(self, within: float) -> int:
        """Stop it as a container engine does, and return its exit code."""
        os.kill(self.pid, getattr(signal, self.image.stop_signal))
        return self._process.wait(within)

    def remove(self) -> None:
        """End it at once, with everything that runs inside."""
        if self.alive():
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
