"""Build llama-server and its tools from the pinned source, once for each compiler, CPU and set of flags."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamaops import recipe as recipes
from llamaops.cache import disk_trouble_is, is_locked, locked, make_folder, require_room, write_json
from llamaops.child import run
from llamaops.core.engine import Engine
from llamaops.core.progress import Bar, Progress
from llamaops.engine_binary import read_engine
from llamaops.engine_source import SourceMissingError, fetch_archive, unpack
from llamaops.errors import BuildFailed, EngineUnavailable, LlamaopsError
from llamaops.recipe import EngineSource, Recipe, load_recipe
from llamaops.toolchain import Toolchain, find_toolchain

if TYPE_CHECKING:
    from llamaops.core.profile import EngineSection

ROOM_BYTES = 1 << 30
"""Source (180 MiB), objects and binaries (130 MiB), download (40 MiB); the rest is for other CMake flags."""
ABANDONED_S = 24 * 3600
"""A half-built tree may be continued for a day; then it only fills the disk."""
@dataclass(frozen=True, slots=True)
class _Job:
    """One build: from where, with what, into which folders."""

    recipe: Recipe
    source: EngineSource
    tools: Toolchain
    fingerprint: Mapping[str, Any]
    key: str
    engines: Path
    environ: Mapping[str, str]
    cancel: threading.Event | None
    jobs: int

    @property
    def final(self) -> Path:
        return self.engines / f"b{self.recipe.build or 'tree'}-{self.key}"

    @property
    def work(self) -> Path:
        return self.engines / f".building-{self.key}"

    @property
    def log(self) -> Path:
        return self.work / "build.log"


def build_engine(
    section: EngineSection,
    cache: Path,
    progress: Progress,
    environ: Mapping[str, str],
    cancel: threading.Event | None = None,
    *,
    jobs: int = 1,
) -> Engine:
    """Build the pinned engine, or return the build that is there already for this compiler, CPU and these flags.

    Minutes of work at low priority, ``jobs`` compilers at once. A second caller waits for the first. Interrupted at any
    point (KeyboardInterrupt, SIGTERM, ``cancel``), nothing half-built is ever used, and the next call continues it.
    Raises BuildFailed, with the last lines of the log, or TryAgain.
    """
    recipe = load_recipe(environ)
    tools = find_toolchain(environ)
    failed: LlamaopsError | None = None
    for source in recipe.sources:
        try:
            return _build(_job(recipe, source, tools, section, cache, environ, cancel, jobs), progress)
        except SourceMissingError as exc:
            failed = exc.cause
            progress.say(f"source {source.kind}:{source.where} can't be had: {failed.what}")
    raise failed or BuildFailed("the engine recipe names no source", where="vendor/llama.cpp.toml")


def _job(
    recipe: Recipe, source: EngineSource, tools: Toolchain, section: EngineSection, cache: Path,
    environ: Mapping[str, str], cancel: threading.Event | None, jobs: int,
) -> _Job:  # fmt: skip
    fingerprint = recipes.fingerprint(recipe, section.cmake, source)
    key = recipes.key(fingerprint, tools.identity)
    engines = make_folder(recipes.engines_folder(cache))
    return _Job(recipe, source, tools, fingerprint, key, engines, environ, cancel, jobs)


def _build(job: _Job, progress: Progress) -> Engine:
    lock = job.engines / f".lock-{job.key}"
    with locked(lock, lambda: progress.say("another llamaops builds this engine; waiting for it …"), job.cancel):
        if not (job.final / recipes.MANIFEST).exists():
            started = time.monotonic()
            with disk_trouble_is(BuildFailed, "the build of the engine", job.work):
                _make(job, progress)
            progress.say(f"engine built in {time.monotonic() - started:.0f} s: {job.final}")
        return read_engine(job.final / "bin" / "llama-server", "built")


def _make(job: _Job, progress: Progress) -> None:
    _remove_abandoned(job.engines)
    make_folder(job.work)
    require_room(job.work, ROOM_BYTES, "building the engine", BuildFailed)
    job.log.write_text("", encoding="utf-8")
    tree = _source_tree(job, progress)
    with progress.bar("build engine", "steps") as bar:
        _configure(job, tree)
        _compile(job, bar)
    _publish(job, tree)


def _source_tree(job: _Job, progress: Progress) -> Path:
    if job.source.kind == "path":
        return _checked_tree(Path(job.source.where) / job.source.folder, job)
    unpacked = job.work / "unpacked"
    tree = job.work / "source"
    if not unpacked.exists():
        archive = fetch_archive(job.source, job.engines.parent, job.environ, progress, job.cancel)
        shutil.rmtree(tree, ignore_errors=True)
        unpack(archive, job.source.folder, tree)
        for patch in job.recipe.patches_for(job.source):
            _apply(patch, tree, job)
        unpacked.touch()
    return _checked_tree(tree, job)


def _checked_tree(tree: Path, job: _Job) -> Path:
    if not (tree / "CMakeLists.txt").is_file():
        raise BuildFailed("the engine source has no CMakeLists.txt", where=str(tree),
                          why=f"folder {job.source.folder!r} of {job.source.kind}:{job.source.where}")
    return tree


def _apply(patch: Path, tree: Path, job: _Job) -> None:
    path = job.environ.get("PATH")
    if tool := shutil.which("patch", path=path):
        argv = [tool, "--strip=1", "--batch", "--forward", "--fuzz=0", f"--input={patch}"]
    elif tool := shutil.which("git", path=path):
        argv = [tool, "apply", str(patch)]
    else:
        raise BuildFailed("can't build the engine: patch not found", where=f"PATH={path}",
                          fix="install patch or git   (or set engine.path to a llama-server)")
    done = run(argv, env=_build_env(job, tree), cwd=tree, log=job.log, cancel=job.cancel)
    if done.code:
        raise _failed(job, f"{patch.name} does not fit the engine's source", done.tail)


def _configure(job: _Job, tree: Path) -> None:
    build = job.work / "build"
    if (build / "configured").exists():
        return
    shutil.rmtree(build, ignore_errors=True)
    definitions = {**_ccache(job), **job.fingerprint["cmake"], **_fixed(job)}
    argv = [job.tools.cmake, "-S", str(tree), "-B", str(build), "-G", "Ninja" if job.tools.ninja else "Unix Makefiles"]
    argv += [f"-D{name}={value}" for name, value in sorted(definitions.items())]
    done = run(argv, env=_build_env(job, tree), log=job.log, niced=True, cancel=job.cancel)
    if done.code:
        raise _failed(job, "CMake can't configure the engine", done.tail)
    (build / "configured").touch()


def _ccache(job: _Job) -> dict[str, str]:
    """Return definitions that let ccache keep what the compilers make: another variant is then a matter of seconds."""
    tool = shutil.which("ccache", path=job.environ.get("PATH"))
    if tool is None or job.fingerprint["cmake"].get("GGML_CCACHE", "ON").upper() in recipes.OFF:
        return {}
    return {f"CMAKE_{language}_COMPILER_LAUNCHER": tool for language in ("C", "CXX")}


def _fixed(job: _Job) -> dict[str, str]:
    """Return definitions that no profile chooses: what the binary says it is, and that it can be moved."""
    definitions = {"CMAKE_BUILD_WITH_INSTALL_RPATH": "ON", "CMAKE_INSTALL_RPATH": "$ORIGIN"}
    if job.recipe.build is not None:
        # Otherwise cmake/build-info.cmake counts the commits of whatever git work tree the cache lies in.
        definitions |= {"LLAMA_BUILD_NUMBER": str(job.recipe.build), "LLAMA_BUILD_COMMIT": "unknown"}
    return definitions


def _build_env(job: _Job, tree: Path) -> dict[str, str]:
    dropped = ("GIT_", "LD_PRELOAD", "MAKEFLAGS", "NINJA_STATUS")
    kept = {k: v for k, v in job.environ.items() if not k.startswith(dropped)}
    fetched = job.source.kind != "path"
    # Each variant builds in a folder of its own; ccache must not take that for a difference.
    ccache = {"CCACHE_BASEDIR": str(job.work), "CCACHE_NOHASHDIR": "1"}
    return ccache | kept | {"LC_ALL": "C"} | ({"GIT_CEILING_DIRECTORIES": str(tree.parent)} if fetched else {})


def _compile(job: _Job, bar: Bar) -> None:
    build = job.work / "build"
    # Called directly and not through `cmake --build`: they end their compilers on SIGTERM, it does not.
    argv = [job.tools.maker, "-C", str(build), f"-j{job.jobs}", *job.recipe.targets]
    log_line = _Steps(bar)
    done = run(argv, env=_build_env(job, build), on_line=log_line, log=job.log, niced=True, cancel=job.cancel)
    if done.code:
        raise _failed(job, "the engine does not compile", _first_error(job.log) or done.tail)


class _Steps:
    """ninja's ``[12/340]`` or make's ``[ 12%]``, as a bar."""

    _STEP = re.compile(r"^\[\s*(\d+)(?:/(\d+)|%)\]")

    def __init__(self, bar: Bar) -> None:
        self.bar = bar

    def __call__(self, line: str) -> None:
        if found := self._STEP.match(line):
            self.bar.update(int(found[1]), int(found[2] or 100))


def _first_error(log: Path) -> str | None:
    """Return the first compiler error and what follows: with parallel jobs the end of the log is another file's."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    at = next((i for i, line in enumerate(lines) if re.search(r"\b(fatal )?error: |^FAILED: ", line)), None)
    return None if at is None else "\n".join(lines[at : at + 12])


def _failed(job: _Job, what: str, tail: str) -> BuildFailed:
    out_of_memory = "Killed signal" in tail or "out of memory" in tail.lower()
    return BuildFailed(
        what, where=str(job.log), detail=tail, why="a compiler was killed: out of memory" if out_of_memory else None,
        fix="close other programs, or give the machine swap, and run the same command again: it continues"
        if out_of_memory
        else "the whole log is in that file; with the cause mended, the same command continues the build",
    )


def _publish(job: _Job, tree: Path) -> None:
    """Check what was built and let it appear under its final name in one step."""
    ready = job.work / "ready"
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir()
    shutil.copytree(job.work / "build" / "bin", ready / "bin", symlinks=True)
    missing = [name for name in job.recipe.targets if not (ready / "bin" / name).is_file()]
    if missing:
        raise _failed(job, f"the build made no {', '.join(missing)}", "")
    engine = _checked(job, ready / "bin" / "llama-server")
    if (tree / "LICENSE").is_file():
        shutil.copy(tree / "LICENSE", ready / "LICENSE")
    shutil.copy(job.log, ready / "build.log")
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    source = f"{job.source.kind}:{job.source.where}" + (f"=={job.source.version}" if job.source.version else "")
    write_json(ready / recipes.MANIFEST, {**job.fingerprint, "compiler": job.tools.identity, "version": engine.version,
                                          "made": made, "from": source, "key": job.key})
    shutil.rmtree(job.final, ignore_errors=True)  # a folder without manifest: never an engine
    ready.replace(job.final)
    shutil.rmtree(job.work, ignore_errors=True)


def _checked(job: _Job, binary: Path) -> Engine:
    try:
        engine = read_engine(binary, "built")
    except EngineUnavailable as exc:
        raise BuildFailed("the engine that was just built does not run", where=str(job.log), why=exc.why) from exc
    if job.recipe.build is not None and engine.version != f"b{job.recipe.build}":
        raise BuildFailed("the engine that was just built is another version", where=str(job.log),
                          why=f"it says {engine.version}, the recipe b{job.recipe.build}")
    return engine


def _remove_abandoned(engines: Path) -> None:
    for folder in engines.glob(".building-*"):
        lock = engines / folder.name.replace(".building-", ".lock-")
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_S and not is_locked(lock):
                shutil.rmtree(folder, ignore_errors=True)
