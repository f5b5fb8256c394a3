"""The pinned engine itself: what we render is in its --help, and it tells what it is. The gate of a version bump."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from running import QUICKSTART

from llamaops.core.launch import check_flags, engine_argv
from llamaops.core.model import POOLING_RANK
from llamaops.engine_binary import read_engine
from llamaops.errors import WrongProfile
from llamaops.prepare import load_profile, plan_only
from llamaops.recipe import load_recipe

VARIANTS = (
    (), ("memory.lock=true",), ("model.kv_type=q8_0", "serve.slots=3"), ("memory.limit=300MiB",),
    ("placement.spin=active",), ("placement.spin=passive", "placement.threads=1", "placement.threads_batch=2"),
)  # fmt: skip


NOT_TO_LOSE = {
    "-m", "--host", "--port", "--alias", "-t", "-tb", "-c", "-np", "-b", "-ub", "-ctk", "-ctv", "--cache-ram",
    "--no-ui", "--metrics", "--slots", "--jinja", "--sse-ping-interval", "--fit", "--load-mode", "--embeddings",
    "--reranking", "--poll",
}  # fmt: skip
"""What the pinned engine must take. An older one may lack some, and then they are left out without a word: after a
bump that would be, say, its 8 GiB prompt cache back."""


def options(argv: tuple[str, ...]) -> set[str]:
    return {word for word in argv[1:] if re.match(r"--?[A-Za-z]", word)}


def test_every_flag_that_we_render_is_in_the_help_of_the_pinned_engine(engine_path: str, model_path: str) -> None:
    engine = read_engine(Path(engine_path), "built")
    rendered: set[str] = set()
    for overrides in VARIANTS:
        planned = plan_only(load_profile(QUICKSTART, overrides))
        assert planned.model is not None
        for pooling, embeddings in ((None, False), (1, True), (POOLING_RANK, True)):
            model = replace(planned.model, pooling=pooling)
            plan = replace(planned.plan, serving=replace(planned.plan.serving, embeddings=embeddings))
            for binary in (engine, replace(engine, openmp=None)):
                argv = engine_argv(plan, planned.profile, binary, model, socket="/run/x.sock", port=None)
                check_flags(argv, binary)
                rendered |= options(argv)
    assert rendered <= engine.flags
    assert rendered >= NOT_TO_LOSE
    with pytest.raises(WrongProfile):
        check_flags((*argv, "--no-such-flag"), engine)


def test_the_pinned_engine_says_its_version_and_what_it_was_compiled_for(engine_path: str) -> None:
    engine = read_engine(Path(engine_path), "built")
    assert engine.version == f"b{load_recipe({}).build}"
    assert engine.features, "the line that tells them has changed: see engine_binary"
    assert engine.unix_socket
