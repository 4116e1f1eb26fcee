"""Losses on pairs of answers, one preferred to the other: direct preference losses, and the loss of a reward model.

Tier 1 works on one number per answer, its log-prob or its score:

    >>> chosen, rejected = torch.tensor([-10.0]), torch.tensor([-12.0])  # log p(answer) of the policy
    >>> reference = torch.tensor([-11.0])  # of the reference policy, here the same for both
    >>> loss, metrics = dpo_loss(chosen, rejected, reference, reference, beta=0.5)
    >>> round(loss.item(), 4)  # -log sigmoid(0.5 * ((-10 + 11) - (-12 + 11))) = log(1 + exp(-1))
    0.3133
    >>> metrics["reward_margin"].item()
    1.0

`preference_loss` and `score_loss` apply them to a TrainBatch whose rows 2i and 2i + 1 are the chosen and the rejected answer of pair i.
Split it with split_pairs, which keeps pairs whole; with the weights of pair_mean on the whole step the parts add up:

    batch = collate_samples([chosen_0, rejected_0, chosen_1, rejected_1])  # the two of a pair share their group_index
    batch = replace(batch, ref_log_probs=await reference.forward(batch, get_log_probs).result())
    batch = replace(batch, loss_weights=pair_mean(batch))
    for part in split_pairs(batch, max_tokens=8192):
        await backend.forward_backward(part, partial(preference_loss, beta=0.1)).result()
    await backend.optim_step().result()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollouts.algorithms.loss_weights import trained_mask
from rollouts.algorithms.statistics import masked_mean
from rollouts.batches import plan_microbatches, plan_sharded_microbatches, select_rows
from rollouts.checks import check_shapes
from rollouts.types import LossFn, LossOutput, TokenOutputs, TrainBatch

PairLoss: TypeAlias = Callable[[Tensor, float], Tensor]
"""f(h [P], beta) -> loss of each pair [P]; h = log(p / p_ref) of the chosen answer minus that of the rejected one."""


# -- losses of pairs


def sigmoid_pair_loss(h: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta h).

    Source: Rafailov et al. 2023 (DPO), equation 7.
    """
    return -logsigmoid(beta * h)


def smoothed_pair_loss(h: Tensor, beta: float, *, label_smoothing: float = 0.1) -> Tensor:
    """-(1 - label_smoothing) log sigmoid(beta h) - label_smoothing log sigmoid(-beta h): conservative DPO.

    Args:
        label_smoothing: share of pairs whose answers are expected to be the wrong way round, in [0, 0.5).

    Source: Mitchell 2023 (A note on DPO with noisy preferences and its relationship to IPO), equation 3.
    """
    check_smoothing(label_smoothing)
    return -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)


def robust_pair_loss(h: Tensor, beta: float, *, label_smoothing: float = 0.1) -> Tensor:
    """(-(1 - label_smoothing) log sigmoid(beta h) + label_smoothing log sigmoid(-beta h)) / (1 - 2 label_smoothing): robust DPO.

    Its expectation over answers exchanged with this probability is DPO's loss on the pairs as they should be.

    Args:
        label_smoothing: share of pairs whose answers are the wrong way round, in [0, 0.5).

    Source: Chowdhury et al. 2024 (Provably robust DPO), equation 10.
    """
    check_smoothing(label_smoothing)
    return (-(1 - label_smoothing) * logsigmoid(beta * h) + label_smoothing * logsigmoid(-beta * h)) / (1 - 2 * label_smoothing)


def ipo_pair_loss(h: Tensor, beta: float) -> Tensor:
    """(h - 1 / (2 beta))^2.

    With log-probs per token (average=True), as the authors do in their experiments, and TRL; the paper writes them per answer.

    Source: Azar et al. 2023 (IPO), equation 17, where beta is tau.
    """
    return (h - 1 / (2 * beta)).square()


def hinge_pair_loss(h: Tensor, beta: float) -> Tensor:
    """max(0, 1 - beta h).

    Source: Zhao et al. 2023 (SLiC-HF), equation 1; against a reference, as here: Liu et al. 2023 (RSO), equation 10.
    """
    return torch.relu(1 - beta * h)


def simpo_pair_loss(h: Tensor, beta: float, *, gamma: float = 0.5) -> Tensor:
    """-log sigmoid(beta h - gamma), for h of log-probs per token without a reference (average=True, reference_free=True).

    Args:
        gamma: least difference of the two rewards that training aims at, in units of the reward; 0.3 to 1.6 in the paper.

    Source: Meng et al. 2024 (SimPO), equation 6.
    """
    return -logsigmoid(beta * h - gamma)


def check_smoothing(label_smoothing: float) -> None:
    """Assert that label_smoothing is a share of exchanged answers below one half."""
    assert 0 <= label_smoothing < 0.5, f"label_smoothing is {label_smoothing}, expected at least 0 and less than 0.5"


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None,
    ref_rejected: Tensor | None,
    *,
    beta: float = 0.1,
    pair_loss: PairLoss = sigmoid_pair_loss,
    weights: Tensor | None = None,
    counts: Tensor | None = None,
) -> LossOutput:
    """sum(weights * pair_loss(h, beta)), h = (log p - log p_ref)(chosen) - (log p - log p_ref)(rejected).

    Args:
        chosen, rejected: # [P] log-probs of the answers under the policy (sequence_log_probs).
        ref_chosen, ref_rejected: # [P] under the reference policy; both None = reference-free, as if it found all answers equally likely.
        beta: > 0; strength of the pull to the reference.
        pair_loss: (h, beta) -> loss of each pair: one of this file, or the caller's own.
        weights: # [P] of the loss; None = 1 / P.
        counts: # [P] weights of pairs in the means of the metrics; None = all the same.

    Returns: metrics are means over pairs: reward_chosen and reward_rejected, beta * log(p / p_ref); reward_margin, their difference;
        reward_accuracy, the share of pairs with a margin > 0; log_prob_chosen and log_prob_rejected.
    Source: Rafailov et al. 2023 (DPO), equation 7.
    """
    assert beta > 0, f"beta is {beta}, expected more than 0"
    assert (ref_chosen is None) == (ref_rejected is None), "give both ref_chosen and ref_rejected, or neither"
    shape = tuple(chosen.shape)
    check_shapes(rejected=(rejected, shape), ref_chosen=(ref_chosen, shape), ref_rejected=(ref_rejected, shape))
    reward_chosen = beta * (chosen if ref_chosen is None else chosen - ref_chosen)
    reward_rejected = beta * (rejected if ref_rejected is None else rejected - ref_rejected)
    margin = reward_chosen - reward_rejected
    metrics = {
        "reward_chosen": reward_chosen,
        "reward_rejected": reward_rejected,
        "reward_margin": margin,
        "reward_accuracy": (margin > 0).to(margin.dtype),
        "log_prob_chosen": chosen,
        "log_prob_rejected": rejected,
    }
    return _weighted(pair_loss(margin / beta, beta), metrics, weights, counts)


def odds_ratio_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, weights: Tensor | None = None, counts: Tensor | None = None
) -> LossOutput:
    """sum(weights * (-log p(chosen) - beta * log sigmoid(log odds(chosen) - log odds(rejected)))), odds = p / (1 - p): ORPO.

    Args:
        chosen, rejected: # [P] log-probs of the answers per token (sequence_log_probs with average=True), at most 0.
        beta: >= 0; weight of the odds ratio, lambda in the paper.
        weights, counts: as in dpo_loss.

    Returns: metrics as in dpo_loss, with rewards beta * log p, and log_odds, the log of the ratio of the odds.
    Source: Hong et al. 2024 (ORPO), equations 4, 6 and 7. The first term is the mean over the answer's tokens and then over pairs; TRL
        takes it over all tokens of the chosen answers and their prompts at once.
    """
    assert beta >= 0, f"beta is {beta}, expected at least 0"
    check_shapes(rejected=(rejected, tuple(chosen.shape)))
    log_odds = (chosen - rejected) - (_log_not(chosen) - _log_not(rejected))
    metrics = {
        "reward_chosen": beta * chosen,
        "reward_rejected": beta * rejected,
        "reward_margin": beta * (chosen - rejected),
        "reward_accuracy": (chosen > rejected).to(chosen.dtype),
        "log_prob_chosen": chosen,
        "log_prob_rejected": rejected,
        "log_odds": log_odds,
    }
    return _weighted(-chosen - beta * logsigmoid(log_odds), metrics, weights, counts)


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    margin: float | Tensor | None = None,
    *,
    weights: Tensor | None = None,
    counts: Tensor | None = None,
) -> LossOutput:
    """sum(weights * -log sigmoid(r(chosen) - r(rejected) - margin)): the loss of a reward model.

    Args:
        chosen_scores, rejected_scores: # [P], scalars r of the reward model.
        margin: minimum margin of the chosen answer; a number, or # [P], larger for surer annotations. None = 0.
        weights: # [P] of the loss; None = 1 / P. For a prompt with K ranked answers: 1 / (its number of pairs * number of prompts).
        counts: # [P] weights of pairs in the means of the metrics; None = all the same.

    Returns: metrics are means over pairs: score_chosen, score_rejected, score_margin, score_accuracy (a score_margin > 0).
    Source: Ouyang et al. 2022 (InstructGPT), equation 1; the margin: Touvron et al. 2023 (Llama 2), equation 2.
    """
    shape = tuple(chosen_scores.shape)
    check_shapes(rejected_scores=(rejected_scores, shape), margin=(margin if isinstance(margin, Tensor) else None, shape))
    difference = chosen_scores - rejected_scores
    metrics = {
        "score_chosen": chosen_scores,
        "score_rejected": rejected_scores,
        "score_margin": difference,
        "score_accuracy": (difference > 0).to(difference.dtype),
    }
    return _weighted(-logsigmoid(difference if margin is None else difference - margin), metrics, weights, counts)


def sequence_log_probs(log_probs: Tensor, mask: Tensor, *, average: bool = False) -> Tensor:
    """log p(answer) = sum of the log-probs of its tokens.

    Args:
        log_probs: # [B, T]; values at mask = 0 are ignored.
        mask: # [B, T]; a fraction scales a token.
        average: divide by the sum of the mask.

    Returns: # [B]; 0 for a row without trained tokens.
    """
    check_shapes(mask=(mask, tuple(log_probs.shape)))
    on = mask.to(log_probs.dtype)
    total = (torch.where(mask > 0, log_probs, torch.zeros_like(log_probs)) * on).sum(1)
    count = on.sum(1)
    return total / torch.where(count > 0, count, torch.ones_like(count)) if average else total


def last_scores(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the score of each row: the value at its last trained token.

    Args:
        values: # [B, T] of a reward model (compute_scores).
        loss_mask: # [B, T].

    Returns: # [B]; 0 for a row without trained tokens; keeps the gradient.
    """
    check_shapes(values=(values, tuple(loss_mask.shape)))
    positions = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    last = torch.where(loss_mask > 0, positions, -1).amax(1, keepdim=True)
    return torch.where(positions == last, values, torch.zeros_like(values)).sum(1)


def pair_mean(batch: TrainBatch, *, num_pairs: float | None = None) -> Tensor:
    """1 / (number of pairs) at every trained token, the pair's weight; 0 for a pair with an untrained row.

    Args:
        num_pairs: number in the whole step, if the batch is a part of it; None = pairs of the batch with trained tokens in both rows.

    Returns: # [B, T], for batch.loss_weights.
    """
    _check_pairs(batch)
    mask = trained_mask(batch) > 0
    whole = mask.any(1).reshape(-1, 2).all(1)
    count = max(int(whole.sum()), 1) if num_pairs is None else num_pairs
    assert count > 0, f"num_pairs is {num_pairs}, expected more than 0"
    return (mask & whole.repeat_interleave(2)[:, None]).to(batch.loss_mask.dtype) / count


def split_pairs(batch: TrainBatch, *, max_tokens: int | None = None, max_pairs: int | None = None, num_shards: int = 1) -> list[TrainBatch]:
    """Split a batch as batches.split_microbatches, keeping the two rows of a pair together, chosen before rejected.

    Args:
        max_tokens: maximum number of real tokens in a part; a longer pair gets its own part. None = no limit.
        max_pairs: maximum number of pairs in a part; None = no limit.
        num_shards: ranks that each part is dealt to, pair by pair; max_tokens is then for one rank, and max_pairs is None.
    """
    _check_pairs(batch)
    lengths = batch.lengths.reshape(-1, 2).sum(1).tolist()
    if num_shards > 1 and max_tokens is not None:
        assert max_pairs is None, f"max_pairs is {max_pairs} with num_shards {num_shards}: give max_tokens alone"
        plan = plan_sharded_microbatches(lengths, max_tokens=max_tokens, num_shards=num_shards)
    else:
        plan = plan_microbatches(lengths, max_tokens=max_tokens, max_rows=max_pairs)
    return [select_rows(batch, [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]) for pairs in plan]


def preference_loss(
    outputs: TokenOutputs,
    batch: TrainBatch,
    *,
    beta: float = 0.1,
    pair_loss: PairLoss = sigmoid_pair_loss,
    reference_free: bool = False,
    average: bool = False,
    nll_coef: float = 0.0,
) -> LossOutput:
    """dpo_loss of a batch's answers, and perhaps the negative log-likelihood of the chosen ones.

    Args:
        outputs: log_probs of the policy.
        batch: loss_weights of pair_mean, and ref_log_probs unless reference_free.
        beta, pair_loss: as in dpo_loss.
        average: log-probs per token, not per answer (IPO in TRL; SimPO's length normalisation).
        nll_coef: weight of -log p(chosen) per token, averaged over pairs (Pang et al. 2024, Iterative RPO, equation 1); 0 = none.

    Returns: metrics as in dpo_loss, where a pair counts as often as it has trained tokens: every part of a step can then be merged.
    Asserts: rows come in pairs, and the two rows of each have one group id and one weight.
    """
    weights, counts = _pair_weights(batch)
    check_shapes(log_probs=(outputs.log_probs, tuple(batch.tokens.shape)))
    assert reference_free or batch.ref_log_probs is not None, "preference_loss needs batch.ref_log_probs, or reference_free=True"
    chosen, rejected = _halves(sequence_log_probs(outputs.log_probs, batch.loss_mask, average=average))
    ref_chosen, ref_rejected = None, None
    if not reference_free and batch.ref_log_probs is not None:
        ref_chosen, ref_rejected = _halves(sequence_log_probs(batch.ref_log_probs, batch.loss_mask, average=average))
    found = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=beta, pair_loss=pair_loss, weights=weights, counts=counts)
    if not nll_coef:
        return found
    likely, _ = _halves(sequence_log_probs(outputs.log_probs, batch.loss_mask, average=True))
    likelihood = _weighted(-likely, {"nll_chosen": -likely}, weights, counts)
    return LossOutput(found.loss + nll_coef * likelihood.loss, {**found.metrics, **likelihood.metrics})


def orpo_loss(outputs: TokenOutputs, batch: TrainBatch, *, beta: float = 0.1) -> LossOutput:
    """odds_ratio_loss of a batch's answers; it needs no reference.

    Args:
        outputs: log_probs of the policy.
        batch: loss_weights of pair_mean.

    Asserts: as preference_loss.
    """
    weights, counts = _pair_weights(batch)
    check_shapes(log_probs=(outputs.log_probs, tuple(batch.tokens.shape)))
    chosen, rejected = _halves(sequence_log_probs(outputs.log_probs, batch.loss_mask, average=True))
    return odds_ratio_loss(chosen, rejected, beta=beta, weights=weights, counts=counts)


def score_loss(outputs: TokenOutputs, batch: TrainBatch, *, margin_from_rewards: bool = False) -> LossOutput:
    """bradley_terry_loss of a batch's answers; the score of an answer is the value at its last trained token.

    Args:
        outputs: values # [B, T] of a reward model, a backend with compute_outputs=compute_scores.
        batch: loss_weights of pair_mean.
        margin_from_rewards: whether the margin of a pair is rewards[2i] - rewards[2i + 1], for example of ratings.

    Returns: metrics as in bradley_terry_loss, where a pair counts as often as it has trained tokens.
    Asserts: as preference_loss.
    """
    weights, counts = _pair_weights(batch)
    assert outputs.values is not None, "score_loss needs outputs.values: the model has no value head"
    chosen, rejected = _halves(last_scores(outputs.values, batch.loss_mask))
    margin = None
    if margin_from_rewards:
        preferred, other = _halves(batch.rewards)
        margin = (preferred - other).to(chosen.dtype)
    return bradley_terry_loss(chosen, rejected, margin, weights=weights, counts=counts)


# -- pairs among the rows of a rollout batch, by the pair_ids and the signs of advantages that estimators.estimate_pairs fills


def order_pairs(batch: TrainBatch) -> list[int]:
    """Return the positions of the rows with a pair, chosen before rejected, pair by pair.

    Asserts: each pair has two rows, one of advantages above 0 and one of advantages below.
    """
    assert batch.pair_ids is not None and batch.advantages is not None, (
        "pair_ids and advantages say which rows are compared: estimate_pairs"
    )
    sides = torch.where(batch.loss_mask > 0, batch.advantages, torch.zeros_like(batch.advantages)).sum(1)
    places = [row for row, pair in enumerate(batch.pair_ids.tolist()) if pair >= 0]
    places.sort(key=lambda row: (int(batch.pair_ids[row]), -float(sides[row])))  # type: ignore[index]
    ids, signs = batch.pair_ids[places].tolist(), sides[places].sign().tolist()
    whole = ids[0::2] == ids[1::2] and len(set(ids[0::2])) == len(ids[0::2]) and signs == [1.0, -1.0] * (len(signs) // 2)
    assert whole, f"the rows of pairs {ids} have the sides {signs}, expected 1 and -1 of each: pairs stay whole, see split_pairs"
    return places


def paired_mean(batch: TrainBatch, *, num_pairs: float | None = None) -> Tensor:
    """1 / (number of pairs) at every trained token of a row with a pair, by pair_ids; 0 elsewhere.

    Args:
        num_pairs: number in the whole step, if the batch is a part of it; None = that of the batch.

    Returns: # [B, T], for batch.loss_weights.
    """
    assert batch.pair_ids is not None, "paired_mean needs batch.pair_ids: call estimate_pairs first"
    paired = batch.pair_ids >= 0
    count = max(int(paired.sum()) // 2, 1) if num_pairs is None else num_pairs
    return ((trained_mask(batch) > 0) & paired[:, None]).to(batch.loss_mask.dtype) / max(count, 1)


def paired_loss(outputs: TokenOutputs, batch: TrainBatch, *, loss: LossFn) -> LossOutput:
    """Compute a loss of pairs, such as preference_loss, on the rows of a batch that have one by pair_ids, in any order.

    Args:
        outputs: log_probs of the policy.
        batch: pair_ids and advantages of estimate_pairs, loss_weights of paired_mean, and what `loss` reads. Pairs are whole.
        loss: a loss of rows 2i and 2i + 1.

    Returns: metrics of `loss`, and the entropy if it was computed; without a pair the loss is 0.
    """
    rows = order_pairs(batch)
    if not rows:
        return LossOutput(0.0 * outputs.log_probs.sum(), {})
    pairs = select_rows(batch, rows)
    width = pairs.tokens.shape[1]
    found, metrics = loss(TokenOutputs(log_probs=outputs.log_probs[rows, :width]), pairs)
    if outputs.entropy is not None:
        entropy = torch.where(pairs.loss_mask > 0, outputs.entropy.detach()[rows, :width], 0.0)
        metrics = {**metrics, "entropy": masked_mean(entropy, (pairs.loss_mask > 0).to(entropy.dtype))}
    return LossOutput(found, metrics)


def measure_pairs(batch: TrainBatch, *, compares_pairs: bool = True) -> dict[str, float]:
    """Count the pairs that estimate_pairs made, and the groups that it made none of.

    Args:
        compares_pairs: Algorithm.compares_pairs of the algorithm whose estimate filled the batch; asserted to match.

    Returns: num_pairs; num_ties, the other groups with a token in a loss_mask: their rewards do not tell a better answer from a worse one;
        reward_gap, the mean difference of the rewards of a pair, 0 without pairs. Empty for a batch without pair_ids.
    """
    filled = batch.pair_ids is not None
    assert filled == compares_pairs, f"compares_pairs is {compares_pairs}, but the estimate {'fills' if filled else 'fills no'} pair_ids"
    if not filled:
        return {}
    rows = order_pairs(batch)
    groups = int(batch.group_ids[(batch.loss_mask > 0).any(1)].unique().numel())
    gaps = batch.rewards[rows[0::2]] - batch.rewards[rows[1::2]]
    return {
        "num_pairs": len(rows) / 2,
        "num_ties": groups - len(rows) / 2,
        "reward_gap": float(gaps.mean()) if rows else 0.0,
    }


# -- parts


def _log_not(log_p: Tensor) -> Tensor:
    """log(1 - p); finite also where p rounds to 1."""
    return torch.log(-torch.expm1(log_p.clamp(max=-torch.finfo(log_p.dtype).eps)))


def _weighted(per_pair: Tensor, metrics: Mapping[str, Tensor], weights: Tensor | None, counts: Tensor | None) -> LossOutput:
    """sum(weights * per_pair), and means of the metrics by counts; 0 without pairs."""
    shape = tuple(per_pair.shape)
    check_shapes(weights=(weights, shape), counts=(counts, shape))
    if weights is None:
        weights = torch.full_like(per_pair, 1 / max(per_pair.numel(), 1))
    share = torch.ones_like(per_pair) if counts is None else counts.to(per_pair.dtype)
    share = share / share.sum().clamp(min=torch.finfo(share.dtype).tiny)
    return LossOutput((weights.detach() * per_pair).sum(), {name: (share * value.detach()).sum() for name, value in metrics.items()})


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split [B] into the chosen and the rejected rows, [P] each."""
    return x[0::2], x[1::2]


def _check_pairs(batch: TrainBatch) -> None:
    assert batch.num_rows % 2 == 0, f"{batch.num_rows} rows are not pairs of a chosen and a rejected answer: split with split_pairs"
    first, second = batch.group_ids[0::2], batch.group_ids[1::2]
    apart = (first != second).nonzero().flatten().tolist()
    rows = f"rows {2 * apart[0]} and {2 * apart[0] + 1} have group ids {batch.group_ids[2 * apart[0] :][:2].tolist()}" if apart else ""
    assert not apart, f"{rows}, expected one: the two answers of a pair share their group, and a batch is split with split_pairs"


def _pair_weights(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Return the weight of each pair in the loss, and its number of trained tokens. # [P] each."""
    _check_pairs(batch)
    assert batch.loss_weights is not None, "the loss needs batch.loss_weights: call pair_mean on the whole step first"
    mask = batch.loss_mask > 0
    chosen, rejected = _halves(torch.where(mask, batch.loss_weights, torch.zeros_like(batch.loss_weights)).amax(1))
    assert torch.equal(chosen, rejected), f"the rows of a pair have weights {chosen.tolist()} and {rejected.tolist()}: use pair_mean"
    return chosen, mask.sum(1).reshape(-1, 2).sum(1)
