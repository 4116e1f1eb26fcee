"""Adapters of a model on disk, in peft's layout, with the fingerprint of their base.

checkpoint/                     the merged model, as any other
  adapter/adapter_config.json, adapter_model.safetensors    for peft.PeftModel.from_pretrained(base, ...) and for inference servers
  adapter/base.json             fingerprint of the frozen weights that the adapters were trained on
  base/                         these weights, if the backend was made with others or LoRAConfig.save_base is set
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollouts.backends.lora.adapters import assign, init_adapters
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.weights.fill import open_weights
from rollouts.checks import parse_json
from rollouts.errors import CheckpointError, ConfigError
from rollouts.models.four_bit import FourBitLinear, dequantize, quantize
from rollouts.models.weights import (
    ADAPTER_NAME,
    adapted_layers,
    adapted_weights,
    adapter_of,
    base_weights,
    check_finite_weights,
    check_weights_fit,
    explain_damage,
    first_names,
    has_adapters,
    weight_below,
    whole_tensor,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ADAPTER_DIRECTORY = "adapter"
BASE_DIRECTORY = "base"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
BASE_FILE = "base.json"


@dataclass(frozen=True, eq=False)
class SavedAdapters:
    """Adapters of a checkpoint, checked to fit the model."""

    tensors: Mapping[str, Tensor]  # as gather_adapters returns them
    fingerprint: str  # fingerprint of the weights below them
    base: Path | None  # directory of the weights below them, if the model has others


class Adapters:
    """Saves and restores the adapters of a backend's model. All ranks of a sharded model call each method together."""

    def __init__(self, model: PreTrainedModel, config: LoRAConfig) -> None:
        """
        Args:
            model: model with adapters of this config, made by add_adapters.
        """
        self.config = config
        self._model = model
        self._fingerprint: str | None = None  # fingerprint of the base, once computed
        self._base_was_replaced = False

    def replaced_base(self, optimizer: torch.optim.Optimizer) -> None:
        """Reset the adapters after the weights below them were replaced: A by the seed, B = 0, empty optimizer state.

        Args:
            optimizer: optimizer of the adapters.
        """
        init_adapters(self._model, self.config.seed)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
        self._fingerprint, self._base_was_replaced = None, True

    def fingerprint(self) -> str:
        """Return the fingerprint of the base, see fingerprint_base; computed once."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_base(self._model)
        return self._fingerprint

    def save(self, checkpoint: Path, export_base: Callable[[Path], None], *, writes: bool = True) -> None:
        """Write the adapters into a checkpoint.

        Args:
            export_base: writes the weights below the adapters as a model directory. Called if a resumed run would not have them.
            writes: whether this process writes the files of the adapters.
        """
        tensors, fingerprint = gather_adapters(self._model), self.fingerprint()
        if self.config.save_base or self._base_was_replaced:
            export_base(checkpoint / BASE_DIRECTORY)
        if writes:
            write_adapters(self._model, tensors, fingerprint, checkpoint / ADAPTER_DIRECTORY)

    def read(self, checkpoint: Path) -> SavedAdapters:
        """Read and check the adapters of a checkpoint; changes nothing, and sends nothing once fingerprint() has been called.

        Raises: CheckpointError if the checkpoint has no adapters, other adapters, or adapters of another base.
        """
        own = self.fingerprint()
        check_complete(checkpoint)
        directory = checkpoint / ADAPTER_DIRECTORY
        check_adapter_config(self._model, self.config, directory)
        tensors, expected = read_adapters(self._model, directory), read_fingerprint(directory)
        if own == expected:
            return SavedAdapters(tensors, expected, None)
        advice = "make the backend from the model that the run began with"
        base = checkpoint / BASE_DIRECTORY
        if not base.is_dir():
            raise CheckpointError(
                f"the adapters in {directory} were trained on other weights than those of this model (fingerprint {expected[:12]}, found "
                f"{own[:12]}): {advice}. The merged model is {checkpoint} itself, as --model.path"
            )
        try:
            found = fingerprint_directory(self._model, base)
        except CheckpointError as error:
            raise CheckpointError(
                f"the weights that {directory} was trained on cannot be taken from {base}: {error} To go on, restore that directory from a "
                f"backup, or {advice}"
            ) from error
        if found != expected:
            raise CheckpointError(
                f"{base} has not the weights that {directory} was trained on (fingerprint {expected[:12]}, found {found[:12]}): restore it "
                f"from a backup, or {advice}, which has them. The merged model is {checkpoint} itself, as --model.path"
            )
        return SavedAdapters(tensors, expected, base)

    def restore(self, saved: SavedAdapters, load_base: Callable[[Path], None]) -> None:
        """Restore the adapters, and if needed the weights below them, bit for bit.

        Args:
            saved: result of read.
            load_base: overwrites the weights below the adapters from a model directory.
        """
        if saved.base is not None:
            load_base(saved.base)
            self._fingerprint, self._base_was_replaced = saved.fingerprint, True
        assign_adapters(self._model, saved.tensors)


def check_lora(model: torch.nn.Module, lora: LoRAConfig | None) -> None:
    """Raise ConfigError for a model with adapters but no lora config, or with a lora config but no adapters."""
    if has_adapters(model) != (lora is not None):
        found = "has adapters, but lora is None" if lora is None else "has no adapters, but lora is given"
        raise ConfigError(
            f"this {type(model).__name__} {found}: make the backend from a plain model, with create_pytorch_backend(lora=...)"
        )


def check_has_no_adapters(checkpoint: Path) -> None:
    """Raise CheckpointError if a checkpoint has adapters; for backends without them."""
    if (checkpoint / ADAPTER_DIRECTORY).is_dir():
        raise CheckpointError(
            f"{checkpoint} was written by a backend that trains adapters, and this one trains all weights: go on with the same lora "
            "settings, or begin from the merged weights with --model.path"
        )


def gather_adapters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Gather the whole adapters on the CPU, float32, by peft's names. All ranks of a sharded model must call it."""
    tensors: dict[str, Tensor] = {}
    for name, layer in adapted_layers(model):
        for part, parameter in zip(("lora_A", "lora_B"), adapter_of(layer), strict=True):
            tensors[f"base_model.model.{name}.{part}.weight"] = whole_tensor(parameter).float()
    return tensors


def assign_adapters(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the adapters with the result of gather_adapters. All ranks of a sharded model must call it."""
    with torch.no_grad():
        for name, layer in adapted_layers(model):
            for part, parameter in zip(("lora_A", "lora_B"), adapter_of(layer), strict=True):
                assign(parameter, tensors[f"base_model.model.{name}.{part}.weight"])


def write_adapters(model: PreTrainedModel, tensors: Mapping[str, Tensor], fingerprint: str, directory: Path) -> None:
    """Write adapters in peft's layout, and the fingerprint of their base."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = cast("dict[str, Any]", cast("Any", model).peft_config[ADAPTER_NAME].to_dict())
    changed = {
        "inference_mode": True,
        "base_model_name_or_path": getattr(model.config, "_name_or_path", "") or None,
        "target_modules": shorten_targets(model),
        "peft_type": str(getattr(settings["peft_type"], "value", settings["peft_type"])),
    }
    found = {name: sorted(value) if isinstance(value, set) else value for name, value in (settings | changed).items()}
    (directory / CONFIG_FILE).write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    save_file(dict(tensors), directory / WEIGHTS_FILE, metadata={"format": "pt"})
    os.chmod(directory / WEIGHTS_FILE, 0o644)
    (directory / BASE_FILE).write_text(json.dumps({"fingerprint": fingerprint}) + "\n")


def read_adapters(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    """Read adapters written by write_adapters. Raises CheckpointError if the file is damaged or has other layers."""
    path = directory / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(explain_damage(path, error)) from error
    expected = {
        f"base_model.model.{name}.{part}.weight": tuple(parameter.shape)
        for name, layer in adapted_layers(model)
        for part, parameter in zip(("lora_A", "lora_B"), adapter_of(layer), strict=True)
    }
    differing = [f"{name} is missing" for name in expected if name not in tensors]
    differing += [f"{name} is unknown" for name in tensors if name not in expected]
    sizes = {name: tuple(value.shape) for name, value in tensors.items()}
    differing += [
        f"{name} is {sizes[name]}, expected {expected[name]}" for name in expected if sizes.get(name, expected[name]) != expected[name]
    ]
    if differing:
        raise CheckpointError(
            f"the adapters in {path} are of other layers or sizes than this model's: {'; '.join(differing[:3])}"
            f"{f'; and {len(differing) - 3} more' if len(differing) > 3 else ''}. Make the backend from the model that the run began with"
        )
    check_finite_weights(tensors.items(), str(path))
    return tensors


def read_fingerprint(directory: Path) -> str:
    """Read the fingerprint of the base that the adapters in a directory were trained on."""
    try:
        return str(parse_json((directory / BASE_FILE).read_text())["fingerprint"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory / BASE_FILE} does not say which weights the adapters belong to: {error}") from error


def check_adapter_config(model: PreTrainedModel, config: LoRAConfig, directory: Path) -> None:
    """Raise CheckpointError unless the adapters in a directory compute the same as adapters of this config."""
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory.parent} has no adapters: it was written by a backend that trains all weights; go on without lora, or begin from "
            "its weights with --model.path"
        )
    try:
        found = cast("dict[str, Any]", parse_json(path.read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    own = {
        "r": config.rank,
        "lora_alpha": config.resolved_alpha,
        "use_rslora": config.use_rslora,
        "target_modules": shorten_targets(model),
    }
    differing = [f"{name} is {found.get(name)}, expected {value}" for name, value in own.items() if found.get(name) != value]
    if differing:
        raise CheckpointError(
            f"the adapters in {directory} are others than those of this model: {'; '.join(differing)}. Go on with the lora settings of the "
            f"run that wrote them, or begin from the merged model, {directory.parent}, as --model.path"
        )


def shorten_targets(model: PreTrainedModel) -> list[str]:
    """Shorten names of adapted layers to their usual form (q_proj); keep full names if the short ones would match more layers."""
    adapted = {name for name, _ in adapted_layers(model)}
    short = sorted({name.rpartition(".")[2] for name in adapted})
    kept = {f"{name}.base_layer" for name in adapted}
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in short and name not in kept}
    return short if meant == adapted else sorted(adapted)


def fingerprint_base(model: PreTrainedModel) -> str:
    """Compute SHA-256 over names, shapes and bits of the weights below the adapters. All ranks of a sharded model must call it."""
    own, layers = base_weights(model, keep_vars=True), adapted_weights(model)
    return _digest((name, whole_tensor(weight_below(own[name], layers.get(name)))) for name in dict.fromkeys(first_names(own).values()))


def fingerprint_directory(model: PreTrainedModel, directory: Path) -> str:
    """Compute fingerprint_base for the weights of a directory. Changes nothing and sends nothing.

    Raises: CheckpointError if the directory is damaged, or has other names or shapes.
    """
    own = base_weights(model, keep_vars=True)
    first = first_names(own)
    with open_weights(model, directory) as files:
        check_weights_fit(model, {name: torch.empty(shape, device="meta") for name, shape in files.shapes.items()}, str(directory))
        given: dict[str, str] = {}  # name in the files by the first name of a weight
        for name in files.shapes:
            given.setdefault(first[name], name)
        whole = {name: tuple(slice(0, size) for size in own[name].shape) for name in dict.fromkeys(first.values())}
        layers = adapted_weights(model)

        def read(name: str) -> Tensor:
            found = files.read(given[name], whole[name]).to(own[name].dtype)
            in_4_bits = name in layers and isinstance(layers[name].base_layer, FourBitLinear)
            return dequantize(*quantize(found), found.shape) if in_4_bits else found

        return _digest((name, read(name)) for name in whole)


def _digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, whole in weights:
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        digest.update(cast("Any", whole.contiguous().flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()


def check_complete(directory: Path) -> None:
    """Raise CheckpointError if a weight file at the top of a directory is truncated. Reads no weights."""
    for path in sorted(directory.glob("model*.safetensors")):
        try:
            with cast("Any", safe_open)(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(explain_damage(path, error)) from error
