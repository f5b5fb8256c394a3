"""Which engines and models run, so that nothing that runs is removed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llamaops.errors import LlamaopsError, TryAgain

PROGRAMS = ("llama-", "convert_")
"""How llama.cpp's programs begin: they take models as arguments."""
MOST_WRAPPERS = 8


def in_use() -> dict[str, str]:
    """Return who uses which file: by the command lines of all processes, and by what running instances have planned.

    An instance between two engines has none, but will start the next with the same model.
    """
    import psutil

    out: dict[str, str] = {}
    for process in psutil.process_iter(["pid", "name", "cmdline", "cwd"]):
        argv = process.info["cmdline"] or []
        if any(Path(word).name.startswith(PROGRAMS) for word in argv[:MOST_WRAPPERS]):
            user = f"process {process.info['pid']} ({process.info['name']})"
            folder = Path(process.info["cwd"] or "/")
            out |= {str(folder / word): user for word in argv if not word.startswith("-")}
    for instance, argv in _planned():
        out |= dict.fromkeys(argv, f"instance {instance}")
    return out | {os.path.realpath(path): user for path, user in out.items() if path.startswith("/")}


def _planned() -> list[tuple[str, list[str]]]:
    from llamaops.dirs import find_dirs
    from llamaops.serve.control import call
    from llamaops.serve.instance import list_instances

    out = []
    for known in list_instances(find_dirs(os.environ).runtime):
        if known.pid is not None:
            try:
                document: dict[str, Any] = call(known.control_socket, "plan")
            except LlamaopsError as exc:  # preparing still, or not to be asked: better to remove nothing
                raise TryAgain("can't tell which model an instance uses", where=f"instance {known.name}", why=exc.what,
                               fix="run the same command again when it is ready") from exc
            out.append((known.name, [*document["launch"]["argv"], str((document["model"] or {}).get("path"))]))
    return out
