"""Fetch one file from the package index that pip is configured for, and nothing it depends on."""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from llamaops.cache import files_below, require_room
from llamaops.child import Done, run
from llamaops.core.progress import Bar
from llamaops.errors import LlamaopsError, TryAgain, Unavailable

_SIZE = re.compile(r"Downloading \S+ \(([\d.]+) (kB|MB|GB|bytes)\)")
_UNITS = {"bytes": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3}
_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|name resolution|Connect(ion)?Timeout|ReadTimeout|ProxyError|IncompleteRead"
    r"|Connection (refused|reset)|Max retries exceeded|RemoteDisconnected|(429|5\d\d) (Client|Server) Error"
)
_REFUSED = (
    "PIP_CONSTRAINT", "PIP_DEST", "PIP_LOG", "PIP_NO_BINARY", "PIP_ONLY_BINARY", "PIP_PREFIX", "PIP_PROGRESS_BAR",
    "PIP_QUIET", "PIP_REQUIREMENT", "PIP_REQUIRE_HASHES", "PIP_TARGET", "PIP_USER", "PIP_VERBOSE",
)  # fmt: skip
"""Settings of the user's that change what is fetched or how it is told; indexes, proxies and certificates stay."""


def pip_download(
    package: str,
    version: str,
    *,
    form: Literal["wheel", "sdist"],
    sha256: str | None,
    folder: Path,
    environ: Mapping[str, str],
    bar: Bar,
    error: type[Unavailable],
    cancel: threading.Event | None = None,
) -> Path:
    """Fetch one release file into the empty ``folder`` and return its path.

    With ``sha256``, pip checks it before it looks inside. Raises ``error`` (no pip, no such release, wrong checksum, no
    room) or TryAgain (network).
    """
    if importlib.util.find_spec("pip") is None:
        raise error("pip is missing in the Python that runs llamaops", where=sys.executable,
                    fix=f"{sys.executable} -m ensurepip   (with uv: uv pip install pip)")
    watch = _Watch(folder, bar, error)
    done = run(
        _command(package, version, form, sha256, folder), env=pip_environment(environ, folder),
        on_line=watch.line, on_idle=watch.idle, log=folder / "pip.log", cancel=cancel,
    )
    found = [path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz", ".zip"))]
    if done.code or len(found) != 1:
        raise pip_failure(f"{package}=={version}", done, (folder / "pip.log").read_text(errors="replace"), error)
    return found[0]


def _command(package: str, version: str, form: str, sha256: str | None, folder: Path) -> list[str]:
    # The checksum goes through a file: pip takes --hash nowhere else. ":all:" for sdists would also compile the
    # build tools of the package from source.
    requirements = folder / "requirements.txt"
    hashed = f" --hash=sha256:{sha256}" if sha256 else ""
    requirements.write_text(f"{package}=={version}{hashed}\n", encoding="utf-8")
    choice = ["--only-binary", package] if form == "wheel" else ["--no-binary", package]
    return [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--progress-bar", "off", "--no-cache-dir", *choice,
        *(["--require-hashes"] if sha256 else []), "--requirement", str(requirements), "--dest", str(folder),
    ]  # fmt: skip


def pip_environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return pip's environment: the user's, without what would change the files or the output; temporary files in
    ``folder``."""
    kept = {k: v for k, v in environ.items() if k not in _REFUSED}
    ours = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1", "LC_ALL": "C.UTF-8"}
    return kept | ours | {"TMPDIR": str(folder)}


class _Watch:
    """Progress from outside: pip of every age tells the size once and writes into its temporary folder."""

    def __init__(self, folder: Path, bar: Bar, error: type[LlamaopsError]) -> None:
        self.folder, self.bar, self.error = folder, bar, error
        self.total: int | None = None

    def line(self, text: str) -> None:
        if found := _SIZE.search(text):
            self.total = int(float(found[1]) * _UNITS[found[2]])
            require_room(self.folder, 2 * self.total, "the download", self.error)  # pip copies it once

    def idle(self) -> None:
        sizes = []
        for path in files_below(self.folder):
            with suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        if sizes:
            self.bar.update(min(max(sizes), self.total) if self.total else max(sizes), self.total)


def pip_failure(what: str, done: Done, said: str, error: type[Unavailable]) -> LlamaopsError:
    """Return what pip's failure means; ``said`` is all it printed."""
    if "DO NOT MATCH THE HASHES" in said:
        return error(f"{what} has the wrong checksum", why="the index serves a file other than the pinned one",
                     fix="don't use it; check which index pip is configured for: pip config list", detail=done.tail)
    if "No space left on device" in said:
        return error(f"the disk filled up while fetching {what}", fix="free some space and run the same command again")
    if _NETWORK.search(said):
        return TryAgain(f"can't reach the package index for {what}", why=_last_error(done.tail),
                        fix="check the network, the proxy and pip's index setting, then run the same command again")
    versions = re.search(r"from versions: ([^)]*)\)", said)
    known = _last_error(done.tail)
    if versions:
        none = "the index knows no file of it for this Python (or could not be reached)"
        known = none if versions[1] == "none" else f"the index has: {versions[1][-200:]}"
    return error(f"can't fetch {what}", why=known, detail=done.tail,
                 fix="check name and version, and the index pip is configured for: pip config list")


def _last_error(text: str) -> str:
    errors = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR")]
    return errors[-1] if errors else "pip ended without a reason"
