"""Rows of a data set with the place of each: in memory, or read from a file again whenever one is taken."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Generic, TypeVar, overload

import numpy as np

from rollouts.errors import DataError
from rollouts.types import Prompt, Sample

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that was left out."""

    source: str  # "file, line n"
    reason: str


@dataclass(frozen=True, eq=False)
class LazyRows(Sequence[T], Generic[T]):
    """Rows that are made anew each time they are taken, so that none of them stays in memory."""

    size: int
    read: Callable[[int], T]  # position in [0, size) -> row

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> LazyRows[T]: ...
    def __getitem__(self, index: int | slice) -> T | LazyRows[T]:
        if isinstance(index, slice):
            positions = range(self.size)[index]
            return LazyRows(len(positions), lambda i: self.read(positions[i]))
        if not -self.size <= index < self.size:
            raise IndexError(f"row {index} of {self.size}")
        return self.read(index % self.size)


@dataclass(frozen=True, kw_only=True)
class LoadedRows(Sequence[T], Generic[T]):
    """A sequence of rows with the source of each, and the rows that were left out."""

    rows: Sequence[T]  # a tuple, or LazyRows
    sources: Sequence[str]  # "file, line n" of each row
    bad_rows: tuple[BadRow, ...] = field(default=())
    # [rows] uint64: hash_question of each row, if rows are Prompts or Samples; else empty
    questions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64), compare=False, repr=False)

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.sources), f"{len(self.rows)} rows with {len(self.sources)} sources"
        assert len(self.questions) in (0, len(self.rows)), f"{len(self.rows)} rows with {len(self.questions)} questions"

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self.rows[index]

    @property
    def is_lazy(self) -> bool:
        """Whether rows are read from a file when they are taken."""
        return isinstance(self.rows, LazyRows)


def pick_rows(loaded: LoadedRows[T], positions: Sequence[int] | np.ndarray) -> LoadedRows[T]:
    """Return the rows at these positions, in this order; a position may stand several times."""
    questions = loaded.questions[np.asarray(positions, dtype=np.int64)] if len(loaded.questions) else loaded.questions
    return replace(loaded, rows=_pick(loaded.rows, positions), sources=_pick(loaded.sources, positions), questions=questions)


def _pick(values: Sequence[T], positions: Sequence[int] | np.ndarray) -> Sequence[T]:
    if not isinstance(values, LazyRows):
        return tuple(values[position] for position in positions)
    lazy: LazyRows[T] = values
    kept = np.asarray(positions, dtype=np.int64)
    return LazyRows(len(kept), lambda i: lazy.read(int(kept[i])))


def join_rows(parts: Sequence[LoadedRows[T]]) -> LoadedRows[T]:
    """Return the rows of all parts, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    bad_rows = tuple(bad for part in parts for bad in part.bad_rows)
    questions = np.concatenate([part.questions for part in parts])
    if not any(part.is_lazy for part in parts):
        kept = tuple(row for part in parts for row in part.rows)
        places = tuple(source for part in parts for source in part.sources)
        return LoadedRows(rows=kept, sources=places, bad_rows=bad_rows, questions=questions)
    ends = np.cumsum([len(part) for part in parts])

    def find(columns: Sequence[Sequence[U]], i: int) -> U:
        part = int(np.searchsorted(ends, i, side="right"))
        return columns[part][i - (int(ends[part - 1]) if part else 0)]

    size, rows_of, sources_of = int(ends[-1]), [part.rows for part in parts], [part.sources for part in parts]
    rows, sources = LazyRows(size, partial(find, rows_of)), LazyRows(size, partial(find, sources_of))
    return LoadedRows(rows=rows, sources=sources, bad_rows=bad_rows, questions=questions)


def map_rows(loaded: LoadedRows[U], parse: Callable[[int, U, str], T], *, skip_bad_rows: bool, what: str) -> LoadedRows[T]:
    """Parse every row, and keep the results, or for lazy rows only the positions of the good ones, which are parsed again when taken.

    Args:
        parse: (number of the row among the good ones, row, source) -> value; raises DataError that begins with the source.
        skip_bad_rows: put rows with a DataError on the list of bad rows, instead of raising.
        what: name of the data in the error that nothing is left.
    """
    values: list[T] = []
    positions, questions = array("q"), array("Q")
    bad_rows: list[BadRow] = []
    for position, (row, source) in enumerate(zip(loaded.rows, loaded.sources, strict=True)):
        try:
            value = parse(len(positions), row, source)
        except DataError as error:
            if not skip_bad_rows:
                raise
            bad_rows.append(BadRow(source=source, reason=str(error).removeprefix(f"{source}: ")))
            continue
        positions.append(position)
        if isinstance(value, Prompt | Sample):
            questions.append(hash_question(value))
        if not loaded.is_lazy:
            values.append(value)
    all_bad = (*loaded.bad_rows, *bad_rows)
    check_some(len(positions), all_bad, what)
    kept = loaded if len(positions) == len(loaded) else pick_rows(loaded, positions)
    rows: Sequence[T] = tuple(values)
    if loaded.is_lazy:
        rows = LazyRows(len(kept), lambda i: parse(i, kept.rows[i], kept.sources[i]))
    return LoadedRows(rows=rows, sources=kept.sources, bad_rows=all_bad, questions=np.array(questions, np.uint64))


def check_some(count: int, bad_rows: Sequence[BadRow], what: str) -> None:
    """Raise DataError if no row is left."""
    if count == 0:
        left_out = f" ({len(bad_rows)} bad rows were left out, the first: {bad_rows[0].source}: {bad_rows[0].reason})" if bad_rows else ""
        raise DataError(f"{what}: the data set is empty, found 0 usable rows{left_out}: give data with rows")


# -- the question of a row, by which train and held-out rows are told apart


def hash_question(row: Prompt | Sample) -> int:
    """Return a hash in [0, 2**64) of what a row asks: its prompt, or the whole of a text that is trained on as a whole.

    Two rows with the same question are equal here, whatever their answers are: a model that was trained on one knows the other.
    """
    content: Any = row.content if isinstance(row, Prompt) else row.prompt or row.response
    if len(content) == 1 and not isinstance(content, str) and content[0].role == "user":
        content = content[0].content or ""  # a question is the same as a text and as a message
    text = content if isinstance(content, str) else json.dumps([message.to_dict() for message in content], sort_keys=True)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def choose_heldout(hashes: np.ndarray, count: int) -> np.ndarray:
    """Choose rows to hold out: those of the questions with the smallest hashes, at least one and at most `count` rows, if possible.

    A pure function of the questions, whatever the order of the rows; all rows of one question are on one side.

    Args:
        hashes: hash_question of each row. # [rows] uint64
        count: number of rows wanted; questions that stand in several rows may make it fewer, or one question's rows more.

    Returns: whether each row is held out. # [rows] bool
    """
    questions, sizes = np.unique(hashes, return_counts=True)
    if count < 1 or len(questions) < 2:
        return np.zeros(len(hashes), dtype=bool)
    fitting = max(1, int(np.searchsorted(np.cumsum(sizes), count, side="right")))
    return hashes <= questions[min(fitting, len(questions) - 1) - 1]


def find_repeated(hashes: np.ndarray) -> list[tuple[int, int]]:
    """Return (position, position of the first row with the same question) of each row that repeats an earlier one's question."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    earlier = first[inverse]
    return [(int(i), int(earlier[i])) for i in np.flatnonzero(earlier < np.arange(len(hashes)))]
