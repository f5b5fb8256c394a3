"""Sets of logical CPU ids and their two Linux spellings: list (``0-3,8``) and hexadecimal mask (``0x10f``)."""

from __future__ import annotations

from collections.abc import Iterable


class CpuSet(frozenset[int]):
    """An immutable set of logical CPU ids; ids may be sparse, so nothing here does arithmetic on them."""

    @classmethod
    def parse(cls, text: str) -> CpuSet:
        """Read a Linux CPU list such as ``0-3,8,10-11:2``.

        The grammar is the kernel's `bitmap_parselist` (admin-guide/kernel-parameters.rst): comma-separated
        ids, ranges ``a-b``, and ``a-b:used/group``. Blank text is the empty set. Raises ValueError naming the bad part.
        """
        ids: set[int] = set()
        for part in filter(None, (p.strip() for p in text.replace("\n", ",").split(","))):
            ids.update(_parse_part(part))
        return cls(ids)

    @classmethod
    def of(cls, ids: Iterable[int]) -> CpuSet:
        """Make a set from any iterable of ids."""
        return cls(ids)

    def __str__(self) -> str:
        """Return the shortest kernel list form, ``""`` for the empty set."""
        out: list[str] = []
        ids = sorted(self)
        i = 0
        while i < len(ids):
            j = i
            while j + 1 < len(ids) and ids[j + 1] == ids[j] + 1:
                j += 1
            out.append(str(ids[i]) if i == j else f"{ids[i]}-{ids[j]}")
            i = j + 1
        return ",".join(out)

    def __repr__(self) -> str:
        return f"CpuSet({str(self)!r})"

    def mask(self) -> str:
        """Return the hexadecimal mask, ``0x`` prefixed and of any width (what ``--cpu-mask`` takes)."""
        return hex(sum(1 << cpu for cpu in self))


def _parse_part(part: str) -> range | list[int]:
    span, _, step = part.partition(":")
    first, dash, last = span.partition("-")
    try:
        lo, hi = int(first), int(last if dash else first)
        used, group = (int(x) for x in step.split("/")) if step else (1, 1)
    except ValueError:
        raise ValueError(f"{part!r} is not a CPU id or range") from None
    if lo < 0 or hi < lo or used < 1 or group < used or hi >= MAX_CPUS:
        raise ValueError(f"{part!r} is not a CPU id or range")
    return [cpu for cpu in range(lo, hi + 1) if (cpu - lo) % group < used]


MAX_CPUS = 8192
"""The largest NR_CPUS the kernel is built with on x86 (arch/x86/Kconfig); larger ids are typing errors."""
