"""``llamaops bench``: load, figures, comparison."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from llamaops.errors import EngineFailed, UsageError

if TYPE_CHECKING:
    from llamaops.bench.run import Conditions
    from llamaops.bench.targets import Target
    from llamaops.core.workload import Workload

F = TypeVar("F", bound=Callable[..., Any])


class BenchGroup(click.Group):
    """A group whose first word is a target unless it is one of its commands: ``bench URL`` is ``bench run URL``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``run`` before anything that is neither a command nor a plea for help."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


def load_options(command: F) -> F:
    """Add the options that say what load is put on a target."""
    for option in reversed(_LOAD_OPTIONS):
        command = option(command)
    return command


def _set_out_from(ctx: click.Context, _parameter: click.Parameter, name: str | None) -> None:
    """Make a scenario's values the defaults of the options that are not given."""
    if name is not None:
        from llamaops.core.workload import SCENARIOS

        load = SCENARIOS[name]
        ctx.default_map = {**(ctx.default_map or {}), "concurrency": load.concurrency, "duration": load.duration_s,
                           "prompt_tokens": str(load.prompt_tokens), "max_tokens": str(load.max_tokens)}


_LOAD_OPTIONS = [
    click.option("--scenario", type=click.Choice(["stream", "crowd", "soak"]), is_eager=True, expose_value=False,
                 callback=_set_out_from, help="A load to set out from: stream, one reader for 8 s; crowd, 50 at once "
                 "for 30 s; soak, 5 for ten minutes. Other options win."),
    click.option("--concurrency", "-c", type=click.IntRange(1, 10_000), default=1, show_default=True,
                 help="Closed loop: this many clients, each asking again when its answer is complete."),
    click.option("--rate", type=click.FloatRange(0, min_open=True), metavar="PER_SECOND",
                 help="Open loop instead: Poisson arrivals, however many are in flight."),
    click.option("--requests", "-n", type=click.IntRange(1), help="Stop after this many requests.  [default: 16]"),
    click.option("--duration", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
                 help="Ask for this long instead; what is under way is awaited."),
    click.option("--prompt-tokens", default="64", show_default=True, metavar="LENGTH",
                 help="About so many tokens a prompt: 64, 32-128 (uniform) or 200~150 (log-normal, mean~deviation)."),
    click.option("--max-tokens", default="64", show_default=True, metavar="LENGTH",
                 help="Tokens an answer, the same way."),
    click.option("--shared-prefix", type=click.IntRange(0), default=0, show_default=True, metavar="TOKENS",
                 help="How much of each prompt is the same in all."),
    click.option("--natural-end", is_flag=True,
                 help="Let answers end by themselves; the default asks for exactly --max-tokens (ignore_eos)."),
    click.option("--api", type=click.Choice(["chat", "completions"]), default="chat", show_default=True),
    click.option("--model", help="Model to name in the requests.  [default: the first one listed]"),
    click.option("--api-key", envvar="LLAMAOPS_API_KEY", show_envvar=True, help="Key, where the server wants one."),
    click.option("--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
                 help="Give a request up after this long.  [default: never]"),
    click.option("--warmup", type=click.IntRange(0), default=1, show_default=True,
                 help="Requests before that do not count."),
    click.option("--seed", type=int, default=1, show_default=True,
                 help="The same seed asks the same at the same times."),
    click.option("--noise", default="none", show_default=True, metavar="SPEC",
                 help="Competitors: cpu:N[:LOAD%],mem:N,io:N (stress-ng, or a built-in one)."),
    click.option("--noise-in", type=click.Choice(["session", "same", "cgroup"]), default="session", show_default=True,
                 help="Where they run: a session of their own, bench's session, or a cgroup of their own."),
    click.option("--slo-ttft", type=click.FloatRange(0, min_open=True), metavar="MS",
                 help="Goodput's limit for the first token.  [default: the profile's, else 800]"),
    click.option("--slo-itl", type=click.FloatRange(0, min_open=True), metavar="MS",
                 help="Goodput's limit for the gaps.  [default: the profile's, else 120]"),
    click.option("--ordinary-priority", is_flag=True,
                 help="Do not raise the generator's priority; under noise it then measures its own waiting too."),
]


out_option = click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
                          help="Write that document to a file as well.")
html_option = click.option("--html", type=click.Path(path_type=Path, dir_okay=False),
                           help="Write a report: one HTML file that stands alone.")


@click.group(cls=BenchGroup)
def bench() -> None:
    """Measure a profile, any OpenAI-compatible URL, or any command that serves.

    \b
    llamaops bench TARGET          one run: latencies, smoothness, throughput
                                   (all options: llamaops bench run --help)
    llamaops bench compare A B     interleaved runs, paired ratios, a verdict

    TARGET is a profile (started for the bench and stopped after it), http://HOST:PORT, or
    "cmd:COMMAND LINE with {port}".

    \b
    Examples:
      llamaops bench qwen.yaml -c 4 -n 64 --noise cpu:2
      llamaops bench http://127.0.0.1:8080 --rate 2 --duration 30 --json
      llamaops bench compare qwen.yaml "cmd:llama-server -m q.gguf --port {port}"
    """


@bench.command(short_help="Put load on a target and print its figures (the default).")
@click.argument("target")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Override one value of the profile. Repeatable.")
@load_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document (docs/bench.md).")
@out_option
@html_option
def run(target: str, overrides: tuple[str, ...], as_json: bool, out: Path | None, html: Path | None,
        **load: Any) -> int:
    """Put load on TARGET and print latencies, smoothness, throughput and goodput.

    TARGET is a profile, which is started for the bench and stopped after it; the URL of any OpenAI-compatible server;
    or "cmd:COMMAND LINE", which must serve on the port that stands for {port}. Prompts, lengths and arrivals follow
    from the seed alone. TTFT counts to the first event with text, tokens are the server's own count, and failed
    requests are counted by kind and nowhere else. The generator runs as urgently as this user may, so that it does not
    measure its own waiting; what it used is printed.

    \b
    Examples:
      llamaops bench qwen.yaml --noise cpu:2
      llamaops bench http://127.0.0.1:8080/v1 -c 50 --duration 30 --max-tokens 16-64
      llamaops bench "cmd:chrt -r 50 llama-server -m q.gguf --port {port}"

    Exit codes: 0 measured · 2 usage · 69, 70, 75, 77, 78 the target did not start · 70 no request succeeded, or the
    machine throttled and the run is invalid · 130 interrupted.
    """
    from llamaops.bench.run import as_document
    from llamaops.bench.run import bench as bench_once
    from llamaops.bench.table import run_text
    from llamaops.bench.targets import make_ready, parse_target
    from llamaops.cli.console import make_progress

    signal.signal(signal.SIGTERM, terminate)
    check_all_writable(out, html)
    named = parse_target(target, overrides)
    conditions = make_conditions(load, named.profile_slo())
    make_ready(named, make_progress())
    with counting(conditions.workload) as on_done:
        measured = bench_once(named, conditions, on_done)
    document = as_document(measured)
    click.echo(json.dumps(document) if as_json else run_text(measured))
    _write(document, out, html)
    if not measured.figures.ok:
        why = next(iter(measured.figures.failure_examples.values()), None)
        raise EngineFailed("no request succeeded", where=target, why=why)
    return EngineFailed.exit_code if measured.invalid else 0


@bench.command(short_help="Run targets in turn and say what differs.")
@click.argument("targets", nargs=-1, required=True, metavar="A B [C]...")
@click.option("--pairs", type=click.IntRange(2, 100), default=8, show_default=True,
              help="Runs of each target; fewer than 4 give no verdict.")
@click.option("--keep", is_flag=True, help="Start every target once and leave all running.")
@load_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document (docs/bench.md).")
@out_option
@html_option
def compare(targets: tuple[str, ...], pairs: int, keep: bool, as_json: bool, out: Path | None, html: Path | None,
            **load: Any) -> int:
    """Run the targets in turn, A B B A A B …, and say what differs.

    Each target is a profile, a URL or a "cmd:COMMAND LINE" as for bench run; profile values are changed in place with
    commas after the path: qwen.yaml,placement.nice=-10. Both runs of a pair get the same requests. Ratios are B over A,
    paired run by run, with a bootstrap interval. There is a verdict only where the interval excludes 1 and the change
    is at least 1 %; comparing a thing with itself gives one in at most 2 of 100 comparisons. The goodput limits are
    those of A's profile.

    \b
    Examples:
      llamaops bench compare qwen.yaml qwen.yaml,placement.threads=1 --noise cpu:2
      llamaops bench compare "cmd:llama-server -m q.gguf --port {port}" \\
        "cmd:nice -n -20 llama-server -m q.gguf --port {port}" qwen.yaml

    Exit codes: 0 compared, whatever came out · 2 usage · 69, 70, 75, 77, 78 a target did not start or did not answer ·
    130 interrupted.
    """
    from llamaops.bench.compare import as_comparison, compare_targets
    from llamaops.bench.table import comparison_text
    from llamaops.bench.targets import make_ready
    from llamaops.cli.console import make_progress

    if len(targets) < 2:
        raise UsageError("nothing to compare with", fix="name two targets or more: llamaops bench compare A B")
    signal.signal(signal.SIGTERM, terminate)
    check_all_writable(out, html)
    named = [_with_overrides(text) for text in targets]
    conditions = make_conditions(load, named[0].profile_slo())
    for each in named:
        make_ready(each, make_progress())
    comparison = compare_targets(named, conditions, pairs, keep=keep, on_run=_say_run(len(named) * pairs))
    document = as_comparison(comparison)
    click.echo(json.dumps(document) if as_json else comparison_text(comparison))
    _write(document, out, html)
    return 0


@bench.command(short_help="Draw JSON documents of runs and comparisons.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), default="report.html", show_default=True,
              help="The report to write.")
@click.option("--plots", type=click.Path(path_type=Path, file_okay=False), help="Write each plot as an SVG file there.")
def report(files: tuple[Path, ...], html: Path, plots: Path | None) -> None:
    """Make one report of the JSON documents in FILES, which bench run and bench compare wrote with --out.

    Runs are drawn into the same plots, so that before and after, or two machines, can be seen side by side; where the
    machines differ, the report shows both.

    \b
    Example:
      llamaops bench report before.json after.json --html both.html

    Exit codes: 0 written · 2 a file is no llamaops-bench document.
    """
    from llamaops.bench.report import write_plots, write_report

    documents = [_document(path) for path in files]
    write_report(html, documents)
    if plots is not None:
        write_plots(plots, documents)


def _document(path: Path) -> dict[str, Any]:
    from llamaops.bench.report import check_document

    try:
        document: dict[str, Any] = json.loads(path.read_text())
        if document["schema"] != "llamaops-bench/1":
            raise ValueError(f"its schema is {document['schema']}")
        check_document(document)
    except (ValueError, KeyError, TypeError) as exc:
        raise UsageError("not a llamaops-bench/1 document", where=str(path), why=str(exc),
                         fix="write one with: llamaops bench TARGET --out FILE") from exc
    return document


def check_all_writable(*paths: Path | None) -> None:
    """Raise UsageError, before anything is measured, where a result could not be written."""
    from llamaops.files import check_writable

    for path in paths:
        if path is not None:
            check_writable(path)


def _write(document: dict[str, Any], out: Path | None, html: Path | None) -> None:
    if out is not None:
        from llamaops.files import write_whole

        write_whole(out, json.dumps(document, indent=1) + "\n", replace=True)
    if html is not None:
        from llamaops.bench.report import write_report

        write_report(html, [document])


def _with_overrides(text: str) -> Target:
    """Read a target; after a profile's path, commas bring its overrides: ``qwen.yaml,placement.threads=2``."""
    from llamaops.bench.targets import parse_target

    if text.startswith(("cmd:", "http://", "https://")):
        return parse_target(text)
    path, *overrides = text.split(",")
    return parse_target(path, overrides)


def _say_run(total: int) -> Callable[[int, int], None]:
    shown = sys.stderr.isatty()

    def say(number: int, target: int) -> None:
        if shown:
            click.echo(f"\r\x1b[Krun {number + 1} of {total}: {chr(65 + target)}", nl=number + 1 == total, err=True)

    return say


def make_conditions(load: dict[str, Any], slo: tuple[float, float] | None) -> Conditions:
    """Return what the load options say. Raises UsageError."""
    from llamaops.bench.load import Server
    from llamaops.bench.noise import Noise
    from llamaops.bench.run import Conditions
    from llamaops.core.figures import Slo

    ttft, itl = slo or (Slo().ttft_ms, Slo().itl_ms)
    server = Server("", 0, model=load["model"], api_key=load["api_key"], api=load["api"],
                    fixed_length=not load["natural_end"], timeout_s=load["timeout"])
    return Conditions(_workload(load), Slo(load["slo_ttft"] or ttft, load["slo_itl"] or itl),
                      _read("--noise", Noise.parse, load["noise"]), load["noise_in"], server,
                      urgent=not load["ordinary_priority"])


def _workload(load: dict[str, Any]) -> Workload:
    from llamaops.core.workload import Lengths, Workload

    if load["rate"] and load["concurrency"] != 1:
        raise UsageError("--rate and --concurrency exclude each other", fix="leave one of them out",
                         why="an open loop has as many in flight as arrive")
    requests = load["requests"] or (None if load["duration"] else 16)
    return Workload(load["concurrency"], load["rate"], requests, load["duration"], load["warmup"],
                    _read("--prompt-tokens", Lengths.parse, load["prompt_tokens"]),
                    _read("--max-tokens", Lengths.parse, load["max_tokens"]), load["shared_prefix"], load["seed"])


T = TypeVar("T")


def _read(option: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as exc:
        raise UsageError(f"{option} can't be read", why=str(exc)) from exc


class counting:  # noqa: N801 - a context manager, used like a function
    """Shows on a terminal's stderr how many requests have ended, and nothing elsewhere."""

    def __init__(self, workload: Workload) -> None:
        self._total = workload.requests
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> Callable[[int], None]:
        return self._show if self._shown else lambda _count: None

    def __exit__(self, *_: object) -> None:
        if self._shown:
            click.echo("\r\x1b[K", nl=False, err=True)

    def _show(self, count: int) -> None:
        click.echo(f"\r\x1b[K{count}{f' of {self._total}' if self._total else ''} requests", nl=False, err=True)


def terminate(signum: int, _frame: FrameType | None) -> NoReturn:
    """End on SIGTERM as Ctrl-C would, so that targets and noise are stopped."""
    raise SystemExit(128 + signum)
