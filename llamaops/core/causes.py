"""Why an engine ended: its exit and its last log lines, matched against the causes that are known."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: by itself with ``code``, or by ``signal``; exactly one of the two is set.

    ``oom_killed``: the kernel killed it for its memory (told by the cgroup's events).
    """

    code: int | None = None
    signal: int | None = None
    oom_killed: bool = False

    @classmethod
    def of(cls, returncode: int, *, oom_killed: bool = False) -> Exit:
        """Read a return code as `subprocess` gives it: negative means a signal."""
        if returncode < 0:
            return cls(signal=-returncode, oom_killed=oom_killed)
        return cls(code=returncode, oom_killed=oom_killed)

    def __str__(self) -> str:
        """Return ``exit code 1`` or ``SIGSEGV (segmentation fault)``."""
        if self.signal is None:
            return f"exit code {self.code}"
        words = _SIGNAL_WORDS.get(self.signal, "")
        return _signal_name(self.signal) + (f" ({words})" if words else "")


@dataclass(frozen=True, slots=True)
class Cause:
    """A known reason for an engine's end.

    ``mends``: the same start may succeed later by itself (memory, a race), so trying again makes sense.
    ``exit_code`` is what llamaops ends with when it gives up (see `llamaops.errors`).
    """

    code: str
    text: str
    fix: str | None = None
    mends: bool = True
    exit_code: Literal[69, 70, 75, 77, 78] = 70


_SIGNAL_WORDS: dict[int, str] = {
    signal.SIGILL: "illegal instruction",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted",
    signal.SIGBUS: "bus error",
    signal.SIGKILL: "killed",
    signal.SIGFPE: "arithmetic error",
}


@dataclass(frozen=True, slots=True)
class _Hint:
    """A pattern over one log line; ``{0}`` of the texts is the line's telling part."""

    pattern: re.Pattern[str]
    cause: Cause


def _hint(pattern: str, code: str, text: str, fix: str, *, mends: bool = False,
          exit_code: Literal[69, 70, 75, 77, 78] = 70) -> _Hint:
    return _Hint(re.compile(pattern), Cause(code, text, fix, mends, exit_code))


_FETCH_AGAIN = "llamaops model verify, or remove the file and start again to fetch it anew"

# The first pattern found in the log decides, whatever line it is on: the specific before the general. The wording is
# that of llama.cpp b11434 (gguf.cpp, llama-mmap.cpp, llama-model*.cpp, arg.cpp, server.cpp), of glibc, of the wrappers.
_HINTS = (
    _hint(r"error: (?:invalid|unknown) argument: (?P<what>\S+)", "unknown-flag",
          "the engine does not know the flag {what}", "remove it from engine.args, or choose an engine that knows it",
          exit_code=78),
    _hint(r"error while handling argument \"(?P<what>[^\"]+)\"", "bad-flag",
          "the engine refuses the value of {what}", "correct engine.args (llama-server --help lists the values)",
          exit_code=78),
    _hint(r"(?:llamaops: cannot run |(?:(?:setpriv|taskset|chrt): failed to execute|numactl: execution of|nice:) "
          r"(?=[`'/]))(?P<what>.+)", "cannot-run", "cannot run {what}",
          "check engine.path, and that the file is executable here", exit_code=69),
    _hint(r"error while loading shared libraries: (?P<what>[^:]+)", "missing-library",
          "the engine needs the shared library {what}",
          "install it, or let llamaops build an engine: engine.path: auto", exit_code=69),
    _hint(r"version `(?P<what>GLIBC[A-Z]*_[\d.]+)' not found", "old-libc",
          "the engine was built for a newer system ({what})", "build it here: engine.path: auto, engine.build: always",
          exit_code=69),
    _hint(r"[Ii]llegal instruction", "illegal-instruction",
          "the engine was built for a CPU with instructions that this one lacks",
          "build it here: engine.path: auto, engine.build: always", exit_code=69),
    _hint(r"failed to open (?:GGUF file )?'?(?P<what>.+?)'? ?[:(] ?Permission denied", "model-forbidden",
          "not permitted to read {what}", "give this user read access to the model file", exit_code=69),
    _hint(r"failed to open (?:GGUF file )?'?(?P<what>.+?)'? ?[:(] ?No such file", "model-missing",
          "there is no file {what}", "check model.source", exit_code=69),
    _hint(r"invalid magic characters|gguf_init_from_\w+: .*invalid magic", "model-foreign",
          "the model file is not in GGUF format", "check model.source; llamaops model inspect FILE tells what it is",
          exit_code=69),
    _hint(r"unknown model architecture: '(?P<what>[^']+)'", "model-architecture",
          "this engine does not know the model architecture {what}", "use a newer engine (engine.build: always)",
          exit_code=69),
    _hint(r"not within the file bounds|gguf_init_from_\w+: failed to read|unexpectedly reached end of file|"
          r"tensor '.+' data is not within", "model-truncated", "the model file is truncated or damaged", _FETCH_AGAIN,
          exit_code=69),
    _hint(r"quantized V cache requires flash_attn|V cache quantization requires flash_attn", "kv-type-needs-attention",
          "a quantized KV cache needs flash attention, which engine.args turn off",
          "take --flash-attn out of engine.args, or choose model.kv_type: f16", exit_code=78),
    _hint(r"insufficient memory|unable to allocate .* buffer|failed to allocate (?:buffer|compute|CPU|output)|"
          r"std::bad_alloc|mmap failed: Cannot allocate|[Cc]annot allocate memory|GGML_ASSERT\(.*ctx->mem_buffer",
          "out-of-memory", "not enough memory for this model, context and number of slots",
          "lower model.context or serve.slots, or choose model.kv_type: q8_0", mends=True),
    _hint(r"couldn't bind HTTP server socket", "cannot-bind", "the engine could not listen on its private address",
          "see whether another process holds it: llamaops status", mends=True, exit_code=75),
    _hint(r"(?:chrt|taskset|numactl|nice|setpriv): .*(?:Operation not permitted|[Pp]ermission denied)", "not-permitted",
          "the kernel refuses the planned CPUs or priority",
          "llamaops host doctor tells what is permitted and how to change it", exit_code=77),
    _hint(r"(?:taskset|numactl|sched_setaffinity).*Invalid argument|libnuma: .*(?:invalid|out of range)", "bad-cpus",
          "the planned CPUs are not there now", "check placement.cpus against llamaops host doctor", exit_code=78),
    _hint(r"(?P<what>\S+\.(?:c|cpp|cu|h):\d+: GGML_ASSERT\(.*\)[^\n]*|[^\n]*Assertion `.*' failed)", "assertion",
          "the engine failed an internal check: {what}", "report it to llama.cpp with the log: llamaops logs",
          mends=True),
    _hint(r"error loading model|failed to load model", "model-unreadable", "the engine cannot load the model",
          "llamaops logs shows what it said; llamaops model inspect FILE looks at the file", exit_code=69),
)

_OOM = Cause("oom-killed", "the kernel killed the engine: its memory limit was reached",
             "raise the limit, or lower model.context, serve.slots or memory.prompt_cache_mib")
_ILLEGAL = next(h.cause for h in _HINTS if h.cause.code == "illegal-instruction")


def explain(ended: Exit, lines: Sequence[str]) -> Cause:
    """Name the cause of an engine's end from how it ended and its last log ``lines`` (oldest first).

    What the kernel did (killed for memory, illegal instruction) outranks what the log says; without either the cause is
    ``unknown`` and its text the exit itself.
    """
    if ended.oom_killed:
        return _OOM
    if ended.signal == signal.SIGILL:
        return _ILLEGAL
    return _from_log(lines) or Cause("unknown", f"the engine ended with {ended}")


def _from_log(lines: Sequence[str]) -> Cause | None:
    text = "\n".join(lines)
    for hint in _HINTS:
        if found := hint.pattern.search(text):
            what = (found.groupdict().get("what") or "").strip()
            cause = hint.cause
            return Cause(cause.code, cause.text.format(what=what), cause.fix, cause.mends, cause.exit_code)
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
