"""From a plan to the command line: one exec chain, no shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamaops.core.engine import Engine
from llamaops.core.memory import MIB, Memory
from llamaops.core.model import POOLING_RANK, Model
from llamaops.core.plan import Placement, Plan
from llamaops.core.profile import Profile
from llamaops.core.source import parse_source
from llamaops.errors import WrongProfile

INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
"""All that passes from our environment to the engine: no proxies, no tokens, no LLAMA_ARG_* that would change flags."""

ENGINE_PORT = 8080
"""Rendered beside a UNIX socket, where llama-server wants a port other than 0 and does not use it."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
POLICY_FLAGS = {"batch": "--batch", "fifo": "--fifo", "rr": "--rr"}
SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY|APIKEY)(_|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A process to start.

    ``argv`` is the whole chain, wrappers first, each of which execs its successor, so the pid that is spawned becomes
    the engine's. ``env`` is the complete environment, not a difference. ``socket`` is the UNIX socket the engine will
    listen on; where it has none, ``port`` is the loopback port.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    socket: str | None
    port: int | None

    def visible_env(self) -> dict[str, str]:
        """Return the variables worth showing: not the inherited ones, and no value of what is named like a secret."""
        return {name: "…" if SECRET_NAME.search(name) else value
                for name, value in self.env.items() if name not in INHERITED}


def launch(plan: Plan, profile: Profile, engine: Engine | None, model: Model | None, *, tools: Mapping[str, str],
           environ: Mapping[str, str], socket: str | None, port: int | None, inherited_nice: int = 0) -> LaunchSpec:
    """Render a plan for a direct launch.

    ``inherited_nice`` is the niceness of whoever spawns the chain, from which nice(1) counts. Without ``engine`` a
    current one called ``llama-server`` is assumed. Raises WrongProfile when the binary does not know a flag.
    """
    command = engine_argv(plan, profile, engine, model, socket=socket, port=port)
    if engine is not None:
        check_flags(command, engine)
    argv = (*wrappers(plan.placement, tools, inherited_nice), *command)
    return LaunchSpec(argv, environment(plan.placement, profile, engine, environ), socket, port)


def wrappers(placement: Placement, tools: Mapping[str, str], inherited_nice: int = 0) -> tuple[str, ...]:
    """Return the exec chain before the engine: dies with its parent, CPUs, memory, policy, niceness; each property
    once.

    The death signal set by setpriv outlives the execs that follow, as none of them gains privileges (prctl(2)). It
    comes first: were the supervisor to die a moment later, nothing of the chain would stay.
    """
    chain: list[str] = []
    if "setpriv" in tools:
        chain += [tools["setpriv"], "--pdeathsig", "KILL"]
    chain += _memory_and_cpus(placement, tools)
    if placement.policy != "other":
        chain += [tools.get("chrt", "chrt"), POLICY_FLAGS[placement.policy], str(placement.rt_priority or 0)]
    if placement.nice is not None and placement.nice != inherited_nice:
        chain += [tools.get("nice", "nice"), "-n", str(placement.nice - inherited_nice)]
    return tuple(chain)


def _memory_and_cpus(placement: Placement, tools: Mapping[str, str]) -> list[str]:
    """Bind with numactl's explicit CPU list where memory is bound (``--cpunodebind`` would take isolated CPUs too)."""
    numactl, taskset = tools.get("numactl", "numactl"), tools.get("taskset", "taskset")
    if placement.numa == "bind":
        return [numactl, f"--physcpubind={placement.cpus}", f"--membind={placement.mem_nodes}"]
    interleave = [numactl, f"--interleave={placement.mem_nodes}"] if placement.numa == "interleave" else []
    return interleave + ([taskset, "-c", str(placement.cpus)] if placement.cpus else [])


def engine_argv(plan: Plan, profile: Profile, engine: Engine | None, model: Model | None, *, socket: str | None,
                port: int | None) -> tuple[str, ...]:
    """Return llama-server and its arguments; where versions differ in spelling, this binary's own flags decide."""
    file = model.path if model else str(parse_source(profile.model.source))
    argv = [engine.path if engine else "llama-server", "-m", file]
    argv += ["--host", socket or "127.0.0.1", "--port", str(port or ENGINE_PORT)]
    argv += ["--alias", ",".join((profile.name, *profile.model.aliases))]
    argv += _sizes(plan)
    argv += _by_version(plan, engine, model)
    return (*argv, *profile.engine.args)


def _sizes(plan: Plan) -> list[str]:
    """Threads always as positive numbers; ``-c`` is the sum over the slots."""
    placement, serving = plan.placement, plan.serving
    pairs = {"-t": placement.threads, "-tb": placement.threads_batch, "-c": serving.context * serving.slots,
             "-np": serving.slots, "-b": serving.batch, "-ub": serving.ubatch, "-ctk": serving.kv_type_k,
             "-ctv": serving.kv_type_v}
    return [word for flag, value in pairs.items() for word in (flag, str(value))]


def _by_version(plan: Plan, engine: Engine | None, model: Model | None) -> list[str]:
    """Add what other builds spell differently or lack; of each choice the first that this binary has."""
    choices: list[tuple[tuple[str, ...], ...]] = [
        (("--cache-ram", str(plan.memory.prompt_cache_bytes // MIB)),),
        (("--no-ui",), ("--no-webui",)),
        (("--metrics",),),
        (("--slots",),),
        (("--jinja",),),
        (("--sse-ping-interval", "-1"),),  # an empty event, on which some clients fail; the relay has its own
        (("--fit", "off"),),  # every size is given, so the engine's own fitting only loads the model's header twice
        *_load_mode(plan.memory),
    ]
    if plan.memory.checkpoints is not None:
        choices.append((("--ctx-checkpoints", str(plan.memory.checkpoints)),
                        ("--swa-checkpoints", str(plan.memory.checkpoints))))
    if model is not None and model.pooling == POOLING_RANK:
        choices.append((("--reranking",), ("--rerank",)))
    elif plan.serving.embeddings:
        choices.append((("--embeddings",), ("--embedding",)))
    if engine is not None and engine.openmp is None:
        choices.append((("--poll", str(_poll(plan.placement.spin))),))
    known = engine.flags if engine and engine.flags else None
    chosen = (next((words for words in choice if known is None or words[0] in known), ()) for choice in choices)
    return [word for words in chosen for word in words]


def _load_mode(memory: Memory) -> list[tuple[tuple[str, ...], ...]]:
    """Map and lock the weights as planned: one flag of modes in current builds, two switches in older ones."""
    switches = [*(["--mlock"] if memory.lock else []), *([] if memory.mmap else ["--no-mmap"])]
    if not switches:
        return []
    locked = "mmap+mlock" if memory.mmap else "mlock"
    return [(("--load-mode", locked if memory.lock else "none"), tuple(switches))]


def _poll(spin: int | str) -> int:
    """Return the polling level of a build without OpenMP: 0 sleeps at once, 1 spins shortest, 100 hardly sleeps."""
    levels = {"passive": 0, "active": 100}
    return levels[spin] if isinstance(spin, str) else min(1, spin)


def check_flags(argv: Sequence[str], engine: Engine) -> None:
    """Refuse a flag that this binary's ``--help`` does not list: llama.cpp renames flags between builds.

    Raises WrongProfile naming flag and version. A binary whose help could not be read is not checked.
    """
    for word in argv[1:] if engine.flags else ():
        if re.match(r"--?[A-Za-z]", word) and word not in engine.flags:
            raise WrongProfile(f"this llama-server does not know the flag {word}", where="engine.args",
                               why=f"{engine.path} is version {engine.version or 'unknown'} and does not list it in "
                               "--help",
                               fix="take the flag out of engine.args, or use another engine: llamaops engine build")


def environment(placement: Placement, profile: Profile, engine: Engine | None, environ: Mapping[str,
                                                                                                str]) -> dict[str, str]:
    """Return the engine's whole environment: a short list of ours, thread and spin variables, the profile's own."""
    env = {name: environ[name] for name in INHERITED if name in environ}
    if environ.get("LC_ALL"):
        env["LANG"] = environ["LC_ALL"]  # LC_ALL itself would outrank the LC_NUMERIC below
    env["LC_NUMERIC"] = "C"
    env.update({name: str(placement.threads) for name in THREAD_VARIABLES})
    env["TOKENIZERS_PARALLELISM"] = "false"
    env.update(_spin_variables(placement.spin, engine.openmp if engine else "libgomp"))
    return {**env, **profile.engine.env}


def _spin_variables(spin: int | str, openmp: str | None) -> dict[str, str]:
    """Spell the spin for the OpenMP runtime: libgomp counts iterations, libomp milliseconds (1 is the least)."""
    if openmp is None:
        return {}
    if isinstance(spin, str):
        return {"OMP_WAIT_POLICY": spin}
    return {"GOMP_SPINCOUNT": str(spin)} if openmp == "libgomp" else {"KMP_BLOCKTIME": str(min(1, spin))}


def shell_line(spec: LaunchSpec) -> str:
    """Return one line to paste into a shell: the variables that matter, then the quoted command."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in spec.visible_env().items()]
    return " ".join([*assignments, shlex.join(spec.argv)])
