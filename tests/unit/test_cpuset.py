"""CPU sets in the kernel's two spellings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaops.core.cpuset import CpuSet


@pytest.mark.parametrize(("text", "ids"), [
    ("", []),
    ("\n", []),
    ("3", [3]),
    ("0-3", [0, 1, 2, 3]),
    ("0-3,8,10-11", [0, 1, 2, 3, 8, 10, 11]),
    (" 1 , 2 \n", [1, 2]),
    ("2,1,1", [1, 2]),
    ("0-11:1/4", [0, 4, 8]),
    ("0-11:2/4", [0, 1, 4, 5, 8, 9]),
    ("8191", [8191]),
])
def test_kernel_lists(text, ids):
    assert sorted(CpuSet.parse(text)) == ids


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "0-3:0/4", "0-3:5/4", "0-3:x", "1.5", "8192",
                                  "0-9999999999", "--"])
def test_what_is_no_list_is_named(text):
    with pytest.raises(ValueError, match="not a CPU id or range"):
        CpuSet.parse(text)


@pytest.mark.parametrize(("ids", "mask"), [
    ([], "0x0"), ([0], "0x1"), ([0, 2, 4, 6, 8, 10, 12, 14], "0x5555"), ([64], "0x10000000000000000"),
])
def test_masks_of_any_width(ids, mask):
    assert CpuSet(ids).mask() == mask


@settings(max_examples=30, deadline=None)
@given(st.frozensets(st.integers(0, 300)))
def test_the_list_form_reads_back(ids):
    cpus = CpuSet(ids)
    assert CpuSet.parse(str(cpus)) == cpus
    assert int(cpus.mask(), 16) == sum(2**cpu for cpu in ids)
