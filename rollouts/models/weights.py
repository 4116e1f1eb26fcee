"""Weights of a Hugging Face model as a mapping of tensors: read from a directory, checked against a model, copied into it.

Shared by training backends and the in-process engine. A bad set of weights is refused before anything is overwritten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rollouts.checks import find_non_finite
from rollouts.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
_PART = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


def find_weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory: those of its index, else the only one, else all numbered parts.

    Raises: CheckpointError if there are none, if a file of the index is missing, or, without an index, a numbered part.
    """
    index = directory / INDEX_FILE
    if index.exists():
        try:
            weight_map = cast("dict[str, str]", json.loads(index.read_text())["weight_map"])
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} has no weight_map of names to files ({error!r}): export the weights again") from error
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise CheckpointError(f"{directory} lacks {missing[:3]} of its index: the export is not complete, or files were removed")
        return [directory / name for name in names]
    single = directory / WEIGHTS_FILE
    found = [single] if single.is_file() else sorted(directory.glob("model*.safetensors"))
    if not found:
        raise CheckpointError(f"{directory} has no model.safetensors: it is not a model directory, or its weights are in another format")
    numbers = [(int(part[1]), int(part[2])) for path in found if (part := _PART.fullmatch(path.name))]
    expected = sorted((k, count) for count in {count for _, count in numbers} for k in range(1, count + 1))
    if sorted(numbers) != expected or len({count for _, count in numbers}) > 1:
        raise CheckpointError(
            f"{directory} has no {INDEX_FILE}, and its parts are not one model: found {[path.name for path in found][:6]}. An export was "
            "interrupted, or files were removed: export the weights again"
        )
    return found


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Read all tensors from the files of find_weight_files. Raises CheckpointError as it does, or if a file is damaged."""
    weights: dict[str, Tensor] = {}
    for path in find_weight_files(directory):
        try:
            weights.update(load_file(path))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error
    return weights


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether the model has peft adapters; its parameters then have other names than those of the plain model."""
    return bool(getattr(model, "peft_config", None))


def base_weights(model: torch.nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """Return the state dict under the plain model's names; of a model with adapters the weights below them, without the adapters.

    Args:
        keep_vars: return the parameters themselves; tied ones are one object.
    """
    state = cast("dict[str, Tensor]", cast("Any", model).state_dict(keep_vars=keep_vars))
    if not has_adapters(model):
        return state
    return {plain_name(name): value for name, value in state.items() if not is_adapter_name(name)}


def is_adapter_name(name: str) -> bool:
    """Whether a parameter of a model with adapters is part of one."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """Return the plain model's name of a parameter below an adapter."""
    return name.replace(".base_layer.", ".")


def check_weights_fit(model: torch.nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Raise CheckpointError unless the weights are finite and have the model's names and shapes; tied ones may appear once."""
    own = base_weights(model, keep_vars=True)
    first_name: dict[int, str] = {}
    tied = {name: first_name.setdefault(id(value), name) for name, value in own.items()}
    given = {tied[name] for name in weights if name in tied}
    missing = sorted(name for name in own if name not in weights and tied[name] not in given)
    unknown = sorted(set(weights) - set(own))
    wrong = [
        f"{name} is {tuple(weights[name].shape)}, expected {tuple(value.shape)}"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    if missing or unknown or wrong:
        raise CheckpointError(
            f"{source} does not fit this {type(model).__name__}: missing {missing[:5]}, unknown {unknown[:5]}, wrong shapes {wrong[:5]}. "
            "Use weights of the same architecture."
        )
    check_finite_weights(weights.items(), source)


def check_finite_weights(weights: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Raise CheckpointError for weights with a NaN or an infinity, naming the first such tensor.

    Args:
        source: origin of the weights, for the message.
    """
    bad = find_non_finite(weights)
    if bad is not None:
        raise CheckpointError(
            f"{source} has a NaN weight (or an infinite one): {bad}. Nothing can be trained or sampled from it: use an earlier checkpoint, "
            "or the model that it was made from"
        )


def copy_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Overwrite the model's weights with ones that check_weights_fit has accepted; adapters stay as they are."""
    own = cast("Any", base_weights(model))
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)
