"""``llamaops model list|verify|rm|prune`` on real caches, the hub's read back by the hub's own library."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, serve
from gguf_bytes import gguf
from huggingface_hub import scan_cache_dir
from running import await_true

from llamaops.acquire import stock
from llamaops.acquire.hub import fetch_hub
from llamaops.acquire.url import fetch_url
from llamaops.cache import mark_used, stamp, write_json
from llamaops.cli import run
from llamaops.core.progress import NoProgress
from llamaops.core.source import HubSource, UrlSource
from llamaops.dirs import find_dirs
from llamaops.serve.control_server import serve_control
from llamaops.serve.instance import hold

A, B = gguf() + b"a" * 1000, gguf() + b"b" * 3000
COMMIT = "c" * 40


class Caches:
    """Both caches of a test, and a hub to fill them from."""

    def __init__(self, root: Path, hub: FakeHub) -> None:
        self.own, self.hub, self.server = root / "cache", root / "hub", hub

    def fetch(self, quant: str, **options: Any) -> Path:
        environ = {"HF_ENDPOINT": self.server.url, "HF_HUB_CACHE": str(self.hub)}
        return fetch_hub(HubSource("org/model", quant=quant), self.own, NoProgress(), offline=False, sha256=None,
                         environ=environ, **options)  # fmt: skip

    def fetch_url(self) -> Path:
        source = UrlSource(f"{self.server.url}/org/model/resolve/main/m-Q4_K_M.gguf")
        return fetch_url(source, self.own, NoProgress(), offline=False, sha256=hashlib.sha256(A).hexdigest())

    def wheel(self) -> Path:
        path = self.own / "models/wheel/pkg-a-1.0/x.gguf"
        path.parent.mkdir(parents=True)
        path.write_bytes(B)
        digest = hashlib.sha256(B).hexdigest()
        write_json(path.with_name("wheel.json"), {"files": {"p/x.gguf": stamp(path, digest)}, "only": "p/x.gguf"})
        return path

    def made(self, source: Path, name: str = "x-Q4_0-1.gguf") -> Path:
        path = self.own / "models/quantized" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(A)
        write_json(path.with_suffix(".json"), {"source_path": str(source), "size_bytes": len(A)})
        return path

    def sound(self) -> bool:
        """Tell whether the hub's own library reads its cache without a complaint."""
        return not self.hub.exists() or not scan_cache_dir(self.hub).warnings


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Caches]:
    monkeypatch.setenv("LLAMAOPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with serve(FakeHub({"m-Q4_K_M.gguf": A, "m-Q8_0.gguf": B})) as hub:
        yield Caches(tmp_path, hub)


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert run(["model", "list", "--json"]) == 0
    return {item["name"]: item for item in json.loads(capsys.readouterr().out)}


def test_everything_is_listed_with_what_was_made_of_it(caches: Caches, capsys: pytest.CaptureFixture[str]) -> None:
    hub, url, wheel = caches.fetch("Q8_0"), caches.fetch_url(), caches.wheel()
    made = caches.made(wheel)
    items = listed(capsys)
    assert {item["path"]: item["size_bytes"] for item in items.values()} == {
        str(hub): len(B), str(made): len(A), str(url): url.stat().st_size + (url.parent / "url.json").stat().st_size,
        str(wheel): wheel.stat().st_size + wheel.with_name("wheel.json").stat().st_size,
    }
    assert items["hf:org/model:m-Q8_0.gguf"]["ours"] is True
    assert items[made.name]["made_from"] == str(wheel)
    assert run(["model", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index(next(x for x in lines if x.endswith(" wheel:pkg-a==1.0"))) + 1].endswith(f"  {made.name}")


def test_use_is_noted_and_looking_is_no_use(caches: Caches, capsys: pytest.CaptureFixture[str]) -> None:
    path = caches.wheel()
    os.utime(path, (1e9, 1e9))
    os.utime(path.with_name("wheel.json"), (1e9, 1e9))
    assert run(["model", "verify"]) == 0
    assert listed(capsys)["wheel:pkg-a==1.0"]["used"] == 1e9
    mark_used(path)
    assert listed(capsys)["wheel:pkg-a==1.0"]["used"] > 1.6e9
    assert path.stat().st_mtime == 1e9
    mark_used(path / "nothing")


def test_verify_finds_what_was_changed(caches: Caches, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [caches.fetch("Q8_0"), caches.fetch_url(), caches.wheel()]
    made = caches.made(paths[2])
    assert run(["model", "verify"]) == 0
    assert capsys.readouterr().out.count("ok ") == 4
    for path in paths:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + b"!")
        assert run(["model", "verify", "--json"]) == 69
        out, err = capsys.readouterr()
        assert [v["path"] for v in json.loads(out) if v["damage"]] == [str(path)]
        assert "llamaops model rm" in err
        path.write_bytes(whole)
    made.write_bytes(A[:100])
    assert run(["model", "verify", made.name]) == 69
    assert "not a whole GGUF" in capsys.readouterr().err


def test_of_the_hub_only_what_nothing_else_refers_to_goes(caches: Caches, capsys: pytest.CaptureFixture[str]) -> None:
    old = caches.fetch("Q4_K_M")
    caches.fetch("Q8_0")
    caches.server.push("d" * 40, {"m-Q4_K_M.gguf": A, "m-Q8_0.gguf": B + b"new"})
    new = caches.fetch("Q4_K_M", refresh=True)
    assert run(["model", "rm", str(old)]) == 0
    assert new.read_bytes() == A, "the newer revision has the same blob"
    assert caches.sound()
    assert run(["model", "rm", str(new)]) == 0
    assert not new.parent.exists()
    assert not list((caches.hub / "models--org--model/refs").iterdir()), "main named the commit that is gone"
    assert sorted(listed(capsys)) == ["hf:org/model:m-Q8_0.gguf"]
    assert caches.sound()
    assert run(["model", "rm", "hf:org/model"]) == 0
    assert not (caches.hub / "models--org--model").exists()
    assert caches.sound()
    assert caches.fetch("Q4_K_M").read_bytes() == A


def test_a_source_is_only_removed_with_what_was_made_of_it(caches: Caches, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = caches.wheel()
    made = caches.made(wheel)
    assert run(["model", "rm", "wheel:pkg-a==1.0"]) == 2
    assert f"{made.name} was made of it" in capsys.readouterr().err
    assert run(["model", "rm", "--with-dependants", "wheel:pkg-a==1.0"]) == 0
    assert listed(capsys) == {}
    assert not list((caches.own / "models").rglob("*.*"))
    assert run(["model", "rm", "x.gguf"]) == 69


def test_what_a_process_serves_is_not_removed(
    caches: Caches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, program = caches.fetch_url(), tmp_path / "llama-server"
    program.write_text("import sys\nprint('up', flush=True)\nsys.stdin.read()\n")
    argv = [sys.executable, str(program), "-m", os.path.relpath(path, tmp_path)]
    with subprocess.Popen(argv, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        assert run(["model", "rm", str(path)]) == 75
        assert f"process {process.pid}" in capsys.readouterr().err
        assert run(["model", "prune", "--max-size", "16MiB"]) == 0
        assert run(["model", "prune", "--max-size", "0"]) == 0
        assert path.exists()
        process.communicate()
    assert run(["model", "rm", str(path)]) == 0
    assert not path.parent.exists()


@contextmanager
def instance(document: Mapping[str, Any]) -> Iterator[None]:
    """Be an instance between two engines: it holds its name and answers, and no llama-server runs."""

    async def plan(_request: Mapping[str, Any]) -> Any:
        return document

    loop = asyncio.new_event_loop()
    with hold(find_dirs(os.environ).runtime, "waiting") as held:
        server = loop.run_until_complete(serve_control(held.control_socket, {"plan": plan}))
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(server.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def test_what_an_instance_will_serve_again_is_not_removed(caches: Caches, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = caches.wheel()
    made = caches.made(wheel)
    with instance({"launch": {"argv": ["llama-server", "-m", str(made)]}, "model": {"path": str(made)}}):
        assert run(["model", "rm", made.name]) == 75
        assert "instance waiting" in capsys.readouterr().err
        assert run(["model", "prune", "--max-size", "0"]) == 0
        assert made.exists()
        assert wheel.exists(), "the next start looks for its source first"
    assert run(["model", "prune", "--max-size", "0"]) == 0
    assert not wheel.exists()


def test_prune_takes_leftovers_and_leaves_what_others_fetched(
    caches: Caches, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = caches.fetch("Q8_0")
    (caches.hub / ".locks/models--org--model" / f"{theirs.resolve().name}.llamaops.lock").unlink()
    fresh, stale = (theirs.resolve().with_name(f"{digit * 64}.llamaops.incomplete") for digit in "12")
    for path in (fresh, stale):
        path.write_bytes(b"x" * 100)
    os.utime(stale, (1e9, 1e9))
    assert run(["model", "prune", "--dry-run"]) == 0
    assert "incomplete:" in capsys.readouterr().out
    assert stale.exists()
    assert run(["model", "prune", "--max-size", "1GiB"]) == 0
    assert (stale.exists(), fresh.exists()) == (False, True)
    assert run(["model", "list"]) == 0
    assert "m-Q8_0.gguf ~" in capsys.readouterr().out
    assert run(["model", "prune", "--max-size", "0"]) == 0
    assert theirs.exists()
    assert run(["model", "prune", "--max-size", "much"]) == 2


def test_a_download_under_way_is_no_leftover(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "ABANDONED_S", -1)
    caches.server.hold = threading.Event()
    worker = threading.Thread(target=caches.fetch, args=("Q8_0",))
    worker.start()
    await_true(lambda: list(caches.hub.rglob("*.llamaops.incomplete")), what="the download has begun")
    assert run(["model", "prune"]) == 0
    assert list(caches.hub.rglob("*.llamaops.incomplete"))
    caches.server.hold.set()
    worker.join()
    assert caches.fetch("Q8_0").read_bytes() == B
