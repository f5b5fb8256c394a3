"""What observing costs: CPU per token with metrics and without, and per look of the sampler; one run, interleaved.

    python benchmarks/observing.py [PID of a llama-server]

Last result (2 vCPUs, EPYC Zen 4, under load): 1.7 µs a token with metrics, 1.6 without the histogram (0.1 for nothing
at all is taken off); 1.6 ms a look at an engine of 11 threads, so 0.08 % of a CPU while requests run and 0.16 % while
watched; 1.9 ms to name others among 100 processes, only where the decode CPUs are shared.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from llamaops.core.completions import StreamReader
from llamaops.core.cpuset import CpuSet
from llamaops.serve.metrics import RequestMetrics
from llamaops.serve.readings import read, read_processes

EVENT = (b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":" token"}}],"created":1796083332,"id":'
         b'"chatcmpl-LBp70n3pC8GVg1xfwyaHskqetiHFg42I","model":"smol","object":"chat.completion.chunk"}\n\n')
TOKENS, ROUNDS, LOOKS = 20_000, 9, 30


def cpu_s(work: Callable[[], object], times: int) -> float:
    """Return the CPU seconds of one call."""
    started = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - started) / times


def per_token(gap: Callable[[float], None] | None) -> float:
    """Return the CPU seconds per token of following a stream; None follows nothing."""
    reader = StreamReader("chat", gap) if gap else None
    now = 0.0

    def token() -> None:
        nonlocal now
        now += 0.02
        if reader is not None:
            reader.feed(EVENT, now)

    return cpu_s(token, TOKENS)


def main() -> None:
    pid = int(sys.argv[1]) if len(sys.argv) > 1 else os.getpid()
    observe = RequestMetrics(lambda: 0, lambda: 0).itl.observe
    rounds = [(per_token(None), per_token(lambda gap: None), per_token(observe)) for _ in range(ROUNDS)]
    nothing, without, everything = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"per token: {1e6 * (everything - nothing):.2f} µs, without the histogram {1e6 * (without - nothing):.2f} µs")
    cpus = CpuSet(os.sched_getaffinity(0))
    print(f"per look:  {1e3 * cpu_s(lambda: read(pid, cpus), LOOKS):.2f} ms at pid {pid}, "
          f"{1e3 * cpu_s(lambda: read_processes(Path('/'), set()), LOOKS):.2f} ms at all processes")


if __name__ == "__main__":
    main()
