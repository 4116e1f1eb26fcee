"""Hugging Face model with parameters sharded over the ranks of a device mesh, by PyTorch's fully_shard.

Decoder layers are gathered one after another while they compute. The root's parameters (embeddings, final norm, output layer) stay
gathered during a call of call_gathered. Gradients are SUMS over ranks, since a loss is a weighted sum over the tokens of the whole
optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.errors import ConfigError
from rollouts.models.forward.output_layers import get_decoder
from rollouts.models.prepare import recompute_activations

if TYPE_CHECKING:
    from transformers import PreTrainedModel


T = TypeVar("T")

_CALL = "rollouts_call"  # name of the method that runs a function while the root's parameters are gathered


def create_mesh(config: FSDPConfig, device: torch.device, world_size: int) -> DeviceMesh:
    """Arrange the ranks for the sharding strategy: (shard) or (replicate, shard). All ranks must call it.

    Raises: ConfigError if the number of ranks does not fit.
    """
    shape = config.find_mesh_shape(world_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def shard_model(model: PreTrainedModel, mesh: DeviceMesh, config: FSDPConfig) -> PreTrainedModel:
    """Shard a model in place: decoder layers as units, then the rest. Its parameters are DTensors afterwards.

    Make the optimizer afterwards: earlier parameters are no longer the model's.

    Args:
        model: float32, on the device of the mesh, or on meta and materialized afterwards (to_empty).
        mesh: result of create_mesh.

    Raises: ConfigError if the model or device does not support the config.
    """
    if config.gradient_checkpointing:
        recompute_activations(model)
    offload = _offload_policy(config, mesh)
    keep = config.sharding_strategy == "shard_grad_op"
    layer_dtypes = MixedPrecisionPolicy()
    if config.mixed_precision is not None:
        # the residual stream stays float32 and products run in bfloat16 (autocast), as in one process; so no inputs are cast
        layer_dtypes = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    units = find_units(model, config.auto_wrap_min_params)
    _check_disjoint(model, units)
    for unit in units:
        # the list form: one gather for all of them
        fully_shard(cast("Any", unit), mesh=mesh, reshard_after_forward=not keep, mp_policy=layer_dtypes, offload_policy=offload)
    root = cast("nn.Module", model)
    fully_shard(root, mesh=mesh, reshard_after_forward=False, offload_policy=offload)  # needed again at once
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction with a factor
        if hasattr(module, "set_reduce_scatter_unused_params"):
            # a parameter unused by this rank's rows must not shorten its message relative to the other ranks
            module.set_reduce_scatter_unused_params(True, recurse=False)
    setattr(root, _CALL, _call)
    register_fsdp_forward_method(root, _CALL)
    return model


def is_sharded(model: PreTrainedModel) -> bool:
    """Return whether shard_model was applied."""
    return isinstance(model, FSDPModule)


def sharded_modules(model: PreTrainedModel) -> Iterator[FSDPModule]:
    """Return the root and the units below it."""
    return (module for module in cast("nn.Module", model).modules() if isinstance(module, FSDPModule))


def _check_disjoint(model: PreTrainedModel, units: Sequence[Sequence[nn.Module]]) -> None:
    """Raise ConfigError if two units share a parameter: each would gather and update it."""
    root = cast("nn.Module", model)
    names = {id(module): name for name, module in root.named_modules(remove_duplicate=False)}
    places = {names[id(layer)]: number for number, unit in enumerate(units) for layer in unit}
    owners: dict[int, int] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        parents = [name[:end] for end in range(len(name)) if name[end] == "."]
        number = next((places[parent] for parent in reversed(parents) if parent in places), -1)  # units may be nested; -1 = the root
        if owners.setdefault(id(parameter), number) != number:
            raise ConfigError(
                f"{type(model).__name__} has decoder layers that share parameters ({name}), which cannot be sharded one by one: use a "
                "backend of one process"
            )


def find_units(model: PreTrainedModel, min_params: int = 0) -> list[list[nn.Module]]:
    """Return the decoder layers in order, consecutive ones joined until they have min_params parameters; the last unit may have fewer.

    Raises: ConfigError if the model does not name its layers.
    """
    layer_names = set(cast("list[str]", getattr(model, "_no_split_modules", None) or []))
    embeddings = model.get_input_embeddings()  # RoBERTa names the layer around them, too, but its head has the same weights
    layers = [
        module
        for module in get_decoder(model).modules()
        if type(module).__name__ in layer_names and all(part is not embeddings for part in module.modules())
    ]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no decoder layers that could be sharded one by one (its _no_split_modules are {layer_names}): "
            "use a backend of one process"
        )
    units: list[list[nn.Module]] = []
    size = min_params  # makes the first layer begin a unit
    for layer in layers:
        if size >= min_params:
            units.append([])
            size = 0
        units[-1].append(layer)
        size += sum(p.numel() for p in layer.parameters())
    return units


def call_gathered(model: PreTrainedModel, function: Callable[[], T]) -> T:
    """Run a function that may call the model's modules and read its root's gathered parameters. All ranks must call it alike.

    Args:
        function: returns tensors (in tuples, lists or dicts) or None. A backward pass may begin only at these tensors.
    """
    return cast("T", getattr(model, _CALL)(function))


def drop_gathered(model: PreTrainedModel) -> None:
    """Reshard after a pass without a backward pass; otherwise the next pass could use weights from before an update."""
    for module in sharded_modules(model):
        module.reshard()


def _call(function: Callable[[], T]) -> T:
    return function()


def _offload_policy(config: FSDPConfig, mesh: DeviceMesh) -> OffloadPolicy:
    if not config.cpu_offload:
        return OffloadPolicy()
    if mesh.device_type == "cpu":
        raise ConfigError("cpu_offload is set, but the device is cpu: all of the model is in host memory anyway. Leave it off")
    return CPUOffloadPolicy()
