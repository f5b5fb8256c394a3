"""The planner on the recorded machines of tests/hosts, and what holds on any machine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaops.core.cpuset import CpuSet
from llamaops.core.launch import launch
from llamaops.core.model import Model
from llamaops.core.plan import Calibration, Plan, plan, plan_json
from llamaops.core.profile import ModelSection, PlacementSection, Profile, parse_profile
from llamaops.core.topology import Cgroup, Cpu, Host, Node, Rights
from llamaops.errors import LlamaopsError, NotPermitted, WrongProfile
from llamaops.host import TOOLS, probe_host

HERE = Path(__file__).parent
HOSTS = sorted(HERE.glob("*.yaml"))
SMALL = Model(path="/m/small.gguf", size_bytes=98_000_000, architecture="llama", quant="Q4_1", parameters=134_515_008,
              layers=30, embedding=576, heads=9, kv_heads=3, head_dim_k=64, head_dim_v=64, feed_forward=1536,
              vocab=49152,
              context_train=8192)
LARGE = replace(SMALL, path="/m/large.gguf", size_bytes=6_000_000_000, parameters=8_000_000_000)
MODELS = {"small": SMALL, "large": LARGE, "none": None}
ORDINARY_USER = {"caps": "0" * 16, "nice_limit": 0, "rtprio": 0, "memlock": 8388608, "gib": 16}
CPU, NODE = "sys/devices/system/cpu", "sys/devices/system/node"


def expand(machine: dict, root: Path) -> None:
    """Write a machine's short form as the kernel's files; tests/hosts/README.md tells the keys."""
    machine = ORDINARY_USER | machine
    files = {} if machine.get("raw") else {**_cpu_files(machine), **_process_files(machine)}
    for name, text in {**files, **machine.get("files", {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def core_lists(machine: dict) -> list[CpuSet]:
    """Return the SMT siblings of each core."""
    match machine["cores"]:
        case {"each": cpus}:
            return [CpuSet({cpu}) for cpu in sorted(CpuSet.parse(cpus))]
        case {"pairs": cpus, "offset": offset}:
            return [CpuSet({cpu, cpu + offset}) for cpu in sorted(CpuSet.parse(cpus))]
        case lists:
            return [CpuSet.parse(text) for text in lists]


def _cpu_files(machine: dict) -> dict[str, object]:
    groups = core_lists(machine)
    online = CpuSet(cpu for group in groups for cpu in group)
    files: dict[str, object] = {f"{CPU}/online": machine.get("online", online)}
    for group in groups:
        files |= {f"{CPU}/cpu{cpu}/topology/core_cpus_list": group for cpu in group}
    for key, name in (("capacity", "cpu_capacity"), ("max_khz", "cpufreq/cpuinfo_max_freq"),
                      ("package", "topology/physical_package_id")):
        for cpus, value in machine.get(key, {}).items():
            files |= {f"{CPU}/cpu{cpu}/{name}": value for cpu in CpuSet.parse(str(cpus))}
    for number, node in machine.get("nodes", {}).items():
        files[f"{NODE}/node{number}/cpulist"] = node["cpus"]
        kib = node["gib"] << 20
        files[f"{NODE}/node{number}/meminfo"] = f"Node {number} MemTotal: {kib} kB\nNode {number} MemFree: {kib} kB"
    for key, name in (("hybrid", "cpu_core"), ("atom", "cpu_atom")):
        if key in machine:
            files[f"sys/devices/{name}/cpus"] = machine[key]
    return files


def _process_files(machine: dict) -> dict[str, object]:
    online = CpuSet(cpu for group in core_lists(machine) for cpu in group)
    words = machine.get("isa", "")
    kib = machine["mib"] << 10 if "mib" in machine else machine["gib"] << 20
    about = f"Features\t: {words}\nCPU implementer\t: 0x41" if machine.get("arm") else f"flags\t\t: {words}"
    limits = (("Max locked memory", machine["memlock"]), ("Max nice priority", machine["nice_limit"]),
              ("Max realtime priority", machine["rtprio"]))
    return {
        "proc/cpuinfo": f"processor\t: 0\n{about}",
        "proc/meminfo": f"MemTotal: {kib + (1 << 20)} kB\nMemAvailable: {kib} kB",
        "proc/self/status": f"Uid:\t1000\t1000\t1000\t1000\nCapEff:\t{machine['caps']}\n"
                            f"Cpus_allowed_list:\t{machine.get('mask', online)}\n"
                            + (f"Mems_allowed_list:\t{machine['mems']}" if "mems" in machine else ""),
        "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units\n"
                            + "\n".join(f"{name:<26}{value:<21}{value:<21}" for name, value in limits),
    }


def host_cases() -> list:
    """Return one parameter set for each planned profile of each machine."""
    out = []
    for path in HOSTS:
        machine = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for case in machine["plans"]:
            wanted = ",".join(case.get("set", [])) or case.get("model", "auto")
            out.append(pytest.param(path.stem, machine, case, id=f"{path.stem}[{wanted}]"))
    return out


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Host]:
    """Hold the machines already expanded and read."""
    return {}


@pytest.mark.parametrize(("name", "machine", "case"), host_cases())
def test_recorded_machine_gets_the_plan_an_expert_would_choose(name, machine, case, machines, tmp_path):
    if name not in machines:
        expand(machine, tmp_path)
        machines[name] = probe_host(tmp_path)
    host = machines[name]
    profile = parse_profile("model: {source: 'path:/m/small.gguf'}", stem="x", base=Path("/"), environ={},
                            overrides=case.get("set", []))
    model = MODELS[case.get("model", "small")]
    if "error" in case:
        with pytest.raises((WrongProfile, NotPermitted)) as caught:
            plan(profile, host, model, None)
        assert case["error"] in str(caught.value)
        assert caught.value.exit_code == case.get("exit", 78)
        return
    planned = plan(profile, host, model, None)
    spec = launch(planned, profile, None, model, tools=host.tools, environ={}, socket=None, port=8080)
    document = plan_json(profile, host, model, None, planned, spec)
    expect = dict(case["expect"])
    assert {note.code for note in planned.notes} >= set(expect.pop("notes", []))
    assert expect.pop("text", "") in " ".join(note.text for note in planned.notes)
    assert expect.pop("argv", "") in " ".join(spec.argv)
    assert {key: _at(document, key) for key in expect} == {key: _same(value) for key, value in expect.items()}
    holds(planned, host, profile)


def _at(document: dict, key: str) -> object:
    section, name = key.split(".")
    return document[section][name]


def _same(value: object) -> object:
    """Spell a CPU list as the plan does, however the table has it."""
    return str(CpuSet.parse(value)) if isinstance(value, str) and re.fullmatch(r"[\d,-]+", value) else value


def test_there_are_enough_machines_and_each_says_what_it_stands_for():
    about = [yaml.safe_load(path.read_text().partition("\n")[0])["about"] for path in HOSTS]
    assert len(set(about)) >= 25


def holds(planned: Plan, host: Host, profile: Profile) -> None:
    """Check what must be true of every plan."""
    placed, asked = planned.placement, profile.placement
    usable = planned.usable_cpus
    assert placed.threads >= 1 and placed.threads_batch >= 1
    assert 1 <= planned.serving.ubatch <= planned.serving.batch
    assert planned.memory.total_bytes <= (planned.memory.available_bytes or planned.memory.total_bytes)
    if usable is None or placed.cpus is None:
        return
    assert placed.cpus
    reachable = usable | (host.isolated if asked.cpus != "auto" else set())
    assert placed.cpus <= reachable
    assert placed.housekeeping_cpus is None or placed.housekeeping_cpus <= reachable
    if asked.threads == "auto":
        assert placed.threads <= max(1, planned.capacity_cpus or 1) or asked.smt == "use" or asked.cpus != "auto"
        assert placed.threads <= len(placed.cpus)
    if placed.policy in ("fifo", "rr"):
        assert usable - placed.cpus, "a CPU stays free of real-time threads"
        assert placed.threads <= len(placed.cpus) or asked.threads != "auto"
    if placed.nice is not None:
        assert placed.relay_nice is not None and placed.relay_nice <= placed.nice
    if placed.mem_nodes is not None:
        assert all(node.cpus for node in host.nodes if node.id in placed.mem_nodes)


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    """Make machines of sparse ids, SMT, classes, nodes, cpusets and quotas, in any combination."""
    ids = sorted(draw(st.sets(st.integers(0, 90), min_size=1, max_size=12)))
    pairs = draw(st.booleans())
    groups = [CpuSet(ids[i:i + 2]) for i in range(0, len(ids), 2)] if pairs else [CpuSet({cpu}) for cpu in ids]
    fast = draw(st.sets(st.sampled_from(ids)))
    split = draw(st.sampled_from(["hybrid", "capacity", "max_khz", "none"]))
    node_count = draw(st.integers(0, 3))
    node_of = {cpu: draw(st.integers(0, node_count - 1)) for cpu in ids} if node_count else {}
    cpus = tuple(
        Cpu(cpu, siblings=group, node=node_of.get(cpu), performance=cpu in fast if split == "hybrid" and fast else None,
            capacity=(1024 if cpu in fast else 400) if split == "capacity" else None,
            max_khz=(3_000_000 if cpu in fast else 1_500_000) if split == "max_khz" else None)
        for group in groups for cpu in group)
    free = st.sampled_from([0, 1 << 33])
    nodes = tuple(Node(n, CpuSet(cpu for cpu in ids if node_of.get(cpu) == n), 1 << 34, draw(free))
                  for n in range(node_count))
    mask = draw(st.none() | st.sets(st.sampled_from(ids), min_size=1))
    return Host(
        online=CpuSet(ids), affinity=CpuSet(mask) if mask else None, cpus=tuple(sorted(cpus, key=lambda c: c.id)),
        nodes=nodes,
        isolated=CpuSet(draw(st.sets(st.sampled_from(ids), max_size=2))),
        cgroup=Cgroup(quota_cpus=draw(st.none() | st.floats(0.1, 16))),
        rights=Rights(lowest_nice=draw(st.sampled_from([None, -20, -10, 0])), cap_sys_nice=draw(st.booleans())),
        mem_available=draw(st.sampled_from([1 << 34, 500 << 20, 300 << 20, 190 << 20, 150 << 20])),
        autogroup=draw(st.booleans()), tools=MappingProxyType({tool: tool for tool in TOOLS}))


SECTIONS = st.builds(
    PlacementSection,
    smt=st.sampled_from(["avoid", "use"]), cores=st.sampled_from(["performance", "all"]),
    policy=st.sampled_from(["auto", "batch", "fifo", "rr"]), numa=st.sampled_from(["auto", "bind", "interleave",
                                                                                   "off"]),
    housekeeping=st.sampled_from(["auto", "none"]), rt_priority=st.sampled_from([1, 10, 20]),
    threads=st.sampled_from(["auto", "auto", 1, 3]), spin=st.sampled_from(["auto", "passive", 50]),
)


@settings(max_examples=15, deadline=None)
@given(hosts(), SECTIONS)
def test_every_plan_stays_inside_the_machine_and_is_a_plan_of_itself(host: Host, section: PlacementSection):
    profile = Profile(name="x", model=ModelSection(source="path:/m"), placement=section)
    try:
        planned = plan(profile, host, SMALL, None)
    except LlamaopsError as error:
        assert error.where == "memory" or section.threads != "auto", "with auto, every machine has a plan"
        assert error.where == "memory" or (error.where or "").startswith("placement.")
        return
    holds(planned, host, profile)
    again = plan(spelled_out(profile, planned), host, SMALL, None)
    assert (again.placement, again.serving, again.memory) == (planned.placement, planned.serving, planned.memory)


def spelled_out(profile: Profile, planned: Plan) -> Profile:
    """Return the profile that states every value of a plan."""
    placed, serving = planned.placement, planned.serving
    section = profile.placement.model_copy(update={
        "cpus": placed.cpus, "threads": placed.threads, "threads_batch": placed.threads_batch,
        "housekeeping": placed.housekeeping_cpus or "none", "policy": placed.policy,
        "nice": "auto" if placed.nice is None else placed.nice, "spin": placed.spin, "numa": placed.numa or "off",
    })
    return profile.model_copy(update={
        "placement": section,
        "model": profile.model.model_copy(update={"context": serving.context, "kv_type": serving.kv_type_k}),
        "serve": profile.serve.model_copy(update={"slots": serving.slots}),
        "memory": profile.memory.model_copy(update={"prompt_cache_mib": planned.memory.prompt_cache_bytes >> 20}),
    })


@pytest.mark.parametrize(("rates", "itl_ms", "ubatch"), [
    (Calibration(256, 50), 120, 8),       # with 512 of context 166 and 32, so 166 × (0.120 / 1.5 - 0.031)
    (Calibration(256, 50), 180, 12),
    (Calibration(2000, 100), 120, 64),
    (Calibration(20000, 200), 120, 512),
    (Calibration(20, 5), 120, 8),
])
def test_the_inter_token_budget_decides_the_batch(rates, itl_ms, ubatch):
    host = Host(online=CpuSet({0, 1}), mem_available=1 << 34)
    profile = parse_profile(f"model: {{source: 'path:/m'}}\nslo: {{itl_ms: {itl_ms}}}", stem="x", base=Path("/"),
                            environ={})
    planned = plan(profile, host, SMALL, None, rates)
    assert (planned.serving.ubatch, planned.serving.batch) == (ubatch, ubatch)
    met = rates.prefill_tok_s * (itl_ms / 1000 - 1 / rates.decode_tok_s) >= 8
    assert met is not any(note.code == "itl-budget-unmet" for note in planned.notes)


def test_one_slot_has_nobody_to_wait_for_a_prompt():
    profile = Profile(name="x", model=ModelSection(source="path:/m"))
    profile = profile.model_copy(update={"serve": profile.serve.model_copy(update={"slots": 1})})
    assert plan(profile, Host(online=CpuSet({0}), mem_available=1 << 34), SMALL, None).serving.ubatch == 512


def test_an_embedding_model_reads_a_whole_prompt_in_one_batch():
    bert = replace(SMALL, architecture="bert", pooling=1, context_train=512)
    planned = plan(Profile(name="x", model=ModelSection(source="path:/m")), Host(online=CpuSet({0}),
                                                                                 mem_available=1 << 34),
                   bert, None)
    assert planned.serving.embeddings
    assert planned.serving.context == planned.serving.batch == planned.serving.ubatch == 512


def test_a_system_without_affinity_is_planned_without_pinning():
    host = Host(system="darwin", machine="arm64", online=CpuSet(range(8)), mem_available=1 << 34)
    planned = plan(Profile(name="x", model=ModelSection(source="path:/m")), host, SMALL, None)
    assert planned.placement.cpus is None and planned.placement.nice is None
    assert [note.code for note in planned.notes] == ["no-affinity"]


@pytest.mark.parametrize(("rights", "asked", "nice", "code"), [
    (Rights(lowest_nice=-20), "auto", -15, None),
    (Rights(lowest_nice=-12), "auto", -12, None),
    (Rights(lowest_nice=-12, nice=-12), "auto", -12, None),     # a relay that has lifted itself plans the same again
    (Rights(lowest_nice=0), "auto", None, "nice-not-permitted"),
    (Rights(lowest_nice=5, nice=5), "auto", None, "nice-not-permitted"),
    (Rights(), "auto", None, "nice-not-permitted"),
    (Rights(), 10, 10, None),
    (Rights(lowest_nice=-12), -13, None, "nice-refused"),
    (Rights(lowest_nice=-12), -12, -12, None),
])
def test_niceness_goes_as_far_as_wanted_and_permitted(rights, asked, nice, code):
    host = Host(online=CpuSet({0}), rights=rights, tools=dict.fromkeys(TOOLS, "x"), mem_available=1 << 34)
    section = PlacementSection(nice=asked)
    planned = plan(Profile(name="x", model=ModelSection(source="path:/m"), placement=section), host, SMALL, None)
    assert (planned.placement.nice, planned.placement.relay_nice) == (nice, nice)
    codes = {note.code for note in planned.notes if note.code.startswith("nice-")}
    assert codes == ({code} if code else set())


def test_every_note_code_is_documented():
    source = "".join(path.read_text() for path in (HERE.parents[1] / "llamaops").rglob("*.py"))
    codes = set(re.findall(r"""\.(?:info|degraded|risk)\(\s*f?"([a-z0-9-]+)",\s""", source))
    codes |= set(re.findall(r"""Note\(\s*"(?:info|degraded|risk)",\s*f?"([a-z0-9-]+)",\s""", source))
    codes |= set(re.findall(r"""_drift\(\s*"([a-z0-9-]+)",\s""", source))
    documented = set(re.findall(r"^\| `([a-z0-9-]+)` \|", (HERE.parents[1] / "docs/scheduling.md").read_text(),
                                re.MULTILINE))
    assert len(codes) > 20
    assert codes - documented == set()
    assert documented - codes == {"no-engine", "no-model"}, "documented, but never said (those two are put together)"
