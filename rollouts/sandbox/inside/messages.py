"""Messages on the pipes of a sandbox: JSON behind its length. Standard library only."""

from __future__ import annotations

import json
import os
from typing import Any

LENGTH_BYTES = 8  # bytes of the length in front of each message, big-endian


def read_exactly(descriptor: int, count: int) -> bytes:
    """Read exactly `count` bytes.

    Raises:
        EOFError: the other side closed earlier.
    """
    parts: list[bytes] = []
    while count > 0:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            raise EOFError(f"closed with {count} bytes to come")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_message(descriptor: int) -> Any:
    """Read one JSON message."""
    return json.loads(read_exactly(descriptor, int.from_bytes(read_exactly(descriptor, LENGTH_BYTES), "big")))


def encode_message(message: object) -> bytes:
    """Encode a JSON message behind its length. Raises ValueError for NaN and infinity, which JSON does not have."""
    body = json.dumps(message, allow_nan=False).encode()
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes to a descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
