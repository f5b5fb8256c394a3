"""The wheel, built and installed somewhere else, finds what travels with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("templates", "vendor", "examples")


def run(*argv: str | Path, cwd: Path, **env: str) -> str:
    answer = subprocess.run(argv, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=120,
                            check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that holds the installed package and ``bin/``; its dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (wheel,) = folder.glob("llamaops-*.whl")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check",
        "--target", folder / "site", wheel, cwd=folder)
    return folder / "site"


def test_it_carries_every_file_it_reads(installed: Path) -> None:
    listing = run("git", "ls-files", *SHIPPED, cwd=ROOT) if (ROOT / ".git").exists() else ""
    expected = listing.split() or [str(path.relative_to(ROOT)) for top in SHIPPED for path in (ROOT / top).rglob("*.*")]
    missing = [name for name in expected if not (installed / "llamaops/data" / name).is_file()]
    assert expected and not missing


def test_it_works_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    names = ["templates/systemd/service.j2", "templates/text/calibration.txt", "vendor/llama.cpp.toml",
             "examples/quickstart.yaml"]
    script = f"import llamaops.resources as r; print(r.__file__); print(*(r.resource(name) for name in {names}))"
    env = {"PYTHONPATH": str(installed), "LLAMAOPS_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    module, paths = run(sys.executable, "-P", "-c", script, cwd=tmp_path, **env).splitlines()
    assert Path(module).is_relative_to(installed)
    assert all(Path(path).is_relative_to(installed) and Path(path).exists() for path in paths.split())

    program = installed / "bin/llamaops"
    profile = tmp_path / "llamaops.yaml"
    run(program, "init", profile, cwd=tmp_path, **env)
    unit = run(program, "deploy", "systemd", profile, cwd=tmp_path, **env)
    assert f"ExecStart={program} up {profile}" in unit
    assert '"$schema"' in run(program, "schema", cwd=tmp_path, **env)
