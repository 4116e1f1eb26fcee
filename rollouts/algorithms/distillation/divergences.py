"""Divergences between the next-token distributions of a policy and a teacher, exact over K tokens and the rest of the vocabulary.

    beta = 0      KL(teacher || policy), the forward one: the policy covers all that the teacher says
    beta = 1      KL(policy || teacher), the reverse one: the policy says only what the teacher would
    between       beta KL(teacher || m) + (1 - beta) KL(policy || m), m = beta teacher + (1 - beta) policy

The teacher's distribution is known by its K most probable tokens; all others together are one more outcome, whose probability is what is
left. With K = vocabulary nothing is left, and the divergence is that of the whole distributions.

Source: Agarwal et al. 2024 (On-policy distillation of language models), equation 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollouts.algorithms.logprobs import HeadGradients, LogitTransform, OutputHead, Sampling, cast_once, choose_chunk_size

_LEAST = -1e4  # nats; a log-prob below it counts as this, so that a token without probability gives a number
_SMALLEST_REST = 1e-7  # least probability of the tokens that are not among the K, where it is known as 1 - sum p, or as none


@dataclass(frozen=True, eq=False)
class TeacherTops:
    """The most probable tokens of a teacher at N positions."""

    ids: Tensor  # [N, K] integers, no token twice at a position
    log_probs: Tensor  # [N, K] nats
    beta: float  # in [0, 1], see the head of this file
    rest: Tensor | None = None  # [N] nats, of all other tokens together; None = log(1 - sum p), in float32 noise where that is below 1e-5


def divergence(log_probs: Tensor, teacher: Tensor, beta: float, *, has_rest: bool = False) -> Tensor:
    """Return the generalized Jensen-Shannon divergence of two distributions, without the chunks of chunked_divergence.

    Args:
        log_probs, teacher: # [..., K] nats, of the same K tokens.
        beta: in [0, 1]; 0 = KL(teacher || policy), 1 = KL(policy || teacher).
        has_rest: the distributions have tokens besides these, which count as one more.

    Returns: # [...] at least 0, up to rounding; differentiable with respect to log_probs.
    """
    assert 0 <= beta <= 1, f"beta is {beta}, expected a number in [0, 1]"
    if has_rest:
        log_probs, teacher = _with_rest(log_probs), _with_rest(teacher)
    policy, teacher = log_probs.clamp(min=_LEAST), teacher.clamp(min=_LEAST)
    if beta == 0:
        return (teacher.exp() * (teacher - policy)).sum(-1)
    if beta == 1:
        return (policy.exp() * (policy - teacher)).sum(-1)
    mixture = _mix(policy, teacher, beta)
    return (beta * teacher.exp() * (teacher - mixture) + (1 - beta) * policy.exp() * (policy - mixture)).sum(-1)


def chunked_divergence(
    hidden: Tensor,
    weight: Tensor,
    tops: TeacherTops,
    *,
    bias: Tensor | None = None,
    temperatures: Tensor | None = None,
    chunk_size: int | None = None,
    transform: LogitTransform | None = None,
) -> Tensor:
    """divergence(log softmax(transform(hidden @ weight.T + bias) / temperature)[ids], teacher, beta) without [N, V] logits in memory.

    Logits exist for chunk_size positions at a time, here and again in the backward pass, whose sums are in float32 or better.

    Args:
        hidden: # [N, H] last hidden states of the policy.
        weight: # [V, H] of its output layer.
        tops: of N positions; K = V is the whole vocabulary.
        bias: # [V] or None.
        temperatures: # [N] > 0, of the policy; the teacher's are in its log-probs. None = 1.
        chunk_size: positions per chunk; None = choose_chunk_size.
        transform: change of the policy's logits, before the temperature.

    Returns: # [N] nats; differentiable with respect to hidden, weight and bias.
    """
    assert hidden.shape[0] == tops.ids.shape[0], f"{hidden.shape[0]} hidden states for {tops.ids.shape[0]} positions of a teacher"
    assert tops.ids.shape[1] <= weight.shape[0], f"{tops.ids.shape[1]} tokens of a teacher for a vocabulary of {weight.shape[0]}"
    size = choose_chunk_size(weight.shape[0], hidden.device.type) if chunk_size is None else chunk_size
    wanted = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias))
    plan = _Plan(size, transform, tops.beta, wanted)
    theirs = tops.log_probs
    if tops.ids.shape[1] < weight.shape[0]:
        theirs = _with_rest(theirs) if tops.rest is None else torch.cat([theirs, tops.rest[:, None].to(theirs.dtype)], 1)
    return _ChunkedDivergence.apply(hidden, weight, bias, tops.ids, theirs, temperatures, plan)


def chunked_tops(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    sampling: Sampling | None = None,
    chunk_size: int | None = None,
    transform: LogitTransform | None = None,
) -> Tensor:
    """Return the k most probable tokens of each position and their log-probs, without gradient and without [N, V] logits in memory.

    Args:
        k: at least 1; more than the vocabulary counts as the vocabulary.
        vocab_size: tokens of a smaller vocabulary, the first of this one, over which the distribution is; None = V.
        Others: as in logprobs.chunked_log_probs.

    Returns: # [N, 2 K + 1] float32: log-probs, the largest first, then that of all other tokens together, then the token ids as numbers,
        exact below 2^24.
    """
    if vocab_size is not None:
        weight, bias = weight[:vocab_size], None if bias is None else bias[:vocab_size]
    vocab_size = weight.shape[0]
    assert vocab_size < 2**24, f"the vocabulary has {vocab_size} tokens, more than float32 numbers exactly"
    size = choose_chunk_size(vocab_size, hidden.device.type) if chunk_size is None else chunk_size
    sampling = sampling or Sampling()
    targets = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    head = OutputHead(hidden, cast_once(weight, hidden), bias, targets, sampling.temperatures, transform, sampling.kept)
    room, parts = head.create_room(size), [hidden.new_zeros((0, 2 * min(k, vocab_size) + 1), dtype=torch.float32)]
    for rows in head.cut(size):
        logits, _ = head.compute_logits(rows, room, keeps_changed=False)
        log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
        found = log_p.topk(min(k, vocab_size), dim=-1)
        rest = _sum_rest(log_p, found.indices)
        rest = torch.where(rest.isneginf(), math.log(_SMALLEST_REST), rest)  # the teacher knows no other token, or cannot say one
        parts.append(torch.cat([found.values.float(), rest.float(), found.indices.float()], -1))
    return torch.cat(parts)


class _Plan(NamedTuple):
    """Choices of chunked_divergence."""

    chunk_size: int
    transform: LogitTransform | None
    beta: float
    wanted: tuple[bool, ...]  # gradients of hidden, weight and bias


class _ChunkedDivergence(torch.autograd.Function):
    """chunked_divergence, whose slope with respect to the log-probs of the K tokens is known in closed form."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, teacher: Tensor, temperatures: Tensor | None, plan: _Plan
    ) -> Tensor:
        head = OutputHead(hidden, cast_once(weight, hidden), bias, ids, temperatures, plan.transform, None)
        out = torch.zeros(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        room = head.create_room(plan.chunk_size)
        for rows in head.cut(plan.chunk_size):
            logits, _ = head.compute_logits(rows, room, keeps_changed=False)
            log_p, places = logits.sub_(logits.logsumexp(-1, keepdim=True)), ids[rows].long()
            outcomes = log_p.gather(1, places)
            if ids.shape[1] < weight.shape[0]:
                outcomes = torch.cat([outcomes, _sum_rest(log_p, places)], 1)
            out[rows] = divergence(outcomes, teacher[rows].to(outcomes.dtype), plan.beta)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, plan = inputs
        ctx.save_for_backward(*tensors)
        ctx.plan = plan

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, ids, teacher, temperatures = ctx.saved_tensors
        plan: _Plan = ctx.plan
        head = OutputHead(hidden, cast_once(weight, hidden), bias, ids, temperatures, plan.transform, None)
        upstream = grads[0].to(torch.promote_types(hidden.dtype, torch.float32))
        gradients = HeadGradients.zero(head, weight, ctx.needs_input_grad[:3])
        room = head.create_room(plan.chunk_size)
        for rows in head.cut(plan.chunk_size):
            if gradients.have_nothing(rows, upstream):
                continue
            logits, changed = head.compute_logits(rows, room, keeps_changed=True)
            log_p, places = logits.sub_(logits.logsumexp(-1, keepdim=True)), ids[rows].long()
            outcomes = log_p.gather(1, places)
            if ids.shape[1] < weight.shape[0]:
                rest = _sum_rest(log_p, places).clamp(min=_LEAST)
                outcomes = torch.cat([outcomes, rest], 1)
                log_p.sub_(rest)  # log-probs of the other tokens among themselves
            slope = _slope(outcomes, teacher[rows].to(outcomes.dtype), plan.beta) * upstream[rows, None]
            slope.sub_(outcomes.exp().mul_(slope.sum(-1, keepdim=True)))  # slope with respect to the logit of an outcome
            k = places.shape[1]
            grad = log_p.exp_().mul_(slope[:, k:]) if slope.shape[1] > k else log_p.zero_()
            gradients.add(head, rows, grad.scatter_(1, places, slope[:, :k]), changed)
        return (*gradients.round(weight, bias)[:3], None, None, None, None)


def _sum_rest(log_probs: Tensor, places: Tensor) -> Tensor:
    """Return the log-prob of all tokens but those at `places` # [C, K] together # [C, 1], after setting the log-probs there to -inf.

    The sum has the precision of its largest summand; 1 - sum p would have that of 1.
    """
    return log_probs.scatter_(1, places, -math.inf).logsumexp(-1, keepdim=True)


def _slope(policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the derivative of divergence with respect to the policy's log-probs # [..., K], each by itself."""
    policy, teacher = policy.clamp(min=_LEAST), teacher.clamp(min=_LEAST)
    if beta == 0:
        return -teacher.exp()
    if beta == 1:
        return policy.exp() * (policy - teacher + 1)
    return (1 - beta) * policy.exp() * (policy - _mix(policy, teacher, beta))


def _mix(policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return log(beta teacher + (1 - beta) policy)."""
    share = torch.tensor(beta, dtype=policy.dtype, device=policy.device)
    return torch.logaddexp(policy + torch.log1p(-share), teacher + share.log())


def _with_rest(log_probs: Tensor) -> Tensor:
    """Append the log-prob of all other tokens together: log(1 - sum p). # [..., K] -> [..., K + 1]"""
    total = log_probs.logsumexp(-1, keepdim=True).clamp(max=-_SMALLEST_REST)
    return torch.cat([log_probs, (-total.expm1()).log()], -1)
