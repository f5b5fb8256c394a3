"""The names in an importance matrix: a GGUF of type ``imatrix``, or llama.cpp's older format (``.dat``, ``.imatrix``).

Formats: tools/imatrix and common/imatrix-loader.cpp of llama.cpp.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from llamaops.core.gguf_header import HeaderError, describe_foreign, parse_header

if TYPE_CHECKING:
    from mmap import mmap

_SUMS = ".in_sum2"
_LONGEST_NAME = 256


def entry_names(data: bytes | mmap) -> tuple[str, ...]:
    """Return the tensors that the matrix has values for. Raises HeaderError that says what the bytes are instead."""
    if data[0:4] != b"GGUF":
        return _names_of_older(data)
    header = parse_header(data)
    names = tuple(t.name.removesuffix(_SUMS) for t in header.tensors if t.name.endswith(_SUMS))
    if not names:
        what = header.fields.get("general.type") or header.fields.get("general.architecture") or "unknown"
        raise HeaderError(f"a GGUF, and no importance matrix (it is of type {what})")
    return names


def _names_of_older(data: bytes | mmap) -> tuple[str, ...]:
    foreign = describe_foreign(data[0:512])
    if foreign:
        raise HeaderError(f"not an importance matrix: {foreign}")
    try:
        (count,), at, names = struct.unpack_from("<i", data), 4, []
        for _ in range(count):
            name, at = _entry_of_older(data, at)
            names.append(name)
    except struct.error:
        raise HeaderError("neither a GGUF nor a whole importance matrix of the older format") from None
    if not names:
        raise HeaderError("not an importance matrix, or one without entries")
    return tuple(names)


def _entry_of_older(data: bytes | mmap, at: int) -> tuple[str, int]:
    """Return an entry's name and where the next begins: length, name, calls, number of values, values (float32)."""
    (length,) = struct.unpack_from("<i", data, at)
    if not 0 < length <= _LONGEST_NAME:
        raise HeaderError("not an importance matrix: no known format")
    name = data[at + 4 : at + 4 + length].decode("utf-8", "replace")
    if not name.isprintable():
        raise HeaderError("not an importance matrix: no known format")
    _calls, values = struct.unpack_from("<ii", data, at + 4 + length)
    at += 12 + length + 4 * values
    if values < 1 or at > len(data):
        raise HeaderError("truncated: the importance matrix ends inside an entry")
    return name, at
