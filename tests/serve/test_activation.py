"""Sockets passed by a service manager, in processes that really inherit them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

CHILD = """
import os, sys
from llamaops.core.profile import ServeSection
from llamaops.errors import WrongProfile
from llamaops.serve.listening import listen
os.environ["LISTEN_PID"] = os.environ["WANTED_PID"] or str(os.getpid())
try:
    sock = listen(ServeSection.model_validate(eval(sys.argv[1])))
except WrongProfile as exc:
    print("refused:", exc.where, exc.why)
else:
    print(sock.fileno(), sock.getsockname()[1], sock.get_inheritable())
"""


def listen_in_child(sock: socket.socket, section: dict[str, object], *, fds: str = "1", pid: str = "") -> str:
    def take_the_first_place() -> None:
        os.dup2(sock.fileno(), 3)
        os.set_inheritable(3, True)

    env = {**os.environ, "LISTEN_FDS": fds, "WANTED_PID": pid}
    answer = subprocess.run([sys.executable, "-c", CHILD, repr(section)], env=env, capture_output=True, text=True,
                            close_fds=False, preexec_fn=take_the_first_place, timeout=120, check=True)
    return answer.stdout.strip()


def test_a_passed_socket_is_served_in_place_of_the_profiles_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert listen_in_child(sock, {"port": 1}) == f"3 {sock.getsockname()[1]} False"


def test_another_process_socket_is_not_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = listen_in_child(sock, {"port": 0}, pid="1").split()[1]
        assert port not in ("0", str(sock.getsockname()[1]))


def test_a_socket_for_everybody_needs_keys() -> None:
    with socket.create_server(("0.0.0.0", 0)) as sock:
        assert listen_in_child(sock, {}).startswith("refused: serve.api_keys it listens on 0.0.0.0")
        assert listen_in_child(sock, {"api_keys": {"file": "/k"}}).startswith("3 ")
        assert listen_in_child(sock, {"allow_insecure": True}).startswith("3 ")


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_other_kinds_and_numbers_are_refused(family: socket.AddressFamily) -> None:
    kind = socket.SOCK_STREAM if family == socket.AF_UNIX else socket.SOCK_DGRAM
    with socket.socket(family, kind) as sock:
        assert "no TCP socket" in listen_in_child(sock, {})
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert "2 sockets were passed" in listen_in_child(sock, {}, fds="2")
