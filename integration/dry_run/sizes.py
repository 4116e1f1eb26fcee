"""Sizes of a model for a budget, from its configuration without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rollouts.backends.lora.adapters import choose_targets, count_lora_parameters, linear_layers
from rollouts.backends.lora.config import LoRAConfig
from rollouts.errors import ConfigError
from rollouts.models.forward import get_decoder


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder. Parameter counts include tied parameters once."""

    num_parameters: int
    layer_parameters: int  # parameters of the largest decoder layer
    root_parameters: int  # parameters outside the decoder layers: embedding, last norm, output layer
    num_layers: int
    hidden_size: int
    intermediate_size: int  # width of the gated MLP; in a mixture of experts, of all experts active for one token
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool  # output layer and embedding share one matrix
    has_qk_norm: bool  # queries and keys are normalized, as in Qwen3
    linear_layers: tuple[tuple[str, int, int], ...] = ()  # (full name, inputs, outputs) of each linear layer except the output layer
    architecture: str = "the model"  # class name, for messages

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values, of all heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer."""
        return self.vocab_size * self.hidden_size

    @property
    def linear_parameters(self) -> int:
        """Weights of all linear layers, the output layer with them, also where it shares those of the embedding."""
        return self.head_parameters + sum(inputs * outputs for _, inputs, outputs in self.linear_layers)


def read_sizes(model_config: Any, *, trust_remote_code: bool = False) -> ModelSizes:
    """Return the sizes of the model of a Hugging Face configuration, without allocating weights.

    Raises: ConfigError if the configuration is not of a causal language model with decoder layers.
    """
    model = create_empty_model(model_config, trust_remote_code=trust_remote_code)
    config = model_config.get_text_config()  # the language model of a multimodal model
    layers = getattr(get_decoder(model), "layers", None)
    num_layers = int(config.num_hidden_layers)
    total = sum(p.numel() for p in model.parameters())
    if layers is None:  # an older module layout: everything but the embedding counts as layers
        in_layers = [(total - config.vocab_size * config.hidden_size) // num_layers] * num_layers
    else:
        in_layers = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = {name.rsplit(".", 2)[-2] for name, _ in model.named_parameters() if name.count(".") >= 2}
    return ModelSizes(
        num_parameters=total,
        layer_parameters=max(in_layers),
        root_parameters=total - sum(in_layers),
        num_layers=num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=_intermediate_size(config),
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        is_tied=bool(getattr(model_config, "tie_word_embeddings", False)),
        has_qk_norm="q_norm" in names,
        linear_layers=tuple((name, *widths) for name, widths in linear_layers(model).items()),
        architecture=type(model).__name__,
    )


def create_empty_model(model_config: Any, *, trust_remote_code: bool = False) -> Any:
    """Create the model of a configuration on the meta device: shapes and names without memory.

    Raises: ConfigError if the configuration is not of a causal language model.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(f"the model configuration ({type(model_config).__name__}) is not of a causal language model: {error}") from error
    return model


@dataclass(frozen=True, kw_only=True)
class AdapterSizes:
    """Sizes of the LoRA adapters of a model."""

    num_parameters: int
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # (inputs, outputs) by layer
    dropped_inputs: int = 0  # inputs of all adapted layers together if adapters have dropout, which saves them; else 0


def read_adapter_sizes(sizes: ModelSizes, config: LoRAConfig) -> AdapterSizes:
    """Return the sizes of the adapters. Raises: ConfigError for target modules that the model does not have."""
    layers = {name: (inputs, outputs) for name, inputs, outputs in sizes.linear_layers}
    adapted = {name: layers[name] for name in choose_targets(list(layers), config, sizes.architecture)}
    return AdapterSizes(
        num_parameters=count_lora_parameters(layers, config, sizes.architecture),
        layers=adapted,
        dropped_inputs=sum(inputs for inputs, _ in adapted.values()) if config.dropout else 0,
    )


def _intermediate_size(config: Any) -> int:
    """Return the width of the MLP that processes one token."""
    experts, width = getattr(config, "num_experts_per_tok", None), getattr(config, "moe_intermediate_size", None)
    if experts and width:
        return int(experts * width)
    return int(getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size)
