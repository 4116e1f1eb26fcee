"""Log-probs of tokens from model outputs, in nats and float32. THE one place where tokens are shifted.

A causal model's output at position t predicts token t + 1. The results of this file are aligned with tokens instead:
log_probs[:, t] = log p(tokens[:, t] | tokens[:, :t]), 0 without such a prediction (the first token of a row).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


def temper(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """logits / temperature, in float32 or better.

    Args:
        logits: # [..., V]; [B, ..., V] with one temperature per row.
        temperature: > 0; a number, or [B] for one per row.
    """
    if isinstance(temperature, Tensor):
        assert temperature.shape == logits.shape[:1], f"temperature has shape {tuple(temperature.shape)} for {logits.shape[0]} rows"
        return _at_least_float32(logits) / temperature.reshape(-1, *(1,) * (logits.dim() - 1))
    assert temperature > 0, f"temperature is {temperature}, expected > 0"
    return logits if temperature == 1.0 else _at_least_float32(logits) / temperature


def gather_log_probs(logits: Tensor, targets: Tensor, *, keep: Tensor | None = None) -> Tensor:
    """log softmax(logits)[target], without shifting.

    Args:
        logits: # [..., V] any float dtype; computed in float32 or better.
        targets: # [...] int64 in [0, V), or [..., K] for K tokens at each position.
        keep: # [..., V] bool; the tokens that sampling was restricted to (top-p, top-k). The softmax runs over them and the target, which
            was drawn and therefore kept. None = all. Only with one target at each position.

    Returns: # shape of targets, float32 (float64 for float64 logits), at most 0.
    """
    several = targets.dim() == logits.dim()
    expected = targets.shape[:-1] if several else targets.shape
    assert logits.shape[:-1] == expected, f"logits have shape {tuple(logits.shape)}, targets {tuple(targets.shape)}"
    logits = _at_least_float32(logits)
    index = targets if several else targets.unsqueeze(-1)
    chosen = logits.gather(-1, index)
    if keep is not None:
        assert not several, f"keep goes with one target at each position, targets have shape {tuple(targets.shape)}"
        assert keep.shape == logits.shape, f"keep has shape {tuple(keep.shape)}, logits {tuple(logits.shape)}"
        logits = logits.masked_fill(~(keep > 0).scatter(-1, index, True), -torch.inf)
    found = chosen - logits.logsumexp(-1, keepdim=True)
    return found if several else found.squeeze(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H(softmax(logits)) = -sum_v p_v log p_v, in nats.

    Args:
        logits: # [..., V]; -inf marks tokens that cannot be drawn.

    Returns: # [...] in [0, log V].
    """
    log_p = torch.log_softmax(_at_least_float32(logits), dim=-1)
    p = log_p.exp()
    return -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)


def sum_of_squared_probs(logits: Tensor) -> Tensor:
    """sum_v p_v^2 of p = softmax(logits), as exp(logsumexp(2 z) - 2 logsumexp(z)): the probability that two draws agree.

    ||grad_z log p_y||^2 = 1 - 2 p_y + sum_v p_v^2: the weight of a token in optimal-token baselines.

    Args:
        logits: # [..., V].

    Returns: # [...] in [1 / V, 1].
    """
    logits = _at_least_float32(logits)
    return ((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp()


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Log-prob of each token given those before it, under softmax(logits / temperature).

    Args:
        logits: # [B, T, V] of a causal model on `tokens`.
        tokens: # [B, T] int64.
        temperature: > 0; a number, or [B] for one per row.

    Returns: # [B, T] float32; 0 at t = 0.
    """
    return _align(gather_log_probs(temper(logits, temperature)[:, :-1], tokens[:, 1:]))


def token_entropy(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Entropy of each token's sampling distribution, in nats.

    Args:
        logits: # [B, T, V] of a causal model.
        temperature: > 0; a number, or [B] for one per row.

    Returns: # [B, T] float32; 0 at t = 0.
    """
    return _align(entropy_from_logits(temper(logits, temperature)[:, :-1]))


class PackedShift(NamedTuple):
    """Positions of packed rows and the tokens that they predict. M = N minus the number of rows that are not empty."""

    predictors: Tensor  # [M] int64: position whose output makes the prediction
    positions: Tensor  # [M] int64: position of the predicted token: predictors + 1, but for the first token behind a shared prompt
    targets: Tensor  # [M] int64: the predicted token


def shift_packed(tokens: Tensor, cu_seqlens: Tensor, before: Tensor | None = None) -> PackedShift:
    """Shift packed rows: every token but the first of its row is predicted by the position before it.

    Args:
        tokens: # [N] int64, rows one after another.
        cu_seqlens: # [R + 1] int64: row r occupies [cu_seqlens[r], cu_seqlens[r + 1]).
        before: # [R] int64: position that predicts the first token of each row, as the last of a shared prompt; -1 = none. None = none for
            any row.
    """
    assert int(cu_seqlens[-1]) == tokens.numel(), f"cu_seqlens ends at {int(cu_seqlens[-1])} for {tokens.numel()} packed tokens"
    predicted = torch.ones(tokens.numel(), dtype=torch.bool, device=tokens.device)
    starts = cu_seqlens[:-1]
    predicted[starts[starts < tokens.numel()]] = False
    if before is None:
        positions = predicted.nonzero().squeeze(-1)
        return PackedShift(predictors=positions - 1, positions=positions, targets=tokens[positions])
    continued = starts[before >= 0]
    predicted[continued] = True
    predictors = torch.arange(-1, tokens.numel() - 1, device=tokens.device)
    predictors[continued] = before[before >= 0]
    positions = predicted.nonzero().squeeze(-1)
    return PackedShift(predictors=predictors[positions], positions=positions, targets=tokens[positions])


class Products(NamedTuple):
    """Functions that compute products with the weight of an output layer instead of torch's own."""

    fit: Callable[[Tensor, Tensor], bool]  # whether they compute rows [R, H], weight [V, H] -> rows @ weight.T, and its gradients
    multiply: Callable[[Tensor, Tensor], Tensor]  # a [R, K], b [N, K] of any strides -> a @ b.T [R, N]
    multiply_transposed: Callable[[Tensor, Tensor], Tensor]  # a [R, N], b [R, K] -> a.T @ b [N, K]


@dataclass(frozen=True)
class LogitTransform:
    """The way from hidden states to logits: the products with the output layer, and the change behind them that some models have,
    soft_cap * tanh(scale * x / soft_cap).
    """

    scale: float = 1.0  # factor of the logits (Cohere, Granite, Falcon-H1)
    soft_cap: float | None = None  # > 0, bound of the logits (Gemma 2); None = no bound
    products: Products | None = None  # None = torch's own

    def apply(self, logits: Tensor) -> Tensor:
        """Return changed logits. # any shape"""
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.soft_cap is None else (logits / self.soft_cap).tanh() * self.soft_cap

    def multiply_by_slope(self, grad: Tensor, changed: Tensor | None) -> Tensor:
        """Multiply a gradient with respect to changed logits by the derivative of apply, in place.

        Args:
            grad: # any shape.
            changed: the changed logits, of grad's shape; not read without a soft cap.
        """
        if self.soft_cap is not None:
            assert changed is not None, "the slope of a soft cap depends on the logits"
            grad.mul_(1 - (changed / self.soft_cap).square())
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


def choose_chunk_size(vocab_size: int, device_type: str) -> int:
    """Choose the positions of a chunk of chunked_log_probs, so that its float32 logits take a bounded memory.

    Returns: 64 to 1024 positions within 128 MiB on a CPU, where larger chunks are not faster; 64 to 4096 positions within 512 MiB on other
        devices, where each chunk costs the launches of its kernels. A multiple of 64.
    """
    memory, most = (2**27, 1024) if device_type == "cpu" else (2**29, 4096)
    return min(most, max(64, memory // (4 * vocab_size) // 64 * 64))


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperatures: Tensor | None = None,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    transform: LogitTransform | None = None,
) -> tuple[Tensor, Tensor | None]:
    """gather_log_probs(transform(hidden @ weight.T + bias) / temperature, targets) without holding [N, V] logits in memory.

    Logits exist for chunk_size positions at a time; the backward pass computes them again. Sums of products, softmax and gradients of
    the weight are in float32 (float64 for float64 inputs) and never rounded to a lower precision on the way.

    Args:
        hidden: # [N, H] last hidden states.
        weight: # [V, H] of the output layer.
        targets: # [N] int64.
        bias: # [V] or None.
        temperatures: # [N] > 0, or None for 1.
        chunk_size: positions per chunk; memory is chunk_size * V numbers. None = choose_chunk_size.
        with_entropy: also return the entropy of each distribution.
        transform: change of the model's logits, before the temperature; None = none.

    Returns: log_probs # [N], entropy # [N] or None; both differentiable with respect to hidden, weight and bias.
    """
    assert hidden.dim() == 2 and weight.dim() == 2, f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
    assert hidden.shape[0] == targets.shape[0], f"{hidden.shape[0]} hidden states for {targets.shape[0]} targets"
    chunk_size = choose_chunk_size(weight.shape[0], hidden.device.type) if chunk_size is None else chunk_size
    assert chunk_size >= 1, f"chunk_size is {chunk_size}, expected at least 1"
    log_probs, entropy, _ = _ChunkedLogProbs.apply(hidden, weight, bias, targets, temperatures, chunk_size, with_entropy, transform)
    return log_probs, (entropy if with_entropy else None)


class _ChunkedLogProbs(torch.autograd.Function):
    """chunked_log_probs with setup_context, which torch.func.grad differentiates as well."""

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor | None,
        chunk_size: int,
        with_entropy: bool,
        transform: LogitTransform | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(hidden.shape[0], dtype=precise, device=hidden.device)
        log_z = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else log_probs.new_empty(0)
        head = _cast_once(weight, hidden)
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            logits = _temper(_chunk_logits(hidden[rows], head, bias, transform), temperatures, rows)  # [C, V]
            log_z[rows] = logits.logsumexp(-1)
            log_probs[rows] = logits.gather(1, targets[rows, None])[:, 0] - log_z[rows]
            if with_entropy:
                log_p = logits.sub_(log_z[rows, None]).clamp_(min=torch.finfo(precise).min)  # 0 * log 0 = 0
                entropy[rows] = -(log_p.exp().mul_(log_p)).sum(-1)
        return log_probs, entropy, log_z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        hidden, weight, bias, targets, temperatures, chunk_size, with_entropy, transform = inputs
        _, entropy, log_z = output
        ctx.mark_non_differentiable(log_z)
        ctx.set_materialize_grads(False)  # an entropy that no loss reads has no gradient, instead of zeros [N]
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, log_z, entropy)
        ctx.chunk_size, ctx.with_entropy, ctx.transform = chunk_size, with_entropy, transform

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the name of ctx
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, log_z, entropy = ctx.saved_tensors
        grad_log_probs, grad_entropy, _ = grads
        precise = torch.promote_types(hidden.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=precise, device=weight.device) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros(weight.shape[0], dtype=precise, device=weight.device) if ctx.needs_input_grad[2] else None
        head = _cast_once(weight, hidden)
        for start in range(0, hidden.shape[0], ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            own = _find_products(hidden[rows], head, ctx.transform)
            changed = _chunk_logits(hidden[rows], head, bias, ctx.transform)
            logits = _temper(changed, temperatures, rows)
            if changed is logits and ctx.transform is not None and ctx.transform.soft_cap is not None:
                changed = changed.clone()  # logits are overwritten below
            log_p = logits.sub_(log_z[rows, None])
            upstream = torch.zeros_like(log_z[rows, None]) if grad_log_probs is None else grad_log_probs[rows, None].to(precise)
            # d log p(y) / d logit_v = 1[v = y] - p_v; d H / d logit_v = -p_v (log p_v + H). In place: a chunk is large
            if ctx.with_entropy and grad_entropy is not None:
                p = log_p.clamp_(min=torch.finfo(precise).min).exp()  # 0 * log 0 = 0
                grad = log_p.add_(entropy[rows, None]).mul_(p).mul_(grad_entropy[rows, None].to(precise))
                grad.addcmul_(p, upstream).neg_()
            else:
                grad = log_p.exp_().mul_(-upstream)
            grad.scatter_add_(1, targets[rows, None], upstream)
            if temperatures is not None:
                grad.div_(temperatures[rows, None])
            if ctx.transform is not None:
                ctx.transform.multiply_by_slope(grad, changed)
            if grad_bias is not None:
                grad_bias.add_(grad.sum(0))
            if grad_hidden is not None:
                if own is not None:
                    grad_hidden[rows] = own.multiply(grad, head.t())
                elif hidden.dtype == precise:
                    torch.mm(grad, head, out=grad_hidden[rows])
                else:
                    grad_hidden[rows] = _precise_product(grad.to(head.dtype), head).to(hidden.dtype)
            if grad_weight is not None:
                if own is not None:
                    grad_weight.add_(own.multiply_transposed(grad, hidden[rows]))
                elif hidden.dtype == precise:
                    grad_weight.addmm_(grad.t(), hidden[rows])
                else:
                    grad_weight.add_(_precise_product(grad.to(head.dtype).t(), hidden[rows].to(head.dtype)))
        out_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        out_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, out_weight, out_bias, None, None, None, None, None


def _cast_once(weight: Tensor, hidden: Tensor) -> Tensor:
    """Return the output layer in the dtype of products with these hidden states, so that no chunk casts it again."""
    return weight.to(hidden.dtype if hidden.is_cuda else torch.promote_types(hidden.dtype, torch.float32))


def _precise_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 or better: products of numbers of a lower precision are summed and returned without rounding."""
    precise = torch.promote_types(a.dtype, torch.float32)
    if a.dtype != precise and a.is_cuda:
        return torch.mm(a, b, out_dtype=precise)
    return a.to(precise) @ b.to(precise)


def _find_products(rows: Tensor, weight: Tensor, transform: LogitTransform | None) -> Products | None:
    """Return the transform's products if they compute rows @ weight.T and its gradients; None = torch's own."""
    products = None if transform is None else transform.products
    return products if products is not None and products.fit(rows, weight) else None


def _chunk_logits(hidden: Tensor, head: Tensor, bias: Tensor | None, transform: LogitTransform | None) -> Tensor:
    """Return the model's logits of one chunk in float32 or better."""
    own = _find_products(hidden, head, transform)
    logits = _precise_product(hidden, head.t()) if own is None else own.multiply(hidden, head)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return logits if transform is None else transform.apply(logits)


def _temper(logits: Tensor, temperatures: Tensor | None, rows: slice) -> Tensor:
    return logits if temperatures is None else logits / temperatures[rows, None].to(logits.dtype)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _align(predictions: Tensor) -> Tensor:
    """[B, T - 1] about tokens 1 .. T - 1 -> [B, T] aligned with tokens."""
    return torch.nn.functional.pad(predictions, (1, 0))


# -- from log-ratios to ratios


def finite_exp(log_ratio: Tensor) -> Tensor:
    """exp(x), or the largest number of its dtype without gradient if exp(x) would overflow. Any shape.

    All ratios with a gradient are computed here. A token far from its anchor (log r > 88 in float32: a rollout log-prob of -100)
    has r = inf, and if the loss does not depend on r, because a clip is active or the advantage is 0, a gradient of 0 * inf = NaN.
    Below the overflow, value and gradient are those of exp, bit for bit.
    """
    numbers = torch.finfo(log_ratio.dtype)
    return log_ratio.clamp(max=math.log(numbers.max) * (1 - numbers.eps)).exp()
