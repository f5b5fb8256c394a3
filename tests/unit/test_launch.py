"""From a plan to the command line."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from llamaops.core.cpuset import CpuSet
from llamaops.core.engine import Engine
from llamaops.core.launch import LaunchSpec, check_flags, environment, launch, shell_line, wrappers
from llamaops.core.memory import Memory
from llamaops.core.model import Model
from llamaops.core.plan import Placement, Plan, Serving
from llamaops.core.profile import parse_profile
from llamaops.errors import WrongProfile

TOOLS = MappingProxyType({tool: f"/bin/{tool}" for tool in ("taskset", "chrt", "nice", "numactl", "setpriv")})
PLACED = Placement(threads=2, threads_batch=3, cpus=CpuSet({2, 3}), batch_cpus=CpuSet({2, 3}), housekeeping_cpus=None,
                   policy="other", rt_priority=None, nice=None, autogroup_nice=None, weight=None, relay_nice=None,
                   spin=1000,
                   numa=None, mem_nodes=None)
PLAN = Plan(PLACED, Serving(slots=2, context=4096, batch=64, ubatch=64, kv_type_k="f16", kv_type_v="q8_0"),
            Memory(0, 0, 0, 100 << 20, 0, None), None, None, (), ())
FLAGS = frozenset({
    "-m", "--host", "--port", "--alias", "-t", "-tb", "-c", "-np", "-b", "-ub", "-ctk", "-ctv", "--cache-ram",
    "--no-ui", "--metrics", "--slots", "--jinja", "--load-mode", "--embeddings", "--poll", "-fa", "--fit",
})
ENGINE = Engine("/opt/llama-server", "b11434", FLAGS, "libgomp")
MODEL = Model(path="/srv/modèles 漢字/m.gguf", size_bytes=1, architecture="llama")


def profile(text: str = ""):
    return parse_profile(f"name: x\nmodel: {{source: 'path:/m', aliases: [y]}}\n{text}", stem="x", base=Path("/"),
                         environ={})


def argv(plan: Plan = PLAN, engine: Engine | None = ENGINE, text: str = "", **kwargs) -> list[str]:
    options = {"tools": TOOLS, "environ": {}, "socket": "/run/x.sock", "port": None, **kwargs}
    return list(launch(plan, profile(text), engine, MODEL, **options).argv)


def placed(**changes) -> Plan:
    return replace(PLAN, placement=replace(PLACED, **changes))


def test_the_whole_command():
    assert argv() == shlex.split(
        "/bin/setpriv --pdeathsig KILL /bin/taskset -c 2-3 /opt/llama-server -m '/srv/modèles 漢字/m.gguf' --host "
        "/run/x.sock --port 8080 --alias x,y -t 2 -tb 3 -c 8192 -np 2 -b 64 -ub 64 -ctk f16 -ctv q8_0 --cache-ram 100 "
        "--no-ui --metrics --slots --jinja --fit off")


@pytest.mark.parametrize(("changes", "inherited", "chain"), [
    ({}, 0, "taskset -c 2-3"),
    ({"cpus": None}, 0, ""),
    ({"nice": -10}, 0, "taskset -c 2-3 nice -n -10"),
    ({"nice": -10}, -4, "taskset -c 2-3 nice -n -6"),
    ({"nice": -10}, -10, "taskset -c 2-3"),
    ({"nice": 5}, -10, "taskset -c 2-3 nice -n 15"),
    ({"policy": "rr", "rt_priority": 10}, 0, "taskset -c 2-3 chrt --rr 10"),
    ({"policy": "fifo", "rt_priority": 7}, 0, "taskset -c 2-3 chrt --fifo 7"),
    ({"policy": "batch", "nice": 3}, 0, "taskset -c 2-3 chrt --batch 0 nice -n 3"),
    ({"numa": "bind", "mem_nodes": CpuSet({1})}, 0, "numactl --physcpubind=2-3 --membind=1"),
    ({"numa": "interleave", "mem_nodes": CpuSet({0, 1})}, 0, "numactl --interleave=0-1 taskset -c 2-3"),
])
def test_each_property_has_one_wrapper(changes, inherited, chain):
    tools = {name: name for name in TOOLS if name != "setpriv"}
    assert " ".join(wrappers(replace(PLACED, **changes), tools, inherited)) == chain


def test_niceness_is_never_set_by_the_engine_too():
    words = argv(placed(nice=-10, policy="rr", rt_priority=10))
    assert not {"--prio", "--cpu-mask", "-C", "--numa"} & set(words)


def test_the_port_is_always_rendered():
    words = argv(socket=None, port=4321)
    assert words[words.index("--host") + 1] == "127.0.0.1" and words[words.index("--port") + 1] == "4321"


@pytest.mark.parametrize(("flags", "changes", "words"), [
    (FLAGS, {"mmap": False}, "--load-mode none"),
    (FLAGS, {"lock": True}, "--load-mode mmap+mlock"),
    (FLAGS, {"lock": True, "mmap": False}, "--load-mode mlock"),
    (FLAGS - {"--load-mode"} | {"--mlock", "--no-mmap"}, {"lock": True, "mmap": False}, "--mlock --no-mmap"),
    (FLAGS - {"--load-mode"} | {"--no-mmap"}, {"mmap": False}, "--no-mmap"),
    (FLAGS - {"--no-ui"} | {"--no-webui"}, {}, "--no-webui"),
])
def test_flags_follow_this_binarys_help(flags, changes, words):
    plan = replace(PLAN, memory=replace(PLAN.memory, **changes))
    command = " ".join(argv(plan, replace(ENGINE, flags=frozenset(flags))))
    assert f" {words} " in f"{command} "


def test_a_flag_this_binary_lacks_and_can_do_without_is_left_out():
    assert "--cache-ram" not in argv(engine=replace(ENGINE, flags=FLAGS - {"--cache-ram"}))


def test_an_unknown_flag_names_flag_and_version():
    with pytest.raises(WrongProfile, match=r"--turbo[\s\S]*b11434"):
        argv(text="engine: {args: [--turbo, '1']}")


@pytest.mark.parametrize("words", [["-fa", "on"], ["-m", "-1"], ["--jinja", "{-x}"], ["--host", "-"], ["--alias",
                                                                                                       "--5"]])
def test_values_are_not_taken_for_flags(words):
    check_flags(["llama-server", *words], ENGINE)


def test_a_binary_without_readable_help_is_not_checked():
    check_flags(["llama-server", "--turbo"], replace(ENGINE, flags=frozenset()))


def test_profile_arguments_come_last():
    assert argv(text="engine: {args: [-fa, 'on']}")[-2:] == ["-fa", "on"]


def test_embedding_models_are_served_as_such():
    plan = replace(PLAN, serving=replace(PLAN.serving, embeddings=True))
    assert "--embeddings" in argv(plan)
    assert "--embeddings" not in argv()
    flags = FLAGS | {"--reranking"}
    ranker = replace(MODEL, pooling=4)
    spec = launch(plan, profile(), replace(ENGINE, flags=flags), ranker, tools=TOOLS, environ={}, socket=None, port=1)
    assert "--reranking" in spec.argv and "--embeddings" not in spec.argv


@pytest.mark.parametrize(("spin", "openmp", "expected", "poll"), [
    (1000, "libgomp", {"GOMP_SPINCOUNT": "1000"}, None),
    ("passive", "libgomp", {"OMP_WAIT_POLICY": "passive"}, None),
    ("active", "libomp", {"OMP_WAIT_POLICY": "active"}, None),
    (1000, "libomp", {"KMP_BLOCKTIME": "1"}, None),
    (0, "libomp", {"KMP_BLOCKTIME": "0"}, None),
    (1000, None, {}, "1"),
    ("passive", None, {}, "0"),
    ("active", None, {}, "100"),
])
def test_spin_is_spelled_for_the_runtime(spin, openmp, expected, poll):
    plan, engine = placed(spin=spin), replace(ENGINE, openmp=openmp)
    env = environment(plan.placement, profile(), engine, {})
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    assert {name: env[name] for name in names if name in env} == expected
    words = argv(plan, engine)
    assert (words[words.index("--poll") + 1] if "--poll" in words else None) == poll


def test_the_environment_is_a_short_list():
    ours = {"PATH": "/bin", "HOME": "/root", "LANG": "C.UTF-8", "LC_ALL": "de_DE.UTF-8", "http_proxy": "http://p:1",
            "HTTPS_PROXY": "http://p:1", "LLAMA_ARG_THREADS": "64", "HF_TOKEN": "hf_secret", "OMP_NUM_THREADS": "64",
            "OMP_PROC_BIND": "true", "GOMP_CPU_AFFINITY": "0"}
    env = environment(PLACED, profile("engine: {env: {GGML_X: '1'}}"), ENGINE, ours)
    assert env == {
        "PATH": "/bin", "HOME": "/root", "LANG": "de_DE.UTF-8", "LC_NUMERIC": "C", "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "NUMEXPR_NUM_THREADS": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "GOMP_SPINCOUNT": "1000", "GGML_X": "1"}


def test_the_shell_line_pastes_and_hides_secrets():
    spec = LaunchSpec(("/opt/a b", "-x", "it's $HOME"), {"PATH": "/bin", "A": "1 2", "MY_TOKEN": "secret"}, None, 1)
    line = shell_line(spec)
    assert "secret" not in line and "PATH" not in line
    assert shlex.split(line) == ["A=1 2", "MY_TOKEN=…", "/opt/a b", "-x", "it's $HOME"]
