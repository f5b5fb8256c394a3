"""The types of profile values: how each is written, and what it becomes."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError

from llamaops.core.cpuset import MAX_CPUS, CpuSet
from llamaops.core.quantizing import check_tensor_type
from llamaops.core.reserved import reserved_flag, reserved_variable
from llamaops.core.source import QUANT, parse_source

MIB = 1 << 20
MIN_LIMIT = 16 * MIB
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1) for suffix, base in (("", 1024), ("IB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"(?P<number>[0-9]{1,15}(\.[0-9]{1,9})?)\s*(?P<unit>[A-Za-z]*)")
_SIZE_SCHEMA = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?([KMGTkmgt]([iI]?[bB])?|[bB])?$"}


def complaint(want: str, why: str = "", *, key: str = "") -> PydanticCustomError:
    """Make the error of a value that is not ``want`` ("a CPU list such as 2-3"), with the reason if there is one.

    ``key`` names the sibling key that is to blame where it is not the one under validation.
    """
    return PydanticCustomError("complaint", "{why}", {"want": want, "why": why, "key": key})


def parse_size(text: str) -> int:
    """Return the bytes of ``512MiB``, ``1.5GiB``, ``512MB`` or ``512``; ``512M`` is 512MiB. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found["unit"].upper()) if found else None
    if not found or unit is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB")
    return int(Decimal(found["number"]) * unit)


def _cpu_list(value: Any) -> Any:
    want = "a CPU list such as 2-3,6"
    if isinstance(value, CpuSet):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise complaint(want)
    try:
        cpus = CpuSet.parse(value)
    except ValueError as exc:
        raise complaint(want, str(exc)) from None
    if not cpus:
        raise complaint(want)
    return cpus


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise complaint("a number")
    return value


_SIZE_WANTED = "a size such as 2GiB"


def _bytes(value: Any) -> Any:
    size = _size(value, _SIZE_WANTED, parse_size)
    if isinstance(size, (int, float)) and size < MIN_LIMIT:
        raise complaint(_SIZE_WANTED, "the least is 16MiB")
    return size


def _mib(value: Any) -> Any:
    def read(text: str) -> float:
        return float(text) if text.strip().isdigit() else parse_size(text) / MIB

    return _size(value, "a number of MiB or a size such as 256MiB", read)


def _whole_mib(value: Any) -> Any:
    mib = _mib(value)
    return math.ceil(mib) if isinstance(mib, float) and math.isfinite(mib) else mib


def _size(value: Any, want: str, read: Callable[[str], float]) -> Any:
    if isinstance(value, bool):
        raise complaint(want)
    if not isinstance(value, str):
        return value
    try:
        return read(value)
    except ValueError:
        raise complaint(want) from None


def _words(value: Any) -> Any:
    """Numbers and booleans among command-line words and variables are text there: ``[--temp, 0.7]``."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else value


CpuList = Annotated[
    CpuSet,
    BeforeValidator(_cpu_list),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": ["string", "integer"], "pattern": r"^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$"}),
]
NotBool = BeforeValidator(_number)
"""Python's booleans are integers; a profile's are not. It follows the bounds, so that the JSON Schema keeps them."""
Whole = Annotated[int, NotBool]
Threads = Annotated[int, Field(ge=1, le=MAX_CPUS), NotBool]
Number = Annotated[float, NotBool]
Word = Annotated[str, BeforeValidator(_words)]
Bytes = Annotated[
    int,
    BeforeValidator(_bytes),
    Field(le=1 << 50),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": MIN_LIMIT}, _SIZE_SCHEMA]}),
]
_MIB_SCHEMA = WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, _SIZE_SCHEMA]})
Mebibytes = Annotated[float, BeforeValidator(_mib), _MIB_SCHEMA]
WholeMebibytes = Annotated[int, BeforeValidator(_whole_mib), _MIB_SCHEMA]


def _matches(pattern: str, want: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise complaint(want)
        return value

    return AfterValidator(check)


def _source(value: str) -> str:
    parse_source(value)
    return value.strip()


def _quant(value: str) -> str:
    if not QUANT.fullmatch(value.upper()):
        raise complaint("a quant type such as Q4_K_M, or null")
    return value.upper()


def _printable(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise complaint("a name without control characters")
    return value


def _engine_args(value: tuple[str, ...]) -> tuple[str, ...]:
    if reserved := [found for found in map(reserved_flag, value) if found]:
        raise ValueError("; ".join(f"{flag} can't be given here: {hint}" for flag, hint in reserved))
    if any("\0" in arg for arg in value):
        raise ValueError("an argument can't hold a zero byte")
    return value


def _engine_env(value: dict[str, str]) -> dict[str, str]:
    if reserved := [found for found in map(reserved_variable, value) if found]:
        raise ValueError("; ".join(f"{name} can't be set here: {hint}" for name, hint in reserved))
    if not all(re.fullmatch(_VARIABLE, name) and "\0" not in text for name, text in value.items()):
        raise ValueError("a variable has a name of letters, digits and _, and no zero byte in its value")
    return value


def _cmake(value: dict[str, str | bool | int]) -> dict[str, str | bool | int]:
    if not all(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", key) and "\0" not in str(text) for key, text in value.items()):
        raise complaint("CMake cache entries such as GGML_NATIVE: ON")
    return value


def _tensor_types(value: dict[str, str]) -> dict[str, str]:
    return dict(check_tensor_type(pattern, kind) for pattern, kind in value.items())


def _address(value: str) -> str:
    if not _is_ip(value) and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252})", value):
        raise complaint("an IP address or host name (all interfaces: 0.0.0.0 or ::)")
    return value


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches ``host`` (127.0.0.0/8, ::1 or the name localhost)."""
    return host.lower() == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
SourceText = Annotated[str, AfterValidator(_source)]
Sha256 = Annotated[str, _matches(r"[0-9a-fA-F]{64}", "64 hexadecimal digits"), AfterValidator(str.lower)]
QuantName = Annotated[str, AfterValidator(_quant)]
Alias = Annotated[str, AfterValidator(_printable)]
TensorTypes = Annotated[dict[str, str], AfterValidator(_tensor_types)]
CMakeEntries = Annotated[dict[str, str | bool | int], AfterValidator(_cmake)]
EngineArgs = Annotated[tuple[Word, ...], AfterValidator(_engine_args)]
EngineEnv = Annotated[dict[str, Word], AfterValidator(_engine_env)]
VariableName = Annotated[str, _matches(_VARIABLE, "the name of an environment variable")]
Address = Annotated[str, AfterValidator(_address)]
Origin = Annotated[
    str, _matches(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", "an origin of the form https://host[:port] without a path, or *")]
