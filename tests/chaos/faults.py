"""What is done to a llamaops. Each fault returns once the harm is done and, where it lasts, taken back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from chaos.load import Load
from chaos.world import Broken, World, until
from llamaops.errors import LlamaopsError

_BALLAST = "ballast"
_DEADLY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGBUS, signal.SIGILL)
_HARMLESS = (b"#!/bin/sh\nexit 1\n", 0o755), (b"#!/bin/sh\nkill -SEGV $$\n", 0o755), (b"no program", 0o755), \
            (b"#!/bin/sh\n", 0o644), (None, 0)


@dataclass
class Scene:
    """What a fault has at hand."""

    world: World
    load: Load
    rng: random.Random

    async def await_state(self, *states: str) -> None:
        """Wait until the engine is in one of these states."""
        await until(lambda: self.world.status().get("state") in states, f"the state is {' or '.join(states)}")

    async def hit(self, number: int) -> None:
        """Send a signal to the engine."""
        await asyncio.to_thread(self.world.strike, number)

    async def reload(self) -> str:
        """Ask for a reload. Raises LlamaopsError."""
        return str(await asyncio.to_thread(self.world.tell, "reload"))

    def hang_up(self) -> None:
        """Ask for a reload by signal."""
        os.kill(self.world.pid, signal.SIGHUP)


# The engine.


async def deadly_signal(scene: Scene) -> None:
    """End the engine by a signal."""
    await scene.hit(scene.rng.choice(_DEADLY))


async def freeze(scene: Scene) -> None:
    """Stop the engine's process for good, with requests in flight."""
    await scene.hit(signal.SIGSTOP)
    await scene.await_state("stopping", "back-off", "starting")


async def hiccup(scene: Scene) -> None:
    """Stop the engine's process for a moment."""
    pid = await asyncio.to_thread(scene.world.strike, signal.SIGSTOP)
    await asyncio.sleep(scene.rng.uniform(0.05, 0.5))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid or 0, signal.SIGCONT)


async def death_while_loading(scene: Scene) -> None:
    """End the engine, and its successors as they load."""
    await scene.hit(signal.SIGKILL)
    for _ in range(scene.rng.randint(1, 2)):
        await scene.await_state("starting")
        await asyncio.sleep(scene.rng.uniform(0, 0.1))
        await scene.hit(signal.SIGKILL)


async def death_in_a_stream(scene: Scene) -> None:
    """End the engine while it answers several streams."""
    body = {"prompt": "Once upon a time", "max_tokens": 150, "stream": True, "ignore_eos": True}
    streams = [asyncio.create_task(scene.load.ask(body)) for _ in range(scene.rng.randint(1, 4))]
    await asyncio.sleep(scene.rng.uniform(0.05, 0.4))
    await scene.hit(signal.SIGKILL)
    await asyncio.gather(*streams)


async def refused_start(scene: Scene) -> None:
    """End the engine, and have its file refuse to run for a few starts."""
    world, good = scene.world, scene.world.engine_file.read_bytes()
    data, mode = scene.rng.choice(_HARMLESS)
    restarts = (await asyncio.to_thread(world.status))["restarts"]
    world.replace_file(world.engine_file, data, mode)
    await scene.hit(signal.SIGKILL)
    wanted = restarts + scene.rng.randint(1, 3)
    await until(lambda: world.status().get("restarts", 0) >= wanted, "a start that is refused")
    world.replace_file(world.engine_file, good)
    await scene.await_state("ready", "failed")  # a machine that is slow enough sees five refusals
    if (await asyncio.to_thread(world.status))["state"] == "failed":
        await scene.reload()


async def failed_for_good(scene: Scene) -> None:
    """Have the engine's file refuse to run until no start is tried any more, then mend it and ask for a reload."""
    world, good = scene.world, scene.world.engine_file.read_bytes()
    world.replace_file(world.engine_file, None)
    await scene.hit(signal.SIGKILL)
    await scene.await_state("failed")
    with contextlib.suppress(LlamaopsError):
        raise Broken(f"a reload without an engine was taken: {await scene.reload()}")
    if not (reason := await scene.load.refusal("/readyz")).startswith("the engine is failed: "):
        raise Broken(f"/readyz says {reason!r}")
    world.replace_file(world.engine_file, good)
    if scene.rng.random() < 0.5:
        await scene.reload()
    else:
        world.replace_file(world.profile, world.profile.read_bytes() + b"# mended\n")
    await scene.await_state("ready")


# Reloads.


async def reload_storm(scene: Scene) -> None:
    """Send many SIGHUPs, some after a change that needs a new engine."""
    for _ in range(scene.rng.randint(3, 12)):
        if scene.rng.random() < 0.3:
            scene.world.renew_profile()
        scene.hang_up()
        await asyncio.sleep(scene.rng.choice((0, 0, 0.01, 0.1)))
    await scene.reload()


async def broken_profile(scene: Scene) -> None:
    """Reload a profile that does not hold; the engine must not notice."""
    pid = (await asyncio.to_thread(scene.world.status))["pid"]
    good = scene.world.profile.read_bytes()
    bad = scene.rng.choice((b"", b"{", b"\xff\xfe", good + b"nonsense: 1\n", good.replace(b"context: ", b"context: -")))
    scene.world.replace_file(scene.world.profile, bad)
    scene.hang_up()
    with contextlib.suppress(LlamaopsError):
        raise Broken(f"a broken profile was taken: {await scene.reload()}")
    scene.world.replace_file(scene.world.profile, good)
    if pid != (await asyncio.to_thread(scene.world.status))["pid"]:
        raise Broken("the engine was replaced for a broken profile")


async def reload_that_fails(scene: Scene) -> None:
    """Reload a profile that is right, but with which no engine starts; the old one goes on."""
    good = scene.world.profile.read_bytes()
    bad = good.replace(b"[--load", b"[--lora, /nowhere/adapter.gguf, --load")
    scene.world.replace_file(scene.world.profile, bad)
    with contextlib.suppress(LlamaopsError):
        raise Broken(f"an engine that can't start was taken: {await scene.reload()}")
    scene.world.replace_file(scene.world.profile, good)


async def death_in_a_reload(scene: Scene) -> None:
    """End the old engine or the new one while one replaces the other."""
    scene.world.renew_profile()
    reloading = asyncio.create_task(scene.reload())
    for _ in range(scene.rng.randint(1, 2)):
        await asyncio.sleep(scene.rng.uniform(0.02, 0.4))
        for pid in scene.rng.sample(sorted(scene.world.children()), k=1) if scene.world.children() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    await asyncio.gather(reloading, return_exceptions=True)
    with contextlib.suppress(LlamaopsError):  # the profile is right: once nobody disturbs it, it is taken
        await scene.reload()


async def upgrade(scene: Scene) -> None:
    """Install another llamaops and reload, sometimes first one that does not run."""
    world = scene.world
    if scene.rng.random() < 0.3:
        world.install("0", "raise SystemExit('half installed')")
        with contextlib.suppress(LlamaopsError):
            raise Broken(f"a llamaops that does not run was taken: {await scene.reload()}")
    version = f"1.{scene.rng.randrange(10**9)}"
    world.install(version)
    if "takes over" not in (said := await scene.reload()):
        raise Broken(f"the new llamaops was not taken: {said}")
    await until(lambda: world.runs_version(version), f"llamaops {version} serves")


# The surroundings.


async def disk_full(scene: Scene) -> None:
    """Fill the disk that it logs to, end the engine, and make room only when it serves again."""
    ballast = scene.world.state / _BALLAST
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    await scene.hit(signal.SIGKILL)
    await scene.load.served()
    ballast.unlink()
    logs = [scene.world.state / "up.log", scene.world.state / "llamaops" / "chaos" / "engine.log"]
    sizes = list(map(_size, logs))
    await scene.hit(signal.SIGTERM)  # so that there is something to log
    await until(lambda: all(_size(log) != size for log, size in zip(logs, sizes, strict=True)),
                "the logs go on once there is room")


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


async def memory_limit(scene: Scene) -> None:
    """End the engine, and leave too little memory for another until the kernel has killed one."""
    world = scene.world
    limit = world.anonymous_bytes() - (30 << 20)
    while not await _limit_between_two_engines(scene, limit):
        await scene.load.served()
    await until(lambda: (world.status().get("last_exit") or {}).get("oom_killed"), "an engine was killed for memory")
    world.limit_memory(-1)


async def _limit_between_two_engines(scene: Scene, limit: int) -> bool:
    """Limit the memory while no engine holds any; on a busy machine the next may be there first."""
    await scene.hit(signal.SIGKILL)
    try:
        await until(lambda: scene.world.limit_memory(limit), "the memory limit is taken", every_s=0.001, within_s=5)
    except Broken:
        return False
    return True


async def clock_jump(scene: Scene) -> None:
    """Let the wall clock jump, back and forth, over a restart."""
    for _ in range(3):
        scene.world.shift_clock(scene.rng.choice((-10**9, -86400, -3600, -1, 1, 3600, 86400, 10**9)))
        await asyncio.sleep(scene.rng.uniform(0, 0.1))
    await scene.hit(signal.SIGKILL)
    await scene.await_state("back-off", "starting", "ready")
    scene.world.shift_clock(scene.rng.choice((-86400, 0, 86400)))


async def suspended(scene: Scene) -> None:
    """Stop the supervisor itself for a moment, as a suspended machine would; the engine may die meanwhile."""
    os.kill(scene.world.pid, signal.SIGSTOP)
    await asyncio.sleep(scene.rng.uniform(0.1, 1.5))
    if scene.rng.random() < 0.5:
        for pid in scene.world.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    os.kill(scene.world.pid, signal.SIGCONT)


# Clients. Theirs are requests that nobody waits for: they are not counted.


def _connect(scene: Scene) -> socket.socket:
    host, port = scene.load.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    return sock


def _request(tokens: int, stream: bool) -> bytes:
    body = b'{"prompt": "Once", "max_tokens": %d, "ignore_eos": true, "stream": %b}' % (
        tokens, b"true" if stream else b"false")
    return (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)) + body


async def dead_clients(scene: Scene) -> None:
    """Let clients die: before, in and after their request, with a reset or without a word."""
    for _ in range(scene.rng.randint(3, 10)):
        sock = _connect(scene)
        data = _request(scene.rng.choice((1, 60)), scene.rng.random() < 0.5)
        sock.sendall(data[: scene.rng.choice((0, 10, len(data) - 3, len(data), len(data)))])
        await asyncio.sleep(scene.rng.choice((0, 0.01, 0.05)))
        if scene.rng.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()


async def slow_clients(scene: Scene) -> None:
    """Let clients send their requests by the byte, or read no answer, for a while."""
    socks = [_connect(scene) for _ in range(scene.rng.randint(2, 5))]
    for sock in socks:
        data = _request(60, stream=True)
        if scene.rng.random() < 0.5:
            sock.sendall(data)
            continue
        for byte in data[:40]:
            sock.sendall(bytes([byte]))
            await asyncio.sleep(0.002)
    await asyncio.sleep(scene.rng.uniform(0.1, 0.5))
    await scene.load.served()  # others are served meanwhile
    for sock in socks:
        sock.close()


Fault = Callable[[Scene], Awaitable[None]]

FAULTS: tuple[tuple[Fault, int, str], ...] = (
    (deadly_signal, 6, ""), (freeze, 2, ""), (hiccup, 2, ""), (death_while_loading, 2, ""), (death_in_a_stream, 3, ""),
    (refused_start, 2, ""), (failed_for_good, 1, ""),
    (reload_storm, 2, ""), (broken_profile, 2, ""), (reload_that_fails, 1, ""),
    (death_in_a_reload, 2, ""), (upgrade, 1, "upgrade"),
    (disk_full, 1, "disk"), (memory_limit, 1, "memory"), (clock_jump, 2, "clock"),
    (suspended, 1, ""), (dead_clients, 2, ""), (slow_clients, 2, ""),
)
"""Each fault, how often it comes in a round, and what the world must have for it."""


def a_round(world: World, rng: random.Random) -> list[Fault]:
    """Return one round of the faults that are possible here, in random order."""
    faults = [fault for fault, times, needs in FAULTS if needs not in world.left_out for _ in range(times)]
    rng.shuffle(faults)
    return faults
