"""What builds the engine: CMake, Ninja or make, and two compilers, or the command that installs what is missing."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from llamaops.child import capture
from llamaops.errors import BuildFailed

PACKAGES = {
    "cmake": ("cmake", "cmake", "cmake"),
    "make": ("make", "make", "make"),
    "c++": ("g++", "gcc-c++", "gcc"),
    "cc": ("gcc", "gcc", "gcc"),
}
"""Tool → its package for apt, dnf and pacman."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What builds; ``identity`` is path and first version line of both compilers."""

    cmake: str
    maker: str
    ninja: bool
    identity: str


def find_toolchain(environ: Mapping[str, str]) -> Toolchain:
    """Find CMake, Ninja or make, and the compilers (``CC`` and ``CXX`` as CMake takes them).

    Raises BuildFailed that names everything that is missing and the command that installs it.
    """
    path = environ.get("PATH")
    ninja = shutil.which("ninja", path=path) or shutil.which("ninja-build", path=path)
    found = {
        "cmake": shutil.which("cmake", path=path),
        "make": ninja or shutil.which("make", path=path),
        "cc": _compiler(environ, "CC", ("cc", "gcc", "clang")),
        "c++": _compiler(environ, "CXX", ("c++", "g++", "clang++")),
    }
    cmake, maker, cc, cxx = (found[name] for name in ("cmake", "make", "cc", "c++"))
    if not (cmake and maker and cc and cxx):
        missing = [name for name, where in found.items() if where is None]
        raise BuildFailed(f"can't build the engine: {', '.join(missing)} not found", where=f"PATH={path}",
                          fix=_install_command(missing) + "   (or set engine.path to a llama-server)")
    identity = "; ".join(f"{tool}: {_version_line(tool, environ)}" for tool in (cc, cxx))
    return Toolchain(cmake, maker, ninja is not None, identity)


def _compiler(environ: Mapping[str, str], variable: str, names: tuple[str, ...]) -> str | None:
    path = environ.get("PATH")
    if given := environ.get(variable):
        return shutil.which(given.split()[0], path=path)
    return next((where for name in names if (where := shutil.which(name, path=path))), None)


def _version_line(tool: str, environ: Mapping[str, str]) -> str:
    done = capture([tool, "--version"], env={**environ, "LC_ALL": "C"}, timeout_s=15)
    return done.tail.splitlines()[0] if done.tail else "unknown"


def _install_command(missing: list[str]) -> str:
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    family = f"{release.get('ID', '')} {release.get('ID_LIKE', '')}".split()
    for at, command, names in (
        (0, "apt-get install", {"debian", "ubuntu"}),
        (1, "dnf install", {"fedora", "rhel", "centos", "suse", "opensuse"}),
        (2, "pacman -S", {"arch", "archlinux"}),
    ):
        if names & set(family):
            return f"{command} {' '.join(dict.fromkeys(PACKAGES[name][at] for name in missing))}"
    return f"install {', '.join(missing)} with this system's package manager"
