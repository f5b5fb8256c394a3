"""Helper programs: their lines, their end, and that nothing outlives us."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest
from running import await_true

from llamaops import child
from llamaops.child import CancelledError, run


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def env() -> dict[str, str]:
    return dict(os.environ)


def test_lines_code_tail_and_log(tmp_path: Path) -> None:
    lines: list[str] = []
    log = tmp_path / "log"
    script = "echo one; printf 'a\\rb\\n'; echo err >&2; printf last; exit 3"
    done = run(sh(script), env=env(), on_line=lines.append, log=log)
    assert done.code == 3
    assert sorted(lines) == ["a", "b", "err", "last", "one"]
    assert done.tail.splitlines()[-1] == "last"
    assert log.read_text().startswith("$ sh -c")
    assert "err" in log.read_text()


def test_a_program_that_is_not_there() -> None:
    if child._wrappers(False):
        assert run(["/nonexistent/tool"], env=env()).code != 0
    else:
        with pytest.raises(FileNotFoundError):
            run(["/nonexistent/tool"], env=env())


def test_much_output_is_drained_and_only_the_tail_kept() -> None:
    done = run([sys.executable, "-c", "for i in range(50000): print('x' * 40, i)"], env=env())
    assert len(done.tail.splitlines()) == child.TAIL_LINES
    assert done.tail.endswith("49999")


def test_idle_is_called_while_nothing_is_said() -> None:
    calls: list[int] = []
    run(sh("sleep 0.7"), env=env(), on_idle=lambda: calls.append(1))
    assert len(calls) >= 2


def test_a_grandchild_that_keeps_the_pipe_does_not_hold_us() -> None:
    done = run(sh("sleep 987 & echo $!"), env=env())  # longer than a test may take
    psutil.Process(int(done.tail)).kill()


def test_an_exception_of_a_callback_ends_the_whole_group() -> None:
    pids: list[int] = []

    def stop(line: str) -> None:
        pids.append(int(line))
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        run(sh("sleep 987 & echo $!; wait"), env=env(), on_line=stop)
    await_true(lambda: not psutil.pid_exists(pids[0]) or psutil.Process(pids[0]).status() == "zombie",
               what="the grandchild is gone")


def test_one_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE_S", 0.3)

    def stop(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(sh("trap '' TERM; echo ready; while :; do sleep 1; done"), env=env(), on_line=stop)  # returns at all


def test_cancel_from_another_thread() -> None:
    cancel = threading.Event()
    with pytest.raises(CancelledError):
        run(sh("echo up; sleep 987"), env=env(), on_line=lambda _line: cancel.set(), cancel=cancel)


def test_low_priority() -> None:
    if len(child._wrappers(True)) == len(child._wrappers(False)):
        pytest.skip("no nice here")
    assert int(run(["nice"], env=env(), niced=True).tail) > os.nice(0)


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    from llamaops.cache import disk_trouble_is
    from llamaops.errors import ModelUnavailable, NotPermitted

    with pytest.raises(NotPermitted, match="/some/file"), disk_trouble_is(ModelUnavailable, "the download", tmp_path):
        raise PermissionError(13, "Permission denied", "/some/file")
