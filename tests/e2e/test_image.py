"""The image, built step by step from its Dockerfile and run as its compose file says, where no container engine is.

The steps are the shipped ones; what it costs is minutes of compiling, once. Without a build in the cache, and unless
LLAMAOPS_TEST_IMAGE=full asks for it, the engine that the other tests use takes its place in the image.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from chroot_image import TOOLS, Builder, Container, Image, Settings, Unsupported
from running import LLAMAOPS, QUICKSTART, await_true, descendants

from llamaops.deploy.container import BASELINES, ENGINE, UID, best_baseline
from llamaops.dirs import find_dirs
from llamaops.host import probe_host

FULL = os.environ.get("LLAMAOPS_TEST_IMAGE") == "full"
_CAPABILITIES = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
MAY_RAISE_LIMITS = bool(_CAPABILITIES and int(_CAPABILITIES[1], 16) >> 24 & 1)  # CAP_SYS_RESOURCE, which engines have
PROFILE = "/etc/llamaops/quickstart.yaml"
MOUNT = "--mount=type=cache,target=/build"
ASK = """
import json, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}).encode()
url = "http://127.0.0.1:8080/v1/chat/completions"
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=250))["usage"]["completion_tokens"])
"""
READY = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/readyz', timeout=60)"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
                       reason=f"needs root and {', '.join(TOOLS)}"),
]


@dataclass(frozen=True)
class Project:
    """A rendered compose project, its image, and where its engine came from."""

    image: Image
    service: dict[str, Any]
    folder: Path
    own_engine: bool

    def settings(self) -> Settings:
        """Return what compose.yaml says, as far as a chroot can be told."""
        made = self.service
        assert made["read_only"] and made["cap_drop"] == ["ALL"] and made["security_opt"] == ["no-new-privileges:true"]
        files = {config["target"]: str(self.folder / "profile.yaml") for config in made["configs"]}
        files |= {volume["target"]: volume["source"] for volume in made["volumes"]}
        limits = [f"--{name}={value}" for name, value in made.get("ulimits", {}).items()] if MAY_RAISE_LIMITS else []
        return Settings(made["command"], made["user"], files, made["tmpfs"], made["cpuset"], limits)


def level() -> str:
    """Return a CPU level that most machines have: not the one of the machine that builds."""
    host = probe_host()
    return "x86-64-v3" if BASELINES["x86-64-v3"].needs <= host.isa else best_baseline(host)


@pytest.fixture(scope="module")
def project(model_path: str, engine_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("compose")
    subprocess.run([*LLAMAOPS, "deploy", "compose", QUICKSTART, "--cpu", level(), "-o", folder], check=True,
                   capture_output=True, timeout=120)
    service = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["llamaops"]
    kept = find_dirs(os.environ).cache / "tests/image"
    kept.mkdir(parents=True, exist_ok=True)
    own: list[bool] = []

    def engine_at_hand(builder: Builder, script: str) -> str:
        if "llamaops engine build" not in script:
            return script
        own.append(FULL or there(builder, script.replace("engine build", "engine locate")))
        return script if own[-1] else borrowed(kept, Path(engine_path).parent)

    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        work = kept / "work"  # not below /tmp, which may be of a kind that holds no overlays
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            build = service["build"]
            builder = Builder(kept, work, Path(build["context"]), (folder / "Dockerfile.dockerignore").read_text(),
                              engine_at_hand)
            try:
                image = builder.build((folder / build["dockerfile"]).read_text())
            except Unsupported as exc:
                pytest.skip(f"no image can be made here: {exc}")
            yield Project(image, service, folder, own == [True])
        finally:
            shutil.rmtree(work, ignore_errors=True)


def there(builder: Builder, script: str) -> bool:
    try:
        builder.run(script)
    except AssertionError:
        return False
    return True


def borrowed(kept: Path, engines: Path) -> str:
    """Return a step that takes the engine of this machine, laid where the step's cache is."""
    lent = kept / "mount-build/lent"
    lent.mkdir(parents=True, exist_ok=True)
    for name in ("llama-server", "llama-quantize", "llama-imatrix"):
        shutil.copy(engines / name, lent)
    return f"{MOUNT} install -s -m 0755 /build/lent/* /opt/llamaops/bin/"


Run = Callable[..., Container]


@pytest.fixture
def run(project: Project, tmp_path: Path) -> Iterator[Run]:
    """Return a function that runs the image and waits until it serves."""
    running: list[Container] = []

    def start(**options: Any) -> Container:
        started = Container(project.image, project.settings(), tmp_path / "container.log", **options)
        running.append(started)

        def ready() -> bool:
            assert started.alive(), started.said
            return "http://" in started.said and started.exec("python", "-c", READY).returncode == 0

        await_true(ready, within=300, what="the container serves", every=0.2)
        return started

    yield start
    for container in running:
        container.remove()


def ask(container: Container) -> str:
    done = container.exec("python", "-c", ASK, timeout=300)
    return done.stdout.strip() or done.stderr + container.said


def test_the_image_serves_as_nobody_from_a_read_only_root(project: Project, run: Run) -> None:
    container = run()
    assert ask(container) == "8"
    assert container.exec("cat", "/proc/1/comm").stdout == "tini\n"
    status = dict(line.split(":\t", 1) for line in container.exec("cat", "/proc/1/status").stdout.splitlines())
    assert status["Uid"].split() == [str(UID)] * 4 and status["NoNewPrivs"] == "1"
    assert [int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")] == [0] * 4
    for path in ("/", "/opt/llamaops", "/etc/llamaops", "/var/cache/llamaops", "/models"):
        assert "Read-only file system" in container.exec("touch", f"{path}/x").stderr, path

    engine = json.loads(container.exec("llamaops", "engine", "info", ENGINE, "--json").stdout)
    assert engine["version"] == "b11434" and engine["openmp"] == "libgomp"
    assert ENGINE in [process.cmdline()[0] for process in descendants(container.pid)]
    shown = json.loads(container.exec("llamaops", "status", "quickstart", "--json").stdout)
    assert shown["state"] == "ready", shown


def test_the_health_check_tells_a_frozen_one_from_a_living_one(run: Run) -> None:
    container = run()
    assert container.healthy()
    supervisor = [process for process in descendants(container.pid) if PROFILE in process.cmdline()]
    for process in supervisor:
        process.suspend()
    assert not container.healthy()
    for process in supervisor:
        process.resume()
    await_true(container.healthy, within=60, what="it is healthy again")


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
def test_the_engine_asks_no_more_of_a_cpu_than_the_level(project: Project) -> None:
    if not project.own_engine or level() != "x86-64-v3":
        pytest.skip("the engine of this machine is in the image, or the level has no registers of its own")
    (engine,) = (layer / ENGINE.lstrip("/") for layer in project.image.layers if (layer / ENGINE.lstrip("/")).exists())
    with subprocess.Popen(["objdump", "--disassemble", engine], stdout=subprocess.PIPE, text=True) as listing:
        assert listing.stdout
        used = {register for line in listing.stdout for register in re.findall(r"%([yz]mm)", line)}
    assert used == {"ymm"}, "AVX2 and no AVX-512"


@pytest.mark.parametrize("entrypoint", [None, ["llamaops"]], ids=["tini", "llamaops"])
def test_pid_1_stops_all_and_drains(entrypoint: list[str] | None, project: Project, run: Run) -> None:
    container = run(entrypoint=entrypoint)
    seconds = int(re.sub(r"\D", "", project.service["stop_grace_period"]))
    assert container.stop(within=seconds) in (0, 143), container.said
    assert "Traceback" not in container.said
