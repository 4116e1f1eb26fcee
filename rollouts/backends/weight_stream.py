"""The weights of a model one after another, whole and on the CPU, whatever they are kept as: for exports, snapshots and transfers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from rollouts.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def stream_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each weight, in the order of the state dict, tied ones under each of their names.

    At most one whole tensor exists at a time besides those that the caller keeps. Of a sharded model each is gathered from all ranks, which
    must therefore iterate together.

    Yields: copies on the CPU.
    """
    for name, value in model.state_dict().items():
        yield name, whole_tensor(value)


def whole_tensor(value: Tensor) -> Tensor:
    """A copy on the CPU; of a DTensor gathered from all ranks, which must call together."""
    full = getattr(value.detach(), "full_tensor", None)
    if full is not None:
        return cast("Tensor", full()).to("cpu")
    return value.detach().to("cpu", copy=True)


def check_architecture(model: PreTrainedModel, directory: Path) -> None:
    """Raise CheckpointError if the directory's config.json is missing or of a model with other sizes."""
    try:
        found = cast("dict[str, Any]", json.loads((directory / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} has no readable config.json: it is not a model directory ({error})") from error
    expected = model.config.to_dict()
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    differing = [f"{n} is {found[n]!r}, expected {expected[n]!r}" for n in names if n in found and found[n] != expected.get(n)]
    if differing:
        raise CheckpointError(f"{directory} is a checkpoint of another architecture: {'; '.join(differing)}")
