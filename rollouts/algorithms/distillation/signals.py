"""On-policy distillation: the signal of a teacher at every token, as advantages of sampled tokens or as a divergence of distributions.

Both come with rewards or without. The teacher's numbers are columns of the batch: teacher_log_probs, its log-probs of the sampled tokens;
teacher_ids and teacher_tops, its most probable tokens (rollouts/training/distillation/teachers.py fills them).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rollouts.algorithms.advantages import discounted_returns, normalize_by_group
from rollouts.algorithms.estimators import check_advantages, policy_log_probs
from rollouts.algorithms.loss_weights import trained_mask
from rollouts.algorithms.statistics import group_mean, group_std, masked_mean
from rollouts.errors import DataError
from rollouts.types import LossFn, LossOutput, TokenOutputs, TrainBatch

_HALVED = math.log(2)  # the teacher gives a token less than half of the policy's probability


def estimate_from_teacher(
    batch: TrainBatch, *, coef: float = 1.0, gamma: float = 0.0, bound: float | None = None, reward_coef: float = 0.0, epsilon: float = 1e-4
) -> TrainBatch:
    """A_t = coef * sum_{s >= t} gamma^(s - t) (log p_teacher(y_s) - log p(y_s)) + reward_coef * (r - mean(group)) / std(group).

    At tokens that the policy sampled, log p - log p_teacher is an unbiased estimate of KL(policy || teacher): the advantage lowers it.

    Args:
        batch: teacher_log_probs; log p are old_log_probs or, without them, rollout_log_probs.
        coef: factor of the teacher's signal, at least 0.
        gamma: discount of the signal of later tokens, in [0, 1]; 0 = each token has its own alone.
        bound: most nats of a token's signal, on both sides; None = no bound.
        reward_coef: factor of the group-relative advantage of the reward; 0 = rewards are not read.
        epsilon: added to the standard deviation.

    Returns: advantages # [B, T], 0 where loss_mask = 0.
    Raises: DataError if an advantage is not finite.

    Source: Thinking Machines 2025 (On-policy distillation); incorporate_kl_penalty of tinker-cookbook, which has gamma = 0 by default.
    """
    assert batch.teacher_log_probs is not None, "distillation needs batch.teacher_log_probs: name it in Algorithm.requires"
    on, zero = batch.loss_mask > 0, torch.zeros_like(batch.loss_mask)
    signal = torch.where(on, batch.teacher_log_probs - policy_log_probs(batch), zero)
    if bound is not None:
        signal = signal.clamp(-bound, bound)
    advantages = coef * (signal if gamma == 0 else discounted_returns(signal, batch.loss_mask, gamma))
    if reward_coef:
        advantages = advantages + reward_coef * _compare_rewards(batch, epsilon)
    return check_advantages(replace(batch, advantages=torch.where(on, advantages, zero)))


def estimate_beside_divergence(batch: TrainBatch, *, beta: float, reward_coef: float = 0.0, epsilon: float = 1e-4) -> TrainBatch:
    """Ask for the divergence of `beta` in every pass that is trained on, and fill reward_coef * (r - mean(group)) / std(group).

    Args:
        batch: teacher_ids and teacher_tops.
        beta: see divergences.py.
        reward_coef, epsilon: as in estimate_from_teacher; with 0 no advantages are filled.
    """
    assert batch.teacher_ids is not None, "a divergence needs batch.teacher_ids: name teacher_tops in Algorithm.requires"
    batch = replace(batch, teacher_beta=torch.full_like(batch.rewards, beta, dtype=torch.float32))
    if not reward_coef:
        return batch
    advantages = torch.where(batch.loss_mask > 0, reward_coef * _compare_rewards(batch, epsilon), torch.zeros_like(batch.loss_mask))
    return check_advantages(replace(batch, advantages=advantages))


def _compare_rewards(batch: TrainBatch, epsilon: float) -> Tensor:
    """Return GRPO's advantages of the rewards, at every token. # [B, T]"""
    compared = normalize_by_group(batch.rewards, batch.group_ids, mean_level=group_mean, std_level=group_std, epsilon=epsilon)
    return compared[:, None].expand_as(batch.loss_mask)


def divergence_loss(outputs: TokenOutputs, batch: TrainBatch, *, coef: float = 1.0, beside: LossFn | None = None) -> LossOutput:
    """coef * sum(loss_weights * importance_weights * divergence) + the loss `beside`, such as a policy loss of rewards.

    Args:
        outputs: divergence # [B, T] of policy and teacher, which backends compute for a batch with teacher_beta.
        coef: factor of the divergence.
        beside: a loss of the same tokens; None = none.

    Returns: metrics of `beside`, and teacher_divergence, the mean per token in nats, without weights. If the batch has
        importance_weights, which corrections fill: importance_weight, max_importance_weight, dropped_fraction (weight 0), as policy_loss.
    """
    assert batch.loss_weights is not None, "the loss needs batch.loss_weights: call algorithm.weigh (or token_mean) on the whole step first"
    if outputs.divergence is None:
        raise DataError(
            "the policy's backend computed no divergence from the teacher: the divergences of gkd are trained with --backend.kind pytorch "
            "or fsdp (create_pytorch_backend, create_fsdp_backend). Use one of them, or the sampled tokens alone: opd"
        )
    on = batch.loss_mask > 0
    per_token = torch.where(on, outputs.divergence, torch.zeros_like(outputs.divergence))
    weighted, metrics = per_token, dict[str, Tensor]()
    if batch.importance_weights is not None:
        scale = torch.where(on, batch.importance_weights, torch.zeros_like(per_token))
        weighted = torch.where(scale != 0, scale * per_token, torch.zeros_like(per_token))
        mean = partial(masked_mean, mask=on.to(per_token.dtype))
        metrics = {"importance_weight": mean(scale), "dropped_fraction": mean((scale == 0).to(per_token.dtype))}
        metrics["max_importance_weight"] = scale.detach().max()
    loss = coef * (batch.loss_weights * weighted).sum()
    if beside is not None:
        more, found = beside(outputs, batch)
        loss, metrics = loss + more, {**metrics, **found}
    elif outputs.entropy is not None:
        entropy = torch.where(on, outputs.entropy.detach(), torch.zeros_like(per_token))
        metrics["entropy"] = masked_mean(entropy, on.to(per_token.dtype))
    return LossOutput(loss, {**metrics, "teacher_divergence": masked_mean(per_token.detach(), on.to(per_token.dtype))})


def measure_teacher(batch: TrainBatch) -> dict[str, float]:
    """Measure the distance of the policy that sampled from its teacher, over the trained tokens of a batch, before any update.

    Returns: teacher_kl, the mean of log p - log p_teacher in nats, an estimate of KL(policy || teacher) per token; teacher_doubt_fraction,
        the share of tokens that the teacher gives less than half of the policy's probability. Empty if either log-probs are not known.
    """
    own = batch.rollout_log_probs if batch.old_log_probs is None else batch.old_log_probs
    if batch.teacher_log_probs is None or own is None:
        return {}
    on = trained_mask(batch) > 0
    distance = torch.where(on, own - batch.teacher_log_probs, torch.zeros_like(own))
    mean = partial(masked_mean, mask=on.to(distance.dtype))
    return {"teacher_kl": float(mean(distance)), "teacher_doubt_fraction": float(mean((distance > _HALVED).to(distance.dtype)))}
