"""Real time for real: the engine's threads on their steps, and the cause named where it can't be had."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running import LLAMAOPS, QUICKSTART, Up

CPU_CGROUPS = Path("/sys/fs/cgroup/cpu")
BUDGET = CPU_CGROUPS / "cpu.rt_runtime_us"
RR = ("--set", "placement.policy=rr", "--set", "placement.rt_priority=7")

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="real time needs root here"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a CPU must stay free of real time"),
]


def policies(pid: int) -> list[tuple[int, int]]:
    """Return (policy, priority) of every thread, the reset-on-fork flag left out."""
    tasks = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    return sorted((os.sched_getscheduler(task) & ~os.SCHED_RESET_ON_FORK, os.sched_getparam(task).sched_priority)
                  for task in tasks)


def own_cgroup() -> Path:
    """Return this process's v1 cpu cgroup; the hierarchy's top where there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return CPU_CGROUPS / path.lstrip("/")
    return CPU_CGROUPS


@contextlib.contextmanager
def joined(folder: Path) -> Iterator[None]:
    """Be in a cgroup for a while, and start others there."""
    before = own_cgroup()
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))


@pytest.fixture
def without_budget() -> Iterator[Path]:
    """Return a v1 cpu cgroup of our own whose RT budget is 0, as the kernel makes it."""
    if not BUDGET.exists():
        pytest.skip("no cgroup v1 with RT_GROUP_SCHED")
    folder = CPU_CGROUPS / f"llamaops-test-{os.getpid()}"
    folder.mkdir()
    assert (folder / "cpu.rt_runtime_us").read_text() == "0\n"
    yield folder
    folder.rmdir()


def in_cgroup(folder: Path, *args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run llamaops in a cgroup; the shell joins it and then becomes llamaops."""
    script = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
    return subprocess.run(["sh", "-c", script, "sh", *LLAMAOPS, *args], env=env, capture_output=True, text=True,
                          timeout=120)


@pytest.fixture
def with_budget() -> Path | None:
    """Return a cgroup that has an RT budget: our own or the top one; None where the kernel keeps no budgets."""
    if not BUDGET.exists():
        return None
    for folder in (own_cgroup(), CPU_CGROUPS):
        if int((folder / "cpu.rt_runtime_us").read_text()) > 0:
            return folder
    pytest.skip("no cgroup here has a real-time budget")


def test_compute_threads_helpers_and_relay_stand_on_their_steps(up: Up, with_budget: Path | None) -> None:
    with joined(with_budget) if with_budget else contextlib.nullcontext():
        running = up(*RR)
    engine = policies(running.engine().pid)
    assert engine[0] == (os.SCHED_RR, 7)
    assert set(engine[1:]) == {(os.SCHED_RR, 8)}
    # The thread that relays, and nothing of ours that may have long work to do.
    assert (os.SCHED_RR, 8) in policies(running.process.pid)
    assert os.sched_getscheduler(running.process.pid) == os.SCHED_RR | os.SCHED_RESET_ON_FORK
    body = {"prompt": "Once upon a time", "max_tokens": 8}
    assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=120).status_code == 200
    assert [p for p in policies(running.engine().pid) if p == (os.SCHED_RR, 7)] == [(os.SCHED_RR, 7)]
    codes = {note["code"] for note in running.status()["notes"]}
    assert not {code for code in codes if code.startswith(("drift-policy", "drift-rt", "drift-relay", "rt-lift"))}
    assert "rt-refused" not in codes


def test_reload_to_ordinary_scheduling_takes_real_time_back(up: Up, with_budget: Path | None, tmp_path: Path) -> None:
    profile = tmp_path / "quickstart.yaml"
    profile.write_text(QUICKSTART.read_text() + "\nplacement: {policy: rr, rt_priority: 7}\n")
    with joined(with_budget) if with_budget else contextlib.nullcontext():
        running = up(profile=profile)
    assert policies(running.engine().pid)[0] == (os.SCHED_RR, 7)
    profile.write_text(QUICKSTART.read_text() + "\nplacement: {nice: 3}\n")
    reloaded = running.cli("reload")
    assert reloaded.returncode == 0, reloaded.stderr
    status = running.status()
    assert {policy for policy, _ in policies(status["pid"]) + policies(running.process.pid)} == {os.SCHED_OTHER}
    assert os.getpriority(os.PRIO_PROCESS, status["pid"]) == 3
    assert not [note for note in status["notes"] if note["code"].startswith("drift")]


def test_without_a_budget_the_cause_is_named_and_strict_ends_with_77(without_budget: Path, env: dict[str, str],
                                                                     model_path: str) -> None:
    plan = in_cgroup(without_budget, "plan", str(QUICKSTART), *RR, env=env)
    assert plan.returncode == 0, plan.stderr
    assert "rt-refused" in plan.stdout
    assert "RT budget of this cgroup (cpu.rt_runtime_us of " in plan.stdout.replace("\n", " ")
    strict = in_cgroup(without_budget, "up", str(QUICKSTART), *RR, "--set", "placement.strict=true",
                       "--set", "serve.port=0", env=env)
    assert strict.returncode == 77
    assert f"cpu.rt_runtime_us of /{without_budget.name}) is 0" in " ".join(strict.stderr.split())
    assert "placement.strict" in strict.stderr


def test_without_a_budget_it_serves_with_ordinary_scheduling(without_budget: Path, up: Up) -> None:
    with joined(without_budget):
        running = up(*RR)
    try:
        assert {policy for policy, _ in policies(running.engine().pid)} == {os.SCHED_OTHER}
        notes = {note["code"]: note["text"] for note in running.status()["notes"]}
        assert f"cpu.rt_runtime_us of /{without_budget.name}) is 0" in notes["rt-refused"]
    finally:
        running.process.terminate()
        running.process.wait(60)
