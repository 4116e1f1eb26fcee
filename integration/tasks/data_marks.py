"""Marks of the files of a run's data: their sizes and hashes, and a checksum of each line, by which a resumed run names what has changed.

Files are marked that the run reads rows from: of a folder those of its split, not what lies beside them. Files in the run's own output
directory have no mark, and neither have data sets of the hub: their name, with its revision, is a setting, which a resumed run compares.

The hash is BLAKE2b of the content (16 bytes, in hex). For a file beyond 256 MiB it is that of 64 pieces of 256 KiB at equal distances, the
first and the last bytes among them, and no line is marked: a change between two pieces is seen only if it changes the size. At most about
1 GiB is read in all: of data for which that is not enough, every file is hashed by pieces, fewer and smaller ones the more files there are
(10,000 files: two of 53 KiB each), and their sizes stand before the hash. Streamed files are marked alike.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from integration.expressions.mixture import parse_mixture
from integration.settings.paths import PATHS
from rollouts.checks import parse_json
from rollouts.config_files import to_dict
from rollouts.data.datasets import DatasetSpec
from rollouts.data.rows.files import list_row_files
from rollouts.data.rows.hub import HUB_PREFIX
from rollouts.errors import DataError
from rollouts.training.saving.run_state import FileMark, RunInputs

ROWS_FILE = "data_rows.json"
"""File of a run with the checksums of lines; without it a change is noticed, but no line is named."""
WHOLE_BYTES = 256 << 20
_PIECES, _PIECE_BYTES = 64, 256 << 10
_ALL_BYTES = 1 << 30  # read of all files together
_LEAST_PIECE = 4 << 10
_MOST_MARKS = 1 << 16  # checksums of one file; beyond, each is that of 2, 4, 8, ... lines
_LINES = (".jsonl", ".json", ".csv", ".tsv", ".txt")
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class LineMarks:
    """Checksums of the lines of a file."""

    lines_per_mark: int
    marks: tuple[int, ...]
    num_lines: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        packed = array("I", self.marks)
        if sys.byteorder == "big":
            packed.byteswap()
        return {"lines_per_mark": self.lines_per_mark, "num_lines": self.num_lines, "marks": packed.tobytes().hex()}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> LineMarks:
        """Restore the result of to_dict. Raises ValueError, KeyError or TypeError for anything else."""
        packed = array("I")
        packed.frombytes(bytes.fromhex(raw["marks"]))
        if sys.byteorder == "big":
            packed.byteswap()
        return cls(lines_per_mark=int(raw["lines_per_mark"]), marks=tuple(packed), num_lines=int(raw["num_lines"]))

    def merged(self) -> LineMarks:
        """Return the marks of twice as many lines each."""
        pairs = (self.marks[start : start + 2] for start in range(0, len(self.marks), 2))
        merged = tuple(zlib.crc32(array("I", pair).tobytes()) for pair in pairs)
        return LineMarks(lines_per_mark=2 * self.lines_per_mark, marks=merged, num_lines=self.num_lines)


@dataclass(frozen=True, kw_only=True)
class DataMarks:
    """Marks of all files of a run's data: `files` by setting and file, `lines` by content."""

    files: Mapping[str, FileMark]
    lines: Mapping[str, LineMarks]  # by hash of the file; of files that have lines and are not too large


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Pieces of a file that are hashed in place of the whole."""

    whole_bytes: int  # files up to this size are hashed whole
    count: int  # at least 2
    num_bytes: int  # bytes of each piece
    label: str  # stands before the hash, so that hashes of other pieces are not compared with it


def mark_data(config: Any) -> DataMarks:
    """Read the files that the settings of the sections data and preference name. Raises DataError for one that cannot be read."""
    files: dict[str, FileMark] = {}
    lines: dict[str, LineMarks] = {}
    listed = list(list_data_files(config))
    sizes = [_read_size(name, path) for name, path in listed]
    pieces = _plan_pieces(sizes)
    for name, path in listed:
        try:
            files[name], of_lines = mark_file(path, pieces)
        except OSError as error:
            raise DataError(f"{path} ({name}) cannot be read: {error}") from error
        if of_lines is not None:
            lines[files[name].hash] = of_lines
    return DataMarks(files=files, lines=lines)


def list_data_files(config: Any) -> Iterator[tuple[str, Path]]:
    """Yield (setting and file, path) of each file that rows are read from; of a folder those of its split. None in config.output_dir."""
    section = config.data
    named = {f"data.{field}": getattr(section, field, None) for field in ("path", "eval_path", "rollouts")}
    pairs = getattr(config, "preference", None)
    named |= {f"preference.{field}": getattr(pairs, field, None) for field in ("path", "eval_path")}
    sets = {name: DatasetSpec(path=path) for name, path in named.items() if path is not None}
    sets |= {f"data.mixture[{k}]": spec for k, spec in enumerate(parse_mixture(getattr(section, "mixture", ())), start=1)}
    output = None if config.output_dir is None else Path(config.output_dir).resolve()
    for name, spec in sets.items():
        if spec.path.startswith(HUB_PREFIX):
            continue
        path = Path(spec.path)
        for file in list_row_files(path, split=spec.split, subset=spec.subset):
            if output is None or not file.resolve().is_relative_to(output):
                yield name if file == path else f"{name}/{file.relative_to(path).as_posix()}", file


def _read_size(name: str, path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} ({name}) cannot be read: {error}") from error


def _plan_pieces(sizes: Sequence[int]) -> Pieces:
    """Plan what is read of each file, so that about _ALL_BYTES are read in all; a function of all sizes, not of the order of files."""
    large = _PIECES * _PIECE_BYTES
    if sum(size if size <= WHOLE_BYTES else large for size in sizes) <= _ALL_BYTES:
        return Pieces(whole_bytes=WHOLE_BYTES, count=_PIECES, num_bytes=_PIECE_BYTES, label="")
    count = max(2, min(_PIECES, _ALL_BYTES // (_PIECE_BYTES * len(sizes))))
    num_bytes = max(_LEAST_PIECE, min(_PIECE_BYTES, _ALL_BYTES // (count * len(sizes))))
    return Pieces(whole_bytes=count * num_bytes, count=count, num_bytes=num_bytes, label=f"{count}x{num_bytes}:")


def mark_file(path: Path, pieces: Pieces | None = None) -> tuple[FileMark, LineMarks | None]:
    """Return the mark of a file and those of its lines, None if it has none or is too large. Raises OSError.

    Args:
        pieces: what is read of a large file; None = as of a file by itself.
    """
    pieces = pieces or _plan_pieces(())
    size, found = path.stat().st_size, hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if size > pieces.whole_bytes:
            for k in range(pieces.count):
                file.seek(k * (size - pieces.num_bytes) // (pieces.count - 1))
                found.update(file.read(pieces.num_bytes))
            return FileMark(size=size, hash=pieces.label + found.hexdigest()), None
        if path.suffix not in _LINES:
            while block := file.read(1 << 20):
                found.update(block)
            return FileMark(size=size, hash=found.hexdigest()), None
        sums = array("I")
        for line in file:
            found.update(line)
            sums.append(zlib.crc32(line.rstrip(b"\r\n")))
    marks = LineMarks(lines_per_mark=1, marks=tuple(sums), num_lines=len(sums))
    while len(marks.marks) > _MOST_MARKS:
        marks = marks.merged()
    return FileMark(size=size, hash=found.hexdigest()), marks


def write_lines(lines: Mapping[str, LineMarks]) -> str:
    """Return the content of ROWS_FILE."""
    return json.dumps({"schema": 2, "lines": {found: marks.to_dict() for found, marks in lines.items()}}) + "\n"


def read_lines(path: Path) -> dict[str, LineMarks]:
    """Read ROWS_FILE; empty if it is not there or damaged, which costs the names of the lines alone."""
    try:
        return {found: LineMarks.from_dict(raw) for found, raw in parse_json(path.read_text(encoding="utf-8"))["lines"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def compare_data(before: Mapping[str, FileMark], known: Mapping[str, LineMarks], after: DataMarks) -> dict[str, str]:
    """Describe each file of the data that has changed.

    Args:
        before: marks of the checkpoint.
        known: marks of the lines that these files had, by hash of the file.

    Returns: descriptions by setting and file; empty if nothing has changed.
    """
    found: dict[str, str] = {}
    for name, mark in before.items():
        now = after.files.get(name)
        if now is None:
            found[name] = f"{name} is no longer there"
        elif now != mark and not _are_other_pieces(mark, now):
            sizes = f"{mark.size:,} bytes before, {now.size:,} now" if mark.size != now.size else f"{now.size:,} bytes, as before"
            both = mark.hash in known and now.hash in after.lines
            found[name] = f"{name} has changed ({sizes})" + (
                f": {_describe_lines(known[mark.hash], after.lines[now.hash])}" if both else ""
            )
    return found | {name: f"{name} is new" for name in after.files if name not in before}


def _are_other_pieces(before: FileMark, after: FileMark) -> bool:
    """Return whether two hashes are of other pieces of a file of the same size: unknown, not changed. Another file has changed, then."""
    return before.size == after.size and before.hash.rpartition(":")[0] != after.hash.rpartition(":")[0]


def _describe_lines(before: LineMarks, after: LineMarks) -> str:
    """Name the lines that differ, the first ones of them, and how many have come or gone."""
    while before.lines_per_mark < after.lines_per_mark:
        before = before.merged()
    while after.lines_per_mark < before.lines_per_mark:
        after = after.merged()
    each, pairs = after.lines_per_mark, zip(before.marks, after.marks, strict=False)
    changed = [k for k, (old, new) in enumerate(pairs) if old != new]
    told = f"{_name_lines(changed, each)} changed" if changed else "its lines are the same up to there"
    more = after.num_lines - before.num_lines
    return told + (f", {abs(more):,} {'more' if more > 0 else 'fewer'} of them" if more else "")


def _name_lines(places: Sequence[int], each: int) -> str:
    """Name marks by their lines, counted from 1: "line 3", "lines 3, 7-9 and 12 more"."""
    spans: list[str] = []
    runs = groupby(enumerate(places), key=lambda item: item[1] - item[0])
    for _, run in runs:
        marks = [place for _, place in run]
        first, last = marks[0] * each + 1, (marks[-1] + 1) * each
        spans.append(str(first) if first == last else f"{first}-{last}")
    rest = f" and {len(spans) - _MOST_NAMED} more places" if len(spans) > _MOST_NAMED else ""
    many = len(spans) > 1 or "-" in spans[0]
    return f"{'lines' if many else 'line'} {', '.join(spans[:_MOST_NAMED])}{rest}"


def mark_settings(config: Any, may_change: tuple[str, ...]) -> dict[str, str]:
    """Return a hash of each setting that must not change, by section.field; not of paths, which may name the same files elsewhere.

    8 hex digits: they tell values apart, and none can be guessed from them.
    """
    flat = dict(_flatten(to_dict(config)))
    return {
        name: hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
        for name, value in sorted(flat.items())
        if name not in PATHS and not name.startswith(may_change)
    }


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def find_changed_settings(before: RunInputs, after: Mapping[str, str]) -> list[str]:
    """Return the settings whose hash is another one; a setting that one side does not know is none."""
    return sorted(name for name, value in before.settings.items() if after.get(name, value) != value)
