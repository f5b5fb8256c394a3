"""Compose projects and Kubernetes trees: against the published schemas, golden files, and what a plan demands."""

from __future__ import annotations

import functools
import io
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ruamel.yaml
import yaml
from hosts.test_placement import SMALL, expand

from llamaops.core.model import Model
from llamaops.core.plan import Plan, plan
from llamaops.core.profile import Profile, parse_profile
from llamaops.core.topology import Host
from llamaops.deploy import container
from llamaops.deploy.compose import render_compose
from llamaops.deploy.container import BASELINES, best_baseline, portable_profile, variables
from llamaops.deploy.kubernetes import advice, render_kubernetes, resource_name
from llamaops.deploy.site import container_user
from llamaops.deploy.systemd import render_unit
from llamaops.deploy.yaml_template import dump
from llamaops.errors import UsageError, WrongProfile
from llamaops.host import probe_host

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden")
VERSIONS = ("1.30", "1.37")
SECRET = "sk-0123456789abcdef"
COMPOSE = json.loads((package_files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())
QWEN = replace(SMALL, path="/var/cache/llamaops/models/qwen $HOME/${X} é.gguf", size_bytes=400_000_000)

CASES: dict[str, tuple[str, str, Model | None, tuple[str, ...]]] = {
    "two-cpus": ("quickstart", "cloud-2-vcpu", SMALL, ()),
    "desktop-keys": ("lan", "desktop-4c8t", None, ("memory.limit=2GiB",)),
    "board": ("low-memory", "arm-raspberry-pi-5", SMALL, ()),
    "hybrid": ("qwen2.5-0.5b", "hybrid-alder-lake", QWEN, ()),
    "real-time": ("qwen2.5-0.5b", "desktop-4c8t", QWEN, ("placement.policy=rr", "memory.lock=true")),
    "quota": ("quickstart", "container-cpus-4", SMALL, ("serve.api_keys={env: KEYS}",)),
    "numa": ("qwen2.5-0.5b", "numa-two-sockets", QWEN, ("placement.policy=batch",)),
    "path": ("quickstart", "lxc-proxmox", SMALL, ("model={source: 'path:models/it''s $A.gguf', quantize: Q4_K_M}",)),
}


@functools.cache
def machine(name: str) -> Host:
    with tempfile.TemporaryDirectory() as folder:
        expand(yaml.safe_load((ROOT / "tests/hosts" / f"{name}.yaml").read_text()), Path(folder))
        return probe_host(folder)


def profile_of(text: str, stem: str, *overrides: str) -> Profile:
    return parse_profile(text, stem=stem, base=Path("/etc/llamaops"), environ={}, overrides=overrides)


@functools.cache
def planned(case: str) -> tuple[Profile, str, Plan, Host, Model | None, tuple[str, ...]]:
    example, host, model, overrides = CASES[case]
    text = (ROOT / f"examples/{example}.yaml").read_text()
    profile = profile_of(text, example, *overrides)
    return profile, text, plan(profile, machine(host), model, None), machine(host), model, overrides


@functools.cache
def compose(case: str) -> dict[str, str]:
    profile, text, decided, host, model, overrides = planned(case)
    return render_compose(profile, text, decided, host, model, user="1000:1000", folder="/srv/llamaops", source=None,
                          overrides=overrides)


@functools.cache
def kubernetes(case: str) -> dict[str, str]:
    profile, text, decided, host, _, overrides = planned(case)
    if profile.serve.api_keys is None:
        overrides = (*overrides, "serve.allow_insecure=true")
        profile = profile.model_copy(update={"serve": profile.serve.model_copy(update={"allow_insecure": True})})
    return render_kubernetes(profile, text, decided, baseline=best_baseline(host), from_source=False,
                             overrides=overrides)


@functools.cache
def unit(case: str) -> str:
    profile, _, decided, host, model, _ = planned(case)
    return render_unit(profile, decided, executable="/bin/true", profile_path="/etc/llamaops/q.yaml", user=False,
                       systemd_version=252, offline=model is not None, cgroup_version=host.cgroup.version)


def service(case: str) -> dict[str, Any]:
    return yaml.safe_load(compose(case)["compose.yaml"])["services"]["llamaops"]


def deployment(case: str) -> dict[str, Any]:
    return yaml.safe_load(kubernetes(case)["base/deployment.yaml"])


def pod(case: str) -> dict[str, Any]:
    return deployment(case)["spec"]["template"]["spec"]


def threads(words: list[str]) -> int:
    found = [int(word.rpartition("=")[2]) for word in words if word.startswith("placement.threads")]
    assert len(found) == 2
    return max(found)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["compose.yaml", "k8s.yaml", "unit.service"])
def test_files_are_as_agreed(case: str, kind: str) -> None:
    """After a wanted change: LLAMAOPS_WRITE_GOLDEN=1 pytest tests/deploy, and read the difference."""
    rendered = compose(case) if kind == "compose.yaml" else kubernetes(case)
    text = "".join(f"#=== {name}\n{content}" for name, content in rendered.items() if name.endswith(".yaml"))
    if kind == "unit.service":
        text = unit(case)
    path = GOLDEN / f"machine-{case}.{kind}" if kind == "service" else GOLDEN / f"{case}.{kind}"
    if os.environ.get("LLAMAOPS_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("baseline", ["x86-64-v3", "armv8.2-a"])
def test_the_image_is_as_agreed(baseline: str) -> None:
    text = container.image_files(baseline, from_source=False)["Dockerfile"]
    path = GOLDEN / f"{baseline}.Dockerfile"
    if os.environ.get("LLAMAOPS_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


# ---- the formats

@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_to_say_to_any_of_them(tmp_path: Path) -> None:
    paths = [tmp_path / f"llamaops-{case}.service" for case in CASES]
    for path, case in zip(paths, CASES, strict=True):
        path.write_text(unit(case))
    answer = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, timeout=120,
                            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("case", CASES)
def test_compose_accepts_it(case: str) -> None:
    jsonschema.Draft7Validator(COMPOSE).validate(yaml.safe_load(compose(case)["compose.yaml"]))


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_it(version: str) -> None:
    for case in CASES:
        kinds = set()
        for name, text in kubernetes(case).items():
            document = yaml.safe_load(text) if name.endswith(".yaml") else {}
            kind = document.get("kind")
            if kind and kind not in ("Kustomization", "Component", "ServiceMonitor"):
                kubernetes_validate.validate(document, version, strict=True)
                kinds.add(kind)
        assert kinds == {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler"}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_kustomize_builds_it_with_every_component(tmp_path: Path) -> None:
    for name, text in kubernetes("desktop-keys").items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("components: []", "components:").replace("#  - comp", "  - comp"))
    answer = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, timeout=120,
                            check=False)
    assert answer.returncode == 0, answer.stderr
    built = {document["kind"]: document for document in yaml.safe_load_all(answer.stdout)}
    assert {"ConfigMap", "ServiceMonitor", "HorizontalPodAutoscaler"} < set(built)
    spec = built["Deployment"]["spec"]
    assert "replicas" not in spec and spec["template"]["spec"]["containers"][0]["image"].startswith("llamaops:0")
    assert built["ConfigMap"]["metadata"]["name"] in str(spec["template"]["spec"]["volumes"])


@pytest.mark.parametrize("case", CASES)
def test_the_profile_inside_is_one(case: str) -> None:
    for rendered in (compose(case)["profile.yaml"], kubernetes(case)["base/profile.yaml"]):
        inside = parse_profile(rendered, stem="x", base=Path("/"), environ={})
        assert (inside.name, inside.serve.host, inside.serve.port) == (planned(case)[0].name, "0.0.0.0", 8080)
        assert inside.engine.path == container.ENGINE and inside.model.context == planned(case)[0].model.context


# ---- what a plan demands

@pytest.mark.parametrize("case", CASES)
def test_no_limit_of_cpus_stands_without_matching_threads(case: str) -> None:
    made, decided = service(case), planned(case)[2]
    assert threads(made["command"]) <= made["cpus"]
    listed = sum(1 for _ in re.finditer(r"\d+", made.get("cpuset", "")))
    assert ("cpuset" in made) == (decided.placement.cpus is not None) and listed != 1
    for one in pod(case)["initContainers"] + pod(case)["containers"]:
        assert one["resources"]["requests"] == one["resources"]["limits"]
        assert isinstance(one["resources"]["limits"]["cpu"], int)
    (main,) = pod(case)["containers"]
    assert threads(main["args"]) == main["resources"]["limits"]["cpu"] - 1


def test_a_quota_of_this_machine_holds_in_the_container() -> None:
    assert service("quota")["cpus"] == 4.0 and threads(service("quota")["command"]) == 4
    profile, text, decided, host, model, _ = planned("quota")
    half = replace(host, cgroup=replace(host.cgroup, quota_cpus=4.5))
    made = render_compose(profile, text, decided, half, model, user="1:1", folder="/x", source=None)
    assert "cpus: 4.5" in made["compose.yaml"]


@pytest.mark.parametrize("case", CASES)
def test_rights_are_given_only_where_planned(case: str) -> None:
    made, placed = service(case), planned(case)[2].placement
    real_time = placed.policy in ("fifo", "rr")
    assert made.get("cap_add", []) == (["SYS_NICE"] if real_time else [])
    assert made.get("ulimits", {}).get("rtprio") == ((placed.rt_priority or 0) + 1 if real_time else None)
    assert made["cap_drop"] == ["ALL"] and made["read_only"] and made["security_opt"] == ["no-new-privileges:true"]
    assert ("cpu_shares" in made) == (placed.policy != "batch")
    assert not made["user"].startswith("0")
    (main,) = pod(case)["containers"]
    assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod(case)["securityContext"]["runAsNonRoot"] and pod(case)["securityContext"]["runAsUser"] > 0
    assert "placement.policy" not in str(main["args"])


def test_real_time_is_kept_in_compose_and_left_out_of_pods() -> None:
    profile, _, decided, *_ = planned("real-time")
    assert decided.placement.policy == "rr"
    assert yaml.safe_load(compose("real-time")["profile.yaml"])["placement"]["policy"] == "rr"
    assert yaml.safe_load(kubernetes("real-time")["base/profile.yaml"])["placement"]["policy"] == "auto"
    assert service("real-time")["ulimits"]["memlock"] == -1
    assert any("real time" in line for line in advice(profile, decided))


@pytest.mark.parametrize("case", CASES)
def test_probes_never_generate_and_fit_the_model(case: str) -> None:
    (main,) = pod(case)["containers"]
    paths = {kind: main[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/healthz"}
    profile, _, decided, *_ = planned(case)
    startup = main["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= profile.supervise.start_timeout_s
    huge = replace(decided, memory=replace(decided.memory, weights_bytes=40 << 30, total_bytes=41 << 30))
    insecure = profile_of("model: {source: 'wheel:a==1'}\nserve: {allow_insecure: true}", "x")
    slow = render_kubernetes(insecure, "{}", huge, baseline="armv8-a", from_source=False)
    later = yaml.safe_load(slow["base/deployment.yaml"])["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert later["failureThreshold"] * 5 > 40 * 1024 / 25
    assert "/healthz" in str(service(case)["healthcheck"]["test"])


def test_the_stop_leaves_time_to_drain() -> None:
    profile = profile_of("model: {source: 'wheel:a==1'}\nsupervise: {drain_timeout_s: 100, stop_grace_s: 20.5}", "x",
                         "serve.allow_insecure=true", "memory.limit=1GiB")
    decided = plan(profile, machine("desktop-4c8t"), None, None)
    made = render_compose(profile, "{}", decided, Host(), None, user="1:1", folder="/x", source=None)
    assert "stop_grace_period: \"131s\"" in made["compose.yaml"]
    tree = render_kubernetes(profile, "{}", decided, baseline="x86-64-v3", from_source=False)
    assert "terminationGracePeriodSeconds: 136" in tree["base/deployment.yaml"]


def test_the_model_is_mounted_where_it_is_here_and_fetched_where_not() -> None:
    (volume,) = service("hybrid")["volumes"]
    assert (volume["type"], volume["read_only"]) == ("bind", True) and "--offline" in service("hybrid")["command"]
    inside = parse_profile(compose("hybrid")["profile.yaml"], stem="x", base=Path("/"), environ={})
    assert inside.model.source == f"path:{compose_expands(volume['target'])}" and inside.model.quantize is None
    (fetched,) = service("desktop-keys")["volumes"]
    assert fetched["type"] == "volume" and "--offline" not in service("desktop-keys")["command"]
    assert pod("hybrid")["initContainers"][0]["args"][:2] == ["model", "pull"]
    assert "--offline" in pod("hybrid")["containers"][0]["args"]
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod("path")["volumes"] if "persistentVolumeClaim" in v]
    assert claims == ["llamaops-quickstart-models"]


def test_a_matrix_of_this_machine_goes_only_where_the_model_is_made_already() -> None:
    by_file = ("model.quantize=Q4_0", "model.imatrix=m.gguf", "model.tensor_types={attn_v: Q8_0}")
    text = (ROOT / "examples/quickstart.yaml").read_text()
    profile = profile_of(text, "quickstart", "serve.allow_insecure=true", *by_file)
    host = machine("desktop-4c8t")

    def compose_file(model: Model | None) -> str:
        return render_compose(profile, text, plan(profile, host, SMALL, None), host, model, user="1:1", folder="/x",
                              source=None, overrides=by_file)["profile.yaml"]

    inside = parse_profile(compose_file(SMALL), stem="x", base=Path("/"), environ={}).model
    assert (inside.quantize, inside.imatrix, inside.tensor_types) == (None, None, {})
    with pytest.raises(WrongProfile, match=r"/etc/llamaops/m\.gguf is a file of this machine"):
        compose_file(None)
    with pytest.raises(WrongProfile, match="does not have this importance matrix"):
        render_kubernetes(profile, text, plan(profile, host, SMALL, None), baseline="x86-64-v3", from_source=False)


# ---- components of a cluster that has more

@pytest.mark.parametrize("case", CASES)
def test_prometheus_finds_the_pods_and_the_autoscaler_names_metrics_that_exist(case: str) -> None:
    tree = {name: yaml.safe_load(text) for name, text in kubernetes(case).items() if name.endswith(".yaml")}
    monitor = tree["components/monitoring/monitor.yaml"]
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "ServiceMonitor")
    service, (endpoint,) = tree["base/service.yaml"], monitor["spec"]["endpoints"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["path"] == "/metrics" and endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert ("authorization" in endpoint) == (planned(case)[0].serve.api_keys is not None)
    if secret := endpoint.get("authorization", {}).get("credentials"):
        said = " ".join(advice(planned(case)[0], planned(case)[2]))
        assert secret["name"] in said and f"--from-file={secret['key']}=" in said

    scaler = tree["components/autoscaling/autoscaler.yaml"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == deployment(case)["metadata"]["name"]
    named = {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]}
    assert named == {"llamaops_queue_depth", "llamaops_requests_in_flight"}
    known = (ROOT / "templates/grafana/dashboard.json").read_text() + (ROOT / "docs/operations.md").read_text()
    assert all(name in known for name in named)
    assert scaler["minReplicas"] <= scaler["maxReplicas"]


def test_pods_spread_over_nodes_and_leave_one_at_a_time() -> None:
    tree = kubernetes("two-cpus")
    (term,) = pod("two-cpus")["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    labels = deployment("two-cpus")["spec"]["template"]["metadata"]["labels"]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    budget = yaml.safe_load(tree["base/disruption.yaml"])["spec"]
    policy = yaml.safe_load(tree["base/network.yaml"])["spec"]
    for selector in (term["podAffinityTerm"]["labelSelector"], budget["selector"], policy["podSelector"]):
        assert selector["matchLabels"].items() <= labels.items()
    assert budget["maxUnavailable"] == 1 and set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert deployment("two-cpus")["spec"]["replicas"] >= 2


# ---- secrets

def test_secrets_are_named_and_never_copied(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text(f"ana:{SECRET}\n")
    text = f"model: {{source: 'wheel:a==1'}}\nserve: {{host: 0.0.0.0, api_keys: {{file: {keys}}}}}\n" \
           "engine: {env: {HF_TOKEN: '${HF_TOKEN}'}}\nmemory: {limit: 1GiB}"
    profile = parse_profile(text, stem="x", base=tmp_path, environ={"HF_TOKEN": SECRET})
    decided = plan(profile, machine("desktop-4c8t"), None, None)
    made = render_compose(profile, text, decided, Host(), None, user="1:1", folder="/x", source=None)
    tree = render_kubernetes(profile, text, decided, baseline="x86-64-v3", from_source=False)
    assert SECRET not in "".join([*made.values(), *tree.values(), *advice(profile, decided)])
    assert str(keys) in made["compose.yaml"] and "llamaops-x-keys" in tree["base/deployment.yaml"]
    assert variables(made["profile.yaml"]) == ["HF_TOKEN"]


@pytest.mark.parametrize("overrides", [("engine.env={A: b}",), (" engine.args=[--x]",)])
def test_overrides_that_may_hide_a_secret_are_refused(overrides: tuple[str, ...]) -> None:
    profile, text, decided, host, model, _ = planned("two-cpus")
    with pytest.raises(UsageError, match="for all to read"):
        render_compose(profile, text, decided, host, model, user="1:1", folder="/x", source=None, overrides=overrides)


def test_a_secret_written_out_in_the_profile_is_refused() -> None:
    profile, _, decided, host, model, _ = planned("two-cpus")
    text = f"model: {{source: 'wheel:a==1'}}\nengine: {{env: {{HF_TOKEN: {SECRET}}}}}"
    with pytest.raises(UsageError, match="made to be shared") as caught:
        render_compose(profile, text, decided, host, model, user="1:1", folder="/x", source=None)
    assert SECRET not in str(caught.value)


def test_a_cluster_is_not_served_by_accident() -> None:
    profile, text, decided, *_ = planned("two-cpus")
    with pytest.raises(WrongProfile, match="who may call"):
        render_kubernetes(profile, text, decided, baseline="x86-64-v3", from_source=False)
    published = service("two-cpus")["ports"][0]
    assert (published["host_ip"], published["target"]) == ("127.0.0.1", 8080)


def test_a_container_is_not_made_for_a_certificate() -> None:
    profile = profile_of("model: {source: 'wheel:a==1'}\nserve: {allow_insecure: true, tls: {cert: c, key: k}}", "x",
                         "memory.limit=1GiB")
    decided = plan(profile, machine("desktop-4c8t"), None, None)
    with pytest.raises(WrongProfile, match="plain http"):
        render_compose(profile, "{}", decided, Host(), None, user="1:1", folder="/x", source=None)
    with pytest.raises(WrongProfile, match="plain http"):
        render_kubernetes(profile, "{}", decided, baseline="x86-64-v3", from_source=False)


def test_memory_must_be_known_for_a_pod() -> None:
    profile = profile_of("model: {source: 'wheel:a==1'}\nserve: {allow_insecure: true}", "x")
    decided = plan(profile, machine("desktop-4c8t"), None, None)
    with pytest.raises(WrongProfile, match="memory"):
        render_kubernetes(profile, "{}", decided, baseline="x86-64-v3", from_source=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_container_runs_as_somebody_who_can_read_and_never_as_root(tmp_path: Path) -> None:
    keys, weights = tmp_path / "keys", tmp_path / "m.gguf"
    profile = profile_of(f"model: {{source: 'path:{weights}'}}\nserve: {{api_keys: {{file: '{keys}'}}}}", "x")
    model = replace(SMALL, path=str(weights))
    ours = f"{container.UID}:{container.UID}"
    assert container_user(profile, model) == ours
    for path in (keys, weights):
        path.write_text("")
        path.chmod(0o644)
    assert container_user(profile, model) == ours  # though the folder is root's alone
    keys.chmod(0o600)
    with pytest.raises(UsageError, match="could not read") as caught:
        container_user(profile, model)
    subprocess.run(["sh", "-c", caught.value.fix or "false"], check=True)
    assert container_user(profile, model) == ours
    os.chown(keys, 1234, 99)
    keys.chmod(0o400)
    assert container_user(profile, model) == "1234:99"


# ---- text

def hostile_words(count: int) -> list[str]:
    rng = random.Random(8)
    pieces = ["$", "$$", "${HOME}", "$(A)", "%", '"', "'", "\\", "\n", "\t", ": ", " #", "- ", "{", "}", "[", "]", "&",
              "*", "!", "|", ">", "%", "@", "`", ",", "?", "yes", "y", "null", "~", "0x1", "1e3", "0o7", "1:30", "é",
              "漢", "😀", "\u2028", "\x85", "\x7f", "\x00", "\ufeff", " ", "a", "-", "=", "<<", "---", "..."]
    return ["".join(rng.choices(pieces, k=rng.randint(0, 5))) for _ in range(count)]


@pytest.mark.parametrize("flow", [True, False])
def test_a_thousand_hostile_words_come_back_as_they_were(flow: bool) -> None:
    words = hostile_words(1000)
    value = {"words": words, **{word: word for word in words}}
    text = dump(value, flow=flow)
    assert text.isascii() and (not flow or text.count("\n") == 1)
    assert yaml.load(text, Loader=yaml.CSafeLoader) == value
    assert ruamel.yaml.YAML(typ="safe", pure=True).load(io.StringIO(dump(words[:200], flow=flow))) == words[:200]


def compose_expands(text: str) -> str:
    """Undo what Compose would expand; a variable that is left would be looked up."""
    assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)[A-Za-z_{]", text), text
    return text.replace("$$", "$")


def test_hostile_paths_reach_compose_as_they_are() -> None:
    profile, text, decided, host, model, _ = planned("two-cpus")
    assert model
    for word in hostile_words(40):
        path = f"/srv/{word}x/m.gguf".replace("\x00", "")
        made = render_compose(profile, text, decided, host, replace(model, path=path), user="1:1", folder=path,
                              source=path)
        document = yaml.safe_load(made["compose.yaml"])["services"]["llamaops"]
        assert compose_expands(document["volumes"][0]["source"]) == path
        assert compose_expands(document["build"]["context"]) == path


def test_hostile_text_in_the_profile_stays_text() -> None:
    profile = planned("two-cpus")[0]
    for word in hostile_words(60):
        pinned = {"model.source": f"path:/m/{word}"}
        made = yaml.safe_load(portable_profile("{}", profile, pinned))
        assert made["model"]["source"].replace("$${", "${") == pinned["model.source"]


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(WrongProfile, match="can't hold"):
        dump("/srv/\udcff")


def test_names_of_objects_are_dns_labels() -> None:
    profile = planned("two-cpus")[0]
    names = [resource_name(profile.model_copy(update={"name": name})) for name in ("a", "a-", "q" * 63, "q" * 62 + "r")]
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])", name) for name in names)


def test_a_baseline_is_one_that_the_machine_has() -> None:
    for name, line in BASELINES.items():
        assert best_baseline(Host(machine=line.machine, isa=line.needs)) == name
    assert best_baseline(Host()) == "x86-64-v3"
    assert best_baseline(Host(machine="x86_64", isa=BASELINES["x86-64-v4"].needs - {"avx512vl"})) == "x86-64-v3"


def test_every_definition_is_one_of_the_engine() -> None:
    """A definition that llama.cpp renamed would leave the build to guess: keep the names in one place."""
    known = {"GGML_SSE42", "GGML_AVX", "GGML_AVX2", "GGML_BMI2", "GGML_FMA", "GGML_F16C", "GGML_AVX512",
             "GGML_CPU_ARM_ARCH"}
    assert {name for line in BASELINES.values() for name in line.cmake} == known
