"""How a running engine differs from its plan: threads, memory nodes, CPUs that went away, a quota that stops it."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from llamaops.core.cpuset import CpuSet
from llamaops.core.plan import Note, Placement
from llamaops.sensors import throttled_s
from llamaops.serve.threads import apply_priority, lift_threads, read_back

log = logging.getLogger("llamaops")

FAR_SHARE = 0.1
"""From this share of the memory on other nodes on, decode is slower by more than a few per cent."""

THROTTLED_SHARE = 0.01
"""A quota that stops the cgroup for more than this share of the time is felt: all threads stop at once."""

_PAGES = re.compile(r" N(\d+)=(\d+)")
_PAGE_KIB = re.compile(r"kernelpagesize_kB=(\d+)")


class DriftWatch:
    """Compares engines with their plan, again and again; remembers what the throttling counter was the last time."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._throttled: tuple[float, float] | None = None
        self.look_at_throttling()

    def look(self, pid: int, placement: Placement) -> list[Note]:
        """Set the priorities that a launch can't, then return each way in which the engine differs from its plan.

        Blocks for the milliseconds that the kernel takes to walk the engine's memory, where nodes matter.
        """
        found = (self._stale(placement), self._far_memory(pid, placement), self.look_at_throttling())
        return [*lift_threads(pid, placement), *read_back(pid, placement), *(note for note in found if note)]

    def _stale(self, placement: Placement) -> Note | None:
        """Tell of planned CPUs that have gone offline: the threads meant for them crowd on the others."""
        try:
            online = CpuSet.parse((self._root / "sys/devices/system/cpu/online").read_text())
        except (OSError, ValueError):
            return None
        gone = CpuSet(((placement.cpus or CpuSet()) | (placement.batch_cpus or CpuSet())) - online)
        if not online or not gone:
            return None
        return Note("degraded", "plan-stale", f"CPUs {gone} of the plan went offline; llamaops reload makes a new plan")

    def _far_memory(self, pid: int, placement: Placement) -> Note | None:
        if placement.numa != "bind" or not placement.mem_nodes:
            return None
        try:
            resident = memory_nodes((self._root / f"proc/{pid}/numa_maps").read_text(errors="replace"))
        except OSError:
            return None
        far = {node: size for node, size in resident.items() if node not in placement.mem_nodes}
        share = sum(far.values()) / max(1, sum(resident.values()))
        if share < FAR_SHARE:
            return None
        return Note("degraded", "drift-memory-node", f"{share:.0%} of the engine's memory ({sum(far.values()) >> 20} "
                    f"MiB) is on nodes {CpuSet(far)}, planned was {placement.mem_nodes}: pages that were in the page "
                    "cache before stay where they are. Drop it (echo 1 | sudo tee /proc/sys/vm/drop_caches) and start "
                    "again, or read the file instead of mapping it: engine.args: [--load-mode, none]")

    def look_at_throttling(self) -> Note | None:
        """Tell how long a CPU quota has stopped us since the last look."""
        now, stopped = self._clock(), throttled_s(self._root)
        before, self._throttled = self._throttled, None if stopped is None else (now, stopped)
        if before is None or stopped is None:
            return None
        passed, lost = now - before[0], stopped - before[1]
        if lost <= THROTTLED_SHARE * passed:
            return None
        return Note("degraded", "throttled", f"the cgroup's CPU quota took {lost:.1f} CPU seconds of the last "
                    f"{passed:.0f} s: fewer threads (placement.threads), or a larger quota")


class Drift:
    """How relay and engines differ from what was planned for them; each difference is logged once, and its end, too.

    ``planned`` is the placement of the engine that is started next.
    """

    def __init__(self, planned: Placement) -> None:
        self.planned = planned
        self._watch = DriftWatch()
        self._placements: dict[int, Placement] = {}
        self._at_start: dict[str, Note] = {}
        self._told: set[str] = set()

    def on_spawn(self, pid: int) -> None:
        """Set the priorities of an engine that has just been started."""
        self._placements = {**dict(list(self._placements.items())[-1:]), pid: self.planned}  # while replacing: two live
        self.note(apply_priority(pid, self.planned))

    def read_back(self, pid: int) -> list[Note]:
        """Compare an engine with the plan it was started by."""
        notes = self._watch.look(pid, self._placements.get(pid, self.planned))
        codes = {note.code for note in notes}
        for note in notes:
            if note.code not in self._told:
                log.warning("degraded: %s [%s]", note.text, note.code)
        for code in sorted(self._told - codes):
            log.info("as planned again [%s]", code)
        self._told = codes
        return notes

    def note(self, notes: Iterable[Note]) -> None:
        """Keep what could not be set as planned, until the next plan."""
        for note in notes:
            if note.code not in self._at_start:
                log.warning("degraded: %s [%s]", note.text, note.code)
            self._at_start[note.code] = note

    def start_anew(self) -> None:
        """Forget what could not be set: there is another plan."""
        self._at_start.clear()

    def notes(self) -> list[Note]:
        """Return what could not be set as planned."""
        return list(self._at_start.values())


def memory_nodes(numa_maps: str) -> dict[int, int]:
    """Return the resident bytes on each node from ``/proc/<pid>/numa_maps`` (proc(5))."""
    resident: Counter[int] = Counter()
    for line in numa_maps.splitlines():
        size = _PAGE_KIB.search(line)
        for node, pages in _PAGES.findall(line):
            resident[int(node)] += int(pages) * (int(size[1]) if size else 4) * 1024
    return dict(resident)
