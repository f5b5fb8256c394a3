"""A new engine while twenty streams run: none of them, and none that comes meanwhile, may fail.

With memory for two engines the new one starts beside the old one, with memory for one after it.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from pathlib import Path

import pytest
from chaos.load import Load
from chaos.world import World, until
from running import LLAMAOPS

STREAMS = 20
BODY = {"prompt": "Once upon a time", "max_tokens": 12, "stream": True, "ignore_eos": True}


async def reload_twice(world: World, says: str) -> Load:
    await world.start()
    load = Load(world.url, random.Random(1), clients=0)
    streams = [asyncio.create_task(load.keep_asking(BODY)) for _ in range(STREAMS)]
    for generation in (2, 3):
        await until(lambda: load.in_flight == STREAMS, "every client waits for its stream")
        answered = load.outcomes["answered"]
        world.renew_profile()
        assert await asyncio.to_thread(world.tell, "reload") == says
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


def memory_of_one(world: World) -> int:
    """Return what the plan of the larger context needs, and a tenth more."""
    world.renew_profile()
    plan = subprocess.run([*LLAMAOPS, "plan", str(world.profile), "--json"], check=True, stdout=subprocess.PIPE)
    return json.loads(plan.stdout)["memory"]["total_bytes"] * 11 // 10


@pytest.mark.parametrize(("tight", "says"), [
    (False, "a new engine serves"), (True, "the engine was stopped and a new one serves")])
def test_no_stream_fails_in_a_reload(tmp_path: Path, engine_path: str, model_path: str, tight: bool, says: str) -> None:
    world = World(tmp_path, engine_path, model_path)
    try:
        if tight:
            world.memory_limit = memory_of_one(world)
            world.renew_profile()
        load = asyncio.run(reload_twice(world, says))
    finally:
        world.close()
    assert load.lost == []
    assert set(load.outcomes) == {"answered"}
