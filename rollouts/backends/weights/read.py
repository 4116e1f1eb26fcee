"""Read the weights of a model one by one, whole and on the CPU, sharded or not: for exports, snapshots and transfers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch import Tensor

from rollouts.backends.lora.adapters import ADAPTER_NAME, adapted_weights, adapter_of, merge_weight
from rollouts.errors import CheckpointError
from rollouts.models.weights import base_weights, has_adapters
from rollouts.weight_specs import WeightSpec, describe_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Shape: TypeAlias = tuple[int, ...]
"""Shape of a whole tensor."""


def stream_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Iterate over (name, tensor) of each weight in the order of the state dict, tied ones under each of their names, adapters merged.

    At most one whole tensor exists at a time, besides tensors that the caller keeps. Weights of a sharded model are gathered from all
    ranks, so all ranks must iterate together.

    Yields: copies on the CPU.
    """
    layers = adapted_weights(model)
    for name, value in base_weights(model).items():
        yield name, whole_weight(value, layers.get(name))


def merge_adapters(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """Return the weights of a model with its adapters merged, on the CPU; None if it has no adapters."""
    return dict(stream_weights(model)) if has_adapters(model) else None


def whole_weight(value: Tensor, adapted_layer: Any | None, *, keep_device: bool = False) -> Tensor:
    """Return whole_tensor of a weight, with the adapter of its layer, if any, merged into it in float32."""
    whole = whole_tensor(value, keep_device=keep_device)
    if adapted_layer is None:
        return whole
    a, b = (whole_tensor(part, keep_device=keep_device) for part in adapter_of(adapted_layer))
    return merge_weight(whole, a, b, adapted_layer.scaling[ADAPTER_NAME])


def whole_tensor(value: Tensor, *, keep_device: bool = False) -> Tensor:
    """Copy a tensor to the CPU, or on its own device; a DTensor is gathered, so all ranks must call it together."""
    value = value.detach()
    full = getattr(value, "full_tensor", None)
    if full is None:
        return value.clone() if keep_device else value.to("cpu", copy=True)
    whole = cast("Tensor", full())
    whole = whole.clone() if _shares_memory(whole, value) else whole
    return whole if keep_device else whole.to("cpu")


def _shares_memory(whole: Tensor, value: Any) -> bool:
    """Whether gathering returned the shard itself, as it does if one rank has the whole tensor."""
    return whole.untyped_storage().data_ptr() == value.to_local().untyped_storage().data_ptr()


def first_names(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name of state_dict(keep_vars=True) to the first name of the same tensor; tied weights are one object there."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in weights.items()}


def local_part(value: Tensor) -> tuple[slice, ...]:
    """Return this process's part of the whole tensor: all of it, unless it is a DTensor."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = tuple(value.shape), (0,) * value.dim()
    if isinstance(value, DTensor):
        shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def check_architecture(model: PreTrainedModel, directory: Path) -> None:
    """Raise CheckpointError if the directory's config.json is missing or describes a model with other sizes."""
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


def describe_model_weights(model: PreTrainedModel) -> tuple[WeightSpec, ...]:
    """Return name, dtype and whole shape of each weight in the order of the state dict; tied ones once, by first name. Moves nothing."""
    own = base_weights(model, keep_vars=True)
    seen: set[int] = set()
    first = [(name, value) for name, value in own.items() if id(value) not in seen and not seen.add(id(value))]
    return tuple(describe_tensor(name, value) for name, value in first)


def gather_model_weights(model: PreTrainedModel, names: Sequence[str], *, keep_device: bool = False) -> dict[str, Tensor]:
    """Return whole copies of the weights with these names, in this order. All ranks of a sharded model call it with the same names.

    Args:
        keep_device: leave the copies on the model's device instead of the CPU.
    """
    own, layers = base_weights(model), adapted_weights(model)
    unknown = [name for name in names if name not in own]
    assert not unknown, f"the model has no weights {unknown[:3]}"
    return {name: whole_weight(own[name], layers.get(name), keep_device=keep_device) for name in names}
