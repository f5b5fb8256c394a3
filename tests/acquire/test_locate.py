"""Finding llama-server, and saying why one can't run here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llamaops import engine_binary
from llamaops.acquire.locate import find_engine, read_engine
from llamaops.core.profile import EngineSection
from llamaops.engine_binary import newest_glibc
from llamaops.errors import EngineUnavailable

HELP = "-m,    --model FNAME   m\n-c,    --ctx-size N   c\n--port PORT   p\n--host HOST   or UNIX socket paths"


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def fit(path: Path, version: str = "version: 5000 (abc)") -> Path:
    return script(path, f'case "$1" in --help) printf %s "{HELP}";; *) echo "{version}";; esac')


def section(**keys: object) -> EngineSection:
    return EngineSection.model_validate(keys)


def test_facts(tmp_path: Path) -> None:
    engine = read_engine(fit(tmp_path / "llama-server"), "path")
    assert (engine.version, engine.openmp, engine.unix_socket) == ("b5000", None, True)
    assert {"-m", "--model", "--port"} <= engine.flags


def test_the_real_path_is_shown(tmp_path: Path) -> None:
    fit(tmp_path / "llama-server-1")
    (tmp_path / "llama-server").symlink_to("llama-server-1")
    assert read_engine(tmp_path / "llama-server", "PATH").path == str(tmp_path / "llama-server-1")


def test_variables_that_would_start_a_model_are_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_MODEL", "/m.gguf")
    body = f'test -z "$LLAMA_ARG_MODEL" || exit 9; test "$1" = --help && printf %s "{HELP}"; exit 0'
    assert read_engine(script(tmp_path / "llama-server", body), "path").version is None


def test_what_it_said_is_remembered_while_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(tmp_path / "llama-server", f'echo x >> {tmp_path}/starts; printf %s "{HELP}"')
    cache = tmp_path / "cache"

    def starts_when_read() -> int:
        log = tmp_path / "starts"
        log.unlink(missing_ok=True)
        engine = read_engine(path, "path", cache=cache)
        assert "--model" in engine.flags
        return len(log.read_text().splitlines()) if log.exists() else 0

    first = read_engine(path, "path", cache=cache)
    assert starts_when_read() == 0
    assert read_engine(path, "path", cache=cache) == first
    assert read_engine(path, "PATH", cache=cache).origin == "PATH"
    os.utime(path, (5, 5))
    assert starts_when_read() == 2, "--help and --version; the third only loads"
    monkeypatch.setattr(engine_binary, "cpu_features", lambda: "sse2")
    assert starts_when_read() == 2, "--help and --version; the third only loads"
    next(cache.rglob("*.json")).write_text("{damaged")
    assert starts_when_read() == 2, "--help and --version; the third only loads"
    assert starts_when_read() == 0
    path.chmod(0o644)
    with pytest.raises(EngineUnavailable, match="not executable"):
        read_engine(path, "path", cache=cache)


def test_a_cache_that_can_not_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    assert read_engine(fit(tmp_path / "llama-server"), "path", cache=tmp_path / "cache").version == "b5000"


GLIBC = "/lib/libc.so.6: version \\`GLIBC_2.38' not found (required by ./llama-server)"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (f'echo "{GLIBC}" >&2; exit 1', "it needs GLIBC_2.38, newer than"),
        ("echo 'x: error while loading shared libraries: libgomp.so.1: cannot' >&2; exit 127", "library libgomp.so.1"),
        ("kill -ILL $$", "illegal instruction"),
        ("kill -SEGV $$", "signal 11"),
        ("echo oh no >&2; exit 3", "exit code 3: oh no"),
        ("echo usage: other; exit 0", "not that of llama-server"),
    ],
)
def test_unfit_binaries_are_explained_and_a_build_is_offered(tmp_path: Path, body: str, says: str) -> None:
    with pytest.raises(EngineUnavailable) as caught:
        read_engine(script(tmp_path / "llama-server", body), "path")
    assert says in str(caught.value.why)
    assert "llamaops engine build" in str(caught.value.fix)


def test_a_binary_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_binary, "ANSWER_S", 0.2)
    with pytest.raises(EngineUnavailable, match="did not answer"):
        read_engine(script(tmp_path / "llama-server", "exec sleep 30"), "path")


def test_another_machines_binary(tmp_path: Path) -> None:
    real = bytearray(Path(sys.executable).resolve().read_bytes()[:4096])
    real[18:20] = b"\xf7\x00"  # e_machine: BPF, which nobody runs programs on
    path = tmp_path / "llama-server"
    path.write_bytes(real)
    path.chmod(0o755)
    with pytest.raises(EngineUnavailable, match="no program for this machine"):
        read_engine(path, "path")


def test_not_executable(tmp_path: Path) -> None:
    path = fit(tmp_path / "llama-server")
    path.chmod(0o644)
    with pytest.raises(EngineUnavailable, match="not executable"):
        read_engine(path, "path")


@pytest.mark.parametrize(("name", "says"), [("none", "no such file"), ("folder", "not a file")])
def test_no_file(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(EngineUnavailable, match=says):
        read_engine(tmp_path / name, "path")


def test_a_missing_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "llama-server"
    path.write_text("#!/nonexistent/loader\n")
    path.chmod(0o755)
    with pytest.raises(EngineUnavailable, match="another C library"):
        read_engine(path, "path")


@pytest.mark.parametrize(
    ("link", "runtime"), [(["-fopenmp"], "libgomp"), ([], None), (["-fopenmp", "-static"], "libgomp")]
)
def test_openmp_runtime_of_a_real_binary(tmp_path: Path, link: list[str], runtime: str | None) -> None:
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("needs gcc")
    lines = HELP.replace("\n", "\\n")
    pragma = "#pragma omp parallel\n" if link else ""
    (tmp_path / "a.c").write_text(
        f'#include <stdio.h>\nint main(void) {{ volatile int x = 0;\n{pragma}x = x + 1;\nputs("{lines}"); return 0; }}')
    path = tmp_path / "llama-server"
    built = subprocess.run([gcc, *link, "-o", path, tmp_path / "a.c"], capture_output=True, check=False)
    if built.returncode:
        pytest.skip(f"gcc can't: {link}")
    assert read_engine(path, "path").openmp == runtime
    assert (newest_glibc(path) is None) == ("-static" in link)


def test_openmp_of_a_backend_loaded_later(tmp_path: Path) -> None:
    fit(tmp_path / "llama-server")
    (tmp_path / "libggml-cpu-haswell.so").write_bytes(b"\x7fELF\0libm.so.6\0libomp.so.5\0")
    assert read_engine(tmp_path / "llama-server", "path").openmp == "libomp"


def test_a_pinned_path_wins_over_path(tmp_path: Path) -> None:
    for name in ("pinned", "bin"):
        (tmp_path / name).mkdir()
    fit(tmp_path / "bin" / "llama-server", "version: 1 (a)")
    pinned = fit(tmp_path / "pinned" / "llama-server", "version: 2 (b)")
    environ = {"PATH": str(tmp_path / "bin")}
    found = find_engine(section(path=str(pinned)), tmp_path, environ)
    assert found is not None
    assert (found.version, found.origin) == ("b2", "path")
    found = find_engine(section(), tmp_path, environ)
    assert found is not None
    assert (found.version, found.origin) == ("b1", "PATH")
    pinned.unlink()
    with pytest.raises(EngineUnavailable, match="no such file"):
        find_engine(section(path=str(pinned)), tmp_path, environ)


def test_none_anywhere(tmp_path: Path) -> None:
    assert find_engine(section(), tmp_path, {"PATH": str(tmp_path)}) is None


def test_an_unfit_one_on_path_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    script(tmp_path / "llama-server", "exit 1")
    with pytest.raises(EngineUnavailable):
        find_engine(section(), tmp_path, {"PATH": str(tmp_path)})


ASKED = HELP + "\n--verbosity N   v"


def told(path: Path, features: str) -> Path:
    """Make a llama-server that tells its features as the real one does, and its --host to a file."""
    line = f"0.00.1 I cmn  common_param: system_info: n_threads = 2 / 2 | CPU : {features} | LLAMAFILE = 1 |"
    return script(path, f"""case "$1" in
--help) printf %s "{ASKED}";; --verbosity) echo "{line}"; echo "$*" > {path}.asked; exit 1;; *) echo "version: 7 (a)";;
esac""")


def test_what_it_was_compiled_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_binary, "cpu_features", lambda: "avx avx2 avx512f")
    engine = read_engine(told(tmp_path / "llama-server", "AVX = 1 | AVX2 = 1 | AVX512 = 1 | FMA = 0"), "path")
    assert engine.features == ("AVX", "AVX2", "AVX512")
    asked = (tmp_path / "llama-server.asked").read_text()
    assert not Path(asked.split()[-1]).parent.exists(), "the folder of its socket is gone again"
    again = read_engine(tmp_path / "llama-server", "path", cache=tmp_path / "cache")
    assert read_engine(tmp_path / "llama-server", "path", cache=tmp_path / "cache") == again == engine


def test_one_for_a_newer_cpu_is_refused_before_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_binary, "cpu_features", lambda: "avx avx2")
    path = told(tmp_path / "llama-server", "AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 1")
    with pytest.raises(EngineUnavailable, match="can't be used") as caught:
        read_engine(path, "path")
    assert "a CPU with AVX512, AVX512_VNNI, which this one lacks" in str(caught.value.why)


def test_one_that_dies_of_it_only_when_it_begins(tmp_path: Path) -> None:
    body = f'case "$1" in --help) printf %s "{ASKED}";; --verbosity) kill -ILL $$;; *) echo "version: 7 (a)";; esac'
    with pytest.raises(EngineUnavailable) as caught:
        read_engine(script(tmp_path / "llama-server", body), "path")
    assert "illegal instruction" in str(caught.value.why)
