"""The steps that articles about smooth streams on CPUs take, one after the other, each under the same noise.

    .venv/bin/python benchmarks/articles.py [--rounds 3] [--noise cpu:2] [--noise-in session] [--scenario stream]

default: llama-server as it comes · pinned: taskset to every CPU, threads as many · nice: the same at niceness -20 ·
chrt: the same at real-time round robin 50 · llamaops: the quick-start profile, relay included. They run in turn,
forwards and backwards, with the same requests; a table of medians and worst rounds follows. One round proves nothing:
spinning threads under noise either fall into step with it or don't (docs/scheduling.md).

Scenarios: stream, one client · crowd, 50 connections for 30 s · soak, 5 clients for 10 minutes. `--noise quiet`
measures without any. What this user or cgroup may not do is shown as refused.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from datetime import date
from pathlib import Path

import servers

from llamaops.bench.load import Server
from llamaops.bench.noise import Noise
from llamaops.bench.run import Conditions, Measured, as_document, bench, environment
from llamaops.bench.targets import Target, parse_target
from llamaops.core.comparison import order_of
from llamaops.core.cpuset import CpuSet
from llamaops.core.figures import Figures, Slo
from llamaops.core.workload import SCENARIOS
from llamaops.errors import LlamaopsError


def targets(engine: str, model: str, profile: str) -> dict[str, Target]:
    cpus = CpuSet.of(os.sched_getaffinity(0))
    pinned = f"taskset -c {cpus} {engine} -m {model} --port {{port}} -t {len(cpus)} -tb {len(cpus)}"
    commands = {"default": f"{engine} -m {model} --port {{port}}", "pinned": pinned, "nice": f"nice -n -20 {pinned}",
                "chrt": f"chrt -r 50 {pinned}"}
    found = {name: parse_target(f"cmd:{command}") for name, command in commands.items()}
    sets = [f"engine.path={engine}", f"model.source=path:{model}", "model.sha256=null", "model.quantize=null"]
    return found | {"llamaops": parse_target(profile, sets)}


def run(named: dict[str, Target], conditions: Conditions,
        rounds: int) -> tuple[dict[str, list[Measured]], dict[str, str]]:
    """Measure all in turn; what fails to start is left out from then on, with its reason."""
    names = list(named)
    done: dict[str, list[Measured]] = {name: [] for name in names}
    refused: dict[str, str] = {}
    for i in order_of(len(names), rounds):
        name = names[i]
        if name in refused:
            continue
        try:
            done[name].append(bench(named[name], conditions))
            print(f"  {name:<10} {done[name][-1].figures.output_tokens_per_s:6.1f} tok/s", flush=True)
        except LlamaopsError as exc:
            refused[name] = exc.detail.splitlines()[-1] if exc.detail else exc.why or exc.what
    return done, refused


COLUMNS = (
    ("tok/s", False, lambda f: f.output_tokens_per_s),
    ("TTFT p95 ms", True, lambda f: f.ttft.p95 if f.ttft else float("nan")),
    ("ITL p50 ms", True, lambda f: f.itl.p50 if f.itl else float("nan")),
    ("ITL p99 ms", True, lambda f: f.itl.p99 if f.itl else float("nan")),
    ("std ms", True, lambda f: f.itl.std if f.itl else float("nan")),
)


def row(name: str, figures: list[Figures]) -> str:
    cells = []
    for _, lower, of in COLUMNS:
        values = [of(f) for f in figures]
        worst = max(values) if lower else min(values)
        cells.append(f"{statistics.median(values):.1f} ({worst:.1f})")
    failed, sent = sum(f.sent - f.ok for f in figures), sum(f.sent for f in figures)
    return f"| {name} | " + " | ".join(cells) + f" | {failed}/{sent} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--noise", default=f"cpu:{len(os.sched_getaffinity(0))}")
    parser.add_argument("--noise-in", choices=["session", "same", "cgroup"], default="session")
    parser.add_argument("--scenario", choices=SCENARIOS, default="stream")
    parser.add_argument("--engine", help="llama-server  [default: what llamaops finds]")
    parser.add_argument("--model", help="GGUF file  [default: that of the profile]")
    parser.add_argument("--profile", default=servers.PROFILE)
    parser.add_argument("--only", help="some of the steps: default,nice,llamaops")
    parser.add_argument("--out", type=Path, help="write every run as JSON")
    args = parser.parse_args()
    engine = args.engine or servers.ask("engine", "locate")
    model = args.model or servers.ask("model", "pull", args.profile)
    noise = Noise.parse("none" if args.noise == "quiet" else args.noise)
    conditions = Conditions(SCENARIOS[args.scenario], Slo(), noise, args.noise_in, Server("", 0))
    named = targets(engine, model, args.profile)
    named = {name: t for name, t in named.items() if not args.only or name in args.only.split(",")}
    done, refused = run(named, conditions, args.rounds)
    machine = environment()
    print(f"\n{machine['cpu']}, {machine['cpus']} CPUs, Linux {machine['kernel']}, {date.today()}; {Path(model).name}; "
          f"scenario {args.scenario}, noise {noise} ({args.noise_in}), {args.rounds} rounds in turn: median (worst)\n")
    print("| step | " + " | ".join(name for name, _, _ in COLUMNS) + " | failed |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for name, runs in done.items():
        if name in refused:
            print(f"| {name} | refused: {refused[name]} |" + " |" * len(COLUMNS))
        elif runs:
            print(row(name, [m.figures for m in runs]))
    if args.out:
        documents = {name: [as_document(m, detail=False) for m in runs] for name, runs in done.items()}
        args.out.write_text(json.dumps(documents, indent=1))


if __name__ == "__main__":
    main()
