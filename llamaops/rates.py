"""How fast an engine is with a model, placed as a profile would have it: measured once, then remembered."""

from __future__ import annotations

import os

from llamaops.acquire import calibrate
from llamaops.core.engine import Engine
from llamaops.core.launch import environment, wrappers
from llamaops.core.model import Model
from llamaops.core.plan import Plan, plan
from llamaops.core.profile import Profile
from llamaops.core.progress import Progress
from llamaops.core.serving import Calibration
from llamaops.core.topology import Host
from llamaops.dirs import find_dirs
from llamaops.host import probe_host


def measure(profile: Profile, host: Host, model: Model, engine: Engine, planned: Plan,
            progress: Progress) -> Calibration | None:
    """Return the rates under a plan's placement; None where other work keeps the CPUs busy."""
    chain, env = wrappers(planned.placement, host.tools), environment(planned.placement, profile, engine, os.environ)
    return calibrate.calibrate(engine, model, planned.placement, chain, env, find_dirs(os.environ).cache, progress)


def measure_here(profile: Profile, model: Model, engine: Engine, progress: Progress) -> Calibration | None:
    """Return the rates under the plan that the profile has for this model on this machine."""
    host = probe_host()
    return measure(profile, host, model, engine, plan(profile, host, model, engine), progress)


def find(model: Model, engine: Engine, planned: Plan) -> Calibration | None:
    """Return what was measured before; measures nothing."""
    return calibrate.find_calibration(engine, model, planned.placement, find_dirs(os.environ).cache)
