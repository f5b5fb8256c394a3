"""What `llamaops plan` and `llamaops host` print."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

from click.testing import CliRunner

from llamaops.cli.host import host as host_command
from llamaops.cli.plan import WIDTH, page
from llamaops.core.cpuset import CpuSet
from llamaops.core.launch import launch
from llamaops.core.model import Model
from llamaops.core.plan import plan, plan_json
from llamaops.core.profile import parse_profile
from llamaops.core.topology import Cgroup, Host, Rights

PROFILE = parse_profile("name: x\nmodel: {source: 'path:/m m/x.gguf', context: 512}\nengine: {args: [-fa, 'on']}",
                        stem="x",
                        base=Path("/"), environ={})
MODEL = Model(path="/m m/x.gguf", size_bytes=100 << 20, architecture="llama", quant="Q4_1")
HOST = Host(online=CpuSet({0, 1, 2, 3}), cgroup=Cgroup(quota_cpus=2.5), rights=Rights(lowest_nice=-20),
            mem_available=8 << 30, tools=dict.fromkeys(("taskset", "nice", "setpriv"), "tool"))
PLAN = plan(PROFILE, HOST, MODEL, None)
SPEC = launch(PLAN, PROFILE, None, MODEL, tools=HOST.tools, environ={"PATH": "/bin"}, socket=None, port=8080)


def test_the_command_on_the_page_pastes():
    text = page(SimpleNamespace(plan=PLAN, model=None), SPEC)
    command = text.partition("Command\x1b[0m\n")[2].partition("\n\n")[0]
    assert max(map(len, command.splitlines())) <= WIDTH
    words = shlex.split(command.replace("\\\n", ""))
    env = [f"{name}={value}" for name, value in SPEC.visible_env().items()]
    assert words == [*env, *SPEC.argv]


def test_the_page_has_each_decision_with_its_reason_the_sums_and_the_notes():
    text = page(SimpleNamespace(plan=PLAN, model=None), SPEC)
    assert "placement.threads            2            the CPU quota of 2.5, rounded down" in text
    assert "weights" in text and "100 MiB" in text
    assert "quota-limits-threads" in text


def test_the_document_has_the_promised_fields():
    document = json.loads(json.dumps(plan_json(PROFILE, HOST, MODEL, None, PLAN, SPEC)))
    assert document["placement"] == {
        "threads": 2, "threads_batch": 2, "cpus": "0-3", "batch_cpus": "0-3", "housekeeping_cpus": None,
        "policy": "other", "rt_priority": None, "nice": -15, "autogroup_nice": None, "weight": None, "relay_nice": -15,
        "spin": 500, "numa": None, "mem_nodes": None}
    assert document["host"]["usable_cpus"] == "0-3" and document["host"]["capacity_cpus"] == 2.5
    assert document["engine"] is None and document["model"]["quant"] == "Q4_1"
    assert set(document["serving"]) >= {"slots", "context", "batch", "ubatch", "kv_type_k", "kv_type_v"}
    sums = {"weights", "kv", "compute", "prompt_cache", "total", "available"}
    assert set(document["memory"]) >= {f"{name}_bytes" for name in sums}
    assert document["launch"]["argv"][0] == "tool" and document["launch"]["env"]["GOMP_SPINCOUNT"] == "500"
    assert {"level", "code", "text"} == set(document["notes"][0])


def test_the_doctor_prints_one_document_and_fails_where_a_check_fails(tmp_path):
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    done = CliRunner().invoke(host_command, ["doctor", "--json", "--host", str(tmp_path)])
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["cpu-quota"]["verdict"] == "fail" and checks["cpu-quota"]["mend"]
    assert done.exit_code == 70
    shown = CliRunner().invoke(host_command, ["doctor", "--host", str(tmp_path)]).stdout
    assert "fail cpu-quota" in shown and "mend: " in shown
