"""Every failure llamaops reports on purpose, and the exit code each one ends the program with.

::

    LlamaopsError               70  (only raised through a subclass)
    ├── UsageError               2  the command line is wrong
    ├── NotRunning              64  no instance of that name answers
    ├── Unavailable             69  an engine or model can't be had
    │   ├── EngineUnavailable       none found and none may be built, or it is unfit for this machine
    │   ├── BuildFailed             CMake, the compiler or their absence
    │   └── ModelUnavailable        not found, not downloaded, unreadable, truncated, foreign format
    ├── EngineFailed            70  llama-server ended, never became ready, or refused to serve
    ├── TryAgain                75  the same call may work later
    │   ├── PortTaken               somebody else listens there
    │   └── LockHeld                another llamaops holds that name or that build
    ├── NotPermitted            77  the kernel or a file mode said no
    └── WrongProfile            78  the profile, or the plan that follows from it, can't be carried out

Interrupts are not errors: SIGINT ends the program with 130 and SIGTERM, before anything was served, with 143.
"""

from __future__ import annotations


class LlamaopsError(Exception):
    """A failure told in four parts: what failed, where, why, and the command or line that mends it.

    ``where`` is a profile path (``placement.cpus``), a file, a pid or a URL. ``detail`` holds the last lines of a
    log where there is one. None of the parts may contain a secret.
    """

    exit_code = 70

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix
        self.detail = detail

    def __str__(self) -> str:
        """Return the message as printed after ``error: ``: one part a line, only the parts there are."""
        parts = [self.what]
        for label, text in (("where", self.where), ("why", self.why), ("fix", self.fix)):
            if text:
                parts.append(f"  {label}: {text}")
        if self.detail:
            parts.extend(f"  | {line}" for line in self.detail.rstrip().splitlines())
        return "\n".join(parts)


class UsageError(LlamaopsError):
    """The command line is wrong."""

    exit_code = 2


class NotRunning(LlamaopsError):
    """No running instance of that name answers."""

    exit_code = 64


class Unavailable(LlamaopsError):
    """An engine or model can't be had."""

    exit_code = 69


class EngineUnavailable(Unavailable):
    """No engine was found and none may be built, or the one found is unfit for this machine."""


class BuildFailed(Unavailable):
    """The engine could not be built from source."""


class ModelUnavailable(Unavailable):
    """The model can't be found, fetched or read."""


class EngineFailed(LlamaopsError):
    """llama-server ended, never became ready, or refused to serve."""

    exit_code = 70


class TryAgain(LlamaopsError):
    """The same call may work later."""

    exit_code = 75


class PortTaken(TryAgain):
    """Somebody else listens on the address asked for."""


class LockHeld(TryAgain):
    """Another llamaops holds that name or that build."""


class NotPermitted(LlamaopsError):
    """The kernel or a file mode refused."""

    exit_code = 77


class WrongProfile(LlamaopsError):
    """The profile, or the plan that follows from it, can't be carried out."""

    exit_code = 78
