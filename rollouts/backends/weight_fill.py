"""Give a model its weights, of which each rank takes what its shards need. Nothing is changed if they do not fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollouts.backends.weight_sources import WeightSource
from rollouts.backends.weight_stream import Shape, first_names, local_part
from rollouts.model_weights import base_weights, check_weights_fit


def fill_weights(model: torch.nn.Module, source: WeightSource, device: str | torch.device, what: str) -> None:
    """Give each weight of a model its part of a source; parameters on meta become new ones on the device.

    Args:
        what: the source in words, for errors.

    Raises: CheckpointError if names or shapes do not fit, before anything is changed.
    """
    check_shapes_fit(model, source.shapes, what)
    own = base_weights(model, keep_vars=True)
    tied = first_names(own)
    given: dict[str, str] = {}  # name in the source by the first name of a weight
    for name in source.shapes:
        given.setdefault(tied[name], name)
    made: dict[int, torch.nn.Parameter] = {}
    with torch.no_grad():
        for name, other in given.items():
            value = own[name]
            piece = source.read(other, local_part(value))
            if value.is_meta:
                made[id(value)] = _make_parameter(value, piece, torch.device(device))
            else:
                local = value.detach()
                (local.to_local() if isinstance(local, DTensor) else local).copy_(piece)
    _replace_parameters(model, made)


def check_shapes_fit(model: torch.nn.Module, shapes: Mapping[str, Shape], what: str) -> None:
    """check_weights_fit for whole tensors of these shapes."""
    check_weights_fit(model, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, what)


def _make_parameter(old: Tensor, piece: Tensor, device: torch.device) -> torch.nn.Parameter:
    """A parameter like one on meta with its values; of a DTensor the piece is this rank's shard."""
    value = torch.empty_like(old.detach(), device=device)
    (value.to_local() if isinstance(value, DTensor) else value).copy_(piece)
    return torch.nn.Parameter(value, requires_grad=old.requires_grad)


def _replace_parameters(model: torch.nn.Module, made: Mapping[int, torch.nn.Parameter]) -> None:
    """Put new parameters at every place where the old ones are, so that tied ones stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in made:
                setattr(module, name, made[id(parameter)])
