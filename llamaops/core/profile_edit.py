"""Change values in a profile's text and leave the rest of it, comments too, as it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

_INDENT = "  "


def set_value(text: str, key: str, value: str, comment: str = "") -> str:
    """Return the text with ``section.key`` set; ``value`` is YAML on one line.

    Knows block mappings and one-line flow mappings, which is how profiles are written; the caller reads the result
    again and compares, since YAML has more spellings than these. A value of several lines is not replaced but doubled,
    which that reading refuses.
    """
    section, _, name = key.partition(".")
    said = f"  # {comment}" if comment else ""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if re.match(rf"{re.escape(section)}\s*:", line)), None)
    if start is None:
        return "\n".join([*lines, "", f"{section}:", f"{_INDENT}{name}: {value}{said}"]) + "\n"
    if re.match(rf"{re.escape(section)}\s*:\s*\{{", lines[start]):
        lines[start] = _into_flow(lines[start], name, value) + said
        return "\n".join(lines) + "\n"
    return "\n".join(_into_block(lines, start, name, f"{name}: {value}{said}")) + "\n"


def _into_flow(line: str, name: str, value: str) -> str:
    body = re.sub(rf"([{{,]\s*){re.escape(name)}\s*:\s*[^,}}]*,?\s*", r"\1", line)
    head, brace, rest = body.partition("{")
    rest = rest.strip()
    return f"{head}{brace}{name}: {value}{'' if rest.startswith('}') else ', '}{rest}"


def _into_block(lines: Sequence[str], start: int, name: str, entry: str) -> list[str]:
    inside = [i for i in range(start + 1, _end_of_block(lines, start)) if lines[i].strip()]
    keys = [i for i in inside if not lines[i].lstrip().startswith("#")]
    indent = re.match(r"\s*", lines[keys[0]])[0] if keys else _INDENT  # type: ignore[index]  # it always matches
    old = next((i for i in keys if re.match(rf"{indent}{re.escape(name)}\s*:", lines[i])), None)
    if old is None:
        return [*lines[: start + 1], indent + entry, *lines[start + 1 :]]
    return [*lines[:old], indent + entry, *lines[old + 1 :]]


def _end_of_block(lines: Sequence[str], start: int) -> int:
    return next((i for i in range(start + 1, len(lines)) if lines[i][:1] not in ("", " ", "\t", "#")), len(lines))
