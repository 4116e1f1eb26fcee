"""Outputs of the tokens of packed rows: log-probs of a language model, values of a critic or scores of a reward model.

A backend takes one of these functions as its compute_outputs; everything else about it is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from rollouts.algorithms.distillation.divergences import chunked_divergence, chunked_tops
from rollouts.algorithms.logprobs import Foresight, LogitTransform, Sampling, chunked_log_probs
from rollouts.errors import DataError
from rollouts.models.forward.output_layers import get_output_layer, read_value_head, run_before
from rollouts.models.forward.packing import PackedRows
from rollouts.models.linear import ONEDNN
from rollouts.models.routers import Routers
from rollouts.types import TokenOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ComputeOutputs: TypeAlias = "Callable[[PreTrainedModel, Tensor, PackedRows, Tensor | None, OutputOptions], TokenOutputs]"
"""f(model, hidden [N, H], packed, temperatures [B] or None, options) -> outputs [B, T]. ConfigError for a model without that head."""


@dataclass(eq=False)
class ForeseenLoss:
    """A loss known before its outputs: its gradient is computed together with log-probs whose logits are too many to keep."""

    loss: Callable[[TokenOutputs], Tensor]  # pure; called with log-probs of which some are still 0
    foresight: Foresight | None = None  # foresight of the newest pass

    @property
    def failed(self) -> bool:
        """Whether a backward pass had another gradient: the loss of a token depends on other tokens, and to foresee it cost time."""
        return self.foresight is not None and self.foresight.failed

    def foresee(self, packed: PackedRows, positions: Tensor, *, with_entropy: bool) -> Foresight:
        """Return the gradient of the loss with respect to log-probs # [M] at these packed positions."""

        def differentiate(log_probs: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = log_probs.detach().requires_grad_()
                placed = _place(leaf, packed, positions)
                try:
                    loss = self.loss(TokenOutputs(log_probs=placed, entropy=torch.zeros_like(placed) if with_entropy else None))
                except (ValueError, RuntimeError, ArithmeticError, AssertionError):  # incomplete log-probs may be refused
                    return torch.zeros_like(leaf)
                return torch.autograd.grad(loss, leaf, materialize_grads=True)[0] if loss.requires_grad else torch.zeros_like(leaf)

        self.foresight = Foresight(differentiate)
        return self.foresight


@dataclass(frozen=True)
class OutputOptions:
    """Options of the computation of outputs; none changes their meaning."""

    compute_dtype: torch.dtype = torch.float32  # dtype of matrix products with the vocabulary
    chunk_size: int | None = None  # tokens whose logits exist at the same time; None = choose_chunk_size
    with_entropy: bool = False
    native_attention: bool = False  # run rows of one length at a time with the model's own attention instead of packed rows
    native_passes: int = 0  # least number of passes then, some of which count nothing: ranks of a sharded model make equally many
    shares_prompts: bool = False  # run shared prompts once where a batch allows it; see prepare.can_share_prompts
    routers: Routers = field(default_factory=Routers)  # routers of the model; their load is measured
    foreseen: ForeseenLoss | None = None  # loss of these outputs; None = not known yet


def compute_log_probs(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> TokenOutputs:
    """Head of a policy: log p(tokens[:, t] | tokens[:, :t]) and, on request, the entropy, computed in chunks of tokens.

    In a row of several contexts a token is conditioned on its own context; both outputs are 0 at the first token of each.
    """
    reading = _read_output_layer(model, hidden, packed, temperatures, options)
    positions = packed.shift.positions
    foreseen = None if options.routers.modules or packed.tops is not None else options.foreseen
    log_probs, entropy = chunked_log_probs(
        reading.inputs,
        reading.weight,
        packed.shift.targets,
        sampling=Sampling(reading.temperatures, packed.kept),
        with_entropy=options.with_entropy,
        foresight=None if foreseen is None else foreseen.foresee(packed, positions, with_entropy=options.with_entropy),
        **reading.settings,
    )
    outputs = TokenOutputs(
        log_probs=_place(log_probs, packed, positions),
        entropy=None if entropy is None else _place(entropy, packed, positions),
    )
    if packed.tops is None:
        return outputs
    if packed.kept is not None:
        raise DataError(
            "a divergence from the teacher is over the whole vocabulary, but tokens were drawn with top_p, top_k or min_p: sample with "
            "--generation.top-p 1, or use the sampled tokens alone: opd"
        )
    found = chunked_divergence(reading.inputs, reading.weight, packed.tops, temperatures=reading.temperatures, **reading.settings)
    return replace(outputs, divergence=_place(found, packed, positions))


@dataclass(frozen=True, eq=False)
class _Reading:
    """Inputs of the output layer at the predictors of M tokens, and the settings of its passes."""

    inputs: Tensor  # [M, K]
    weight: Tensor  # [V, K]
    temperatures: Tensor | None  # [M]
    settings: dict[str, Any]  # bias, chunk_size and transform of the functions in chunks


def _read_output_layer(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> _Reading:
    layer, shift = get_output_layer(model), packed.shift
    if temperatures is not None:
        row_of_token = packed.flat_index // packed.shape[1]
        temperatures = temperatures[row_of_token[shift.positions]]
    inputs = run_before(layer.before, hidden[shift.predictors], options.compute_dtype)
    transform = layer.transform if layer.module is None else replace(layer.transform or LogitTransform(), products=ONEDNN)
    return _Reading(
        inputs.to(options.compute_dtype),
        layer.weight if layer.token_scale is None else layer.weight * layer.token_scale()[:, None],
        temperatures,
        {"bias": layer.bias, "chunk_size": options.chunk_size, "transform": transform},
    )


def compute_tops(
    model: PreTrainedModel,
    hidden: Tensor,
    packed: PackedRows,
    temperatures: Tensor | None,
    options: OutputOptions,
    *,
    k: int,
    vocab_size: int | None = None,
) -> TokenOutputs:
    """Head of a teacher: compute_log_probs, and beside each token the k that are most probable in its place, computed in chunks.

    Args:
        k, vocab_size: as in chunked_tops.
    """
    outputs = compute_log_probs(model, hidden, packed, temperatures, options)
    reading = _read_output_layer(model, hidden, packed, temperatures, options)
    with torch.no_grad():
        sampling = Sampling(reading.temperatures, packed.kept)
        found = chunked_tops(reading.inputs, reading.weight, k, vocab_size=vocab_size, sampling=sampling, **reading.settings)
    return replace(outputs, tops=_place(found, packed, packed.shift.positions))


def compute_values(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> TokenOutputs:
    """Head of a critic: V(tokens[:, :t]) from the hidden state at t - 1, in float32; 0 at the first token of a context and on pads.

    The value at t does not depend on tokens[:, t], so it can be a baseline of that token. log_probs are zeros: a critic has none. The
    head's dropout, which token-classification models have, is left out.
    """
    shift = packed.shift
    values = read_value_head(model, hidden[shift.predictors], options.compute_dtype)
    return TokenOutputs(log_probs=torch.zeros(packed.shape, device=hidden.device), values=_place(values, packed, shift.positions))


def compute_scores(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> TokenOutputs:
    """Head of a reward model: score of the text up to and including tokens[:, t], from the hidden state at t, float32; 0 on pads.

    Unlike a value it depends on tokens[:, t], so the score of a text is the one at its last token (preferences.score_loss).
    """
    scores = read_value_head(model, hidden, options.compute_dtype)
    return TokenOutputs(log_probs=torch.zeros(packed.shape, device=hidden.device), values=packed.unpack(scores))


def describe_outputs(compute_outputs: ComputeOutputs) -> frozenset[str] | None:
    """Return the kinds of outputs of one of these functions; None for any other function.

    Scores are not values: they depend on the token that a value must not depend on.
    """
    if compute_outputs is compute_log_probs:
        return frozenset({"log_probs", "entropy"})
    if isinstance(compute_outputs, partial) and compute_outputs.func is compute_tops:
        return frozenset({"log_probs", "entropy", "tops"})
    if compute_outputs is compute_values:
        return frozenset({"values"})
    return frozenset({"scores"}) if compute_outputs is compute_scores else None


def _place(values: Tensor, packed: PackedRows, positions: Tensor) -> Tensor:
    """Scatter values [M, ...] of packed positions into [B, T, ...], 0 elsewhere; keeps the gradient."""
    flat = torch.zeros((*packed.tokens.shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return packed.unpack(flat.index_copy(0, positions, values))
