"""The pinned engine (vendor/llama.cpp.toml), and which builds of it in the cache fit this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llamaops.cache import read_json
from llamaops.errors import BuildFailed
from llamaops.resources import resource

MANIFEST = "manifest.json"
HOW_BUILT = 1
"""Raised whenever the way of building changes so that older results must not be used."""

OFF = ("OFF", "0", "FALSE", "NO")
"""How CMake spells that an option is off."""

Cmake = Mapping[str, str | bool | int]

# What compilers emit under -march=native. The rest of /proc/cpuinfo (mitigations, hypervisor marks) changes with the
# kernel and would cause rebuilds for nothing.
_ISA = re.compile(
    r"(s?sse\w*|pni|avx\w*|amx\w*|fma4?|f16c|bmi[12]|abm|popcnt|movbe|aes|vaes|pclmulqdq|vpclmulqdq|gfni|sha_ni|adx|xop|tbm"
    r"|asimd\w*|neon|vfpv[34]\w*|fphp|sve\w*|sme2?|i8mm|bf16|atomics|crc32|dcpop|rv\w+|altivec\w*|vsx|vx\w*)"
)


@dataclass(frozen=True, slots=True)
class EngineSource:
    """One place to get the source from; ``where`` is a package name, a URL or an absolute path."""

    kind: Literal["sdist", "url", "path"]
    where: str
    version: str | None
    sha256: str | None
    folder: str

    def identity(self) -> str:
        """Return what tells this source from any other: its checksum, or a tree's file names, sizes and times."""
        return self.sha256 or _tree_stamp(Path(self.where))


@dataclass(frozen=True, slots=True)
class Recipe:
    """Build number (None: the tree tells), CMake flags, targets, sources in the order they are tried, our patches."""

    build: int | None
    cmake: Cmake
    targets: tuple[str, ...]
    sources: tuple[EngineSource, ...]
    patches: tuple[Path, ...] = ()

    @property
    def version(self) -> str | None:
        """Return the build number as an engine spells it (``b11434``)."""
        return f"b{self.build}" if self.build else None

    def patches_for(self, source: EngineSource) -> tuple[Path, ...]:
        """Return what is changed in this source: nothing in a tree of the user's own."""
        return () if source.kind == "path" else self.patches


def load_recipe(environ: Mapping[str, str]) -> Recipe:
    """Read the shipped recipe, or the file that ``LLAMAOPS_RECIPE`` names. Raises BuildFailed when it does not hold."""
    path = Path(environ.get("LLAMAOPS_RECIPE") or resource("vendor/llama.cpp.toml"))
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return Recipe(
            build=table.get("build"),
            cmake=table.get("cmake", {}),
            targets=tuple(table["targets"]),
            sources=tuple(_source(entry, path.parent) for entry in table["source"]),
            patches=tuple((path.parent / name).resolve(strict=True) for name in table.get("patches", ())),
        )
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise BuildFailed("the engine recipe can't be read", where=str(path), why=f"{type(exc).__name__}: {exc}",
                          fix="compare it with vendor/llama.cpp.toml") from exc


def _source(entry: Mapping[str, Any], base: Path) -> EngineSource:
    kind, folder = entry["kind"], entry.get("folder", "")
    if kind == "path":
        return EngineSource("path", str((base / entry["path"]).resolve()), None, None, folder)
    if kind not in ("sdist", "url"):
        raise ValueError(f"source kind {kind!r} is not sdist, url or path")
    if not re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]):
        raise ValueError("sha256 must be 64 hexadecimal digits")
    where = entry["package"] if kind == "sdist" else entry["url"]
    return EngineSource(kind, where, entry.get("version"), entry["sha256"], folder)


def _tree_stamp(root: Path) -> str:
    digest = hashlib.sha256()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name != ".git")
        for name in sorted(names):
            info = (Path(folder) / name).lstat()
            digest.update(f"{folder}/{name}\0{info.st_size}\0{info.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def flags(recipe: Recipe, extra: Cmake) -> dict[str, str]:
    """Return the CMake definitions, the profile's ``engine.cmake`` winning; booleans become ON and OFF."""
    merged = {**recipe.cmake, **extra}
    return {k: ("ON" if v else "OFF") if isinstance(v, bool) else str(v) for k, v in sorted(merged.items())}


def fingerprint(recipe: Recipe, extra: Cmake, source: EngineSource) -> dict[str, Any]:
    """Return what a build must agree with to be used here: everything of the key except the compiler.

    The compiler is left out on purpose: a binary does not stop working when the compiler is upgraded or removed, and
    rebuilding for minutes after each system update would surprise.
    """
    wanted = flags(recipe, extra)
    portable = wanted.get("GGML_NATIVE", "ON").upper() in OFF
    patches = [hashlib.sha256(patch.read_bytes()).hexdigest() for patch in recipe.patches_for(source)]
    return {
        "how": HOW_BUILT,
        "build": recipe.build,
        "source": source.identity(),
        "cmake": wanted,
        "targets": list(recipe.targets),
        "machine": os.uname().machine,
        "cpu": "portable" if portable else cpu_features(),
    } | ({"patches": patches} if patches else {})


def key(fingerprint: Mapping[str, Any], compiler: str) -> str:
    """Return the twelve digits that tell builds apart."""
    text = json.dumps({**fingerprint, "compiler": compiler}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the instruction sets that every CPU here has, space-separated; empty where the kernel does not say."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = re.findall(r"^(?:flags|Features|isa)\s*:(.*)$", text, re.MULTILINE)
    common = set.intersection(*(set(line.split()) for line in set(lines))) if lines else set()
    return " ".join(sorted(name for name in common if _ISA.fullmatch(name)))


def engines_folder(cache: Path) -> Path:
    """Return where builds live."""
    return cache / "engines"


def all_built(cache: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield every finished build and its manifest, newest first, fitting or not."""
    found = [path.parent for path in engines_folder(cache).glob(f"[!.]*/{MANIFEST}")]
    for folder in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        yield folder, read_json(folder / MANIFEST)


def built_engines(recipe: Recipe, extra: Cmake, cache: Path) -> Iterator[Path]:
    """Yield the finished builds of this recipe that suit this machine's CPU, newest first."""
    wanted: list[dict[str, Any]] | None = None
    for folder, manifest in all_built(cache):
        # Computed only when there is something to compare: a source tree by path takes a walk.
        wanted = wanted or [fingerprint(recipe, extra, source) for source in recipe.sources]
        if {k: manifest.get(k) for k in wanted[0]} in wanted:
            yield folder
