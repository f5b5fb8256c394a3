"""``llamaops engine pull|list|rm``: released engines beside built ones."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serve

from llamaops.cli import run

HELP = "-m,    --model FNAME   m\\n-c,    --ctx-size N   c\\n--port PORT   p"
FIT = f'#!/bin/sh\ncase "$1" in --help) printf %b "{HELP}";; *) echo "version: 5000 (abc)";; esac\n'
OLD_GLIBC = "#!/bin/sh\necho \"libc.so.6: version \\`GLIBC_2.99' not found (required by x)\" >&2; exit 1\n"


def archive(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text), 0o755
            tar.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("llamaops.transfer.PAUSE_S", 0.01)
    monkeypatch.setenv("LLAMAOPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with serve(FakeHub()) as running:
        yield running


def pull(server: FakeHub, data: bytes, sha256: str | None = None) -> int:
    server.files = {"r.tar.gz": data}
    url = f"{server.url}/org/model/resolve/main/r.tar.gz?sig=secret"
    return run(["engine", "pull", url, "--sha256", sha256 or hashlib.sha256(data).hexdigest()])


@pytest.mark.parametrize("folder", ["build/bin", "llama-b5000"])
def test_pulled_once_listed_and_removed(
    server: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    data = archive({f"{folder}/llama-server": FIT, f"{folder}/libggml.so": "x", f"{folder}/llama-bench": FIT})
    assert pull(server, data) == 0
    path = Path(capsys.readouterr().out.strip())
    assert sorted(p.name for p in path.parent.iterdir()) == ["libggml.so", "llama-bench", "llama-server"]
    asked = len(server.requests)
    assert pull(server, data) == 0
    assert len(server.requests) == asked
    assert run(["engine", "list", "--json"]) == 0
    out = capsys.readouterr().out
    (row,) = json.loads(out[out.index("["):])
    assert (row["version"], row["fits"], row["from"].endswith("r.tar.gz?…")) == ("b5000", False, True)
    assert run(["engine", "list"]) == 0
    assert f"  {row['name']}  b5000" in capsys.readouterr().out
    assert run(["engine", "info", str(path)]) == 0
    assert run(["engine", "rm", row["name"]]) == 0
    assert not path.exists()
    assert run(["engine", "rm", row["name"]]) == 69
    assert not list((tmp_path / "cache/engines").glob(".building-*"))


@pytest.mark.parametrize(("files", "says"), [
    ({"bin/llama-server": OLD_GLIBC}, "it needs GLIBC_2.99, newer than what this system has"),
    ({"bin/llama-server": "#!/bin/sh\nkill -ILL $$\n"}, "illegal instruction"),
    ({"bin/llama-server": "#!/bin/sh\nexit 0\n"}, "not that of llama-server"),
    ({"bin/llama-cli": FIT}, "it holds no llama-server"),
    ({"a/bin/llama-server": FIT, "a/old/llama-server": FIT}, "it holds 2 llama-server"),
])
def test_one_that_can_not_run_here_is_refused_with_its_reason(
    server: FakeHub, capsys: pytest.CaptureFixture[str], files: dict[str, str], says: str
) -> None:
    assert pull(server, archive(files)) == 69
    assert says in capsys.readouterr().err
    assert run(["engine", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(("data", "sha256", "says"), [
    (b"no archive", None, "can't be unpacked"), (archive({"bin/llama-server": FIT}), "0" * 64, "wrong checksum, twice"),
])
def test_what_is_no_release(server: FakeHub, capsys: pytest.CaptureFixture[str], data: bytes, sha256: str | None,
                            says: str) -> None:  # fmt: skip
    assert pull(server, data, sha256) == 69
    err = capsys.readouterr().err
    assert says in err
    assert "secret" not in err


def test_a_cut_is_continued(server: FakeHub) -> None:
    data = archive({"bin/llama-server": FIT})
    server.cuts = [len(data), len(data) // 2]
    assert pull(server, data) == 0
    assert server.downloads()[-1].range == f"bytes={len(data) // 2}-"


def test_usage(server: FakeHub) -> None:
    assert run(["engine", "pull", "hf:a/b", "--sha256", "0" * 64]) == 2
    assert run(["engine", "pull", "https://h/x.tar.gz", "--sha256", "12"]) == 2
    assert run(["engine", "pull", "nonsense", "--sha256", "0" * 64]) == 2


def test_what_runs_is_not_removed(server: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull(server, archive({"bin/llama-server": FIT})) == 0
    path = capsys.readouterr().out.strip()
    argv = [sys.executable, "-c", "print('up', flush=True); input()", path]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        assert run(["engine", "rm", path]) == 75
        assert f"process {process.pid}" in capsys.readouterr().err
        process.communicate(b"\n")
    assert run(["engine", "rm", path]) == 0
