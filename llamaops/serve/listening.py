"""The relay's listening socket: the service manager's, open before us and while we restart, or our own."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping

from llamaops.core.profile import ServeSection
from llamaops.core.profile_types import is_loopback
from llamaops.errors import LlamaopsError, PortTaken, WrongProfile

FIRST_FD = 3


def listen(section: ServeSection) -> socket.socket:
    """Take the relay's address before the long work begins; connections are refused until the service runs.

    A socket that the service manager passed is taken instead. Port 0 takes any free port. Raises PortTaken, naming who
    holds the port where that can be told.
    """
    if passed := passed_socket(section, os.environ):
        return passed
    sock = socket.socket(socket.AF_INET6 if ":" in section.host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((section.host, section.port))
    except OSError as exc:
        sock.close()
        raise _cannot_listen(section, exc) from exc
    return sock


def _cannot_listen(section: ServeSection, exc: OSError) -> LlamaopsError:
    where = f"{section.host}:{section.port}"
    if exc.errno == errno.EADDRINUSE:
        return PortTaken(f"port {section.port} is taken", where=where, why=_holder(section.port),
                         fix="stop it, or choose another: --set serve.port=8081")
    if exc.errno == errno.EACCES:
        return WrongProfile(f"port {section.port} is for root only", where="serve.port", why=os.strerror(exc.errno),
                            fix="choose a port of 1024 or more: --set serve.port=8080")
    return WrongProfile("can't listen on that address", where="serve.host", why=f"{where}: {exc.strerror or exc}",
                        fix="give an address of this machine, such as 127.0.0.1")


def _holder(port: int) -> str:
    """Say which process listens on a port, as far as this user may know."""
    import psutil

    try:
        found = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr and c.laddr[1] == port]
        pid = next((c.pid for c in found if c.pid), None)
        return f"pid {pid} ({psutil.Process(pid).name()}) listens there" if pid else "another user listens there"
    except psutil.Error:
        return "another process listens there"


def passed_socket(section: ServeSection, environ: Mapping[str, str]) -> socket.socket | None:
    """Return the socket that was passed to this very process (sd_listen_fds(3)), None when there is none.

    It takes the place of ``serve.host`` and ``serve.port``, but not of the rule that strangers need a key. Raises
    WrongProfile for several sockets, for another kind, and for one beyond loopback without keys.
    """
    if not was_passed(environ):
        return None
    if environ.get("LISTEN_FDS") != "1":
        raise _wrong(f"{environ.get('LISTEN_FDS')} sockets were passed, and one is served")
    sock = socket.socket(fileno=FIRST_FD)
    sock.set_inheritable(False)
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        sock.close()
        raise _wrong("it is no TCP socket")
    host = str(sock.getsockname()[0])
    if not is_loopback(host) and section.api_keys is None and not section.allow_insecure:
        sock.close()
        raise WrongProfile("the socket unit opens this to strangers", where="serve.api_keys",
                           why=f"it listens on {host}, and the profile has no keys",
                           fix="set serve.api_keys, or ListenStream=127.0.0.1:PORT in the socket unit")
    return sock


def was_passed(environ: Mapping[str, str]) -> bool:
    """Tell whether whoever started this process passed it a socket: clients may wait in its queue already."""
    return environ.get("LISTEN_PID") == str(os.getpid())


def _wrong(why: str) -> WrongProfile:
    return WrongProfile("can't serve what the service manager passed", where="LISTEN_FDS", why=why,
                        fix="one ListenStream=ADDRESS:PORT in the socket unit")
