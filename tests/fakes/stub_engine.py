#!/usr/bin/env python3
"""A stand-in for llama-server: a real process that speaks enough of its HTTP, with a switch for every way to fail.

Run it as ``python stub_engine.py --host /path/engine.sock`` (or ``--port N``). Flags of llama-server that it does not
know are ignored; switches start with ``--stub-`` and may also come from the environment variable ``STUB_ARGS`` (split
as a shell does), so that a profile's ``engine.env`` can set them. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

VERSION = "version: 0.0.0-stub (build 11434, commit stub)\nbuilt with GNU 12.2.0 for Linux x86_64\n"
HELP = """usage: llama-server [options]

-h,    --help                 print usage and exit
--version                     show version and build info
-m,    --model FNAME          model path to load
-c,    --ctx-size N           size of the prompt context
-t,    --threads N            number of CPU threads to use during generation
-tb,   --threads-batch N      number of threads to use during batch and prompt processing
-b,    --batch-size N         logical maximum batch size
-ub,   --ubatch-size N        physical maximum batch size
-np,   --parallel N           number of server slots
-ctk,  --cache-type-k TYPE    KV cache data type for K
-ctv,  --cache-type-v TYPE    KV cache data type for V
-a,    --alias STRING         set model name aliases
-fa,   --flash-attn [on|off|auto]
--poll N                      polling level
--prio N                      set process/thread priority
--mlock                       force system to keep model in RAM
--no-mmap                     do not memory-map model
--cache-ram N                 set the maximum cache size in MiB
--host HOST                   ip address to listen, or bind to an UNIX socket if the address ends with .sock
--port PORT                   port to listen
--metrics                     enable prometheus compatible metrics endpoint
--slots, --no-slots           expose slots monitoring endpoint
--no-webui, --no-ui           disable the Web UI
--jinja                       use jinja template for chat
--offline                     offline mode: forces use of cache
--embedding, --embeddings     restrict to only support embedding use case
"""


def parse(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8080)
    p.add_argument("-a", "--alias", default="stub")
    p.add_argument("--version", action="store_true")
    p.add_argument("-h", "--help", action="store_true")
    p.add_argument("--stub-load-s", type=float, default=0.0, help="load this long, with log lines")
    p.add_argument("--stub-silent-load-s", type=float, default=0.0, help="load this long without a sign of life")
    p.add_argument("--stub-busy-load-s", type=float, default=0.0, help="load this long on the CPU, without a word")
    p.add_argument("--stub-never-ready", action="store_true", help="answer 503 for ever, silently")
    p.add_argument("--stub-no-listen", action="store_true", help="live, but never listen")
    p.add_argument("--stub-hang-after", type=int, default=None, metavar="N",
                   help="answer N generations, then none, without using the CPU; /health still answers")
    p.add_argument("--stub-busy-after", type=int, default=None, metavar="N",
                   help="answer N generations; the next burns the CPU without an answer, and nothing else is answered")
    p.add_argument("--stub-busy-s", type=float, default=3600.0, help="how long that lasts; then it is answered")
    p.add_argument("--stub-die-after-bytes", type=int, default=None, metavar="N", help="die when N body bytes are sent")
    p.add_argument("--stub-die-after-s", type=float, default=None, help="die so long after ready")
    p.add_argument("--stub-end", default="1", help="how to die: an exit code or a signal name such as SEGV")
    p.add_argument("--stub-say", default=None, help="print this on stderr before dying")
    p.add_argument("--stub-crash", action="store_true", help="die at the start, always")
    p.add_argument("--stub-crash-if", default=None, metavar="FILE", help="die at the start while FILE exists")
    p.add_argument("--stub-ignore-term", action="store_true")
    p.add_argument("--stub-term-s", type=float, default=0.0, help="take so long to end on SIGTERM")
    p.add_argument("--stub-fork", choices=["group", "session", "daemon"], default=None,
                   help="start a child that stays: in our group, in its own session, or orphaned in its own session")
    p.add_argument("--stub-flood-mib", type=float, default=0.0, help="write so much to stderr at each generation")
    p.add_argument("--stub-repeat", type=int, default=0, metavar="N", help="print one warning N times at the start")
    p.add_argument("--stub-threads", type=int, default=0, help="start so many idle compute threads")
    p.add_argument("--stub-no-completions", action="store_true", help="refuse generation with 501: an embedding model")
    p.add_argument("--stub-tokens", type=int, default=5, help="tokens in each answer")
    p.add_argument("--stub-delay-s", type=float, default=0.0, help="delay before each token")
    p.add_argument("--stub-script", default=None, metavar="FILE",
                   help="answer streams with these chunks: a JSON list of [delay_s, text] pairs")
    given, _ = p.parse_known_args([*argv, *shlex.split(os.environ.get("STUB_ARGS", ""))])
    return given


def say(text: str) -> None:
    os.write(2, f"{text}\n".encode())


def die(how: str, message: str | None) -> None:
    if message:
        say(message)
    if how.lstrip("-").isdigit():
        os._exit(int(how))
    os.kill(os.getpid(), getattr(signal, f"SIG{how.removeprefix('SIG')}"))
    time.sleep(60)


def burn(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


class Stub:
    def __init__(self, o: argparse.Namespace) -> None:
        self.o = o
        self.loaded = threading.Event()
        self.generations = 0
        self.sent = 0
        self.lock = threading.Lock()
        self.busy = False

    def listen(self) -> socket.socket:
        if self.o.host.endswith(".sock"):
            sock = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(FileNotFoundError):
                Path(self.o.host).unlink()
            address: Any = self.o.host
        else:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            address = (self.o.host, self.o.port)
        try:
            sock.bind(address)
        except OSError:
            where = f"hostname: {self.o.host}, port: {self.o.port}"
            say(f"0.00.002.641 E srv         start: couldn't bind HTTP server socket, {where}")
            say("0.00.002.736 E srv  llama_server: exiting due to HTTP server error")
            os._exit(1)
        sock.listen(128)
        return sock

    def load(self) -> None:
        for _ in range(round(self.o.stub_load_s / 0.05)):
            say("0.00.000.001 I load_tensors: loading")
            time.sleep(0.05)
        time.sleep(self.o.stub_silent_load_s)
        burn(self.o.stub_busy_load_s)
        if self.o.stub_never_ready:
            return
        self.loaded.set()
        say("0.00.000.002 I srv  llama_server: model loaded")
        if self.o.stub_die_after_s is not None:
            time.sleep(self.o.stub_die_after_s)
            die(self.o.stub_end, self.o.stub_say)

    def serve(self, sock: socket.socket) -> None:
        while True:
            conn, _ = sock.accept()
            threading.Thread(target=self.connection, args=(conn,), daemon=True).start()

    def connection(self, conn: socket.socket) -> None:
        with conn, contextlib.suppress(OSError):
            stream = conn.makefile("rb")
            while self.request(conn, stream):
                pass

    def request(self, conn: socket.socket, stream: BinaryIO) -> bool:
        line = stream.readline().decode("latin-1").split()
        if len(line) < 2:
            return False
        headers: dict[str, str] = {}
        while (raw := stream.readline().decode("latin-1").strip()):
            name, _, value = raw.partition(":")
            headers[name.lower()] = value.strip()
        body = stream.read(int(headers.get("content-length", 0)))
        while self.busy:
            time.sleep(0.01)
        self.answer(conn, line[0], line[1].partition("?")[0], body)
        return headers.get("connection", "").lower() != "close"

    def answer(self, conn: socket.socket, method: str, path: str, body: bytes) -> None:
        if path in ("/health", "/v1/health"):
            if self.loaded.is_set():
                return self.plain(conn, 200, {"status": "ok"})
            return self.error(conn, 503, "Loading model", "unavailable_error")
        if not self.loaded.is_set():
            return self.error(conn, 503, "Loading model", "unavailable_error")
        if path in ("/v1/models", "/models"):
            entry = {"id": self.o.alias, "object": "model", "owned_by": "llamacpp"}
            return self.plain(conn, 200, {"object": "list", "data": [entry]})
        if path in ("/embedding", "/embeddings", "/v1/embeddings"):
            return self.plain(conn, 200, {"object": "list", "data": [{"index": 0, "embedding": [0.1, 0.2]}]})
        if path in ("/completion", "/completions", "/v1/completions", "/v1/chat/completions"):
            return self.generate(conn, path, json.loads(body or b"{}"))
        return self.error(conn, 404, "File Not Found", "not_found_error")

    def generate(self, conn: socket.socket, path: str, asked: dict[str, Any]) -> None:
        if self.o.stub_no_completions:
            return self.error(conn, 501, "This server does not support completions.", "not_supported_error")
        with self.lock:
            number = self.generations
            self.generations += 1
        if self.o.stub_flood_mib:
            self.flood(self.o.stub_flood_mib)
        if self.o.stub_hang_after is not None and number >= self.o.stub_hang_after:
            time.sleep(3600)
        if self.o.stub_busy_after is not None and number >= self.o.stub_busy_after:
            self.busy = True
            burn(self.o.stub_busy_s)
            self.busy = False
        count = asked.get("n_predict") or asked.get("max_tokens") or self.o.stub_tokens
        tokens = [f"w{i} " for i in range(min(count, self.o.stub_tokens) if count > 0 else self.o.stub_tokens)]
        chat = "chat" in path
        if asked.get("stream"):
            return self.stream(conn, self.events(tokens, chat, asked))
        for _ in tokens:
            time.sleep(self.o.stub_delay_s)
        text = "".join(tokens)
        usage = {"prompt_tokens": 3, "completion_tokens": len(tokens), "total_tokens": 3 + len(tokens)}
        if path == "/completion":
            return self.plain(conn, 200, {"content": text, "stop": True, "tokens_predicted": len(tokens)})
        choice = {"index": 0, "finish_reason": "stop"} | (
            {"message": {"role": "assistant", "content": text}} if chat else {"text": text})
        return self.plain(conn, 200, {"id": "stub-1", "object": "chat.completion" if chat else "text_completion",
                                      "created": 0, "model": self.o.alias, "choices": [choice], "usage": usage})

    def events(self, tokens: list[str], chat: bool, asked: dict[str, Any]) -> Iterator[tuple[float, str]]:
        if self.o.stub_script:
            yield from json.loads(Path(self.o.stub_script).read_text(encoding="utf-8"))
            return
        base = {"id": "stub-1", "object": "chat.completion.chunk" if chat else "text_completion", "created": 0,
                "model": self.o.alias}

        def event(choices: list[Any], **more: object) -> str:
            return "data: " + json.dumps({**base, "choices": choices, **more}) + "\n\n"

        if chat:
            yield 0.0, event([{"index": 0, "finish_reason": None, "delta": {"role": "assistant", "content": None}}])
        for token in tokens:
            part = {"delta": {"content": token}} if chat else {"text": token}
            yield self.o.stub_delay_s, event([{"index": 0, "finish_reason": None, **part}])
        yield 0.0, event([{"index": 0, "finish_reason": "stop", **({"delta": {}} if chat else {"text": ""})}],
                         timings={"prompt_n": 3, "predicted_n": len(tokens), "predicted_ms": 1.0})
        if (asked.get("stream_options") or {}).get("include_usage"):
            yield 0.0, event([], usage={"prompt_tokens": 3, "completion_tokens": len(tokens),
                                        "total_tokens": 3 + len(tokens)})
        yield 0.0, "data: [DONE]\n\n"

    def stream(self, conn: socket.socket, events: Iterator[tuple[float, str]]) -> None:
        conn.sendall(b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\n"
                     b"Transfer-Encoding: chunked\r\n\r\n")
        for delay, text in events:
            time.sleep(delay)
            data = text.encode()
            self.body(conn, b"%x\r\n%s\r\n" % (len(data), data), data)
        conn.sendall(b"0\r\n\r\n")

    def body(self, conn: socket.socket, wire: bytes, data: bytes) -> None:
        """Send a piece of a generation's body, dying on the way if so told."""
        limit = self.o.stub_die_after_bytes
        if limit is not None and self.sent + len(data) >= limit:
            conn.sendall(wire[: len(wire) - len(data) - 2 + max(limit - self.sent, 0)])
            die(self.o.stub_end, self.o.stub_say)
        self.sent += len(data)
        conn.sendall(wire)

    def plain(self, conn: socket.socket, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\nServer: llama.cpp\r\nContent-Type: application/json; charset=utf-8\r\n" \
               f"Content-Length: {len(data)}\r\n\r\n"
        if "choices" in document:
            conn.sendall(head.encode())
            return self.body(conn, data, data)
        return conn.sendall(head.encode() + data)

    def error(self, conn: socket.socket, status: int, message: str, kind: str) -> None:
        self.plain(conn, status, {"error": {"code": status, "message": message, "type": kind}})

    def flood(self, mib: float) -> None:
        line = b"0.00.000.003 W flood: " + b"x" * 1001 + b"\n"
        for _ in range(round(mib * 1024)):
            os.write(2, line)


def fork_child(how: str) -> None:
    """Leave a process behind that outlives us unless somebody ends it."""
    if os.fork():
        return
    if how != "group":
        os.setsid()
    if how == "daemon" and os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)
    os._exit(0)


def main() -> None:
    o = parse(sys.argv[1:])
    if o.version:
        sys.stderr.write(VERSION)
        return
    if o.help:
        sys.stdout.write(HELP)
        return

    def on_term(_number: int, _frame: object) -> None:
        if not o.stub_ignore_term:
            time.sleep(o.stub_term_s)
            os._exit(0)

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, on_term)
    say("0.00.000.000 I srv  llama_server: initializing ...")
    for _ in range(o.stub_repeat):
        say("0.00.000.000 W warning: failed to set priority: Operation not permitted (1)")
    if o.stub_crash or (o.stub_crash_if and Path(o.stub_crash_if).exists()):
        die(o.stub_end, o.stub_say)
    if o.stub_fork:
        fork_child(o.stub_fork)
    for _ in range(o.stub_threads):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    stub = Stub(o)
    if not o.stub_no_listen:
        sock = stub.listen()
        threading.Thread(target=stub.serve, args=(sock,), daemon=True).start()
    threading.Thread(target=stub.load, daemon=True).start()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
