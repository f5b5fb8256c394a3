"""Which files of a model in Hugging Face format converting needs, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable

INDEX = "model.safetensors.index.json"
"""Names the file of each tensor, where the weights are split."""
CONFIGS = ("config.json", "adapter_config.json")
"""One of them must be there: of a model, or of a LoRA adapter."""
_SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
_TEXT = re.compile(
    r"(adapter_|generation_|preprocessor_|processor_|video_preprocessor_|tokenizer_|sentence_bert_)?config\.json"
    r"|tokenizer\S*\.(json|model|txt)|(vocab|merges)\.\w+|(added_tokens|special_tokens_map|modules)\.json|\S+\.tiktoken"
    r"|(spiece|sentencepiece\.bpe|source|target)\.(model|spm)|chat_template\.(json|jinja)|\d+_Pooling/config\.json"
    r"|LICENSE(\.\w+)?|" + re.escape(INDEX)
)
_TOKENIZER = re.compile(r"tokenizer\.(json|model)|vocab\.\w+|spiece\.model|sentencepiece\.bpe\.model|\S+\.tiktoken")


def checkpoint_files(names: Iterable[str]) -> tuple[str, ...]:
    """Return what converting needs, weights last; empty where there is no model in this format.

    Of several forms of the weights one: ``model.safetensors``, its parts, or an adapter's. Pickles, ONNX, TensorFlow
    and the publisher's own ``consolidated`` copy are left out.
    """
    known = sorted(names)
    weights = _weights(known)
    if not weights or not any(config in known for config in CONFIGS):
        return ()
    return (*(name for name in known if _TEXT.fullmatch(name)), *weights)


def is_whole(names: Iterable[str]) -> bool:
    """Tell whether a folder with these files can be converted: configuration, every part of the weights, tokenizer."""
    known = set(names)
    weights = _weights(sorted(known))
    if "adapter_config.json" in known:
        return bool(weights)
    part = _SHARD.fullmatch(weights[0]) if weights else None
    complete = bool(weights) and (part is None or len(weights) == int(part[1]))
    return complete and "config.json" in known and any(_TOKENIZER.fullmatch(name) for name in known)


def _weights(known: list[str]) -> tuple[str, ...]:
    for whole in ("model.safetensors", "adapter_model.safetensors"):
        if whole in known:
            return (whole,)
    return tuple(name for name in known if _SHARD.fullmatch(name))
