"""Noise works while it is made and leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from running import await_true, gone

from llamaops.bench import noise as noise_module
from llamaops.bench.noise import Noise, making_noise
from llamaops.errors import NotPermitted


@pytest.mark.parametrize(("text", "noise"), [
    ("none", Noise()), ("cpu:2", Noise(cpu=2)), ("cpu:2:50%,mem:1,io:3", Noise(2, 50, 1, 3)), ("io:1", Noise(io=1)),
])
def test_specs_are_read(text: str, noise: Noise) -> None:
    assert Noise.parse(text) == noise
    assert str(noise) == text


@pytest.mark.parametrize("text", ["cpu", "cpu:x", "gpu:1", "cpu:1,cpu:2", "mem:1:50%", "cpu:1:0%", "cpu:1:101%"])
def test_other_specs_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="noise"):
        Noise.parse(text)


def below_us() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.fixture(params=["stress-ng", "built-in"])
def generator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "built-in":
        which = shutil.which
        monkeypatch.setattr(noise_module.shutil, "which", lambda name: None if name == "stress-ng" else which(name))
    elif shutil.which("stress-ng") is None:
        pytest.skip("stress-ng is not installed")
    return str(request.param)


@pytest.mark.parametrize("where", ["session", "same"])
def test_workers_work_and_are_gone_afterwards(generator: str, where: str) -> None:
    with making_noise(Noise(cpu=1, load=30, mem=1, io=1), where):  # type: ignore[arg-type]  # the literals
        workers = below_us()
        sessions = {os.getsid(p.pid) for p in workers}
        assert len(workers) >= 4
        assert (os.getsid(0) in sessions) == (where == "same")
        assert os.getpgid(0) not in {os.getpgid(p.pid) for p in workers}
    assert gone(workers)


def test_the_load_is_about_what_was_asked_for(generator: str) -> None:
    with making_noise(Noise(cpu=1, load=25)):
        workers = below_us()

        def share() -> float:
            """Return how much of a CPU the workers used in a second; on a busy machine they get less now and then."""
            before, began = [sum(p.cpu_times()[:2]) for p in workers], time.monotonic()
            await_true(lambda: time.monotonic() > began + 1, what="a second passes")
            used = sum(sum(p.cpu_times()[:2]) for p in workers) - sum(before)
            return used / (time.monotonic() - began)

        await_true(lambda: 0.1 < share() < 0.6, what="about a quarter of a CPU is used")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_bench_leaves_no_noise(number: int, tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import signal, sys
        from llamaops.bench.noise import Noise, making_noise
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with making_noise(Noise(cpu=2)):
            print("on", flush=True)
            signal.pause()
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               env=os.environ | {"TMPDIR": str(tmp_path)})
    assert process.stdout is not None and process.stdout.readline() == b"on\n"
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.wait(60)
    process.stdout.close()
    assert len(workers) >= 3
    await_true(lambda: gone(workers), what="the noise is gone")
    assert not list(tmp_path.iterdir())


def test_a_cgroup_of_its_own() -> None:
    try:
        with making_noise(Noise(cpu=1), "cgroup"):
            groups = {Path(f"/proc/{p.pid}/cgroup").read_text() for p in below_us()}
            assert len(groups) == 1 and "llamaops-noise" in groups.pop()
            folders = [p for p in Path("/sys/fs/cgroup").glob("**/llamaops-noise-*") if p.is_dir()]
            assert folders
    except NotPermitted as exc:
        pytest.skip(f"no cgroup can be made here: {exc.why}")
    assert not any(folder.exists() for folder in folders)
