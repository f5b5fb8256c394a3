"""A listening socket from the service manager, sd_listen_fds(3): it is open before us and while we restart."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from llamaops.core.profile import ServeSection
from llamaops.core.profile_types import is_loopback
from llamaops.errors import WrongProfile

FIRST_FD = 3


def passed_socket(section: ServeSection, environ: Mapping[str, str]) -> socket.socket | None:
    """Return the socket that was passed to this very process, None when there is none.

    It takes the place of ``serve.host`` and ``serve.port``, but not of the rule that strangers need a key. Raises
    WrongProfile for several sockets, for another kind, and for one beyond loopback without keys.
    """
    if environ.get("LISTEN_PID") != str(os.getpid()):
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


def _wrong(why: str) -> WrongProfile:
    return WrongProfile("can't serve what the service manager passed", where="LISTEN_FDS", why=why,
                        fix="one ListenStream=ADDRESS:PORT in the socket unit")
