"""The hub: the real `huggingface_hub` client against a hub on loopback that fails in the known ways."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_hub import FakeHub, serve
from gguf_bytes import gguf
from running import LLAMAOPS, await_true

from llamaops import transfer
from llamaops.acquire import hub as hub_module
from llamaops.acquire.hub import fetch_hub
from llamaops.child import CancelledError
from llamaops.core.progress import NoProgress
from llamaops.core.source import HubSource
from llamaops.errors import LlamaopsError, ModelUnavailable, TryAgain
from llamaops.hub_api import hub_cache

MODEL = gguf() + bytes(range(256)) * 400
SOURCE = HubSource("org/model", quant="Q4_K_M")


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    files = {"m-Q4_K_M.gguf": MODEL, "m-Q8_0.gguf": MODEL + b"8", "README.md": b"hello"}
    with serve(FakeHub(files)) as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transfer, "PAUSE_S", 0.01)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def fetch(hub: FakeHub, tmp_path: Path, source: HubSource = SOURCE, *, offline: bool = False, sha256: str | None = None,
          refresh: bool = False, cancel: threading.Event | None = None) -> Path:  # fmt: skip
    environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
    return fetch_hub(source, tmp_path, NoProgress(), offline=offline, sha256=sha256, environ=environ, refresh=refresh,
                     cancel=cancel)


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "hub").rglob("*.incomplete")]


def test_fetches_checks_and_enters_it_in_the_hubs_own_layout(hub: FakeHub, tmp_path: Path) -> None:
    path = fetch(hub, tmp_path)
    assert path.read_bytes() == MODEL
    root = tmp_path / "hub" / "models--org--model"
    assert path == root / "snapshots" / hub.commit / "m-Q4_K_M.gguf"
    assert (root / "refs" / "main").read_text() == hub.commit
    assert path.resolve() == root / "blobs" / hub.etag("m-Q4_K_M.gguf")
    assert leftovers(tmp_path) == []


def test_a_second_time_asks_nobody(hub: FakeHub, tmp_path: Path) -> None:
    first = fetch(hub, tmp_path)
    hub.requests.clear()
    assert fetch(hub, tmp_path) == first
    assert fetch(hub, tmp_path, offline=True) == first
    assert hub.requests == []


def test_refresh_asks_and_takes_the_new_revision(hub: FakeHub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    hub.files["m-Q4_K_M.gguf"], hub.commit = MODEL + b"new", "d" * 40
    assert fetch(hub, tmp_path).read_bytes() == MODEL
    assert fetch(hub, tmp_path, refresh=True).read_bytes() == MODEL + b"new"


def test_a_cut_is_continued_within_one_run(hub: FakeHub, tmp_path: Path) -> None:
    hub.cuts = [len(MODEL) // 2]
    assert fetch(hub, tmp_path).read_bytes() == MODEL
    first, second = hub.downloads()
    assert second.range == f"bytes={len(MODEL) // 2}-"
    assert first.sent + second.sent == len(MODEL)


def test_a_cut_is_continued_by_the_next_run(hub: FakeHub, tmp_path: Path) -> None:
    half = len(MODEL) // 2
    hub.cuts, hub.statuses = [half], []
    hub.then = [503] * 20
    with pytest.raises(TryAgain, match="broke off"):
        fetch(hub, tmp_path)
    assert not list((tmp_path / "hub").rglob("*.gguf"))
    hub.then.clear()
    hub.requests.clear()
    assert fetch(hub, tmp_path).read_bytes() == MODEL
    assert [(r.range, r.sent) for r in hub.downloads()] == [(f"bytes={half}-", len(MODEL) - half)]


def test_a_download_that_gives_up_says_where_it_continues(hub: FakeHub, tmp_path: Path) -> None:
    hub.cuts = [1500, *[1500] * 20]
    with pytest.raises(TryAgain, match="broke off") as caught:
        fetch(hub, tmp_path)
    assert "continues at" in str(caught.value.fix)


def test_a_server_that_ignores_ranges_starts_again_from_zero(hub: FakeHub, tmp_path: Path) -> None:
    hub.cuts, hub.ignore_range = [50_000], True
    assert fetch(hub, tmp_path).read_bytes() == MODEL


def test_416_drops_what_is_here(hub: FakeHub, tmp_path: Path) -> None:
    hub.cuts, hub.statuses = [50_000], []
    partial = tmp_path / "hub/models--org--model/blobs" / f"{hub.etag('m-Q4_K_M.gguf')}.llamaops.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * 100)
    hub.statuses = [416]
    assert fetch(hub, tmp_path).read_bytes() == MODEL


def test_too_long_a_leftover_is_dropped(hub: FakeHub, tmp_path: Path) -> None:
    partial = tmp_path / "hub/models--org--model/blobs" / f"{hub.etag('m-Q4_K_M.gguf')}.llamaops.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * (len(MODEL) + 5))
    assert fetch(hub, tmp_path).read_bytes() == MODEL


def test_a_file_that_changed_on_the_hub_is_not_continued(hub: FakeHub, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    hub.cuts = [50_000]
    with pytest.raises(CancelledError):
        fetch(hub, tmp_path, cancel=stop)
    hub.files["m-Q4_K_M.gguf"], hub.cuts = MODEL[::-1], []
    hub.requests.clear()
    assert fetch(hub, tmp_path).read_bytes() == MODEL[::-1]
    assert hub.downloads()[0].range is None


def test_a_wrong_checksum_is_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.corrupt = 1
    assert fetch(hub, tmp_path).read_bytes() == MODEL
    assert len(hub.downloads()) == 2


def test_a_wrong_checksum_twice_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.corrupt = 2
    with pytest.raises(ModelUnavailable, match="wrong checksum, twice"):
        fetch(hub, tmp_path)
    assert leftovers(tmp_path) == []
    assert not list((tmp_path / "hub").rglob("*.gguf"))


def test_the_token_is_sent_but_not_to_the_other_host(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.redirect = True
    assert fetch(hub, tmp_path).read_bytes() == MODEL
    first, second = [r for r in hub.requests if r.method == "GET" and "/resolve/" in r.path]
    assert (first.status, first.authorization) == (302, "Bearer hf_secret")
    assert second.authorization is None


def test_the_token_of_the_login_file_is_sent_and_never_shown(hub: FakeHub, tmp_path: Path) -> None:
    secret = "hf_FromTheLoginFile"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/token").write_text(f"{secret}\n")
    env = {**os.environ, "HF_ENDPOINT": hub.url, "LLAMAOPS_CACHE": str(tmp_path / "cache")}
    pull = [*LLAMAOPS, "--debug", "model", "pull", str(SOURCE)]
    done = subprocess.run(pull, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {r.authorization for r in hub.requests if hub.repo in r.path} == {f"Bearer {secret}"}
    hub.api_status, hub.error_code = 403, "GatedRepo"
    more = subprocess.run(pull, env=env, capture_output=True, text=True, check=False)
    assert "Traceback" in more.stderr
    assert f"accept the licence at {hub.url}/org/model" in more.stderr
    assert secret not in done.stdout + done.stderr + more.stdout + more.stderr


@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (401, None, ModelUnavailable, "set HF_TOKEN"),
        (401, "RepoNotFound", ModelUnavailable, "set HF_TOKEN"),
        (401, "GatedRepo", ModelUnavailable, "accept the licence at http"),
        (403, "GatedRepo", ModelUnavailable, "accept the licence at http"),
        (403, None, ModelUnavailable, "too few rights"),
        (404, "RepoNotFound", ModelUnavailable, "there is no repository org/model"),
        (404, "RevisionNotFound", ModelUnavailable, "there is no revision"),
        (429, None, TryAgain, "the hub is busy"),
        (500, None, TryAgain, "it answered 500"),
        (503, None, TryAgain, "it answered 503"),
    ],
)
def test_refusals_of_the_listing_are_told_apart(
    hub: FakeHub, tmp_path: Path, status: int, code: str | None, kind: type[LlamaopsError], says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.api_status, hub.error_code = status, code
    with pytest.raises(kind) as caught:
        fetch(hub, tmp_path)
    assert says in str(caught.value)
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (401, "GatedRepo", ModelUnavailable, "accept the licence"),
        (403, "GatedRepo", ModelUnavailable, "accept the licence"),
        (404, "EntryNotFound", ModelUnavailable, "no such file"),
        (503, None, TryAgain, "broke off"),
    ],
)
def test_refusals_of_the_download_are_told_apart(
    hub: FakeHub, tmp_path: Path, status: int, code: str | None, kind: type[LlamaopsError], says: str
) -> None:
    hub.statuses, hub.error_code = [status] * 20, code
    with pytest.raises(kind, match=says):
        fetch(hub, tmp_path)


def test_trouble_that_passes_is_waited_out(hub: FakeHub, tmp_path: Path) -> None:
    hub.statuses = [503, 429, 500]
    assert fetch(hub, tmp_path).read_bytes() == MODEL


def test_a_busy_hub_is_asked_again_when_it_said(hub: FakeHub, tmp_path: Path) -> None:
    hub.api_statuses, hub.statuses, hub.retry_after = [429, 503], [429], "0"
    assert fetch(hub, tmp_path).read_bytes() == MODEL


@pytest.mark.parametrize("retry_after", ["3600", "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_a_server_that_asks_for_a_long_wait_is_not_asked_again(
    hub: FakeHub, tmp_path: Path, retry_after: str
) -> None:
    hub.statuses, hub.retry_after = [429], retry_after
    with pytest.raises(TryAgain, match=r"(?s)broke off.*answered 429 and asks to come back later") as caught:
        fetch(hub, tmp_path)
    assert retry_after in str(caught.value)
    hub.api_statuses = [429]
    with pytest.raises(TryAgain, match="the hub is busy"):
        fetch(hub, tmp_path)
    assert len(hub.downloads()) == 1


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (HubSource("org/model"), r"several models.*m-Q4_K_M.gguf \(0 MiB\), m-Q8_0.gguf"),
        (HubSource("org/model", quant="Q2_K"), "has no Q2_K"),
        (HubSource("org/model", file="m-Q4_K_X.gguf"), "did you mean hf:org/model:m-Q4_K_M.gguf"),
        (HubSource("org/model", revision="v9"), "no revision v9"),
        (HubSource("org/other"), "no repository org/other"),
        (HubSource("a//b"), "not a repository name"),
    ],
)
def test_what_can_not_be_chosen_is_listed(hub: FakeHub, tmp_path: Path, source: HubSource, says: str) -> None:
    with pytest.raises(ModelUnavailable, match=r"(?s)" + says):
        fetch(hub, tmp_path, source)


CHECKPOINT = {
    "config.json": b'{"architectures": ["X"]}', "tokenizer.json": b"{}", "tokenizer_config.json": b"{}",
    "model.safetensors.index.json": b"{}", "model-00001-of-00002.safetensors": b"1" * 3000,
    "model-00002-of-00002.safetensors": b"2" * 2000, "LICENSE": b"terms",
}
BESIDE = {
    "consolidated.safetensors": b"c", "pytorch_model.bin": b"p", "onnx/model.onnx": b"o", "README.md": b"r",
    "tf_model.h5": b"t", "original/consolidated.00.pth": b"x", ".gitattributes": b"",
}  # fmt: skip


def test_of_a_checkpoint_only_what_converting_needs(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {**CHECKPOINT, **BESIDE}
    source = HubSource("org/model")
    folder = fetch(hub, tmp_path, source)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CHECKPOINT
    asked = len(hub.requests)
    assert fetch(hub, tmp_path, source, offline=True) == folder
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match="not in the cache"):
        fetch(hub, tmp_path, source, offline=True)
    assert len(hub.requests) == asked
    (folder.parents[1] / "blobs" / hub.etag("model-00002-of-00002.safetensors")).unlink()
    assert fetch(hub, tmp_path, source) == folder, "the missing part is fetched, and nothing else"
    assert [Path(r.path).name for r in hub.requests[asked:] if r.method == "GET"][1:] == [
        "model-00002-of-00002.safetensors"
    ]


def test_a_quant_that_would_have_to_be_made_is_asked_for_in_the_profile(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {**CHECKPOINT}
    fetch(hub, tmp_path, HubSource("org/model"))
    for refresh in (False, True):
        with pytest.raises(ModelUnavailable, match=r"(?s)no GGUF as Q4_K_M.*source: hf:org/model, quantize: Q4_K_M"):
            fetch(hub, tmp_path, HubSource("org/model", quant="Q4_K_M"), refresh=refresh)


def test_a_ready_gguf_wins_over_a_checkpoint(hub: FakeHub, tmp_path: Path) -> None:
    hub.files |= CHECKPOINT
    assert fetch(hub, tmp_path).name == "m-Q4_K_M.gguf"
    with pytest.raises(ModelUnavailable, match="several models"):
        fetch(hub, tmp_path, HubSource("org/model"), refresh=True)


def test_a_branch_that_moves_meanwhile_is_fetched_at_the_commit_that_was_listed(hub: FakeHub, tmp_path: Path) -> None:
    hub.moves_to = ("d" * 40, {"m-Q4_K_M.gguf": MODEL + b"new"})
    path = fetch(hub, tmp_path)
    assert path.read_bytes() == MODEL
    assert path.parent.name == "c" * 40
    assert (path.parents[2] / "refs/main").read_text() == "c" * 40
    assert fetch(hub, tmp_path, refresh=True).read_bytes() == MODEL + b"new"


def test_all_parts_of_a_split_model(hub: FakeHub, tmp_path: Path) -> None:
    parts = {f"Q8_0/m-0000{i}-of-00003.gguf": gguf() + bytes([i]) * i for i in (1, 2, 3)}
    hub.files = {**parts, "mmproj-m.gguf": b"no"}
    first = fetch(hub, tmp_path, HubSource("org/model", quant="Q8_0"))
    assert first.name == "m-00001-of-00003.gguf"
    assert sorted(p.name for p in first.parent.iterdir()) == [Path(name).name for name in parts]
    hub.files.pop("Q8_0/m-00002-of-00003.gguf")
    hub.commit = "e" * 40
    with pytest.raises(ModelUnavailable, match=r"part of the split model is missing.*\n.*\n?.*00002"):
        fetch(hub, tmp_path, HubSource("org/model", quant="Q8_0"), refresh=True)


def test_a_pinned_commit(hub: FakeHub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path, HubSource("org/model", hub.commit, quant="Q8_0")).read_bytes() == MODEL + b"8"


def test_sha256_of_the_profile(hub: FakeHub, tmp_path: Path) -> None:
    right = hashlib.sha256(MODEL).hexdigest()
    fetch(hub, tmp_path, sha256=right)
    for _ in range(2):
        with pytest.raises(ModelUnavailable, match="wrong checksum"):
            fetch(hub, tmp_path, sha256="0" * 64)


def test_offline_without_a_copy(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelUnavailable, match=r"(?s)not in the cache.*model pull hf:org/model:Q4_K_M"):
        fetch(hub, tmp_path, offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelUnavailable, match="not in the cache"):
        fetch(hub, tmp_path)
    assert hub.requests == []


def test_no_hub_at_all(tmp_path: Path) -> None:
    with pytest.raises(TryAgain, match="can't reach the hub"):
        fetch(FakeHub(url="http://127.0.0.1:9"), tmp_path)


def test_two_at_once_download_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.hold = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(fetch, hub, tmp_path) for _ in range(2)]
        asked = lambda: sum(r.path.startswith("/api/") for r in hub.requests) == 2  # noqa: E731
        await_true(asked, what="both have asked for the list")
        hub.hold.set()
        assert {future.result().read_bytes() for future in both} == {MODEL}
    assert len(hub.downloads()) == 1


def test_no_room_is_refused_before_the_first_byte(hub: FakeHub, small_disk: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"(?s)not enough room.*MiB are free"):
        fetch(hub, small_disk)
    assert hub.downloads() == []


def test_room_for_converting_is_part_of_it(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {**CHECKPOINT}
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(hub_module, "require_room", lambda _folder, need, what, _error: asked.append((need, what)))
    fetch(hub, tmp_path, HubSource("org/model"))
    assert asked == [(sum(map(len, CHECKPOINT.values())) + 7500, "hf:org/model")]


def test_a_disk_that_fills_up_meanwhile(hub: FakeHub, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["m-Q4_K_M.gguf"] = MODEL * 20
    monkeypatch.setattr(hub_module, "require_room", lambda *_args: None)  # as if the room went while it came
    with pytest.raises(ModelUnavailable, match="disk filled up during the download"):
        fetch(hub, small_disk)
    assert not list(small_disk.rglob("*.gguf"))


def test_ctrl_c_ends_with_130_and_nothing_that_looks_whole(hub: FakeHub, tmp_path: Path) -> None:
    hub.hold = threading.Event()
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "LLAMAOPS_CACHE": str(tmp_path)}
    process = subprocess.Popen([*LLAMAOPS, "model", "pull", str(SOURCE)], env=env, stderr=subprocess.DEVNULL)
    await_true(lambda: any(r.sent for r in hub.downloads()), what="the download has begun")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not list((tmp_path / "hub").rglob("*.gguf"))


def test_the_cache_is_the_hubs_own() -> None:
    ours = Path("/var/cache/llamaops")
    assert hub_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, ours) == Path("/a")
    assert hub_cache({"HF_HOME": "/b"}, ours) == Path("/b/hub")
    assert hub_cache({"HOME": "/nonexistent/home"}, ours) == ours / "hub"
    assert hub_cache({"HOME": "/tmp"}, ours) == Path("/tmp/.cache/huggingface/hub")  # a home that exists
