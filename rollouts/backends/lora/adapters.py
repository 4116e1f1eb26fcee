"""LoRA: low-rank adapters on the linear layers of a frozen model. Only the adapters are trained; engines and files get merged weights.

    y = W x + scale * B (A dropout(x)),    scale = alpha / rank,    B = 0 at the beginning (Hu et al. 2021, section 4.1)

peft adds the adapters to the Hugging Face model in place, so a forward pass, packed or not, is called as before. Weights that leave a
backend (snapshots, exports, the top of a checkpoint) are W + scale * B A under the names of the plain model, see
models/weights.py; the adapters themselves are in a checkpoint's directory "adapter", see files.py.
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rollouts.backends.lora.config import ALL_LINEAR, LoRAConfig
from rollouts.errors import ConfigError
from rollouts.models.four_bit import FourBitLinear, import_bitsandbytes
from rollouts.models.weights import (
    ADAPTER_NAME,
    adapted_layers,
    adapter_of,
    check_finite_weights,
    has_adapters,
    merge_weight,
    weight_below,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_adapters(model: PreTrainedModel, config: LoRAConfig, *, warns: bool = True) -> None:
    """Freeze a model and add adapters to it, in place. Its outputs are unchanged until they are trained.

    A is drawn from U(-1 / sqrt(in), 1 / sqrt(in)), as peft does, by config.seed and the layer's name alone. The adapters of a model on meta
    are on meta, too: call init_adapters after it was sharded and its weights were read.

    Args:
        warns: whether to warn if the rank is above the smaller size of layers; False on ranks other than 0, to warn once.

    Raises: ConfigError if peft is missing (or bitsandbytes for nf4), the model has adapters or is no causal language model, or lacks a
        target; CheckpointError for nf4 and a NaN weight.
    """
    if has_adapters(model):
        raise ConfigError(f"this {type(model).__name__} has adapters already: load it anew, or merge them with copy_without_adapters")
    if model.get_output_embeddings() is None:
        raise ConfigError(
            f"{type(model).__name__} has no output layer over a vocabulary: adapters are for a causal language model; train a critic or a "
            "reward model without lora"
        )
    peft = _import_peft()
    if config.base_dtype == "nf4":
        import_bitsandbytes()  # before the model is changed
    layers = linear_layers(model)
    targets = choose_targets(list(layers), config, type(model).__name__)
    told = explain_wasted_rank({name: layers[name] for name in targets}, config.rank)
    if told and warns:
        warnings.warn(told, stacklevel=2)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.resolved_alpha,
        lora_dropout=config.dropout,
        target_modules=[f"model.{name}" for name in targets],
        use_rslora=config.use_rslora,
        bias="none",
    )
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    with torch.random.fork_rng(devices=[]):
        # below a module without a configuration: for a mixture of experts, peft would adapt the experts instead of layers called gate_proj
        holder = torch.nn.Module()
        holder.add_module("model", model)
        peft.inject_adapter_in_model(settings, holder, adapter_name=ADAPTER_NAME, low_cpu_mem_usage=on_meta)
        settings.target_modules = set(targets)
        cast("Any", model).peft_config = {ADAPTER_NAME: settings}
    freeze_weights(model, "bfloat16" if config.base_dtype == "nf4" else config.base_dtype, only_frozen=True)
    if config.base_dtype == "nf4":
        quantize_base(model)
    if not on_meta:
        init_adapters(model, config.seed)


def freeze_weights(model: PreTrainedModel, dtype: str, *, only_frozen: bool = False) -> None:
    """Freeze the weights of a model in place and hold them in a dtype: float32 or bfloat16. Buffers stay as they are.

    Args:
        only_frozen: leave out what is trained, such as adapters.
    """
    for parameter in model.parameters():
        if not (only_frozen and parameter.requires_grad):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(getattr(torch, dtype))


def quantize_base(model: PreTrainedModel) -> None:
    """Hold the weights below a model's adapters in 4 bits, in place.

    Raises: CheckpointError for a weight that is not finite.
    """
    for name, layer in adapted_layers(model):
        base = layer.base_layer
        check_finite_weights([(f"{name}.weight", base.weight)], f"this {type(model).__name__}")
        layer.base_layer = FourBitLinear(base.weight, base.bias)


def linear_layers(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) by full name of each linear layer below the output layer of a model without adapters.

    Routers of Llama 4 and Phi MoE, which are made from such a layer and return chosen experts, are none.
    """
    head = model.get_output_embeddings()
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head)
    return {name: (module.in_features, module.out_features) for name, module in linear if _is_linear(module)}


def _is_linear(module: torch.nn.Linear) -> bool:
    """Whether a layer, perhaps of a class of its own, maps a vector of in_features to one of out_features."""
    if type(module).forward is torch.nn.Linear.forward:
        return True
    try:
        with torch.no_grad():
            found = cast("Any", module)(torch.zeros_like(module.weight[:1]))
    except (RuntimeError, ValueError, TypeError, LookupError):
        return False
    return isinstance(found, Tensor) and found.shape == (1, module.out_features)


def choose_targets(linear: Sequence[str], config: LoRAConfig, model_name: str) -> list[str]:
    """Choose the layers that get an adapter. Raises ConfigError for a target that is the suffix of no name.

    Args:
        linear: full names of the candidate layers, as linear_layers gives them.
        model_name: name for messages.
    """
    if config.target_modules == (ALL_LINEAR,):
        found = set(linear)
    else:
        found: set[str] = set()
        for target in config.target_modules:
            matching = {name for name in linear if name == target or name.endswith(f".{target}")}
            if not matching:
                known = sorted({name.rpartition(".")[2] for name in linear})
                raise ConfigError(
                    f"lora.target_modules has {target!r}, but no linear layer below the output layer of {model_name} is called "
                    f"so: choose from {', '.join(known)}, or {ALL_LINEAR} alone"
                )
            found |= matching
    if not found:
        raise ConfigError(f"{model_name} has no linear layers below its output layer, and adapters are for those")
    return [name for name in linear if name in found]


def explain_wasted_rank(adapted: Mapping[str, tuple[int, int]], rank: int) -> str | None:
    """Explain a rank above the largest rank that B A can have in some layers; return None if there are no such layers.

    It is no error: peft takes any rank, and with all-linear a rank that suits most layers can exceed the width of a model's few keys and
    values.

    Args:
        adapted: (inputs, outputs) of each layer that gets an adapter, by its name.
    """
    above = {name: sizes for name, sizes in adapted.items() if rank > min(sizes)}
    if not above:
        return None
    name = min(above, key=lambda name: min(above[name]))
    inputs, outputs = above[name]
    most = min(inputs, outputs)
    return (
        f"the rank of the adapters is {rank}, but {len(above)} of the {len(adapted)} adapted layers are smaller: {name} has {inputs} "
        f"inputs and {outputs} outputs, so that rank {most} is all that can be learned there, and the rest costs memory for nothing. "
        f"Give a rank of at most {most}, or leave such layers out of target_modules"
    )


def init_adapters(model: torch.nn.Module, seed: int) -> None:
    """Initialize the adapters: A by the seed and the name of its layer, B to 0. Sends nothing.

    Adapters on meta become new parameters on the device of the weights: make the optimizer afterwards.
    """
    with torch.no_grad():
        for name, layer in adapted_layers(model):
            a, b = adapter_of(layer)
            bound = 1 / math.sqrt(a.shape[1])
            generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]))
            drawn = (torch.rand(a.shape, generator=generator) * 2 - 1) * bound
            for part, value in ((layer.lora_A, drawn), (layer.lora_B, torch.zeros(b.shape))):
                linear = part[ADAPTER_NAME]
                if linear.weight.is_meta:
                    linear.weight = torch.nn.Parameter(torch.empty_like(linear.weight, device=layer.base_layer.weight.device))
                assign(linear.weight, value)


def assign(parameter: Tensor, value: Tensor) -> None:
    """Overwrite a parameter (or, of a DTensor, this rank's shard) by a whole tensor that every rank has. Sends nothing."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        parameter.copy_(value)
        return
    from torch.distributed.tensor import distribute_tensor

    value = value.to(device=mesh.device_type, dtype=parameter.dtype)
    parameter.copy_(distribute_tensor(value, mesh, cast("Any", parameter).placements, src_data_rank=None))


@contextmanager
def adapters_off(model: torch.nn.Module) -> Generator[None]:
    """Disable a model's adapters in the block. Unlike peft's own switch, it leaves requires_grad unchanged."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def copy_without_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model to a plain model, adapters merged; a deep copy if it has none."""
    copied = copy.deepcopy(model)
    if has_adapters(model):
        with torch.no_grad():
            for name, layer in list(adapted_layers(copied)):
                base = layer.base_layer
                merged = merge_weight(weight_below(base.weight, layer), *adapter_of(layer), layer.scaling[ADAPTER_NAME])
                if isinstance(base, FourBitLinear):
                    bias = base.bias
                    base = cast("Any", torch.nn.Linear(base.in_features, base.out_features, bias=bias is not None, device="meta"))
                    base.weight, base.bias = torch.nn.Parameter(merged), bias
                else:
                    base.weight.copy_(merged)
                copied.set_submodule(name, base)
        del copied.peft_config
        copied.requires_grad_(True)
    return copied


def count_lora_parameters(layers: Mapping[str, tuple[int, int]], config: LoRAConfig, model_name: str = "the model") -> int:
    """Count the trained parameters of a model's adapters.

    Args:
        layers: result of linear_layers.
        model_name: name for messages.

    Raises: ConfigError for a target that is the suffix of no name.
    """
    return sum(config.rank * sum(layers[name]) for name in choose_targets(list(layers), config, model_name))


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"adapters need the package peft, which cannot be imported ({error}): pip install 'rollouts-rl[lora]'") from error
    return peft
