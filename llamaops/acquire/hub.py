"""Fetch models from the Hugging Face hub, or a mirror of it, into the hub's own cache.

Listing, authentication, revisions and the cache's layout are `huggingface_hub`'s. The bytes are moved here, because the
library neither continues a download that an earlier run began nor compares checksums (docs/adr/0004).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llamaops.cache import appearing, disk_trouble_is, files_below, locked, make_folder, require_room, sha256_of
from llamaops.core.checkpoint_names import checkpoint_files, is_whole
from llamaops.core.gguf_names import ChoiceError, choose, listed, part_names
from llamaops.core.progress import Progress
from llamaops.core.source import HubSource
from llamaops.errors import LlamaopsError, ModelUnavailable
from llamaops.hub_api import (
    File,
    Listing,
    Repo,
    authorization,
    download_url,
    explained,
    find_repo,
    is_offline,
    list_files,
)
from llamaops.transfer import Wanted, fetch_checked, size_of

if TYPE_CHECKING:
    import threading


CONVERTED = 1.5
"""What converting makes of safetensors, in their size: a 16-bit GGUF is as large, a quantized one about half of it."""


def fetch_hub(
    source: HubSource,
    cache: Path,
    progress: Progress,
    *,
    offline: bool,
    sha256: str | None,
    environ: Mapping[str, str] = os.environ,
    refresh: bool = False,
    cancel: threading.Event | None = None,
) -> Path:
    """Return the model file of a hub repository; of a split model its first part, with all others beside it.

    Of a repository that has safetensors and no GGUF it is the folder with the files that converting needs, to which
    ``sha256`` does not apply.

    What the cache has of that revision is used without asking the hub, so that a start never depends on it; ``refresh``
    asks. Cut downloads are continued, by the next run too; every file is checked. The token comes from ``HF_TOKEN`` or
    the hub's login file and is never shown. Raises ModelUnavailable or, for trouble that passes, TryAgain.
    """
    repo = find_repo(source, environ, cache)
    here = None if refresh and not offline else _in_cache(repo)
    if here is None:
        if offline or is_offline(environ):
            raise ModelUnavailable(f"{source} is not in the cache", where=str(repo.folder),
                                   why="offline: nothing is fetched",
                                   fix=f"llamaops model pull {source}   (with a network)")
        with disk_trouble_is(ModelUnavailable, "the download", repo.folder), explained(repo):
            here = _fetch(repo, cache, progress, cancel)
    if not here.is_dir():
        _check_pinned(here, source, sha256)
    return here


_COMMIT = re.compile(r"[0-9a-f]{40}")


def _in_cache(repo: Repo) -> Path | None:
    """Return what is meant if this revision of it is here whole."""
    commit = repo.revision
    if not _COMMIT.fullmatch(commit):
        ref = repo.folder / "refs" / repo.revision
        commit = ref.read_text().strip() if ref.is_file() else ""
    if not _COMMIT.fullmatch(commit):
        return None
    snapshot = repo.folder / "snapshots" / commit
    names = [str(path.relative_to(snapshot)) for path in files_below(snapshot) if path.is_file()]
    try:
        first = choose(names, repo.source.file, repo.source.quant)
    except ChoiceError as exc:
        named = bool(repo.source.file or repo.source.quant or exc.candidates)
        return snapshot if not named and is_whole(names) else None
    return snapshot / first if set(part_names(first)) <= set(names) else None


def _fetch(repo: Repo, cache: Path, progress: Progress, cancel: threading.Event | None) -> Path:
    listing = list_files(repo, cancel)
    names = _chosen(repo, listing)
    blobs = make_folder(repo.folder / "blobs")
    missing = [listing.files[name] for name in names if not (blobs / listing.files[name].etag).exists()]
    begun = sum(size_of(_partial(blobs, file)) for file in missing)
    weights = sum(listing.files[name].size for name in names if name.endswith(".safetensors"))
    _require_room(blobs, sum(file.size for file in missing) - begun, make_folder(cache), round(CONVERTED * weights),
                  repo.source)
    for file in missing:
        lock = repo.cache / ".locks" / repo.folder.name / f"{file.etag}.llamaops.lock"
        with locked(lock, lambda: progress.say(f"another llamaops fetches {repo.source}; waiting …"), cancel):
            if not (blobs / file.etag).exists():
                _download(repo, listing.commit, file, blobs, progress, cancel)
    entered = [_enter(repo, listing.commit, name) for name in names]
    _follow(repo, listing.commit)
    return entered[0] if entered[0].suffix.lower() == ".gguf" else repo.folder / "snapshots" / listing.commit


def _require_room(blobs: Path, need: int, cache: Path, later: int, source: HubSource) -> None:
    """Refuse what would not fit: the download, and what converting it makes in our own cache."""
    if blobs.stat().st_dev == cache.stat().st_dev:
        need, later = need + later, 0
    require_room(blobs, need, f"{source}", ModelUnavailable)
    if later:
        require_room(cache, later, f"converting {source}", ModelUnavailable)


def _chosen(repo: Repo, listing: Listing) -> tuple[str, ...]:
    source, files = repo.source, listing.files
    try:
        names = part_names(choose(tuple(files), source.file, source.quant))
    except ChoiceError as exc:
        whole = () if exc.candidates or source.file else checkpoint_files(files)
        if whole and source.quant is None:
            return whole
        raise _no_choice(repo, exc, bool(whole), listing.sizes) from None
    gone = [name for name in names if name not in files]
    if gone:
        raise ModelUnavailable("a part of the split model is missing on the hub", where=repo.page, why=", ".join(gone),
                               fix="choose another file of the repository")
    return names


def _no_choice(repo: Repo, exc: ChoiceError, convertible: bool, sizes: Mapping[str, int]) -> LlamaopsError:
    if exc.candidates:
        verb = "did you mean" if exc.near else "name one:"
        fix = f"{verb} hf:{repo.source.repo}:{exc.near or exc.candidates[0]}"
        return ModelUnavailable(f"can't choose a file of {repo.source.repo}: {exc.reason}", where=repo.page,
                                why=f"there are {listed(exc.candidates, sizes)}", fix=fix)
    if convertible:
        return ModelUnavailable(f"{repo.source.repo} has safetensors, and no GGUF as {repo.source.quant}",
                                where=repo.page, why="what is made here is named by model.quantize, not by the source",
                                fix=f"model: {{source: hf:{repo.source.repo}, quantize: {repo.source.quant}}}")
    return ModelUnavailable(f"{repo.source.repo} has no GGUF file", where=repo.page, fix="check model.source")


def _download(
    repo: Repo, commit: str, file: File, blobs: Path, progress: Progress, cancel: threading.Event | None
) -> None:
    url = download_url(repo, commit, file.name)
    wanted = Wanted(Path(file.name).name, url, file.size, file.etag, repo.page, authorization(),
                    sha256_of if len(file.etag) == 64 else _git_id)
    partial = _partial(blobs, file)
    fetch_checked(wanted, partial, progress, ModelUnavailable, cancel)
    partial.replace(blobs / file.etag)


def _enter(repo: Repo, commit: str, name: str) -> Path:
    """Let the hub's library enter the blob into its cache: snapshot and link."""
    from huggingface_hub import hf_hub_download

    # By commit: the branch may have moved since the listing, and the library would fetch another file, unchecked.
    return Path(hf_hub_download(repo.source.repo, name, revision=commit, cache_dir=repo.cache, endpoint=repo.endpoint))


def _follow(repo: Repo, commit: str) -> None:
    """Note which commit a branch or tag was, once all of it is here."""
    if repo.revision == commit:
        return
    ref = repo.folder / "refs" / repo.revision
    make_folder(ref.parent)
    with appearing(ref) as partial:
        partial.write_text(commit)


def _partial(blobs: Path, file: File) -> Path:
    # Named by content: a file that changed on the hub is another one and starts from its first byte.
    return blobs / f"{file.etag}.llamaops.incomplete"


def _git_id(path: Path) -> str:
    """Return git's object id, by which the hub knows small files."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as data:
        while chunk := data.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _check_pinned(path: Path, source: HubSource, sha256: str | None) -> None:
    if sha256 is None:
        return
    name = path.resolve().name
    actual = name if re.fullmatch(r"[0-9a-f]{64}", name) else sha256_of(path)
    if actual != sha256.lower():
        raise ModelUnavailable("the model file has the wrong checksum", where=str(source),
                               why=f"model.sha256 is {sha256.lower()}, the file's is {actual}",
                               fix="pin a revision (hf:ORG/REPO@REVISION), or correct model.sha256")
