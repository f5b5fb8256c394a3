"""A reload after an upgrade: the process becomes the llamaops that is now on disk, and keeps its pid and its socket.

What was read at the start goes on running whatever pip or git put there since. So the new program is asked whether it
can serve the profile, what is under way ends, and the process executes it with the listening socket as systemd would
pass it (sd_listen_fds(3)): who connects meanwhile waits in the socket's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import llamaops
from llamaops.child import llamaops_argv
from llamaops.core.cpuset import CpuSet
from llamaops.errors import LlamaopsError
from llamaops.serve.listening import FIRST_FD

_PACKAGE = Path(llamaops.__file__).parent
_ASK_S = 120.0
_MISSING = {"no-engine": "engine", "no-model": "model"}


def code_on_disk() -> str | None:
    """Return what tells the package's files from any others; None while they can't be read."""
    found = hashlib.sha256()
    try:
        for file in sorted(p for p in _PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            found.update(os.fsencode(file.relative_to(_PACKAGE)) + b"\0" + file.read_bytes())
    except OSError:
        return None
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Upgrade:
    """The llamaops on disk, as against the one that runs.

    ``sets`` are the words of the overrides, ``fetch`` and ``build`` tell what it may do to be ready.
    """

    profile: Path
    name: str
    sets: Sequence[str]
    fetch: bool
    build: bool
    running: str | None = field(default_factory=code_on_disk)

    def is_there(self) -> bool:
        """Tell whether the code on disk is another than the one that runs."""
        return code_on_disk() not in (None, self.running)

    def make_ready(self) -> str:
        """Return the version on disk, once it can serve the profile. Slow where it needs another engine or model.

        Raises LlamaopsError with what it said where it can't.
        """
        missing = self._missing()
        if "engine" in missing and self.build:
            self._ask("engine", "build", patience_s=None)
        if "model" in missing and self.fetch:
            self._ask("model", "pull", str(self.profile), patience_s=None)
        if missing and (missing := self._missing()):
            raise LlamaopsError(f"the llamaops that was installed meanwhile has no {' and no '.join(missing)}",
                                where=str(self.profile), fix=f"llamaops stop {self.name}, then up again")
        return self._ask("--version").split()[-1]

    def _missing(self) -> list[str]:
        plan = json.loads(self._ask("plan", str(self.profile), *self.sets, "--json"))
        if (name := plan["profile"]["name"]) != self.name:
            raise LlamaopsError("name can't change while it runs", where="name",
                                why=f"it is {self.name}, asked: {name}", fix=f"llamaops stop {self.name}")
        return [_MISSING[note["code"]] for note in plan["notes"] if note["code"] in _MISSING]

    def _ask(self, *words: str, patience_s: float | None = _ASK_S) -> str:
        """Run the llamaops on disk and return what it prints."""
        try:
            done = subprocess.run(llamaops_argv(*words), stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, timeout=patience_s)
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise LlamaopsError("the llamaops that was installed meanwhile does not run", why=str(exc)) from exc
        if done.returncode:
            raise LlamaopsError("the llamaops that was installed meanwhile refuses", detail=done.stderr[-2000:],
                                where=f"llamaops {' '.join(words)}", why=f"it ended with {done.returncode}",
                                fix="mend what it says, or install the version that runs again")
        return done.stdout


class Handover:
    """Whether another llamaops takes the place of this one: agreed at a reload, given up by a stop."""

    def __init__(self, upgrade: Upgrade) -> None:
        self._upgrade = upgrade
        self._given_up = False
        self.agreed = asyncio.Event()

    async def agree(self) -> str | None:
        """Return the version that takes over, None where this llamaops is the one on disk. Raises LlamaopsError."""
        if not await asyncio.to_thread(self._upgrade.is_there):
            return None
        version = await asyncio.to_thread(self._upgrade.make_ready)
        self.agreed.set()
        return version

    def give_up(self) -> None:
        """Let nobody take over: somebody wants everything to end."""
        self._given_up = True

    @property
    def stands(self) -> bool:
        """Whether it was agreed and not given up."""
        return self.agreed.is_set() and not self._given_up


def become(words: Sequence[str], sock: socket.socket, affinity: CpuSet | None, nice: int) -> NoReturn:
    """Execute the llamaops on disk with the listening socket, on the CPUs and at the niceness we came with."""
    with contextlib.suppress(OSError):
        if affinity is not None:
            os.sched_setaffinity(0, affinity)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    os.dup2(sock.fileno(), FIRST_FD)
    os.set_inheritable(FIRST_FD, True)
    passed = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    os.execve(sys.executable, llamaops_argv(*words), os.environ | passed)  # noqa: S606 - no shell is wanted
