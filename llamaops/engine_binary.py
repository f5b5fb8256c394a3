"""Ask a llama-server binary what it is, and say why when it can't run here."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from llamaops.cache import make_folder, read_json, write_json
from llamaops.child import Done, capture
from llamaops.core.engine import (
    Engine,
    lacking,
    missing_part,
    openmp_of,
    parse_features,
    parse_help,
    parse_version,
    takes_unix_socket,
)
from llamaops.errors import EngineUnavailable, NotPermitted
from llamaops.recipe import cpu_features

ANSWER_S = 15.0
"""How long ``--version`` may take; it is milliseconds, but a cold network disk or a GPU runtime is slow."""
FACTS = 2
"""Raised whenever more is asked of a binary than what older notes hold."""
BUILD_HINT = "build one for this machine: llamaops engine build"


ILLEGAL = (-signal.SIGILL, 128 + signal.SIGILL)
ILLEGAL_WHY = "illegal instruction: it was built for a newer CPU"


@dataclass(frozen=True, slots=True)
class _Binary:
    path: Path
    env: Mapping[str, str]

    def ask(self, *options: str, **extra: str) -> Done:
        try:
            return capture([str(self.path), *options], env={**self.env, **extra}, timeout_s=ANSWER_S)
        except subprocess.TimeoutExpired:
            _unfit(self.path, f"it did not answer {options[0]} within {ANSWER_S:.0f} s")
        except OSError as exc:
            _unfit(self.path, _why_not_started(self.path, exc))


def read_engine(path: Path, origin: str, *, cache: Path | None = None) -> Engine:
    """Read version, flags and OpenMP runtime from the binary itself.

    With ``cache``, what it said before is believed while path, size, time and CPU are the same (docs/adr/0003): four
    process starts take 35 ms on a quiet machine, ten times that on a busy one. Raises EngineUnavailable when the file
    is missing, not executable, made for another machine, CPU or C library, or is no llama-server.
    """
    real = path.expanduser().resolve()
    if not real.is_file():
        _unfit(path, "there is no such file" if not real.exists() else "it is not a file")
    if cache is None:
        return _ask(real, origin)
    notes = cache / "engines" / "facts" / f"{hashlib.sha256(str(real).encode()).hexdigest()[:16]}.json"
    stamp = _stamp(real)
    known = read_json(notes)
    if known.get("stamp") == stamp and os.access(real, os.X_OK):
        facts = known["engine"]
        lists = {"flags": frozenset(facts["flags"]), "features": tuple(facts["features"])}
        return Engine(**{**facts, **lists, "origin": origin})
    engine = _ask(real, origin)
    with suppress(OSError, NotPermitted):  # a cache that can't be written only costs time
        make_folder(notes.parent)
        write_json(notes, {"stamp": stamp, "engine": {**asdict(engine), "flags": sorted(engine.flags)}})
    return engine


def _stamp(real: Path) -> list[str | int]:
    """Return what must be the same for remembered facts to hold."""
    info = real.stat()
    return [FACTS, str(real), info.st_size, info.st_mtime_ns, info.st_ino, os.uname().machine, cpu_features()]


def _ask(real: Path, origin: str) -> Engine:
    binary = _Binary(real, _clean_env(os.environ))
    helped = binary.ask("--help")
    if helped.code != 0:
        _unfit(real, _why_failed(helped))
    flags = parse_help(helped.tail)
    if not {"--model", "--ctx-size", "--port"} <= flags:
        _unfit(real, "its --help is not that of llama-server")
    features = _features(binary, flags)
    if missing := lacking(features, cpu_features()):
        _unfit(real, f"it was built for a CPU with {', '.join(missing)}, which this one lacks: it would end with an "
                     "illegal instruction")
    version = parse_version(binary.ask("--version").tail)
    # The loader prints the libraries and exits (ld.so(8)); a static or musl binary just prints its version again.
    libraries = binary.ask("--version", LD_TRACE_LOADED_OBJECTS="1").tail
    return Engine(
        path=str(real),
        version=version,
        flags=flags,
        openmp=openmp_of(libraries) or _openmp_inside(real),
        origin=origin,
        unix_socket=takes_unix_socket(helped.tail),
        features=features,
    )


def _features(binary: _Binary, flags: frozenset[str]) -> tuple[str, ...]:
    """Return the instruction sets it was compiled for: it tells them before it looks for the model, and ends there."""
    if not {"--verbosity", "--host"} <= flags:
        return ()
    with tempfile.TemporaryDirectory(prefix="llamaops-") as folder:
        try:
            said = binary.ask("--verbosity", "5", "--model", f"{folder}/none.gguf", "--host", f"{folder}/ask.sock")
        except EngineUnavailable:  # it waits for something: no reason to refuse what --help did not
            return ()
    if said.code in ILLEGAL:
        _unfit(binary.path, ILLEGAL_WHY)
    return parse_features(said.tail)


def _clean_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Drop what would make the binary load a model or another library instead of answering."""
    dropped = ("LLAMA_", "LD_PRELOAD", "HF_", "GGML_")
    return {k: v for k, v in environ.items() if not k.startswith(dropped)} | {"LC_ALL": "C"}


def _openmp_inside(path: Path) -> str | None:
    """Find the runtime of CPU backends loaded later (``GGML_BACKEND_DL``), or one linked into the binary."""
    needed = {b"\0libgomp.so": "libgomp", b"\0libomp.so": "libomp", b"\0libiomp5.so": "libomp"}
    for library in sorted(path.parent.glob("libggml-cpu*.so*")):
        if found := _first_of(library, needed):
            return found
    # Each runtime's own error prefix: text that only the runtime itself contains.
    return _first_of(path, {b"\nlibgomp: ": "libgomp", b"OMP: Error #": "libomp"})


def _first_of(path: Path, needles: Mapping[bytes, str]) -> str | None:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return next((name for needle, name in needles.items() if data.find(needle) >= 0), None)
    except (OSError, ValueError):
        return None


def _why_not_started(path: Path, exc: OSError) -> str:
    if exc.errno in (errno.EACCES, errno.EPERM):
        if os.access(path, os.X_OK):
            return "the kernel refused to run it (a file system mounted noexec?)"
        return "it is not executable for this user (chmod +x, or another user's folder)"
    if exc.errno == errno.ENOEXEC:
        return f"it is no program for this machine ({os.uname().machine})"
    if exc.errno == errno.ENOENT:
        return "its dynamic loader is not here: it was built for another C library (glibc or musl)"
    return exc.strerror or str(exc)


def _why_failed(done: Done) -> str:
    if done.code in ILLEGAL:
        return ILLEGAL_WHY
    if part := missing_part(done.tail):
        newer = part.startswith(("GLIBC", "CXXABI", "GOMP"))
        return f"it needs {part}, newer than what this system has" if newer else f"the library {part} is not installed"
    last = next((line for line in reversed(done.tail.splitlines()) if line.strip()), "no output")
    ended = f"signal {-done.code}" if done.code < 0 else f"exit code {done.code}"
    return f"--help ended with {ended}: {last[:200]}"


def _unfit(path: Path, why: str) -> NoReturn:
    raise EngineUnavailable("this llama-server can't be used", where=str(path), why=why, fix=BUILD_HINT)


def newest_glibc(path: Path) -> str | None:
    """Return the newest C library version that the binary asks for, such as ``2.34``; None for a static one.

    Read from the version names in its string table (``GLIBC_2.34``), which no tool is needed for.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        names = {match[1].decode() for match in re.finditer(rb"\0GLIBC_(\d+(?:\.\d+)+)(?=\0)", data)}
    return max(names, key=lambda name: [int(part) for part in name.split(".")], default=None)
