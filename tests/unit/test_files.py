"""Files that people asked for: whole or not at all; refused before the work whose result could not be written."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest

from llamaops.errors import UsageError
from llamaops.files import check_writable, write_whole


def test_replacing_leaves_nothing_else_behind_and_not_replacing_refuses(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "one")
    with pytest.raises(UsageError, match="there already"):
        write_whole(path, "two")
    write_whole(path, "two", replace=True)
    assert path.read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "sub" / "real"
    real.parent.mkdir()
    link.symlink_to(real)
    write_whole(link, "x", replace=True)
    assert link.is_symlink() and real.read_text() == "x"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=write_whole, args=(pipe, "through"), kwargs={"replace": True})
    writer.start()
    assert pipe.read_text() == "through"
    writer.join()
    assert pipe.is_fifo()


@pytest.mark.parametrize(("name", "why"), [
    ("no/such/folder/a", "No such file"), ("file/a", "Not a directory"), ("", "Is a directory"),
])
def test_what_can_not_be_written_is_refused_before_and_after_the_work(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    for attempt in (check_writable, lambda path: write_whole(path, "x", replace=True)):
        with pytest.raises(UsageError) as refused:
            attempt(tmp_path / name)
        assert why in (refused.value.why or "")


def test_what_can_be_written_is_not_touched_by_asking(tmp_path: Path) -> None:
    check_writable(tmp_path / "new")
    check_writable(Path("/dev/null"))
    assert not list(tmp_path.iterdir())
