"""Where a model comes from, as the profile spells it: ``hf:``, ``path:`` or ``wheel:``."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file of a hub repository: named by ``file``, or chosen by ``quant`` (upper case), or the only one there is."""

    repo: str
    revision: str | None = None
    file: str | None = None
    quant: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        pick = self.file or self.quant
        return f"hf:{self.repo}{revision}" + (f":{pick}" if pick else "")


@dataclass(frozen=True, slots=True)
class PathSource:
    """A GGUF file, or a folder that holds one."""

    path: str

    def __str__(self) -> str:
        return f"path:{self.path}"


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A file inside a Python wheel; ``member`` None means the only ``*.gguf`` in it."""

    package: str
    version: str
    member: str | None = None

    def __str__(self) -> str:
        return f"wheel:{self.package}=={self.version}" + (f":{self.member}" if self.member else "")


Source = HubSource | PathSource | WheelSource

_HUB = re.compile(r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[^:@\s]+))?(?::(?P<pick>\S.*))?", re.ASCII)
_WHEEL = re.compile(
    r"(?P<package>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)==(?P<version>[\w.!+-]+)(?::(?P<member>\S.*))?", re.ASCII
)
_QUANT = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*", re.ASCII)


def parse_source(text: str) -> Source:
    """Read ``hf:ORG/REPO[@REV][:FILE or QUANT]``, ``path:FILE_OR_DIR`` or ``wheel:PKG==VER[:MEMBER]``.

    Raises ValueError that says what is wrong with this text and how it would be written.
    """
    scheme, colon, rest = text.strip().partition(":")
    if not colon or scheme not in _PARSERS:
        raise ValueError(f"{text!r} has no known scheme; write {_suggest(text.strip())}")
    if not rest:
        raise ValueError(f"{text!r} names nothing after {scheme}:")
    return _PARSERS[scheme](rest)


def _parse_hub(rest: str) -> HubSource:
    found = _HUB.fullmatch(rest)
    if not found:
        raise ValueError(f"hf:{rest} is not hf:ORG/REPO[@REVISION][:FILE.gguf or QUANT]")
    repo, revision, pick = found["repo"], found["revision"], found["pick"]
    if pick is None:
        return HubSource(repo, revision)
    if pick.lower().endswith(".gguf"):
        return HubSource(repo, revision, file=pick)
    if not _QUANT.fullmatch(pick):
        raise ValueError(f"{pick!r} is neither a .gguf file nor a quant type such as Q4_K_M")
    return HubSource(repo, revision, quant=pick.upper())


def _parse_wheel(rest: str) -> WheelSource:
    found = _WHEEL.fullmatch(rest)
    if not found:
        raise ValueError(f"wheel:{rest} is not wheel:PACKAGE==VERSION[:MEMBER]")
    return WheelSource(found["package"], found["version"], found["member"])


_PARSERS = {"hf": _parse_hub, "path": PathSource, "wheel": _parse_wheel}


def _suggest(text: str) -> str:
    if text.lower().endswith(".gguf") or text.startswith((".", "/", "~")):
        return f"path:{text}"
    if "==" in text:
        return f"wheel:{text}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+(?:[@:].*)?", text):
        return f"hf:{text}"
    return "hf:ORG/REPO, path:FILE or wheel:PACKAGE==VERSION"
