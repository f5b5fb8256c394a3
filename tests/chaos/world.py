"""A llamaops with everything around it that may fail: its disk, memory limit, wall clock, engine file and profile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_rig import marked
from running import ROOT

from llamaops.child import llamaops_argv
from llamaops.errors import LlamaopsError
from llamaops.serve import control
from llamaops.serve.instance import locate

NAME = "chaos"
PATIENCE_S = 240.0
"""How long a condition is awaited that should hold in a second or two: machines may be slow and loaded."""
_CGROUPS = Path("/sys/fs/cgroup/memory")
_DISK = "40m"
_PROFILE = """
name: chaos
model: {{source: 'path:{model}', context: {context}}}
engine: {{path: {engine}, build: never, args: [--load-mode, none], env: {{CHAOS_TURN: '{turn}'}}}}
placement: {{nice: 0, policy: other}}
memory: {{prompt_cache_mib: 0, limit: {limit}}}
serve: {{port: 0, slots: 2}}
supervise:
  start_timeout_s: 60
  stall_timeout_s: 1
  drain_timeout_s: 30
  stop_grace_s: 0.5
  backoff: {{initial_s: 0.1, max_s: 0.8, reset_after_s: 2}}
"""


class Broken(AssertionError):
    """Something that llamaops promises does not hold."""


async def until(met: Callable[[], Any], what: str, every_s: float = 0.02, within_s: float = PATIENCE_S) -> Any:
    """Return the first true value of ``met``, which runs in a thread; raises Broken when it never comes."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not (value := await asyncio.to_thread(met)):
        if asyncio.get_running_loop().time() > deadline:
            raise Broken(f"not within {within_s:.0f} s: {what}")
        await asyncio.sleep(every_s)
    return value


@dataclass
class World:
    """One ``llamaops up`` in a folder of its own, from a copy of the package, which `install` changes.

    ``command`` stands for the program ``llamaops`` instead. ``left_out`` names what this machine has no means for, with
    the reason.
    """

    folder: Path
    engine_source: str
    model: str
    command: Sequence[str] = ()
    memory_limit: int | str = "auto"
    left_out: dict[str, str] = field(default_factory=dict)
    url: str = ""
    turn: int = 0

    def __post_init__(self) -> None:
        self.runtime = Path(tempfile.mkdtemp(prefix="llo-chaos-", dir="/tmp"))  # short: socket paths hold 107 bytes
        self.profile = self.folder / "chaos.yaml"
        self.engine_file = self.folder / "bin" / "llama-server"
        self.engine_file.parent.mkdir()
        shutil.copy2(self.engine_source, self.engine_file)
        self.write_profile()
        self._package = self.folder / "site" / "llamaops"
        if self.command:
            self.left_out["upgrade"] = "it does not run from a copy of its own"
        else:
            self._copy_package()
        self._clock = self.folder / "clock"
        self._clock.write_bytes(struct.pack("q", 0))
        self._env = os.environ | {"XDG_RUNTIME_DIR": str(self.runtime), "XDG_STATE_HOME": str(self.folder / "state"),
                                  "LLAMAOPS_CACHE": str(self.folder / "cache"), "NO_COLOR": "1"}
        (self.folder / "state").mkdir()
        self.cgroup = self._make_cgroup()

    # Start and end.

    async def start(self) -> None:
        """Start it and wait until it serves."""
        library = self._build_clock()
        words = [*self._on_a_small_disk(), *self._in_the_cgroup(), "env", *library, *self.command, "up",
                 str(self.profile), "--log-file", str(self.folder / "state" / "up.log")]
        with (self.folder / "up.err").open("wb") as stderr:
            self.process = subprocess.Popen(words, env=self._env, stdout=subprocess.PIPE, stderr=stderr, text=True,
                                            start_new_session=True)
        assert self.process.stdout is not None
        self.url = (await asyncio.to_thread(self.process.stdout.readline)).strip()
        if not self.url:
            raise Broken(f"llamaops did not start: {self.complaints()}")
        self._state_fd = os.open(f"/proc/{self.pid}/root{self.folder}/state", os.O_RDONLY | os.O_DIRECTORY)
        self.state = Path(f"/proc/self/fd/{self._state_fd}")  # seen as llamaops sees it, and longer than it lives
        self.mark = locate(self.runtime / "llamaops", NAME).mark

    async def stop(self) -> None:
        """Ask it to end, and check that it does and leaves nothing."""
        self.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.process.wait, PATIENCE_S)
        if code != 0:
            raise Broken(f"llamaops ended with {code}: {self.complaints()}")
        if left := marked(self.mark):
            raise Broken(f"engines left behind: {left}")
        if files := [p for p in self.runtime.rglob("*") if not p.is_dir()]:
            raise Broken(f"files left behind: {files}")

    def close(self) -> None:
        """Remove whatever a failed run left."""
        if process := getattr(self, "process", None):
            process.kill()
            process.wait()
            process.stdout.close()
        if hasattr(self, "_state_fd"):
            os.close(self._state_fd)
        shutil.rmtree(self.runtime, ignore_errors=True)
        if self.cgroup:
            with contextlib.suppress(OSError):
                self.cgroup.rmdir()

    def complaints(self) -> str:
        """Return the last lines that llamaops said."""
        logs = [self.folder / "up.err", *([self.state / "up.log"] if hasattr(self, "state") else [])]
        return "\n".join(line for log in logs for line in log.read_text(errors="replace").splitlines()[-30:])

    def _copy_package(self) -> None:
        """Run from a copy, as pip would install it."""
        for name in ("llamaops", "templates", "vendor"):
            shutil.copytree(ROOT / name, self.folder / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.command = ("env", f"PYTHONPATH={self.folder / 'site'}", *llamaops_argv())

    # What can be seen.

    @property
    def pid(self) -> int:
        """Process id of the supervisor (every wrapper execs its successor)."""
        return self.process.pid

    def status(self) -> dict[str, Any]:
        """Return ``llamaops status --json``; empty while it does not answer."""
        if self.process.poll() is not None:
            raise Broken(f"llamaops ended with {self.process.returncode}: {self.complaints()}")
        with contextlib.suppress(LlamaopsError):
            document: dict[str, Any] = self.tell("status")
            return document
        return {}

    def tell(self, command: str, **arguments: Any) -> Any:
        """Send a command to the control socket. Raises LlamaopsError."""
        socket = locate(self.runtime / "llamaops", NAME).control_socket
        return control.call(socket, command, timeout_s=PATIENCE_S, **arguments)

    def strike(self, number: int) -> int | None:
        """Send a signal to the engine, if there is one, and return its pid."""
        pid: int | None = self.status().get("pid")
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid

    def is_serving(self) -> bool:
        """Tell whether it is ready, with the one engine that serves as its only child."""
        status = self.status()
        return status.get("state") == "ready" and not status["retiring"] and self.children() == {status["pid"]}

    def children(self) -> set[int]:
        """Return the pids of the supervisor's children, zombies included."""
        return {int(pid) for task in Path(f"/proc/{self.pid}/task").iterdir()
                for pid in (task / "children").read_text().split()}

    def descriptors(self) -> list[str]:
        """Return what the supervisor's descriptors refer to, by kind."""
        found = []
        for fd in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(str(fd.readlink()).partition(":")[0])
        return sorted(found)

    def rss_mib(self) -> float:
        """Return the supervisor's resident memory, MiB."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    def runtime_files(self) -> set[str]:
        """Return the names in the instance's folder."""
        return {p.name for p in (self.runtime / "llamaops" / NAME).iterdir()}

    def runs_version(self, version: str) -> bool:
        """Tell whether a llamaops of that version serves; nobody answers just between two of them."""
        try:
            status = self.status()
        except LlamaopsError:
            return False
        return status.get("llamaops") == version and status["state"] == "ready"

    # What can be changed.

    def install(self, version: str, more: str = "") -> None:
        """Put another version of llamaops on the disk, with ``more`` in what is imported first."""
        self.replace_file(self._package / "__init__.py", f'__version__ = "{version}"\n{more}'.encode(), 0o644)

    def write_profile(self, *, turn: int = 0, context: int = 256) -> None:
        """Write a good profile; another ``turn`` or ``context`` needs a new engine."""
        text = _PROFILE.format(model=self.model, engine=self.engine_file, turn=turn, context=context,
                               limit=self.memory_limit)
        self.replace_file(self.profile, text.encode())

    def renew_profile(self) -> None:
        """Write a good profile that needs a new engine."""
        self.turn += 1
        self.write_profile(turn=self.turn, context=256 + 32 * (self.turn % 2))

    def replace_file(self, path: Path, data: bytes | None, mode: int = 0o755) -> None:
        """Put ``data`` there in one step (None: nothing)."""
        if data is None:
            path.unlink()
            return
        new = path.with_name(path.name + ".new")
        new.write_bytes(data)
        new.chmod(mode)
        new.replace(path)

    def shift_clock(self, seconds: int) -> None:
        """Let the supervisor's wall clock jump to this distance from the true one."""
        # In place: a file that is empty for a moment is a SIGBUS for those who have it mapped.
        with self._clock.open("r+b", buffering=0) as file:
            file.write(struct.pack("q", seconds))

    def limit_memory(self, limit: int) -> bool:
        """Limit what the supervisor and its engine may use; -1 lifts it. Tell whether the kernel took it."""
        assert self.cgroup
        try:
            (self.cgroup / "memory.limit_in_bytes").write_text(str(limit))
        except OSError:  # more is used, and can't be taken back
            return False
        return True

    def anonymous_bytes(self) -> int:
        """Return the memory in use that the kernel can't take back."""
        assert self.cgroup
        fields = dict(line.split() for line in (self.cgroup / "memory.stat").read_text().splitlines())
        return int(fields["rss"])

    # How it is made.

    def _build_clock(self) -> list[str]:
        source, library = Path(__file__).with_name("clock_shift.c"), self.folder / "clock_shift.so"
        if not shutil.which("cc"):
            self.left_out["clock"] = "no C compiler"
            return []
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        return [f"LD_PRELOAD={library}", f"CHAOS_CLOCK={self._clock}"]

    def _on_a_small_disk(self) -> list[str]:
        """Return the words that give a command a small disk of its own to log to."""
        enter = ["unshare", "--mount", "--propagation", "private"]
        if subprocess.run([*enter, "true"], capture_output=True).returncode:
            self.left_out["disk"] = "not permitted to mount a small disk"
            return []
        mount = f'mount -t tmpfs -o size={_DISK},mode=700 chaos "$1" && shift && exec "$@"'
        return [*enter, "sh", "-c", mount, "sh", str(self.folder / "state")]

    def _make_cgroup(self) -> Path | None:
        cgroup = _CGROUPS / f"llo-chaos-{os.getpid()}"
        try:
            cgroup.mkdir()
        except OSError as exc:
            self.left_out["memory"] = f"no memory cgroup (v1) of its own: {exc.strerror}"
            return None
        return cgroup

    def _in_the_cgroup(self) -> list[str]:
        enter = f'echo $$ > {self.cgroup}/cgroup.procs && exec "$@"'
        return ["sh", "-c", enter, "sh"] if self.cgroup else []


def as_json(document: object) -> str:
    """Return a document as it is shown when something is broken."""
    return json.dumps(document, indent=1, ensure_ascii=False, default=str)
