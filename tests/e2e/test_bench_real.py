"""Bench and tune on the real engine and model: short, and nothing stays behind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil
import pytest
from running import LLAMAOPS, QUICKSTART, Up

pytestmark = pytest.mark.engine
SHORT = ["-n", "2", "--max-tokens", "8", "--prompt-tokens", "16"]


def llamaops(*args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*LLAMAOPS, *args], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done


def started_by(env: dict[str, str]) -> set[int]:
    """Return who was started with this environment, by the folder that only this test has."""
    running = psutil.process_iter(["environ"])
    return {p.pid for p in running if (p.info["environ"] or {}).get("BENCH_TEST") == env["BENCH_TEST"]}


def test_a_profile_is_started_measured_and_stopped(env: dict[str, str], model_path: str) -> None:
    env = env | {"BENCH_TEST": env["XDG_STATE_HOME"]}
    run = json.loads(llamaops("bench", str(QUICKSTART), *SHORT, "--json", env=env).stdout)
    figures = run["figures"]
    assert (figures["ok"], figures["output_tokens"], figures["counted"]) == (2, 16, True)
    assert all(r["finish"] == "length" and r["engine"]["predicted_n"] == 8 for r in run["requests"])
    assert run["target"]["plan"]["placement"]["threads"] >= 1 and run["target"]["model"]
    assert run["system"]["target_cpus"] > 0 and run["system"]["rss_peak_bytes"] > 50 << 20
    # Ours counts the way through relay and sockets too; it can't be quicker than the engine itself.
    assert figures["ttft_ms"]["p50"] > figures["engine_prompt_ms"]["p50"] * 0.9
    assert started_by(env) == set()
    assert not list(Path(env["XDG_STATE_HOME"]).rglob("*bench*"))


def test_a_running_instance_is_measured_by_its_url(up: Up) -> None:
    running = up()
    run = json.loads(llamaops("bench", running.url, *SHORT, "-c", "2", "--json", env=running.env).stdout)
    assert run["figures"]["ok"] == 2 and run["system"]["target_cpus"] > 0
    assert psutil.pid_exists(running.process.pid)


def test_a_short_tuning_writes_what_it_found(env: dict[str, str], model_path: str, tmp_path: Path) -> None:
    profile, out = tmp_path / "p.yaml", tmp_path / "best.yaml"
    fixed = "placement: {spin: 1000, nice: 0, threads_batch: 1, threads: 1}\nengine: {args: [-fa, on]}\n"
    profile.write_text(f"model: {{source: 'path:{model_path}', context: 512}}\n{fixed}")
    done = llamaops("tune", str(profile), *SHORT, "--pairs", "4", "--budget", "60s", "--out", str(out),
                    env=env)
    evidence = json.loads(out.with_suffix(".json").read_text())
    assert [race["knob"] for race in evidence["races"]] == ["model.kv_type"]
    assert evidence["runs"] >= 4 and evidence["better"] == out.exists()
    assert ("written" in done.stdout) and "evidence:" in done.stdout
