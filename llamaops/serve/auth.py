"""API keys: named, plain or as salted hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llamaops.core.profile import ApiKeys
from llamaops.errors import NotPermitted, WrongProfile
from llamaops.serve.quota import KeyLimits

_HASHED = re.compile(r"sha256\$([^$:\s]*)\$([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")


_UNLIMITED = KeyLimits()


@dataclass(frozen=True, slots=True)
class _Key:
    name: str
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    limits: KeyLimits = _UNLIMITED


def _digest(salt: bytes, key: bytes) -> bytes:
    return hashlib.sha256(salt + key).digest()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys that open the relay. Neither its repr nor its errors hold a key."""

    _keys: tuple[_Key, ...] = field(repr=False)

    @classmethod
    def parse(cls, text: str, where: str) -> KeyRing:
        """Read one key a line: ``name:key`` or ``name:sha256$salt$hex`` (SHA-256 of salt then key); ``#`` comments.

        After the key may follow ``concurrency=N`` and ``tokens_per_minute=N``.

        Raises WrongProfile naming ``where`` and the line number, never the line.
        """
        keys: list[_Key] = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                keys.append(_parse_line(line.strip(), f"{where}, line {number}"))
        names = [key.name for key in keys]
        if doubled := next((name for name in names if names.count(name) > 1), None):
            raise WrongProfile("two API keys have one name", where=where, why=f"the name {doubled!r} appears twice",
                               fix="give each key a name of its own")
        if not keys:
            raise WrongProfile("there is no API key", where=where, why="it holds no line of the form name:key",
                               fix="write one key a line as name:key, or remove serve.api_keys")
        return cls(tuple(keys))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the keys, in the order of the file."""
        return tuple(key.name for key in self._keys)

    def limits(self, name: str) -> KeyLimits:
        """Return the limits of the key of that name."""
        return next((key.limits for key in self._keys if key.name == name), _UNLIMITED)

    def match(self, presented: bytes) -> str | None:
        """Return the name of the key that was presented, None for an unknown one; the time taken tells nothing."""
        name = None
        for key in self._keys:
            if hmac.compare_digest(_digest(key.salt, presented), key.digest):
                name = key.name
        return name


def _parse_line(line: str, where: str) -> _Key:
    name, colon, secret = line.partition(":")
    secret, *options = secret.split() or [""]
    name, limits = name.strip(), _limits(options, where)
    if not colon or not _NAME.fullmatch(name):
        raise WrongProfile("an API key has no proper name", where=where, why="the form is name:key",
                           fix="start the line with a name of letters, digits and ._@- and a colon")
    if not secret:
        raise WrongProfile("an API key is empty", where=where, why="the form is name:key",
                           fix="write the key after the colon")
    if hashed := _HASHED.fullmatch(secret):
        return _Key(name, hashed[1].encode(), bytes.fromhex(hashed[2]), limits)
    if secret.startswith("sha256$"):
        raise WrongProfile("a hashed API key can't be read", where=where, why="the form is name:sha256$salt$hex",
                           fix="hex is the SHA-256 of salt followed by key: 64 digits in lower case")
    return _Key(name, b"", _digest(b"", secret.encode()), limits)


def _limits(options: list[str], where: str) -> KeyLimits:
    values: dict[str, int] = {}
    for option in options:
        word, _, number = option.partition("=")
        if word not in ("concurrency", "tokens_per_minute") or not number.isdecimal() or not int(number):
            raise WrongProfile("what follows an API key can't be read", where=where,
                               why="a key holds no space, and after it may stand concurrency=N and tokens_per_minute=N",
                               fix="write the key without spaces, and its limits as whole numbers above 0")
        values[word] = int(number)
    return KeyLimits(**values)


def load_keys(source: ApiKeys | None, environ: Mapping[str, str]) -> KeyRing | None:
    """Read the keys a profile names, from its file or its environment variable; None where it names none.

    Raises WrongProfile or NotPermitted.
    """
    if source is None or (source.file is None and source.env is None):
        return None
    if source.file is not None:
        return KeyRing.parse(_read(Path(source.file)), source.file)
    variable = source.env or ""
    if variable not in environ:
        raise WrongProfile("the API keys are missing", where="serve.api_keys.env", why=f"${variable} is not set",
                           fix=f"export {variable}='name:key'")
    return KeyRing.parse(environ[variable], f"${variable}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except PermissionError as exc:
        raise NotPermitted("the API keys can't be read", where=str(path), why=exc.strerror,
                           fix=f"make it readable for this user only: chmod 600 {path}") from exc
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise WrongProfile("the API keys can't be read", where=str(path), why=why,
                           fix="point serve.api_keys.file at a text file of name:key lines") from exc


def presented_key(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key a request carries as ``Authorization: Bearer`` or ``X-Api-Key``, None without one."""
    api_key = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            api_key = value.strip()
    return api_key
