"""Units put in place and taken away, where no manager runs; with one: tests/e2e/test_systemd.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llamaops.cli import run
from llamaops.core.profile import parse_profile
from llamaops.deploy.install import Place, differences, find_place, install, uninstall
from llamaops.deploy.systemd import render_socket
from llamaops.errors import NotPermitted, NotRunning, UsageError, WrongProfile

GOOD = "[Service]\nExecStart=/bin/true\n"
UNITS = {"llamaops-x.service": GOOD}
SOCKET = {"llamaops-x.socket": "[Socket]\nListenStream=127.0.0.1:8080\n"}
needs_analyze = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "units", tmp_path / "journal", user=False, running=False)


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_was_installed_goes_and_nothing_else(place: Place, tmp_path: Path) -> None:
    place.units.mkdir()
    (place.units / "other.service").write_text(GOOD)
    said = install(place, "x", UNITS | SOCKET, start=True)
    assert "systemd does not run here" in said[-1] and "systemctl enable --now llamaops-x.service" in said[-1]
    assert tree(tmp_path) == ["journal/x.json", "units/llamaops-x.service", "units/llamaops-x.socket",
                              "units/other.service"]
    uninstall(place, "x")
    assert tree(tmp_path) == ["units/other.service"]
    with pytest.raises(NotRunning):
        uninstall(place, "x")


def test_installing_again_replaces_and_remembers_what_was_there_before(place: Place, tmp_path: Path) -> None:
    install(place, "x", UNITS | SOCKET, start=False)
    install(place, "x", {"llamaops-x.service": GOOD + "Nice=3\n"}, start=False)
    assert "Nice=3" in (place.units / "llamaops-x.service").read_text()
    uninstall(place, "x")
    assert tree(tmp_path) == []


@needs_analyze
@pytest.mark.parametrize("bad", ["[Service]\nExecStart=no/path\n", "[Service]\nExecStart=/bin/true\nNonsense=1\n"])
def test_a_unit_with_a_fault_is_not_installed(place: Place, tmp_path: Path, bad: str) -> None:
    with pytest.raises(WrongProfile, match="finds fault") as caught:
        install(place, "x", {"llamaops-x.service": bad}, start=False)
    assert "llamaops-x.service" in (caught.value.detail or "")
    assert tree(tmp_path) == []


def test_foreign_units_stay(place: Place) -> None:
    place.units.mkdir()
    unit = place.units / "llamaops-x.service"
    unit.write_text("# mine\n")
    with pytest.raises(UsageError, match="not installed by llamaops"):
        install(place, "x", UNITS, start=False)
    assert unit.read_text() == "# mine\n" and not place.journal.exists()


def test_edited_units_stay(place: Place) -> None:
    install(place, "x", UNITS, start=False)
    unit = place.units / "llamaops-x.service"
    unit.write_text(GOOD + "# mine\n")
    for attempt in (lambda: uninstall(place, "x"), lambda: install(place, "x", UNITS, start=False)):
        with pytest.raises(UsageError, match="changed by hand"):
            attempt()
    assert unit.read_text() == GOOD + "# mine\n"


def test_an_installation_cut_short_can_be_undone(place: Place, tmp_path: Path) -> None:
    install(place, "x", UNITS | SOCKET, start=False)
    (place.units / "llamaops-x.socket").unlink()
    uninstall(place, "x")
    assert tree(tmp_path) == []


def test_differences_are_told_as_a_diff(place: Place) -> None:
    with pytest.raises(NotRunning):
        differences(place, "x", UNITS)
    install(place, "x", UNITS | SOCKET, start=False)
    assert differences(place, "x", UNITS | SOCKET) == ""
    found = differences(place, "x", {"llamaops-x.service": GOOD + "Nice=3\n"} | SOCKET)
    assert found.endswith("\n+Nice=3\n") and "as it would be made now" in found
    (place.units / "llamaops-x.service").unlink()
    assert "+ExecStart=/bin/true" in differences(place, "x", UNITS | SOCKET)
    dropin = place.units / "llamaops-x.service.d/a.conf"
    dropin.parent.mkdir()
    dropin.touch()
    assert f"also in force: {dropin}" in differences(place, "x", UNITS | SOCKET)


def test_files_of_a_folder_are_compared_where_they_are_ours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "x.yaml"
    profile.write_text("model: {source: 'wheel:a==1'}\nmemory: {limit: 1GiB}\nserve: {allow_insecure: true}\n")
    for kind, changed in (("compose", "compose.yaml"), ("k8s", "base/deployment.yaml")):
        command = ["deploy", kind, str(profile), "-o", str(tmp_path / kind)]
        assert run([*command, "--check"]) == 64 and not (tmp_path / kind).exists()
        assert run(command) == 0
        (tmp_path / kind / "mine.yaml").write_text("a: 1\n")
        capfd.readouterr()
        assert run([*command, "--check"]) == 0 and capfd.readouterr().out == ""
        before = (tmp_path / kind / changed).read_text()
        assert run([*command, "--check", "--set", "placement.threads=1", "--set", "memory.limit=2GiB"]) == 1
        said = capfd.readouterr().out
        assert f"--- {tmp_path / kind / changed}\n" in said and "mine" not in said
        assert (tmp_path / kind / changed).read_text() == before
        assert run([*command[:3], "--check"]) == 2


def test_the_journal_names_units_and_their_checksums(place: Place) -> None:
    install(place, "x", UNITS, start=False)
    (digest,) = json.loads((place.journal / "x.json").read_text())["units"].values()
    assert len(digest) == 64


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = find_place({"HOME": str(tmp_path)}, user=True)
    assert mine.units == tmp_path / ".config/systemd/user" and not mine.running
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd/private").touch()
    assert find_place({"HOME": "/h", "XDG_RUNTIME_DIR": str(tmp_path)}, user=True).running
    assert mine.manager("systemctl") == ["systemctl", "--user"]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(NotPermitted, match="only root"):
        find_place({}, user=False)


@pytest.mark.parametrize(("host", "address"), [
    ("127.0.0.1", "127.0.0.1:8080"), ("::1", "[::1]:8080"), ("localhost", "127.0.0.1:8080")])
def test_the_socket_listens_where_the_profile_says(host: str, address: str) -> None:
    text = f"model: {{source: 'wheel:a==1'}}\nserve: {{host: '{host}'}}"
    profile = parse_profile(text, stem="x", base=Path("/"), environ={})
    assert f"ListenStream={address}\n" in render_socket(profile)
    with pytest.raises(WrongProfile, match="needs a port"):
        render_socket(parse_profile(text, stem="x", base=Path("/"), environ={}, overrides=["serve.port=0"]))
