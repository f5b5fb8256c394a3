"""The command line. Commands load their modules only when they run, so that ``--help`` stays quick."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from typing import Any

import click

from llamaops import __version__
from llamaops.errors import LlamaopsError, NotPermitted, TryAgain

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("run:up", "Prepare everything and serve a profile."),
    "plan": ("plan:plan", "Show what would run and why."),
    "init": ("profile:init", "Write a commented profile that suits this machine."),
    "status": ("run:status", "Show the state of a running instance, or of all."),
    "top": ("top:top", "Watch a running instance live in the terminal."),
    "stop": ("run:stop", "Drain and stop a running instance."),
    "reload": ("run:reload", "Make a running instance read its profile again."),
    "logs": ("run:logs", "Show the engine's log of an instance."),
    "chat": ("chat:chat", "Stream one answer, or hold a conversation, in the terminal."),
    "host": ("host:host", "Look at this machine and tune it: doctor, snapshot, tune."),
    "model": ("model:model", "Fetch, convert, quantize, compare and inspect models."),
    "engine": ("engine:engine", "Find, build and inspect llama-server."),
    "bench": ("bench:bench", "Measure latency and throughput; compare two set-ups."),
    "tune": ("tune:tune", "Find the setting that is best on this machine."),
    "deploy": ("deploy:deploy", "Write systemd units, compose and Kubernetes files from the same plan."),
    "schema": ("profile:schema", "Print the profile's JSON Schema."),
}
"""Name → (module under llamaops.cli, attribute) and the line that --help shows, in the order shown."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called; the list costs no import."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command and return the command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(f"llamaops.cli.{module}"), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="llamaops")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Serve a small language model smoothly on CPUs.

    One YAML profile goes in; llamaops finds or builds llama.cpp, fetches the model, plans CPUs, threads and priority
    for this machine, starts llama-server and relays its OpenAI-style API on one port.
    """
    ctx.obj = {"debug": debug}


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit with the code that `llamaops.errors` documents."""
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: list[str]) -> int:
    """Run the command line and return its exit code; failures are printed on stderr, tracebacks only with --debug."""
    debug = "--debug" in args
    try:
        result: Any = cli.main(args=args, prog_name="llamaops", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Abort:
        return 128 + signal.SIGINT
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except LlamaopsError as exc:
        if debug:
            raise
        print_error(exc)
        return exc.exit_code
    except BrokenPipeError:
        # The reader of our stdout went away (``| head``), as it may: keep the interpreter from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as exc:
        if debug:
            raise
        found = _from_system(exc)
        print_error(found)
        return found.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _from_system(exc: OSError) -> LlamaopsError:
    """Tell what the system refused and no command has words of its own for: a full disk, a folder that is read-only."""
    where, why = str(exc.filename) if exc.filename else None, exc.strerror or str(exc)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return TryAgain("no room is left to write", where=where, why=why, fix="make room there, then try again")
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NotPermitted("a file or folder can't be used", where=where, why=why,
                            fix="give this user access, or choose other folders: LLAMAOPS_CACHE, XDG_STATE_HOME, "
                            "XDG_RUNTIME_DIR")
    return LlamaopsError("the system refused", where=where, why=why, fix="--debug before the command shows where")


def print_error(exc: LlamaopsError) -> None:
    """Print a failure on stderr, the first word red on a terminal."""
    click.echo(click.style("error:", fg="red", bold=True) + f" {exc}", err=True, color=colour(sys.stderr))


def colour(stream: Any) -> bool:
    """Tell whether ``stream`` may be coloured: a terminal, and NO_COLOR not set."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR")
