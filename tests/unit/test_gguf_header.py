"""The GGUF header reader: facts, what it refuses and how it names that, and hostile headers."""

from __future__ import annotations

import struct

import pytest
from gguf_bytes import LLAMA, TENSORS, gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaops.core.ggml_types import FILE_TYPES, TENSOR_TYPES
from llamaops.core.gguf_header import HeaderError, MoreNeededError, describe_foreign, parse_header, quant_of, to_model


def test_facts_of_a_model() -> None:
    model = to_model(parse_header(gguf()), "m.gguf", 10, "path:m.gguf", None)
    assert (model.architecture, model.name, model.quant) == ("llama", "Tiny", "Q4_K_M")
    assert (model.layers, model.embedding, model.heads, model.kv_heads) == (2, 64, 4, 2)
    assert (model.head_dim_k, model.head_dim_v) == (16, 16)
    assert (model.vocab, model.context_train, model.feed_forward) == (3, 2048, 128)
    assert model.parameters == 64 * 3 + 64 * 64
    assert model.has_chat_template
    assert model.pooling is None


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"llama.attention.head_count_kv": [2, 4, 0]}, "kv_heads", 4),
        ({"llama.attention.key_length": 128}, "head_dim_k", 128),
        ({"llama.attention.value_length": 96}, "head_dim_v", 96),
        ({"llama.vocab_size": 9}, "vocab", 9),
        ({"llama.attention.sliding_window": 512}, "sliding_window", 512),
        ({"llama.pooling_type": 2}, "pooling", 2),
        ({"tokenizer.chat_template": "  "}, "has_chat_template", False),
        ({"general.name": 7}, "name", None),
        ({"general.file_type": 999}, "quant", "Q8_0"),
        ({"general.file_type": 1}, "quant", "F16"),
        ({"llama.attention.head_count": 0}, "head_dim_k", None),
    ],
)
def test_one_key_changes_one_fact(changes: dict[str, object], field: str, expected: object) -> None:
    model = to_model(parse_header(gguf({**LLAMA, **changes})), "m", 1, None, None)
    assert getattr(model, field) == expected


def test_head_count_of_keys_defaults_to_all_heads() -> None:
    fields = {k: v for k, v in LLAMA.items() if not k.endswith("head_count_kv")}
    assert to_model(parse_header(gguf(fields)), "m", 1, None, None).kv_heads == 4


def test_version_2_is_read() -> None:
    assert parse_header(gguf(version=2)).version == 2


def test_without_tensors_and_file_type_the_quant_is_unknown() -> None:
    assert quant_of(parse_header(gguf({"general.architecture": "x"}, ()))) is None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF"),
        (b"GGUF", "truncated"),
        (b"PK\x03\x04" + b"\0" * 60, "zip"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        (struct.pack("<Q", 200) + b'{"__metadata__":{}}', "safetensors"),
        (b"\x80\x02}q\x00", "pickle"),
        (b"tjgg" + b"\0" * 8, "before GGUF"),
        (b'{"error": "no"}', "JSON"),
        (b"nothing of the kind", "no known model format"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<III", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "newer"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "1099511627776 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "keys are announced"),
        (gguf(data=100), "truncated"),
        (gguf({**LLAMA, "general.alignment": 3}), "general.alignment is 3"),
        (gguf({**LLAMA, "general.alignment": 0}), "general.alignment is 0"),
        (gguf(tensors=(("t", (1 << 40, 1 << 40), 0),), data=0), "elements"),
        (gguf(tensors=(("t", (), 0),)), "0 dimensions"),
        (gguf()[:200], "truncated"),
    ],
)
def test_what_is_refused_is_named(data: bytes, says: str) -> None:
    with pytest.raises(HeaderError, match=says):
        parse_header(data)


def test_a_header_without_architecture_is_refused() -> None:
    with pytest.raises(HeaderError, match=r"general\.architecture"):
        to_model(parse_header(gguf({"a": 1})), "m", 1, None, None)


def test_every_truncation_is_noticed() -> None:
    whole = gguf()
    for length in range(0, len(whole) - 32, 7):
        with pytest.raises(HeaderError):
            parse_header(whole[:length])


def test_nested_arrays_are_refused() -> None:
    nested = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 9, 1)
    with pytest.raises(HeaderError, match="unknown type 9"):
        parse_header(nested + b"\0" * 64)


def test_of_a_begin_the_reader_says_how_much_more_it_needs_or_reads_the_same() -> None:
    whole = gguf({**LLAMA, "llama.scores": list(range(100)), "tokenizer.ggml.merges": ["a b"] * 50})
    expected, asked = parse_header(whole), 0
    for length in range(4, len(whole), 13):
        try:
            assert parse_header(whole[:length], len(whole)) == expected
        except MoreNeededError as exc:
            asked += 1
            assert length < exc.bytes <= len(whole)
    assert asked > 100
    with pytest.raises(HeaderError, match="truncated"):
        parse_header(whole[:-40], len(whole) - 40)


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_after_the_magic_end_in_a_named_error_or_a_header(rest: bytes) -> None:
    try:
        parse_header(b"GGUF\x03\0\0\0" + rest)
    except HeaderError as exc:
        assert str(exc)
    describe_foreign(rest)


def test_tables_agree_with_the_gguf_package() -> None:
    gguf_package = pytest.importorskip("gguf")
    for kind in gguf_package.GGMLQuantizationType:
        block, width = gguf_package.GGML_QUANT_SIZES[kind]
        assert TENSOR_TYPES[kind.value] == (kind.name, block, width)
    for kind in gguf_package.LlamaFileType:
        if kind.name != "GUESSED":
            name = kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
            assert FILE_TYPES[kind.value] == name


def test_tensor_names_are_not_trusted() -> None:
    parse_header(gguf(tensors=[("x" * 500, TENSORS[0][1], 0)]))
