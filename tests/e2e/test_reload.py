"""A new engine while twenty streams run: none of them, and none that comes meanwhile, may fail."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from chaos.load import Load
from chaos.world import World, until

STREAMS = 20
BODY = {"prompt": "Once upon a time", "max_tokens": 12, "stream": True, "ignore_eos": True}


async def reload_twice(world: World) -> Load:
    await world.start()
    load = Load(world.url, random.Random(1), clients=0)
    streams = [asyncio.create_task(ask_on(load)) for _ in range(STREAMS)]
    for generation in (2, 3):
        await until(lambda: load.in_flight == STREAMS, "every client waits for its stream")
        answered = load.outcomes["answered"]
        world.renew_profile()
        assert "a new engine serves" in await asyncio.to_thread(world.tell, "reload")
        assert world.status()["generation"] == generation
        await until(lambda before=answered: load.outcomes["answered"] > before + STREAMS,
                    "the new engine answers")
        await until(world.is_serving, "the old engine is gone")
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await load.close()
    await world.stop()
    return load


async def ask_on(load: Load) -> None:
    while True:
        await load.ask(BODY)


def test_no_stream_fails_in_a_reload(tmp_path: Path, engine_path: str, model_path: str) -> None:
    world = World(tmp_path, engine_path, model_path)
    try:
        load = asyncio.run(reload_twice(world))
    finally:
        world.close()
    assert load.lost == []
    assert set(load.outcomes) == {"answered"}
