"""A model by URL and checksum, from a server on loopback that fails in the known ways."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_hub import FakeHub, serve
from gguf_bytes import gguf
from running import await_true

from llamaops import transfer
from llamaops.acquire import url as url_module
from llamaops.acquire.url import fetch_url
from llamaops.cli import run
from llamaops.core.progress import NoProgress
from llamaops.core.source import UrlSource
from llamaops.errors import LlamaopsError, ModelUnavailable, TryAgain

MODEL = gguf() + bytes(range(256)) * 400
SHA256 = hashlib.sha256(MODEL).hexdigest()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(transfer, "PAUSE_S", 0.01)
    with serve(FakeHub({"m-Q4_K_M.gguf": MODEL})) as running:
        yield running


def url(server: FakeHub, name: str = "m-Q4_K_M.gguf") -> UrlSource:
    return UrlSource(f"{server.url}/org/model/resolve/main/{name}?signature=secret")


def fetch(server: FakeHub, cache: Path, sha256: str | None = SHA256, *, offline: bool = False) -> Path:
    return fetch_url(url(server), cache, NoProgress(), offline=offline, sha256=sha256)


def test_fetched_once_and_then_found_by_its_checksum(server: FakeHub, tmp_path: Path) -> None:
    path = fetch(server, tmp_path)
    assert (path.name, path.read_bytes()) == ("m-Q4_K_M.gguf", MODEL)
    asked = len(server.requests)
    assert fetch(server, tmp_path, SHA256.upper(), offline=True) == path
    other = UrlSource("https://example.org/x.gguf")
    assert fetch_url(other, tmp_path, NoProgress(), offline=False, sha256=SHA256) == path
    assert len(server.requests) == asked


def test_a_file_that_was_changed_here_is_fetched_again(server: FakeHub, tmp_path: Path) -> None:
    fetch(server, tmp_path).write_bytes(b"damaged")
    assert fetch(server, tmp_path).read_bytes() == MODEL


def test_a_cut_at_half_is_continued_by_the_next_run(server: FakeHub, tmp_path: Path) -> None:
    half = len(MODEL) // 2
    server.cuts, server.then = [len(MODEL), half], [503] * 20  # the first request only asks for the size
    with pytest.raises(TryAgain, match="broke off"):
        fetch(server, tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))
    server.then.clear()
    server.requests.clear()
    assert fetch(server, tmp_path).read_bytes() == MODEL
    assert server.downloads()[-1].range == f"bytes={half}-"


def test_a_server_without_ranges(server: FakeHub, tmp_path: Path) -> None:
    server.ignore_range = True
    assert fetch(server, tmp_path).read_bytes() == MODEL


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (401, ModelUnavailable, "wants a login"),
        (403, ModelUnavailable, "not for everybody"),
        (404, ModelUnavailable, "no such file"),
        (503, TryAgain, "answered 503"),
    ],
)
def test_refusals(server: FakeHub, tmp_path: Path, status: int, kind: type[LlamaopsError], says: str) -> None:
    server.statuses = [status] * 20
    with pytest.raises(kind) as caught:
        fetch(server, tmp_path)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_is_wrong_is_not_kept(server: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="wrong checksum, twice"):
        fetch(server, tmp_path, "0" * 64)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]


def test_without_a_checksum_nothing_is_asked(server: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"(?s)needs its checksum.*--sha256"):
        fetch(server, tmp_path, None)
    with pytest.raises(ModelUnavailable, match="not in the cache"):
        fetch(server, tmp_path, offline=True)
    assert server.requests == []


def test_no_room(server: FakeHub, small_disk: Path) -> None:
    with pytest.raises(ModelUnavailable, match="not enough room"):
        fetch(server, small_disk)
    assert sum(request.sent for request in server.requests) <= 1


def test_a_disk_that_fills_up_meanwhile(
    server: FakeHub, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["m-Q4_K_M.gguf"] = MODEL * 20
    monkeypatch.setattr(url_module, "require_room", lambda *_args: None)  # as if the room went while it came
    with pytest.raises(ModelUnavailable, match="disk filled up during the download"):
        fetch(server, small_disk)
    assert not list(small_disk.rglob("*.gguf"))


def test_two_at_once_download_once(server: FakeHub, tmp_path: Path) -> None:
    server.hold = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(fetch, server, tmp_path) for _ in range(2)]
        await_true(lambda: any(r.sent > 1 for r in server.downloads()), what="one of them downloads")
        server.hold.set()
        assert {future.result().read_bytes() for future in both} == {MODEL}
    assert sum(r.sent for r in server.downloads()) == 1 + len(MODEL), "one asked for the size, and for the file"


def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PAUSE_S", 0.0)
    with pytest.raises(TryAgain, match="can't fetch the model file"):
        fetch(FakeHub(url="http://127.0.0.1:9"), tmp_path)


def test_a_part_is_read_as_asked_whatever_the_server_knows(server: FakeHub) -> None:
    for ignoring in (False, True):
        server.ignore_range = ignoring
        assert transfer.read_part(url(server).url, {}, 10, 50) == (MODEL[10:50], len(MODEL))
    server.ignore_range = False
    assert transfer.read_part(url(server).url, {}, len(MODEL) - 5, len(MODEL) + 5) == (MODEL[-5:], len(MODEL))
    with pytest.raises(transfer.RefusedError):
        transfer.read_part(url(server, "other").url, {}, 0, 5)


def test_cancelled_while_waiting(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.statuses, server.retry_after = [503], "50"
    stop = threading.Event()
    stop.set()
    with pytest.raises(transfer.CancelledError):
        transfer.read_part(url(server).url, {}, 0, 5, stop)


def test_pull_by_url(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                     capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("LLAMAOPS_CACHE", str(tmp_path))
    assert run(["model", "pull", url(server).url]) == 69
    assert "--sha256" in capsys.readouterr().err
    assert run(["model", "pull", url(server).url, "--sha256", SHA256]) == 0
    assert Path(capsys.readouterr().out.strip()).read_bytes() == MODEL
    profile = tmp_path / "p.yaml"
    profile.write_text(f"model: {{source: '{url(server).url}', sha256: {SHA256}}}\n")
    assert run(["plan", "--json", str(profile)]) == 0
    assert "signature=secret" not in capsys.readouterr().out
