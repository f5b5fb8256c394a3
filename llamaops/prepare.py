"""The pipeline in order: profile → engine → model → host → plan → launch.

What only a first run needs (building, downloading, quantizing) is imported where it is called: it would cost every
start some 60 ms.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llamaops import rates
from llamaops.acquire import locate
from llamaops.core.cpuset import CpuSet
from llamaops.core.engine import Engine, compile_jobs
from llamaops.core.launch import LaunchSpec, launch
from llamaops.core.model import Model
from llamaops.core.plan import Note, Plan, plan, plan_json
from llamaops.core.profile import EngineSection, Profile, parse_profile
from llamaops.core.progress import NoProgress, Progress
from llamaops.core.serving import Calibration
from llamaops.core.topology import NOTHING_HELD, Held, Host
from llamaops.dirs import find_dirs
from llamaops.errors import EngineUnavailable, ModelUnavailable, UsageError
from llamaops.host import probe_host
from llamaops.provide import acquire_model, model_here, refuse

if TYPE_CHECKING:
    from llamaops.core.conversion import Consent

T = TypeVar("T")
MAX_PROFILE_BYTES = 1 << 20
"""A profile is a page of text; a larger file is something else (a model, given by mistake)."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the facts it was made from; ``engine`` and ``model`` are None where they are not on this disk yet."""

    profile: Profile
    host: Host
    model: Model | None
    engine: Engine | None
    plan: Plan


def load_profile(path: Path, overrides: Sequence[str] = ()) -> Profile:
    """Read and check a profile file; ``overrides`` are ``dotted.key=value``.

    Raises UsageError when there is no such file and WrongProfile, with every problem at once, when it does not hold.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_PROFILE_BYTES + 1)
    except OSError as exc:
        raise UsageError("can't read the profile", where=str(path), why=exc.strerror,
                         fix=f"check the path, or make a profile with: llamaops init {path}") from exc
    if len(raw) > MAX_PROFILE_BYTES:
        raise UsageError("this is no profile", where=str(path), why="it is larger than 1 MiB",
                         fix="give the YAML file; a model goes into it as  model: {source: path:…}")
    try:
        text = raw.decode()
    except UnicodeDecodeError as exc:
        raise UsageError("this is no profile", where=str(path), why=f"byte {exc.start} is not UTF-8 text",
                         fix="give the YAML file, saved as UTF-8") from exc
    return parse_profile(text, stem=path.stem, base=path.absolute().parent, environ=os.environ, overrides=overrides,
                         where=str(path))


def acquire_engine(profile: Profile, progress: Progress, *, may_build: bool) -> Engine:
    """Find llama-server or build it.

    Raises EngineUnavailable when there is none and none may be built, BuildFailed when building fails.
    """
    cache, section = find_dirs(os.environ).cache, profile.engine
    pinned = section.path != "auto"
    if pinned or section.build != "always":
        found = locate.find_engine(section, cache, os.environ)
        if found is not None:
            return found
    if not may_build or section.build == "never":
        raise EngineUnavailable("no llama-server here", where="engine.path",
                                why="there is none in the build cache or on PATH, and building was not allowed",
                                fix="build one: llamaops engine build   (or set engine.path)")
    return build_engine(section, progress)


def build_engine(section: EngineSection, progress: Progress) -> Engine:
    """Build the pinned engine into the cache, with as many compilers as this machine has room for."""
    from llamaops.acquire import build

    return build.build_engine(section, find_dirs(os.environ).cache, progress, os.environ,
                              jobs=compile_jobs(probe_host()))


def prepare(profile: Profile, progress: Progress, *, may_build: bool = True, offline: bool = False,
            affinity: CpuSet | None = None, held: Held = NOTHING_HELD, consent: Consent = refuse) -> Planned:
    """Make everything ready to launch: the engine, the model, the plan. Slow the first time, instant after.

    ``consent`` is asked before the converter's packages are installed. ``affinity`` stands for this process's own mask,
    which it may have narrowed meanwhile; ``held`` is what an engine holds that the planned one replaces.
    """
    engine = acquire_engine(profile, progress, may_build=may_build)

    def machine() -> Host:
        return probe_host(affinity=affinity).without(held)

    model = acquire_model(profile, engine, progress, offline=offline, consent=consent, machine=machine)
    host = machine()
    planned = plan(profile, host, model, engine)
    measured = _rates(profile, host, model, engine, planned, progress)
    return Planned(profile, host, model, engine, plan(profile, host, model, engine, measured) if measured else planned)


def _rates(profile: Profile, host: Host, model: Model, engine: Engine, planned: Plan,
           progress: Progress) -> Calibration | None:
    """Return the rates that the batch size follows from, measured the first time; None where nothing follows."""
    if planned.serving.slots == 1 or planned.serving.embeddings:
        return None
    return rates.measure(profile, host, model, engine, planned, progress)


def plan_only(profile: Profile, host_root: Path | None = None) -> Planned:
    """Plan from what is on this disk, without building or fetching; what is missing becomes a note.

    ``host_root`` plans for a recorded machine (a folder with the same relative paths as a live one).
    """
    engine, engine_note = _if_here("engine", lambda: acquire_engine(profile, NoProgress(), may_build=False))
    model, model_note = _if_here("model", lambda: model_here(profile, engine))
    host = probe_host(host_root or "/")
    planned = plan(profile, host, model, engine)
    if host_root is None and engine is not None and model is not None:
        measured = rates.find(model, engine, planned)
        planned = plan(profile, host, model, engine, measured) if measured else planned
    notes = tuple(n for n in (engine_note, model_note) if n)
    return Planned(profile, host, model, engine, replace(planned, notes=notes + planned.notes))


def _if_here(what: str, get: Callable[[], T]) -> tuple[T | None, Note | None]:
    try:
        return get(), None
    except (EngineUnavailable, ModelUnavailable) as exc:
        return None, Note("info", f"no-{what}", f"{what} not on this disk yet ({exc.what}); planned without its facts")


Launcher = Callable[[str | None, int | None], LaunchSpec]
"""Renders the launch for a socket or a loopback port; each engine started gets one of its own."""


def launcher(planned: Planned, environ: Mapping[str, str]) -> Launcher:
    """Return what renders the launches of a plan from this process."""

    def make(socket: str | None, port: int | None) -> LaunchSpec:
        inherited = os.getpriority(os.PRIO_PROCESS, 0)  # read at each start: the relay may have been lifted meanwhile
        return launch(planned.plan, planned.profile, planned.engine, planned.model, tools=planned.host.tools,
                      environ=environ, socket=socket, port=port, inherited_nice=inherited)

    return make


def document(planned: Planned) -> dict[str, Any]:
    """Return the plan as ``llamaops plan --json`` prints it."""
    spec = shown_launch(planned, os.environ)
    return plan_json(planned.profile, planned.host, planned.model, planned.engine, planned.plan, spec)


def shown_launch(planned: Planned, environ: Mapping[str, str]) -> LaunchSpec:
    """Return the launch as `plan` shows it: with the instance's own socket where the engine takes one."""
    takes_socket = planned.engine is None or planned.engine.unix_socket
    socket = str(find_dirs(environ).runtime / planned.profile.name / "engine-1.sock") if takes_socket else None
    return launch(planned.plan, planned.profile, planned.engine, planned.model, tools=planned.host.tools,
                  environ=environ, socket=socket, port=None)
