"""Which requests look like those of a web page that may not call an instance without keys."""

from __future__ import annotations

import pytest

from llamaops.serve.cors import foreign_page

HERE = "127.0.0.1:8080"


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "localhost:80", "[::1]:8080", "box", "a.localhost:1",
                                  "", "127.0.0.1", "192.168.1.7:8080"])
def test_programs_and_our_own_page_may_ask(host: str) -> None:
    assert foreign_page([(b"host", host.encode())], ()) is None
    assert foreign_page([(b"host", host.encode()), (b"origin", f"http://{host}".encode())], ()) is None


@pytest.mark.parametrize("host", ["evil.com", "evil.com:8080", "127.0.0.1.evil.com:8080", "EVIL.COM.", "1.2.3.4.5"])
def test_a_name_that_was_bent_to_this_machine_is_refused(host: str) -> None:
    for origin in ([], [(b"origin", f"http://{host}".encode())]):
        assert foreign_page([(b"host", host.encode()), *origin], ()) == "Host is another machine's name"


@pytest.mark.parametrize("origin", ["http://evil.com", "https://evil.com:8080", "null", "http://127.0.0.1:8081",
                                    "http://localhost:8080"])
def test_another_page_is_refused_unless_it_is_allowed(origin: str) -> None:
    headers = [(b"host", HERE.encode()), (b"origin", origin.encode())]
    assert foreign_page(headers, ()) == "Origin is another page's"
    assert foreign_page(headers, (origin,)) is None
    assert foreign_page(headers, ("*",)) is None
