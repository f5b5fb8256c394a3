"""The commands from outside: what they print, write, exit with and leave behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
from running import LLAMAOPS, await_true, gone

HERE = Path(__file__).parent
SCHEMA = json.loads((HERE.parents[1] / "docs" / "bench.schema.json").read_text())


def stub(*switches: object) -> str:
    quick = ("--prefill-ms", 5, "--token-ms", 3, "--stall-ms", 0)
    return " ".join(["cmd:" + sys.executable, str(HERE / "truth_stub.py"), "--port", "{port}", *map(str, quick),
                     *map(str, switches)])


def bench(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*LLAMAOPS, "bench", *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done


def document(text: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    jsonschema.validate(value, SCHEMA)
    return value


def test_a_run_as_json_holds_to_its_schema(tmp_path: Path) -> None:
    out, html = tmp_path / "run.json", tmp_path / "run.html"
    done = bench(stub(), "-n", "6", "-c", "2", "--max-tokens", "5", "--noise", "cpu:1:20%", "--json", "--out", str(out),
                 "--html", str(html))
    run = document(done.stdout)
    assert run == document(out.read_text())
    assert [len(r["text_ms"]) for r in run["requests"]] == [5] * 6
    assert run["figures"]["engine_prompt_ms"]["p50"] == 1.5
    assert run["noise"] == {"what": "cpu:1:20%", "where": "session"}
    assert run["system"]["target_cpus"] is not None
    assert html.stat().st_size > 5000
    assert done.stderr == ""


def test_a_scenario_is_where_the_options_set_out_from() -> None:
    done = bench(stub(), "--scenario", "crowd", "-n", "60", "--max-tokens", "3", "--json")
    load = document(done.stdout)["workload"]
    assert (load["concurrency"], load["duration_s"], load["requests"]) == (50, 30.0, 60)
    assert (load["prompt_tokens"], load["max_tokens"]) == ("48", "3")


def test_the_table_fits_a_terminal() -> None:
    lines = bench(stub(), "-n", "2", "--max-tokens", "4").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(re.match(r"output +[\d.]+ tokens/s, [\d.]+ requests/s", line) for line in lines)


def test_a_comparison_and_a_report_of_both(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    done = bench("compare", stub(), stub("--slow", 1.5), "-n", "2", "--max-tokens", "4", "--pairs", "4",
                 "--out", str(out))
    assert "B is worse" in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    comparison = document(out.read_text())
    assert [len(row) for row in comparison["runs"]] == [4, 4]
    assert comparison["runs"][0][1]["workload"]["seed"] == comparison["runs"][1][1]["workload"]["seed"] == 2
    bench("report", str(out), "--html", str(tmp_path / "r.html"), "--plots", str(tmp_path / "plots"))
    assert [p.name for p in (tmp_path / "plots").iterdir()] == ["ratios-0.svg"]


@pytest.mark.parametrize(("args", "code", "says"), [
    (["cmd:sleep 5"], 2, "{port}"),
    (["cmd:no-such-program {port}"], 2, "no-such-program"),
    (["cmd:sh -c 'echo oh dear >&2; exit 3' {port}"], 70, "oh dear"),
    (["http://127.0.0.1:1"], 75, "nothing answers"),
    (["http://user:secret@127.0.0.1:1"], 2, "base URL"),
    (["http://127.0.0.1:1", "--noise", "gpu:1"], 2, "--noise"),
    (["http://127.0.0.1:1", "--max-tokens", "0"], 2, "--max-tokens"),
    (["http://127.0.0.1:1", "--rate", "1", "-c", "4"], 2, "exclude"),
    (["compare", "http://127.0.0.1:1"], 2, "nothing to compare"),
    (["no-such-file.yaml"], 2, "no-such-file.yaml"),
    (["http://127.0.0.1:1", "--out", "/no/such/run.json"], 2, "/no/such/run.json"),
    (["compare", "cmd:x {port}", "cmd:x {port}", "--html", "/no/such/run.html"], 2, "/no/such/run.html"),
])
def test_refusals(args: list[str], code: int, says: str) -> None:
    done = bench(*args, code=code)
    assert says in done.stderr and "secret" not in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("text", [
    "", "[]", '{"schema": "llamaops-bench/2"}', '{"schema": "llamaops-bench/1"}',
    '{"schema": "llamaops-bench/1", "kind": "run", "figures": null}',
])
def test_a_report_of_what_is_no_whole_document_is_refused(tmp_path: Path, text: str) -> None:
    path, html = tmp_path / "x.json", tmp_path / "r.html"
    path.write_text(text)
    done = bench("report", str(path), "--html", str(html), code=2)
    assert "not a llamaops-bench/1 document" in done.stderr and str(path) in done.stderr
    assert not html.exists()


def test_no_success_is_a_failure() -> None:
    done = bench(stub("--fail", "status"), "-n", "1", "--warmup", "1", code=70)
    assert "status 503" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_everything(number: int) -> None:
    process = subprocess.Popen([*LLAMAOPS, "bench", stub(), "-n", "100000", "--noise", "cpu:1:5%"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    own = psutil.Process(process.pid)
    await_true(lambda: any("stress" in " ".join(p.cmdline()) or "burn" in " ".join(p.cmdline())
                           for p in own.children(recursive=True)), what="noise is made")
    children = own.children(recursive=True)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    process.communicate()
    assert len(children) >= 2
    await_true(lambda: gone(children), what="nothing is left")
