"""--data.mixture: the data sets of SFT, each an expression of its path and the share to use.

train.jsonl                                 all rows, once in an epoch
math.jsonl(repeat=2)                        each row twice in an epoch
folder(max_samples=1000, split='test')      the first 1,000 rows of folder/test.jsonl
hf://name(subset='main', split='train')     a data set of the Hugging Face hub
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration.expressions.algorithm import Language, parse_expression
from rollouts.data.datasets import HUB_PREFIX, DatasetSpec, load_sft_conversations
from rollouts.errors import ConfigError

_PARTS = re.compile(r"(?P<path>.*?)(?:\((?P<arguments>[^()]*)\))?", re.DOTALL)


def _dataset(*, repeat: int = 1, max_samples: int | None = None, split: str | None = None, subset: str | None = None) -> dict[str, Any]:
    """The signature of the parentheses: the fields of a DatasetSpec after its path."""
    return {"repeat": repeat, "max_samples": max_samples, "split": split, "subset": subset}


def _refuse(reference: str) -> Any:
    raise ConfigError(f"found {reference}, expected arguments of a data set, such as repeat=2")


_LANGUAGE = Language("data set", {"dataset": _dataset}, _refuse, example="train.jsonl(repeat=2, max_samples=1000)")


def parse_mixture(expressions: Sequence[str]) -> tuple[DatasetSpec, ...]:
    """Parse expressions to data sets, in their order. Raises ConfigError with the expression that fails."""
    return tuple(_parse_dataset(expression) for expression in expressions)


def _parse_dataset(expression: str) -> DatasetSpec:
    match = _PARTS.fullmatch(expression.strip())
    assert match is not None, f"{expression!r}: every text has a path and perhaps arguments"
    try:
        call = parse_expression(f"dataset({match['arguments'] or ''})", _LANGUAGE)
        return DatasetSpec(path=match["path"].strip(), **_dataset(**call.arguments))
    except ConfigError as error:
        raise ConfigError(f"data.mixture {expression!r}: {error}") from error


def check_mixture(expressions: Sequence[str]) -> None:
    """Raise ConfigError for a file or folder that does not exist, before anything is written."""
    for expression, spec in zip(expressions, parse_mixture(expressions), strict=True):
        if not spec.path.startswith(HUB_PREFIX) and not Path(spec.path).exists():
            raise ConfigError(
                f"data.mixture {expression!r}: {spec.path} does not exist: give a .jsonl or .parquet file, a folder, or {HUB_PREFIX}<name>"
            )


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
