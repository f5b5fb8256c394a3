"""Units run by a real systemd: a user manager of its own, in a mount namespace where the machine looks booted by it.

The system unit's sandbox is tried in the same manager, without the lines that only a system manager understands.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from running import LLAMAOPS, QUICKSTART, await_true, descendants, gone

from llamaops.dirs import find_dirs

UNIT = "llamaops-quickstart.service"
# What PID 1 prepares at boot: /run as a mount (units get an empty one otherwise), the mark that systemd runs, and the
# nodes that hidden files are covered with.
BOOTED = """
mount --rbind /run /run && mount -t tmpfs tmpfs /run/systemd && cd /run/systemd && mkdir system inaccessible
cd inaccessible || exit
: > reg && mkdir dir && mkfifo fifo && mknod chr c 0 0 && mknod blk b 0 0 && chmod 000 reg dir fifo chr blk && : > sock
cd / && exec /lib/systemd/systemd --user
"""
SYSTEM_ONLY = r"^(User|DynamicUser|Wants|After|RequiresMountsFor)=.*\n"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/lib/systemd/systemd").exists() or not shutil.which("unshare"),
                       reason="needs root, unshare and systemd"),
]
Systemctl = Callable[..., str]


@pytest.fixture
def systemctl(tmp_path: Path) -> Iterator[Systemctl]:
    """Start a manager and return a function that calls systemctl on it."""
    with tempfile.TemporaryDirectory(prefix="llo-", dir="/run") as runtime:  # not in /tmp: units have one of their own
        env = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": runtime,
               "SYSTEMD_UNIT_PATH": f"{tmp_path}/units:/usr/lib/systemd/user"}
        Path("/run/systemd").mkdir(exist_ok=True)
        manager = subprocess.Popen(["unshare", "--mount", "sh", "-c", BOOTED], env=env, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)

        def call(*args: str, code: int = 0) -> str:
            enter = ["nsenter", "--target", str(manager.pid), "--mount", "--", "systemctl", "--user", "--no-pager"]
            done = subprocess.run([*enter, *args], env=env, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == code, done.stderr
            return done.stdout.strip()

        private = Path(runtime) / "systemd/private"
        try:
            await_true(lambda: private.exists() or manager.poll() is not None, what="systemd answers")
            if manager.poll() is not None:
                pytest.skip("systemd does not start in a namespace here")
            yield call
        finally:
            left = descendants(manager.pid)
            manager.terminate()
            manager.wait(60)
            for process in (process for process in left if process.is_running()):
                process.kill()


def install(tmp_path: Path, *options: str) -> None:
    """Render the quick-start unit where the manager looks, with this test's port and the cache that is filled."""
    folder = tmp_path / "units"
    (folder / f"{UNIT}.d").mkdir(parents=True)
    subprocess.run([*LLAMAOPS, "deploy", "systemd", QUICKSTART, "--set", "serve.port=0", "-o", folder, *options],
                   capture_output=True, timeout=120, check=True)
    unit = folder / UNIT
    unit.write_text(re.sub(SYSTEM_ONLY, "", unit.read_text(), flags=re.MULTILINE))
    cache, home = find_dirs(os.environ).cache, "" if "--user" in options else "ProtectHome=read-only\n"
    (folder / f"{UNIT}.d/test.conf").write_text(
        f'[Service]\n{home}Environment="LLAMAOPS_CACHE={cache}"\nReadWritePaths="{cache}"\n')


def main_process(systemctl: Systemctl) -> psutil.Process:
    return psutil.Process(int(systemctl("show", "--property=MainPID", "--value", UNIT)))


@pytest.mark.parametrize("options", [["--user"], []], ids=["user", "system"])
def test_a_real_systemd_runs_the_unit(
    options: list[str], systemctl: Systemctl, tmp_path: Path, model_path: str
) -> None:
    install(tmp_path, *options)
    systemctl("daemon-reload")
    systemctl("start", UNIT)  # returns at READY=1
    url = systemctl("show", "--property=StatusText", "--value", UNIT).removeprefix("serving at ")
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "One, two,", "max_tokens": 4}, timeout=120)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"]
    systemctl("reload", UNIT)

    service = main_process(systemctl)
    fence = dict(line.split(":\t", 1) for line in Path(f"/proc/{service.pid}/status").read_text().splitlines())
    assert (fence["NoNewPrivs"], fence["Seccomp"]) == ("1", "2")
    if not options:
        assert int(fence["CapEff"], 16) == int(fence["CapBnd"], 16) == 0
        mounts = Path(f"/proc/{service.pid}/mountinfo").read_text()
        assert re.search(r" / / ro[, ]", mounts)

    engine = descendants(service.pid)
    service.kill()
    await_true(lambda: gone(engine), what="the engine is gone with its supervisor")
    await_true(lambda: systemctl("show", "--property=SubState", "--value", UNIT) == "auto-restart",
               what="systemd starts it again later")
    systemctl("restart", UNIT)
    service = main_process(systemctl)
    engine = descendants(service.pid)
    systemctl("stop", UNIT)
    assert gone([service, *engine])
    assert systemctl("show", "--property=Result", "--value", UNIT) == "success"


def test_a_wrong_profile_is_not_tried_again(systemctl: Systemctl, tmp_path: Path, model_path: str) -> None:
    install(tmp_path, "--user")
    unit = tmp_path / "units" / UNIT
    unit.write_text(unit.read_text().replace("serve.port=0", "serve.port=none"))
    systemctl("daemon-reload")
    systemctl("start", UNIT, code=1)
    state = systemctl("show", "--property=ExecMainStatus,SubState,NRestarts", UNIT).split()
    assert sorted(state) == ["ExecMainStatus=78", "NRestarts=0", "SubState=failed"]
