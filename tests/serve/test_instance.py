from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamaops.dirs import private_dir
from llamaops.errors import LockHeld, NotPermitted
from llamaops.serve.instance import MAX_SOCKET_PATH, await_gone, hold, holder, list_instances, locate


def test_leaves_nothing(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    with hold(runtime, "qwen") as instance:
        assert stat.S_IMODE(instance.folder.stat().st_mode) == 0o700
        for path in (instance.control_socket, instance.engine_socket(3)):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(path))
        assert [(k.name, k.pid) for k in list_instances(runtime)] == [("qwen", os.getpid())]
    assert list(runtime.iterdir()) == []


def test_one_at_a_time(tmp_path: Path) -> None:
    with hold(tmp_path, "qwen"):
        with pytest.raises(LockHeld) as failure, hold(tmp_path, "qwen"):
            pass
        assert failure.value.exit_code == 75
        assert str(os.getpid()) in str(failure.value)
        with hold(tmp_path, "other"):
            assert len(list_instances(tmp_path)) == 2
    with hold(tmp_path, "qwen"):
        pass


def test_a_crash_leaves_stale_files_that_the_next_start_clears(tmp_path: Path) -> None:
    code = ("import os, socket, sys; from pathlib import Path; from llamaops.serve.instance import hold\n"
            "with hold(Path(sys.argv[1]), 'qwen') as i:\n"
            "    socket.socket(socket.AF_UNIX).bind(str(i.engine_socket(7)))\n"
            "    os.kill(os.getpid(), 9)\n")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert (tmp_path / "qwen" / "engine-7.sock").exists()
    assert [(k.name, k.pid) for k in list_instances(tmp_path)] == [("qwen", None)]
    with hold(tmp_path, "qwen") as instance:
        assert not instance.engine_socket(7).exists()
        assert holder(instance.folder) == os.getpid()


def test_a_pid_that_is_another_process_by_now_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text(json.dumps({"pid": os.getpid(), "started": 1}))
    assert holder(tmp_path) is None


@pytest.mark.parametrize("text", ["", "123", "{}", '{"pid": "x", "started": null}', "[]"])
def test_a_damaged_pid_file_is_no_instance(tmp_path: Path, text: str) -> None:
    (tmp_path / "pid").write_text(text)
    assert holder(tmp_path) is None


@pytest.fixture
def long_runtime(tmp_path: Path) -> Iterator[Path]:
    runtime = tmp_path / ("d" * 100) / "é漢"
    yield runtime
    shutil.rmtree(locate(runtime, "qwen").sockets, ignore_errors=True)


def test_sockets_move_to_a_short_folder_where_the_path_is_too_long(long_runtime: Path) -> None:
    with hold(long_runtime, "qwen") as instance:
        assert instance.sockets != instance.folder
        assert stat.S_IMODE(instance.sockets.stat().st_mode) == 0o700
        assert len(os.fsencode(instance.engine_socket(4_000_000_000))) <= MAX_SOCKET_PATH
        assert list_instances(long_runtime)[0].control_socket == instance.control_socket
    assert not instance.sockets.exists()
    assert list(long_runtime.iterdir()) == []


@pytest.mark.parametrize("length", range(60, 130, 7))
def test_every_length_of_path_fits(tmp_path: Path, length: int) -> None:
    runtime = Path("/" + "r" * length)
    instance = locate(runtime, "qwen")
    assert len(os.fsencode(instance.engine_socket(1_000_000))) <= MAX_SOCKET_PATH


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "qwen").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotPermitted), hold(tmp_path, "qwen"):
        pass


def test_awaiting_the_end(tmp_path: Path) -> None:
    await_gone(tmp_path, "none")
    ended = threading.Event()

    def wait() -> None:
        await_gone(tmp_path, "qwen")
        ended.set()

    with hold(tmp_path, "qwen"):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not ended.wait(0.1)
    waiting.join(5)
    assert ended.is_set()


def test_the_mark_is_alike_from_run_to_run_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / "qwen").mkdir()
    first = locate(tmp_path, "qwen").mark
    with hold(tmp_path, "qwen") as instance:
        assert instance.mark == first


@pytest.mark.parametrize("mode", [0o777, 0o707])
def test_a_folder_below_one_that_everybody_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(mode)
    with pytest.raises(NotPermitted, match=r"(?s)folder above is not safe.*everybody may write"):
        private_dir(above / "runtime")
    above.chmod(mode | stat.S_ISVTX)  # as /tmp: there nobody can rename what is another's
    assert private_dir(above / "runtime").is_dir()
