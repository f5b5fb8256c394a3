"""A server that streams by script and writes down when it really sent each event: the truth a bench is held against.

    python truth_stub.py --port P --truth FILE [--prefill-ms 30] [--token-ms 10] [--jitter 0.5] [--stall-ms 60]

One JSON line per answer goes to FILE: when the request was complete and when each event with text was sent, on
CLOCK_MONOTONIC. ``--slow 1.1`` makes every delay a tenth longer.
``--fail status|drop|error|empty`` answers every second request that way instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import time
from typing import Any

import uvloop

clock = time.perf_counter


class Connection(asyncio.Protocol):
    def __init__(self, options: argparse.Namespace, counter: list[int]) -> None:
        self.o, self.counter, self.buffer = options, counter, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, blank, body = self.buffer.partition(b"\r\n\r\n")
        lengths = (line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        length = int(next(lengths, b"0"))
        if not blank or len(body) < length:
            return
        received, self.buffer = clock(), b""
        if head.startswith(b"GET"):
            self.plain(200, {"data": [{"id": "truth"}]})
        else:
            self.task = asyncio.ensure_future(self.answer(json.loads(body), received))

    def plain(self, status: int, document: object) -> None:
        data = json.dumps(document).encode()
        self.transport.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))

    def event(self, document: object) -> None:
        data = b"data: " + (document if isinstance(document, bytes) else json.dumps(document).encode()) + b"\n\n"
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def answer(self, ask: dict[str, Any], received: float) -> None:
        number = self.counter[0]
        self.counter[0] += 1
        fail = self.o.fail if number % 2 else None
        if fail == "status":
            self.plain(503, {"error": {"message": "busy", "code": 503}})
        else:
            await self.stream(ask["max_tokens"], number, fail, received)

    async def stream(self, count: int, number: int, fail: str | None, received: float) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                             b"Transfer-Encoding: chunked\r\n\r\n")
        self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]})
        rng, sent = random.Random(number), list[float]()
        count = 0 if fail == "empty" else count
        due = clock() + self.o.slow * self.o.prefill_ms / 1e3
        for i in range(count):
            await asyncio.sleep(due - clock())
            if fail == "drop" and i == 2:
                self.transport.abort()
                return
            if fail == "error" and i == 2:
                self.event({"error": {"message": "the engine died", "type": "server_error"}})
                self.transport.write(b"0\r\n\r\n")
                return
            sent.append(clock())
            self.event({"choices": [{"index": 0, "finish_reason": None, "delta": {"content": "x"}}]})
            stall = self.o.stall_ms if i == count // 2 else 0.0
            due += self.o.slow * (self.o.token_ms * (1 + self.o.jitter * rng.uniform(-1, 1)) + stall) / 1e3
        usage = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
        self.event({"choices": [{"index": 0, "finish_reason": "length", "delta": {}}],
                    "timings": {"prompt_n": 7, "prompt_ms": 1.5, "predicted_n": count, "predicted_per_token_ms": 2.5}})
        self.event({"choices": [], "usage": usage})
        self.event(b"[DONE]")
        self.transport.write(b"0\r\n\r\n")
        if self.o.truth:
            line = json.dumps({"received": received, "sent": sent, "ended": clock()}) + "\n"
            os.write(self.o.truth, line.encode())


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--truth")
    for name, default in {"prefill-ms": 30.0, "token-ms": 10.0, "jitter": 0.5, "stall-ms": 60.0, "slow": 1.0}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--fail", choices=["status", "drop", "error", "empty"])
    options = parser.parse_args()
    if options.truth:
        options.truth = os.open(options.truth, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with contextlib.suppress(OSError):  # where it may not, the stamps still tell when it really sent
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(80))
    counter = [0]
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(options, counter), "127.0.0.1", options.port, backlog=256)
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
