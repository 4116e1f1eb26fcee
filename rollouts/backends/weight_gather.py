"""Some of a model's weights at a time, by name: what a transfer to engines asks a backend for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from rollouts.weight_plan import WeightSpec, describe_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def describe_model_weights(model: PreTrainedModel) -> tuple[WeightSpec, ...]:
    """Name, dtype and whole shape of each weight, in the order of the state dict; tied ones once, under their first name. Moves nothing."""
    own = cast("dict[str, Tensor]", cast("Any", model).state_dict(keep_vars=True))
    seen: set[int] = set()
    first = [(name, value) for name, value in own.items() if id(value) not in seen and not seen.add(id(value))]
    return tuple(describe_tensor(name, value) for name, value in first)


def gather_model_weights(model: PreTrainedModel, names: Sequence[str], *, keep_device: bool = False) -> dict[str, Tensor]:
    """Whole copies of the weights of these names, in this order. Of a sharded model all ranks call together, with the same names.

    Args:
        keep_device: leave them on the model's device instead of the CPU.
    """
    own = model.state_dict()
    unknown = [name for name in names if name not in own]
    assert not unknown, f"the model has no weights {unknown[:3]}"
    return {name: _copy_whole(own[name], keep_device=keep_device) for name in names}


def _copy_whole(value: Tensor, *, keep_device: bool) -> Tensor:
    value = value.detach()
    if not hasattr(value, "full_tensor"):
        return value.clone() if keep_device else value.to("cpu", copy=True)
    sharded = cast("Any", value)
    whole, part = cast("Tensor", sharded.full_tensor()), cast("Tensor", sharded.to_local())
    if whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr():  # of one rank: later steps would change it
        whole = whole.clone()
    return whole if keep_device else whole.to("cpu")
