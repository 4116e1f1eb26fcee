"""Heads of models: the decoder below, the layers between, and the linear layer that gives logits, values or scores."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rollouts.algorithms.logprobs import LogitTransform
from rollouts.errors import ConfigError
from rollouts.models.linear import OneDNNLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def get_decoder(model: PreTrainedModel) -> torch.nn.Module:
    """Return the transformer below the output layer. Raises ConfigError for a model without one."""
    decoder = getattr(model, model.base_model_prefix, None) or getattr(model, "model", None)  # Llama 4's prefix is that of a larger model
    if not isinstance(decoder, torch.nn.Module):
        raise ConfigError(f"{type(model).__name__} has no decoder below its output layer, so log-probs cannot be computed in chunks")
    return decoder


def find_cache_name(module: torch.nn.Module) -> str:
    """Return the name of keys and values as an argument of a model or decoder and in its output: "cache" from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The step from last hidden states to logits: layers of the model's own, one linear layer, and a change of its results."""

    weight: Tensor  # [V, K]
    bias: Tensor | None  # [V]
    transform: LogitTransform | None  # None = no change
    module: OneDNNLinear | None = None  # the layer itself, where it has products of its own
    before: Callable[[Tensor], Tensor] | None = None  # hidden states [..., H] -> what the linear layer reads [..., K]; None = the same
    token_scale: Callable[[], Tensor] | None = None  # () -> learned factors [V] of the logits, as they are now; None = 1

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] from hidden states [..., H], in float32 if they are changed."""
        return self.read(hidden if self.before is None else self.before(hidden))

    def read(self, inputs: Tensor) -> Tensor:
        """Compute logits [..., V] from what the linear layer reads, [..., K]."""
        inputs = inputs.to(self.weight.dtype)  # Mamba's hidden states are float32 in bfloat16, too
        logits = torch.nn.functional.linear(inputs, self.weight, self.bias) if self.module is None else self.module(inputs)
        logits = logits if self.token_scale is None else logits.float() * self.token_scale()
        return logits if self.transform is None else self.transform.apply(logits.float())


def get_output_layer(model: PreTrainedModel) -> OutputLayer:
    """Return the output layer, with the change of logits that the configuration names. Raises ConfigError if it is not linear.

    prepare.check_output_layer compares the result with the model's own logits.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(f"{type(model).__name__} has no linear output layer (found {type(head).__name__})")
    own = {name for name, _ in head.named_parameters()} - {"weight", "bias"}
    scaled = own == {"logit_scale"} and hasattr(head, "logit_scale_factor")  # Dory learns a factor for each token
    if own and not scaled:
        raise ConfigError(f"{type(model).__name__} has an output layer with parameters that are not computed here: {sorted(own)}")
    config: Any = model.config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= 1.0 if getattr(config, name, None) is None else float(getattr(config, name))
    if getattr(config, "logits_mup_width_multiplier", None) is not None:  # Inkling
        scale /= float(config.logits_mup_width_multiplier)
    if getattr(config, "logits_scaling", None) is not None:  # Granite divides by it, HyperCLOVA X multiplies
        scale *= float(config.logits_scaling) ** (1 if str(config.model_type).startswith("hyperclovax") else -1)
    caps = [getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")]
    soft_cap = next((cap for cap in caps if cap is not None), None)
    transform = LogitTransform(scale, soft_cap)
    weight, bias = cast("tuple[Tensor, Tensor | None]", (head.weight, head.bias))
    size = getattr(config, "unpadded_vocab_size", None)  # Inkling drops the logits of rows that only pad the matrix
    module = head if isinstance(head, OneDNNLinear) else None
    if size is not None and size < head.out_features:
        weight, bias, module = weight[:size], None if bias is None else bias[:size], None
    return OutputLayer(
        weight,
        bias,
        None if transform == LogitTransform() else transform,
        module,
        before=find_layers_before(model, head),
        token_scale=partial(_read_token_scale, head) if scaled else None,
    )


def _read_token_scale(head: Any) -> Tensor:
    return head.logit_scale.float() * head.logit_scale_factor


def find_layers_before(model: PreTrainedModel, head: torch.nn.Linear) -> Callable[[Tensor], Tensor] | None:
    """Return the function from last hidden states [..., H] to what a head reads, [..., K], if a model has parameters between them.

    Models of BERT's line have a layer with an activation and a norm there; ModernBERT's decoder has one before the scores, too.
    """
    known = {id(parameter) for module in (get_decoder(model), head) for parameter in module.parameters()}
    if all(id(parameter) in known for parameter in cast("torch.nn.Module", model).parameters()):
        return None
    return partial(_run_to_head, model, head)


class _HeadReached(Exception):
    """Ends a model's forward pass where its head would read; args[0] is what it would read."""


def _run_to_head(model: PreTrainedModel, head: torch.nn.Module, hidden: Tensor) -> Tensor:
    """Run a model's own code between its decoder and a head, neither of which computes anything, on hidden states # [..., H].

    Raises: ConfigError for a model that does not call its decoder, or not this head.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    decoder: Any = get_decoder(model)
    rows = hidden.reshape(1, -1, hidden.shape[-1])

    def give(*_: Any, **__: Any) -> Any:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=cast("Any", rows))

    def stop(_module: Any, inputs: tuple[Tensor, ...]) -> None:
        raise _HeadReached(inputs[0])

    hook = head.register_forward_pre_hook(stop)
    decoder.forward = give  # for this object alone; its class keeps its method
    try:
        cast("Any", model).forward(input_ids=torch.zeros(rows.shape[:2], dtype=torch.int64, device=rows.device), use_cache=False)
    except _HeadReached as reached:
        return reached.args[0].reshape(*hidden.shape[:-1], -1)
    finally:
        del decoder.forward
        hook.remove()
    raise ConfigError(f"{type(model).__name__} does not call its head behind its decoder, so that it cannot be computed here")


def run_before(before: Callable[[Tensor], Tensor] | None, hidden: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Run the layers before a head in the dtype of the passes."""
    if before is None:
        return hidden
    with torch.autocast(hidden.device.type, dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16):
        return before(hidden)


def read_value_head(model: PreTrainedModel, hidden: Tensor, compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute values or scores [N], float32, from last hidden states [N, H], as get_value_head's layer reads them."""
    head = get_value_head(model)
    inputs = run_before(find_layers_before(model, head), hidden, compute_dtype)
    bias = None if head.bias is None else head.bias.float()  # pyright: ignore[reportUnnecessaryComparison]
    return torch.nn.functional.linear(inputs.float(), head.weight.float(), bias).squeeze(-1)


def get_value_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Return the layer [1, H] from hidden states to values of a token-classification model. Raises ConfigError if there is none."""
    for name in ("score", "classifier"):  # the names in transformers
        head = getattr(model, name, None)
        if isinstance(head, torch.nn.Linear) and head.out_features == 1:
            return head
    raise ConfigError(
        f"{type(model).__name__} has no value head (a linear layer with one output): "
        "make the backend with create_critic_backend, from a causal language model or from a saved critic"
    )
