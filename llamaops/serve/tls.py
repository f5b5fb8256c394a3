"""https by certificate and key files; a renewed pair is taken over without closing the listening socket."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from llamaops.errors import NotPermitted, WrongProfile

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamaops.core.profile import TlsFiles

_PEM_END = "-----END CERTIFICATE-----"
_MEND = "point serve.tls.{key} at a PEM file of the {thing}"
_THINGS = {"cert": "certificate (with those between it and its root)", "key": "certificate's private key"}


def load_tls(files: TlsFiles | None) -> ssl.SSLContext | None:
    """Return the TLS context of a profile's certificate and key, None where it names none.

    TLS 1.2 or later, HTTP/1.1. Raises WrongProfile for a file that is missing, no PEM or not the other's, and
    NotPermitted for one that this user may not read; both name the file and never show what is in it.
    """
    if files is None:
        return None
    _check(files.cert, "cert")
    _check(files.key, "key")
    context = _context()
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: _refuse_passphrase(files.key))
    except ssl.SSLError as exc:
        raise _unfit(files, exc) from exc
    return context


def switching(current: Callable[[], ssl.SSLContext | None]) -> ssl.SSLContext:
    """Return a context that begins every connection with the certificate that ``current`` returns just then."""
    context = _context()

    def choose(connection: ssl.SSLObject, name: str | None, begun: ssl.SSLContext) -> None:
        if (chosen := current()) is not None:
            connection.context = chosen

    context.sni_callback = choose  # called for every handshake, also for one that names no server
    return context


def trusting(certificate: str) -> ssl.SSLContext:
    """Return a client's context that trusts the first certificate of this file alone, whatever name it bears."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # an instance of our own, asked at its address: the certificate is for other names
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    text = Path(certificate).read_text(encoding="ascii", errors="ignore")
    context.load_verify_locations(cadata=text[: text.find(_PEM_END) + len(_PEM_END)])
    return context


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _check(path: str, key: str) -> None:
    """OpenSSL does not tell which of its two files it could not read."""
    mend = _MEND.format(key=key, thing=_THINGS[key])
    try:
        Path(path).read_bytes()
    except PermissionError as exc:
        raise NotPermitted("a TLS file can't be read", where=path, why=exc.strerror,
                           fix=f"let the account that serves read it: it is serve.tls.{key}") from exc
    except OSError as exc:
        raise WrongProfile("a TLS file can't be read", where=path, why=exc.strerror, fix=mend) from exc


def _refuse_passphrase(path: str) -> str:
    raise WrongProfile("the TLS key is encrypted", where=path, why="nobody is there to type a passphrase at a restart",
                       fix=f"openssl pkey -in {path} -out plain.pem, mode 0600, and name that one in serve.tls.key")


def _unfit(files: TlsFiles, exc: ssl.SSLError) -> WrongProfile:
    if exc.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
        return WrongProfile("the TLS key is another certificate's", where=files.key,
                            why=f"it does not fit {files.cert}", fix="name a certificate and the key it was made with")
    bad = "key" if _is_certificate(files.cert) else "cert"
    return WrongProfile("a TLS file is not what it should be", where=getattr(files, bad),
                        why=(exc.reason or str(exc)).lower().replace("_", " "),
                        fix=_MEND.format(key=bad, thing=_THINGS[bad]))


def _is_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        return False
    return True
