"""Take stock of the caches: llamaops' own and the hub's. List, check, remove; the hub's layout stays whole."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from llamaops.cache import disk_trouble_is, files_below, is_locked, read_json, sha256_of, unnoticed
from llamaops.core.checkpoint_names import is_whole
from llamaops.core.gguf_header import parse_header, quant_of
from llamaops.core.gguf_names import models_among, part_names
from llamaops.core.progress import Bar, Progress
from llamaops.core.stock import Item, Kind
from llamaops.errors import ModelUnavailable

ABANDONED_S = 24 * 3600
"""A download that nobody continued for a day is left over."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What checking one item gave: ``damage`` None is sound; ``checked`` tells by what."""

    item: Item
    checked: str
    damage: str | None


def take_stock(cache: Path, hub: Path) -> list[Item]:
    """Return everything in both caches, by name."""
    models = cache / "models"
    found = [*_made(models, "converted"), *_made(models, "quantized"), *_made(models, "imatrix"),
             *_fetched(models / "wheel", "wheel.json"), *_fetched(models / "url", "url.json"), *_of_hub(hub),
             *_incomplete(models, hub)]
    return sorted(found, key=lambda item: (item.name, item.path))


def _made(models: Path, kind: Kind) -> Iterator[Item]:
    for path in (models / kind).glob("[!.]*.gguf"):
        record = read_json(path.with_suffix(".json"))
        yield _item(path.name, kind, path, [path], made_from=record.get("source_path"))


def _fetched(folder: Path, record_name: str) -> Iterator[Item]:
    for record_path in folder.glob(f"*/{record_name}"):
        home, record = record_path.parent, read_json(record_path)
        if record_name == "url.json":
            yield _item(str(record.get("url")), "url", home / str(record.get("file")), _files(home))
        else:
            package, _, version = home.name.rpartition("-")
            models = [home / entry["file"] for entry in record.get("files", {}).values()]
            path = models[0] if len(models) == 1 and models[0].is_file() else home
            yield _item(f"wheel:{package}=={version}", "wheel", path, _files(home))


def _of_hub(hub: Path) -> Iterator[Item]:
    for snapshot in hub.glob("models--*/snapshots/*"):
        repo = snapshot.parents[1].name.removeprefix("models--").replace("--", "/", 1)
        names = [str(path.relative_to(snapshot)) for path in files_below(snapshot) if path.is_file()]
        models = models_among(names)
        for name in models:
            parts = [snapshot / part for part in part_names(name) if part in names]
            yield _item(f"hf:{repo}:{name}", "hub", snapshot / name, parts, ours=_ours(hub, parts))
        if not models and is_whole(names):
            files = [snapshot / name for name in names]
            yield _item(f"hf:{repo}", "hub", snapshot, files, ours=_ours(hub, files))


def _ours(hub: Path, files: list[Path]) -> bool:
    """Tell whether llamaops fetched these: it leaves a lock for each blob."""
    repo = files[0].relative_to(hub).parts[0] if files else ""
    return any((hub / ".locks" / repo / f"{file.resolve().name}.llamaops.lock").exists() for file in files)


def _incomplete(models: Path, hub: Path) -> Iterator[Item]:
    for path in [*hub.glob("models--*/blobs/*.llamaops.incomplete"), *models.glob("url/*/.llamaops.incomplete")]:
        lock = hub / ".locks" / path.parents[1].name / path.name.replace(".incomplete", ".lock")
        busy = is_locked(lock) or is_locked(path.with_name(".lock"))
        if not busy:
            yield _item(f"incomplete:{path.parent.parent.name}/{path.name[:12]}", "incomplete", path, [path])


def abandoned(items: list[Item]) -> list[Item]:
    """Return the begun downloads that nobody continued for a day."""
    return [item for item in items if item.kind == "incomplete" and time.time() - item.used > ABANDONED_S]


def _item(name: str, kind: Kind, path: Path, files: list[Path], **more: Any) -> Item:
    infos = [file.stat() for file in files if file.exists()]
    arch, quant = _facts(path) if kind != "incomplete" else (None, None)
    weights = max(infos, key=lambda info: info.st_size, default=None)  # records are read without being used
    used = max(weights.st_atime, weights.st_mtime) if weights else 0.0
    return Item(name, kind, str(path), sum(info.st_size for info in infos), used, quant, arch, **more)


def _files(folder: Path) -> list[Path]:
    return [path for path in files_below(folder) if path.is_file() and not path.is_symlink()]


def _facts(path: Path) -> tuple[str | None, str | None]:
    if not path.is_file():
        return None, None
    try:
        with unnoticed(path), path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            header = parse_header(data)
    except (OSError, ValueError):  # HeaderError is one; so is an empty file
        return None, None
    # An importance matrix has no architecture; its type says what it is.
    architecture = header.fields.get("general.architecture") or header.fields.get("general.type")
    return architecture if isinstance(architecture, str) else None, quant_of(header)


def verify(item: Item, progress: Progress) -> Verdict:
    """Compare an item's files with the checksums stated when they came; without, check the header."""
    stated = _stated(item)
    with progress.bar(f"verify {item.name}", "bytes") as bar:
        damage = _compare(stated, bar)
    if damage is None and Path(item.path).is_file() and item.architecture is None:
        damage = f"{item.path} is not a whole GGUF"
    return Verdict(item, "checksum" if stated else "header", damage)


def _compare(stated: dict[Path, str], bar: Bar) -> str | None:
    done, total = 0, sum(path.stat().st_size for path in stated if path.exists())
    for path, sha256 in stated.items():
        if not path.exists():
            return f"{path} is gone"
        with unnoticed(path):
            actual = sha256_of(path)
        if actual != sha256:
            return f"{path} has the checksum {actual}, {sha256} was stated"
        bar.update(done := done + path.stat().st_size, total)
    return None


def _stated(item: Item) -> dict[Path, str]:
    path = Path(item.path)
    if item.kind == "hub":
        files = files_below(path) if path.is_dir() else (path.with_name(name) for name in part_names(path.name))
        blobs = {file: file.resolve().name for file in files if file.is_file()}
        return {file: name for file, name in blobs.items() if _SHA256.fullmatch(name)}
    if item.kind == "wheel":
        home = path if path.is_dir() else path.parent
        record = read_json(home / "wheel.json")
        stated = {entry["file"]: entry["sha256"] for entry in record.get("files", {}).values()}
        for stamps in record.get("checkpoints", {}).values():
            stated |= {name: entry["sha256"] for name, entry in stamps.items()}
        return {home / name: sha256 for name, sha256 in stated.items()}
    if item.kind == "url":
        return {path: path.parent.name}
    sha256 = read_json(path.with_suffix(".json")).get("sha256")
    return {path: sha256} if sha256 else {}


def remove(item: Item) -> None:
    """Remove an item and whatever tells about it; of the hub's cache only what nothing else there refers to."""
    path = Path(item.path)
    with disk_trouble_is(ModelUnavailable, "removing a model", path):
        if item.kind == "hub":
            _remove_from_hub(path)
        elif item.kind == "wheel":
            shutil.rmtree(path if path.is_dir() else path.parent)
        elif item.kind == "url":
            shutil.rmtree(path.parent)
        else:
            # The record last: without the file it stands for nothing.
            for file in (path, path.with_suffix(".json")):
                file.unlink(missing_ok=True)


def _remove_from_hub(path: Path) -> None:
    snapshot = next(folder for folder in (path, *path.parents) if folder.parent.name == "snapshots")
    repo = snapshot.parents[1]
    files = list(snapshot.rglob("*")) if path == snapshot else [path.with_name(name) for name in part_names(path.name)]
    blobs = {file.resolve() for file in files if file.is_symlink()}
    for file in files:
        if file.is_symlink() or file.is_file():
            file.unlink()
    still = {link.resolve() for link in repo.glob("snapshots/*/**/*") if link.is_symlink()}
    for blob in blobs - still:
        blob.unlink(missing_ok=True)
    if not any(file.is_symlink() or file.is_file() for file in snapshot.rglob("*")):
        _forget_snapshot(repo, snapshot)


def _forget_snapshot(repo: Path, snapshot: Path) -> None:
    for ref in (repo / "refs").rglob("*"):
        if ref.is_file() and ref.read_text().strip() == snapshot.name:
            ref.unlink()
    shutil.rmtree(snapshot)
    with suppress(OSError):
        snapshot.parent.rmdir()
        shutil.rmtree(repo)
