"""The adapters of a model on disk, in peft's layout, with what says which base they belong to.

checkpoint/                     the merged model, as any other
  adapter/adapter_config.json, adapter_model.safetensors    for peft.PeftModel.from_pretrained(base, ...) and for inference servers
  adapter/base.json             fingerprint of the frozen weights that the adapters were trained on
  base/                         these weights, where they are not what the backend was made with, or LoRAConfig.save_base is set
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollouts.backends.lora import ADAPTER_NAME, LoRAConfig, adapted_layers, adapter_of, assign, init_adapters
from rollouts.backends.weight_stream import whole_tensor
from rollouts.errors import CheckpointError, ConfigError
from rollouts.model_weights import base_weights, has_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_DIRECTORY = "adapter"
BASE_DIRECTORY = "base"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
BASE_FILE = "base.json"


class Adapters:
    """The adapters of a backend's model, between it and its checkpoints. Of a sharded model all ranks call each method together."""

    def __init__(self, model: PreTrainedModel, config: LoRAConfig) -> None:
        """
        Args:
            model: to which add_adapters has given adapters of this config.
        """
        self.config = config
        self._model = model
        self._fingerprint: str | None = None  # of the base, once it has been asked for
        self._base_was_replaced = False

    def replaced_base(self, optimizer: torch.optim.Optimizer) -> None:
        """The weights below the adapters are others now: the adapters begin anew, A by the seed, B = 0, nothing known to the optimizer.

        Args:
            optimizer: of the adapters.
        """
        init_adapters(self._model, self.config.seed)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
        self._fingerprint, self._base_was_replaced = None, True

    def fingerprint(self) -> str:
        """Of the base, see fingerprint_base; computed once."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_base(self._model)
        return self._fingerprint

    def save(self, checkpoint: Path, export_base: Callable[[Path], None], *, writes: bool = True) -> None:
        """Write the adapters into a checkpoint.

        Args:
            export_base: writes the weights below the adapters as a model directory. Called where a resumed run would not have them.
            writes: whether this process writes the files of the adapters.
        """
        tensors, fingerprint = gather_adapters(self._model), self.fingerprint()
        if self.config.save_base or self._base_was_replaced:
            export_base(checkpoint / BASE_DIRECTORY)
        if writes:
            write_adapters(self._model, tensors, fingerprint, checkpoint / ADAPTER_DIRECTORY)

    def load(self, checkpoint: Path, load_base: Callable[[Path], None]) -> None:
        """Restore what save wrote, bit for bit.

        Args:
            load_base: overwrites the weights below the adapters with those of a model directory.

        Raises: CheckpointError if the checkpoint has no adapters, others, or those of another base.
        """
        self.fingerprint()  # ranks exchange messages for it: before anything can go wrong on one of them alone
        check_complete(checkpoint)
        directory = checkpoint / ADAPTER_DIRECTORY
        check_adapter_config(self._model, self.config, directory)
        tensors, expected = read_adapters(self._model, directory), read_fingerprint(directory)
        if self.fingerprint() != expected:
            if not (checkpoint / BASE_DIRECTORY).is_dir():
                raise CheckpointError(
                    f"the adapters in {directory} were trained on other weights than those of this model (fingerprint "
                    f"{expected[:12]}, found {self.fingerprint()[:12]}): make the backend from the model that the run began with. "
                    f"The merged model is {checkpoint} itself, as --model.path"
                )
            load_base(checkpoint / BASE_DIRECTORY)
            self._fingerprint, self._base_was_replaced = None, True
            if self.fingerprint() != expected:
                raise CheckpointError(
                    f"{checkpoint / BASE_DIRECTORY} has not the weights that {directory} was trained on: restore a backup"
                )
        assign_adapters(self._model, tensors)


def check_lora(model: torch.nn.Module, lora: LoRAConfig | None) -> None:
    """Raise ConfigError for a model with adapters of which a backend is not told, or one without those it is told of."""
    if has_adapters(model) != (lora is not None):
        found = "has adapters, but lora is None" if lora is None else "has no adapters, but lora is given"
        raise ConfigError(
            f"this {type(model).__name__} {found}: make the backend from a plain model, with create_pytorch_backend(lora=...)"
        )


def check_has_no_adapters(checkpoint: Path) -> None:
    """Raise CheckpointError for a checkpoint of a backend with adapters; for backends that have none."""
    if (checkpoint / ADAPTER_DIRECTORY).is_dir():
        raise CheckpointError(
            f"{checkpoint} was written by a backend that trains adapters, and this one trains all weights: go on with the same lora "
            "settings, or begin from the merged weights with --model.path"
        )


def gather_adapters(model: PreTrainedModel) -> dict[str, Tensor]:
    """The whole adapters on the CPU, float32, by peft's names. Of a sharded model all ranks must call."""
    tensors: dict[str, Tensor] = {}
    for name, layer in adapted_layers(model):
        for part, parameter in zip(("lora_A", "lora_B"), adapter_of(layer), strict=True):
            tensors[f"base_model.model.{name}.{part}.weight"] = whole_tensor(parameter).float()
    return tensors


def assign_adapters(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the adapters with what gather_adapters gave. Of a sharded model all ranks must call."""
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
    """The adapters that write_adapters wrote. Raises CheckpointError if the file is damaged or of other layers."""
    path = directory / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error
    expected = {
        f"base_model.model.{name}.{part}.weight": tuple(parameter.shape)
        for name, layer in adapted_layers(model)
        for part, parameter in zip(("lora_A", "lora_B"), adapter_of(layer), strict=True)
    }
    differing = sorted(set(tensors) ^ set(expected)) or [name for name in expected if tuple(tensors[name].shape) != expected[name]]
    if differing:
        raise CheckpointError(f"the adapters in {path} are of other layers or sizes than this model's, for example {differing[:3]}")
    return tensors


def read_fingerprint(directory: Path) -> str:
    """Of the base that the adapters in a directory were trained on."""
    try:
        return str(json.loads((directory / BASE_FILE).read_text())["fingerprint"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory / BASE_FILE} does not say which weights the adapters belong to: {error}") from error


def check_adapter_config(model: PreTrainedModel, config: LoRAConfig, directory: Path) -> None:
    """Raise CheckpointError unless a directory holds adapters that compute what those of this config do."""
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory.parent} has no adapters: it was written by a backend that trains all weights; go on without lora, or begin from "
            "its weights with --model.path"
        )
    try:
        found = cast("dict[str, Any]", json.loads(path.read_text()))
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
        raise CheckpointError(f"the adapters in {directory} are others than those of this model: {'; '.join(differing)}")


def shorten_targets(model: PreTrainedModel) -> list[str]:
    """Names of the adapted layers as people write them (q_proj), or in full where the short ones would mean more layers."""
    adapted = {name for name, _ in adapted_layers(model)}
    short = sorted({name.rpartition(".")[2] for name in adapted})
    kept = {f"{name}.base_layer" for name in adapted}
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in short and name not in kept}
    return short if meant == adapted else sorted(adapted)


def fingerprint_base(model: PreTrainedModel) -> str:
    """SHA-256 over names, shapes and bits of the weights below the adapters. Of a sharded model all ranks must call."""
    digest, seen = hashlib.sha256(), set[int]()
    for name, value in base_weights(model, keep_vars=True).items():
        if id(value) in seen:
            continue  # tied
        seen.add(id(value))
        whole = whole_tensor(value)
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        digest.update(cast("Any", whole.contiguous().flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()


def check_complete(directory: Path) -> None:
    """Raise CheckpointError if a file of weights at the top of a directory is cut off. Reads no weights."""
    for path in sorted(directory.glob("model*.safetensors")):
        try:
            with cast("Any", safe_open)(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error
