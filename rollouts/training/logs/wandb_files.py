"""Offline files of Weights & Biases, which are the store of a run until they are sent: the steps that they hold.

A file is a log in LevelDB's format behind a header of 7 bytes: blocks of 32 KiB with records, each a checksum, a length, a kind and data.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7  # bytes
_WHOLE, _LAST = 1, 4  # kinds of records: in one piece, and the last of several pieces


def read_offline_steps(directory: Path) -> Mapping[str, int] | None:
    """Return the last step of each stage whose line is in the files of a run.

    Args:
        directory: its folders offline-run-* are the parts of one run.

    Returns: None if a part of the run was not offline, so that its lines are elsewhere, or if a file is of another format.
    """
    parts = sorted(path for path in directory.glob("*run-*") if path.is_dir() and not path.is_symlink())
    if any(not part.name.startswith("offline-run-") for part in parts):
        return None
    if not parts:
        return {}
    found: dict[str, int] = {}
    protobuf: Any = importlib.import_module("google.protobuf.message")  # a requirement of wandb
    try:
        for file in (file for part in parts for file in sorted(part.glob("*.wandb"))):
            for stage, step in _read_lines(file):
                found[stage] = max(found.get(stage, -1), step)
    except (protobuf.DecodeError, ValueError):
        return None
    return found


def _read_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yield stage and step of each line of metrics; tables of samples are no lines."""
    record_type: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    for data in split_records(path.read_bytes()):
        items = record_type.FromString(data).history.item
        row = {item.key or "/".join(item.nested_key): item.value_json for item in items}
        for key in [key for key in row if key == "step" or key.endswith("/step")]:
            stage = key.rpartition("/")[0]
            samples = f"{stage}/samples" if stage else "samples"
            if any(name != key and not name.startswith((samples, "_")) for name in row):
                yield stage, int(row[key])


def split_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file, up to the first that is not there as a whole: a kill ends a file anywhere."""
    position, pieces = _HEADER, list[bytes]()
    while position + _HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:  # no header fits into the rest of a block
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        end = position + _HEADER + length
        if end > len(data) or not _WHOLE <= kind <= _LAST:
            return
        pieces.append(data[position + _HEADER : end])
        position = end
        if kind in (_WHOLE, _LAST):
            yield b"".join(pieces)
            pieces.clear()
