"""Templates of YAML files in which no value can break out of its place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from llamaops.errors import WrongProfile
from llamaops.resources import resource

_ENDLESS = 1 << 30
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]{2,}")
_WORDS = frozenset({"yes", "off", "nan", "inf", "true", "false", "null"})
"""Readers differ in what they take for a truth value or a number (``y``, ``0o17``): only plain words go unquoted."""


class _Dumper(yaml.SafeDumper):
    """Quotes all text but plain words."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    if any(0xD800 <= ord(char) <= 0xDFFF for char in value):
        raise WrongProfile("a file of this kind can't hold this text", where=ascii(value), fix="rename it",
                           why="it has bytes that are not UTF-8")
    bare = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if bare else '"')


_Dumper.add_representer(str, _text)


def dump(value: Any, *, flow: bool = False) -> str:
    """Return ``value`` as a YAML document: blocks, or one line with ``flow``."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, width=_ENDLESS, sort_keys=False)
    return text.removesuffix("...\n")


def render(name: str, context: dict[str, Any], literal: Callable[[str], str]) -> str:
    """Fill in the template ``name`` of templates/.

    Every expression in it, comments included, becomes YAML on one line, so that layout and comments are the template's
    and data can't add to them. ``literal`` escapes what the reader of the file would expand in text (``$``).
    """
    return _fill(name, context, lambda value: dump(_map_text(value, literal), flow=True).rstrip("\n"))


def render_plain(name: str, context: dict[str, Any]) -> str:
    """Fill in a template of another language; only for words of ours, as nothing is escaped."""
    return _fill(name, context, str)


def _fill(name: str, context: dict[str, Any], finalize: Callable[[Any], str]) -> str:
    environment = Environment(
        loader=FileSystemLoader(resource("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finalize,
        autoescape=False,  # noqa: S701 - none of it is HTML
    )
    return environment.get_template(name).render(context)


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_text(item, change) for key, item in value.items()}
    return [_map_text(item, change) for item in value] if isinstance(value, list | tuple) else value
