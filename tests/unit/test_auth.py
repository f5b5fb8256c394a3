"""Key files, presented keys, and that no key ever shows."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from llamaops.core.profile import ApiKeys
from llamaops.errors import WrongProfile
from llamaops.serve.auth import KeyRing, load_keys, presented_key
from llamaops.serve.quota import KeyLimits

HASH = hashlib.sha256(b"pepper" + b"s3cret").hexdigest()


def test_plain_and_hashed_keys_open() -> None:
    ring = KeyRing.parse(f"# keys\n\nalice:k:with:colons\n  bob : sha256$pepper${HASH}\n", "keys.txt")
    assert ring.names == ("alice", "bob")
    assert ring.match(b"k:with:colons") == "alice"
    assert ring.match(b"s3cret") == "bob"
    for wrong in (b"", b"k", b"S3cret", HASH.encode(), f"sha256$pepper${HASH}".encode(), b"\xff"):
        assert ring.match(wrong) is None


def test_a_key_may_have_limits() -> None:
    ring = KeyRing.parse("a:k1 concurrency=2 tokens_per_minute=6000\nb:k2", "keys.txt")
    assert ring.limits("a") == KeyLimits(2, 6000)
    assert ring.limits("b") == ring.limits("nobody") == KeyLimits()
    assert ring.match(b"k1") == "a"


def test_nothing_shows_a_key() -> None:
    ring = KeyRing.parse("alice:topsecret\n", "keys.txt")
    assert "topsecret" not in repr(ring) + str(ring) + repr(ring._keys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topsecret", "line 1"),
        ("a:x\n:topsecret", "line 2"),
        ("a:top secret", "line 1"),
        ("a:topsecret concurrency=0", "line 1"),
        ("a:topsecret concurrency=x", "line 1"),
        ("a:", "line 1"),
        ("b b:topsecret", "line 1"),
        ("a:sha256$s$abc", "sha256$salt$hex"),
        ("a:topsecret\na:y", "twice"),
        ("# nothing\n", "no API key"),
    ],
)
def test_a_bad_file_names_the_line_and_not_its_text(text: str, words: str) -> None:
    with pytest.raises(WrongProfile) as caught:
        KeyRing.parse(text, "keys.txt")
    assert words in str(caught.value)
    assert "topsecret" not in str(caught.value)
    assert "keys.txt" in str(caught.value)


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("a:x\n")
    for source, environ in ((ApiKeys(file=str(path)), {}), (ApiKeys(env="KEYS"), {"KEYS": "a:x"})):
        ring = load_keys(source, environ)
        assert ring is not None
        assert ring.match(b"x") == "a"
    assert load_keys(None, {}) is None


@pytest.mark.parametrize("source", [ApiKeys(file="/nonexistent/keys"), ApiKeys(env="KEYS")])
def test_missing_keys_are_an_error_and_not_an_open_door(source: ApiKeys) -> None:
    with pytest.raises(WrongProfile):
        load_keys(source, {})


def test_keys_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_bytes(b"a:\xff\n")
    with pytest.raises(WrongProfile, match="UTF-8"):
        load_keys(ApiKeys(file=str(path)), {})


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"authorization", b"Bearer k")], b"k"),
        ([(b"authorization", b"bearer  k ")], b"k"),
        ([(b"authorization", b"Basic k")], None),
        ([(b"x-api-key", b"k")], b"k"),
        ([(b"x-api-key", b"a"), (b"authorization", b"Bearer b")], b"b"),
        ([], None),
    ],
)
def test_presented_key(headers: list[tuple[bytes, bytes]], key: bytes | None) -> None:
    assert presented_key(headers) == key
