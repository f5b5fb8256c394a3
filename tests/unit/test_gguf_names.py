"""Which file of a repository or folder is meant."""

from __future__ import annotations

import pytest

from llamaops.core.gguf_names import ChoiceError, choose, listed, models_among, part_names, quant_in


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Qwen2.5-0.5B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("model.Q8_0.gguf", "Q8_0"),
        ("Q4_K_M/model-00001-of-00002.gguf", "Q4_K_M"),
        ("qwen-fp16.gguf", "F16"),
        ("m-BF16.gguf", "BF16"),
        ("m-IQ4_XS.gguf", "IQ4_XS"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("m-TQ1_0.gguf", "TQ1_0"),
        ("phi-3.gguf", None),
        ("XQ4_0b.gguf", None),
    ],
)
def test_quant_in_a_name(name: str, quant: str | None) -> None:
    assert quant_in(name) == quant


NAMES = (
    "README.md", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-UD-Q4_K_M.gguf", "mmproj-F16.gguf", "imatrix_unsloth.gguf",
    "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "sub/mmproj-m.gguf",
)  # fmt: skip


def test_projectors_matrices_and_later_parts_are_no_models() -> None:
    assert models_among(NAMES) == ("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0-00001-of-00002.gguf", "m-UD-Q4_K_M.gguf")


@pytest.mark.parametrize(
    ("file", "quant", "chosen"),
    [
        (None, "Q4_K_M", "m-Q4_K_M.gguf"),
        (None, "q4_k_s", "m-Q4_K_S.gguf"),
        (None, "Q8_0", "m-Q8_0-00001-of-00002.gguf"),
        ("mmproj-F16.gguf", None, "mmproj-F16.gguf"),
        ("m-UD-Q4_K_M.gguf", None, "m-UD-Q4_K_M.gguf"),
    ],
)
def test_chosen_exactly(file: str | None, quant: str | None, chosen: str) -> None:
    assert choose(NAMES, file, quant) == chosen


@pytest.mark.parametrize(
    ("names", "file", "quant", "reason", "near"),
    [
        (NAMES, None, None, "several models", None),
        (NAMES, None, "Q4_K", "no Q4_K", None),
        (NAMES, "m-Q4_K_N.gguf", None, "no file", "m-Q4_K_M.gguf"),
        (("a-Q8_0.gguf", "b-Q8_0.gguf"), None, "Q8_0", "several files", None),
        (("README.md",), None, "Q8_0", "no GGUF", None),
        ((), None, None, "no GGUF", None),
    ],
)
def test_no_choice(names: tuple[str, ...], file: str | None, quant: str | None, reason: str, near: str | None) -> None:
    with pytest.raises(ChoiceError) as caught:
        choose(names, file, quant)
    assert reason in caught.value.reason
    assert near is None or caught.value.near in ("m-Q4_K_M.gguf", "m-Q4_K_S.gguf")


def test_the_only_model_needs_no_name() -> None:
    assert choose(("x.gguf", "mmproj-x.gguf"), None, None) == "x.gguf"


def test_parts() -> None:
    assert part_names("a/m-00001-of-00003.gguf") == (
        "a/m-00001-of-00003.gguf", "a/m-00002-of-00003.gguf", "a/m-00003-of-00003.gguf",
    )  # fmt: skip
    assert part_names("m.gguf") == ("m.gguf",)


def test_sizes_of_parts_are_summed() -> None:
    sizes = {"m-00001-of-00002.gguf": 3 << 20, "m-00002-of-00002.gguf": 2 << 20, "n.gguf": None}
    assert listed(("m-00001-of-00002.gguf", "n.gguf"), sizes) == "m-00001-of-00002.gguf (5 MiB), n.gguf"
