"""A reload after an upgrade: another llamaops serves from the same process and socket, and no stream fails."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos.load import Load
from chaos.world import World, until

from llamaops.errors import LlamaopsError
from llamaops.serve.handover import code_on_disk

STREAMS = 20
BODY = {"prompt": "Once upon a time", "max_tokens": 12, "stream": True, "ignore_eos": True}


@pytest.fixture
def world(tmp_path: Path, engine_path: str, model_path: str) -> Iterator[World]:
    made = World(tmp_path, engine_path, model_path)
    yield made
    made.close()


async def serve_while(world: World, change: Callable[[], None]) -> Load:
    """Let twenty clients ask one stream after the other, from before the change until well after it."""
    await world.start()
    load = Load(world.url, random.Random(1), clients=0)
    streams = [asyncio.create_task(load.keep_asking(BODY)) for _ in range(STREAMS)]
    await until(lambda: load.in_flight == STREAMS, "every client waits for its stream")
    await asyncio.to_thread(change)
    answered = load.outcomes["answered"]
    await until(lambda: load.outcomes["answered"] > answered + 2 * STREAMS, "streams are answered afterwards")
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await load.close()
    return load


def test_a_reload_hands_over_to_the_llamaops_on_disk(world: World) -> None:
    async def main() -> None:
        def upgrade() -> None:
            before.update(world.status())
            world.install("9.9.9")
            assert "9.9.9 takes over" in world.tell("reload")

        before: dict[str, object] = {}
        load = await serve_while(world, upgrade)
        assert load.lost == []
        assert set(load.outcomes) == {"answered"}
        await until(lambda: world.runs_version("9.9.9"), "the new one serves")
        after = world.status()
        assert (after["llamaops_pid"], after["url"]) == (before["llamaops_pid"], before["url"])
        assert os.sched_getaffinity(int(str(after["llamaops_pid"])))
        assert world.tell("reload").startswith("keys")
        await world.stop()

    asyncio.run(main())


@pytest.mark.parametrize("more", ["raise SystemExit('half installed')", "import no_such_module"])
def test_a_llamaops_that_does_not_run_is_not_handed_over_to(world: World, more: str) -> None:
    async def main() -> None:
        await world.start()
        before = world.status()
        world.install("9.9.9", more)
        with pytest.raises(LlamaopsError, match="installed meanwhile refuses"):
            world.tell("reload")
        assert world.status()["generation"] == before["generation"]
        load = Load(world.url, random.Random(1), clients=0)
        assert await load.ask(BODY) == "answered"
        await load.close()
        await world.stop()

    asyncio.run(main())


def test_a_stop_while_it_hands_over_ends_it(world: World) -> None:
    async def main() -> None:
        await world.start()
        load = Load(world.url, random.Random(1), clients=0)
        stream = asyncio.create_task(load.ask(BODY | {"max_tokens": 200}))
        await until(lambda: world.status()["requests"]["in_flight"], "a stream runs")
        world.install("9.9.9")
        world.tell("reload")
        await world.stop()
        await stream
        await load.close()
        assert load.lost == []

    asyncio.run(main())


def test_the_codes_hash_sees_every_file_and_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llamaops"
    (package / "core").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr("llamaops.serve.handover._PACKAGE", package)
    first = code_on_disk()
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert code_on_disk() == first
    (package / "core" / "new.py").write_text("")
    assert code_on_disk() not in (None, first)
    shutil.rmtree(package)
    assert code_on_disk() != first
