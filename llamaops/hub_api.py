"""What a repository of the Hugging Face hub, or of a mirror, holds, and what its refusals mean.

Authentication and listing are `huggingface_hub`'s; its failures become ours here and nowhere else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from llamaops.child import CancelledError
from llamaops.core.source import HubSource
from llamaops.errors import LlamaopsError, ModelUnavailable, TryAgain
from llamaops.transfer import BrokenError, RefusedError, asked_to_wait, is_passing

LISTINGS = 3
"""How often a listing is asked for while the hub is busy."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a repository. ``etag`` names its blob: SHA-256 for large files, git's SHA-1 for small ones."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class Repo:
    """Where a repository is, on the hub and in the cache."""

    source: HubSource
    endpoint: str
    cache: Path

    @property
    def revision(self) -> str:
        """The branch, tag or commit that is asked for."""
        return self.source.revision or "main"

    @property
    def folder(self) -> Path:
        """Its folder in the cache."""
        return self.cache / f"models--{self.source.repo.replace('/', '--')}"

    @property
    def page(self) -> str:
        """Where people look at it, and accept its licence."""
        return f"{self.endpoint}/{self.source.repo}"


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one commit, by name."""

    commit: str
    files: Mapping[str, File]

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each file, bytes."""
        return {name: file.size for name, file in self.files.items()}


def find_repo(source: HubSource, environ: Mapping[str, str], cache: Path) -> Repo:
    """Return where a source is: on the hub that ``HF_ENDPOINT`` names, and in the hub's own cache."""
    endpoint = (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    return Repo(source, endpoint, hub_cache(environ, cache))


def is_offline(environ: Mapping[str, str]) -> bool:
    """Tell whether the user forbids all tools to ask the hub."""
    return environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def hub_cache(environ: Mapping[str, str], cache: Path) -> Path:
    """Return the hub's own cache, shared with every other tool; in ours where this user has no home."""
    if given := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(given).expanduser()
    if given := environ.get("HF_HOME"):
        return Path(given).expanduser() / "hub"
    base = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/nonexistent") / ".cache")
    home = next((p for p in (base, *base.parents) if p.exists()), Path("/"))
    return base / "huggingface" / "hub" if home != Path("/") and os.access(home, os.W_OK) else cache / "hub"


def list_files(repo: Repo, cancel: threading.Event | None = None) -> Listing:
    """Ask the hub which files the revision has; while it is busy, wait as it asks and try again.

    Call it inside `explained`.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=repo.endpoint)
    left = LISTINGS
    while True:
        try:
            info = api.model_info(repo.source.repo, revision=repo.revision, files_metadata=True)
            break
        except Exception as exc:
            wait, left = _pause(exc), left - 1
            if wait is None or left == 0:
                raise
            if (cancel or threading.Event()).wait(wait):
                raise CancelledError("cancelled") from None
    files = [File(entry.rfilename, entry.size or 0, _etag(entry)) for entry in info.siblings or ()]
    return Listing(info.sha or repo.revision, {file.name: file for file in files})


def _pause(exc: Exception) -> float | None:
    reply = getattr(exc, "response", None)
    return asked_to_wait(reply.headers) if reply is not None and is_passing(reply.status_code) else None


def _etag(entry: Any) -> str:
    return str(entry.lfs.sha256 if entry.lfs else entry.blob_id)


def download_url(repo: Repo, commit: str, name: str) -> str:
    """Return where the bytes of a file are."""
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repo.source.repo, name, revision=commit, endpoint=repo.endpoint)


def authorization() -> dict[str, str]:
    """Return the headers that open private and gated repositories: the token of ``HF_TOKEN`` or the login file."""
    from huggingface_hub import get_token

    token = get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


@contextmanager
def explained(repo: Repo) -> Iterator[None]:
    """Turn the failures of the hub and of its library into ModelUnavailable or TryAgain."""
    try:
        yield
    except (LlamaopsError, CancelledError):
        raise
    except RefusedError as exc:
        _refused(repo, exc.status, exc.code)
    except BrokenError as exc:
        raise _unreachable(repo, str(exc)) from exc
    except Exception as exc:
        module = type(exc).__module__.partition(".")[0]
        reply = getattr(exc, "response", None)
        if reply is not None:
            _refused(repo, reply.status_code, reply.headers.get("X-Error-Code"), reply.headers.get("Retry-After"))
        if isinstance(exc, OSError) and exc.errno is not None and module == "builtins":
            raise
        if isinstance(exc, ValueError) and module == "huggingface_hub":
            raise ModelUnavailable(f"{repo.source.repo!r} is not a repository name", where=str(repo.source),
                                   fix="write hf:ORG/REPO") from exc
        if module in _TRANSPORT or isinstance(exc, (OSError, TimeoutError)):
            raise _unreachable(repo, f"{type(exc).__name__}: {exc}"[:300]) from exc
        raise


def _unreachable(repo: Repo, why: str) -> TryAgain:
    return TryAgain("can't reach the hub", where=repo.endpoint, why=why,
                    fix="check the network and HF_ENDPOINT, then run the same command again")


_TRANSPORT = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "huggingface_hub")
"""The hub's library has changed its HTTP client twice; its transport errors come from one of these."""


def _refused(repo: Repo, status: int, code: str | None, retry_after: str | None = None) -> NoReturn:
    """Raise what a status of the hub means; 401, 403 and 404 have different cures."""
    repo_id, page = repo.source.repo, repo.page
    if is_passing(status):
        wait = f" and asks to wait {retry_after} s" if retry_after and retry_after.isdecimal() else ""
        raise TryAgain("the hub is busy" if status == 429 else "the hub has trouble", where=page,
                       why=f"it answered {status}{wait}", fix="run the same command again in a while: nothing is lost")
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
