"""The weights of a model one after another, whole and on the CPU, whatever they are kept as: for exports, snapshots and transfers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch import Tensor

from rollouts.backends.lora import ADAPTER_NAME, adapted_weights, adapter_of, merge_weight
from rollouts.errors import CheckpointError
from rollouts.model_weights import base_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shape: TypeAlias = tuple[int, ...]
"""Of a whole tensor."""


def stream_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each weight, in the order of the state dict, tied ones under each of their names; adapters are merged into theirs.

    At most one whole tensor exists at a time besides those that the caller keeps. Of a sharded model each is gathered from all ranks, which
    must therefore iterate together.

    Yields: copies on the CPU.
    """
    layers = adapted_weights(model)
    for name, value in base_weights(model).items():
        yield name, whole_weight(value, layers.get(name))


def whole_weight(value: Tensor, adapted_layer: Any | None, *, keep_device: bool = False) -> Tensor:
    """whole_tensor of a weight, with the adapter of its layer merged into it (in float32) if it has one."""
    whole = whole_tensor(value, keep_device=keep_device)
    if adapted_layer is None:
        return whole
    a, b = (whole_tensor(part, keep_device=keep_device) for part in adapter_of(adapted_layer))
    return merge_weight(whole, a, b, adapted_layer.scaling[ADAPTER_NAME])


def whole_tensor(value: Tensor, *, keep_device: bool = False) -> Tensor:
    """A copy on the CPU, or where the tensor is; of a DTensor gathered from all ranks, which must call together."""
    value = value.detach()
    full = getattr(value, "full_tensor", None)
    if full is None:
        return value.clone() if keep_device else value.to("cpu", copy=True)
    whole = cast("Tensor", full())
    whole = whole.clone() if _shares_memory(whole, value) else whole
    return whole if keep_device else whole.to("cpu")


def _shares_memory(whole: Tensor, value: Any) -> bool:
    """Whether gathering gave the shard itself, as it does where one rank has all of it."""
    return whole.untyped_storage().data_ptr() == value.to_local().untyped_storage().data_ptr()


def first_names(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """The first name of the same tensor for each name of state_dict(keep_vars=True), in which tied weights are one object."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in weights.items()}


def local_part(value: Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this process holds: all of it, except of a DTensor."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = tuple(value.shape), (0,) * value.dim()
    if isinstance(value, DTensor):
        shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


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
        raise CheckpointError(
            f"{directory} is a checkpoint of another architecture: {'; '.join(differing)}. Go on with the model of the run that wrote it"
        )
