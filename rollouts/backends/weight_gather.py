"""Some of a model's weights at a time, by name: what a transfer to engines asks a backend for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from rollouts.backends.lora import adapted_weights
from rollouts.backends.weight_stream import whole_weight
from rollouts.model_weights import base_weights
from rollouts.weight_plan import WeightSpec, describe_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def describe_model_weights(model: PreTrainedModel) -> tuple[WeightSpec, ...]:
    """Name, dtype and whole shape of each weight, in the order of the state dict; tied ones once, under their first name. Moves nothing."""
    own = base_weights(model, keep_vars=True)
    seen: set[int] = set()
    first = [(name, value) for name, value in own.items() if id(value) not in seen and not seen.add(id(value))]
    return tuple(describe_tensor(name, value) for name, value in first)


def gather_model_weights(model: PreTrainedModel, names: Sequence[str], *, keep_device: bool = False) -> dict[str, Tensor]:
    """Whole copies of the weights of these names, in this order. Of a sharded model all ranks call together, with the same names.

    Args:
        keep_device: leave them on the model's device instead of the CPU.
    """
    own, layers = base_weights(model), adapted_weights(model)
    unknown = [name for name in names if name not in own]
    assert not unknown, f"the model has no weights {unknown[:3]}"
    return {name: whole_weight(own[name], layers.get(name), keep_device=keep_device) for name in names}
