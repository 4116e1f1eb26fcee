"""--data.mixture: the data sets of a mixture, each an expression of its path and the share to use; --data.columns: their renamed columns.

train.jsonl                                 all rows, once in an epoch
math.jsonl(repeat=2)                        each row twice in an epoch
math.jsonl(weight=0.3)                      so many rows that they are 0.3 of the sum of the weights
math.jsonl(columns='prompt=question')       with the column question as the prompt
folder(max_samples=1000, split='test')      the first 1,000 rows of folder/test.jsonl
hf://name(subset='main', split='train')     a data set of the Hugging Face hub
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration.expressions.algorithm import Language, parse_expression
from integration.settings.paths import split_data_set
from rollouts.data.datasets import DatasetSpec, load_sft_conversations
from rollouts.data.rows.files import READABLE
from rollouts.data.rows.formats import Columns
from rollouts.data.rows.hub import HUB_PREFIX
from rollouts.errors import ConfigError


def _dataset(
    *,
    repeat: int = 1,
    max_samples: int | None = None,
    split: str | None = None,
    subset: str | None = None,
    weight: float | None = None,
    columns: str = "",
) -> dict[str, Any]:
    """The signature of the parentheses: the fields of a DatasetSpec after its path."""
    renamed = parse_columns([columns] if columns else [])
    return {"repeat": repeat, "max_samples": max_samples, "split": split, "subset": subset, "weight": weight, "columns": renamed}


def parse_columns(words: Sequence[str]) -> Columns:
    """Parse NEW=COLUMN words, each also several of them with commas. Raises ConfigError with the word that is none, or a name twice."""
    pairs: dict[str, str] = {}
    for word in ",".join(words).split(","):
        new, equals, old = (part.strip() for part in word.partition("="))
        if not (new and equals and old):
            if word.strip():
                raise ConfigError(f"data.columns has {word.strip()!r}, expected NEW=COLUMN, such as prompt=question,answer=label")
            continue
        if new in pairs:
            raise ConfigError(f"data.columns reads {new!r} from {pairs[new]!r} and from {old!r}: give one column")
        pairs[new] = old
    return tuple(pairs.items())


def _refuse(reference: str) -> Any:
    raise ConfigError(f"found {reference}, expected arguments of a data set, such as repeat=2")


_LANGUAGE = Language("data set", {"dataset": _dataset}, _refuse, example="train.jsonl(repeat=2, max_samples=1000)")


def parse_mixture(expressions: Sequence[str]) -> tuple[DatasetSpec, ...]:
    """Parse expressions to data sets, in their order. Raises ConfigError with the expression that fails."""
    return tuple(_parse_dataset(expression) for expression in expressions)


def _parse_dataset(expression: str) -> DatasetSpec:
    path, arguments = split_data_set(expression)
    try:
        call = parse_expression(f"dataset{arguments or '()'}", _LANGUAGE)
        return DatasetSpec(path=path, **_dataset(**call.arguments))
    except ConfigError as error:
        raise ConfigError(f"data.mixture {expression!r}: {error}") from error


def check_mixture(expressions: Sequence[str]) -> None:
    """Raise ConfigError for a file or folder that does not exist, before anything is written."""
    for expression, spec in zip(expressions, parse_mixture(expressions), strict=True):
        if not spec.path.startswith(HUB_PREFIX) and not Path(spec.path).exists():
            raise ConfigError(f"data.mixture {expression!r}: {spec.path} does not exist: give {READABLE}")


def describe_mixture(expressions: Sequence[str], *, skip_bad_rows: bool = False) -> dict[str, str]:
    """Describe an epoch of SFT, for a dry run. Reads all data except that of the hub.

    Raises: DataError, as the run would.
    """
    facts: dict[str, str] = {}
    total, uncounted = 0, ""
    for number, spec in enumerate(parse_mixture(expressions), start=1):
        name = f"SFT data set {number}"
        if spec.path.startswith(HUB_PREFIX):
            facts[name] = f"{spec.path}, times {spec.repeat}: not counted, as it is on the hub"
            uncounted = ", and those of the hub"
            continue
        rows = len(load_sft_conversations(spec, skip_bad_rows=skip_bad_rows))
        facts[name] = f"{spec.path}: {rows:,} rows, {spec.repeat} x {rows // spec.repeat:,}"
        total += rows
    return facts | {"SFT rows of an epoch": f"{total:,}{uncounted}"}
