"""Units really run by a systemd: installed, ready, reloaded, watched, restarted behind their socket, taken away."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nested_systemd import Nested, Unsupported
from running import QUICKSTART

from llamaops.dirs import find_dirs

LLAMAOPS = Path(sys.executable).with_name("llamaops")
PROFILE = "/etc/llamaops/quickstart.yaml"
UNIT = "llamaops-quickstart.service"
SOCKET = "llamaops-quickstart.socket"
HOST_TUNE = "llamaops.host-tune.service"
PROGRAM = """#!/opt/llamaops/venv/bin/python
import sys
sys.path.insert(0, "/opt/llamaops/checkout")
from llamaops.cli import main
main()
"""
SECRET = "sk-0123456789abcdef"
ENGINE = "^[^ ]*/llama-server -m"  # what pgrep compares with whole command lines, its caller's included
ASK = """
import json, sys, time, urllib.error, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}).encode()
url = "http://127.0.0.1:8080/v1/chat/completions"
headers = {"Content-Type": "application/json", **{"Authorization": f"Bearer {key}" for key in sys.argv[1:]}}
request = urllib.request.Request(url, body, headers)
for _ in range(100):
    try:
        print(json.load(urllib.request.urlopen(request, timeout=120))["usage"]["completion_tokens"])
        break
    except urllib.error.HTTPError as exc:  # as clients do while the model loads; a refused connection is a failure
        if exc.code not in (502, 503):
            print(exc.code)
            break
        time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def nested(model_path: str) -> Iterator[Nested]:
    needed = [QUICKSTART.parents[1], Path(sys.prefix), Path(sys.base_prefix), find_dirs(os.environ).cache]
    try:
        nested = Nested(needed)
    except Unsupported as exc:
        pytest.skip(f"no nested systemd here: {exc}")
    try:
        nested.run("mkdir", "-p", "/etc/llamaops")
        yield nested
    finally:
        nested.stop()


@pytest.fixture(scope="module")
def installed(nested: Nested, model_path: str, engine_path: str) -> str:
    """Put llamaops where everybody may run it, as a service wants it; checkouts often lie where only root may look.

    A program of its own in /opt, over this Python and this checkout, and the engine on PATH.
    """
    for path in (sys.base_prefix, model_path, engine_path):
        for folder in Path(path).parents:
            nested.code("chmod", "o+x", folder)
    nested.run("mkdir", "-p", "/opt/llamaops/bin", "/opt/llamaops/venv", "/opt/llamaops/checkout")
    for source, target in ((sys.prefix, "venv"), (QUICKSTART.parents[1], "checkout")):
        nested.code("mount", "--bind", source, f"/opt/llamaops/{target}")
    nested.run("bash", "-c", 'printf %s "$1" > "$2"; chmod 755 "$2"', "-", PROGRAM, "/opt/llamaops/bin/llamaops")
    nested.run("ln", "-sf", engine_path, "/usr/local/bin/llama-server")
    return "/opt/llamaops/bin/llamaops"


@pytest.fixture
def inside(nested: Nested) -> Iterator[Nested]:
    """Return the nested systemd with the profile as it came, and leave it without units of ours."""
    nested.run("cp", QUICKSTART, PROFILE)
    yield nested
    nested.code("systemctl", "disable", "--now", SOCKET, UNIT)
    nested.run("rm", "-rf", "/var/lib/llamaops-deploy", *(f"/etc/systemd/system/{name}" for name in (UNIT, SOCKET)))
    nested.run("systemctl", "daemon-reload")


def show(inside: Nested, name: str, unit: str = UNIT) -> str:
    return inside.run("systemctl", "show", "--value", "-p", name, unit).strip()


def await_value(inside: Nested, name: str, wanted: str, within: float = 60) -> None:
    until = time.monotonic() + within
    while (got := show(inside, name)) != wanted:
        assert time.monotonic() < until, f"{name} is {got!r}, not {wanted!r}: " + inside.run(
            "journalctl", "--no-pager", "-n", "30", "-u", UNIT)
        time.sleep(0.1)


def ask(inside: Nested, *key: str) -> str:
    return inside.run(sys.executable, "-c", ASK, *key, timeout=250).strip()


def install(inside: Nested, *options: str, program: str | Path = LLAMAOPS) -> tuple[int, str]:
    return inside.code(program, "deploy", "systemd", "install", PROFILE, *options)


def test_a_unit_lives_its_whole_life(inside: Nested) -> None:
    before = inside.run("find", "/etc/systemd/system", "/var/lib/llamaops-deploy", check=False)
    code, said = install(inside, "--socket", "--now")
    assert code == 0 and "verified by systemd-analyze" in said and "enabled and started" in said, said

    # Ready only once it serves, with what was planned.
    assert show(inside, "ActiveState") == "active" and "serving at" in show(inside, "StatusText")
    assert show(inside, "CPUWeight") == "10000" and show(inside, "NeedDaemonReload") == "no"
    assert ask(inside) == "8"
    assert inside.code(LLAMAOPS, "deploy", "check", PROFILE, "--socket")[0] == 0

    # Reload: the main process stays.
    main = show(inside, "MainPID")
    inside.run("sed", "-i", "s/context: 4096/context: 2048/", PROFILE)
    inside.run("systemctl", "reload", UNIT)
    until = time.monotonic() + 120
    while "reloaded: " not in (journal := inside.run("journalctl", "--no-pager", "-u", UNIT)):  # systemctl only sent it
        assert time.monotonic() < until, journal
        time.sleep(0.1)
    await_value(inside, "ActiveState", "active")
    assert show(inside, "MainPID") == main
    code, said = inside.code(LLAMAOPS, "deploy", "systemd", "check", PROFILE)
    assert code == 1 and "-MemoryMax=" in said and SOCKET in said

    # The engine dies: the supervisor's matter, not systemd's.
    inside.run("pkill", "-KILL", "-f", ENGINE)
    assert ask(inside) == "8" and show(inside, "MainPID") == main and show(inside, "NRestarts") == "0"

    # The supervisor dies: a client that comes then waits at the socket and is served.
    inside.run("mkdir", "-p", f"/etc/systemd/system/{UNIT}.d")
    dropin = f"/etc/systemd/system/{UNIT}.d/x.conf"
    inside.run("bash", "-c", f"printf '[Service]\\nRestartSec=2\\nWatchdogSec=3\\n' > {dropin}")
    inside.run("systemctl", "daemon-reload")
    inside.run("kill", "-KILL", main)
    assert ask(inside) == "8"
    await_value(inside, "ActiveState", "active")
    assert show(inside, "MainPID") != main and show(inside, "NRestarts") == "1"
    assert inside.run("pgrep", "-c", "-f", ENGINE).strip() == "1"
    assert f"also in force: {dropin}" in inside.code(LLAMAOPS, "deploy", "check", PROFILE, "--socket")[1]

    # The supervisor freezes: the watchdog ends it, and it is started again.
    main = show(inside, "MainPID")
    inside.run("kill", "-STOP", main)
    await_value(inside, "NRestarts", "2")
    await_value(inside, "ActiveState", "active")
    assert show(inside, "MainPID") != main
    assert "Watchdog timeout" in inside.run("journalctl", "--no-pager", "-u", UNIT)

    # A stop is clean, and the socket starts the service for the next client.
    inside.run("systemctl", "stop", UNIT)
    assert show(inside, "Result") == "success" and inside.code("pgrep", "-f", ENGINE)[0] == 1
    assert ask(inside) == "8"

    # What was installed goes, and nothing else.
    inside.run("rm", "-r", f"/etc/systemd/system/{UNIT}.d")
    code, said = inside.code(LLAMAOPS, "deploy", "systemd", "uninstall", "quickstart")
    assert code == 0 and f"removed /etc/systemd/system/{UNIT}" in said, said
    assert inside.code("pgrep", "-f", ENGINE)[0] == 1
    assert inside.run("find", "/etc/systemd/system", check=False) == before
    assert inside.code(LLAMAOPS, "deploy", "systemd", "uninstall", "quickstart")[0] == 64


def test_a_wrong_profile_is_not_tried_again(inside: Nested) -> None:
    assert install(inside)[0] == 0
    inside.run("bash", "-c", f"echo 'nonsense: 1' >> {PROFILE}")
    assert inside.code("systemctl", "start", UNIT)[0] == 1
    shown = [show(inside, name) for name in ("ExecMainStatus", "NRestarts", "ActiveState")]
    assert shown == ["78", "0", "failed"]
    assert inside.code(LLAMAOPS, "deploy", "systemd", "uninstall", "quickstart")[0] == 0


def test_foreign_and_edited_units_are_left_alone(inside: Nested) -> None:
    path = f"/etc/systemd/system/{UNIT}"
    inside.run("bash", "-c", f"echo '# mine' > {path}")
    code, said = install(inside)
    assert code == 2 and "not installed by llamaops" in said and inside.run("cat", path) == "# mine\n"
    inside.run("rm", path)
    assert install(inside)[0] == 0
    inside.run("bash", "-c", f"echo '# mine' >> {path}")
    assert inside.code(LLAMAOPS, "deploy", "systemd", "uninstall", "quickstart")[0] == 2
    assert install(inside)[0] == 2 and "# mine" in inside.run("cat", path)


def test_a_dynamic_user_gets_the_key_that_root_alone_may_read(inside: Nested, installed: str, model_path: str) -> None:
    inside.run("bash", "-c", f"umask 077; echo 'ana:{SECRET}' > /etc/llamaops/keys")
    options = ["--set", "serve.api_keys.file=/etc/llamaops/keys", "--set", f"model.source=path:{model_path}"]
    code, said = install(inside, *options, "--now", program=installed)
    assert code == 0 and "as root" not in said, said + inside.run("journalctl", "--no-pager", "-u", UNIT)

    main, engine = show(inside, "MainPID"), inside.run("pgrep", "-f", ENGINE).strip()
    uid = owner(inside, main)
    assert show(inside, "DynamicUser") == "yes" and uid not in ("0", "65534") and owner(inside, engine) == uid
    assert inside.code("setpriv", f"--reuid={uid}", "--clear-groups", "cat", "/etc/llamaops/keys")[0] == 1
    assert ask(inside) == "401" and ask(inside, SECRET) == "8"
    everything = inside.run("bash", "-c", f"cat /proc/{main}/environ /proc/{engine}/environ /proc/{engine}/cmdline "
                            f"/etc/systemd/system/{UNIT} | tr '\\0' '\\n'; journalctl --no-pager -u {UNIT}")
    assert "CREDENTIALS_DIRECTORY" in everything and SECRET not in everything
    assert inside.code(installed, "deploy", "check", PROFILE, *options) == (0, "")
    asked = inside.run("env", "RUNTIME_DIRECTORY=/run/llamaops", installed, "status", "quickstart", "--json")
    assert json.loads(asked)["state"] == "ready"


def test_a_reload_after_an_upgrade_keeps_the_main_process(inside: Nested, installed: str, model_path: str) -> None:
    inside.run("mkdir", "-p", "/opt/upgraded")
    for name in ("llamaops", "templates", "vendor", "examples"):
        inside.run("cp", "-r", QUICKSTART.parents[1] / name, f"/opt/upgraded/{name}")
    inside.run("chmod", "-R", "a+rX", "/opt/upgraded")
    inside.run("mkdir", "-p", "/opt/upgraded/bin")
    program = "/opt/upgraded/bin/llamaops"
    inside.run("bash", "-c", 'printf %s "$1" > "$2"; chmod 755 "$2"', "-",
               PROGRAM.replace("/opt/llamaops/checkout", "/opt/upgraded"), program)
    code, said = install(inside, "--set", f"model.source=path:{model_path}", "--now", program=program)
    assert code == 0, said + inside.run("journalctl", "--no-pager", "-u", UNIT)
    main = show(inside, "MainPID")
    inside.run("sed", "-i", 's/__version__ = .*/__version__ = "9.9.9"/', "/opt/upgraded/llamaops/__init__.py")
    inside.run("systemctl", "reload", UNIT)
    until = time.monotonic() + 120
    while "9.9.9" not in (seen := inside.code("env", "RUNTIME_DIRECTORY=/run/llamaops", program, "status", "quickstart",
                                              "--json"))[1]:
        assert time.monotonic() < until, str(seen) + inside.run("journalctl", "--no-pager", "-u", UNIT)
        time.sleep(0.1)
    assert ask(inside) == "8"
    assert (show(inside, "MainPID"), show(inside, "ActiveState"), show(inside, "NRestarts")) == (main, "active", "0")


def owner(inside: Nested, pid: str) -> str:
    return inside.run("stat", "-c", "%u", f"/proc/{pid}").strip()


def test_a_user_s_own_manager_runs_it(inside: Nested, installed: str, model_path: str) -> None:
    inside.run("useradd", "--create-home", "--uid", "1234", "ana")
    inside.run("systemd-run", "--unit=manager", "-p", "User=ana", "-p", "Delegate=yes", "-p", "Type=notify",
               "-p", "RuntimeDirectory=ana", "-E", "XDG_RUNTIME_DIR=/run/ana", "-E", "HOME=/home/ana",
               "/lib/systemd/systemd", "--user")
    ana = ["setpriv", "--reuid=ana", "--regid=ana", "--init-groups", "env", "-u", "LLAMAOPS_CACHE",
           "XDG_RUNTIME_DIR=/run/ana", "HOME=/home/ana"]
    main_pid = [*ana, "systemctl", "--user", "show", "--value", UNIT, "-p", "MainPID"]
    try:
        code, said = inside.code(*ana, installed, "deploy", "systemd", "install", PROFILE, "--user", "--now", "--set",
                                 f"model.source=path:{model_path}")
        assert code == 0 and "enabled and started" in said and "enable-linger" in said, said
        main = inside.run(*main_pid).strip()
        assert owner(inside, main) == "1234" and ask(inside) == "8"
        assert inside.code(*ana, installed, "status", "quickstart")[0] == 0
        inside.run(*ana, "systemctl", "--user", "reload", UNIT)
        assert inside.run(*main_pid).strip() == main
        code, said = inside.code(*ana, installed, "deploy", "systemd", "uninstall", "quickstart", "--user")
        assert code == 0 and "stopped and disabled" in said, said
        assert inside.code("pgrep", "-f", ENGINE)[0] == 1
        assert inside.run("find", "/home/ana/.config", "-name", "*llamaops-*") == ""
    finally:
        inside.code("systemctl", "stop", "manager")


def test_the_machine_is_tuned_at_boot(inside: Nested) -> None:
    """On a file in place of the kernel's own; all other settings are kept from it, as they are this machine's."""
    huge, dropin = "/sys/kernel/mm/transparent_hugepage/enabled", f"/etc/systemd/system/{HOST_TUNE}.d"
    fence = "[Service]\\nReadOnlyPaths=/proc/sys /proc/irq /sys/devices\\n"
    inside.run("bash", "-c", f"mkdir -p {dropin}; printf '{fence}' > {dropin}/test.conf; "
               f"echo 'always madvise [never]' > /run/huge; mount --bind /run/huge {huge}")
    before = inside.run("find", "/etc/systemd/system", check=False)
    code, said = inside.code(LLAMAOPS, "deploy", "host-tune", "install", "--now")
    assert code == 0 and "verified by systemd-analyze" in said and "enabled and started" in said, said
    assert inside.run("cat", huge) == "madvise"
    assert show(inside, "ActiveState", HOST_TUNE) == "active" and show(inside, "UnitFileState", HOST_TUNE) == "enabled"
    code, said = inside.code(LLAMAOPS, "deploy", "host-tune", "check")
    assert code == 1 and said == f"# also in force: {dropin}/test.conf"
    assert inside.run(LLAMAOPS, "host", "tune", "status").startswith(f"in force            {huge}: madvise")

    code, said = inside.code(LLAMAOPS, "deploy", "host-tune", "uninstall")
    assert code == 0 and f"removed /etc/systemd/system/{HOST_TUNE}" in said and "host tune revert" in said, said
    assert inside.run("find", "/etc/systemd/system", check=False) == before
    assert inside.run("cat", huge) == "madvise", "the settings are not the unit's"
    inside.run(LLAMAOPS, "host", "tune", "revert", "--yes")
    assert inside.run("cat", huge) == "never"
