"""What llama-perplexity says about a model: its perplexity, and how far another model's answers are from its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llamaops.core.model import Model, bits_per_weight, is_embedding
from llamaops.errors import ModelUnavailable

CONTEXT = 256
"""Tokens of a chunk; the second half of each is judged. Short chunks get several out of a text that takes seconds."""

_NUMBER = r"(-?[\d.]+(?:e[+-]?\d+)?)"
_PERPLEXITY = re.compile(rf"(?:Final estimate: PPL = |Mean PPL\(Q\)\s*:\s*){_NUMBER}\s*(?:\+/-|±)\s*{_NUMBER}")
_DIVERGENCE = re.compile(rf"Mean\s+KLD:\s*{_NUMBER}\s*±\s*{_NUMBER}")
_SAME_TOP = re.compile(rf"Same top p:\s*{_NUMBER}\s*±\s*{_NUMBER}")


@dataclass(frozen=True, slots=True)
class Quality:
    """How good a model is on a text; ``±`` are standard errors.

    ``divergence`` is the mean Kullback-Leibler divergence from the base in nats a token, ``same_top`` the share of
    tokens whose likeliest is the base's, too. Of the base itself they are 0 and 1.
    """

    perplexity: float
    perplexity_error: float
    divergence: float = 0.0
    divergence_error: float = 0.0
    same_top: float = 1.0


def parse_base(lines: Iterable[str]) -> Quality | None:
    """Read what ``llama-perplexity --kl-divergence-base FILE`` prints when it writes that file (b11434)."""
    found = _PERPLEXITY.search("\n".join(lines))
    return Quality(float(found[1]), float(found[2])) if found else None


def parse_against_base(lines: Iterable[str]) -> Quality | None:
    """Read what ``llama-perplexity --kl-divergence`` prints (b11434)."""
    text = "\n".join(lines)
    perplexity, divergence, same = (pattern.search(text) for pattern in (_PERPLEXITY, _DIVERGENCE, _SAME_TOP))
    if not (perplexity and divergence and same):
        return None
    return Quality(float(perplexity[1]), float(perplexity[2]), float(divergence[1]), float(divergence[2]),
                   float(same[1]) / 100)


def base_of(models: Sequence[Model]) -> int:
    """Return the index of the model that the others are judged by: the one with the most bits for each weight."""
    return max(range(len(models)), key=lambda i: (bits_per_weight(models[i]) or 0, -i))


def check_comparable(models: Sequence[Model]) -> None:
    """Raise ModelUnavailable where the models don't speak of the same tokens."""
    for model in models:
        if is_embedding(model):
            raise ModelUnavailable("an embedding model writes no text to be judged", where=model.path,
                                   fix="compare models that generate")
    sizes = {model.vocab for model in models}
    if len(sizes) > 1:
        raise ModelUnavailable(
            "these models don't have the same vocabulary, so their answers can't be compared",
            why=", ".join(f"{model.path} has {model.vocab} tokens" for model in models),
            fix="compare quant types of one model; for different models: llamaops bench compare")
