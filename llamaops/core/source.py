"""Where a model comes from: the grammar of ``model.source``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the Hugging Face hub.

    ``revision`` None is the hub's default branch. At most one of ``file`` (a path inside the repository) and ``quant``
    (``Q4_K_M``, upper case) is set.
    """

    repo: str
    revision: str | None = None
    file: str | None = None
    quant: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        part = self.file or self.quant
        return f"hf:{self.repo}{revision}" + (f":{part}" if part else "")


@dataclass(frozen=True, slots=True)
class PathSource:
    """A file or folder on this machine."""

    path: str

    def __str__(self) -> str:
        return f"path:{self.path}"


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A file inside a wheel of the Python package index; ``member`` None is the only GGUF in it."""

    package: str
    version: str
    member: str | None = None

    def __str__(self) -> str:
        return f"wheel:{self.package}=={self.version}" + (f":{self.member}" if self.member else "")


@dataclass(frozen=True, slots=True)
class UrlSource:
    """A GGUF at a URL; as text its query, which may be a signature, is left out."""

    url: str

    @property
    def name(self) -> str:
        """The file's name, safe to be one here."""
        last = unquote(urlsplit(self.url).path).rpartition("/")[2]
        name = re.sub(r"[^\w.+-]+", "_", last).lstrip(".-") or "model"
        return name if name.lower().endswith(".gguf") else f"{name}.gguf"

    def __str__(self) -> str:
        address, query, _ = self.url.partition("?")
        return address + ("?…" if query else "")


Source = HubSource | PathSource | WheelSource | UrlSource

GRAMMAR = "hf:ORG/REPO[@REV][:FILE or QUANT], path:FILE_OR_DIR, wheel:PKG==VER[:MEMBER] or https://HOST/FILE"
QUANT = re.compile(r"F16|F32|BF16|COPY|[IT]?Q[0-9]+(_[A-Z0-9]+)+|[A-Z]+FP[0-9]+(_[A-Z0-9]+)*")
"""The shape of llama.cpp's quant type names; which of them exist is the engine's to say."""

_HUB = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<rev>[\w./-]+))?(:(?P<part>.+))?", re.ASCII)
_HUB_PAGE = re.compile(
    r"https?://(?:www\.)?huggingface\.co/(?P<repo>[\w.-]+/[\w.-]+)/?"
    r"((?:resolve|blob|tree)/(?P<rev>[^/?#]+)/?(?P<file>[^?#]*))?([?#].*)?", re.ASCII
)
_WHEEL = re.compile(
    r"(?P<package>[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)==(?P<version>[0-9][\w.!+-]*)(:(?P<member>.+))?", re.ASCII
)


def parse_source(text: str) -> Source:
    """Read a ``model.source``; the ValueError says what is wrong and, where it can be guessed, what was meant."""
    if any(ord(char) < 0x20 for char in text):
        raise ValueError("a source can't hold control characters")
    scheme, colon, rest = text.strip().partition(":")
    parsers: dict[str, Callable[[str], Source]] = {
        "hf": _hub, "path": _path, "wheel": _wheel, "https": partial(_url, "https"), "http": partial(_url, "http"),
    }  # fmt: skip
    parse = parsers.get(scheme) if colon else None
    if parse is None:
        raise ValueError(f"a source is {GRAMMAR}{_meant(text)}")
    return parse(rest)


def _hub(rest: str) -> HubSource:
    found = _HUB.fullmatch(rest)
    if not found:
        raise ValueError("a hub source is hf:ORG/REPO[@REV][:FILE or QUANT]")
    repo, revision, part = found["repo"], found["rev"], found["part"]
    if part is None:
        return HubSource(repo, revision)
    if QUANT.fullmatch(part.upper().removeprefix("UD-")):  # a publisher's own mix, named so on the hub
        return HubSource(repo, revision, quant=part.upper())
    if "." not in part:
        raise ValueError(f"{part!r} is neither a file name nor a quant type such as Q4_K_M")
    return HubSource(repo, revision, file=_inside(part))


def _path(rest: str) -> PathSource:
    if not rest.strip():
        raise ValueError("path: needs a file or folder after it")
    return PathSource(rest)


def _wheel(rest: str) -> WheelSource:
    found = _WHEEL.fullmatch(rest)
    if not found:
        raise ValueError("a wheel source is wheel:PKG==VER[:MEMBER], with an exact version")
    member = found["member"]
    return WheelSource(found["package"], found["version"], None if member is None else _inside(member))


def _url(scheme: str, rest: str) -> UrlSource:
    url = f"{scheme}:{rest}"
    if meant := _of_hub(url):
        raise ValueError(f"a model of the hub is fetched by its name, with its checksum; did you mean {meant}?")
    try:
        parts = urlsplit(url)
        whole = rest.startswith("//") and parts.hostname and parts.path.strip("/") and parts.port != 0
    except ValueError as exc:
        raise ValueError(f"this is no URL: {exc}") from None
    if not whole or " " in rest:
        raise ValueError("a URL is https://HOST/FILE")
    if parts.username is not None:
        raise ValueError("a URL with a password in it would end up in plans and logs; use one without")
    return UrlSource(url.partition("#")[0])


def _inside(path: str) -> str:
    parts = path.replace("\\", "/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{path!r} must be a plain relative path without . or ..")
    return path


def _of_hub(url: str) -> str | None:
    """Return the hub source that the address of one of the hub's pages means."""
    found = _HUB_PAGE.fullmatch(url)
    if found is None:
        return None
    revision = f"@{found['rev']}" if found["rev"] not in (None, "main") else ""
    return f"hf:{found['repo']}{revision}" + (f":{found['file']}" if found["file"] else "")


def _meant(text: str) -> str:
    if text.startswith(("/", "./", "../", "~")) or text.endswith(".gguf"):
        return f"; did you mean path:{text}?"
    if _WHEEL.fullmatch(text):
        return f"; did you mean wheel:{text}?"
    if _HUB.fullmatch(text):
        return f"; did you mean hf:{text}?"
    return ""
