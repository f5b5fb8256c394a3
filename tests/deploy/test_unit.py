"""Rendered units: golden files, what systemd itself reads in them, and what depends on the place they run in."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamaops.core.cpuset import CpuSet
from llamaops.core.memory import Memory
from llamaops.core.plan import Placement, Plan, Serving
from llamaops.core.profile import Profile, parse_profile
from llamaops.deploy.site import deploy_unit, readable_by_all, systemd_version
from llamaops.deploy.systemd import (
    HOST_TUNE,
    escape_exec,
    escape_path,
    escape_value,
    render_host_tune,
    render_unit,
    unit_name,
)
from llamaops.errors import UsageError, WrongProfile

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden")
SYSTEMD = Path("/lib/systemd/systemd")
needs_analyze = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
needs_systemd = pytest.mark.skipif(not SYSTEMD.exists() or not shutil.which("setpriv"),
                                   reason="systemd or setpriv is not installed")

PLACEMENT = Placement(
    threads=4, threads_batch=4, cpus=CpuSet.parse("4-7"), batch_cpus=CpuSet.parse("4-7"),
    housekeeping_cpus=CpuSet.parse("0-3"), policy="other", rt_priority=None, nice=-10, autogroup_nice=-10, weight=None,
    relay_nice=-10, spin=1000, numa=None, mem_nodes=None)
MEMORY = Memory(weights_bytes=98 << 20, kv_bytes=90 << 20, compute_bytes=40 << 20, prompt_cache_bytes=64 << 20,
                total_bytes=300 << 20, available_bytes=8 << 30)
PLAN = Plan(PLACEMENT, Serving(slots=2, context=4096, batch=512, ubatch=64, kv_type_k="f16", kv_type_v="f16"), MEMORY,
            usable_cpus=CpuSet.parse("0-8"), capacity_cpus=8.0, reasons=(), notes=())
REAL_TIME = replace(PLAN, memory=replace(MEMORY, lock=True), placement=replace(
    PLACEMENT, policy="fifo", rt_priority=10, nice=None, autogroup_nice=None, relay_nice=-15))
HOSTILE = "/srv/modèles 漢字/a $HOME %h; (x)"


def example(name: str, text: str = "", *overrides: str) -> Profile:
    path = ROOT / "examples" / f"{name}.yaml"
    text = path.read_text() + text
    return parse_profile(text, stem=name, base=Path("/etc/llamaops"), environ={}, overrides=overrides)


def render(profile: Profile | None = None, plan: Plan = PLAN, **site: Any) -> str:
    site = {"executable": "/opt/llamaops/bin/llamaops", "profile_path": "/etc/llamaops/q.yaml", "user": False,
            "systemd_version": 252, **site}
    return render_unit(profile or example("quickstart"), plan, **site)


CASES: dict[str, tuple[Profile, Plan, dict[str, Any]]] = {
    "quickstart": (example("quickstart"), PLAN, {"engine_path": "/usr/local/bin/llama-server", "cgroup_version": 2}),
    "lan-user": (example("lan"), PLAN, {
        "user": True, "cache": "/home/ana/.cache/llamaops", "offline": True, "profile_path": "/home/ana/lan.yaml",
        "executable": "/home/ana/.venv/bin/llamaops"}),
    "real-time": (example("qwen2.5-0.5b", "  api_keys: {env: QWEN_KEYS}\n", "serve.port=80"), REAL_TIME, {
        "systemd_version": 257, "run_as": "ana", "cache": "/home/ana/my cache", "offline": True,
        "executable": f"{HOSTILE}/llamaops", "profile_path": f"{HOSTILE}/\"q\\.yaml",
        "engine_path": f"{HOSTILE}/llama-server", "overrides": ["engine.args=[--jinja]", "name=rt"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_units_are_as_agreed(name: str) -> None:
    """After a wanted change: LLAMAOPS_WRITE_GOLDEN=1 pytest tests/deploy, and read the difference."""
    profile, plan, site = CASES[name]
    path, text = GOLDEN / f"{name}.service", render(profile, plan, **site)
    if os.environ.get("LLAMAOPS_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def values(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


@needs_analyze
@pytest.mark.parametrize("name", CASES)
def test_systemd_finds_nothing_to_say(name: str, tmp_path: Path) -> None:
    program = tmp_path / HOSTILE.removeprefix("/srv/") / "llamaops"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    profile, plan, site = CASES[name]
    unit = tmp_path / unit_name(profile)
    unit.write_text(render(profile, plan, **{**site, "executable": str(program), "systemd_version": systemd_version()}))
    manager = ["--user"] if site.get("user") else []
    answer = subprocess.run(["systemd-analyze", *manager, "verify", str(unit)], capture_output=True, text=True,
                            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, timeout=120, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


@needs_analyze
@pytest.mark.parametrize("text", [render(), render_host_tune("/bin/true", reads=(), writes=["/etc/default"])],
                         ids=["service", "host-tune"])
def test_units_are_well_fenced(text: str, tmp_path: Path) -> None:
    unit = tmp_path / "llamaops-x.service"
    unit.write_text(text)
    answer = subprocess.run(["systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", str(unit)],
                            capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stdout[-200:] + answer.stderr


@needs_analyze
def test_the_unit_of_host_tune_is_one(tmp_path: Path) -> None:
    program = tmp_path / HOSTILE.removeprefix("/srv/") / "llamaops"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    text = render_host_tune(str(program), reads=["/root/.pyenv"], writes=["/etc/default"])
    (tmp_path / HOST_TUNE).write_text(text)
    answer = subprocess.run(["systemd-analyze", "verify", str(tmp_path / HOST_TUNE)], capture_output=True, text=True,
                            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, timeout=60, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert values(text, "ExecStart")[0].endswith("host tune apply --yes")
    assert values(text, "ReadWritePaths") == ["-/etc/default"] and values(text, "ProtectHome") == ["read-only"]
    assert values(text, "StateDirectory") == ["llamaops-host"] and HOST_TUNE in values(render(), "After")[0]


def as_anybody() -> list[str]:
    """systemd refuses its test mode to root."""
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []


@pytest.fixture
def manager() -> Iterator[Any]:
    """Return a function that lets the installed systemd load a unit and gives back what it understood."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        runtime = folder / "run"
        runtime.mkdir(mode=0o777)
        if os.geteuid() == 0:
            os.chown(runtime, 65534, 65534)
        env = {"XDG_RUNTIME_DIR": str(runtime), "HOME": str(folder), "LANG": "C.UTF-8",
               "SYSTEMD_UNIT_PATH": f"{folder}:/usr/lib/systemd/user"}

        def load(text: str) -> str:
            (folder / "x.service").write_text(text, encoding="utf-8")
            answer = subprocess.run([*as_anybody(), SYSTEMD, "--test", "--user", "--unit=x.service"], env=env,
                                    capture_output=True, text=True, timeout=120, check=False)
            found = re.search(r"-> Unit x\.service:\n(.*?)(?=\n[ \t]*-> Unit |\Z)", answer.stdout, re.DOTALL)
            if not found:
                pytest.skip(f"systemd's test mode does not run here: {answer.stderr.strip()[-200:]}")
            return found[1]

        yield load


def shell_words(text: str) -> list[str]:
    """Undo the quoting of systemd's own dump: words in double quotes, backslashes before what a shell would expand."""
    words = re.findall(r'"((?:[^"\\]|\\.)*)"(?= |$)|([^ ]+)', text)
    return [bare or re.sub(r"\\(.)", r"\1", quoted) for quoted, bare in words]


def started(line: str) -> list[str]:
    """Return argv as the dump shows it, with ``$$`` replaced as it is when the command starts."""
    program, *words = shell_words(line)
    if "$" in program:
        return [program, *words]
    assert all(len(run) % 2 == 0 for word in words for run in re.findall(r"\$+", word)), "a variable would be expanded"
    return [program, *(word.replace("$$", "$") for word in words)]


def hostile_words(count: int) -> list[str]:
    rng = random.Random(20)
    pieces = ["$", "$$", "${HOME}", "$HOME", "%", "%%", "%h", "%i", '"', "'", "\\", "\\\\", "\\n", "\\x41", ";", " ",
              "#", "a", "Z", "0", "-", "@", "=", "é", "漢", "😀", "{", "}", "*", "&", "|", "~", "`", "!", "\u2028"]
    return ["".join(rng.choices(pieces, k=rng.randint(0, 6))) for _ in range(count)]


@needs_systemd
def test_a_thousand_hostile_words_reach_the_program_as_they_are(manager: Any) -> None:
    words = hostile_words(1000)
    commands = [[f"/opt/{i}", *words[i : i + 5]] for i in range(0, 1000, 5)]
    commands += [[f"/opt/{word}x", "$A", "%h"] for word in words if not re.search(r"[\"'\\]", word)]
    text = "[Service]\nType=oneshot\n" + "".join(f"ExecStart={escape_exec(argv)}\n" for argv in commands)
    dump = manager(text)
    lines = re.findall(r"Command Line: (.*)", dump)
    assert [started(line) for line in lines] == commands


@needs_systemd
def test_values_and_paths_reach_systemd_as_they_are(manager: Any) -> None:
    words = [word for word in hostile_words(200) if word and "\u2028" not in word]
    paths = []
    for word in words:
        try:
            paths.append((f"/p/{word}x", escape_path(f"/p/{word}x")))
        except WrongProfile:
            continue
    assert len(paths) > 50
    text = "[Service]\nType=oneshot\nExecStart=/bin/true\n"
    text += "".join(f"Environment={escape_value(f'K{i}={word}')}\n" for i, word in enumerate(words))
    dump = manager(text + "".join(f"ReadWritePaths={escaped}\n" for _, escaped in paths))
    assert re.findall(r"^\s*Environment: (.*)$", dump, re.MULTILINE) == [f"K{i}={w}" for i, w in enumerate(words)]
    (named,) = re.findall(r"^\s*ReadWritePaths: (.*)$", dump, re.MULTILINE)
    assert named == " ".join(path for path, _ in paths)


@needs_systemd
def test_systemd_understands_the_unit_as_planned(manager: Any) -> None:
    profile, plan, site = CASES["lan-user"]
    dump = manager(render(profile, plan, **site))
    for line in ("Type: notify", "KillMode: mixed", "Restart: on-failure", "NotifyAccess: main", "OOMPolicy: continue",
                 "TimeoutStartSec: infinity", "TimeoutStopSec: 50s", "CPUWeight: 10000", "MemorySwapMax: 0",
                 f"MemoryMax: {601 << 20}", "LockPersonality: yes"):
        assert re.search(rf"^\s*{re.escape(line)}$", dump, re.MULTILINE), line
    assert "Environment: LLAMAOPS_CACHE=/home/ana/.cache/llamaops" in dump


def test_the_unit_follows_the_plan() -> None:
    text = render(cgroup_version=2)
    assert values(text, "ExecStart") == ["/opt/llamaops/bin/llamaops up /etc/llamaops/q.yaml --no-build"]
    assert values(text, "AllowedCPUs") == ["0-7"] and not values(text, "CPUAffinity")
    assert values(text, "CPUWeight") == ["10000"]
    assert values(text, "Nice") == values(text, "LimitNICE") == ["-10"]
    assert values(text, "MemoryMax") == ["601M"] and values(text, "MemorySwapMax") == ["0"]
    assert values(text, "RestartPreventExitStatus") == ["2 77 78"]
    for kind in ("Runtime", "Cache", "State"):
        assert values(text, f"{kind}Directory") == ["llamaops"]
    assert text.index("StartLimitBurst") < text.index("[Service]") < text.index("RestrictRealtime=yes")
    assert "$" not in re.sub(r"^(#.*|ExecReload=.*)$", "", text, flags=re.MULTILINE)


def test_cpus_of_the_unit_leave_room_for_the_relay() -> None:
    shared = replace(PLAN, placement=replace(PLACEMENT, housekeeping_cpus=None))
    assert values(render(plan=shared), "AllowedCPUs") == ["0-8"]
    free = replace(PLAN, placement=replace(PLACEMENT, cpus=None, batch_cpus=None))
    assert not values(render(plan=free), "AllowedCPUs")
    assert values(render(cgroup_version=1), "CPUAffinity") == ["0-7"]


def test_real_time_is_allowed_only_where_planned() -> None:
    text = render(plan=REAL_TIME)
    assert not values(text, "RestrictRealtime") and values(text, "LimitRTPRIO") == ["11"]
    assert values(text, "LimitMEMLOCK") == ["infinity"]
    mine = render(plan=REAL_TIME, user=True)
    assert not values(mine, "LimitRTPRIO") and not values(mine, "LimitMEMLOCK") and not values(mine, "Nice")
    assert not values(mine, "User") and values(mine, "WantedBy") == ["default.target"]


@pytest.mark.parametrize("numa", ["bind", "interleave"])
def test_memory_comes_from_the_planned_nodes(numa: Any) -> None:
    nodes = replace(PLAN, placement=replace(PLACEMENT, numa=numa, mem_nodes=CpuSet.parse("0,2-3")))
    assert values(render(plan=nodes), "NUMAPolicy") == [numa] and values(render(plan=nodes), "NUMAMask") == ["0,2-3"]
    assert not values(render(), "NUMAPolicy") and not values(render(), "NUMAMask")


def test_a_batch_plan_does_not_push_others_aside() -> None:
    assert not values(render(plan=replace(PLAN, placement=replace(PLACEMENT, policy="batch"))), "CPUWeight")


def test_newer_systemd_gets_a_growing_delay() -> None:
    given = {version: bool(values(render(systemd_version=version), "RestartSteps")) for version in (None, 253, 254)}
    assert given == {None: False, 253: False, 254: True}


def test_the_memory_limit_is_the_profiles_or_the_plans_or_none() -> None:
    assert values(render(example("low-memory")), "MemoryMax") == ["768M"]
    unknown = replace(PLAN, memory=replace(MEMORY, weights_bytes=0, total_bytes=0))
    assert not values(render(plan=unknown), "MemoryMax")


@pytest.mark.parametrize(("site", "home", "tmp"), [
    ({}, "yes", "yes"),
    ({"profile_path": "/home/ana/q.yaml"}, "read-only", "yes"),
    ({"reads": ["/root/.pyenv"]}, "read-only", "yes"),
    ({"engine_path": "/tmp/llama-server"}, "yes", "no"),
    ({"cache": "/var/tmp/cache"}, "yes", "no"),
    ({"profile_path": "/homework/tmp/q.yaml"}, "yes", "yes"),
])
def test_the_sandbox_hides_nothing_that_is_needed(site: dict[str, Any], home: str, tmp: str) -> None:
    text = render(**site)
    assert (values(text, "ProtectHome"), values(text, "PrivateTmp")) == ([home], [tmp])


def test_paths_are_plain_where_systemd_wants_them_plain() -> None:
    text = render(reads=["/etc/llamaops/../models/m.gguf", "/var/../root/x"])
    assert values(text, "RequiresMountsFor") == ["/etc/llamaops", "/etc/models", "/opt/llamaops/bin", "/root"]
    assert values(text, "ProtectHome") == ["read-only"]


def test_a_low_port_gets_the_one_capability_it_needs() -> None:
    low = render(example("quickstart", "", "serve.port=443"))
    assert values(low, "AmbientCapabilities") == values(low, "CapabilityBoundingSet") == ["CAP_NET_BIND_SERVICE"]
    assert values(render(), "AmbientCapabilities") == values(render(), "CapabilityBoundingSet") == [""]


def test_keys_from_the_environment_come_from_a_file_of_their_own() -> None:
    profile = example("quickstart", "  api_keys: {env: KEYS}\n")
    assert values(render(profile), "EnvironmentFile") == ["/etc/llamaops/quickstart.env"]
    assert values(render(), "EnvironmentFile") == ["-/etc/llamaops/quickstart.env"]
    assert unit_name(profile) == "llamaops-quickstart.service"


def test_a_dynamic_user_is_handed_the_private_key_file() -> None:
    profile = example("quickstart", "  api_keys: {file: /root/my 100% keys.txt}\n")
    text = render(profile)
    assert values(text, "LoadCredential") == ["api_keys:/root/my 100%% keys.txt"]
    assert "--set serve.api_keys.file=$${CREDENTIALS_DIRECTORY}/api_keys" in text.replace('"', "")
    assert values(text, "ProtectHome") == ["yes"]
    for site in ({"run_as": "ana"}, {"user": True}):
        assert not values(render(profile, **site), "LoadCredential")
        assert "CREDENTIALS" not in render(profile, **site)
    with pytest.raises(WrongProfile):
        render(example("quickstart", "  api_keys: {file: 'keys '}\n"))


def test_a_dynamic_user_is_handed_the_certificate_and_its_key() -> None:
    profile = example("quickstart", "  tls: {cert: /etc/tls/c.pem, key: /root/k.pem}\n")
    text = render(profile)
    assert values(text, "LoadCredential") == ["tls_cert:/etc/tls/c.pem", "tls_key:/root/k.pem"]
    for part in ("cert", "key"):
        assert f"--set serve.tls.{part}=$${{CREDENTIALS_DIRECTORY}}/tls_{part}" in text.replace('"', "")
    assert "RequiresMountsFor=/etc/tls" in render(profile, run_as="ana").splitlines()


def test_the_key_file_of_the_credential_is_the_one_that_is_read() -> None:
    setting = "serve.api_keys.file=${CREDENTIALS_DIRECTORY}/api_keys"
    profile = parse_profile("model: {source: 'path:m'}", stem="x", base=Path("/etc"), overrides=[setting],
                            environ={"CREDENTIALS_DIRECTORY": "/run/credentials/x"})
    assert profile.serve.api_keys and profile.serve.api_keys.file == "/run/credentials/x/api_keys"


def test_reload_is_a_signal_that_systemd_waits_for() -> None:
    assert values(render(systemd_version=253), "Type") == ["notify-reload"]
    assert values(render(systemd_version=252), "Type") == ["notify"]
    assert values(render(systemd_version=252), "ExecReload") == ["/bin/kill -HUP $MAINPID"]


def test_a_pinned_engine_survives_yaml() -> None:
    profile_text = "model: {source: 'path:m'}"
    for engine in ("/usr/bin/llama-server", "/a b/${X}: #'\"é"):
        (line,) = values(render(engine_path=engine), "ExecStart")
        setting = shell_words(line.replace("$$", "$").replace("%%", "%"))[-1]
        profile = parse_profile(profile_text, stem="x", base=Path("/"), environ={}, overrides=[setting])
        assert profile.engine.path == engine


def test_readable_by_all(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "file").write_text("")
        (folder / "link").symlink_to("file")
        folder.chmod(0o755)
        (folder / "file").chmod(0o644)
        assert readable_by_all(folder / "file") and readable_by_all(folder / "link") and readable_by_all(folder)
        (folder / "file").chmod(0o640)
        assert not readable_by_all(folder / "link") and not readable_by_all(folder / "none")
        (folder / "file").chmod(0o644)
        folder.chmod(0o700)
        assert not readable_by_all(folder / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root renders for a dynamic user")
def test_a_dynamic_user_is_used_only_where_it_sees_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its /tmp and /var/tmp are its own, whatever the unit says."""
    monkeypatch.setattr("llamaops.deploy.site.readable_by_all", lambda path: True)
    monkeypatch.setattr("llamaops.deploy.site.find_executable", lambda: Path("/opt/llamaops/bin/llamaops"))
    monkeypatch.setattr("llamaops.deploy.site._PYTHON", ("/opt/llamaops",))
    for profile_path, user in (("/etc/q.yaml", "llamaops"), ("/var/tmp/q.yaml", "root"), ("/tmp/q.yaml", "root")):
        unit = deploy_unit(example("quickstart"), PLAN, None, None, Path(profile_path), user=False, environ={})
        assert values(unit.text, "User") == [user] and ("DynamicUser=yes" in unit.text) == (user == "llamaops")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try what another account may read")
def test_a_named_account_must_be_able_to_read_what_the_unit_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr("llamaops.deploy.site.find_executable", lambda: Path("/bin/true"))
        monkeypatch.setattr("llamaops.deploy.site._PYTHON", ())
        Path(name).chmod(0o755)
        path, keys = Path(name, "q.yaml"), Path(name, "keys")
        for file in (path, keys):
            file.write_text("")
            file.chmod(0o600)
        profile = example("quickstart", f"  api_keys: {{file: {keys}}}\n")

        def rendered(account: str = "nobody", user: bool = False) -> str:
            return deploy_unit(profile, PLAN, None, None, path, user=user, run_as=account, environ={}).text

        for file in (path, keys):
            with pytest.raises(UsageError, match="nobody can't read") as caught:
                rendered()
            assert str(file) in str(caught.value)
            shutil.chown(file, "nobody")
        text = rendered()
        assert values(text, "User") == ["nobody"] and not values(text, "DynamicUser")
        assert not values(text, "LoadCredential") and values(text, "CacheDirectory") == ["llamaops-nobody"]
        with pytest.raises(UsageError, match="no such account"):
            rendered("nobody-of-that-name")
        with pytest.raises(UsageError, match="own manager"):
            rendered(user=True)
