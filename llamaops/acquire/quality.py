"""Judge models by the engine's own llama-perplexity, on a text that ships with llamaops."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from llamaops.cache import disk_trouble_is, require_room
from llamaops.child import run
from llamaops.core.model import Model
from llamaops.core.progress import Progress
from llamaops.core.quality import CONTEXT, Quality, parse_against_base, parse_base
from llamaops.engine_tool import failure_reason, tool_environment
from llamaops.errors import ModelUnavailable
from llamaops.resources import resource

TEXT = "templates/text/evaluation.txt"
ATTEMPTS = 5
"""The tool's end may cut off the thread that writes its log (common/log.cpp, b11434): then its figures are lost."""
BYTES_PER_TOKEN = 3
"""The text has about four characters a token in English vocabularies; fewer in small ones."""


def judge(tool: Path, models: Sequence[Model], base: int, folder: Path, progress: Progress, *, threads: int,
          cancel: threading.Event | None = None) -> list[Quality]:
    """Return the quality of each model against ``models[base]``, by ``tool`` (llama-perplexity) at low priority.

    The base's probabilities (two bytes for each token of the text and of the vocabulary) lie in ``folder``, in a file
    without a name, which even a kill can't leave behind. Raises ModelUnavailable: no room, or what the tool says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = resource(TEXT)
    need = text.stat().st_size // BYTES_PER_TOKEN * (models[base].vocab or 0)  # the second half of each chunk, 2 bytes
    require_room(folder, need, "the probabilities of the base model", ModelUnavailable)
    with disk_trouble_is(ModelUnavailable, "comparing", folder), \
            tempfile.TemporaryFile(dir=folder) as logits, progress.bar("judge the answers", "steps") as bar:
        words = [str(tool), "-c", str(CONTEXT), "-b", str(CONTEXT), "-t", str(threads),
                 "--kl-divergence-base", f"/proc/{os.getpid()}/fd/{logits.fileno()}"]
        bar.update(0, len(models))
        found = {base: _ask([*words, "-f", str(text)], parse_base, models[base], cancel)}
        for i, model in enumerate(models):
            if i != base:
                bar.update(len(found), len(models))
                found[i] = _ask([*words, "--kl-divergence"], parse_against_base, model, cancel)
        bar.update(len(found), len(models))
    return [found[i] for i in range(len(models))]


def _ask(argv: list[str], parse: Callable[[Iterable[str]], Quality | None], model: Model,
         cancel: threading.Event | None) -> Quality:
    for _ in range(ATTEMPTS):
        lines: list[str] = []
        done = run([*argv, "-m", model.path], env=tool_environment(), on_line=lines.append, niced=True, cancel=cancel)
        if done.code:
            break
        if (quality := parse(lines)) is not None:
            return quality
    raise ModelUnavailable("the model can't be judged", where=model.path, detail=done.tail,
                           why=failure_reason(done.tail, done.code))
