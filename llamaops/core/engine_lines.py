"""What one line of the engine's log is: how grave, and without its time stamp. Pure."""

from __future__ import annotations

import re
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
_LETTERS: dict[str, Level] = {"D": "debug", "I": "info", "W": "warning", "E": "error"}
# llama.cpp b11434, common/log.cpp: minutes.seconds.milli.micro, then the level's letter.
_STAMP = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} (?:([DIWE]) )?")
# Lines without a letter come from wrappers, libraries, and what a dying process says last.
_ERROR = re.compile(r"^\S*(?:error|fatal)\b|GGML_ASSERT|Assertion .* failed|terminate called|[Ss]egmentation fault|"
                    r"[Ii]llegal instruction|Operation not permitted|cannot run", re.IGNORECASE)
_WARNING = re.compile(r"^\S*warn(?:ing)?\b", re.IGNORECASE)


def bare(line: str) -> str:
    """Return the line without its time stamp: what repeats is alike in this."""
    return _STAMP.sub(r"\1 ", line, count=1).lstrip() if _STAMP.match(line) else line


def level_of(line: str) -> Level:
    """Tell how grave a line is: by the engine's own letter, else by the words it begins with."""
    if (found := _STAMP.match(line)) and found[1]:
        return _LETTERS[found[1]]
    text = line[found.end():] if found else line
    if _ERROR.search(text):
        return "error"
    return "warning" if _WARNING.search(text) else "info"


def is_at_least(line: str, level: Level) -> bool:
    """Tell whether a line is as grave as ``level``, or more."""
    return LEVELS.index(level_of(line)) >= LEVELS.index(level)
