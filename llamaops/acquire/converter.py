"""Make the converter ready: the scripts of the engine's own source, and a Python environment that runs them.

The environment is apart from the one llamaops runs in (docs/adr/0013). Nobody gets a gigabyte without being asked.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from llamaops.cache import disk_trouble_is, locked, make_folder, read_json, require_room, write_json
from llamaops.child import Done, run
from llamaops.core.conversion import Consent, Converter
from llamaops.core.progress import Bar, Progress
from llamaops.engine_source import SourceMissingError, fetch_archive, unpack
from llamaops.errors import BuildFailed, LlamaopsError, ModelUnavailable
from llamaops.pip_download import pip_environment, pip_failure
from llamaops.recipe import EngineSource, Recipe
from llamaops.resources import resource

ROOM_BYTES = 2 << 30
"""The environment takes 1.2 GiB; while pip unpacks, the wheels lie beside it."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where the builds for CPUs are; the package index has those for GPUs, with gigabytes of libraries."""
READY = "ready.json"
QUESTION = """\
Converting needs PyTorch and transformers: about 1.2 GiB, in an environment of their own below
{folder}, from the index that pip is configured for. Install them?"""
_MODULES = "import torch, transformers, numpy, sentencepiece, safetensors, google.protobuf"


def ready_converter(
    recipe: Recipe, cache: Path, environ: Mapping[str, str], progress: Progress, consent: Consent,
    cancel: threading.Event | None = None,
) -> Converter:  # fmt: skip
    """Return the converter of the recipe's source, made ready the first time if ``consent`` agrees to the question.

    Raises ModelUnavailable (no consent, no room, pip's failure), BuildFailed (the source can't be had) or TryAgain.
    """
    folder = make_folder(cache / "converters")
    python = _environment(folder, environ, progress, consent, cancel)
    scripts = _scripts(recipe, folder, environ, progress, cancel)
    return Converter(str(python), str(scripts), recipe.version)


def _scripts(recipe: Recipe, folder: Path, environ: Mapping[str, str], progress: Progress,
             cancel: threading.Event | None) -> Path:
    failed: LlamaopsError | None = None
    for source in recipe.sources:
        if source.kind == "path":
            return Path(source.where) / source.folder
        tree = folder / f"{recipe.version or 'tree'}-{(source.sha256 or '')[:12]}"
        with locked(folder / f".{tree.name}.lock", lambda: progress.say("another llamaops unpacks it …"), cancel):
            try:
                return tree if tree.is_dir() else _unpacked(source, tree, folder.parent, environ, progress, cancel)
            except SourceMissingError as exc:
                failed = exc.cause
    raise failed or BuildFailed("the engine recipe names no source", where="vendor/llama.cpp.toml")


def _unpacked(source: EngineSource, tree: Path, cache: Path, environ: Mapping[str, str], progress: Progress,
              cancel: threading.Event | None) -> Path:
    unpack(fetch_archive(source, cache, environ, progress, cancel), source.folder, tree, _is_script)
    return tree


def _is_script(path: PurePosixPath) -> bool:
    """Tell what of the source the converter is: its scripts and their two packages, and the licence."""
    return path.parts[:1] in (("conversion",), ("gguf-py",), ("LICENSE",)) or bool(
        re.fullmatch(r"convert_\w+\.py", str(path)))


def _environment(folder: Path, environ: Mapping[str, str], progress: Progress, consent: Consent,
                 cancel: threading.Event | None) -> Path:
    requirements = resource("vendor/convert-requirements.txt")
    facts = [requirements.read_text(encoding="utf-8"), sys.version, sys.platform, sys.base_prefix]
    home = folder / f"python-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"
    python = home / "bin" / "python"
    with locked(folder / f".{home.name}.lock", lambda: progress.say("another llamaops installs it; waiting …"), cancel):
        if not (read_json(home / READY) and python.exists()):
            _ask(folder, consent)
            with disk_trouble_is(ModelUnavailable, "installing the converter's packages", home):
                _install(home, python, requirements, environ, progress, cancel)
    return python


def _ask(folder: Path, consent: Consent) -> None:
    if not consent(QUESTION.format(folder=folder)):
        raise ModelUnavailable("this model must be converted, and the converter's Python packages are not installed",
                               where=str(folder), why="PyTorch and transformers take about 1.2 GiB; nobody agreed yet",
                               fix="llamaops model convert REF --yes   (once; or give a ready GGUF as model.source)")


def _install(home: Path, python: Path, requirements: Path, environ: Mapping[str, str], progress: Progress,
             cancel: threading.Event | None) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelUnavailable("pip is missing in the Python that runs llamaops", where=sys.executable,
                               fix=f"{sys.executable} -m ensurepip   (with uv: uv pip install pip)")
    require_room(home.parent, ROOM_BYTES, "the converter's packages", ModelUnavailable)
    shutil.rmtree(home, ignore_errors=True)
    log = home.parent / f".{home.name}.log"
    log.unlink(missing_ok=True)
    env = pip_environment(environ, make_folder(home))
    with progress.bar("install the converter's packages", "steps") as bar:
        _run([sys.executable, "-P", "-m", "venv", "--without-pip", str(home)], env, log, cancel)
        pip = [sys.executable, "-P", "-m", "pip", "--python", str(python), "install", "--no-deps", "--only-binary",
               ":all:", "--progress-bar", "off", "--requirement", str(requirements)]
        steps = _Steps(bar, requirements)
        done = run(pip, env=env, on_line=steps, log=log, niced=True, cancel=cancel)
        if done.code and "No matching distribution found for torch" in done.tail:
            done = run([*pip, "--extra-index-url", TORCH_INDEX], env=env, on_line=steps, log=log, cancel=cancel)
        if done.code:
            raise pip_failure("the converter's packages", done, log.read_text(errors="replace"), ModelUnavailable)
        _run([str(python), "-c", _MODULES], env, log, cancel)
    write_json(home / READY, {"requirements": requirements.read_text(encoding="utf-8"), "python": sys.version})
    log.unlink()


def _run(argv: list[str], env: Mapping[str, str], log: Path, cancel: threading.Event | None) -> Done:
    done = run(argv, env=env, log=log, cancel=cancel)
    if done.code:
        last = done.tail.strip().splitlines()[-1:] or [f"it ended with {done.code}"]
        raise ModelUnavailable("the converter's environment can't be made", where=str(log), why=last[0],
                               fix="the whole output is in that file (Debian: apt install python3-venv)")
    return done


class _Steps:
    """pip's ``Collecting NAME`` lines, as a bar."""

    def __init__(self, bar: Bar, requirements: Path) -> None:
        lines = requirements.read_text(encoding="utf-8").splitlines()
        self.bar, self.done = bar, 0
        self.total = len({re.split("[=;]", line)[0] for line in lines if line[:1].isalpha()})

    def __call__(self, line: str) -> None:
        if line.startswith("Collecting "):
            self.done += 1
            self.bar.update(min(self.done, self.total), self.total)
