"""The memory sum against what llama-server b11434 was measured to take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llamaops.core.cpuset import CpuSet
from llamaops.core.memory import MIB, Sizes, auto_prompt_cache_mib, available_memory, kv_bytes, sum_memory
from llamaops.core.model import Model
from llamaops.core.plan import plan
from llamaops.core.profile import parse_profile
from llamaops.core.topology import Cgroup, Host, Rights
from llamaops.errors import WrongProfile

SMOL = Model(path="/m/smol.gguf", size_bytes=98_000_000, architecture="llama", quant="Q4_1", parameters=134_515_008,
             layers=30,
             embedding=576, heads=9, kv_heads=3, head_dim_k=64, head_dim_v=64, feed_forward=1536, vocab=49152,
             context_train=8192)
QWEN = Model(path="/m/qwen.gguf", size_bytes=397_804_640, architecture="qwen2", quant="Q4_K_M", parameters=494_032_768,
             layers=24, embedding=896, heads=14, kv_heads=2, head_dim_k=64, head_dim_v=64, feed_forward=4864,
             vocab=151936,
             context_train=32768)

MEASURED = [  # resident MiB under load of a 1200-token prompt, without prompt cache
    (SMOL, Sizes(1, 4096, 64, "f16", "f16", 0), 221),
    (SMOL, Sizes(1, 4096, 512, "f16", "f16", 0), 234),
    (SMOL, Sizes(4, 4096, 512, "f16", "f16", 0), 505),
    (SMOL, Sizes(1, 4096, 64, "q8_0", "q8_0", 0), 179),
    (QWEN, Sizes(1, 4096, 64, "f16", "f16", 0, mmap=False), 497),
    (QWEN, Sizes(1, 4096, 128, "f16", "f16", 0, mmap=False), 499),
    (QWEN, Sizes(2, 4096, 16, "q8_0", "q8_0", 0, mmap=False), 495),
    (QWEN, Sizes(4, 2048, 24, "q8_0", "q8_0", 0, mmap=False), 498),
]


@pytest.mark.parametrize(("model", "sizes", "measured"), MEASURED)
def test_the_sum_covers_what_was_measured_and_not_much_more(model, sizes, measured):
    total = sum_memory(model, sizes, None, lock=False).total_bytes / MIB
    assert measured <= total <= measured * 1.05


def test_mapped_weights_that_are_repacked_may_be_in_memory_twice():
    mapped = sum_memory(QWEN, Sizes(1, 4096, 64, "f16", "f16", 0), None, lock=False)
    read = sum_memory(QWEN, Sizes(1, 4096, 64, "f16", "f16", 0, mmap=False), None, lock=False)
    assert mapped.total_bytes - read.total_bytes == mapped.repack_bytes == QWEN.size_bytes


@pytest.mark.parametrize(("types", "mib"), [(("f16", "f16"), 90), (("q8_0", "q8_0"), 47.8125), (("f16", "q4_0"),
                                                                                                57.65625)])
def test_kv_cache_is_layers_times_heads_times_both_head_sizes(types, mib):
    assert kv_bytes(SMOL, 4096, *types) == mib * MIB


@pytest.mark.parametrize(("available", "headroom", "limit", "asked", "least", "name"), [
    (8, None, None, None, 8, "MemAvailable"),
    (8, 3, 4, None, 3, "cgroup"),
    (8, None, 4, None, 4, "cgroup"),
    (8, 3, 4, 2, 2, "memory.limit"),
    (None, None, None, None, None, "unknown"),
])
def test_the_tightest_bound_counts(available, headroom, limit, asked, least, name):
    host = Host(mem_available=available, cgroup=Cgroup(memory_headroom=headroom, memory_limit=limit))
    found, why = available_memory(host, asked)
    assert found == least and name in why


def test_the_prompt_cache_is_never_the_engines_default_of_8_gib():
    assert auto_prompt_cache_mib(SMOL, 4096, 1 << 40) == 180
    assert auto_prompt_cache_mib(SMOL, 4096, 800 * MIB) == 64  # of an eighth: 100
    assert auto_prompt_cache_mib(SMOL, 1 << 20, 1 << 40) == 512
    assert auto_prompt_cache_mib(None, 4096, 8 << 30) == 256


def qwen_plan(text: str, model: str = ""):
    text = f"model: {{source: 'path:/m/qwen.gguf'{model}}}\n{text}"
    profile = parse_profile(text, stem="x", base=Path("/"), environ={})
    return plan(profile, Host(online=CpuSet({0, 1}), mem_available=24 << 30), QWEN, None)


def test_half_a_gigabyte_holds_the_half_billion_model():
    planned = qwen_plan("memory: {limit: 512MiB}")
    assert planned.memory.total_bytes <= 512 * MIB
    assert not planned.memory.mmap
    assert {note.code for note in planned.notes} >= {"memory-no-mmap", "memory-slots-shrunk"}


def test_what_can_not_fit_is_refused_with_the_sums():
    with pytest.raises(WrongProfile) as caught:
        qwen_plan("memory: {limit: 300MiB}")
    assert caught.value.where == "memory"
    assert "weights" in (caught.value.detail or "") and "379 MiB" in (caught.value.detail or "")


@pytest.mark.parametrize(("limit", "stated", "said", "unsaid"), [
    ("100MiB", "", ("no context is small enough", "quant type", "raise the limit"), ("kv_type", "model.context")),
    ("600MiB", ", context: 32768, kv_type: f16", ("model.context (now 32768", "kv_type q8_0"), ("no context",)),
    ("600MiB", ", context: 32768, kv_type: q8_0", ("model.context (now 32768",), ("kv_type q8_0", "prompt_cache_mib")),
])
def test_a_refusal_names_only_what_would_help(limit, stated, said, unsaid):
    with pytest.raises(WrongProfile) as caught:
        qwen_plan(f"memory: {{limit: {limit}}}", stated)
    assert all(words in caught.value.fix for words in said)
    assert not any(words in caught.value.fix for words in unsaid)


def test_what_the_profile_states_is_never_shrunk():
    planned = qwen_plan("serve: {slots: 4}\nmemory: {limit: 512MiB}")
    assert planned.serving.slots == 4
    assert planned.serving.context < 4096 and planned.serving.kv_type_k == "q8_0"
    with pytest.raises(WrongProfile, match="does not fit"):
        qwen_plan("memory: {prompt_cache_mib: 512, limit: 512MiB}")


@pytest.mark.parametrize(("args", "kv_type"), [("['--flash-attn', 'off']", "f16"), ("['--flash-attn', 'on']", "q8_0")])
def test_a_cache_is_not_quantized_where_the_engine_could_not_read_it(args, kv_type):
    planned = qwen_plan(f"engine: {{args: {args}}}\nserve: {{slots: 4}}\nmemory: {{limit: 512MiB}}")
    assert planned.serving.kv_type_v == kv_type


def test_a_sliding_window_has_few_checkpoints_and_they_are_counted():
    gemma = replace(SMOL, sliding_window=512)
    sizes = Sizes(4, 4096, 64, "f16", "f16", 0)
    with_window, without = (sum_memory(model, sizes, None, lock=False) for model in (gemma, SMOL))
    assert (with_window.checkpoints, without.checkpoints) == (4, None)
    assert with_window.kv_bytes - without.kv_bytes == 4 * 4 * kv_bytes(SMOL, 576, "f16", "f16")


@pytest.mark.parametrize(("limit", "noted"), [(None, False), (8 * MIB, True), (400 * MIB, True), (4096 * MIB, False)])
def test_a_lock_that_the_limit_cuts_short_is_noted(limit, noted):
    cpus = CpuSet([0, 1])
    host = Host(online=cpus, affinity=cpus, mem_available=8192 * MIB, rights=Rights(memlock_limit=limit))
    profile = parse_profile("model: {source: 'path:/m/qwen.gguf'}\nmemory: {lock: true}", stem="q", base=Path("/"),
                            environ={})
    notes = {note.code for note in plan(profile, host, QWEN, None).notes}
    assert ("memlock-limited" in notes) is noted
