"""The header of a GGUF file: keys, tensor shapes, and whether the file is whole. No tensor data is looked at.

Layout: ggml/docs/gguf.md of llama.cpp, versions 2 and 3, little-endian. Every count is bounded by the bytes that are
there, so a hostile header costs no more time or memory than an honest one of its size. docs/adr/0005 tells why this
does not go through ``gguf.GGUFReader``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from llamaops.core.ggml_types import FILE_TYPES, TENSOR_TYPES
from llamaops.core.model import Model

if TYPE_CHECKING:
    from mmap import mmap

Scalar = int | float | bool | str
Fields = dict[str, Scalar | tuple[int | float | bool, ...]]
MAX_STRING = 64 << 20
"""Longest key or text accepted; chat templates and grammars stay below 1 MiB."""
MAX_ELEMENTS = 16 << 20
"""Most strings in one array; the largest vocabularies have about 300 000."""
KEPT_ELEMENTS = 4096
"""Numeric arrays up to this long are kept (per-layer head counts); longer ones (token types) are stepped over."""


class HeaderError(ValueError):
    """The bytes are not a whole GGUF file; the text says what they are or what is wrong."""


class MoreNeededError(Exception):
    """What is here of the file is all right and ends inside the header: ask again with at least ``bytes`` of it."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"the header has at least {needed} bytes")
        self.bytes = needed


class Tensor(NamedTuple):
    """One tensor as the header announces it; the bytes of a type unknown here count as 0."""

    name: str
    type: str
    dimensions: int
    elements: int
    bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the header states. ``strings`` has the lengths of string arrays, ``bytes_by_type`` the tensor data's sum."""

    version: int
    fields: Fields
    strings: Mapping[str, int]
    tensors: tuple[Tensor, ...]
    parameters: int
    bytes_by_type: Mapping[str, int]


_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


def parse_header(data: bytes | mmap, size: int | None = None) -> Header:
    """Read the header and check that the tensor data it announces is there. Raises HeaderError.

    ``size`` is the file's where ``data`` is only its begin; then MoreNeededError may be raised too.
    """
    at = _Cursor(data, len(data) if size is None else size)
    version = _check_magic(at)
    tensor_count, key_count = at.count(24, "tensors"), at.count(13, "keys")
    fields: Fields = {}
    strings: dict[str, int] = {}
    for _ in range(key_count):
        _read_field(at, fields, strings)
    tensors = tuple(_read_tensor(at) for _ in range(tensor_count))
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.bytes
    _check_whole(at, fields, tensors)
    return Header(version, fields, strings, tensors, sum(tensor.elements for tensor in tensors), sizes)


def describe_foreign(start: bytes) -> str | None:
    """Name the format of a file that is no GGUF from its first bytes (512 are enough); None when unknown."""
    for magic, name in _FOREIGN:
        if start.startswith(magic):
            return name
    if start[8:10] == b'{"' and struct.unpack_from("<Q", start)[0] < 1 << 32:
        return "a safetensors file"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "a web page (a sign-in or error page was saved instead of the file)"
    return "JSON text" if text.startswith((b"{", b"[")) else None


_FOREIGN = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself (run: git lfs pull)"),
    (b"PK\x03\x04", "a zip archive or PyTorch checkpoint"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x80\x02", "a Python pickle (PyTorch checkpoint)"),
    (b"\x89HDF", "an HDF5 file"),
    (b"tjgg", "a GGJT file from before GGUF"),
    (b"lmgg", "a GGML file from before GGUF"),
    (b"fmgg", "a GGMF file from before GGUF"),
    (b"algg", "a GGLA adapter from before GGUF"),
)


class _Cursor:
    """A reading position; every read is checked against what is left of the file, and against what of it is here."""

    def __init__(self, data: bytes | mmap, size: int) -> None:
        self.data, self.size, self.pos = data, size, 0

    def take(self, length: int, what: str) -> int:
        """Step over ``length`` bytes and return where they began."""
        begin = self.pos
        if length < 0 or length > self.size - begin:
            raise HeaderError(f"truncated: the file ends inside {what} (at byte {begin})")
        self.pos = begin + length
        if self.pos > len(self.data):
            raise MoreNeededError(self.pos)
        return begin

    def number(self, form: str, what: str) -> int:
        begin = self.take(struct.calcsize(form), what)
        value: int = struct.unpack_from(form, self.data, begin)[0]
        return value

    def count(self, least: int, what: str) -> int:
        """Read a 64-bit count of things that take at least ``least`` bytes each."""
        value = self.number("<Q", f"the number of {what}")
        if value * least > self.size - self.pos:
            raise HeaderError(f"broken or truncated: {value} {what} are announced, more than the file can hold")
        return value

    def text(self, what: str) -> str:
        length = self.count(1, f"bytes of {what}")
        if length > MAX_STRING:
            raise HeaderError(f"broken: {what} is {length} bytes long")
        begin = self.take(length, what)
        return self.data[begin : begin + length].decode("utf-8", "replace")


def _check_magic(at: _Cursor) -> int:
    start = at.data[0:512]
    if start[:4] != b"GGUF":
        if not start:
            raise HeaderError("the file is empty")
        raise HeaderError(f"not a GGUF: {describe_foreign(start) or 'no known model format'}")
    at.pos = 4
    version = at.number("<I", "the version")
    if version & 0xFFFF == 0 and version:
        raise HeaderError("a big-endian GGUF; this engine reads little-endian ones")
    if version < 2:
        raise HeaderError(f"GGUF version {version}, which llama.cpp no longer reads; get a newer file of the model")
    if version > 3:
        raise HeaderError(f"GGUF version {version}, newer than this llamaops reads (3)")
    return version


def _read_field(at: _Cursor, fields: Fields, strings: dict[str, int]) -> None:
    key = at.text("a key")
    what = f"the value of {key[:80]}"
    kind = at.number("<I", what)
    if kind == _STRING:
        fields[key] = at.text(what)
    elif kind == _ARRAY:
        _read_array(at, key, what, fields, strings)
    else:
        fields[key] = at.number(_scalar(kind, what), what)


def _scalar(kind: int, what: str) -> str:
    form = _SCALARS.get(kind)
    if form is None:
        raise HeaderError(f"broken: {what} has the unknown type {kind}")
    return form


def _read_array(at: _Cursor, key: str, what: str, fields: Fields, strings: dict[str, int]) -> None:
    kind = at.number("<I", what)
    if kind == _STRING:
        strings[key] = _skip_strings(at, what)
        return
    form = _scalar(kind, what)
    width = struct.calcsize(form)
    count = at.count(width, f"elements of {what}")
    begin = at.take(count * width, what)
    if count <= KEPT_ELEMENTS:
        fields[key] = struct.unpack_from(f"<{count}{form[1]}", at.data, begin)


def _skip_strings(at: _Cursor, what: str) -> int:
    count = at.count(8, f"elements of {what}")
    if count > MAX_ELEMENTS:
        raise HeaderError(f"broken: {what} has {count} strings")
    # The hot loop of the reader: a vocabulary and its merges are some 300 000 strings.
    pos, size, data, read = at.pos, at.size, at.data, struct.Struct("<Q").unpack_from
    here = len(data)
    for _ in range(count):
        if pos + 8 > here:
            break
        pos += 8 + read(data, pos)[0]
    else:
        if pos <= size:
            at.pos = pos
            return count
    if here < pos + 8 <= size:
        raise MoreNeededError(pos + 8)
    raise HeaderError(f"truncated: the file ends inside {what}")


def _read_tensor(at: _Cursor) -> Tensor:
    name = at.text("a tensor name")[:80]
    dimensions = at.number("<I", f"tensor {name}")
    if not 1 <= dimensions <= 4:
        raise HeaderError(f"broken: tensor {name} has {dimensions} dimensions")
    elements = 1
    for _ in range(dimensions):
        elements *= at.number("<Q", f"tensor {name}")
    if elements >= 1 << 63:
        raise HeaderError(f"broken: tensor {name} has {elements} elements")
    kind = at.number("<I", f"tensor {name}")
    offset = at.number("<Q", f"tensor {name}")
    type_name, block, width = TENSOR_TYPES.get(kind, (f"type {kind}", 1, 0))
    return Tensor(name, type_name, dimensions, elements, elements // block * width, offset)


def _check_whole(at: _Cursor, fields: Fields, tensors: Sequence[Tensor]) -> None:
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise HeaderError(f"broken: general.alignment is {alignment}")
    need = -(-at.pos // alignment) * alignment + max((tensor.offset + tensor.bytes for tensor in tensors), default=0)
    if tensors and need > at.size:
        raise HeaderError(f"truncated: {at.size} bytes are here, its tensors need {need}")


def to_model(header: Header, path: str, size_bytes: int, source: str | None, sha256: str | None) -> Model:
    """State the header's facts as a Model. Raises HeaderError when it names no architecture."""
    fields = header.fields
    arch = fields.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        raise HeaderError("the header has no general.architecture")

    def number(key: str) -> int | None:
        return _largest(fields.get(f"{arch}.{key}"))

    embedding, heads = number("embedding_length"), number("attention.head_count")
    head_dim = embedding // heads if embedding and heads else None
    name, template = fields.get("general.name"), fields.get("tokenizer.chat_template")
    return Model(
        path=path,
        size_bytes=size_bytes,
        architecture=arch,
        name=name if isinstance(name, str) else None,
        quant=quant_of(header),
        parameters=header.parameters or None,
        layers=number("block_count"),
        embedding=embedding,
        heads=heads,
        kv_heads=number("attention.head_count_kv") or heads,
        head_dim_k=number("attention.key_length") or head_dim,
        head_dim_v=number("attention.value_length") or head_dim,
        feed_forward=number("feed_forward_length"),
        vocab=number("vocab_size") or header.strings.get("tokenizer.ggml.tokens"),
        context_train=number("context_length"),
        sliding_window=number("attention.sliding_window"),
        pooling=number("pooling_type"),
        has_chat_template=isinstance(template, str) and bool(template.strip()),
        source=source,
        sha256=sha256,
    )


def quant_of(header: Header) -> str | None:
    """Spell the quant type: from general.file_type, else the tensor type that most of the data has."""
    stated = header.fields.get("general.file_type")
    if isinstance(stated, int) and stated in FILE_TYPES:
        return FILE_TYPES[stated]
    sizes = header.bytes_by_type
    return max(sizes, key=lambda kind: sizes[kind]) if sizes else None


def _largest(value: Scalar | Sequence[int | float | bool] | None) -> int | None:
    """Return an integer key; of a per-layer array the largest element."""
    if isinstance(value, tuple):
        return max((int(v) for v in value if v == v and abs(v) < 1 << 63), default=None)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None
