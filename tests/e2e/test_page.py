"""The page in a real browser, ``top``, the explanations and the dashboards, on the real engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import httpx
import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from running import LLAMAOPS, QUICKSTART, ROOT, Running, Up, await_true, streaming

GRAFANA = ROOT / "templates" / "grafana"
MACHINE_DEPENDENT = {"llamaops_temperature_celsius", "llamaops_cpu_frequency_hertz", "llamaops_pressure_ratio",
                     "llamaops_cpu_throttled_seconds_total", "llamaops_cpu_thermal_throttles_total",
                     "llamaops_memory_available_bytes"}
"""What not every machine tells; tests/serve/test_metrics_engine.py shows them on a made one."""

needs_browser = pytest.mark.skipif(browser.missing() is not None and "CI" not in os.environ,
                                   reason=browser.missing() or "")


BEARER = {"Authorization": "Bearer open-sesame-1"}


def complete(running: Running) -> None:
    body = {"prompt": "Hi", "max_tokens": 3}
    httpx.post(f"{running.url}/v1/completions", json=body, headers=BEARER, timeout=120).raise_for_status()


# --- the page


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_playground_streams_and_draws(up: Up, tmp_path: Path, scheme: str) -> None:
    running = up()
    with browser.browser(tmp_path / "profile") as page:
        page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.go(f"{running.url}/")
        await_true(lambda: page.text("#state") == "ready", what="the page shows the state")
        page.run("document.querySelector('#max').value = 24; document.querySelector('#prompt').focus()")
        page.keys("\ue004" * 3 + "\ue007")  # by keyboard alone: over the two fields to the button
        await_true(lambda: page.run("return document.querySelector('#answer').getAttribute('aria-busy')") == "false"
                   and "tokens, first after" in page.text("#caption"), what="the answer is complete")
        assert len(page.text("#answer")) > 20
        caption = page.text("#caption")
        assert re.match(r"\d+ tokens, first after [\d.]+ m?s, [\d.]+ a second; between two: median", caption)
        painted = page.run("const c = document.querySelector('#timeline'); return c.getContext('2d')"
                           ".getImageData(0, 0, c.width, c.height).data.filter(v => v).length")
        assert painted > 500
        assert await_true(lambda: page.text("#cpus"), what="the CPUs are shown").startswith("CPU")
        page.screenshot(tmp_path / f"page-{scheme}.png")
        assert (tmp_path / f"page-{scheme}.png").stat().st_size > 20_000
        loaded = page.run("return performance.getEntriesByType('resource').map(e => e.name)")
        assert loaded and all(name.startswith((running.url, "data:")) for name in loaded)
        assert page.console() == []


@needs_browser
@pytest.mark.parametrize("width", [380, 1100])
def test_axe_finds_nothing(up: Up, tmp_path: Path, width: int) -> None:
    running = up()
    axe = browser.axe()
    with browser.browser(tmp_path / "profile") as page:
        for scheme in ("light", "dark"):
            page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            page.devtools("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1,
                          mobile=False)
            page.go(f"{running.url}/")
            page.run("document.querySelector('#max').value = 8; document.querySelector('#send').click()")
            await_true(lambda: "tokens, first after" in page.text("#caption"), what="the answer is complete")
            page.run(axe + "\nwindow.found = null; axe.run().then(result => { window.found = result.violations; })")
            violations = await_true(lambda: page.run("return found && found.map(v => [v.id, v.nodes[0].html])") or
                                    page.run("return found && 'none'"), what="axe is done")
            assert violations == "none"
            assert page.run("return document.documentElement.scrollWidth <= innerWidth")
            page.screenshot(tmp_path / f"{scheme}-{width}.png")


@needs_browser
def test_a_key_is_asked_for_and_kept_nowhere(up: Up, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("alice:open-sesame-1\n")
    keys.chmod(0o600)
    running = up("--set", f"serve.api_keys.file={keys}")
    assert httpx.get(f"{running.url}/status").status_code == 401
    with browser.browser(tmp_path / "profile") as page:
        page.go(f"{running.url}/")
        await_true(lambda: page.run("return document.activeElement.id") == "key", what="a key is asked for")
        page.screenshot(tmp_path / "key.png")
        shown = "return document.querySelector('#play').checkVisibility()"
        assert not page.run(shown)  # nothing to see, and nothing to try in vain, before there is a key
        page.keys("wrong\ue007")
        await_true(lambda: "not known" in page.text("#key-problem"), what="a wrong key is said to be wrong")
        page.run("document.querySelector('#key').focus()")
        page.keys("open-sesame-1\ue007")
        await_true(lambda: page.text("#state") == "ready", what="the key opens the page")
        assert page.run(shown)
        kept = "return document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage) + location.href"
        assert "sesame" not in page.run(kept)


def test_the_page_is_small_and_needs_nothing_from_elsewhere() -> None:
    files = {path.name: path.read_text() for path in (ROOT / "templates" / "page").iterdir()}
    assert sum(map(len, files.values())) < 150_000
    for text in files.values():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"<script>|<style|\son[a-z]+=|\sstyle=", files["index.html"])
    assert not re.search(r"innerHTML\s*=[^=]|outerHTML|insertAdjacentHTML|eval\(|document\.write", files["page.js"])


# --- top and metrics


def test_top_prints_one_picture(up: Up) -> None:
    running = up()
    with streaming(running):
        document = json.loads(running.cli("top", "--once", "--json").stdout)
        assert document["streams"][0]["phase"] in ("prefill", "decode")
        assert document["now"]["cpus"] and document["now"]["explain"]
        running.env["COLUMNS"] = "80"
        shown = running.cli("top", "quickstart", "--once").stdout.splitlines()
        assert max(map(len, shown)) <= 80 and len(shown) <= 24
        assert shown[0].startswith("quickstart ready") and any(line.startswith("CPU 0") for line in shown)
        assert any(re.match(r"  …\w+ .* (?:prefill|decode) ", line) for line in shown)
    refused = running.cli("top")
    assert (refused.returncode, "--once" in refused.stderr) == (2, True)


def test_top_lives_in_a_terminal_and_obeys_keys(up: Up, tmp_path: Path) -> None:
    profile = tmp_path / "quickstart.yaml"
    profile.write_text(QUICKSTART.read_text())
    running = up(profile=profile)
    with contextlib.ExitStack() as stack:
        for count in (1, 2):
            stack.enter_context(streaming(running))
            streams = await_true(lambda n=count: in_engine(running, n), what=f"{count} requests are in the engine")
        oldest, youngest = streams
        master, process = stack.enter_context(terminal(running, "top", "--interval", "0.2"))
        read_until(master, rf"▸ …\w*{oldest[-8:]} ")
        os.write(master, b"\x1b[B")  # the arrow down, which begins as Escape does
        read_until(master, rf"▸ …\w*{youngest[-8:]} ")
        os.write(master, b"c")
        await_true(lambda: in_engine(running, 1) == [oldest], what="the chosen one is cancelled")
        profile.write_text(QUICKSTART.read_text() + "\nnonsense: 1\n")
        os.write(master, b"r")
        read_until(master, "reload refused: ")
        profile.write_text(QUICKSTART.read_text())
        os.write(master, b"r")
        read_until(master, "reload: (?:keys|a new engine)")
        os.write(master, b"d")
        read_until(master, "press d again")
        os.write(master, b"xc")  # any other key goes on
        await_true(lambda: not running.status()["streams"], what="the last one is cancelled")
        os.write(master, b"d")
        read_until(master, "press d again")
        os.write(master, b"d")
        assert running.process.wait(60) == 0
        assert process.wait(60) == 0


def test_top_quits_and_leaves_the_instance_alone(up: Up) -> None:
    running = up()
    with terminal(running, "top") as (master, process):
        text = read_until(master, "quickstart ready")
        os.write(master, b"q")
        assert process.wait(60) == 0
    assert "\x1b[?1049h" in text  # the screen of its own
    assert httpx.get(f"{running.url}/readyz").status_code == 200


def in_engine(running: Running, count: int) -> list[str] | None:
    """Return the ids of the requests in the engine, the oldest first, once there are so many."""
    ids = [s["id"] for s in running.status()["streams"] if s["phase"] != "queued"]
    return ids if len(ids) == count else None


@contextlib.contextmanager
def terminal(running: Running, *args: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run a command in a terminal of 80×24."""
    import pty

    master, slave = pty.openpty()
    env = running.env | {"TERM": "xterm-256color", "LINES": "24", "COLUMNS": "80"}
    process = subprocess.Popen([*LLAMAOPS, *args], stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    try:
        yield master, process
    finally:
        process.kill()
        process.wait()
        os.close(master)


def read_until(master: int, wanted: str) -> str:
    """Return what was written to the terminal up to a match of ``wanted`` in it, escape sequences set aside."""
    text = ""
    os.set_blocking(master, False)

    def seen() -> bool:
        nonlocal text
        with contextlib.suppress(BlockingIOError):
            text += os.read(master, 1 << 16).decode(errors="replace")
        return bool(re.search(wanted, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)))

    await_true(seen, what=f"the terminal shows {wanted!r}")
    return text


def expressions(value: Any) -> Iterator[str]:
    """Yield every PromQL expression of a dashboard or of alert rules."""
    if isinstance(value, dict):
        for name in ("expr", "definition"):
            if isinstance(value.get(name), str):
                yield value[name]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from expressions(item)


def test_dashboard_and_alerts_ask_for_what_there_is(up: Up, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("alice:open-sesame-1\n")
    keys.chmod(0o600)
    running = up("--set", f"serve.api_keys.file={keys}")
    complete(running)
    await_true(lambda: "llamaops_engine_tokens_predicted_total" in metrics(running), every=0.3,
               what="the engine was scraped")
    page = metrics(running)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels.setdefault(sample.name, {"instance", "job"}).update(sample.labels)
    asked = [*expressions(json.loads((GRAFANA / "dashboard.json").read_text())),
             *expressions(yaml.safe_load((GRAFANA / "alerts.yaml").read_text()))]
    assert len(asked) > 40
    unknown = {name for text in asked for name in re.findall(r"llamaops_\w+", text)} - labels.keys() - MACHINE_DEPENDENT
    assert not unknown
    for text in asked:
        for name, selector in re.findall(r"(llamaops_\w+)\{([^}]*)\}", text):
            wanted = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert name in MACHINE_DEPENDENT or wanted <= labels[name], (text, wanted)


def metrics(running: Running, accept: str = "text/plain") -> str:
    answer = httpx.get(f"{running.url}/metrics", headers={**BEARER, "Accept": accept}, timeout=120)
    assert answer.status_code == 200
    return answer.text


def test_both_formats_of_a_live_instance_parse(up: Up) -> None:
    """What ``promtool check metrics`` looks at: syntax, types, histograms, names and units."""
    running = up()
    complete(running)
    await_true(lambda: "llamaops_engine_tokens_predicted_total" in metrics(running), every=0.3, what="it was scraped")
    families = {f.name: f for f in text_string_to_metric_families(metrics(running))}
    opened = {f.name: f for f in openmetrics(metrics(running, "application/openmetrics-text; version=1.0.0"))}
    assert families.keys() - {name for name in families if name.endswith("_created")} <= opened.keys() | {
        f"{name}_info" for name in opened}
    for name, family in families.items():
        assert name.startswith("llamaops_") and family.documentation and family.type != "unknown", name
        assert not re.search(r"_(?:ms|milliseconds|kb|mib|percent|mhz)(?:_|$)", name), "base units only"
        series = [(*sorted(s.labels.items()), s.name) for s in family.samples]
        assert len(series) == len(set(series)), f"{name} has a series twice"
        if family.type == "histogram":
            counts = [s.value for s in family.samples if s.name.endswith("_bucket")]
            total = next(s.value for s in family.samples if s.name.endswith("_count"))
            assert counts == sorted(counts) and counts[-1] == total


def test_metrics_and_page_answer_while_the_engine_is_stopped_or_dead(up: Up) -> None:
    running = up("--set", "supervise.backoff.initial_s=600", "--set", "supervise.backoff.max_s=600")
    with streaming(running):
        await_true(lambda: running.status()["streams"], what="the stream runs")
        running.engine().send_signal(signal.SIGSTOP)
        all_answer(running)
        running.engine().send_signal(signal.SIGKILL)
    await_true(lambda: running.status()["state"] == "back-off", what="its end is noticed")
    all_answer(running)
    assert 'llamaops_engine_state{state="back-off"} 1.0' in metrics(running)


def all_answer(running: Running) -> None:
    for path in ("/metrics", "/status", "/", "/healthz") * 3:
        assert httpx.get(f"{running.url}{path}", timeout=120).status_code == 200
