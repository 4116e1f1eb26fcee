"""Marks of the files of a run's data: their sizes and hashes, and a checksum of each line, by which a resumed run names what has changed.

The hash is BLAKE2b of the content (16 bytes, in hex). Of a file beyond 256 MiB it is that of 64 pieces of 256 KiB at equal distances, the
first and the last bytes among them, and no line is marked: a change between two pieces is seen only if it changes the size. Streamed files
are marked alike. Data sets of the hub have no mark: their name, with its revision, is a setting, which a resumed run compares anyway.
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
from rollouts.config_files import to_dict
from rollouts.data.rows.files import HUB_PREFIX
from rollouts.errors import DataError
from rollouts.training.run_state import FileMark, RunInputs

ROWS_FILE = "data_rows.json"
"""File of a run with the checksums of lines; without it a change is noticed, but no line is named."""
WHOLE_BYTES = 256 << 20
_PIECES, _PIECE_BYTES = 64, 256 << 10
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
    """Marks of all files of a run's data, by setting and file."""

    files: Mapping[str, FileMark]
    lines: Mapping[str, LineMarks]  # files that have lines and are not too large


def mark_data(config: Any) -> DataMarks:
    """Read the files that the settings of the sections data and preference name. Raises DataError for one that cannot be read."""
    files: dict[str, FileMark] = {}
    lines: dict[str, LineMarks] = {}
    for name, path in list_data_files(config):
        try:
            files[name], of_lines = _mark_file(path)
        except OSError as error:
            raise DataError(f"{path} ({name}) cannot be read: {error}") from error
        if of_lines is not None:
            lines[name] = of_lines
    return DataMarks(files=files, lines=lines)


def list_data_files(config: Any) -> Iterator[tuple[str, Path]]:
    """Yield (setting and file, path) of each file of the data; of a folder all files that are not hidden."""
    section = config.data
    named = {f"data.{field}": getattr(section, field, None) for field in ("path", "eval_path", "rollouts")}
    pairs = getattr(config, "preference", None)
    named |= {f"preference.{field}": getattr(pairs, field, None) for field in ("path", "eval_path")}
    named |= {f"data.mixture[{k}]": spec.path for k, spec in enumerate(parse_mixture(getattr(section, "mixture", ())), start=1)}
    for name, text in named.items():
        if text is None or text.startswith(HUB_PREFIX):
            continue
        path = Path(text)
        if not path.is_dir():
            yield name, path
            continue
        for file in sorted(path.rglob("*")):
            inner = file.relative_to(path)
            if file.is_file() and not any(part.startswith(".") for part in inner.parts):
                yield f"{name}/{inner.as_posix()}", file


def _mark_file(path: Path) -> tuple[FileMark, LineMarks | None]:
    size, found = path.stat().st_size, hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if size > WHOLE_BYTES:
            for k in range(_PIECES):
                file.seek(k * (size - _PIECE_BYTES) // (_PIECES - 1))
                found.update(file.read(_PIECE_BYTES))
            return FileMark(size=size, hash=found.hexdigest()), None
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
    return json.dumps({"schema": 1, "files": {name: marks.to_dict() for name, marks in lines.items()}}) + "\n"


def read_lines(path: Path) -> dict[str, LineMarks]:
    """Read ROWS_FILE; empty if it is not there or damaged, which costs the names of the lines alone."""
    try:
        return {name: LineMarks.from_dict(raw) for name, raw in json.loads(path.read_text(encoding="utf-8"))["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def compare_data(before: Mapping[str, FileMark], known: Mapping[str, LineMarks], after: DataMarks) -> dict[str, str]:
    """Describe each file of the data that has changed.

    Args:
        before: marks of the checkpoint.
        known: marks of the lines that these files had.

    Returns: descriptions by setting and file; empty if nothing has changed.
    """
    found: dict[str, str] = {}
    for name, mark in before.items():
        now = after.files.get(name)
        if now is None:
            found[name] = f"{name} is no longer there"
        elif now != mark:
            sizes = f"{mark.size:,} bytes before, {now.size:,} now" if mark.size != now.size else f"{now.size:,} bytes, as before"
            both = name in known and name in after.lines
            found[name] = f"{name} has changed ({sizes})" + (f": {_describe_lines(known[name], after.lines[name])}" if both else "")
    return found | {name: f"{name} is new" for name in after.files if name not in before}


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
