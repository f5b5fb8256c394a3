"""Fetch GGUF files from the Hugging Face hub, or a mirror of it, into the hub's own cache.

Listing, authentication, revisions and the cache's layout are `huggingface_hub`'s. The bytes are moved here, because the
library neither continues a download that an earlier run began nor compares checksums (docs/adr/0004).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llamaops.cache import disk_trouble_is, locked, make_folder, mib, require_room
from llamaops.child import CancelledError
from llamaops.core.gguf_names import ChoiceError, choose, listed, part_names
from llamaops.core.progress import Progress
from llamaops.core.source import HubSource
from llamaops.errors import LlamaopsError, ModelUnavailable, TryAgain
from llamaops.transfer import BrokenError, RefusedError, size_of, transfer

if TYPE_CHECKING:
    import threading

@dataclass(frozen=True, slots=True)
class _File:
    """One file of a repository. ``etag`` names its blob: SHA-256 for large files, git's SHA-1 for small ones."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class _Repo:
    """Where a repository is, on the hub and in the cache."""

    source: HubSource
    endpoint: str
    cache: Path

    @property
    def revision(self) -> str:
        return self.source.revision or "main"

    @property
    def folder(self) -> Path:
        return self.cache / f"models--{self.source.repo.replace('/', '--')}"

    @property
    def page(self) -> str:
        return f"{self.endpoint}/{self.source.repo}"


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

    What the cache has of that revision is used without asking the hub, so that a start never depends on it; ``refresh``
    asks. Cut downloads are continued, by the next run too; every file is checked. The token comes from ``HF_TOKEN`` or
    the hub's login file and is never shown. Raises ModelUnavailable or, for trouble that passes, TryAgain.
    """
    endpoint = (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    repo = _Repo(source, endpoint, hub_cache(environ, cache))
    here = None if refresh and not offline else _in_cache(repo)
    if here is None:
        if offline or environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ModelUnavailable(f"{source} is not in the cache", where=str(repo.folder),
                                   why="offline: nothing is fetched",
                                   fix=f"llamaops model pull {source}   (with a network)")
        with disk_trouble_is(ModelUnavailable, "the download", repo.folder):
            here = _fetch(repo, progress, cancel)
    _check_pinned(here, source, sha256)
    return here


_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_cache(environ: Mapping[str, str], cache: Path) -> Path:
    """Return the hub's own cache, shared with every other tool; in ours where this user has no home."""
    if given := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(given).expanduser()
    if given := environ.get("HF_HOME"):
        return Path(given).expanduser() / "hub"
    base = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/nonexistent") / ".cache")
    home = next((p for p in (base, *base.parents) if p.exists()), Path("/"))
    return base / "huggingface" / "hub" if home != Path("/") and os.access(home, os.W_OK) else cache / "hub"


def _in_cache(repo: _Repo) -> Path | None:
    """Return the chosen file if this revision of it is here whole."""
    commit = repo.revision
    if not _COMMIT.fullmatch(commit):
        ref = repo.folder / "refs" / repo.revision
        commit = ref.read_text().strip() if ref.is_file() else ""
    if not _COMMIT.fullmatch(commit):
        return None
    snapshot = repo.folder / "snapshots" / commit
    names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
    try:
        first = choose(names, repo.source.file, repo.source.quant)
    except ChoiceError:
        return None
    return snapshot / first if set(part_names(first)) <= set(names) else None


def _fetch(repo: _Repo, progress: Progress, cancel: threading.Event | None) -> Path:
    with _explained(repo):
        files = _list(repo)
        names = _chosen(repo, files)
        blobs = make_folder(repo.folder / "blobs")
        missing = [files[name] for name in names if not (blobs / files[name].etag).exists()]
        begun = sum(size_of(_partial(blobs, file)) for file in missing)
        require_room(blobs, sum(file.size for file in missing) - begun, f"{repo.source}", ModelUnavailable)
        for file in missing:
            lock = repo.cache / ".locks" / repo.folder.name / f"{file.etag}.llamaops.lock"
            with locked(lock, lambda: progress.say(f"another llamaops fetches {repo.source}; waiting …"), cancel):
                if not (blobs / file.etag).exists():
                    _download(repo, file, blobs, progress, cancel)
        entered = [_enter(repo, name) for name in names]
        return entered[0]


def _list(repo: _Repo) -> dict[str, _File]:
    from huggingface_hub import HfApi

    info = HfApi(endpoint=repo.endpoint).model_info(repo.source.repo, revision=repo.revision, files_metadata=True)
    return {
        entry.rfilename: _File(entry.rfilename, entry.size or 0, _etag(entry)) for entry in info.siblings or ()
    }


def _etag(entry: Any) -> str:
    return str(entry.lfs.sha256 if entry.lfs else entry.blob_id)


def _chosen(repo: _Repo, files: Mapping[str, _File]) -> tuple[str, ...]:
    source, sizes = repo.source, {name: file.size for name, file in files.items()}
    try:
        names = part_names(choose(tuple(files), source.file, source.quant))
    except ChoiceError as exc:
        raise _no_choice(repo, exc, files, sizes) from None
    gone = [name for name in names if name not in files]
    if gone:
        raise ModelUnavailable("a part of the split model is missing on the hub", where=repo.page, why=", ".join(gone),
                               fix="choose another file of the repository")
    return names


def _no_choice(repo: _Repo, exc: ChoiceError, files: Mapping[str, _File], sizes: Mapping[str, int]) -> LlamaopsError:
    if exc.candidates:
        verb = "did you mean" if exc.near else "name one:"
        fix = f"{verb} hf:{repo.source.repo}:{exc.near or exc.candidates[0]}"
        return ModelUnavailable(f"can't choose a file of {repo.source.repo}: {exc.reason}", where=repo.page,
                                why=f"there are {listed(exc.candidates, sizes)}", fix=fix)
    if any(name.endswith(".safetensors") for name in files):
        return ModelUnavailable(f"{repo.source.repo} has safetensors but no GGUF", where=repo.page,
                                why="converting is not part of this version",
                                fix="give a repository with a ready GGUF; many models have one, named …-GGUF")
    return ModelUnavailable(f"{repo.source.repo} has no GGUF file", where=repo.page, fix="check model.source")


def _download(repo: _Repo, file: _File, blobs: Path, progress: Progress, cancel: threading.Event | None) -> None:
    """Move one file into the cache; a wrong checksum is given a second chance from the first byte."""
    from huggingface_hub import get_token, hf_hub_url

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    partial = _partial(blobs, file)
    url = hf_hub_url(repo.source.repo, file.name, revision=repo.revision, endpoint=repo.endpoint)
    for last in (False, True):
        with progress.bar(f"download {Path(file.name).name}", "bytes") as bar:
            try:
                transfer(url, headers, partial, file.size, bar, cancel)
            except BrokenError as exc:
                raise TryAgain(f"the download of {file.name} broke off", where=repo.page, why=str(exc),
                               fix=f"run the same command again: it continues at {mib(size_of(partial))}") from exc
        actual = _blob_name(partial, file)
        if actual == file.etag:
            partial.replace(blobs / file.etag)
            return
        partial.unlink()
        if last:
            raise ModelUnavailable(f"{file.name} arrived with the wrong checksum, twice", where=repo.page,
                                   why=f"the hub states {file.etag}, the bytes give {actual}",
                                   fix="try again later; behind a proxy or mirror, have that looked at")
        progress.say(f"{file.name}: wrong checksum, fetching it again")


def _enter(repo: _Repo, name: str) -> Path:
    """Let the hub's library enter the blob into its cache: revision, snapshot, link."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo.source.repo, name, revision=repo.revision, cache_dir=repo.cache,
                                endpoint=repo.endpoint))


def _partial(blobs: Path, file: _File) -> Path:
    # Named by content: a file that changed on the hub is another one and starts from its first byte.
    return blobs / f"{file.etag}.llamaops.incomplete"


def _blob_name(path: Path, file: _File) -> str:
    """Return what the hub would call these bytes: SHA-256, or git's object id."""
    with path.open("rb") as data:
        if len(file.etag) == 64:
            return hashlib.file_digest(data, "sha256").hexdigest()
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        while chunk := data.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def _check_pinned(path: Path, source: HubSource, sha256: str | None) -> None:
    if sha256 is None:
        return
    name = path.resolve().name
    if not re.fullmatch(r"[0-9a-f]{64}", name):
        with path.open("rb") as data:
            name = hashlib.file_digest(data, "sha256").hexdigest()
    if name != sha256.lower():
        raise ModelUnavailable("the model file has the wrong checksum", where=str(source),
                               why=f"model.sha256 is {sha256.lower()}, the file's is {name}",
                               fix="pin a revision (hf:ORG/REPO@REVISION), or correct model.sha256")


@contextmanager
def _explained(repo: _Repo) -> Iterator[None]:
    """Turn the failures of the hub's library into ours, at this one place."""
    try:
        yield
    except (LlamaopsError, CancelledError):
        raise
    except RefusedError as exc:
        _refused(repo, exc.status, exc.code)
    except Exception as exc:
        module = type(exc).__module__.partition(".")[0]
        reply = getattr(exc, "response", None)
        if reply is not None:
            _refused(repo, reply.status_code, reply.headers.get("X-Error-Code"))
        if isinstance(exc, OSError) and exc.errno is not None and module == "builtins":
            raise
        if isinstance(exc, ValueError) and module == "huggingface_hub":
            raise ModelUnavailable(f"{repo.source.repo!r} is not a repository name", where=str(repo.source),
                                   fix="write hf:ORG/REPO") from exc
        if module in _TRANSPORT or isinstance(exc, (OSError, TimeoutError)):
            raise TryAgain("can't reach the hub", where=repo.endpoint, why=f"{type(exc).__name__}: {exc}"[:300],
                           fix="check the network and HF_ENDPOINT, then run the same command again") from exc
        raise


_TRANSPORT = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "huggingface_hub")
"""The hub's library has changed its HTTP client twice; its transport errors come from one of these."""


def _refused(repo: _Repo, status: int, code: str | None) -> NoReturn:
    """Raise what a status of the hub means; 401, 403 and 404 have different cures."""
    repo_id, page = repo.source.repo, repo.page
    if status == 429 or status >= 500:
        raise TryAgain("the hub is busy" if status == 429 else "the hub has trouble", where=page,
                       why=f"it answered {status}", fix="run the same command again in a while: nothing is lost")
    if code == "GatedRepo" and status == 403:
        raise ModelUnavailable(f"{repo_id} is gated", where=page, why="this account has not been granted access",
                               fix=f"accept the licence at {page}, then run the same command again")
    if status == 401:
        gated = f" and accept the licence at {page}" if code == "GatedRepo" else ""
        raise ModelUnavailable(f"{repo_id} needs a login", where=page,
                               why="it is gated, and no valid token was sent" if gated
                               else "it is private or does not exist, or the token is wrong",
                               fix=f"set HF_TOKEN to a token with read access{gated}; check the name")
    if status == 403:
        raise ModelUnavailable(f"access to {repo_id} is forbidden", where=page, why="the token has too few rights",
                               fix=f"set HF_TOKEN to a token with read access, or accept the licence at {page}")
    what = f"the hub refused {repo_id}"
    if status == 404:
        what = {
            "RevisionNotFound": f"there is no revision {repo.revision} of {repo_id}",
            "EntryNotFound": f"there is no such file in {repo_id}",
        }.get(code or "", f"there is no repository {repo_id}")
    raise ModelUnavailable(what, where=page, why=f"the hub answered {status}", fix="check model.source")
