"""Where a model comes from: the grammar of ``model.source``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


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


Source = HubSource | PathSource | WheelSource

GRAMMAR = "hf:ORG/REPO[@REV][:FILE or QUANT], path:FILE_OR_DIR or wheel:PKG==VER[:MEMBER]"
QUANT = re.compile(r"F16|F32|BF16|COPY|[IT]?Q[0-9]+(_[A-Z0-9]+)+|[A-Z]+FP[0-9]+(_[A-Z0-9]+)*")
"""The shape of llama.cpp's quant type names; which of them exist is the engine's to say."""

_HUB = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<rev>[\w./-]+))?(:(?P<part>.+))?", re.ASCII)
_WHEEL = re.compile(
    r"(?P<package>[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)==(?P<version>[0-9][\w.!+-]*)(:(?P<member>.+))?", re.ASCII
)


def parse_source(text: str) -> Source:
    """Read a ``model.source``; the ValueError says what is wrong and, where it can be guessed, what was meant."""
    if any(ord(char) < 0x20 for char in text):
        raise ValueError("a source can't hold control characters")
    scheme, colon, rest = text.strip().partition(":")
    parsers: dict[str, Callable[[str], Source]] = {"hf": _hub, "path": _path, "wheel": _wheel}
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
    if QUANT.fullmatch(part.upper()):
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


def _inside(path: str) -> str:
    parts = path.replace("\\", "/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{path!r} must be a plain relative path without . or ..")
    return path


def _meant(text: str) -> str:
    if found := re.fullmatch(r"https?://(?:www\.)?huggingface\.co/([\w.-]+/[\w.-]+)/?", text, re.ASCII):
        return f"; did you mean hf:{found[1]}?"
    if text.startswith(("/", "./", "../", "~")) or text.endswith(".gguf"):
        return f"; did you mean path:{text}?"
    if _WHEEL.fullmatch(text):
        return f"; did you mean wheel:{text}?"
    if _HUB.fullmatch(text):
        return f"; did you mean hf:{text}?"
    return ""
