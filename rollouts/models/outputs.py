"""Heads on the last hidden states of packed rows: log-probs of a language model, values of a critic, scores of a reward model.

A backend takes one of these functions as its compute_outputs; everything else about it is the same for all three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from rollouts.algorithms.logprobs import chunked_log_probs, shift_packed
from rollouts.errors import ConfigError
from rollouts.models.packing import PackedRows, get_output_layer
from rollouts.types import TokenOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class OutputOptions:
    """Options of the computation of outputs; none changes their meaning."""

    compute_dtype: torch.dtype = torch.float32  # dtype of matrix products with the vocabulary
    chunk_size: int = 1024  # tokens whose logits exist at the same time
    with_entropy: bool = False


ComputeOutputs: TypeAlias = "Callable[[PreTrainedModel, Tensor, PackedRows, Tensor | None, OutputOptions], TokenOutputs]"
"""f(model, hidden [N, H], packed, temperatures [B] or None, options) -> outputs [B, T]. ConfigError for a model without that head."""


def compute_log_probs(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> TokenOutputs:
    """Head of a policy: log p(tokens[:, t] | tokens[:, :t]) and, on request, the entropy, computed in chunks of tokens.

    In a row of several contexts a token is conditioned on its own context; both outputs are 0 at the first token of each.
    """
    weight, bias = get_output_layer(model)
    shift = shift_packed(packed.tokens, packed.cu_seqlens)
    if temperatures is not None:
        row_of_token = packed.flat_index // packed.shape[1]
        temperatures = temperatures[row_of_token[shift.positions]]
    log_probs, entropy = chunked_log_probs(
        hidden[shift.predictors].to(options.compute_dtype),
        weight,
        shift.targets,
        bias=bias,
        temperatures=temperatures,
        chunk_size=options.chunk_size,
        with_entropy=options.with_entropy,
    )
    return TokenOutputs(
        log_probs=_place(log_probs, packed, shift.positions),
        entropy=None if entropy is None else _place(entropy, packed, shift.positions),
    )


def compute_values(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> TokenOutputs:
    """Head of a critic: V(tokens[:, :t]) from the hidden state at t - 1, in float32; 0 at the first token of a context and on pads.

    The value at t does not depend on tokens[:, t], so it can be a baseline of that token. log_probs are zeros: a critic has none. The
    head's dropout, which token-classification models have, is left out.
    """
    head = get_value_head(model)
    shift = shift_packed(packed.tokens, packed.cu_seqlens)
    values = torch.nn.functional.linear(hidden[shift.predictors].float(), head.weight, head.bias).squeeze(-1)
    return TokenOutputs(log_probs=torch.zeros(packed.shape, device=hidden.device), values=_place(values, packed, shift.positions))


def compute_scores(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> TokenOutputs:
    """Head of a reward model: score of the text up to and including tokens[:, t], from the hidden state at t, float32; 0 on pads.

    Unlike a value it depends on tokens[:, t], so the score of a text is the one at its last token (preferences.score_loss).
    """
    head = get_value_head(model)
    scores = torch.nn.functional.linear(hidden.float(), head.weight, head.bias).squeeze(-1)
    return TokenOutputs(log_probs=torch.zeros(packed.shape, device=hidden.device), values=packed.unpack(scores))


def describe_outputs(compute_outputs: ComputeOutputs) -> frozenset[str] | None:
    """Return the kinds of outputs of one of these functions; None for any other function.

    Scores are not values: they depend on the token that a value must not depend on.
    """
    if compute_outputs is compute_log_probs:
        return frozenset({"log_probs", "entropy"})
    if compute_outputs is compute_values:
        return frozenset({"values"})
    return frozenset({"scores"}) if compute_outputs is compute_scores else None


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


def _place(values: Tensor, packed: PackedRows, positions: Tensor) -> Tensor:
    """Scatter values of packed positions into [B, T], 0 elsewhere; keeps the gradient."""
    flat = torch.zeros(packed.tokens.shape, dtype=values.dtype, device=values.device)
    return packed.unpack(flat.index_copy(0, positions, values))
