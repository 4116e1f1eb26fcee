"""Data sets from files: JSONL, Parquet and Hugging Face folders become conversations, prompts and supervised Samples, and mixtures.

Every problem of a row is reported as "file, line: reason"; with skip_bad_rows such rows are left out, counted and returned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, TypeVar, cast, overload

from rollouts.chat.tokenize import OnOverflow, parse_messages, parse_prompt_content, prepare_sft_sample
from rollouts.data.model_limits import ModelLimits, explain_sample
from rollouts.errors import ConfigError, DataError
from rollouts.types import Message, Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")
U = TypeVar("U")
Row: TypeAlias = dict[str, Any]

HUB_PREFIX = "hf://"


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that was left out."""

    source: str  # "file, line n"
    reason: str


@dataclass(frozen=True, kw_only=True)
class LoadedRows(Sequence[T], Generic[T]):
    """A sequence of rows with the source of each, and the rows that were left out."""

    rows: tuple[T, ...]
    sources: tuple[str, ...]  # "file, line n" of each row
    bad_rows: tuple[BadRow, ...] = field(default=())

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.sources), f"{len(self.rows)} rows with {len(self.sources)} sources"

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self.rows[index]


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """One data set of a mixture; it contributes repeat * min(its size, max_samples) rows."""

    path: str  # .jsonl or .parquet file; folder with <split>.jsonl or from datasets' save_to_disk; hf://<name on the hub>
    repeat: int = 1  # uses of each row in an epoch
    max_samples: int | None = None  # number of first rows that are used; None = all
    split: str | None = None  # split of a folder or hub data set; None = "train"
    subset: str | None = None  # folder inside the folder, or configuration of a hub data set

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("DatasetSpec.path is empty: give a file, a folder or hf://<name>")
        if self.repeat < 1:
            raise ConfigError(f"DatasetSpec.repeat is {self.repeat} for {self.path}, expected at least 1")
        if self.max_samples is not None and self.max_samples < 1:
            raise ConfigError(f"DatasetSpec.max_samples is {self.max_samples} for {self.path}, expected at least 1, or None for all")


Source: TypeAlias = "str | Path | DatasetSpec | Sequence[str | Path | DatasetSpec]"


def load_jsonl(path: str | Path, *, skip_bad_rows: bool = False) -> LoadedRows[Row]:
    """Read a file with one JSON object per line. Blank lines, a byte-order mark and CRLF are fine.

    Args:
        skip_bad_rows: leave bad lines out, listed in .bad_rows, instead of raising.

    Raises: DataError if the file cannot be read or has no row; and, naming file and line, for a line that is not UTF-8, not JSON (NaN and
        Infinity are not), no object, or has a key twice or text that is not Unicode (a lone surrogate).
    """
    return _load_file(Path(path), lambda row, source: row, skip_bad_rows)


def load_sft_conversations(source: Source, *, skip_bad_rows: bool = False) -> LoadedRows[Row]:
    """Load examples for prepare_sft_sample.

    Each row has "messages" with an assistant message among them, or "prompt" and "completion", or "question" and "answer", which become a
    user and an assistant message. Other keys stay, and become metadata of the Sample.

    Args:
        source: a file or folder, a DatasetSpec, or a list of them to mix.
        skip_bad_rows: leave bad rows out, listed in .bad_rows, instead of raising.

    Raises: DataError that names file and line.
    """
    return load_rows(source, _parse_sft_row, skip_bad_rows)


def load_rl_prompts(
    source: Source, *, require_ground_truth: bool = True, as_messages: bool = True, skip_bad_rows: bool = False
) -> LoadedRows[Prompt]:
    """Load prompts with the data that their reward needs.

    Each row has "prompt" (a str or messages), "messages" or "question", and "ground_truth" or "answer". All other keys, and "answer"
    itself, go into the prompt's metadata. metadata["ground_truth"] is "ground_truth", else "answer"; an answer in the format of
    GSM8K is cut to the part behind "####", without thousands separators.

    Args:
        source: a file or folder, a DatasetSpec, or a list of them to mix.
        require_ground_truth: refuse rows without one.
        as_messages: make a "question" a user message; False leaves it a plain str, for models without a chat template.
        skip_bad_rows: leave bad rows out, listed in .bad_rows, instead of raising.

    Raises: DataError that names file and line.
    """

    def parse(row: Row, where: str) -> Prompt:
        return _parse_rl_row(row, where, require_ground_truth, as_messages)

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

    def prepare(numbered: tuple[int, Row], where: str) -> Sample:
        index, row = numbered
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

    numbered = zip(examples.sources, enumerate(examples.rows), strict=True)
    loaded = _collect(numbered, prepare, skip_bad_rows, what="the examples")
    return LoadedRows(rows=loaded.rows, sources=loaded.sources, bad_rows=examples.bad_rows + loaded.bad_rows)


def mix_datasets(parts: Sequence[tuple[DatasetSpec, LoadedRows[T]]]) -> LoadedRows[T]:
    """Join data sets: the first max_samples rows of each, repeat times. The order of training is drawn later.

    Returns: sum over parts of repeat * min(size, max_samples) rows.
    """
    rows: list[T] = []
    sources: list[str] = []
    for spec, part in parts:
        rows.extend(part.rows[: spec.max_samples] * spec.repeat)
        sources.extend(part.sources[: spec.max_samples] * spec.repeat)
    return LoadedRows(rows=tuple(rows), sources=tuple(sources), bad_rows=tuple(bad for _, part in parts for bad in part.bad_rows))


def _parse_sft_row(row: Row, where: str) -> Row:
    if "messages" in row:
        messages = parse_messages(row["messages"], where)
        if not any(message.role == "assistant" for message in messages):
            raise DataError(f"{where}: no message has the role assistant, found {[m.role for m in messages]}: there is nothing to train on")
    elif "prompt" in row and "completion" in row:
        parse_prompt_content(row["prompt"], where)
        if not isinstance(row["completion"], str):
            parse_messages(row["completion"], where)
    elif "question" in row and "answer" in row:
        rest = {key: value for key, value in row.items() if key not in ("question", "answer")}
        turns = (("user", row["question"]), ("assistant", row["answer"]))
        messages = parse_messages([{"role": role, "content": content} for role, content in turns], where)
        return {"messages": [message.to_dict() for message in messages], **rest}
    else:
        raise DataError(
            f"{where}: the row has the fields {sorted(row)}, expected 'messages', or 'prompt' and 'completion', or 'question' and 'answer'"
        )
    return row


def _parse_rl_row(row: Row, where: str, require_ground_truth: bool, as_messages: bool) -> Prompt:
    key = next((key for key in ("prompt", "messages", "question") if key in row), None)
    if key is None:
        raise DataError(f"{where}: the row has the fields {sorted(row)}, expected 'prompt', 'messages' or 'question' among them")
    metadata = {name: value for name, value in row.items() if name != key}
    content = parse_prompt_content(row[key], where)
    if key == "question" and as_messages and isinstance(content, str):
        content = (Message(role="user", content=content),)
    if not isinstance(content, str) and content[-1].role == "assistant":
        raise DataError(f"{where}: the prompt ends with an assistant message, which would give the answer away: remove it")
    if metadata.get("ground_truth") is None and metadata.get("answer") is not None:
        metadata["ground_truth"] = _final_answer(metadata["answer"])
    if require_ground_truth and metadata.get("ground_truth") is None:
        raise DataError(
            f"{where}: the row has the fields {sorted(row)}, expected 'ground_truth' or 'answer' for the reward to compare with"
        )
    return Prompt(content=content, metadata=metadata)


def _final_answer(answer: Any) -> Any:
    if not isinstance(answer, str) or "####" not in answer:
        return answer
    return answer.rsplit("####", 1)[1].strip().replace(",", "")


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
    if spec.path.startswith(HUB_PREFIX):
        name = spec.path.removeprefix(HUB_PREFIX)
        return _load_hf(lambda hf: hf.load_dataset(name, spec.subset, split=spec.split or "train"), spec.path, parse, skip_bad_rows)
    path = Path(spec.path)
    if not path.exists():
        raise DataError(f"{path} does not exist: give a .jsonl or .parquet file, a folder, or {HUB_PREFIX}<name> for the hub")
    if path.is_dir():
        folder, split = path / (spec.subset or ""), spec.split or "train"
        if (folder / f"{split}.jsonl").exists():
            return _load_file(folder / f"{split}.jsonl", parse, skip_bad_rows)
        if (folder / f"{split}.parquet").exists():
            return _load_parquet(folder / f"{split}.parquet", parse, skip_bad_rows)
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            return _load_hf(lambda hf: _choose_split(hf.load_from_disk(str(folder)), spec, folder), str(folder), parse, skip_bad_rows)
        raise DataError(f"{folder} has no {split}.jsonl or {split}.parquet and is no folder of datasets' save_to_disk: name a file in it")
    if spec.split is not None or spec.subset is not None:
        raise DataError(f"{path} is a file; split {spec.split!r} and subset {spec.subset!r} are for folders: leave them out")
    return _load_parquet(path, parse, skip_bad_rows) if path.suffix == ".parquet" else _load_file(path, parse, skip_bad_rows)


def _load_parquet(path: Path, parse: Callable[[Row, str], T], skip_bad_rows: bool) -> LoadedRows[T]:
    try:
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _missing_package(path) from error
    try:
        rows = parquet.read_table(str(path)).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    return _collect(((f"{path}, row {i}", row) for i, row in enumerate(rows)), parse, skip_bad_rows, what=str(path))


def _choose_split(dataset: Any, spec: DatasetSpec, folder: Path) -> Any:
    if not isinstance(dataset, Mapping):
        return dataset
    splits = cast("Mapping[str, Any]", dataset)
    split = spec.split or "train"
    if split not in splits:
        raise DataError(f"{folder} has the splits {sorted(splits)}, but not {split!r}")
    return splits[split]


def _load_hf(load: Callable[[Any], Any], name: str, parse: Callable[[Row, str], T], skip_bad_rows: bool) -> LoadedRows[T]:
    hf = _import_datasets(name)
    try:
        dataset = load(hf)
    except (OSError, ValueError, hf.exceptions.DatasetsError) as error:
        raise DataError(f"{name} cannot be loaded: {error}") from error
    numbered = ((f"{name}, row {i}", dict(row)) for i, row in enumerate(dataset))
    return _collect(numbered, parse, skip_bad_rows, what=name)


def _import_datasets(name: str | Path) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _missing_package(name) from error
    return datasets


def _missing_package(name: str | Path) -> DataError:
    return DataError(
        f"{name} needs the package `datasets` (and pyarrow with it): pip install 'rollouts-rl[data]', or convert the data to JSONL"
    )


def _load_file(path: Path, parse: Callable[[Row, str], T], skip_bad_rows: bool) -> LoadedRows[T]:
    def parse_line(line: bytes, where: str) -> T:
        return parse(_parse_line(line, where), where)

    try:
        with path.open("rb") as file:
            return _collect(_number_lines(path, file), parse_line, skip_bad_rows, what=str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _number_lines(path: Path, lines: Iterator[bytes]) -> Iterator[tuple[str, bytes]]:
    for number, raw in enumerate(lines, start=1):
        line = (raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw).strip()
        if line:
            yield f"{path}, line {number}", line


def _collect(numbered: Iterator[tuple[str, U]], parse: Callable[[U, str], T], skip_bad_rows: bool, what: str) -> LoadedRows[T]:
    """Parse every row; a DataError ends it, or with skip_bad_rows is put on the list. Raises DataError if no row is left."""
    rows: list[T] = []
    sources: list[str] = []
    bad_rows: list[BadRow] = []
    for source, item in numbered:
        try:
            rows.append(parse(item, source))
            sources.append(source)
        except DataError as error:
            if not skip_bad_rows:
                raise
            bad_rows.append(BadRow(source=source, reason=str(error).removeprefix(f"{source}: ")))
    if not rows:
        left_out = f" ({len(bad_rows)} bad rows were left out, the first: {bad_rows[0].source}: {bad_rows[0].reason})" if bad_rows else ""
        raise DataError(f"{what}: the data set is empty, found 0 usable rows{left_out}")
    return LoadedRows(rows=tuple(rows), sources=tuple(sources), bad_rows=tuple(bad_rows))


def _parse_line(line: bytes, where: str) -> Row:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start} ({error.reason}): save the file as UTF-8") from error
    try:
        row = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=_unique_keys)
        if "\\u" in text:
            json.dumps(row, ensure_ascii=False).encode("utf-8")  # a lone surrogate such as \ud800 is no text
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: holds a lone surrogate ({error.object[error.start]!r}), which is not Unicode text") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}; it begins with {text[:60]!r}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}: {text[:60]!r}")
    return cast("Row", row)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:30]} is out of the range of a float")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> Row:
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return out
