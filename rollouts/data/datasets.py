"""Data sets from files become conversations, prompts and supervised Samples, alone or in mixtures.

Every problem of a row is reported as "file, line: reason"; with skip_bad_rows such rows are left out, counted and returned.
docs/data.md lists the formats of rows and files.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from rollouts.chat.tokenize import OnOverflow, prepare_sft_sample
from rollouts.data.model_limits import ModelLimits, explain_sample
from rollouts.data.rows.files import READABLE, Row, find_rows
from rollouts.data.rows.formats import Columns, read_conversation, read_question, rename_columns
from rollouts.data.rows.loaded import BadRow, LoadedRows, check_some, hash_question, join_rows, map_rows, pick_rows
from rollouts.errors import ConfigError, DataError
from rollouts.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """One data set, alone or in a mixture, where it contributes repeat * min(its size, max_samples) rows, or the share of its weight."""

    path: str  # .jsonl, .json, .csv or .parquet file; folder with <split>.jsonl or from datasets' save_to_disk; hf://ORG/NAME of the hub
    repeat: int = 1  # uses of each row in an epoch
    max_samples: int | None = None  # number of first rows that are used; None = all
    split: str | None = None  # split of a folder or hub data set; None = "train"
    subset: str | None = None  # folder inside the folder, or configuration of a hub data set
    weight: float | None = None  # share of the rows of an epoch, relative to the other weights; None = as many as there are
    columns: Columns = ()  # (new name, column it is read from) of columns to rename
    lazy: bool = False  # read rows from the file when they are taken, instead of keeping all in memory

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(f"the path of the rows is empty (DatasetSpec.path, --data.path): give {READABLE}")
        if self.repeat < 1:
            raise ConfigError(f"DatasetSpec.repeat is {self.repeat} for {self.path}, expected at least 1")
        if self.max_samples is not None and self.max_samples < 1:
            raise ConfigError(f"DatasetSpec.max_samples is {self.max_samples} for {self.path}, expected at least 1, or None for all")
        if self.weight is not None and not (self.weight > 0 and math.isfinite(self.weight)):
            raise ConfigError(f"DatasetSpec.weight is {self.weight} for {self.path}, expected a number above 0, or None")


Source: TypeAlias = "str | Path | DatasetSpec | Sequence[str | Path | DatasetSpec]"


def load_jsonl(path: str | Path, *, skip_bad_rows: bool = False) -> LoadedRows[Row]:
    """Read a file with one JSON object per line. Blank lines, a byte-order mark and CRLF are fine.

    Args:
        skip_bad_rows: leave bad lines out, listed in .bad_rows, instead of raising.

    Raises: DataError if the file cannot be read or has no row; and, naming file and line, for a line that is not UTF-8, not JSON (NaN and
        Infinity are not), no object, or has a key twice or text that is not Unicode (a lone surrogate).
    """
    return load_rows(Path(path), lambda row, where: row, skip_bad_rows)


def load_sft_conversations(source: Source, *, skip_bad_rows: bool = False) -> LoadedRows[Row]:
    """Load examples for prepare_sft_sample.

    Each row has one of the formats of formats.CONVERSATION_FORMATS, and becomes "messages", "prompt" and "completion", or "text". Other
    keys stay, and become metadata of the Sample.

    Args:
        source: a file or folder, a DatasetSpec, or a list of them to mix.
        skip_bad_rows: leave bad rows out, listed in .bad_rows, instead of raising.

    Raises: DataError that names file and line.
    """
    return load_rows(source, read_conversation, skip_bad_rows)


def load_rl_prompts(
    source: Source, *, require_ground_truth: bool = True, as_messages: bool = True, skip_bad_rows: bool = False
) -> LoadedRows[Prompt]:
    """Load prompts with the data that their reward needs.

    Each row has one of the formats of formats.PROMPT_FORMATS, and a ground truth: see formats.read_question. All keys besides the
    prompt's own go into the prompt's metadata.

    Args:
        source: a file or folder, a DatasetSpec, or a list of them to mix.
        require_ground_truth: refuse rows without one.
        as_messages: make a "question" a user message; False leaves it a plain str, for models without a chat template.
        skip_bad_rows: leave bad rows out, listed in .bad_rows, instead of raising.

    Raises: DataError that names file and line.
    """

    def parse(row: Row, where: str) -> Prompt:
        content, metadata = read_question(row, where, as_messages=as_messages)
        if require_ground_truth and metadata.get("ground_truth") is None:
            empty = [name for name in ("ground_truth", "answer") if name in row]
            found = f"{empty[0]} is null" if empty else f"the row has the fields {sorted(row)}"
            raise DataError(
                f"{where}: {found}, expected 'ground_truth' or 'answer' for the reward to compare with: "
                "rename the column that has it (--data.columns answer=NAME), or give a reward of your own that needs none "
                "(--reward.function)"
            )
        return Prompt(content=content, metadata=metadata)

    return load_rows(source, parse, skip_bad_rows)


def prepare_sft_samples(
    tokenizer: PreTrainedTokenizerBase,
    examples: LoadedRows[Row],
    *,
    max_length: int | None = None,
    on_overflow: OnOverflow = "error",
    last_assistant_only: bool = False,
    skip_bad_rows: bool = False,
    limits: ModelLimits | None = None,
    **template_kwargs: Any,
) -> LoadedRows[Sample]:
    """Apply prepare_sft_sample to every example; Sample.index is the example's position.

    Args:
        limits: limits of the trained model; an example beyond them is a bad row, or is cut to its context with on_overflow "truncate".

    Raises: DataError that names file and line, for example for a conversation longer than max_length.
    """
    if on_overflow == "truncate" and limits is not None and limits.context_length is not None:
        max_length = min(max_length or limits.context_length, limits.context_length)

    def prepare(index: int, row: Row, where: str) -> Sample:
        try:
            sample = prepare_sft_sample(
                tokenizer,
                row,
                index=index,
                max_length=max_length,
                on_overflow=on_overflow,
                last_assistant_only=last_assistant_only,
                **template_kwargs,
            )
            why = None if limits is None else explain_sample(sample, limits)
            if why is not None:
                raise DataError(f"the conversation {why}")
            return sample
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    return map_rows(examples, prepare, skip_bad_rows=skip_bad_rows, what="the examples")


def mix_datasets(parts: Sequence[tuple[DatasetSpec, LoadedRows[T]]]) -> LoadedRows[T]:
    """Join data sets: the first max_samples rows of each, repeat times. The order of training is drawn later.

    With weights, rows are repeated further until the numbers of rows are as the weights, and every row is used at least once.

    Returns: sum over parts of repeat * min(size, max_samples) rows, or more with weights.
    Raises: ConfigError if some parts have a weight and others none.
    """
    kept = [_keep_share(spec, part) for spec, part in parts]
    weights = [spec.weight for spec, _ in parts if spec.weight is not None]
    if not weights:
        return join_rows(kept)
    if len(weights) < len(parts):
        without = next(spec.path for spec, _ in parts if spec.weight is None)
        raise ConfigError(f"{without} has no weight, but other data sets of the mixture do: give all of them a weight, or none")
    scale = max(len(part) / weight for part, weight in zip(kept, weights, strict=True))
    counts = [max(len(part), round(scale * weight)) for part, weight in zip(kept, weights, strict=True)]
    return join_rows([pick_rows(part, np.arange(count) % len(part)) for part, count in zip(kept, counts, strict=True)])


def _keep_share(spec: DatasetSpec, part: LoadedRows[T]) -> LoadedRows[T]:
    if spec.max_samples is None and spec.repeat == 1:
        return part
    return pick_rows(part, np.tile(np.arange(min(len(part), spec.max_samples or len(part))), spec.repeat))


def load_rows(source: Source, parse: Callable[[Row, str], T], skip_bad_rows: bool = False) -> LoadedRows[T]:
    """Load rows of any kind from the files that `source` names.

    Args:
        parse: (row, "file, line n") -> value; raises DataError, naming the place, for a row that it cannot use.
    """
    items = [source] if isinstance(source, (str, Path, DatasetSpec)) else list(source)
    if not items:
        raise DataError("the list of data sets is empty: name at least one file or folder")
    specs = [item if isinstance(item, DatasetSpec) else DatasetSpec(path=str(item)) for item in items]
    return mix_datasets([(spec, _load_spec(spec, parse, skip_bad_rows)) for spec in specs])


def _load_spec(spec: DatasetSpec, parse: Callable[[Row, str], T], skip_bad_rows: bool) -> LoadedRows[T]:
    file = find_rows(spec.path, split=spec.split, subset=spec.subset)

    def read(number: int, item: Any, where: str) -> T:
        row = file.decode(item, where)
        return parse(rename_columns(row, spec.columns, where) if spec.columns else row, where)

    if spec.lazy:
        return map_rows(file.index(), read, skip_bad_rows=skip_bad_rows, what=file.name)
    return _collect(file.items(), read, skip_bad_rows, what=file.name)


def _collect(items: Iterator[tuple[str, Any]], parse: Callable[[int, Any, str], T], skip_bad_rows: bool, what: str) -> LoadedRows[T]:
    """Parse every item; a DataError ends it, or with skip_bad_rows is put on the list. Raises DataError if no row is left."""
    rows: list[T] = []
    sources: list[str] = []
    bad_rows: list[BadRow] = []
    questions = array("Q")
    for source, item in items:
        try:
            rows.append(parse(len(rows), item, source))
            sources.append(source)
            if isinstance(rows[-1], Prompt):
                questions.append(hash_question(rows[-1]))
        except DataError as error:
            if not skip_bad_rows:
                raise
            bad_rows.append(BadRow(source=source, reason=str(error).removeprefix(f"{source}: ")))
    check_some(len(rows), bad_rows, what)
    return LoadedRows(rows=tuple(rows), sources=tuple(sources), bad_rows=tuple(bad_rows), questions=np.array(questions, np.uint64))
