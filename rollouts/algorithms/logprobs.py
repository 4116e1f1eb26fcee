"""Log-probs of tokens from model outputs, in nats and float32. THE one place where tokens are shifted.

A causal model's output at position t predicts token t + 1. The results of this file are aligned with tokens instead:
log_probs[:, t] = log p(tokens[:, t] | tokens[:, :t]), 0 without such a prediction (the first token of a row).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollouts.batches import place_kept
from rollouts.types import KeptSets


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


_CHUNK_ON_CPU = (2**27, 1024)  # bytes of float32 logits, and most positions
_CHUNK_ELSEWHERE = (2**29, 4096)
_CACHED_NUMBERS = 2**17  # float32 numbers that a core keeps in its cache between two passes, 512 KiB


def choose_chunk_size(vocab_size: int, device_type: str) -> int:
    """Choose the positions of a chunk of chunked_log_probs, so that its float32 logits take a bounded memory.

    Returns: 64 to 1024 positions within 128 MiB on a CPU, where larger chunks are not faster; 64 to 4096 positions within 512 MiB on other
        devices, where each chunk costs the launches of its kernels. A multiple of 64.
    """
    memory, most = _CHUNK_ON_CPU if device_type == "cpu" else _CHUNK_ELSEWHERE
    return min(most, max(64, memory // (4 * vocab_size) // 64 * 64))


def count_kept_positions(vocab_size: int, device_type: str) -> int:
    """Return the most positions of all chunks together whose logits stay in memory until the backward pass.

    So many fit into the memory that bounds one chunk: 128 MiB on a CPU, 512 MiB on other devices, but always one chunk.
    """
    memory, _ = _CHUNK_ON_CPU if device_type == "cpu" else _CHUNK_ELSEWHERE
    return max(choose_chunk_size(vocab_size, device_type), memory // (4 * vocab_size))


class Sampling(NamedTuple):
    """The way in which N tokens were drawn from logits."""

    temperatures: Tensor | None = None  # [N] > 0; None = 1
    kept: KeptSets | None = None  # sets of [N] tokens that top-p, top-k and min-p left of the tempered distribution; None = all


@dataclass(eq=False)
class Foresight:
    """The gradient of a loss with respect to log-probs, foreseen while they are computed.

    With it chunked_log_probs differentiates a chunk while it has its logits. The backward pass compares what was foreseen with the gradient
    that it is given, bit for bit: if they differ, it computes the logits again. So results have the same bits whatever was foreseen.
    """

    gradient: Callable[[Tensor], Tensor]
    """[N] log-probs without gradient, of the chunks so far and 0 elsewhere -> [N] gradient; read for the newest chunk."""
    failed: bool = False  # set by a backward pass with another gradient, as a loss has that reads several chunks for one token


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    sampling: Sampling | None = None,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    transform: LogitTransform | None = None,
    foresight: Foresight | None = None,
) -> tuple[Tensor, Tensor | None]:
    """gather_log_probs(transform(hidden @ weight.T + bias) / temperature, targets) without holding [N, V] logits in memory.

    Where sampling has kept sets, the softmax runs over the set of each token, which holds its target.

    Logits exist for chunk_size positions at a time. The backward pass computes them again, unless all of them fit into the memory of
    count_kept_positions, or the gradient was foreseen. Sums of products, softmax and gradients of the weight are in float32 (float64 for
    float64 inputs) and never rounded to a lower precision on the way.

    Args:
        hidden: # [N, H] last hidden states.
        weight: # [V, H] of the output layer.
        targets: # [N] int64.
        bias: # [V] or None.
        sampling: temperatures and kept sets of the targets; None = temperature 1 and the whole vocabulary.
        chunk_size: positions per chunk, and the most whose logits are kept. None = choose_chunk_size, count_kept_positions.
        with_entropy: also return the entropy of each distribution.
        transform: change of the model's logits, before the temperature; None = none.
        foresight: not used for logits that are kept, and without gradients; it fails if entropies have a gradient. It changes no result.

    Returns: log_probs # [N], entropy # [N] or None; both differentiable with respect to hidden, weight and bias.
    """
    assert hidden.dim() == 2 and weight.dim() == 2, f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
    assert hidden.shape[0] == targets.shape[0], f"{hidden.shape[0]} hidden states for {targets.shape[0]} targets"
    size = choose_chunk_size(weight.shape[0], hidden.device.type) if chunk_size is None else chunk_size
    assert size >= 1, f"chunk_size is {size}, expected at least 1"
    wanted = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias))
    kept = count_kept_positions(weight.shape[0], hidden.device.type) if chunk_size is None else size
    keeps = any(wanted) and hidden.shape[0] <= kept and (transform is None or transform.soft_cap is None)
    sees = foresight if any(wanted) and not keeps else None
    sampling = sampling or Sampling()
    plan = _Plan(size, with_entropy, transform, keeps, sees, wanted, sampling.kept)
    log_probs, entropy, *_ = _ChunkedLogProbs.apply(hidden, weight, bias, targets, sampling.temperatures, plan)
    return log_probs, (entropy if with_entropy else None)


class _Plan(NamedTuple):
    """Choices of chunked_log_probs."""

    chunk_size: int
    with_entropy: bool
    transform: LogitTransform | None
    keeps: bool  # keep log-softmaxes for the backward pass
    foresight: Foresight | None
    wanted: tuple[bool, ...]  # gradients of hidden, weight, bias to compute with foresight
    kept: KeptSets | None


class _ChunkedLogProbs(torch.autograd.Function):
    """chunked_log_probs with setup_context, which torch.func.grad differentiates as well."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperatures: Tensor | None, plan: _Plan
    ) -> tuple[Tensor | None, ...]:
        """Return log-probs, entropies, log-sums; with foresight the gradient of the log-probs and those of HeadGradients; what is kept."""
        head = OutputHead(hidden, cast_once(weight, hidden), bias, targets, temperatures, plan.transform, plan.kept)
        precise = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.zeros(hidden.shape[0], dtype=precise, device=hidden.device)
        log_z = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if plan.with_entropy else log_probs.new_empty(0)
        foreseen = None if plan.foresight is None else torch.empty_like(log_probs)
        gradients = HeadGradients.zero(head, weight, plan.wanted if plan.foresight is not None else (False,) * 3)
        kept: list[Tensor] = []
        room = head.create_room(plan.chunk_size)
        for rows in head.cut(plan.chunk_size):
            logits, changed = head.compute_logits(rows, None if plan.keeps else room, keeps_changed=plan.foresight is not None)
            for part, places in _cut_to_cache(logits, rows):
                log_z[places] = part.logsumexp(-1)
                log_probs[places] = part.gather(1, targets[places, None])[:, 0] - log_z[places]
                if plan.with_entropy:
                    log_p = part.sub_(log_z[places, None]).clamp_(min=torch.finfo(precise).min)  # 0 * log 0 = 0
                    entropy[places] = -(log_p.exp().mul_(log_p)).sum(-1)
                elif plan.keeps:
                    part.sub_(log_z[places, None])
            if plan.keeps:
                kept.append(logits)
            if plan.foresight is not None and foreseen is not None:
                foreseen[rows] = plan.foresight.gradient(log_probs)[rows]
                if gradients.have_nothing(rows, foreseen):
                    continue
                for part, places in _cut_to_cache(logits, rows):
                    log_p = part if plan.with_entropy else part.sub_(log_z[places, None])
                    _differentiate(log_p, targets[places], foreseen[places])
                gradients.add(head, rows, logits, changed)
        return log_probs, entropy, log_z, foreseen, gradients.hidden, gradients.weight, gradients.bias, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        hidden, weight, bias, targets, temperatures, plan = inputs
        ctx.mark_non_differentiable(*(x for x in output[2:] if x is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, *output[1:])
        ctx.plan = plan

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the name of ctx
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, entropy, log_z, foreseen, *rest = ctx.saved_tensors
        plan: _Plan = ctx.plan
        early, kept = HeadGradients(*rest[:3]), rest[3:]
        upstream = torch.zeros_like(log_z) if grads[0] is None else grads[0].to(log_z.dtype)
        if plan.foresight is not None:
            if grads[1] is None and _have_same_bits(upstream, foreseen):
                return early.round(weight, bias)
            plan.foresight.failed = True
        del early, rest
        head = OutputHead(hidden, cast_once(weight, hidden), bias, targets, temperatures, plan.transform, plan.kept)
        gradients = HeadGradients.zero(head, weight, ctx.needs_input_grad[:3])
        upstream_entropy = grads[1].to(log_z.dtype) if plan.with_entropy and grads[1] is not None else None
        room = head.create_room(plan.chunk_size)
        for i, rows in enumerate(head.cut(plan.chunk_size)):
            if upstream_entropy is None and gradients.have_nothing(rows, upstream):
                continue
            log_p, changed = (_copy(kept[i], room), None) if kept else head.compute_logits(rows, room, keeps_changed=True)
            for part, places in _cut_to_cache(log_p, rows):
                if not kept:
                    part.sub_(log_z[places, None])
                if upstream_entropy is not None:
                    _differentiate_both(part, targets[places], upstream[places], entropy[places], upstream_entropy[places])
                else:
                    _differentiate(part, targets[places], upstream[places])
            gradients.add(head, rows, log_p, changed)
        return gradients.round(weight, bias)


class OutputHead(NamedTuple):
    """Inputs of chunked_log_probs."""

    hidden: Tensor
    weight: Tensor  # in the dtype of products
    bias: Tensor | None
    targets: Tensor
    temperatures: Tensor | None
    transform: LogitTransform | None
    kept: KeptSets | None

    def cut(self, size: int) -> list[slice]:
        """Cut the positions into chunks."""
        return [slice(start, start + size) for start in range(0, self.hidden.shape[0], size)]

    def create_room(self, size: int) -> Tensor:
        """Create the memory of a chunk's logits, which all chunks use: new pages cost as much as half a product."""
        precise = torch.promote_types(self.hidden.dtype, torch.float32)
        return torch.empty(min(size, self.hidden.shape[0]), self.weight.shape[0], dtype=precise, device=self.hidden.device)

    def compute_logits(self, rows: slice, room: Tensor | None, *, keeps_changed: bool) -> tuple[Tensor, Tensor | None]:
        """Compute logits of a chunk in float32 or better, to be overwritten, and a copy before the temperature where slopes need it.

        Args:
            room: result of create_room, which the logits may be written to; None = they have memory of their own.
        """
        logits = _chunk_logits(self.hidden[rows], self.weight, self.bias, self.transform, room)
        is_capped = self.transform is not None and self.transform.soft_cap is not None
        changed = logits.clone() if keeps_changed and is_capped else None
        if self.temperatures is not None:
            logits.div_(self.temperatures[rows, None].to(logits.dtype))
        if self.kept is not None:
            _keep_sets(logits, self.kept, rows)
        return logits, changed


class HeadGradients(NamedTuple):
    """Gradients of the inputs; None = not wanted."""

    hidden: Tensor | None
    weight: Tensor | None  # in float32 or better, as the next
    bias: Tensor | None

    @classmethod
    def zero(cls, head: OutputHead, weight: Tensor, wanted: tuple[bool, ...]) -> HeadGradients:
        """Create gradients to add to, those of hidden not filled in."""
        precise = torch.promote_types(head.hidden.dtype, torch.float32)
        return cls(
            torch.empty_like(head.hidden) if wanted[0] else None,
            torch.zeros(weight.shape, dtype=precise, device=weight.device) if wanted[1] else None,
            torch.zeros(weight.shape[0], dtype=precise, device=weight.device) if wanted[2] else None,
        )

    def have_nothing(self, rows: slice, upstream: Tensor) -> bool:
        """Whether a chunk adds nothing, since no log-prob of it has a gradient; that of hidden is then filled in."""
        if bool(upstream[rows].any()):
            return False
        if self.hidden is not None:
            self.hidden[rows] = 0
        return True

    def add(self, head: OutputHead, rows: slice, grad: Tensor, changed: Tensor | None) -> None:
        """Add the gradients of a chunk from that of its tempered logits # [C, V], which is overwritten."""
        hidden = head.hidden[rows]
        own = _find_products(hidden, head.weight, head.transform)
        if head.temperatures is not None:
            grad.div_(head.temperatures[rows, None])
        if head.transform is not None:
            head.transform.multiply_by_slope(grad, changed)
        if self.bias is not None:
            self.bias.add_(grad.sum(0))
        if self.hidden is not None:
            if own is not None:
                self.hidden[rows] = own.multiply(grad, head.weight.t())
            elif hidden.dtype == grad.dtype:
                torch.mm(grad, head.weight, out=self.hidden[rows])
            else:
                self.hidden[rows] = _precise_product(grad.to(head.weight.dtype), head.weight).to(hidden.dtype)
        if self.weight is not None:
            if own is not None:
                self.weight.add_(own.multiply_transposed(grad, hidden))
            elif hidden.dtype == grad.dtype:
                self.weight.addmm_(grad.t(), hidden)
            else:
                self.weight.add_(_precise_product(grad.to(head.weight.dtype).t(), hidden.to(head.weight.dtype)))

    def round(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the results of the backward pass: gradients in the dtypes of the inputs."""
        out_weight = None if self.weight is None else self.weight.to(weight.dtype)
        out_bias = None if self.bias is None or bias is None else self.bias.to(bias.dtype)
        return self.hidden, out_weight, out_bias, None, None, None


def _keep_sets(logits: Tensor, kept: KeptSets, rows: slice) -> None:
    """Set logits # [C, V] of these positions to -inf outside their sets, in place."""
    counts = kept.counts[rows]
    row = torch.arange(len(counts), device=logits.device).repeat_interleave(counts)
    ids = kept.ids[place_kept(kept.starts[rows], counts)].long()
    values = logits[row, ids]
    logits.masked_fill_((counts > 0)[:, None], -torch.inf)
    logits[row, ids] = values


def _cut_to_cache(chunk: Tensor, rows: slice) -> Iterator[tuple[Tensor, slice]]:
    """Cut a chunk # [C, V] of these positions into parts that stay in a core's cache between passes over them; on a GPU not."""
    size = chunk.shape[0] if chunk.is_cuda else max(1, _CACHED_NUMBERS * torch.get_num_threads() // chunk.shape[1])
    for start in range(0, chunk.shape[0], size):
        part = chunk[start : start + size]
        yield part, slice(rows.start + start, rows.start + start + len(part))


def _differentiate(log_p: Tensor, targets: Tensor, upstream: Tensor) -> None:
    """Turn log-softmaxes # [C, V] in place into the gradient of sum(upstream * log p[target]): d log p_y / d logit_v = 1[v = y] - p_v."""
    log_p.exp_().mul_(-upstream[:, None]).scatter_add_(1, targets[:, None], upstream[:, None])


def _differentiate_both(log_p: Tensor, targets: Tensor, upstream: Tensor, entropy: Tensor, upstream_entropy: Tensor) -> None:
    """Turn log-softmaxes # [C, V] in place into the gradient of _differentiate and sum(upstream_entropy * H): -p_v (log p_v + H)."""
    p = log_p.clamp_(min=torch.finfo(log_p.dtype).min).exp()  # 0 * log 0 = 0
    grad = log_p.add_(entropy[:, None]).mul_(p).mul_(upstream_entropy[:, None])
    grad.addcmul_(p, upstream[:, None]).neg_().scatter_add_(1, targets[:, None], upstream[:, None])


def _copy(values: Tensor, room: Tensor) -> Tensor:
    """Copy values # [C, V] into the first rows of a room."""
    return room[: len(values)].copy_(values)


def _have_same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype have the same bits, NaN included."""
    kind = torch.int64 if a.dtype == torch.float64 else torch.int32
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def cast_once(weight: Tensor, hidden: Tensor) -> Tensor:
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


def _chunk_logits(hidden: Tensor, head: Tensor, bias: Tensor | None, transform: LogitTransform | None, room: Tensor | None) -> Tensor:
    """Return the model's logits of one chunk in float32 or better, nobody else's tensor."""
    own = _find_products(hidden, head, transform)
    if own is not None:
        logits = own.multiply(hidden, head)
    elif room is not None and hidden.dtype == head.dtype == room.dtype:
        logits = torch.mm(hidden, head.t(), out=room[: len(hidden)])
    else:
        logits = _precise_product(hidden, head.t())
    if bias is not None:
        logits.add_(bias.to(logits.dtype))
    return logits if transform is None else transform.apply(logits)


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
