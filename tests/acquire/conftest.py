"""What the acquire tests share: a disk that is soon full, and an engine source that builds in a second."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

CMAKE = """\
cmake_minimum_required(VERSION 3.14)
project(tiny C)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
foreach(name llama-server llama-quantize llama-bench llama-imatrix llama-perplexity)
  add_executable(${name} main.c)
  target_compile_definitions(${name} PRIVATE NUMBER=${LLAMA_BUILD_NUMBER})
endforeach()
"""
MAIN = r"""
#include <stdio.h>
#include <string.h>
int main(int argc, char **argv) {
  if (argc > 1 && !strcmp(argv[1], "--help"))
    puts("-m,    --model FNAME   m\n-c,    --ctx-size N   c\n--port PORT   p\n--host HOST   or UNIX socket paths");
  else
    printf("version: 0.1 (build %d, commit unknown)\n", NUMBER);
  return 0;
}
"""
RECIPE = """\
build = 7
targets = ["llama-server", "llama-quantize", "llama-bench", "llama-imatrix", "llama-perplexity"]
[cmake]
CMAKE_BUILD_TYPE = "Release"
[[source]]
kind = "path"
path = "tree"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return a recipe file beside a ``tree`` whose llama-server only knows --help and --version."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "CMakeLists.txt").write_text(CMAKE)
    (tree / "main.c").write_text(MAIN)
    (tree / "LICENSE").write_text("terms")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs a small tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
