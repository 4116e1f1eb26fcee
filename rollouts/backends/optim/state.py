"""State of a torch optimizer by the names of parameters, so that it can be restored for a model sharded in another way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollouts.backends.pytorch.files import TRAINER_FILE
from rollouts.backends.weights.fill import local_part
from rollouts.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """State of an optimizer by the names of its parameters."""

    groups: list[dict[str, Any]]  # settings, with the names as "params"
    values: dict[str, dict[str, Any]]  # state by parameter name, then key


def read_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Read state and settings of an optimizer by the names of the model's parameters; nothing is copied."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    values: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        parameters = cast("list[Tensor]", group["params"])
        groups.append({**group, "params": [names[id(parameter)] for parameter in parameters]})
        values |= {names[id(p)]: dict(cast("dict[str, Any]", optimizer.state[p])) for p in parameters if p in optimizer.state}
    return OptimizerState(groups, values)


def write_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Set state and settings of an optimizer, given by the names of its own parameters in its own groups."""
    own = read_optimizer(model, optimizer)
    order = [name for group in own.groups for name in group["params"]]
    index = {name: i for i, name in enumerate(order)}
    groups = [{**group, "params": [index[name] for name in group["params"]]} for group in state.groups]
    optimizer.load_state_dict({"state": {index[name]: values for name, values in state.values.items()}, "param_groups": groups})


def plan_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, common: Mapping[str, Any], directory: Path) -> OptimizerState:
    """Plan the optimizer state of a checkpoint by name, with tensors allocated but not yet read. Raises CheckpointError."""
    own = read_optimizer(model, optimizer)
    parameters = dict(model.named_parameters())
    if "whole" in common:
        return _split_whole(own, parameters, cast("dict[str, Any]", common["whole"]), directory)
    groups = cast("list[dict[str, Any]]", common["groups"])
    if common["optimizer"] != type(optimizer).__name__:
        raise CheckpointError(f"{directory} has the state of {common['optimizer']}, but the optimizer is {type(optimizer).__name__}")
    if [set(group["params"]) for group in groups] != [set(group["params"]) for group in own.groups]:
        theirs, ours = ({name for group in g for name in group["params"]} for g in (groups, own.groups))
        raise CheckpointError(
            f"{directory} has the state of an optimizer over other parameters: {_name_some(ours - theirs)} missing, "
            f"{_name_some(theirs - ours)} unknown, {len(groups)} groups where this one has {len(own.groups)}"
        )
    values: dict[str, dict[str, Any]] = {name: dict(others) for name, others in common["others"].items()}
    for key, (shape, dtype) in cast("dict[str, tuple[tuple[int, ...], torch.dtype]]", common["tensors"]).items():
        name, _, field = key.rpartition("/")
        own_tensor = parameters[name].detach()
        same = tuple(shape) == tuple(own_tensor.shape)
        values[name][field] = torch.empty_like(own_tensor, dtype=dtype) if same else torch.empty(shape, dtype=dtype)
    ordered = [{**theirs, "params": ours["params"]} for theirs, ours in zip(groups, own.groups, strict=True)]
    return OptimizerState(ordered, values)


def _split_whole(
    own: OptimizerState, parameters: Mapping[str, torch.nn.Parameter], whole: Mapping[str, Any], directory: Path
) -> OptimizerState:
    """Return this rank's part of a one-process optimizer state, which identifies parameters by number."""
    groups = cast("list[dict[str, Any]]", whole["param_groups"])
    sizes, expected = ([len(group["params"]) for group in g] for g in (groups, own.groups))
    if sizes != expected:
        raise CheckpointError(f"{directory / TRAINER_FILE} has groups of {sizes} parameters, but this optimizer has groups of {expected}")
    names = {
        i: name for theirs, ours in zip(groups, own.groups, strict=True) for i, name in zip(theirs["params"], ours["params"], strict=True)
    }
    values: dict[str, dict[str, Any]] = {}
    for i, fields in cast("dict[int, dict[str, Any]]", whole["state"]).items():
        parameter = parameters[names[i]]
        wrong = [key for key, x in fields.items() if isinstance(x, Tensor) and x.dim() and x.shape != parameter.shape]
        if wrong:
            raise CheckpointError(f"{directory / TRAINER_FILE} has {wrong[0]} of {names[i]} in another shape: it is of another model")
        values[names[i]] = {key: _take_shard(x, parameter) if isinstance(x, Tensor) and x.dim() else x for key, x in fields.items()}
    return OptimizerState([{**theirs, "params": ours["params"]} for theirs, ours in zip(groups, own.groups, strict=True)], values)


def _take_shard(whole: Tensor, parameter: Tensor) -> Tensor:
    """Copy this rank's part of a whole tensor, sharded like a parameter."""
    value = torch.empty_like(parameter.detach(), dtype=whole.dtype)
    (value.to_local() if isinstance(value, DTensor) else value).copy_(whole[local_part(parameter)])
    return value


def _name_some(names: Iterable[str]) -> list[str]:
    return sorted(names)[:3]
