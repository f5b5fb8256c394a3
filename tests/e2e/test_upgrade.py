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

import llamaops
from llamaops.child import llamaops_argv
from llamaops.errors import LlamaopsError
from llamaops.serve.handover import code_on_disk

STREAMS = 20
BODY = {"prompt": "Once upon a time", "max_tokens": 12, "stream": True, "ignore_eos": True}
ROOT = Path(llamaops.__file__).parents[1]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the package, as pip would install it, which may be changed."""
    for name in ("llamaops", "templates", "vendor", "examples"):
        shutil.copytree(ROOT / name, tmp_path / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "site"


@pytest.fixture
def world(tmp_path: Path, copy: Path, engine_path: str, model_path: str) -> Iterator[World]:
    made = World(tmp_path, engine_path, model_path,
                 command=("env", f"PYTHONPATH={copy}", *llamaops_argv()))
    yield made
    made.close()


def install(copy: Path, version: str, more: str = "") -> None:
    """Put another version there."""
    (copy / "llamaops" / "__init__.py").write_text(f'__version__ = "{version}"\n{more}')


async def serve_while(world: World, change: Callable[[], None]) -> Load:
    """Let twenty clients ask one stream after the other, from before the change until well after it."""
    await world.start()
    load = Load(world.url, random.Random(1), clients=0)
    streams = [asyncio.create_task(ask_on(load)) for _ in range(STREAMS)]
    await until(lambda: load.in_flight == STREAMS, "every client waits for its stream")
    await asyncio.to_thread(change)
    answered = load.outcomes["answered"]
    await until(lambda: load.outcomes["answered"] > answered + 2 * STREAMS, "streams are answered afterwards")
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await load.close()
    return load


async def ask_on(load: Load) -> None:
    while True:
        await load.ask(BODY)


def serves(world: World, version: str) -> bool:
    try:
        status = world.status()
    except LlamaopsError:  # just between the two
        return False
    return bool(status["llamaops"] == version and status["state"] == "ready")


def test_a_reload_hands_over_to_the_llamaops_on_disk(world: World, copy: Path) -> None:
    async def main() -> None:
        def upgrade() -> None:
            before.update(world.status())
            install(copy, "9.9.9")
            assert "9.9.9 takes over" in world.tell("reload")

        before: dict[str, object] = {}
        load = await serve_while(world, upgrade)
        assert load.lost == []
        assert set(load.outcomes) == {"answered"}
        await until(lambda: serves(world, "9.9.9"), "the new one serves")
        after = world.status()
        assert (after["llamaops_pid"], after["url"]) == (before["llamaops_pid"], before["url"])
        assert os.sched_getaffinity(int(str(after["llamaops_pid"])))
        assert world.tell("reload").startswith("keys")
        await world.stop()

    asyncio.run(main())


@pytest.mark.parametrize("more", ["raise SystemExit('half installed')", "import no_such_module"])
def test_a_llamaops_that_does_not_run_is_not_handed_over_to(world: World, copy: Path, more: str) -> None:
    async def main() -> None:
        await world.start()
        before = world.status()
        install(copy, "9.9.9", more)
        with pytest.raises(LlamaopsError, match="installed meanwhile refuses"):
            world.tell("reload")
        assert world.status()["generation"] == before["generation"]
        load = Load(world.url, random.Random(1), clients=0)
        assert await load.ask(BODY) == "answered"
        await load.close()
        await world.stop()

    asyncio.run(main())


def test_a_stop_while_it_hands_over_ends_it(world: World, copy: Path) -> None:
    async def main() -> None:
        await world.start()
        load = Load(world.url, random.Random(1), clients=0)
        stream = asyncio.create_task(load.ask(BODY | {"max_tokens": 200}))
        await until(lambda: world.status()["requests"]["in_flight"], "a stream runs")
        install(copy, "9.9.9")
        world.tell("reload")
        await world.stop()
        await stream
        await load.close()
        assert load.lost == []

    asyncio.run(main())


def test_the_codes_hash_sees_every_file_and_no_cache(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = copy / "llamaops"
    monkeypatch.setattr("llamaops.serve.handover._PACKAGE", package)
    first = code_on_disk()
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert code_on_disk() == first
    (package / "core" / "new.py").write_text("")
    assert code_on_disk() not in (None, first)
    shutil.rmtree(package)
    assert code_on_disk() != first
