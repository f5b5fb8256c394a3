"""Facts about a llama-server binary, read from its own ``--version`` and ``--help``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llamaops.core.topology import Host

JOB_BYTES = 1 << 30
"""Memory that one compiler takes on llama.cpp's largest files."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One llama-server binary.

    ``path`` is the real path that is executed. ``version`` is spelled ``b11434`` (None when the binary does not say).
    ``flags`` holds every option spelling of ``--help``, long and short. ``openmp`` is ``libgomp``, ``libomp`` or None
    for a build without OpenMP, read from the libraries it loads. ``origin`` tells how it was found: ``path``,
    ``cache``, ``PATH`` or ``built``. ``unix_socket``: its ``--host`` takes one. ``features`` are the instruction sets
    it was compiled for, as ggml spells them; empty where it does not say.
    """

    path: str
    version: str | None
    flags: frozenset[str]
    openmp: str | None
    origin: str = "path"
    unix_socket: bool = True
    features: tuple[str, ...] = ()


_BUILD = re.compile(r"\(build (\d+)|^version: (\d+) \(", re.MULTILINE)
_OPTION = re.compile(r"(--?[A-Za-z][\w-]*)(,?)[ ]*")
_LOADED = re.compile(r"\b(libgomp|libomp|libiomp5)\b")
_LIBRARY = re.compile(r"^\s*(\S+)\s+=>\s+not found|error while loading shared libraries: ([^:\s]+)", re.MULTILINE)
_NEWER = re.compile(r"version `((?:GLIBC|GLIBCXX|CXXABI|GOMP)_[\w.]+)' not found")


def parse_version(text: str) -> str | None:
    """Return the build number of ``--version`` as ``b11434``; None where the binary does not know it.

    Two spellings exist: ``version: 5432 (abcdef0)`` and, since llama.cpp has release numbers,
    ``version: 0.6.0-dev (build 11434, commit abcdef0)``. Builds without git state 0.
    """
    found = _BUILD.search(text)
    number = int(found[1] or found[2]) if found else 0
    return f"b{number}" if number else None


def parse_help(text: str) -> frozenset[str]:
    """Return every option spelling of ``--help``: those at the start of a line, comma-separated."""
    return frozenset(option for line in text.splitlines() if line.startswith("-") for option in _spellings(line))


def _spellings(line: str) -> list[str]:
    out, pos = [], 0
    while found := _OPTION.match(line, pos):
        out.append(found[1])
        if not found[2]:
            break
        pos = found.end()
    return out


CPU_FLAGS = {
    "SSE3": "pni", "SSSE3": "ssse3", "AVX": "avx", "AVX_VNNI": "avx_vnni", "AVX2": "avx2", "F16C": "f16c", "FMA": "fma",
    "BMI2": "bmi2", "AVX512": "avx512f", "AVX512_VBMI": "avx512vbmi", "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16", "AMX_INT8": "amx_int8",
    "NEON": "asimd", "FP16_VA": "asimdhp", "DOTPROD": "asimddp", "MATMUL_INT8": "i8mm", "SVE": "sve", "SME": "sme",
}  # fmt: skip
"""ggml's name of an instruction set → the kernel's in /proc/cpuinfo (ggml-cpu.c, arch/*/kernel/cpu)."""
BASE_FEATURES = frozenset({"AVX", "AVX2", "F16C", "FMA", "NEON", "DOTPROD"})
"""Those that a build without decodes at a fraction of the speed; the newer ones speed up prompts."""
_FEATURE = re.compile(r"\b([A-Z][A-Z0-9_]+) = 1\b")


def parse_features(text: str) -> tuple[str, ...]:
    """Return the instruction sets of a ``system_info`` line that `CPU_FLAGS` knows."""
    found = re.search(r"system_info:.*", text)
    return tuple(name for name in _FEATURE.findall(found[0]) if name in CPU_FLAGS) if found else ()


def lacking(features: Iterable[str], cpu: str) -> list[str]:
    """Return the instruction sets that a CPU with these kernel flags lacks; none where the flags are unknown.

    32-bit ARM kernels say ``neon`` for what 64-bit ones call ``asimd``.
    """
    has = set(cpu.replace("neon", "neon asimd").split())
    return [name for name in features if CPU_FLAGS[name] not in has] if has else []


def unused(features: Iterable[str], cpu: str) -> list[str]:
    """Return the instruction sets that this CPU has and the engine does not use; none where it does not say."""
    used = set(features)
    return [name for name, flag in CPU_FLAGS.items() if used and flag in cpu.split() and name not in used]


def takes_unix_socket(help_text: str) -> bool:
    """Tell whether ``--host`` accepts the path of a UNIX socket, as its own help says."""
    return "unix socket" in help_text.lower()


def openmp_of(library_names: str) -> str | None:
    """Return ``libgomp`` or ``libomp`` (Intel's libiomp5 is the same runtime) if the text names one of them."""
    found = _LOADED.search(library_names)
    return None if not found else "libgomp" if found[1] == "libgomp" else "libomp"


def missing_part(loader_text: str) -> str | None:
    """Name what the dynamic loader did not find: a library, or a symbol version such as ``GLIBC_2.38``."""
    if found := _NEWER.search(loader_text):
        return found[1]
    found = _LIBRARY.search(loader_text)
    return (found[1] or found[2]) if found else None


def compile_jobs(host: Host) -> int:
    """Return how many compilers may run at once: one per usable CPU, within the cgroup's quota and the memory left."""
    cpus = host.online or frozenset(cpu.id for cpu in host.cpus)
    for mask in (host.affinity, host.cgroup.cpuset):
        cpus = cpus & mask if mask and cpus else cpus or mask or cpus
    bounds: list[float] = [len(cpus) or 1]
    if host.cgroup.quota_cpus is not None:
        bounds.append(host.cgroup.quota_cpus)
    bounds += [left / JOB_BYTES for left in (host.mem_available, host.cgroup.memory_headroom) if left is not None]
    return max(1, int(min(bounds)))
