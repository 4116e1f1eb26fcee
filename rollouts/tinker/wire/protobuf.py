"""The wire format of Protocol Buffers, as far as the client uses it: fields of a message out of bytes, and bytes of fields.

Source: https://protobuf.dev/programming-guides/encoding. Groups, and numbers of 32 bits, are in no message of the client.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeAlias

from rollouts.errors import DataError

Value: TypeAlias = "int | float | memoryview"
"""int = a varint, float = a double, memoryview = text, bytes, packed numbers or a message."""

_VARINT, _DOUBLE, _BYTES = 0, 1, 2


def read_fields(data: memoryview) -> Iterator[tuple[int, Value]]:
    """Return the fields of a message, in order: (number, value). Raises DataError for what is none."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise DataError(f"the message has the field 0 at byte {at}, which no message has")
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield number, value
        elif kind == _DOUBLE:
            yield number, struct.unpack("<d", _take(data, at, 8))[0]
            at += 8
        elif kind == _BYTES:
            size, at = _read_varint(data, at)
            yield number, _take(data, at, size)
            at += size
        else:
            raise DataError(f"field {number} of the message has the wire type {kind}, expected a varint, a double or bytes")


def read_varints(data: memoryview) -> tuple[int, ...]:
    """Return packed varints. Raises DataError."""
    found: list[int] = []
    at = 0
    while at < len(data):
        value, at = _read_varint(data, at)
        found.append(value)
    return tuple(found)


def write_bytes(number: int, value: bytes) -> bytes:
    """Return a field of bytes, a text or a message."""
    return _write_varint(number << 3 | _BYTES) + _write_varint(len(value)) + value


def write_int(number: int, value: int) -> bytes:
    """Return a field of an integer, at least 0."""
    return _write_varint(number << 3 | _VARINT) + _write_varint(value)


def write_double(number: int, value: float) -> bytes:
    """Return a field of a double."""
    return _write_varint(number << 3 | _DOUBLE) + struct.pack("<d", value)


def _take(data: memoryview, at: int, size: int) -> memoryview:
    if at + size > len(data):
        raise DataError(f"the message ends at byte {len(data)}, but its field at byte {at} has {size} bytes")
    return data[at : at + size]


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at a place, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise DataError(f"the message ends at byte {len(data)} in the midst of a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), at
    raise DataError(f"the number before byte {at} of the message has more than 64 bits")


def _write_varint(value: int) -> bytes:
    assert value >= 0, f"value is {value}, expected at least 0"
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
