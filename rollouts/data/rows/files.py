"""Files of rows: JSONL, JSON, CSV, Parquet, folders with them, and data sets of the Hugging Face hub; read whole, or row by row.

A row that is read by itself is found by the place of its line in a JSONL file, by its row group in a Parquet file, and by the memory map
of a data set of Hugging Face. Only these places are in memory: 12 bytes for each row of JSONL.
"""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np

from rollouts.checks import check_encodable, parse_json, refuse_repeats
from rollouts.data.rows.hub import HUB_PREFIX, load_from_hub, parse_hub_name
from rollouts.data.rows.loaded import LazyRows, LoadedRows
from rollouts.errors import DataError

Row: TypeAlias = dict[str, Any]
READABLE = "a .jsonl, .json, .csv or .parquet file, a folder with one of these for each split, or hf://ORG/NAME for the hub"
_NESTED = ("messages", "conversations", "prompt", "completion", "chosen", "rejected", "tools")  # columns that may hold JSON in a CSV file
_SUFFIXES = (".jsonl", ".parquet", ".json", ".csv")


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """Items of a file, each with its place, and the function that makes a row of one. `index` finds items without keeping them."""

    name: str  # for messages
    items: Callable[[], Iterator[tuple[str, Any]]]  # (place, item)
    index: Callable[[], LoadedRows[Any]]  # lazy; raises DataError for a file that is only read whole
    decode: Callable[[Any, str], Row] = field(default=lambda item, where: item)  # (item, place) -> row


def find_rows(path: str, *, split: str | None = None, subset: str | None = None) -> RowFile:
    """Find the rows that a path names.

    Args:
        path: a file, a folder, or the name of a data set of the hub.
        split: split of a folder or a data set of the hub; None = "train".
        subset: folder in the folder, or configuration of the data set of the hub.

    Raises: DataError for a path that does not exist or cannot be read, or a missing package.
    """
    if path.startswith(HUB_PREFIX):
        hub = parse_hub_name(path)
        return _of_dataset(path, partial(load_from_hub, hub, subset or hub.subset, split or hub.split or "train", path))
    file = Path(path)
    if not file.exists():
        raise DataError(f"{_describe_missing(path)}: give {READABLE}")
    if not file.is_dir():
        if split is not None or subset is not None:
            raise DataError(f"{file} is a file; split {split!r} and subset {subset!r} are for folders: leave them out")
        return _of_file(file)
    folder, split = file / (subset or ""), split or "train"
    found = _find_split(folder, split)
    if found is not None:
        return _of_file(found)
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return _of_dataset(str(folder), lambda hf: _choose_split(hf.load_from_disk(str(folder)), split, folder))
    raise DataError(f"{folder} has no {split}.jsonl, .json, .csv or .parquet and is no folder of datasets' save_to_disk: name a file in it")


def list_row_files(path: Path, *, split: str | None = None, subset: str | None = None) -> list[Path]:
    """List the files that find_rows reads for a path, which is not the name of a data set of the hub; [] where it finds none."""
    if not path.is_dir():
        return [path]
    folder, split = path / (subset or ""), split or "train"
    found = _find_split(folder, split)
    if found is not None:
        return [found]
    saved = folder / split if (folder / "dataset_dict.json").exists() else folder
    return sorted(file for file in saved.glob("*") if file.suffix == ".arrow" or file.name in ("state.json", "dataset_info.json"))


def _find_split(folder: Path, split: str) -> Path | None:
    """Find the file of rows of a split; None without one."""
    return next((file for suffix in _SUFFIXES if (file := folder / f"{split}{suffix}").is_file()), None)


def check_exists(path: str | Path | None, setting: str) -> None:
    """Raise DataError that names the setting for a file of rows that does not exist; None and data sets of the hub pass."""
    if path is not None and not str(path).startswith(HUB_PREFIX) and not Path(path).exists():
        raise DataError(f"{_describe_missing(str(path))}: give {setting} {READABLE}")


def _describe_missing(path: str) -> str:
    """Describe a path at which there is nothing, with what the user may have meant."""
    if "://" in path:
        return f"{path} is an address, from which no rows are read; download the file first"
    if Path(path).is_symlink():
        return f"{path} is a link to {Path(path).readlink()}, at which no file is found"
    if path.startswith("~"):
        return f"{path} does not exist, as ~ stands for the home directory in a shell only; write the whole path"
    if any(sign in path for sign in "*?,"):
        return f"{path} does not exist: it is read as the name of one file, and several are a mixture (--data.mixture FILE FILE)"
    return f"{path} does not exist"


def _of_file(path: Path) -> RowFile:
    name = str(path)
    if path.suffix == ".parquet":
        return RowFile(name=name, items=partial(_read_parquet, path), index=partial(_index_parquet, path))
    if path.suffix == ".csv":
        return RowFile(name=name, items=partial(_read_csv, path), index=partial(_refuse_index, path, "CSV"))
    if path.suffix == ".json":
        return RowFile(name=name, items=partial(_read_json, path), index=partial(_refuse_index, path, "JSON"), decode=_take_object)
    return RowFile(name=name, items=partial(_read_lines, path), index=partial(_index_lines, path), decode=parse_line)


def _refuse_index(path: Path, kind: str) -> NoReturn:
    raise DataError(f"{path}: a {kind} file is read whole and cannot be streamed (--data.streaming): convert it to JSONL or Parquet")


# -- JSONL


def _read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = _strip(raw, number)
                if line:
                    yield f"{path}, line {number}", line
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _strip(raw: bytes, number: int) -> bytes:
    return (raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw).strip()


def _index_lines(path: Path) -> LoadedRows[bytes]:
    """Find the lines of a file that are not blank."""
    starts, lines, at = array("q"), array("i"), 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if _strip(raw, number):
                    starts.append(at)
                    lines.append(number)
                at += len(raw)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error

    def read(i: int) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(starts[i])
                return _strip(file.readline(), lines[i])
        except OSError as error:
            raise DataError(f"{path}, line {lines[i]} cannot be read again: {error.strerror or error}") from error

    return LoadedRows(rows=LazyRows(len(starts), read), sources=LazyRows(len(starts), lambda i: f"{path}, line {lines[i]}"))


def parse_line(line: bytes, where: str) -> Row:
    """Parse a line of JSONL.

    Raises: DataError for a line that is not UTF-8, not JSON (NaN and Infinity are not), no object, or has a key twice or text that is not
        Unicode (a lone surrogate).
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {_name_format(line, where) or _describe_bytes(error)}") from error
    try:
        row = _parse_json(text)
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: holds a lone surrogate ({error.object[error.start]!r}), which is not Unicode text") from error
    except ValueError as error:
        found = _name_format(line, where) or f"not JSON: {_explain_json(error)}; it begins with {text[:60]!r}{_advise(text, error)}"
        raise DataError(f"{where}: {found}") from error
    return _take_object(row, where)


_FORMATS = (
    (b"\x1f\x8b", "compressed by gzip: unpack the file first (gunzip)"),
    (b"BZh", "compressed by bzip2: unpack the file first (bunzip2)"),
    (b"\xfd7zXZ", "compressed by xz: unpack the file first (unxz)"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack the file first (unzstd)"),
    (b"PK\x03\x04", "a ZIP archive or a workbook of Excel: unpack it, or export the sheet as CSV"),
    (b"PAR1", "Parquet: give the file a name that ends in .parquet"),
    (b"ARROW1", "Arrow: load its folder with datasets, and save it as Parquet"),
    (b"SQLite format", "an SQLite database: export the table as CSV"),
    (b"\xff\xfe", "in UTF-16: save the file as UTF-8"),
    (b"\xfe\xff", "in UTF-16: save the file as UTF-8"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself: run `git lfs pull` where it was cloned"),
    (b"<!DOCTYPE", "a web page: the download gave the page about the file, so take the link to the file itself"),
    (b"<html", "a web page: the download gave the page about the file, so take the link to the file itself"),
    (b"\x00\x00\x00\x00", "bytes of zeros: the file was not written whole, so write or download it again"),
)
"""First bytes of files of other formats, with the format and what to do."""


def _name_format(start: bytes, where: str = "line 1") -> str | None:
    """Return what a file is, and what to do, by its first bytes; None for what may be text, and for later lines."""
    if not where.endswith("line 1"):
        return None
    return next((f"the file is {found}" for magic, found in _FORMATS if start.startswith(magic)), None)


def _describe_bytes(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 at byte {error.start} ({error.reason}): save the file as UTF-8"


def _explain_json(error: Exception) -> str:
    """Return what is wrong with JSON, without the words of Python's functions."""
    if "integer string conversion" in str(error):
        return "a whole number has more than 4,300 digits, so write it as a text"
    return str(error)


def _advise(text: str, error: Exception | None = None) -> str:
    """Return advice for a line that is no row."""
    if text.lstrip()[:1] == "[" or text.strip() == "{":  # one JSON value over many lines, or a list of rows
        return ". Each line is one row; a file that is one list of rows is read under a name that ends in .json"
    if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
        ends = "lines end with a carriage return alone: save the file with Unix or Windows line ends" if "\r" in text else "put it there"
        return f". Each row has a line of its own; {ends}"
    if isinstance(error, json.JSONDecodeError):
        return '. Each line is one row as a JSON object, such as {"question": "1+1=", "answer": "2"}, with double quotes'
    return ""


def _take_object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        text = json.dumps(row)
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}: {text[:60]!r}{_advise(text)}")
    return cast("Row", row)


def _parse_json(text: str) -> Any:
    value = parse_json(text, parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=refuse_repeats)
    if "\\u" in text:
        check_encodable(value)  # a lone surrogate such as \ud800 is no text
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number, so write null or a text")


def _finite_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:30]} is out of the range of a float")
    return value


# -- JSON and CSV, which are read whole


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """Read a list of objects, or an object with one list ("data", as exports have it); a file of JSON lines is read as such."""
    try:
        value = _parse_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            found, near = _name_format(error.doc[:40].encode()), error.doc[max(0, error.pos - 30) : error.pos + 10]
            raise DataError(
                f"{path}, line {error.lineno}: not JSON: {error.msg} at column {error.colno}, near {near!r}: mend the file "
                "there, or write it again with a JSON library. It is a list of objects, one for each row"
                if found is None
                else f"{path}: {found}"
            ) from error
        yield from ((where, parse_line(line, where)) for where, line in _read_lines(path))
        return
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {_name_format(error.object) or _describe_bytes(error)}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {_explain_json(error)}") from error
    if isinstance(value, dict):
        lists = [item for item in cast("Row", value).values() if isinstance(item, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise DataError(
            f"{path}: found a JSON {type(value).__name__}, expected a list of objects, one for each row, or one object on each line"
        )
    for i, row in enumerate(cast("list[Any]", value)):
        yield f"{path}, row {i}", row


def _read_csv(path: Path) -> Iterator[tuple[str, Row]]:
    """Read rows of texts; lists and objects are JSON in their cell. An empty cell counts as a missing value."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice or not all(header):
                raise DataError(f"{path}, line 1: the header is {header}, expected a name for each column, each once")
            before = reader.line_num
            for cells in reader:
                where, before = f"{path}, line {before + 1}", reader.line_num
                if len(cells) != len(header) and cells:
                    raise DataError(
                        f"{where}: {len(cells)} cells for the {len(header)} columns {', '.join(header)}: quote cells with commas"
                    )
                if cells:
                    yield where, {name: _read_cell(name, cell) for name, cell in zip(header, cells, strict=True) if cell}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {_name_format(error.object) or _describe_bytes(error)}") from error
    except csv.Error as error:
        raise DataError(f"{path}: not CSV: {error}; convert it to JSONL") from error


def _read_cell(name: str, cell: str) -> Any:
    if name in _NESTED and cell[:1] in "[{":
        try:
            return _parse_json(cell)
        except ValueError:
            return cell  # a text that begins like JSON
    return cell


# -- Parquet


def _open_parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _missing_package(path) from error
    try:
        return parquet.ParquetFile(str(path))
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(_describe_damage(path, error)) from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    file, at = _open_parquet(path), 0
    for group in range(file.num_row_groups):
        for row in _read_row_group(file, path, group).to_pylist():
            yield f"{path}, row {at}", row
            at += 1


def _read_row_group(file: Any, path: Path, group: int) -> Any:
    try:
        return file.read_row_group(group)
    except (OSError, ValueError) as error:
        raise DataError(_describe_damage(path, error)) from error


def _describe_damage(path: Path, error: Exception) -> str:
    """Describe a file that is no whole Parquet file."""
    with path.open("rb") as file:
        start = file.read(16)
    other = None if start.startswith(b"PAR1") else _name_format(start)
    damaged = f"{str(error).rstrip('.')}: the file is damaged or another format, so write or download it again"
    return f"{path} cannot be read as Parquet: {other or damaged}"


def _index_parquet(path: Path) -> LoadedRows[Row]:
    """Find the rows in their row groups, of which the last four that were read stay in memory."""
    file = _open_parquet(path)
    ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)])
    size = int(ends[-1]) if len(ends) else 0
    load = lru_cache(maxsize=4)(partial(_read_row_group, file, path))

    def read(i: int) -> Row:
        group = int(np.searchsorted(ends, i, side="right"))
        return load(group).slice(i - (int(ends[group - 1]) if group else 0), 1).to_pylist()[0]

    return LoadedRows(rows=LazyRows(size, read), sources=LazyRows(size, lambda i: f"{path}, row {i}"))


# -- data sets of Hugging Face


def _of_dataset(name: str, load: Callable[[Any], Any]) -> RowFile:
    def open_dataset() -> Any:
        hf = _import_datasets(name)
        try:
            return load(hf)
        except DataError:
            raise
        except (OSError, ValueError, hf.exceptions.DatasetsError) as error:
            raise DataError(f"{name} cannot be loaded: {error}") from error

    def items() -> Iterator[tuple[str, Row]]:
        return ((f"{name}, row {i}", dict(row)) for i, row in enumerate(open_dataset()))

    def index() -> LoadedRows[Row]:
        dataset = open_dataset()
        rows: LazyRows[Row] = LazyRows(len(dataset), lambda i: dict(dataset[i]))
        return LoadedRows(rows=rows, sources=LazyRows(len(dataset), lambda i: f"{name}, row {i}"))

    return RowFile(name=name, items=items, index=index)


def _choose_split(dataset: Any, split: str, folder: Path) -> Any:
    if not isinstance(dataset, Mapping):
        return dataset
    splits = cast("Mapping[str, Any]", dataset)
    if split not in splits:
        raise DataError(f"{folder} has the splits {sorted(splits)}, but not {split!r}")
    return splits[split]


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
