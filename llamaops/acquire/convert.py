"""Convert a model in Hugging Face format (safetensors) to GGUF with the converter of the engine's own source, once."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from llamaops.cache import appearing, finished, make_once, require_room, sha256_of, write_json
from llamaops.child import run
from llamaops.core.checkpoint import CheckpointError, header_length, read_tensors
from llamaops.core.checkpoint_names import INDEX, checkpoint_files, is_whole
from llamaops.core.conversion import (
    BYTES_PER_PARAMETER,
    Converter,
    converter_variables,
    explain_failure,
)
from llamaops.core.progress import Bar, Progress
from llamaops.errors import ModelUnavailable

_WRITTEN = re.compile(r"Writing:\s+(\d+)%")


@dataclass(frozen=True, slots=True)
class Conversion:
    """One piece of work: which folder becomes which GGUF.

    ``name`` is what the model is called in the GGUF and in the file's name; ``base`` is the folder of the model that a
    LoRA adapter belongs to; ``projector`` asks for the part that reads images or sound instead of the model itself.
    """

    folder: Path
    name: str
    type: str = "F16"
    source: str | None = None
    projector: bool = False
    base: Path | None = None


def files_of(work: Conversion) -> tuple[str, ...]:
    """Return the needed files, by path in the folder."""
    return checkpoint_files(_names(work.folder))


def _target(work: Conversion, cache: Path, build: str | None) -> Path:
    """Name the result by what it is and by all it depends on."""
    files = [_stamp(work.folder / name) for name in files_of(work)]
    base = [_stamp(work.base / name) for name in checkpoint_files(_names(work.base))] if work.base else []
    key = json.dumps([files, base, work.type, work.projector, build])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    head = "mmproj-" if work.projector else "lora-" if work.base else ""
    return cache / "models" / "converted" / f"{head}{_safe(work.name)}-{work.type}-{digest}.gguf"


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:100] or "model"


def _names(folder: Path) -> list[str]:
    """Return the files of the folder and of its subfolders, one level deep."""
    found = [*folder.glob("*"), *folder.glob("*/*")]
    return sorted(str(path.relative_to(folder)) for path in found if path.is_file())


def _stamp(path: Path) -> list[str | int]:
    info = path.stat()
    return [str(path.resolve()), info.st_size, info.st_mtime_ns]


def find_converted(work: Conversion, cache: Path, build: str | None) -> Path | None:
    """Return the cached result of `convert` for these files and this converter, or None."""
    return finished(_target(work, cache, build))


def convert(
    work: Conversion, converter: Converter, cache: Path, progress: Progress, environ: Mapping[str, str], *,
    threads: int, cancel: threading.Event | None = None,
) -> Path:  # fmt: skip
    """Return the GGUF of ``work``: from the cache at once, or made by the converter at low priority.

    Code that lies in the folder is never run and nothing is fetched. The result appears when it is whole; beside it
    lies a JSON file that tells what it was made of. Raises ModelUnavailable (damaged or missing weights, no room, an
    architecture this converter does not know, its failure).
    """
    if (done := find_converted(work, cache, converter.build)) is not None:
        return done
    final = _target(work, cache, converter.build)
    env = converter_variables(environ, threads)
    make_once(final, "converting", lambda: _make(work, converter, final, progress, env, cancel), progress,
              ModelUnavailable, cancel)
    return final


def _make(
    work: Conversion, converter: Converter, final: Path, progress: Progress, env: Mapping[str, str],
    cancel: threading.Event | None,
) -> None:  # fmt: skip
    parameters = _checked_weights(work)
    room = int(parameters * BYTES_PER_PARAMETER[work.type]) + (32 << 20)  # the vocabulary comes on top
    require_room(final.parent, room, f"a {work.type} of this model", ModelUnavailable)
    log = final.with_name(f".{final.name}.log")
    log.unlink(missing_ok=True)
    with (
        progress.bar(f"convert to {work.type}", "steps") as bar,
        _staged(work.folder, files_of(work), final, work.name) as folder,
        appearing(final) as partial,
    ):
        done = run(_command(work, converter, folder, partial), env=env, on_line=_Steps(bar), log=log, niced=True,
                   cancel=cancel)
        if done.code or not partial.exists():
            failure = explain_failure(log.read_text(errors="replace"), done.code, converter.build)
            raise ModelUnavailable("converting failed", where=str(log), why=failure.why, fix=failure.fix)
        log.unlink(missing_ok=True)
        # The record comes first: a file without one is never used, one with a record is used by size.
        write_json(final.with_suffix(".json"), _record(work, converter, partial))


def _command(work: Conversion, converter: Converter, folder: Path, target: Path) -> list[str]:
    script = "convert_lora_to_gguf.py" if work.base else "convert_hf_to_gguf.py"
    more = ["--base", str(work.base)] if work.base else ["--model-name", work.name]
    more += ["--mmproj"] if work.projector else []
    return [converter.python, str(Path(converter.scripts) / script), str(folder), "--outfile", str(target),
            "--outtype", work.type.lower(), *more]


def _record(work: Conversion, converter: Converter, made: Path) -> dict[str, Any]:
    files = {name: {"size": (work.folder / name).stat().st_size, "sha256": sha256_of(work.folder / name)}
             for name in files_of(work)}
    return {
        "source": work.source, "source_path": str(work.folder), "made_from": files, "type": work.type,
        "base": str(work.base) if work.base else None, "projector": work.projector, "engine": converter.build,
        "tool": "convert_lora_to_gguf.py" if work.base else "convert_hf_to_gguf.py",
        "size_bytes": made.stat().st_size, "sha256": sha256_of(made),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip


@contextmanager
def _staged(folder: Path, names: Sequence[str], final: Path, label: str) -> Iterator[Path]:
    """Give a folder of links to the needed files alone: what else lies beside them, code above all, is out of reach."""
    stage = final.with_name(f".{final.name}.stage")
    shutil.rmtree(stage, ignore_errors=True)
    inner = stage / _safe(label)
    try:
        for name in names:
            link = inner / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to((folder / name).resolve())
        yield inner
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _checked_weights(work: Conversion) -> int:
    """Return the number of parameters, after a look at every file's header: minutes later it would be too late."""
    names = _names(work.folder)
    if "adapter_config.json" in names and work.base is None:
        raise ModelUnavailable("this is a LoRA adapter, not a model", where=str(work.folder),
                               fix="name the model it belongs to: llamaops model convert ADAPTER --base REF")
    if missing := sorted(_indexed(work.folder) - set(names)):
        raise ModelUnavailable("weights are missing", where=str(work.folder), why=", ".join(missing)[:300],
                               fix=f"get the whole model; {INDEX} lists its files")
    if not is_whole(names):
        raise ModelUnavailable("this folder holds no whole model to convert", where=str(work.folder),
                               why="it takes config.json, the tokenizer's files and model*.safetensors",
                               fix="check the path, or get the missing files")
    return sum(_parameters(work.folder / name) for name in files_of(work) if name.endswith(".safetensors"))


def _indexed(folder: Path) -> set[str]:
    """Return the weight files that the index of a model in several parts names."""
    with suppress(OSError, ValueError, AttributeError, KeyError):
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return set(index["weight_map"].values())
    return set()


def _parameters(path: Path) -> int:
    """Count a safetensors file's elements, and see that it is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            length = header_length(file.read(8))
        except CheckpointError:
            length = size
        if not 2 <= length <= size - 8:
            _damaged(path, "it is no safetensors file (a pointer of Git LFS?)" if size < 1000 else "its header is cut")
        try:
            tensors = read_tensors(file.read(length))
        except CheckpointError:
            _damaged(path, "its header is no description of tensors")
    if 8 + length + tensors.data_bytes != size:
        _damaged(path, f"it has {size} bytes, its header says {8 + length + tensors.data_bytes}")
    return sum(tensors.elements.values())


def _damaged(path: Path, why: str) -> NoReturn:
    raise ModelUnavailable("can't use these weights", where=str(path), why=why, fix="get the file again")


class _Steps:
    """The converter's ``Writing:  53%``, as a bar."""

    def __init__(self, bar: Bar) -> None:
        self.bar = bar

    def __call__(self, line: str) -> None:
        if found := _WRITTEN.search(line):
            self.bar.update(int(found[1]), 100)
