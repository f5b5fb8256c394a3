"""Files that travel with llamaops: templates/, vendor/, examples/."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """Return the path of a shipped file or folder such as ``templates/systemd``: in the wheel, else in the checkout."""
    packaged = _PACKAGE / "data" / name
    return packaged if packaged.exists() else _PACKAGE.parent / name
