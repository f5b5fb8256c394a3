"""A run of random faults with the checks after each, and what is reported of it."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from chaos.faults import Fault, Scene, a_round
from chaos.load import Load
from chaos.world import Broken, World, as_json, until

LEAK_S = 120.0
"""How long what is left over may stay once all is calm."""
_CALM = {"lock", "pid", "control.sock"}


@dataclass
class Report:
    """What a run has seen."""

    seed: int
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    outcomes: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    restarts: int = 0
    wall_s: float = 0.0
    rss_mib: tuple[float, float] = (0.0, 0.0)
    descriptors: tuple[int, int] = (0, 0)

    @property
    def faults(self) -> int:
        """How many faults there were."""
        return sum(map(len, self.recovery_s.values()))

    def table(self) -> str:
        """Return it as a person reads it."""
        lines = [f"{'fault':<24}{'times':>6}{'back after: median':>20}{'longest':>9}"]
        for name, times in sorted(self.recovery_s.items()):
            lines.append(f"{name:<24}{len(times):>6}{statistics.median(times):>18.2f} s{max(times):>7.2f} s")
        lines += [
            "", f"{self.faults} faults in {self.wall_s:.0f} s, seed {self.seed}; {self.restarts} restarts by back-off",
            "requests: " + ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items())),
            f"supervisor: RSS {self.rss_mib[0]:.1f} → {self.rss_mib[1]:.1f} MiB, "
            f"descriptors {self.descriptors[0]} → {self.descriptors[1]}",
            *(f"left out, {name}: {why}" for name, why in self.left_out.items())]
        return "\n".join(lines)


class Run:
    """Faults, one after another, until ``enough`` of the report so far; raises Broken at the first broken promise."""

    def __init__(self, world: World, seed: int, enough: Callable[[Report], bool]) -> None:
        self.world, self.enough = world, enough
        self.rng = random.Random(seed)
        self.report = Report(seed, left_out=world.left_out)

    async def run(self) -> Report:
        """Do it all: start, faults, stop, nothing left."""
        await self.world.start()
        load = Load(self.world.url, random.Random(self.report.seed))
        began = time.monotonic()
        try:
            await self._faults(Scene(self.world, load, self.rng))
            await load.close()
            self._check_load(load)
            self.report.wall_s = time.monotonic() - began
            self.report.restarts = self.world.status()["restarts"]
            await self.world.stop()
        except Exception as exc:
            raise Broken(f"seed {self.report.seed}, fault {self.report.faults + 1}, {load.during}: {exc}\n"
                         f"{self.world.complaints()}") from exc
        finally:
            await load.abandon()
        return self.report

    async def _faults(self, scene: Scene) -> None:
        await self._settle(scene, self.world.descriptors())
        calm = self.world.descriptors()
        rss = self.world.rss_mib()
        while not self.enough(self.report):
            for fault in a_round(self.world, self.rng):
                await self._one(scene, fault, calm)
                self.report.outcomes = {**scene.load.outcomes, "lost": len(scene.load.lost)}
                if self.enough(self.report):
                    break
        self.report.rss_mib = (rss, self.world.rss_mib())
        self.report.descriptors = (len(calm), len(self.world.descriptors()))

    async def _one(self, scene: Scene, fault: Fault, calm: list[str]) -> None:
        scene.load.during = fault.__name__
        await fault(scene)
        harmed = time.monotonic()
        await scene.load.served()
        recovery_s = time.monotonic() - harmed
        await self._settle(scene, calm)
        self._check_load(scene.load)
        self.report.recovery_s[fault.__name__].append(recovery_s)

    async def _settle(self, scene: Scene, calm: list[str]) -> None:
        """Hold the clients, and await that all is as it was: one engine, no request, descriptor or file more."""
        await until(self.world.is_serving, f"one engine serves: {as_json(self.world.status())}")
        await scene.load.pause()
        await until(lambda: not self.world.status()["requests"]["in_flight"], "no request is left in the engine")
        await until(lambda: len(self.world.descriptors()) <= len(calm),
                    f"no descriptor is left: {calm}, now {self.world.descriptors()}", within_s=LEAK_S)
        socket = {f"engine-{self.world.status()['generation']}.sock"}
        await until(lambda: self.world.runtime_files() == _CALM | socket, f"no file is left, besides {socket}",
                    within_s=LEAK_S)
        scene.load.resume()

    def _check_load(self, load: Load) -> None:
        if load.lost:
            raise Broken("requests without an answer or an error:\n" + "\n".join(load.lost[:10]))


def run(world: World, seed: int, enough: Callable[[Report], bool]) -> Report:
    """Run to the end and leave nothing, whatever happens."""
    try:
        return asyncio.run(Run(world, seed, enough).run())
    finally:
        world.close()
