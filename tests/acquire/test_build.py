"""Building the engine: a source that compiles in a second, with everything that goes wrong in minutes-long builds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from running import LLAMAOPS, await_true, descendants, gone

from llamaops import recipe as recipes
from llamaops import toolchain
from llamaops.acquire import build
from llamaops.acquire.locate import find_engine
from llamaops.core.engine import Engine
from llamaops.core.profile import EngineSection
from llamaops.core.progress import NoProgress
from llamaops.errors import BuildFailed

SECTION = EngineSection.model_validate({})


class Said(NoProgress):
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def environ(recipe: Path, **extra: str) -> dict[str, str]:
    return {**os.environ, "LLAMAOPS_RECIPE": str(recipe), **extra}


def make(recipe: Path, cache: Path, *, section: EngineSection = SECTION, progress: NoProgress | None = None) -> Engine:
    return build.build_engine(section, cache, progress or NoProgress(), environ(recipe))


def builds(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "engines").glob("b*"))


def test_builds_once_and_is_found_then(recipe: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert find_engine(SECTION, cache, environ(recipe, PATH="/nonexistent")) is None
    made = make(recipe, cache)
    folder = Path(made.path).parent.parent
    assert (made.version, made.origin) == ("b7", "built")
    assert {p.name for p in (folder / "bin").iterdir()} == set(recipes.load_recipe(environ(recipe)).targets)
    assert (folder / "LICENSE").read_text() == "terms"
    assert json.loads((folder / "manifest.json").read_text())["version"] == "b7"
    assert not list((cache / "engines").glob(".building-*"))
    found = find_engine(SECTION, cache, environ(recipe))
    assert found is not None
    assert (found.path, found.origin) == (made.path, "cache")
    before = (folder / "manifest.json").stat().st_mtime_ns
    make(recipe, cache)
    assert (folder / "manifest.json").stat().st_mtime_ns == before


def test_make_does_where_ninja_is_missing(recipe: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "make", "cc", "c++", "as", "ld", "ar", "ranlib", "nice", "setpriv", "uname", "sh"):
        if where := shutil.which(name):
            (tools / name).symlink_to(where)
    made = build.build_engine(SECTION, tmp_path / "cache", NoProgress(), environ(recipe, PATH=str(tools)))
    assert "Unix Makefiles" in (Path(made.path).parent.parent / "build.log").read_text()


def test_the_key_covers_source_flags_compiler_and_cpu(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    make(recipe, cache)
    make(recipe, cache, section=EngineSection.model_validate({"cmake": {"GGML_OPENMP": False}}))
    assert len(builds(cache)) == 2
    monkeypatch.setattr(recipes, "cpu_features", lambda: "sse2")
    assert find_engine(SECTION, cache, environ(recipe, PATH="")) is None, "another CPU must not use it"
    make(recipe, cache)
    assert len(builds(cache)) == 3
    (tmp_path / "tree" / "main.c").write_text((tmp_path / "tree" / "main.c").read_text() + "\n")
    assert find_engine(SECTION, cache, environ(recipe, PATH="")) is None, "the source changed"
    make(recipe, cache)
    assert len(builds(cache)) == 4
    monkeypatch.setattr(toolchain, "_version_line", lambda *_args: "another compiler 9")
    make(recipe, cache)
    assert len(builds(cache)) == 5


def test_a_portable_build_suits_every_cpu(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = EngineSection.model_validate({"cmake": {"GGML_NATIVE": "OFF"}})
    made = make(recipe, tmp_path, section=section)
    monkeypatch.setattr(recipes, "cpu_features", lambda: "sse2")
    found = find_engine(section, tmp_path, environ(recipe))
    assert found is not None
    assert found.path == made.path


def test_two_at_once_build_once(recipe: Path, tmp_path: Path) -> None:
    slow = tmp_path / "tree" / "CMakeLists.txt"
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    slow.write_text(slow.read_text() + f'\nexecute_process(COMMAND cat {gate})\n')
    said = [Said(), Said()]
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(make, recipe, tmp_path / "cache", progress=s) for s in said]
        await_true(lambda: any("waiting" in line for s in said for line in s.lines), what="one waits")
        gate.write_text("go")
        paths = {future.result().path for future in both}
    assert len(paths) == 1
    assert sum("waiting" in line for s in said for line in s.lines) == 1
    assert sum("engine built" in line for s in said for line in s.lines) == 1


def test_a_failing_compile_shows_the_error_and_keeps_the_log(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "tree" / "main.c").write_text("int main(void) { return oops; }\n")
    with pytest.raises(BuildFailed) as caught:
        make(recipe, tmp_path / "cache")
    error = caught.value
    assert error.exit_code == 69
    assert "oops" in str(error.detail)
    assert "oops" in Path(str(error.where)).read_text()
    assert builds(tmp_path / "cache") == []


def test_a_failing_configure_is_told_and_can_be_mended(recipe: Path, tmp_path: Path) -> None:
    lists = tmp_path / "tree" / "CMakeLists.txt"
    good = lists.read_text()
    flag = tmp_path / "mended"
    lists.write_text(good + f'\nif(NOT EXISTS {flag})\nmessage(FATAL_ERROR "no way")\nendif()\n')
    with pytest.raises(BuildFailed, match="CMake can't configure") as caught:
        make(recipe, tmp_path / "cache")
    assert "no way" in str(caught.value.detail)
    flag.touch()
    assert make(recipe, tmp_path / "cache").version == "b7"


def test_missing_tools_are_named_with_their_packages(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match=r"cmake, make, cc, c\+\+ not found") as caught:
        build.build_engine(SECTION, tmp_path, NoProgress(), environ(recipe, PATH=str(tmp_path), CC="", CXX=""))
    assert "cmake" in str(caught.value.fix)
    with pytest.raises(BuildFailed, match="c\\+\\+ not found"):
        build.build_engine(SECTION, tmp_path, NoProgress(), environ(recipe, CXX="/nonexistent/c++"))


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ({"ID": "debian"}, "apt-get install cmake g++"),
        ({"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}, "apt-get install cmake g++"),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, "dnf install cmake gcc-c++"),
        ({"ID": "arch"}, "pacman -S cmake gcc"),
        ({"ID": "other"}, "install cmake, c++ with"),
    ],
)
def test_install_commands(release: dict[str, str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.platform, "freedesktop_os_release", lambda: release)
    assert toolchain._install_command(["cmake", "c++"]).startswith(command)


def test_an_engine_that_says_another_version_is_refused(recipe: Path, tmp_path: Path) -> None:
    lists = tmp_path / "tree" / "CMakeLists.txt"
    lists.write_text(lists.read_text().replace("${LLAMA_BUILD_NUMBER}", "6"))
    with pytest.raises(BuildFailed, match="another version"):
        make(recipe, tmp_path / "cache")
    assert builds(tmp_path / "cache") == []


def test_the_number_is_not_that_of_the_work_tree_around_it(recipe: Path, tmp_path: Path) -> None:
    lists = tmp_path / "tree" / "CMakeLists.txt"
    lists.write_text(lists.read_text().replace(
        "project(tiny C)", "project(tiny C)\nif(NOT DEFINED LLAMA_BUILD_NUMBER)\nset(LLAMA_BUILD_NUMBER 99)\nendif()"))
    assert make(recipe, tmp_path / "cache").version == "b7"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_leaves_no_process_and_no_engine(recipe: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = _start_and_hang(recipe, tmp_path)
    children = descendants(process.pid)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    await_true(lambda: gone(children), what="the compilers are gone")
    assert builds(tmp_path / "cache") == []
    (tmp_path / "mended").touch()
    assert make(recipe, tmp_path / "cache").version == "b7"


def test_killed_leaves_no_process_and_no_engine(recipe: Path, tmp_path: Path) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("without setpriv nothing dies with a killed parent")
    process = _start_and_hang(recipe, tmp_path)
    children = descendants(process.pid)
    process.kill()
    process.wait()
    await_true(lambda: gone(children), what="the compilers are gone")
    assert builds(tmp_path / "cache") == []


def _start_and_hang(recipe: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    """Start a build whose compiler hangs in a grandchild until the file ``mended`` is there."""
    lists = tmp_path / "tree" / "CMakeLists.txt"
    lists.write_text(lists.read_text() + f"""
add_custom_target(hang COMMAND sh -c "test -e {tmp_path}/mended || sleep 987" VERBATIM)
add_dependencies(llama-server hang)
""")
    env = environ(recipe, LLAMAOPS_CACHE=str(tmp_path / "cache"))
    process = subprocess.Popen([*LLAMAOPS, "engine", "build"], env=env, stderr=subprocess.DEVNULL)

    def sleeps() -> bool:
        with suppress(psutil.NoSuchProcess):  # compilers come and go meanwhile
            return any(p.name() == "sleep" for p in descendants(process.pid))
        return False

    try:
        await_true(sleeps, what="the build hangs in its compiler")
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def test_a_half_built_tree_is_continued(recipe: Path, tmp_path: Path) -> None:
    lists = tmp_path / "tree" / "CMakeLists.txt"
    lists.write_text(lists.read_text() + f"""
add_custom_target(check COMMAND test -e {tmp_path}/mended)
add_dependencies(llama-perplexity check)
add_dependencies(check llama-bench)
""")
    with pytest.raises(BuildFailed):
        make(recipe, tmp_path / "cache")
    objects = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*llama-bench.dir/*.o")}
    assert objects
    (tmp_path / "mended").touch()
    made = make(recipe, tmp_path / "cache")
    log = (Path(made.path).parent.parent / "build.log").read_text()
    assert "llama-bench.dir" not in log, "compiled again"


def test_cancelled_by_event(recipe: Path, tmp_path: Path) -> None:
    from llamaops.child import CancelledError

    stop = threading.Event()
    stop.set()
    with pytest.raises(CancelledError):
        build.build_engine(SECTION, tmp_path / "cache", NoProgress(), environ(recipe), stop)
    assert builds(tmp_path / "cache") == []


def test_abandoned_half_builds_are_removed(recipe: Path, tmp_path: Path) -> None:
    old = tmp_path / "cache" / "engines" / ".building-000000000000"
    old.mkdir(parents=True)
    os.utime(old, (0, 0))
    make(recipe, tmp_path / "cache")
    assert not old.exists()


def test_no_room_is_refused_before_anything_is_made(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "ROOM_BYTES", 1 << 60)
    with pytest.raises(BuildFailed, match="not enough room"):
        make(recipe, tmp_path / "cache")


def _tarball(tmp_path: Path) -> tuple[Path, str]:
    archive = tmp_path / "llama-1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "tree", arcname="llama-1/inner")
    return archive, hashlib.sha256(archive.read_bytes()).hexdigest()


def _url_recipe(recipe: Path, archive: Path, sha256: str) -> None:
    head = recipe.read_text().partition("[[source]]")[0]
    source = f'[[source]]\nkind = "url"\nurl = "file://{archive}"\nsha256 = "{sha256}"\nfolder = "inner"\n'
    recipe.write_text(head + source)


def test_a_tarball_by_url_and_checksum(recipe: Path, tmp_path: Path) -> None:
    archive, sha256 = _tarball(tmp_path)
    _url_recipe(recipe, archive, sha256)
    assert make(recipe, tmp_path / "cache").version == "b7"


def test_a_tarball_with_another_checksum_is_refused(recipe: Path, tmp_path: Path) -> None:
    archive, _ = _tarball(tmp_path)
    _url_recipe(recipe, archive, "0" * 64)
    with pytest.raises(BuildFailed, match="wrong checksum"):
        make(recipe, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("main.c"))


BACKEND = """\
from pathlib import Path
def prepare_metadata_for_build_wheel(folder, settings=None):
    info = Path(folder) / "tiny_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: tiny-engine\\nVersion: 1.0\\n")
    return info.name
build_wheel = None
"""


def _sdist(tmp_path: Path) -> str:
    """Make an index with one sdist that needs no build tools, and return its checksum."""
    folder = tmp_path / "sdist"
    folder.mkdir()
    build_system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (folder / "pyproject.toml").write_text(build_system)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tiny-engine\nVersion: 1.0\n")
    shutil.copytree(tmp_path / "tree", folder / "llama.cpp")
    archive = tmp_path / "index" / "tiny_engine-1.0.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname="tiny_engine-1.0")
    return hashlib.sha256(archive.read_bytes()).hexdigest()


@pytest.mark.parametrize("right", [True, False])
def test_an_sdist_from_the_index(recipe: Path, tmp_path: Path, right: bool) -> None:
    sha256 = _sdist(tmp_path)
    pinned = sha256 if right else "0" * 64
    head = recipe.read_text().partition("[[source]]")[0]
    source = 'kind = "sdist"\npackage = "tiny-engine"\nversion = "1.0"\nfolder = "llama.cpp"'
    recipe.write_text(f'{head}[[source]]\n{source}\nsha256 = "{pinned}"\n')
    kept = {k: v for k, v in environ(recipe).items() if not k.startswith("PIP_")}
    index = kept | {"PIP_FIND_LINKS": str(tmp_path / "index"), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    cache = tmp_path / "cache"
    if right:
        assert build.build_engine(SECTION, cache, NoProgress(), index).version == "b7"
        assert [p.name for p in (cache / "downloads").iterdir()] == [f"{sha256}.tar.gz"]
        shutil.rmtree(tmp_path / "index")
        again = EngineSection.model_validate({"cmake": {"X": "1"}})
        assert build.build_engine(again, cache, NoProgress(), index).version == "b7", "the archive is kept"
    else:
        with pytest.raises(BuildFailed, match="wrong checksum"):
            build.build_engine(SECTION, cache, NoProgress(), index)


def test_the_next_source_is_tried(recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text()
    gone_url = f'[[source]]\nkind = "url"\nurl = "file:///nonexistent.tar.gz"\nsha256 = "{"1" * 64}"\n'
    recipe.write_text(text.replace("[[source]]", gone_url + "[[source]]", 1))
    said = Said()
    assert make(recipe, tmp_path / "cache", progress=said).version == "b7"
    assert any("can't be had" in line for line in said.lines)


@pytest.mark.parametrize("text", ["", "targets = []", 'targets=[]\n[[source]]\nkind="ftp"', "]["])
def test_a_broken_recipe_is_named(recipe: Path, tmp_path: Path, text: str) -> None:
    recipe.write_text(text)
    with pytest.raises(BuildFailed, match="recipe can't be read"):
        make(recipe, tmp_path)


def test_the_shipped_recipe_is_pinned() -> None:
    shipped = recipes.load_recipe({})
    assert shipped.build == 11434
    assert all(source.kind == "path" or source.sha256 for source in shipped.sources)
    tools = {target.removeprefix("llama-") for target in shipped.targets}
    assert tools >= {"server", "quantize", "bench", "imatrix", "perplexity"}


PATCH = """\
Why: for the test.

--- a/CMakeLists.txt
+++ b/CMakeLists.txt
@@ -1,2 +1,3 @@
 cmake_minimum_required(VERSION 3.14)
+message(STATUS "patched it is")
 project(tiny C)
"""


def patched(recipe: Path, tmp_path: Path, patch: str) -> Path:
    """Turn the recipe's tree into an archive and let the recipe patch it."""
    archive = tmp_path / "engine.tar.gz"
    if not archive.exists():
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(tmp_path / "tree", "engine-7")
    (tmp_path / "ours.patch").write_text(patch)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    head, _, _ = recipe.read_text().partition("[[source]]")
    head = head.replace("build = 7", 'build = 7\npatches = ["ours.patch"]', "patches" not in head)
    recipe.write_text(f'{head}[[source]]\nkind = "url"\nurl = "{archive.as_uri()}"\nsha256 = "{digest}"\n')
    return recipe


@pytest.mark.parametrize("tool", ["patch", "git"])
def test_our_patches_change_what_is_built_and_its_key(recipe: Path, tmp_path: Path, tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "make", "cc", "c++", "as", "ld", "ar", "ranlib", "nice", "setpriv", "uname", "sh", tool):
        if where := shutil.which(name):
            (tools / name).symlink_to(where)
    where = environ(patched(recipe, tmp_path, PATCH), PATH=str(tools))
    cache = tmp_path / "cache"
    made = build.build_engine(SECTION, cache, NoProgress(), where)
    assert "patched it is" in (Path(made.path).parent.parent / "build.log").read_text()
    assert find_engine(SECTION, cache, where) is not None
    patched(recipe, tmp_path, PATCH.replace("patched it is", "patched anew"))
    assert find_engine(SECTION, cache, where) is None, "another patch, another engine"


def test_a_patch_that_does_not_fit_is_named(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match=r"ours\.patch does not fit"):
        make(patched(recipe, tmp_path, PATCH.replace(" project(tiny C)", " project(other C)")), tmp_path / "cache")
    assert builds(tmp_path / "cache") == []


def test_compilers_run_under_ccache_where_it_is(recipe: Path, tmp_path: Path) -> None:
    tool, log = tmp_path / "tools/ccache", tmp_path / "ccache.log"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$CCACHE_BASEDIR $*" >> {log}\nexec "$@"\n')
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    build.build_engine(SECTION, tmp_path / "cache", NoProgress(), environ(recipe, PATH=path))
    ran = log.read_text().splitlines()
    assert any(line.endswith("main.c") for line in ran)
    assert all(line.startswith(f"{tmp_path}/cache/engines/.building-") for line in ran)
    log.unlink()
    without = EngineSection.model_validate({"cmake": {"GGML_CCACHE": False}})
    build.build_engine(without, tmp_path / "cache", NoProgress(), environ(recipe, PATH=path))
    assert not log.exists()
