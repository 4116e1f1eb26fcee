"""Messages on the pipes of a sandbox: JSON behind its length. Standard library only."""

from __future__ import annotations

import json
import os
from typing import Any

LENGTH_BYTES = 8  # in front of each message, big-endian


def read_exactly(descriptor: int, count: int) -> bytes:
    """So many bytes.

    Raises:
        EOFError: the other side closed before.
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
    """One JSON message."""
    return json.loads(read_exactly(descriptor, int.from_bytes(read_exactly(descriptor, LENGTH_BYTES), "big")))


def encode_message(message: object) -> bytes:
    """A JSON message behind its length. NaN and infinity are refused (ValueError), as JSON has none."""
    body = json.dumps(message, allow_nan=False).encode()
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
