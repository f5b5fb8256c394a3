"""The log file of a long-running instance, written by a process of its own: it turns its stderr into that file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from llamaops.logs import MAX_BYTES

PROGRAM = """
import logging, sys
from pathlib import Path
from llamaops import logs

logs.configure("info", "text", Path(sys.argv[1]))
for n in range(int(sys.argv[2])):
    logging.info("line %d %s", n, "x" * 4000)
raise RuntimeError("the end")
"""


def write(path: Path, lines: int) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path), str(lines)], capture_output=True, text=True)
    assert done.stdout == done.stderr == ""
    return path.read_text()


def test_the_file_is_kept_small_and_what_comes_last_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "llamaops.log"
    last = write(path, 5000)
    assert "line 4999" in last
    assert last.endswith("RuntimeError: the end\n")
    before = path.with_name("llamaops.log.1")
    assert sorted(tmp_path.iterdir()) == [path, before]
    assert path.stat().st_size <= MAX_BYTES + 5000
    assert MAX_BYTES < before.stat().st_size <= MAX_BYTES + 5000
    assert path.stat().st_mode & 0o077 == 0


def test_an_old_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "llamaops.log"
    write(path, 1)
    assert write(path, 1).count("line 0") == 2


def test_a_file_that_is_taken_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "llamaops.log"
    program = PROGRAM.replace("    logging", "    n == 10 and Path(sys.argv[1]).unlink()\n    logging")
    subprocess.run([sys.executable, "-c", program, str(path), "5000"], capture_output=True)
    assert "line 4999" in path.read_text()


def test_a_full_disk_loses_lines_and_no_more() -> None:
    program = PROGRAM.replace("raise", "print('went on'); raise")
    done = subprocess.run([sys.executable, "-c", program, "/dev/full", "50"], capture_output=True, text=True)
    assert done.stdout == "went on\n"
