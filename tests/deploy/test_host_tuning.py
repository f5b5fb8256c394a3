"""`host tune` on a machine made of files: what was there comes back, whatever happens between."""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path

import pytest

from llamaops.cli import run
from llamaops.core.cpuset import CpuSet
from llamaops.core.topology import Cpu, Host
from llamaops.core.tuning import Change, changes
from llamaops.deploy import host_tuning
from llamaops.deploy.host_tuning import JOURNAL, Outcome, apply, read_settings, revert, status, write_value
from llamaops.errors import LockHeld, WrongProfile

ALL = CpuSet.parse("0-3")
HOST = Host(online=ALL, affinity=ALL, cpus=tuple(Cpu(n, siblings=CpuSet([n % 2, n % 2 + 2])) for n in range(4)))
GOVERNOR = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
THP, SWAPPINESS = "sys/kernel/mm/transparent_hugepage/enabled", "proc/sys/vm/swappiness"
IRQ, IRQBALANCE = "proc/irq/24/smp_affinity_list", "etc/default/irqbalance"
FILES = {
    **{GOVERNOR.format(n): "powersave\n" for n in range(4)},
    **{f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_available_governors": "performance powersave\n"
       for n in range(4)},
    THP: "always madvise [never]\n",
    SWAPPINESS: "60\n",
    "proc/swaps": "Filename Type Size Used Priority\n/dev/sda2 partition 100 0 -2\n",
    "proc/interrupts": "      CPU0 CPU1\n 24:   5  6  PCI-MSI  eth0\nNMI:  0  0  Non-maskable\n",
    IRQ: "0-3\n",
    "proc/sys/kernel/random/boot_id": "first\n",
}
CHANGED = {GOVERNOR.format(0): "performance", GOVERNOR.format(1): "performance", IRQ: "2-3", THP: "madvise",
           SWAPPINESS: "1"}


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def values(root: Path) -> dict[str, str]:
    return {path: host_tuning._value(root, path) or "" for path in CHANGED}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        put(tmp_path, path, text)
    return tmp_path


def wanted(root: Path) -> list[Change]:
    return changes(HOST, read_settings(root))


def never() -> str | None:
    raise AssertionError("irqbalance is not to be restarted here")


def tuned(root: Path) -> list[Outcome]:
    return apply(wanted(root), root, restart=never)


def test_apply_changes_and_revert_restores(root: Path) -> None:
    before = values(root)
    assert all(outcome.done for outcome in tuned(root))
    assert values(root) == CHANGED
    assert [state for _, state, _ in status(root)] == ["in force"] * 5
    assert wanted(root) == []
    assert all(outcome.done for outcome in revert(root, restart=never))
    assert values(root) == before
    assert status(root) == []
    assert revert(root) == []


def test_twice_keeps_the_first_originals(root: Path) -> None:
    before = values(root)
    tuned(root)
    again = [Change(SWAPPINESS, "1", "5", "another mind")]
    assert apply(again, root, restart=never)[0].done
    assert {e.path: e.before for e, _, _ in status(root)} == before
    revert(root, restart=never)
    assert values(root) == before


def test_what_others_changed_since_is_theirs(root: Path) -> None:
    tuned(root)
    put(root, SWAPPINESS, "30\n")
    put(root, GOVERNOR.format(1), "powersave\n")
    states = {entry.path: state for entry, state, _ in status(root)}
    assert (states[SWAPPINESS], states[GOVERNOR.format(1)]) == ("changed since", "as it was")
    outcomes = {outcome.path: outcome for outcome in revert(root, restart=never)}
    assert not outcomes[SWAPPINESS].done
    assert "somebody changed it since to 30" in outcomes[SWAPPINESS].text
    assert values(root)[SWAPPINESS] == "30"
    assert values(root)[GOVERNOR.format(0)] == "powersave"
    assert status(root) == []


def test_what_others_chose_between_two_applies_is_the_new_original(root: Path) -> None:
    tuned(root)
    put(root, SWAPPINESS, "30\n")
    tuned(root)
    revert(root, restart=never)
    assert values(root)[SWAPPINESS] == "30"


@pytest.mark.parametrize("fatal", range(5))
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_any_write_it_still_goes_back(root: Path, fatal: int, when: str) -> None:
    """A process of its own, ended by SIGKILL at its n-th write: the journal on disk must do."""
    before = values(root)
    found = wanted(root)

    def write(path: Path, value: str) -> None:
        last = path == root / found[fatal].path
        if last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        write_value(path, value)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that others' threads are not in the child is fine: it only writes and dies
        child = os.fork()
    if child == 0:
        try:
            apply(found, root, write=write, restart=never)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert sum(values(root)[path] == CHANGED[path] for path in CHANGED) == fatal + (when == "after")
    assert all(outcome.done for outcome in revert(root, restart=never))
    assert values(root) == before


def test_killed_and_applied_again_keeps_the_originals(root: Path) -> None:
    before = values(root)
    with pytest.raises(KeyboardInterrupt):
        apply(wanted(root), root, write=_failing(KeyboardInterrupt(), SWAPPINESS), restart=never)
    assert tuned(root)
    assert values(root) == CHANGED
    revert(root, restart=never)
    assert values(root) == before


def _failing(exc: BaseException, name: str) -> host_tuning.Write:
    def write(path: Path, value: str) -> None:
        if str(path).endswith(name):
            raise exc
        write_value(path, value)

    return write


def test_a_refusal_is_told_and_leaves_no_entry(root: Path) -> None:
    refused = OSError(5, "Input/output error")  # what the kernel answers for interrupts it manages itself
    outcomes = {o.path: o for o in apply(wanted(root), root, write=_failing(refused, IRQ), restart=never)}
    assert outcomes[IRQ] == Outcome(IRQ, False, "refused: Input/output error")
    assert sum(o.done for o in outcomes.values()) == 4
    assert IRQ not in {entry.path for entry, _, _ in status(root)}


def test_a_refused_way_back_stays_in_the_journal(root: Path) -> None:
    tuned(root)
    outcomes = revert(root, write=_failing(OSError(30, "Read-only file system"), THP), restart=never)
    assert [o.path for o in outcomes if not o.done] == [THP]
    assert [entry.path for entry, _, _ in status(root)] == [THP]
    assert revert(root, restart=never)[0].done


def test_what_the_kernel_made_of_a_value_counts_as_ours(root: Path) -> None:
    def write(path: Path, value: str) -> None:
        write_value(path, "3" if str(path).endswith(IRQ) else value)

    apply(wanted(root), root, write=write, restart=never)
    assert {state for _, state, _ in status(root)} == {"in force"}
    revert(root, restart=never)
    assert values(root)[IRQ] == "0-3"


def test_another_boot_ends_what_sysfs_held(root: Path) -> None:
    tuned(root)
    put(root, "proc/sys/kernel/random/boot_id", "second\n")
    put(root, GOVERNOR.format(0), "performance\n")  # by the machine's own start-up files this time
    assert {state for _, state, _ in status(root)} == {"ended with the boot"}
    assert all(outcome.done for outcome in revert(root, restart=never))
    assert values(root)[GOVERNOR.format(0)] == "performance"


def test_a_new_boot_has_new_originals(root: Path) -> None:
    tuned(root)
    for path, text in FILES.items():
        put(root, path, text)
    put(root, "proc/sys/kernel/random/boot_id", "second\n")
    put(root, SWAPPINESS, "100\n")
    tuned(root)
    revert(root, restart=never)
    assert values(root)[SWAPPINESS] == "100"


def test_irqbalance_gets_its_file_and_a_restart(root: Path) -> None:
    put(root, "proc/77/comm", "irqbalance\n")
    put(root, IRQBALANCE, "# ours\nIRQBALANCE_ARGS=--deepest-cache=2")
    (root / IRQBALANCE).chmod(0o640)
    restarts: list[None] = []
    outcomes = apply(wanted(root), root, restart=lambda: restarts.append(None))
    assert outcomes[-1] == Outcome("irqbalance", True, "restarted")
    assert "BANNED_CPULIST=0-1\n" in (root / IRQBALANCE).read_text()
    assert (root / IRQ).read_text() == "0-3\n"
    assert apply([], root, restart=never) == []
    put(root, "proc/sys/kernel/random/boot_id", "second\n")
    assert {e.path: s for e, s, _ in status(root)}[IRQBALANCE] == "in force"  # a file outlives the boot
    revert(root, restart=lambda: restarts.append(None))
    assert (root / IRQBALANCE).read_text() == "# ours\nIRQBALANCE_ARGS=--deepest-cache=2"
    assert (root / IRQBALANCE).stat().st_mode & 0o777 == 0o640
    assert len(restarts) == 2


def test_a_restart_that_a_crash_prevented_is_made_up_for(root: Path) -> None:
    put(root, "proc/77/comm", "irqbalance\n")
    put(root, IRQBALANCE, "")
    with pytest.raises(AssertionError):
        tuned(root)
    assert wanted(root) == []
    assert apply([], root, restart=lambda: "do it by hand")[-1] == Outcome("irqbalance", False, "do it by hand")
    assert apply([], root, restart=lambda: None)[-1].done
    assert apply([], root, restart=never) == []


def test_a_journal_can_not_make_it_write_elsewhere(root: Path) -> None:
    put(root, "etc/passwd", "new")
    entry = {"path": "etc/passwd", "before": "old", "after": "new", "reason": "", "boot": None}
    put(root, JOURNAL, json.dumps({"version": 1, "entries": [entry]}))
    assert not revert(root, restart=never)[0].done
    assert (root / "etc/passwd").read_text() == "new"
    with pytest.raises(WrongProfile):
        apply([Change("etc/passwd", "new", "old", "")], root)


def test_a_broken_journal_is_named_and_kept(root: Path) -> None:
    put(root, JOURNAL, "{")
    with pytest.raises(WrongProfile, match="can't be read") as caught:
        tuned(root)
    assert str(root / JOURNAL) in str(caught.value)
    assert values(root)[SWAPPINESS] == "60"


def test_two_at_once_are_refused(root: Path) -> None:
    def write(path: Path, value: str) -> None:
        with pytest.raises(LockHeld):
            revert(root)
        write_value(path, value)

    assert all(o.done for o in apply(wanted(root), root, write=write, restart=never))


def test_without_a_terminal_or_yes_it_only_shows(capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Change(SWAPPINESS, "60", "1", "because")]
    monkeypatch.setattr("llamaops.core.tuning.changes", lambda host, settings: asked)
    monkeypatch.setattr(host_tuning, "apply", lambda found: pytest.fail("it was applied"))
    assert run(["host", "tune", "apply"]) == 2
    said = capsys.readouterr()
    assert f"/{SWAPPINESS}: 60 → 1" in said.out
    assert "--yes" in said.err
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(["host", "tune", "apply", "--yes"]) == 77
    assert "sudo llamaops" in capsys.readouterr().err


def test_status_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    tuned(root)
    found = status(root)
    monkeypatch.setattr(host_tuning, "status", lambda: found)
    assert run(["host", "tune", "status", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["changes"][-1] == {"path": f"/{SWAPPINESS}", "before": "60", "after": "1", "now": "1",
                                       "state": "in force", "reason": found[-1][0].reason}
    assert run(["host", "tune", "status"]) == 0
    assert "in force" in capsys.readouterr().out
