"""Who may import whom: cli → bench → prepare → provide → rates → acquire, host, serve, deploy → leaf modules → core."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "llamaops"
TREES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"):
         ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
RANKS = {"__init__": 0, "errors": 0, "core": 1, "acquire": 3, "host": 3, "serve": 3, "deploy": 3, "rates": 4,
         "provide": 5, "prepare": 6, "bench": 7, "cli": 8, "__main__": 9}
LEAF = 2
"""Every other module of the top level (dirs, resources, files …): those may import each other."""
WORLD = {"os", "socket", "ssl", "subprocess", "asyncio", "threading", "time", "datetime", "logging", "tempfile", "glob",
         "shutil", "fcntl", "pathlib.Path", "httpx", "psutil", "click", "rich", "uvicorn", "jinja2"}
HEAVY = {"pydantic", "yaml", "gguf", "numpy", "httpx", "rich", "huggingface_hub", "uvicorn", "jinja2", "psutil",
         "asyncio"}


def imports(nodes: Iterator[ast.AST]) -> set[str]:
    """Return the modules and ``module.name`` pairs that are imported; ours without the ``llamaops.`` in front."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("llamaops.") for name in found}


ALL = {name: imports(ast.walk(tree)) for name, tree in TREES.items()}


def part(name: str) -> str:
    return name.split(".")[0]


def rank(name: str) -> int:
    return RANKS.get(part(name), LEAF)


def test_imports_point_downwards() -> None:
    wrong = {(name, other) for name in TREES for other in ALL[name] & TREES.keys() if part(name) != part(other)
             and (rank(other) > rank(name) or (rank(other) == rank(name) != LEAF))}
    assert not wrong


def test_the_core_touches_nothing_of_the_world() -> None:
    core = [name for name in TREES if part(name) == "core"]
    assert not {(name, other) for name in core for other in ALL[name] if WORLD & {other, part(other)}}


def test_some_siblings_stay_strangers() -> None:
    inside = {(name, other) for name in TREES for other in ALL[name] & TREES.keys() if name != other}
    assert not {pair for pair in inside if all(name.startswith("acquire.") for name in pair)}
    assert not inside & {("serve.supervisor", "serve.relay"), ("serve.relay", "serve.supervisor")}


def test_the_help_of_every_command_loads_nothing_heavy() -> None:
    script = """
import sys, click
from llamaops.cli import COMMANDS, cli
for name in COMMANDS:
    assert cli.get_command(click.Context(cli), name), name
print(*sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert not HEAVY & set(answer.stdout.split())
