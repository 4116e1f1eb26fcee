"""Kahneman-Tversky optimization: answers that are good or bad, each by itself, compared with a reference point of the whole step.

The reference point z_0 is how far the policy has moved from the reference on average: mean(log p(y') - log p_ref(y')) over the prompts of
the step, each with the answer of another prompt, and at least 0. It has no gradient. Here it is computed over the whole step before the
step is split; TRL computes it over each micro-batch of a process, and averages those of its processes.

    mismatched = mismatch_answers(batch)  # prompts with the answers of other prompts
    point = kto_reference_point(policy_log_probs, ref_log_probs, mismatched.loss_mask)
    batch = replace(batch, values=torch.full_like(batch.loss_mask, float(point)), loss_weights=sample_mean(batch))
    await backend.forward_backward(part, partial(kto_loss, beta=0.1)).result()  # of each part, split in any way
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollouts.algorithms.preferences import sequence_log_probs
from rollouts.checks import check_shapes
from rollouts.types import LossOutput, TokenOutputs, TrainBatch


def kto_answer_loss(
    log_ratio: Tensor,
    desirable: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """weight * (1 - sigmoid(beta * (log_ratio - z_0))) of a good answer, weight * (1 - sigmoid(beta * (z_0 - log_ratio))) of a bad one.

    Args:
        log_ratio: # [B] log(p / p_ref) of the answers.
        desirable: # [B] bool; whether the answer is good.
        reference_point: z_0 in nats, at least 0; see kto_reference_point.
        beta: > 0; how soon an answer is good or bad enough.
        desirable_weight, undesirable_weight: lambda_D and lambda_U; with them the two kinds can be made to weigh alike.

    Returns: # [B], each in [0, weight].
    Source: Ethayarajh et al. 2024 (KTO), equations 7 and 8.
    """
    assert beta > 0, f"beta is {beta}, expected more than 0"
    check_shapes(desirable=(desirable, tuple(log_ratio.shape)))
    gain = beta * (log_ratio - reference_point)
    good = desirable.to(log_ratio.dtype)
    weight = desirable_weight * good + undesirable_weight * (1 - good)
    return weight * torch.sigmoid(torch.where(desirable, -gain, gain))  # 1 - sigmoid(x) = sigmoid(-x)


def kto_reference_point(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """max(0, mean over rows of log p(answer) - log p_ref(answer)), of mismatched answers.

    Args:
        log_probs, ref_log_probs: # [B, T] of the batch of mismatch_answers.
        mask: # [B, T], its loss_mask.

    Returns: # [], nats, without gradient; 0 without rows.
    Source: Ethayarajh et al. 2024 (KTO), section 4.1.
    """
    difference = sequence_log_probs(log_probs, mask) - sequence_log_probs(ref_log_probs, mask)
    return (difference.sum() / max(difference.numel(), 1)).clamp(min=0).detach()


def mismatch_answers(batch: TrainBatch, *, max_length: int | None = None) -> TrainBatch:
    """Join the prompt of each row to the answer of the row before it; the first row gets the last answer.

    Args:
        batch: rows that begin with a prompt, up to the first token with loss_mask > 0.
        max_length: tokens of a row beyond which its answer is cut; None = no limit.

    Returns: tokens, lengths and loss_mask of the same rows; columns of the old tokens are gone.
    """
    mask, rows = batch.loss_mask > 0, batch.num_rows
    starts = torch.where(mask.any(1), mask.to(torch.int64).argmax(1), batch.lengths).tolist()
    lengths = batch.lengths.tolist()
    joined: list[tuple[Tensor, Tensor]] = []
    for row in range(rows):
        start, before = starts[row], (row - 1) % rows
        answer = slice(starts[before], lengths[before])
        tokens = torch.cat([batch.tokens[row, :start], batch.tokens[before, answer]])
        masks = torch.cat([torch.zeros_like(batch.loss_mask[row, :start]), batch.loss_mask[before, answer]])
        joined.append((tokens[:max_length], masks[:max_length]))
    pad = torch.nn.utils.rnn.pad_sequence
    return TrainBatch(
        tokens=pad([tokens for tokens, _ in joined], batch_first=True),
        lengths=torch.tensor([len(tokens) for tokens, _ in joined]),
        loss_mask=pad([masks for _, masks in joined], batch_first=True),
        rewards=batch.rewards,
        group_ids=batch.group_ids,
        trainable=batch.trainable,
        temperatures=batch.temperatures,
    )


def label_rewards(batch: TrainBatch) -> TrainBatch:
    """Return a batch of pairs (collate_pairs) with the rewards that kto_loss reads: 1 for chosen answers, 0 for rejected ones."""
    rewards = torch.zeros_like(batch.rewards)
    rewards[0::2] = 1.0
    return replace(batch, rewards=rewards)


def kto_loss(
    outputs: TokenOutputs, batch: TrainBatch, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> LossOutput:
    """sum over rows of weight * kto_answer_loss.

    Args:
        outputs: log_probs of the policy.
        batch: rewards > 0 for good answers; ref_log_probs; values, the reference point at every token; loss_weights, whose sum over a row
            is its weight (loss_weights.sample_mean).

    Returns: metrics are means over rows, where a row counts as often as it has trained tokens, so every part of a step can be merged:
        reward_signed, beta * log(p / p_ref) of good answers and its negative of bad ones; reward_accuracy, the share of good answers above
        the reference point and bad ones below it; kto_kl, the reference point; log_prob, that of the answers.
    """
    check_shapes(log_probs=(outputs.log_probs, tuple(batch.tokens.shape)))
    assert batch.ref_log_probs is not None, "kto_loss needs batch.ref_log_probs"
    assert batch.values is not None, "kto_loss needs the reference point in batch.values: see kto_reference_point"
    assert batch.loss_weights is not None, "the loss needs batch.loss_weights: call sample_mean on the whole step first"
    mask = batch.loss_mask > 0
    counts = mask.sum(1)
    log_probs = sequence_log_probs(outputs.log_probs, batch.loss_mask)
    log_ratio = log_probs - sequence_log_probs(batch.ref_log_probs, batch.loss_mask)
    point = torch.where(mask, batch.values, 0.0).sum(1) / counts.clamp(min=1)
    desirable = batch.rewards > 0
    losses = kto_answer_loss(
        log_ratio, desirable, point, beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )
    weights = torch.where(mask, batch.loss_weights, 0.0).sum(1).to(losses.dtype)
    share = counts.to(losses.dtype) / counts.sum().clamp(min=1)
    sign = torch.where(desirable, 1.0, -1.0).to(losses.dtype)
    metrics = {
        "reward_signed": beta * sign * log_ratio,
        "reward_accuracy": (sign * (log_ratio - point) > 0).to(losses.dtype),
        "kto_kl": point.to(losses.dtype),
        "log_prob": log_probs,
    }
    return LossOutput((weights.detach() * losses).sum(), {name: (share * value.detach()).sum() for name, value in metrics.items()})
