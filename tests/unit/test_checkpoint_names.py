"""Which files of a repository converting needs."""

from __future__ import annotations

import pytest

from llamaops.core.checkpoint_names import checkpoint_files, is_whole

TEXT = ["config.json", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"]


def test_one_form_of_the_weights_and_no_pickles() -> None:
    beside = ["model.fp16.safetensors", "consolidated.safetensors", "pytorch_model.bin", "onnx/config.json"]
    assert checkpoint_files([*TEXT, "model.safetensors", *beside]) == (*TEXT, "model.safetensors")


@pytest.mark.parametrize(
    "more",
    [
        ("1_Pooling/config.json", "modules.json", "vocab.txt"),  # sentence-transformers
        ("spiece.model",), ("sentencepiece.bpe.model",), ("tokenizer.model", "added_tokens.json"),
        ("qwen.tiktoken",), ("preprocessor_config.json", "chat_template.jinja"),
    ],
)  # fmt: skip
def test_what_the_converters_read_is_among_it(more: tuple[str, ...]) -> None:
    assert set(more) < set(checkpoint_files(["config.json", "model.safetensors", *more]))


def test_an_adapter() -> None:
    names = ["adapter_config.json", "adapter_model.safetensors", "README.md"]
    assert checkpoint_files(names) == ("adapter_config.json", "adapter_model.safetensors")
    assert is_whole(names)


@pytest.mark.parametrize("names", [["model.safetensors"], ["config.json", "pytorch_model.bin"], []])
def test_what_is_no_checkpoint(names: list[str]) -> None:
    assert checkpoint_files(names) == ()


@pytest.mark.parametrize(
    ("names", "whole"),
    [
        (["config.json", "tokenizer.json", "model.safetensors"], True),
        (["config.json", "vocab.txt", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], True),
        (["config.json", "vocab.txt", "model-00001-of-00002.safetensors"], False),
        (["config.json", "model.safetensors"], False),
        (["tokenizer.json", "model.safetensors"], False),
        (["config.json", "tokenizer.json"], False),
    ],
)
def test_a_folder_is_whole_with_configuration_tokenizer_and_all_weights(names: list[str], whole: bool) -> None:
    assert is_whole(names) is whole
