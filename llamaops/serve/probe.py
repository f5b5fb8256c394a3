"""Ask an engine over its private address whether it serves, and make sure that it is ours that answers."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from pathlib import Path

from llamaops.core.launch import LaunchSpec

_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


async def is_serving(spec: LaunchSpec, pid: int) -> bool:
    """Tell whether the process ``pid`` itself answers /health with 200 on the address of ``spec``."""
    try:
        return await _request(spec, pid, "GET", "/health", None) == 200
    except (OSError, ValueError, EOFError):
        return False


async def warm_up(spec: LaunchSpec, pid: int) -> None:
    """Let the engine compute one token, so that the first client does not pay for first-use work.

    A model that can't generate (embeddings) is warmed up with an embedding; a refusal is not a failure.
    """
    once = {"prompt": "a", "n_predict": 1, "cache_prompt": False}
    if await _request(spec, pid, "POST", "/completion", once) >= 400:
        await _request(spec, pid, "POST", "/embeddings", {"input": "a"})


async def _request(spec: LaunchSpec, pid: int, method: str, path: str, document: object) -> int:
    """Return the status of one request. Raises OSError, EOFError or ValueError when no answer of ``pid`` comes."""
    if spec.socket:
        reader, writer = await asyncio.open_unix_connection(spec.socket)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", spec.port)
    try:
        if not _answers(spec, pid, writer.get_extra_info("socket")):
            raise ConnectionError("somebody else listens there")
        body = b"" if document is None else json.dumps(document).encode()
        head = (f"{method} {path} HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n")
        writer.write(head.encode() + body)
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        await reader.read()
        return status
    finally:
        writer.close()


def _answers(spec: LaunchSpec, pid: int, sock: socket.socket) -> bool:
    """Tell whether the other end of ``sock`` is a socket of the process ``pid``."""
    if spec.socket:
        # unix(7): on a connection the credentials are those of the process that called listen().
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return bool(struct.unpack("3i", credentials)[0] == pid)
    return spec.port is not None and listens_on(pid, spec.port)


def listens_on(pid: int, port: int) -> bool:
    """Tell whether the process holds the IPv4 TCP socket that listens on ``port``."""
    return bool(_listening_inodes(port) & _socket_inodes(pid))


def _listening_inodes(port: int) -> set[str]:
    try:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    except OSError:
        return set()
    return {row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port}


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = str(entry.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:  # a descriptor closed meanwhile, or not permitted to look
        pass
    return inodes
