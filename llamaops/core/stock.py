"""What lies in the caches, what depends on what, and what goes first when room is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llamaops.core.gguf_names import part_names

Kind = Literal["hub", "wheel", "url", "converted", "quantized", "imatrix", "incomplete"]


@dataclass(frozen=True, slots=True)
class Item:
    """One model in a cache, or the begin of one.

    ``path`` is a GGUF (of a split model the first part) or the folder of a checkpoint. ``used`` is when it was last
    opened, seconds since 1970. ``made_from`` is the path of what it was made of. ``ours``: llamaops put it there;
    what other tools fetched into the hub's cache is shown, and removed by name only.
    """

    name: str
    kind: Kind
    path: str
    size_bytes: int
    used: float
    quant: str | None = None
    architecture: str | None = None
    made_from: str | None = None
    ours: bool = True


def dependants(item: Item, items: Sequence[Item]) -> list[Item]:
    """Return what was made of an item, directly or not; without it they would not be found any more."""
    direct = [other for other in items if other is not item and other.made_from and _holds(item.path, other.made_from)]
    return [*direct, *(more for each in direct for more in dependants(each, items))]


def _holds(path: str, inner: str) -> bool:
    return inner == path or inner.startswith(f"{path}/")


def victims(items: Sequence[Item], max_bytes: int, kept: Collection[str]) -> list[Item]:
    """Return what to remove so that llamaops' items take at most ``max_bytes``: the longest unused first.

    What something was made of goes after all that was made of it, and nothing whose path is in ``kept`` goes, nor
    what that was made of.
    """
    ours = [item for item in items if item.ours]
    over, gone = sum(item.size_bytes for item in ours) - max_bytes, []
    for item in sorted(ours, key=lambda each: _age_key(each, ours)):
        if over <= 0:
            break
        if not any(_holds(each.path, path) for each in (item, *dependants(item, ours)) for path in kept):
            gone.append(item)
            over -= item.size_bytes
    return gone


def user_of(item: Item, users: Mapping[str, str]) -> str | None:
    """Return who uses an item; ``users`` are by path."""
    return next((user for path, user in users.items() if _holds(item.path, path)), None)


def _age_key(item: Item, items: Sequence[Item]) -> tuple[float, int]:
    below = dependants(item, items)
    return max([item.used, *(other.used for other in below)]), len(below)


def matching(name: str, items: Sequence[Item]) -> list[Item]:
    """Return the items that a name, a path, or a file's name means; a repository means all its files."""
    exact = [item for item in items if name in (item.name, item.path, *_parts(item))]
    return exact or [item for item in items if item.name.startswith(f"{name}:") or item.path.endswith(f"/{name}")]


def _parts(item: Item) -> Iterator[str]:
    folder, _, file = item.path.rpartition("/")
    yield from (f"{folder}/{part}" for part in part_names(file))
