"""Profile text to plain values: YAML that refuses what a profile never means, ``${VAR}`` and ``--set``.

Scalars follow YAML 1.2's core schema, so that ``no`` is a name, ``12:30`` and ``2024-01-01`` are text and ``010`` is
ten; `pydantic` still reads ``yes`` where a key wants true or false.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_CHARS = 1 << 20
MAX_VALUES = 10_000
MAX_DEPTH = 32

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a profile. ``line`` counts from 1, None where it does not come from a line."""

    path: Path
    text: str
    line: int | None = None

    def __str__(self) -> str:
        """Return ``path: text (line N)``."""
        where = f"{dotted(self.path)}: " if self.path else ""
        return f"{where}{self.text}" + (f" (line {self.line})" if self.line else "")


def dotted(path: Path) -> str:
    """Return a path as people write it: ``engine.args[2]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


@dataclass(slots=True)
class Text:
    """A document read: its values (plain dicts, lists and scalars), the line of each path, and what was wrong."""

    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _TooMuchError(Exception):
    """A document that only an attack or an accident makes."""


class _Loader(yaml.SafeLoader):
    """SafeLoader's syntax with the scalars of YAML 1.2, and nesting bounded."""

    _depth = 0
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own spelling

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooMuchError(f"nested more than {MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_BOOL, _INT = re.compile(r"true|True|TRUE|false|False|FALSE"), re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULL = re.compile(r"~|null|Null|NULL|")


def read_yaml(text: str) -> Text:
    """Parse one document; syntax errors, duplicate keys and oversize end up in ``problems`` with line and column."""
    out = Text()
    if len(text) > MAX_CHARS:
        out.problems.append(Problem((), f"the text is longer than {MAX_CHARS} characters"))
        return out
    try:
        node = yaml.compose(text, Loader=_Loader)
        out.data = None if node is None else _Builder(out).value(node, (), 0)
    except yaml.MarkedYAMLError as exc:
        out.problems.append(_syntax(exc, text))
    except yaml.YAMLError as exc:  # ReaderError: a character that YAML does not allow
        out.problems.append(Problem((), f"not YAML: {str(exc).splitlines()[0]}"))
    except _TooMuchError as exc:
        out.problems.append(Problem((), str(exc)))
    return out


def _syntax(exc: yaml.MarkedYAMLError, text: str) -> Problem:
    mark = exc.problem_mark or exc.context_mark
    what = "not YAML: " + " ".join(filter(None, (exc.context, exc.problem)))
    if mark is None:
        return Problem((), what)
    if "'\\t'" in what:
        what += "; indent with spaces, not tabs"
    if "${" in (text.splitlines() or [""])[min(mark.line, len(text.splitlines()) - 1)]:
        what += '; inside { } or [ ], quote variables: "${NAME}"'
    return Problem((), f"{what}, column {mark.column + 1}", mark.line + 1)


class _Builder:
    """Nodes to values. Aliases are copied, up to MAX_VALUES in all, so an alias bomb stops early."""

    def __init__(self, out: Text) -> None:
        self._out = out
        self._count = 0

    def value(self, node: yaml.Node, path: Path, depth: int) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _TooMuchError(f"more than {MAX_VALUES} values, aliases counted as often as they are used")
        if depth > MAX_DEPTH:
            raise _TooMuchError(f"nested more than {MAX_DEPTH} levels deep")
        line = self._out.lines.setdefault(path, node.start_mark.line + 1)
        if node.tag.removeprefix("tag:yaml.org,2002:") not in ("str", "seq", "map"):
            self._out.problems.append(Problem(path, f"the tag {node.tag} has no meaning here", line))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, i), depth + 1) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return plain(node.value) if node.style is None else node.value

    def _mapping(self, node: yaml.MappingNode, path: Path, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line, column = key_node.start_mark.line + 1, key_node.start_mark.column + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._out.problems.append(Problem(path, f"a key must be a word, column {column}", line))
                continue
            key = key_node.value
            if key in out:
                first = self._out.lines[(*path, key)]
                self._out.problems.append(
                    Problem((*path, key), f"written twice, first on line {first}, column {column}", line))
                continue
            self._out.lines[(*path, key)] = line
            out[key] = self.value(value_node, (*path, key), depth + 1)
        return out


def plain(text: str) -> str | int | float | bool | None:
    """Return what an unquoted scalar means in YAML 1.2's core schema; integers are decimal, at most 18 digits."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(re.sub(r"\.(inf|nan)", r"\1", text, flags=re.IGNORECASE))
    return text


_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<given>:-(?P<default>[^}]*))?\}|\$\{")


def expand(value: Any, environ: Mapping[str, str], read: Text, path: Path = ()) -> Any:
    """Return ``value`` with ``${NAME}`` and ``${NAME:-default}`` replaced in every string value; ``$${`` stays ``${``.

    The default is taken where the variable is unset or empty, as a shell does. Problems are added to
    ``read``; they name path and variable, never a value.
    """
    if isinstance(value, dict):
        return {key: expand(item, environ, read, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [expand(item, environ, read, (*path, i)) for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def complain(text: str) -> str:
        read.problems.append(Problem(path, text, read.lines.get(path)))
        return ""

    def replace(found: re.Match[str]) -> str:
        if found[0] == "$${":
            return "${"
        name = found["name"]
        if name is None:
            return complain("a variable is written ${NAME} or ${NAME:-default}, a literal ${ as $${")
        given = environ.get(name)
        if found["given"]:
            return given or found["default"]
        if given is None:
            return complain(f"the variable {name} is not set; set it or write ${{{name}:-default}}")
        return given

    return _VARIABLE.sub(replace, value)


def override(data: dict[str, Any], assignment: str, problems: list[Problem]) -> None:
    """Carry out one ``--set a.b=VALUE`` on ``data``; the value is YAML."""
    key, equals, text = assignment.partition("=")
    path: Path = tuple(key.strip().split("."))
    label = f"--set {key.strip()}"
    if not equals or not all(path):
        problems.append(Problem((), f"{label}: write --set section.key=value"))
        return
    value = read_yaml(text)
    problems.extend(Problem((), f"{label}: {problem.text}") for problem in value.problems)
    for part in _sections(path):
        inner = data.setdefault(part, {})
        if inner is None:
            inner = data[part] = {}
        if not isinstance(inner, dict):
            problems.append(Problem((), f"{label}: {part} is not a mapping"))
            return
        data = inner
    data[str(path[-1])] = value.data


def _sections(path: Path) -> Iterator[str]:
    return (str(part) for part in path[:-1])
