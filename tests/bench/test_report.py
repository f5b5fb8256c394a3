"""Reports stand alone, are well-formed, escape what they are given and draw what there is."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from llamaops.bench.load import Server
from llamaops.bench.noise import Noise
from llamaops.bench.priority import Client
from llamaops.bench.report import figures, write_plots, write_report
from llamaops.bench.run import Conditions, Measured, as_document
from llamaops.bench.sampling import SystemUse
from llamaops.bench.svg import Axis
from llamaops.bench.table import run_text
from llamaops.bench.targets import Target
from llamaops.core.figures import Slo, measure
from llamaops.core.timing import Timing
from llamaops.core.workload import Workload

NASTY = "cmd:x --y '</script><b>' {port}"


def measured(gap: float = 0.02, failure: str | None = None, requests: int = 5) -> Measured:
    texts = [tuple(i / 10 + 0.3 + gap * k for k in range(20)) for i in range(requests)]
    timings = [Timing(i, 20, i / 10, i / 10, i / 10, i / 10 + 1, text, 7, 20, "length", {"prompt_ms": 12.0},
                      failure if i else None) for i, text in enumerate(texts)]
    conditions = Conditions(Workload(rate=10), Slo(), Noise(cpu=2), "session", Server("", 0))
    use = SystemUse(cpu_ratio=0.5, target_cpus=1.9, rss_peak_bytes=300 << 20, involuntary_switches=12, migrations=3)
    return Measured(Target("cmd", NASTY), conditions, datetime.now(UTC), measure(timings, 2.0, Slo()), tuple(timings),
                    0.0, use, Client("fifo 90", 0.1, 0.002), "m", None, ["too hot"], ["a warning, rather long " * 5])


def document(**options: Any) -> dict[str, Any]:
    return json.loads(json.dumps(as_document(measured(**options))))  # type: ignore[no-any-return]  # JSON


COMPARISON = {
    "schema": "llamaops-bench/1", "kind": "comparison", "targets": ["a", "b"], "warnings": [],
    "environment": {"cpu": "x"}, "runs": [[{}], [{}]], "results": [{"target": "b", "against": "a", "metrics": [
        {"name": "ITL p50", "unit": "ms", "better": "lower", "base": 20.0, "other": 10.0, "verdict": "better",
         "ratio": {"pairs": 8, "ratio": 0.5, "low": 0.45, "high": 0.55}},
        {"name": "TTFT p50", "unit": "ms", "better": "lower", "base": None, "other": None, "verdict": None,
         "ratio": None},
    ]}],
}


def test_a_report_stands_alone_and_escapes(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    write_report(path, [document(), document(gap=0.2), COMPARISON])
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import""", page)
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "<b>' {port}" not in page
    found = re.search(r'id="llamaops-bench">(.*?)</script>', page, re.DOTALL)
    assert found is not None and len(json.loads(found[1])) == 3


def test_plots_are_well_formed_files(tmp_path: Path) -> None:
    write_plots(tmp_path, [document(), COMPARISON])
    assert sorted(p.stem for p in tmp_path.glob("*.svg")) == ["itl", "load", "ratios-1", "timeline", "ttft"]
    for path in tmp_path.iterdir():
        ET.parse(path)


def test_a_run_that_failed_altogether_can_be_reported(tmp_path: Path) -> None:
    failed = document(failure="connect: refused", requests=5)
    nothing = json.loads(json.dumps(failed))
    nothing["figures"]["itl_ms"] = nothing["figures"]["ttft_ms"] = None
    write_report(tmp_path / "r.html", [failed, nothing])
    assert "4 × connect: refused" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert figures([nothing]) == []


@pytest.mark.parametrize(("low", "high", "log"), [
    (0, 1, False), (0, 9.3, False), (3, 4000, True), (10, 20, True), (5, 5, True)])
def test_axes_have_a_few_round_ticks(low: float, high: float, log: bool) -> None:
    axis = Axis.over("x", [low, high], log=log)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 16
    assert all(0 <= axis.place(t) <= 1 for t in ticks)
    assert [axis.place(t) for t in ticks] == sorted(axis.place(t) for t in ticks)


def test_the_table_fits_80_columns() -> None:
    text = run_text(measured(failure="status 503: the queue is full and there is much more to say about it " * 3))
    assert max(map(len, text.splitlines())) <= 80
    assert "4 failed" in text and "INVALID: too hot" in text
