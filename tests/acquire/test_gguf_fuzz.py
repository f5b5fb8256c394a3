"""Mutated headers: never a crash, never much memory, always a model or a named error.

``LLAMAOPS_FUZZ=1000000`` runs more of them, ``LLAMAOPS_FUZZ_SEED`` others.
"""

from __future__ import annotations

import os
import random
import struct
import tracemalloc

from gguf_bytes import LLAMA, gguf

from llamaops.core.gguf_header import HeaderError, MoreNeededError, parse_header, to_model

COUNT = int(os.environ.get("LLAMAOPS_FUZZ", "10000"))
SEED = int(os.environ.get("LLAMAOPS_FUZZ_SEED", "11434"))
MOST_BYTES = 2 << 20
HOSTILE = [0, 1, 3, 8, 9, 13, 0xFF, 2**16, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
WHOLE = [
    gguf(),
    gguf({**LLAMA, "llama.attention.head_count_kv": [2, 4, 0], "x.flag": True, "x.scale": 0.5}),
    gguf({"general.architecture": "bert", "bert.pooling_type": 1, "tokenizer.ggml.tokens": ["a"] * 300}, version=2),
]


def mutated(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(WHOLE)[:1500])
    for _ in range(rng.randint(1, 6)):
        at, kind = rng.randrange(4, len(data) - 8), rng.randrange(6)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", rng.choice([*HOSTILE, len(data)]))
        elif kind == 3:
            data[at : at + 4] = struct.pack("<I", rng.choice(HOSTILE) & 0xFFFFFFFF)
        elif kind == 4:
            data[at:at] = data[at : at + rng.randrange(64)]
        elif len(data) > 200:
            del data[at : at + rng.randrange(64)]
    return bytes(data)


def test_every_mutation_ends_in_a_model_or_a_named_error() -> None:
    rng, models, errors = random.Random(SEED), 0, 0
    tracemalloc.start()
    try:
        for number in range(COUNT):
            data = mutated(rng)
            stated = rng.choice([len(data), len(data) + (1 << 20), 1 << 62])
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                to_model(parse_header(data, stated), "m", stated, None, None)
                models += 1
            except HeaderError as exc:
                errors += 1
                assert 10 < len(str(exc)) < 400, f"mutation {number} of seed {SEED}: {exc}"
            except MoreNeededError as exc:
                assert len(data) < exc.bytes <= stated, f"mutation {number} of seed {SEED}"
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < MOST_BYTES, f"mutation {number} of seed {SEED} took {taken} bytes"
    finally:
        tracemalloc.stop()
    assert models > COUNT // 100, "some mutations must leave a model, else nothing behind the first check is reached"
    assert errors > COUNT // 3
