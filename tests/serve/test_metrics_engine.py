"""The engine's side of /metrics: read from a made machine, scraped from a scripted engine, and always there."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from relay_rig import EngineRequest, Rig, chunk, json_answer, rig, run, until

from llamaops.core.causes import Cause
from llamaops.core.cpuset import CpuSet
from llamaops.core.engine_life import State, Status
from llamaops.core.explain import Stream, explain
from llamaops.serve.engine_metrics import EngineMetrics, Facts, Restarts
from llamaops.serve.readings import read
from llamaops.serve.sampler import Place, Sampler, counters, picture

PLACE = Place(CpuSet([3]), CpuSet([2]), slots=2, itl_slo_s=0.12)
ENGINE_PAGE = b"""# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 91
llamacpp:tokens_predicted_total 2.5e+03
llamacpp:n_tokens_max 77
# TYPE llamacpp:predicted_tokens_seconds gauge
llamacpp:predicted_tokens_seconds 51.2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 4
"""
METRICS_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(ENGINE_PAGE)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DECODING = Stream("req_a", None, "/v1/completions", "decode", 5, 0.01, events=100, ttft_s=0.1, prefill_s=0.1)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def stat(name: str, cpu: int, ticks: int, faults: int = 0, policy: int = 0) -> str:
    field = ["0"] * 50
    field[0], field[9], field[11], field[36], field[38] = "R", str(faults), str(ticks), str(cpu), str(policy)
    return f"77 ({name}) {' '.join(field)}"


def machine(root: Path, *, ran_s: float = 0.0, waited_s: float = 0.0, busy_s: float = 0.0, hog_s: float = 0.0,
            throttles: int = 0, stopped_s: float = 2.5) -> None:
    """Write the files of a machine whose engine, pid 77, has one thread on CPU 3; pid 812 is a hog there."""
    ticks, thread = round(busy_s * 100), "proc/77/task/77"
    write(root, {
        "proc/stat": f"cpu 1 1 1\ncpu2 5 0 0 900 0 0 0 0\ncpu3 {ticks} 0 0 100 0 0 0 7 0 0\nintr 5\n",
        "proc/77/stat": stat("llama) server", 3, round(ran_s * 100), faults=12), "proc/77/statm": "900 300 5 1 0 9 0\n",
        f"{thread}/stat": stat("llama) server", 3, round(ran_s * 100), policy=2),
        f"{thread}/schedstat": f"{round(ran_s * 1e9)} {round(waited_s * 1e9)} 40\n",
        f"{thread}/sched": "x (77)\n----\nse.nr_migrations : 4\nnr_switches : 9\nnr_voluntary_switches : 30\n"
                           "nr_involuntary_switches : 12\n",
        "proc/812/stat": stat("stress-ng", 3, round(hog_s * 100)),
        "proc/self/cgroup": "3:cpu,cpuacct:/a/b\n0::/u\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.stat": f"nr_periods 9\nthrottled_time {round(stopped_s * 1e9)}\n",
        "sys/fs/cgroup/u/memory.max": "1000000\n", "sys/fs/cgroup/u/memory.current": "900000\n",
        "sys/fs/cgroup/u/memory.stat": "inactive_file 50000\n", "sys/fs/cgroup/memory.max": "max\n",
        "proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   2000 kB\n",
        "proc/pressure/cpu": "some avg10=12.50 avg60=1.00 avg300=0.00 total=9\n",
        "sys/devices/system/cpu/cpu3/cpufreq/scaling_cur_freq": "1800000\n",
        "sys/devices/system/cpu/cpu3/cpufreq/cpuinfo_max_freq": "3600000\n",
        "sys/devices/system/cpu/cpu3/thermal_throttle/core_throttle_count": f"{throttles}\n",
        "sys/devices/system/cpu/cpu3/thermal_throttle/package_throttle_count": "2\n",
        "sys/class/thermal/thermal_zone0/type": "battery\n", "sys/class/thermal/thermal_zone0/temp": "99000\n",
        "sys/class/thermal/thermal_zone1/type": "x86_pkg_temp\n", "sys/class/thermal/thermal_zone1/temp": "71500\n",
    })


class Relayed:
    """The relay's side, given."""

    def __init__(self, *streams: Stream) -> None:
        self.given = list(streams)
        self.counts = [0, 0, 0]

    def streams(self, now: float) -> list[Stream]:
        return self.given

    def ended(self, since: float) -> list[tuple[float, Stream]]:
        return []

    def gap_counts(self) -> tuple[tuple[float, ...], list[int]]:
        return (0.01, 0.1), self.counts

    def waiting(self) -> int:
        return 0


def test_a_reading_of_a_made_machine(tmp_path: Path) -> None:
    machine(tmp_path, ran_s=1.5, waited_s=0.25, busy_s=3, throttles=5)
    seen = read(77, CpuSet([3]), tmp_path)
    thread = seen.engine[77]
    assert (thread.cpu, thread.policy, thread.run_s, thread.wait_s) == (3, "rr", 1.5, 0.25)
    assert (thread.voluntary, thread.involuntary, thread.migrations) == (30, 12, 4)
    assert (seen.cpus[3].busy_s, seen.cpus[3].steal_s, seen.major_faults) == (3.0, 0.07, 12)
    assert (seen.throttled_s, seen.pressure, seen.temperature_celsius) == (2.5, {"cpu": 0.125}, 71.5)
    assert seen.thermal_throttles == {3: 7}
    assert (seen.hertz, seen.slowest_clock, seen.available_bytes) == ({3: 1.8e9}, 0.5, 150_000)
    assert seen.rss_bytes == 300 * os.sysconf("SC_PAGE_SIZE")


def test_a_machine_that_tells_nothing_is_read_all_the_same(tmp_path: Path) -> None:
    seen = read(77, CpuSet([0, 1]), tmp_path)
    assert (seen.cpus, seen.engine, seen.rss_bytes, seen.throttled_s, seen.pressure) == ({}, {}, None, None, {})
    assert (seen.temperature_celsius, seen.hertz, seen.available_bytes) == (None, {}, None)


def sampler(root: Path, relayed: Relayed) -> Sampler:
    return Sampler(None, lambda: 77, relayed, lambda: PLACE, root)  # type: ignore[arg-type]  # no engine is scraped here


def test_two_looks_make_a_window_that_names_the_hog(tmp_path: Path) -> None:
    relayed = Relayed(DECODING)
    seen = sampler(tmp_path, relayed)

    async def look() -> None:
        machine(tmp_path)
        await seen.look()
        for step in (1, 2):  # the first window finds others there, the second knows what each used since
            await asyncio.sleep(0.1)
            assert seen.reading is not None
            half = step * 0.5 * (time.monotonic() - seen.reading.at)
            machine(tmp_path, ran_s=half, waited_s=half, busy_s=2 * half + 0.02, hog_s=step * 0.1)
            relayed.given = [replace(DECODING, events=100 + step * 8)]
            relayed.counts = [0, step * 8, 0]
            await seen.look()

    asyncio.run(look())
    window = seen.window
    assert window is not None
    assert window.delay == pytest.approx(0.5, abs=0.02)
    assert window.gaps.count == 16
    assert window.events_per_s == pytest.approx(8 / window.seconds, rel=0.01)
    found = [f for f in explain(window) if f.code == "shared-cpu"]
    assert "CPU 3 is shared with pid 812 stress-ng" in found[0].text
    shown = picture(seen)
    assert shown is not None
    assert [c["role"] for c in shown["cpus"]] == [["housekeeping"], ["decode"]]


@pytest.mark.parametrize("stopped", [0.0, 0.6, 0.8])
def test_what_a_quota_took_is_not_blamed_on_others(tmp_path: Path, stopped: float) -> None:
    """A thread that ran for a fifth of the time and waited for the rest: ``stopped`` of it for its quota."""
    seen = sampler(tmp_path, Relayed(DECODING))

    async def look() -> None:
        machine(tmp_path)
        await seen.look()
        await asyncio.sleep(0.1)
        machine(tmp_path, ran_s=2, waited_s=8, busy_s=9, stopped_s=2.5 + 10 * stopped)
        await seen.look()

    asyncio.run(look())
    assert seen.window is not None
    assert seen.window.throttled == pytest.approx(stopped)
    assert seen.window.delay == pytest.approx(0.8 - stopped)
    assert ("quota" in {f.code for f in explain(seen.window)}) == (stopped > 0)


def test_counters_never_fall_when_threads_end(tmp_path: Path) -> None:
    seen = sampler(tmp_path, Relayed())
    machine(tmp_path)
    seen.look_now(0)
    assert (seen.totals.voluntary, seen.totals.involuntary, seen.totals.migrations) == (30, 12, 4)
    for name in ("stat", "schedstat", "sched"):
        (tmp_path / f"proc/77/task/77/{name}").unlink()
    seen.look_now(0)
    assert seen.totals.voluntary == 30


def test_only_the_engines_counters_are_kept() -> None:
    assert counters(ENGINE_PAGE) == {"prompt_tokens_total": 91.0, "tokens_predicted_total": 2500.0}
    assert counters(b"<html>not metrics") == {}


def test_restarts_are_counted_by_cause() -> None:
    restarts = Restarts()
    for status in (Status(generation=1), Status(generation=1, failures=1, cause=Cause("oom", "x", mends=True)),
                   Status(generation=2, failures=1, cause=Cause("oom", "x", mends=True)), Status(generation=3)):
        restarts(status)
        restarts(status)
    assert restarts.by_reason == {"oom": 1, "reload": 1}


def join(parts: Rig, seen: Sampler) -> None:
    facts = Facts(lambda: State.READY, lambda: {"info": 2}, Restarts(), {"version": "1", "engine": "b1"})
    parts.app.metrics.add_collector(EngineMetrics(seen, facts))


def test_both_formats_parse_and_hold_every_promised_name(tmp_path: Path) -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(METRICS_HEAD + ENGINE_PAGE if b"/metrics" in request.line else json_answer(b"{}"))

    async def main() -> None:
        machine(tmp_path, busy_s=1)
        async with rig(script) as parts:
            seen = Sampler(parts, lambda: 77, Relayed(), lambda: PLACE, tmp_path)
            join(parts, seen)
            task = asyncio.create_task(seen.run())
            await until(lambda: seen.engine_counters)
            task.cancel()
            seen.look_now(0)
            await (await parts.post()).answer()
            answer = await (await parts.get("/metrics")).answer()
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            names = {family.name for family in plain(answer.body.decode())}
            opened = await (await parts.get("/metrics", "Accept: application/openmetrics-text; version=1.0.0")).answer()
            assert opened.headers["content-type"].startswith("application/openmetrics-text")
            assert {family.name.removesuffix("_info") for family in openmetrics(opened.body.decode())} >= {
                name.removesuffix("_info") for name in names if not name.endswith("_created")}
            assert {f"llamaops_{name}" for name in PROMISED} <= names

    run(main())


PROMISED = [
    "ttft_seconds", "itl_seconds", "e2e_seconds", "queue_seconds", "requests", "requests_in_flight", "queue_depth",
    "prompt_tokens", "output_tokens", "engine_state", "engine_restarts", "engine_rss_bytes", "engine_cpu_seconds",
    "engine_context_switches", "engine_threads", "engine_cpu_migrations", "cpu_utilization_ratio",
    "cpu_frequency_hertz", "cpu_throttled_seconds", "cpu_thermal_throttles", "pressure_ratio", "temperature_celsius",
    "plan_notes", "build_info", "engine_prompt_tokens", "engine_tokens_predicted", "memory_available_bytes",
]


def test_metrics_answer_while_the_engine_answers_nobody(tmp_path: Path) -> None:
    """The engine holds a stream open and never answers its own /metrics; then it is gone."""
    async def script(request: EngineRequest) -> None:
        if b"/metrics" not in request.line:
            await request.send(STREAM_HEAD)
            await request.send(chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'))
        await asyncio.Event().wait()

    async def main() -> None:
        machine(tmp_path)
        async with rig(script) as parts:
            seen = Sampler(parts, lambda: 77, Relayed(), lambda: PLACE, tmp_path)
            join(parts, seen)
            seen.watch()
            task = asyncio.create_task(seen.run())
            client = await parts.post(body=b'{"stream":true}')
            await client.head()
            await until(lambda: any(b"/metrics" in r.line for r in parts.requests))
            for _ in range(3):
                assert await answers(parts)
            assert sum(b"/metrics" in r.line for r in parts.requests) == 1  # our scrapes are not passed on
            parts.state = parts.state.__class__("/nowhere", None, 2)  # type: ignore[union-attr, arg-type]  # an Endpoint
            assert await answers(parts)
            task.cancel()

    run(main())


def test_a_client_that_takes_nothing_is_seen() -> None:
    async def script(request: EngineRequest) -> None:
        await request.send(STREAM_HEAD)
        while True:
            await request.send(chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n' * 500))

    async def main() -> None:
        async with rig(script) as parts:
            client = await parts.post(body=b'{"stream":true}', path="/v1/chat/completions")
            await client.head()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a read transport as well
            await until(lambda: parts.app.relay.streams(time.monotonic())[0].blocked_s > 0.2)
            assert not parts.traffic.owed(1)
            seen = parts.app.relay.streams(time.monotonic())[0]
            assert seen.phase == "decode" and seen.events > 0
            assert parts.app.relay.cancel(seen.id) and not parts.app.relay.cancel("req_unknown")

    run(main())


async def answers(parts: Rig) -> bool:
    return (await (await parts.get("/metrics")).answer()).status == 200


def test_looking_happens_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def slow(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return read(*args)

    monkeypatch.setattr("llamaops.serve.sampler.read", slow)
    machine(tmp_path)
    asyncio.run(sampler(tmp_path, Relayed()).look())
    assert threads and threading.get_ident() not in threads
