"""What relaying costs: the relay against nginx and against Starlette with httpx, one stub engine, one run.

    python benchmarks/relay.py [--streams 64] [--rate 50] [--seconds 8] [--rounds 3] [--idle 1000] [--volume 1024]

After the comparison the relay's memory is looked at, with that many silent streams, and while that many MiB go through
one stream; 0 leaves a part out. What came is held against what is aimed at and kept in benchmarks/results/relay.json,
or where ``--out`` says; the exit code is 1 when something misses. Give it the machine to itself, about four minutes.

Engine, relay and client are processes of their own. CPU time is the relay's alone, from the scheduler's nanosecond
counts, so that it hardly depends on what else runs; the times a client sees do. nginx is left out where there is none
(Debian: apt install nginx-light).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import uvloop

AIMS = {
    "CPU per event / nginx": 2.0,
    "CPU per event / starlette + httpx": 0.25,
    "added ITL p99, ms": 1.0,
    "added first byte p50, ms": 8.0,
    "idle streams, MB over base": 60.0,
    "one long stream, MB over base": 16.0,
}
"""At most this."""
RESULTS = Path(__file__).with_name("results") / "relay.json"
TEXT = b'"finish_reason":null,"index":0,"delta":{"content":" token"}'
REST = (
    b'"created":1796083332,"id":"chatcmpl-LBp70n3pC8GVg1xfwyaHskqetiHFg42I","model":"smol",'
    b'"system_fingerprint":"b11434","object":"chat.completion.chunk"'
)
NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen 127.0.0.1:{port} backlog=2048; location / {{
    proxy_pass http://unix:{engine}; proxy_buffering off; proxy_http_version 1.1; proxy_read_timeout 1h;
  }} }}
}}
"""


# --- the stub engine: events of llama-server's size at a fixed rate, each with the time it was sent


async def stub(path: str, rate: float) -> None:
    async def follow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
        except asyncio.IncompleteReadError:  # only looked whether we listen
            writer.close()
            return
        query = dict(p.split("=") for p in head.split(b" ")[1].decode().partition("?")[2].split("&") if p)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            if "volume" in query:
                await pour(writer, int(query["volume"]) << 20)
            else:
                await drip(writer, float(query["seconds"]), rate)
        writer.close()

    server = await asyncio.start_unix_server(follow, path, backlog=2048)
    async with server:
        await server.serve_forever()


def event() -> bytes:
    data = b'data: {"choices":[{%b}],%b,"ns":%d}\n\n' % (TEXT, REST, time.monotonic_ns())
    return b"%x\r\n%b\r\n" % (len(data), data)


async def drip(writer: asyncio.StreamWriter, seconds: float, rate: float) -> None:
    start = time.monotonic()
    for i in range(int(seconds * rate)):
        await asyncio.sleep(max(0.0, start + i / rate - time.monotonic()))
        writer.write(event())
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def pour(writer: asyncio.StreamWriter, size: int) -> None:
    block = event() * 256
    for _ in range(size // len(block) + 1):
        writer.write(block)
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()


# --- the relays


async def llamaops(engine: str, port: int) -> None:
    from llamaops.serve.app import RelayConfig, make_app, make_server
    from llamaops.serve.traffic import Endpoint, Traffic

    class Engine:
        def endpoint(self) -> Endpoint:
            return Endpoint(engine, None, 1)

    sock = listening(port)
    app = make_app(Engine(), Traffic(), RelayConfig("smol", slots=100_000), status=dict)
    gc.freeze()  # as the service does before it serves
    await make_server(app).serve(sockets=[sock])


async def starlette(engine: str, port: int) -> None:
    import httpx
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    limits = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=engine, limits=limits), timeout=None)

    async def relay(request: Request) -> StreamingResponse:
        url = f"http://engine{request.url.path}?{request.url.query}"
        upstream = await client.send(client.build_request("POST", url, content=await request.body()), stream=True)
        return StreamingResponse(upstream.aiter_raw(), media_type="text/event-stream", background=None)

    app = Starlette(routes=[Route("/{path:path}", relay, methods=["POST"])])
    config = uvicorn.Config(app, http="httptools", log_config=None, access_log=False, lifespan="off", backlog=2048)
    sock = listening(port)
    await uvicorn.Server(config).serve(sockets=[sock])


def listening(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock


# --- the client


class Seen:
    """What the clients of one run saw: milliseconds."""

    def __init__(self) -> None:
        self.first_byte: list[float] = []
        self.gaps: list[float] = []
        self.delays: list[float] = []
        self.events = 0


async def connected(where: str | int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(where, str):
        return await asyncio.open_unix_connection(where)
    return await asyncio.open_connection("127.0.0.1", where)


async def listen(where: str | int, query: str, seen: Seen) -> None:
    reader, writer = await connected(where)
    body = b'{"stream":true,"messages":[{"role":"user","content":"hello"}]}'
    asked = time.monotonic_ns()
    writer.write(b"POST /v1/chat/completions?%b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n%b" % (query.encode(), len(body), body))
    await reader.readuntil(b"\r\n\r\n")
    last = 0
    while size := int(await reader.readline(), 16):
        data = await reader.readexactly(size)
        await reader.readexactly(2)
        now = time.monotonic_ns()
        seen.events += data.count(b"\n\n")
        if last:
            seen.gaps.append((now - last) / 1e6)
        else:
            seen.first_byte.append((now - asked) / 1e6)
        last = now
        seen.delays.append((now - int(data[data.rindex(b'"ns":') + 5 : data.rindex(b"}")])) / 1e6)
    writer.close()


async def clients(where: str | int, streams: int, seconds: float, rate: float) -> Seen:
    seen = Seen()

    async def one(i: int) -> None:
        await asyncio.sleep(i / streams / rate)  # spread over one period, as independent streams are
        await listen(where, f"seconds={seconds}", seen)

    await asyncio.gather(*(one(i) for i in range(streams)))
    return seen


# --- processes


def cpu_ns(pid: int) -> int:
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def rss_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


@contextlib.contextmanager
def process(*argv: str) -> Iterator[int]:
    child = subprocess.Popen(argv)
    try:
        yield child.pid
    finally:
        child.terminate()
        child.wait()


def role(name: str, *args: object) -> contextlib.AbstractContextManager[int]:
    return process(sys.executable, __file__, "--role", name, *map(str, args))


async def reachable(where: str | int) -> None:
    while True:
        with contextlib.suppress(OSError):
            _, writer = await connected(where)
            writer.close()
            return
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def relay(name: str, folder: Path, engine: str) -> AsyncIterator[tuple[str | int, int | None]]:
    """Run one relay; yield where it listens and its pid (None: no relay, straight to the engine)."""
    if name == "direct":
        yield engine, None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    if name == "nginx":
        conf = folder / "nginx.conf"
        conf.write_text(NGINX.format(folder=folder, port=port, engine=engine))
        running = process(shutil.which("nginx") or "nginx", "-p", str(folder), "-c", str(conf))
    else:
        running = role(name, engine, port)
    with running as pid:
        await reachable(port)
        yield port, pid


async def measure(name: str, folder: Path, engine: str, args: argparse.Namespace) -> dict[str, float]:
    async with relay(name, folder, engine) as (where, pid):
        await clients(where, 4, 1, args.rate)  # warm: imports, allocator, code paths
        before = cpu_ns(pid) if pid else 0
        seen = await clients(where, args.streams, args.seconds, args.rate)
        cpu = (cpu_ns(pid) - before) / 1e3 if pid else 0.0
    assert seen.events == int(args.seconds * args.rate) * args.streams, "events were lost"
    return {
        "cpu_us_per_event": cpu / seen.events,
        "first_byte_p50_ms": statistics.median(seen.first_byte),
        "itl_p50_ms": statistics.median(seen.gaps),
        "itl_p99_ms": percentile(seen.gaps, 99),
        "delay_p50_ms": statistics.median(seen.delays),
        "delay_p99_ms": percentile(seen.delays, 99),
    }


def percentile(values: list[float], p: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * p / 100))]


async def compare(folder: Path, engine: str, args: argparse.Namespace) -> dict[str, Any]:
    names = ["direct", *(["nginx"] if shutil.which("nginx") else []), "llamaops", "starlette"]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:  # interleaved, so that a busy minute hits them all
            rounds[name].append(await measure(name, folder, engine, args))
    table = {n: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for n, rs in rounds.items()}
    return {"rounds": rounds, "median": table, "found": ratios(table)}


def ratios(table: dict[str, dict[str, float]]) -> dict[str, float]:
    ours, direct = table["llamaops"], table["direct"]
    found = {
        "CPU per event / starlette + httpx": ours["cpu_us_per_event"] / table["starlette"]["cpu_us_per_event"],
        "added ITL p99, ms": ours["itl_p99_ms"] - direct["itl_p99_ms"],
        "added first byte p50, ms": ours["first_byte_p50_ms"] - direct["first_byte_p50_ms"],
    }
    if "nginx" in table:
        found["CPU per event / nginx"] = ours["cpu_us_per_event"] / table["nginx"]["cpu_us_per_event"]
    return found


async def idle(folder: Path, engine: str, streams: int) -> dict[str, Any]:
    async with relay("llamaops", folder, engine) as (where, pid):
        assert pid is not None
        await clients(where, 8, 0.5, 1)
        base = rss_kib(pid)
        holding = asyncio.gather(*(listen(where, "seconds=60", Seen()) for _ in range(streams)))
        sockets = 0
        while sockets < 2 * streams:
            await asyncio.sleep(0.2)
            sockets = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        await asyncio.sleep(1)
        held = rss_kib(pid)
        holding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await holding
    return {"idle streams, MB over base": (held - base) * 1024 / 1e6}


async def volume(folder: Path, engine: str, mib: int) -> dict[str, Any]:
    async with relay("llamaops", folder, engine) as (where, pid):
        assert pid is not None
        await clients(where, 8, 0.5, 10)
        base, samples = rss_kib(pid), []
        pouring = asyncio.create_task(drain(where, mib))
        while not pouring.done():
            samples.append(rss_kib(pid))
            await asyncio.sleep(0.1)
        assert pouring.result() >= mib << 20, "bytes were lost"
        return {"one long stream, MB over base": (max(samples) - base) * 1024 / 1e6}


async def drain(where: str | int, mib: int) -> int:
    assert isinstance(where, int)
    reader, writer = await asyncio.open_connection("127.0.0.1", where)
    writer.write(b"POST /v1/chat/completions?volume=%d HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                 b"Content-Length: 15\r\n\r\n{\"stream\":true}" % mib)
    total = 0
    while data := await reader.read(1 << 20):
        total += len(data)
    writer.close()
    return total


def show(result: dict[str, Any]) -> None:
    columns = list(next(iter(result["median"].values())))
    print(f"{'':10}" + "".join(f"{c:>19}" for c in columns))
    for name, row in result["median"].items():
        print(f"{name:10}" + "".join(f"{row[c]:19.2f}" for c in columns))
    print()
    for name, value in result["found"].items():
        print(f"{name:36} {value:7.2f}   {'holds' if value <= AIMS[name] else 'MISSES'} {AIMS[name]:g}")


async def main(args: argparse.Namespace) -> None:
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "date": date.today().isoformat(), "streams": args.streams, "events_per_s": args.rate,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with engine_of(folder, args.rate) as engine:
            result |= await compare(folder, engine, args)
            if args.volume:
                result["found"] |= await volume(folder, engine, args.volume)
        if args.idle:
            async with engine_of(folder, 1 / 30) as engine:
                result["found"] |= await idle(folder, engine, args.idle)
    print(f"{result['machine']}, {result['date']}; {args.streams} streams of {args.rate:g} events/s\n")
    show(result)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(value > AIMS[name] for name, value in result["found"].items()))


@contextlib.asynccontextmanager
async def engine_of(folder: Path, rate: float) -> AsyncIterator[str]:
    engine = str(folder / "engine.sock")
    Path(engine).unlink(missing_ok=True)
    with role("stub", engine, rate):
        await reachable(engine)
        yield engine


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=50, help="events a second of each stream")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=int, default=1000, metavar="STREAMS")
    parser.add_argument("--volume", type=int, default=1024, metavar="MIB")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    match arguments.role:
        case None:
            uvloop.run(main(arguments))
        case ["stub", path, rate]:
            uvloop.run(stub(path, float(rate)))
        case ["llamaops", path, port]:
            uvloop.run(llamaops(path, int(port)))
        case ["starlette", path, port]:
            uvloop.run(starlette(path, int(port)))
