"""Certificates for tests, made by the openssl program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pair:
    """A self-made certificate for 127.0.0.1 and its key, as files."""

    cert: Path
    key: Path


def make_pair(folder: Path, name: str = "localhost", *, passphrase: str | None = None) -> Pair:
    """Make a pair in ``folder`` whose subject is ``name``; the key is encrypted where a passphrase is given."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    locked = ["-passout", f"pass:{passphrase}"] if passphrase else ["-noenc"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *locked, "-days", "30",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(pair.key),
         "-out", str(pair.cert)], check=True, capture_output=True)
    pair.key.chmod(0o600)
    return pair
