from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llamaops.serve.enginelog import MAX_LINE, EngineLog


@pytest.mark.parametrize(("chunks", "lines"), [
    ([b"a\nb\n"], ["a", "b"]),
    ([b"a", b"b\nc", b"\n"], ["ab", "c"]),
    (["é漢".encode()[:3], "é漢".encode()[3:] + b"\n"], ["é漢"]),
    ([b"\xff\n"], ["�"]),
    ([b"\x1b[31mred\x1b[0m\x07\r\n"], ["red"]),
    ([b"a\nunfinished"], ["a", "unfinished"]),
    (["a\u2028b\n".encode()], ["a\u2028b"]),
])
def test_bytes_become_lines(chunks: list[bytes], lines: list[str]) -> None:
    log = EngineLog()
    writer = log.writer()
    for chunk in chunks:
        writer.feed(chunk)
    writer.close()
    assert log.last(10) == lines == list(writer.tail)


def test_repeats_are_counted() -> None:
    log = EngineLog()
    for n in range(500):
        log.add(f"0.00.000.{n:03d} W failed to set priority")
    log.add("0.00.001.000 I ready")
    assert log.last(10) == ["0.00.000.000 W failed to set priority", "(the line above came 499 more times)",
                            "0.00.001.000 I ready"]


def test_grave_lines_can_be_asked_for() -> None:
    log = EngineLog()
    for line in ("0.00.000.001 I ready", "0.00.000.002 W slow", "0.00.000.003 E broken", "0.00.000.004 W slow"):
        log.add(line)
    assert log.last(10, "warning") == ["0.00.000.002 W slow", "0.00.000.003 E broken", "0.00.000.004 W slow"]
    assert log.last(1, "error") == ["0.00.000.003 E broken"]


def test_what_looks_like_a_secret_never_gets_in() -> None:
    log = EngineLog()
    writer = log.writer()
    writer.feed(b"fetching https://hub/x?token=abcd1234efgh\n")
    assert log.last(1) == list(writer.tail) == ["fetching https://hub/x?token=\u2026"]


def test_memory_is_bounded() -> None:
    log = EngineLog(keep=10)
    writer = log.writer()
    writer.feed(b"x" * (3 * MAX_LINE) + b"\n")
    for n in range(100):
        writer.feed(b"line %d\n" % n)
    assert len(log.last(1000)) == 10
    assert max(map(len, writer.tail)) <= MAX_LINE


def test_the_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    log = EngineLog(path, max_bytes=2000)
    for n in range(300):
        log.add(f"line {n}")
    log.close()
    assert path.stat().st_size <= 2000 or len(path.read_bytes().splitlines()) == 300
    assert path.read_text().splitlines()[-1].endswith("line 299")


def test_a_file_that_cannot_be_written_costs_nothing_but_its_lines(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "no" / "such" / "folder" / "engine.log")
    log.add("kept in memory")
    log.close()
    assert log.last(1) == ["kept in memory"]


def test_a_full_disk_costs_nothing_but_the_lines_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.symlink_to("/dev/full")
    log = EngineLog(path)
    log.add("kept in memory")
    log.close()
    assert log.last(1) == ["kept in memory"]


def test_followers_see_the_last_lines_and_new_ones() -> None:
    async def body() -> None:
        log = EngineLog()
        log.add("old")
        seen: list[str] = []

        async def follow() -> None:
            async for line in log.follow(5):
                seen.append(line)

        following = asyncio.create_task(follow())
        while not seen:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        log.add("new")
        log.close()
        await following
        assert seen == ["old", "new"]

    asyncio.run(body())
