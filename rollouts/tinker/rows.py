"""Data of the client as rows of a batch.

A datum has N input tokens and N targets, target i the token to predict behind input i. Its row has N + 1 tokens, the inputs and the last
target, so that position i + 1 of the row is about target i, as everywhere in this library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollouts.data.model_limits import ModelLimits
from rollouts.errors import DataError
from rollouts.tinker.losses import NamedLoss
from rollouts.tinker.wire.messages import Array, Datum
from rollouts.types import TrainBatch

TARGETS = "target_tokens"

_COLUMNS: Mapping[str, str] = MappingProxyType({
    "weights": "loss_weights",
    "advantages": "advantages",
    "logprobs": "old_log_probs",
    "sequence_ratio_mask": "selected",
})  # fmt: skip
"""Columns of a batch by the names of arrays."""


def check_data(data: Sequence[Datum], name: str, loss: NamedLoss, limits: ModelLimits) -> None:
    """Raise DataError, which names the datum and its array, for data that the loss or the model cannot take."""
    if not data:
        raise DataError("data is empty, expected at least one datum")
    for k, datum in enumerate(data):
        place = f"data[{k}]"
        wanted = (TARGETS, *loss.inputs)
        missing = [key for key in wanted if key not in datum.inputs]
        unknown = [key for key in datum.inputs if key not in wanted]
        if missing or unknown:
            wrong = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}"
            raise DataError(f"{place}.loss_fn_inputs {wrong}: the loss {name!r} takes {', '.join(wanted)}")
        for key in wanted:
            _check_array(datum.inputs[key], len(datum.tokens), f"{place}.loss_fn_inputs[{key!r}]", whole=key == TARGETS)
        if "sequence_ratio_mask" in wanted and not np.any(datum.inputs["sequence_ratio_mask"]):
            raise DataError(f"{place}.loss_fn_inputs['sequence_ratio_mask'] marks no position: the ratio is a mean over the marked ones")
        every = np.concatenate([datum.tokens, datum.inputs[TARGETS]])
        why = limits.explain(len(datum.tokens) + 1, int(every.min()), int(every.max()))
        if why is not None:
            raise DataError(f"{place}, with its last target, {why}")


def collate_data(data: Sequence[Datum], loss: NamedLoss) -> TrainBatch:
    """Make a batch of data that check_data has accepted. Rows are recorded under their numbers from 0 on."""
    lengths = torch.tensor([len(datum.tokens) + 1 for datum in data])
    width = int(lengths.max())
    tokens = _pad([np.append(datum.tokens, datum.inputs[TARGETS][-1]) for datum in data], width, np.int64)
    targets = _pad([np.append(datum.tokens[:1], datum.inputs[TARGETS]) for datum in data], width, np.int64)
    mask = torch.arange(width) < lengths[:, None]
    mask[:, 0] = False
    columns: dict[str, Any] = {}
    for name in loss.inputs:
        column = _pad([np.append(np.zeros(1, dtype=np.float32), datum.inputs[name]) for datum in data], width, np.float32)
        columns[_COLUMNS[name]] = column != 0 if name == "sequence_ratio_mask" else column
    rows = len(data)
    return TrainBatch(
        tokens=tokens,
        lengths=lengths,
        loss_mask=mask.float(),
        rewards=torch.zeros(rows),
        group_ids=torch.arange(rows),
        trainable=torch.ones(rows, dtype=torch.bool),
        targets=None if torch.equal(tokens[mask], targets[mask]) else targets,
        dropout=False,
        recorded=torch.arange(rows),
        **columns,
    )


def split_data(data: Sequence[Datum], max_tokens: int) -> list[Sequence[Datum]]:
    """Split data, in order, into parts of at most so many tokens of padded rows, or of one datum each if that has more."""
    parts: list[Sequence[Datum]] = []
    begin, longest = 0, 0
    for k, datum in enumerate(data):
        longest = max(longest, len(datum.tokens) + 1)
        if k > begin and longest * (k + 1 - begin) > max_tokens:
            parts.append(data[begin:k])
            begin, longest = k, len(datum.tokens) + 1
    return [*parts, data[begin:]]


def split_log_probs(column: Tensor, data: Sequence[Datum]) -> list[NDArray[np.float32]]:
    """Return the log-probs of the targets of each datum, out of a column [B, T] of its row."""
    return [column[row, 1 : len(datum.tokens) + 1].float().numpy() for row, datum in enumerate(data)]


def _check_array(array: Array, length: int, place: str, *, whole: bool) -> None:
    if array.ndim != 1 or len(array) != length:
        several = ": this server takes one target for each position" if array.ndim == 2 else ""
        raise DataError(f"{place} has the shape {list(array.shape)}, expected [{length}], a number for each input token{several}")
    if length == 0:
        raise DataError(f"{place.partition('.')[0]}.model_input has no tokens, expected at least one")
    if whole and array.dtype.kind != "i":
        raise DataError(f"{place} has the dtype {array.dtype}, expected int64")
    if not np.isfinite(array).all():
        bad = int(np.flatnonzero(~np.isfinite(array))[0])
        raise DataError(f"{place}[{bad}] is {array[bad]}, expected finite numbers")


def _pad(rows: Sequence[NDArray[Any]], width: int, dtype: type) -> Tensor:
    padded = np.zeros((len(rows), width), dtype=dtype)
    for k, row in enumerate(rows):
        padded[k, : len(row)] = row
    return torch.from_numpy(padded)
