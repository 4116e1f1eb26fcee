"""Training steps as pure, compiled JAX functions over values, for losses written in PyTorch.

A loss reads only the log-probs (and entropies) of tokens: JAX computes them, PyTorch evaluates the loss on them and its gradient with
respect to them, [B, T] numbers, and JAX pulls that gradient back to the weights. By the chain rule this is exact for every loss, the
user's own included, and no loss is written twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollouts.backends.jax.model import Array, DecoderConfig, PackedArrays, Weights, compute_log_probs, pack_arrays
from rollouts.backends.optim.optimizers import AdamW
from rollouts.backends.optim.updates import UpdateCounts, count_update, describe_bad
from rollouts.backends.protocol import list_metrics
from rollouts.errors import DataError
from rollouts.models.forward.packing import PackedRows, pack_padded
from rollouts.types import LossFn, TokenOutputs, TrainBatch

if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    import optax
else:
    with suppress(ImportError):  # an extra; backend.py raises with the install command before calling this module
        import jax
        import jax.numpy as jnp
        import optax


@dataclass(frozen=True)
class ModelSpec:
    """Settings of the log-prob computation that compiled programs depend on besides shapes."""

    decoder: DecoderConfig
    chunk_size: int  # tokens whose logits exist at the same time


@dataclass(frozen=True, eq=False)
class JAXTrainState:
    """State that training changes."""

    weights: Weights
    optimizer: Any  # optax's state
    gradients: Weights | None = None  # sum since the last update; None = none yet
    counts: UpdateCounts = field(default_factory=UpdateCounts)


class UpdateNumbers(NamedTuple):
    """Numbers of AdamW that may change between updates without recompilation."""

    lr: Any
    eps: Any
    weight_decay: Any
    max_grad_norm: Any


def create_jax_state(weights: Weights, rule: AdamW) -> JAXTrainState:
    """Create the state before the first update."""
    return JAXTrainState(weights, _transformation(_numbers_of(rule, rule.lr), rule.betas).init(dict(weights)))


def _pack_whole(batch: TrainBatch) -> PackedRows:
    """Plan the packing of a batch's rows. Raises DataError for targets, and if tokens were drawn from less than the whole vocabulary."""
    if batch.targets is not None:
        raise DataError("the batch has targets, and the JAX backend computes log-probs of its tokens alone: use the PyTorch backend")
    if batch.kept is not None:
        raise DataError(
            "the batch has tokens that were drawn with top_p, top_k or min_p, and the JAX backend computes log-probs over the whole "
            "vocabulary alone: sample with top_p=1, top_k=0 and min_p=0, or use the PyTorch backend"
        )
    return pack_padded(batch.tokens, batch.lengths, batch.context_ids)


def evaluate_batch(weights: Weights, batch: TrainBatch, spec: ModelSpec, *, with_entropy: bool = False) -> TokenOutputs:
    """Evaluate the model on the tokens of a batch: [B, T] PyTorch tensors on the CPU without gradient."""
    packed = _pack_whole(batch)
    arrays = pack_arrays(packed, batch.temperatures)
    return _place(_read_outputs(_programs().evaluate(dict(weights), arrays, spec, with_entropy), packed), packed)


def accumulate_gradient(
    state: JAXTrainState, batch: TrainBatch, loss_fn: LossFn, spec: ModelSpec, *, with_entropy: bool = False
) -> tuple[JAXTrainState, dict[str, float | Tensor]]:
    """Add the gradient of a PyTorch loss on this batch.

    Returns: the state with the sum; loss, num_tokens and the metrics of the loss.
    """
    packed = _pack_whole(batch)
    arrays = pack_arrays(packed, batch.temperatures)
    outputs, pull_back = _programs().differentiate(dict(state.weights), arrays, spec, with_entropy)
    leaves = [values.requires_grad_() for values in _read_outputs(outputs, packed)]
    loss, metrics = loss_fn(_place(leaves, packed), batch)
    loss.backward()
    cotangents = tuple(_write_gradient(leaf, len(arrays.tokens)) for leaf in leaves)
    gradients = _programs().pull_back(pull_back, cotangents)
    if state.gradients is not None:
        gradients = _programs().add(dict(state.gradients), gradients)
    return replace(state, gradients=gradients), list_metrics(loss, metrics, batch)


def apply_update(state: JAXTrainState, rule: AdamW) -> tuple[JAXTrainState, dict[str, float]]:
    """Update once by the accumulated gradient, with optax: clipped by the global norm, AdamW with decay on matrices only.

    A non-finite gradient is not applied: only the counts of the state change, and update_skipped is 1.

    Returns: the state without gradient; grad_norm (before clipping), lr (of this update), update_skipped.
    """
    assert state.gradients is not None, "optim_step was called without a forward_backward since the last one"
    lr = rule.rate(state.counts)
    numbers = UpdateNumbers(*(np.float32(x) for x in _numbers_of(rule, lr)))
    weights, optimizer, found = _programs().update(dict(state.weights), state.optimizer, dict(state.gradients), numbers, rule.betas)
    norm = float(found)
    finite = math.isfinite(norm)
    counts, told = count_update(state.counts, norm, applied=finite), describe_bad(None if finite else "gradient")
    return JAXTrainState(weights, optimizer, None, counts), {"grad_norm": norm, "lr": lr, "update_skipped": float(not finite)} | told


def to_array(value: Tensor) -> Array:
    """Copy a tensor to a float32 JAX array."""
    return jnp.array(value.detach().to("cpu", torch.float32).numpy())


def to_tensor(value: Array) -> Tensor:
    """Copy a JAX array to a tensor on the CPU."""
    return torch.from_numpy(np.array(value))


def flatten_optimizer(optimizer: Any) -> dict[str, Tensor]:
    """Flatten optax's state to its values by their path, for a file."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(optimizer)
    return {jax.tree_util.keystr(path): to_tensor(leaf) for path, leaf in leaves}


def restore_optimizer(like: Any, saved: Mapping[str, Tensor]) -> Any:
    """Restore the optax state of flatten_optimizer. Raises ValueError if its structure differs from `like`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    own = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    found = {name: jnp.array(value.numpy()) for name, value in saved.items()}
    shapes = [{name: (value.shape, value.dtype) for name, value in mapping.items()} for mapping in (own, found)]
    if shapes[0] != shapes[1]:
        differing = sorted(name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name))
        raise ValueError(f"{differing[:3]} differ")
    return jax.tree_util.tree_unflatten(structure, [found[name] for name in own])


# -- between PyTorch and JAX


def _read_outputs(outputs: tuple[Array, ...], packed: PackedRows) -> list[Tensor]:
    """Return the log-probs, and entropies if computed, of the packed tokens: # [N] each."""
    return [to_tensor(values)[: packed.tokens.numel()] for values in outputs]


def _place(values: list[Tensor], packed: PackedRows) -> TokenOutputs:
    """Unpack values of packed tokens into [B, T]; keeps the gradient."""
    columns = [packed.unpack(value) for value in values]
    return TokenOutputs(log_probs=columns[0], entropy=columns[1] if len(columns) > 1 else None)


def _write_gradient(leaf: Tensor, size: int) -> np.ndarray[Any, Any]:
    """Return the loss's gradient with respect to one output, of that output's length; zeros if the loss does not depend on it."""
    cotangent = np.zeros(size, np.float32)
    if leaf.grad is not None:
        cotangent[: leaf.numel()] = leaf.grad.numpy()
    return cotangent


# -- compiled programs


class _Programs(NamedTuple):
    evaluate: Callable[[Any, PackedArrays, ModelSpec, bool], tuple[Array, ...]]
    differentiate: Callable[[Any, PackedArrays, ModelSpec, bool], tuple[tuple[Array, ...], Any]]
    pull_back: Callable[[Any, tuple[Any, ...]], Mapping[str, Array]]
    add: Callable[[Any, Any], Mapping[str, Array]]
    update: Callable[[Any, Any, Any, UpdateNumbers, tuple[float, float]], tuple[Any, Any, Array]]


@cache
def _programs() -> _Programs:
    """Compile the functions below, once in a process for each combination of shapes and specs, for any number of backends."""
    return _Programs(
        evaluate=jax.jit(_evaluate, static_argnums=(2, 3)),
        differentiate=jax.jit(_differentiate, static_argnums=(2, 3)),
        pull_back=jax.jit(_pull_back),
        add=jax.jit(_add),
        update=jax.jit(_update, static_argnums=4),
    )


def _evaluate(weights: Any, arrays: PackedArrays, spec: ModelSpec, with_entropy: bool) -> tuple[Array, ...]:
    found = compute_log_probs(weights, arrays, config=spec.decoder, chunk_size=spec.chunk_size, with_entropy=with_entropy)
    return tuple(values for values in found if values is not None)


def _differentiate(weights: Any, arrays: PackedArrays, spec: ModelSpec, with_entropy: bool) -> tuple[tuple[Array, ...], Any]:
    """Return the outputs and the function that pulls their gradient back to the weights, as a value."""

    def outputs_of(chosen: Any) -> tuple[Array, ...]:
        return _evaluate(chosen, arrays, spec, with_entropy)

    return jax.vjp(outputs_of, weights)


def _pull_back(pull_back: Any, cotangents: tuple[Any, ...]) -> Any:
    return pull_back(cotangents)[0]


def _add(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.add, left, right)


def _update(weights: Any, optimizer: Any, gradients: Any, numbers: UpdateNumbers, betas: tuple[float, float]) -> tuple[Any, Any, Array]:
    norm = optax.tree.norm(gradients)
    changes, moved = _transformation(numbers, betas).update(gradients, optimizer, weights)
    finite = jnp.isfinite(norm)

    def choose(new: Any, old: Any) -> Any:
        return jnp.where(finite, new, old)

    kept = jax.tree.map(choose, (optax.apply_updates(weights, changes), moved), (weights, optimizer))
    return (*kept, norm)


def _transformation(numbers: UpdateNumbers, betas: tuple[float, float]) -> Any:
    adamw = optax.adamw(numbers.lr, b1=betas[0], b2=betas[1], eps=numbers.eps, weight_decay=numbers.weight_decay, mask=_choose_matrices)
    return optax.chain(optax.clip_by_global_norm(numbers.max_grad_norm), adamw)


def _choose_matrices(weights: Any) -> Any:
    def is_matrix(weight: Any) -> bool:
        return weight.ndim >= 2

    return jax.tree.map(is_matrix, weights)


def _numbers_of(rule: AdamW, lr: float) -> UpdateNumbers:
    return UpdateNumbers(lr, rule.eps, rule.weight_decay, rule.max_grad_norm)
