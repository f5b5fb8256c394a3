"""What depends on what in the caches, and what goes first."""

from __future__ import annotations

import pytest

from llamaops.core.stock import Item, dependants, matching, user_of, victims

MIB = 1 << 20
WHEEL = Item("wheel:m==1", "wheel", "/c/wheel/m-1", 100 * MIB, used=10)
F16 = Item("m-F16.gguf", "converted", "/c/converted/m-F16.gguf", 80 * MIB, 20, "F16", made_from="/c/wheel/m-1/model")
Q8 = Item("m-Q8_0.gguf", "quantized", "/c/quantized/m-Q8_0.gguf", 50 * MIB, 90, "Q8_0", made_from=F16.path)
Q4 = Item("m-Q4_0.gguf", "quantized", "/c/quantized/m-Q4_0.gguf", 30 * MIB, 30, "Q4_0", made_from=F16.path)
URL = Item("https://h/x.gguf", "url", "/c/url/ab/x.gguf", 40 * MIB, 60)
HUB = Item("hf:o/r:a-00001-of-00002.gguf", "hub", "/h/s/a-00001-of-00002.gguf", 900 * MIB, 1, ours=False)
ALL = [WHEEL, F16, Q8, Q4, URL, HUB]
OURS = 300 * MIB


def test_what_was_made_of_what() -> None:
    assert dependants(WHEEL, ALL) == [F16, Q8, Q4]
    assert dependants(F16, ALL) == [Q8, Q4]
    assert dependants(Q4, ALL) == dependants(HUB, ALL) == []


@pytest.mark.parametrize(("max_mib", "kept", "gone"), [
    (300, (), []),
    (299, (), [Q4]),
    (260, (), [Q4, URL]),
    (200, (), [Q4, URL, Q8]),
    (100, (), [Q4, URL, Q8, F16]),
    (0, (), [Q4, URL, Q8, F16, WHEEL]),
    (0, (Q4.path,), [URL, Q8]),
    (0, ("/c/wheel/m-1/model/model.safetensors",), [Q4, URL, Q8, F16]),
])
def test_the_longest_unused_goes_first_sources_after_what_needs_them(
    max_mib: int, kept: tuple[str, ...], gone: list[Item]
) -> None:
    assert victims(ALL, max_mib * MIB, kept) == gone


def test_names() -> None:
    assert matching("wheel:m==1", ALL) == [WHEEL]
    assert matching("/c/url/ab/x.gguf", ALL) == matching("x.gguf", ALL) == [URL]
    assert matching("hf:o/r", ALL) == matching("/h/s/a-00002-of-00002.gguf", ALL) == [HUB]
    assert matching("hf:o", ALL) == matching("gguf", ALL) == []


def test_who_uses_it() -> None:
    assert user_of(WHEEL, {"/c/wheel/m-1/model": "x"}) == "x"
    assert user_of(WHEEL, {"/c/wheel/m-10/model": "x"}) is None
