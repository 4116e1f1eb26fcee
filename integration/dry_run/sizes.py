"""Sizes of a model for a budget, from its configuration without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rollouts.backends.lora.adapters import choose_targets, count_lora_parameters, linear_layers
from rollouts.backends.lora.config import LoRAConfig
from rollouts.errors import ConfigError
from rollouts.models.forward.output_layers import get_decoder


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

    def count_linear_parameters(self, least: int) -> int:
        """Count the numbers of linear weights that have at least this many, the output layer with them, also where it is the embedding."""
        counts = [self.head_parameters, *(inputs * outputs for _, inputs, outputs in self.linear_layers)]
        return sum(count for count in counts if count >= least)


def read_sizes(model_config: Any, *, trust_remote_code: bool = False) -> ModelSizes:
    """Return the sizes of the model of a Hugging Face configuration or of the BuiltInModel, without allocating weights.

    Sizes of the common dense families follow from the configuration; other models are created on the meta device, which takes seconds of
    imports.

    Raises: ConfigError if the configuration is not of a causal language model with decoder layers.
    """
    return compute_sizes(model_config) or measure_sizes(model_config, trust_remote_code=trust_remote_code)


_DENSE = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
"""The class of a model by its model_type, for families of one decoder layout: seven linear layers and two norms a layer."""


def compute_sizes(model_config: Any) -> ModelSizes | None:
    """Return the sizes of a dense model by formula; None if its family is not one of those that the formula is tested with."""
    family = getattr(model_config, "model_type", None)
    if (
        family not in _DENSE
        or type(model_config).__module__.split(".")[0] not in ("transformers", "integration")
        or hasattr(model_config, "quantization_config")
    ):
        return None
    hidden, inner, num_layers = model_config.hidden_size, model_config.intermediate_size, model_config.num_hidden_layers
    heads = model_config.num_attention_heads
    kv_heads = model_config.num_key_value_heads or heads
    head_dim = getattr(model_config, "head_dim", None) or hidden // heads
    has_bias = family == "qwen2" or bool(getattr(model_config, "attention_bias", False))
    mlp_bias = bool(getattr(model_config, "mlp_bias", False)) if family == "llama" else False
    layers = (  # name, inputs, outputs, has a bias
        ("self_attn.q_proj", hidden, heads * head_dim, has_bias),
        ("self_attn.k_proj", hidden, kv_heads * head_dim, has_bias),
        ("self_attn.v_proj", hidden, kv_heads * head_dim, has_bias),
        ("self_attn.o_proj", heads * head_dim, hidden, has_bias and family != "qwen2"),
        ("mlp.gate_proj", hidden, inner, mlp_bias),
        ("mlp.up_proj", hidden, inner, mlp_bias),
        ("mlp.down_proj", inner, hidden, mlp_bias),
    )
    norms = 2 * hidden + (2 * head_dim if family == "qwen3" else 0)
    in_layer = norms + sum((inputs + biased) * outputs for _, inputs, outputs, biased in layers)
    is_tied = bool(model_config.tie_word_embeddings)
    in_root = (1 if is_tied else 2) * model_config.vocab_size * hidden + hidden
    return ModelSizes(
        num_parameters=in_root + num_layers * in_layer,
        layer_parameters=in_layer,
        root_parameters=in_root,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=model_config.vocab_size,
        is_tied=is_tied,
        has_qk_norm=family == "qwen3",
        linear_layers=tuple((f"model.layers.{i}.{name}", ins, outs) for i in range(num_layers) for name, ins, outs, _ in layers),
        architecture=_DENSE[family],
    )


def measure_sizes(model_config: Any, *, trust_remote_code: bool = False) -> ModelSizes:
    """Return the sizes of a model of any family, created on the meta device. Raises ConfigError as read_sizes."""
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
