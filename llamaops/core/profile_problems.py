"""What pydantic found wrong with a profile, in a person's words: one problem a value, with the nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from llamaops.core.yaml_text import Path, Problem, dotted

_WANT = {
    "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number", "float_type": "a number", "float_parsing": "a number",
    "finite_number": "a number", "bool_type": "true or false", "bool_parsing": "true or false",
    "string_type": "text", "string_too_short": "text", "model_type": "a mapping", "model_attributes_type": "a mapping",
    "dict_type": "a mapping", "tuple_type": "a list", "string_pattern_mismatch": "a name of a-z, 0-9 and -, up to 63",
}
_BOUND = {"greater_than": ("a number of more than", "gt"), "greater_than_equal": ("a number of at least", "ge"),
          "less_than": ("a number of less than", "lt"), "less_than_equal": ("a number of at most", "le")}
_SECRET: tuple[Path, ...] = (("serve", "api_keys"), ("engine", "env"), ("engine", "args"))
"""Under these, values are never shown."""


def problems_of(
    errors: list[ErrorDetails], data: Any, lines: Mapping[Path, int], model: type[BaseModel]
) -> list[Problem]:
    """Return one problem per path, in the order of the file; ``data`` is the profile before ``${VAR}`` was expanded."""
    grouped: dict[Path, list[ErrorDetails]] = {}
    for error in errors:
        grouped.setdefault(_path(error, data), []).append(error)
    told = [path for path in grouped if not _is_outer(path, grouped)]
    return [Problem(path, _text(path, grouped[path], data, model), _line(path, lines)) for path in told]


def _is_outer(path: Path, grouped: Mapping[Path, list[ErrorDetails]]) -> bool:
    """A union complains about a mapping as a whole too, when only a key inside it is wrong."""
    inner = any(len(other) > len(path) and other[: len(path)] == path for other in grouped)
    return inner and all(error["type"] != "complaint" and error["type"] != "value_error" for error in grouped[path])


def _path(error: ErrorDetails, data: Any) -> Path:
    """Return the keys of ``loc`` without the union members that pydantic puts between them."""
    path: list[str | int] = []
    for part in error["loc"]:
        found, inner = _at((part,), data)
        if found:
            data = inner
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        path.append(part)
    key = error.get("ctx", {}).get("key", "")
    if key == ".":
        return tuple(path[:-1] if error["loc"][-1:] == tuple(path[-1:]) else path)
    return (*(path[:-1] if path and path[-1] == error["loc"][-1] else path), key) if key else tuple(path)


def _text(path: Path, errors: list[ErrorDetails], data: Any, model: type[BaseModel]) -> str:
    kinds = {error["type"] for error in errors}
    if "extra_forbidden" in kinds:
        return "unknown key" + nearest(path, model)
    if kinds == {"missing"}:
        return "is required"
    wants = list(dict.fromkeys(want for error in errors for want in _wants(error)))
    whys = list(dict.fromkeys(filter(None, map(_why, errors))))
    text = f"must be {' or '.join(wants)}" if wants else ""
    text = ": ".join(filter(None, (text, "; ".join(whys))))
    return text + _got(path, data) + _meant(path, errors, data)


def _wants(error: ErrorDetails) -> Iterator[str]:
    kind, ctx = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        yield from _literals(ctx["expected"])
    elif kind in _BOUND:
        words, bound = _BOUND[kind]
        yield f"{words} {ctx[bound]:g}"
    elif kind == "complaint":
        yield ctx["want"]
    elif kind in _WANT:
        yield _WANT[kind]
    elif kind != "value_error":
        yield error["msg"].removeprefix("Input should be ").lower()


def _literals(expected: str) -> list[str]:
    return [word.strip("'") for part in expected.split(", ") for word in part.split(" or ")]


def _why(error: ErrorDetails) -> str:
    ctx = error.get("ctx", {})
    return str(ctx["error"]) if error["type"] == "value_error" else str(ctx.get("why", ""))


def _got(path: Path, data: Any) -> str:
    if any(path[: len(secret)] == secret for secret in _SECRET):
        return ""
    found, value = _at(path, data)
    if not found:
        return ""
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return f" (got {shown if len(shown) <= 60 else shown[:57] + '...'})"


def _at(path: Path, data: Any) -> tuple[bool, Any]:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return False, None
    return True, data


def _line(path: Path, lines: Mapping[Path, int]) -> int | None:
    return next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)


def _meant(path: Path, errors: list[ErrorDetails], data: Any) -> str:
    words = [word for e in errors if e["type"] == "literal_error" for word in _literals(e["ctx"]["expected"])]
    found, value = _at(path, data)
    if found and value is None:
        return "; leave the key out for its default"
    close = difflib.get_close_matches(value.lower(), words, 1) if isinstance(value, str) else []
    return f"; did you mean {close[0]}?" if close else ""


def nearest(path: Path, model: type[BaseModel]) -> str:
    """Return ``; did you mean KEY?`` for an unknown key: a sibling spelled alike, else a key of that name elsewhere."""
    known = dict(keys(model))
    *section, key = path
    siblings = [p[-1] for p in known if p[:-1] == tuple(section)]
    if close := difflib.get_close_matches(str(key), map(str, siblings), 1):
        return f"; did you mean {close[0]}?"
    elsewhere = [p for p in known if p[-1] == str(key)]
    return f"; did you mean {dotted(elsewhere[0])}?" if elsewhere else ""


def keys(model: type[BaseModel], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and pydantic field of every key of a model, sections before their keys."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        yield path, field
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from keys(inner, path)
