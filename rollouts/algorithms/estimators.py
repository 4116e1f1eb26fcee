"""Estimators, TrainBatch -> TrainBatch: from rewards (and values) to advantages (and returns), once per rollout batch.

Every estimator fills advantages [B, T], 0 where loss_mask = 0. Rows that are not trainable count in the statistics of their group, not in
those over tokens: whitened advantages of such a row are 0. Several subtract a KL penalty from the reward of each token: pass kl (an
estimator of kl.py) and kl_coef; the column kl_coef of a controller replaces it if it is filled. The policy's log-probs
are then old_log_probs or, without them, rollout_log_probs. An advantage that is not finite raises DataError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rollouts.algorithms.advantages import (
    RatioClips,
    apply_kl_penalty,
    discounted_returns,
    gae,
    gdpo_advantages,
    gpg_advantages,
    greedy_baseline,
    in_unequal_group,
    length_weighted_mean,
    max_rl_advantages,
    normalize_by_group,
    optimal_token_baseline,
    pass_at_k_advantages,
    reward_at_last_token,
    squared_scores,
    vtrace,
)
from rollouts.algorithms.anchors import (
    GiGPOSettings,
    estimate_turn_levels,
    spread_turns,
    turn_advantages,
)
from rollouts.algorithms.kl import KLEstimator
from rollouts.algorithms.loss_weights import trained_mask
from rollouts.algorithms.statistics import GroupStatistic, count_tokens, group_mean, group_std
from rollouts.algorithms.statistics import whiten as whiten_tokens
from rollouts.errors import DataError
from rollouts.types import TrainBatch


def check_advantages(batch: TrainBatch) -> TrainBatch:
    """Return the batch as it is; raises DataError, naming the row and the value, if an advantage is not finite."""
    assert batch.advantages is not None, "advantages is None: an estimator fills it"
    bad = ~batch.advantages.isfinite()
    if not bool(bad.any()):
        return batch
    row, column = (int(i) for i in bad.nonzero()[0])
    raise DataError(
        f"the advantage of row {row} (group {int(batch.group_ids[row])}, reward {batch.rewards[row].item():g}) is "
        f"{batch.advantages[row, column].item()} at token {column}, {int(bad.any(dim=1).sum())} of {batch.num_rows} rows are not finite: "
        "check the rewards, and the values and log-probs that the algorithm reads"
    )


def policy_log_probs(batch: TrainBatch) -> Tensor:
    """Return old_log_probs or, if they are not filled, rollout_log_probs. # [B, T]."""
    found = batch.rollout_log_probs if batch.old_log_probs is None else batch.old_log_probs
    assert found is not None, "neither old_log_probs nor rollout_log_probs is filled: name one in Algorithm.requires"
    return found


def penalized_token_rewards(batch: TrainBatch, kl: KLEstimator | None, kl_coef: float) -> Tensor:
    """Return the reward on the last trained token of each row, minus kl_coef * kl at every trained token.

    Args:
        kl: None = no penalty.
        kl_coef: coefficient of the penalty; batch.kl_coef replaces it if it is filled.

    Returns: # [B, T], 0 where loss_mask = 0.
    """
    return _subtract_kl(batch, reward_at_last_token(batch.rewards, batch.loss_mask), kl, kl_coef)


def _subtract_kl(batch: TrainBatch, token_rewards: Tensor, kl: KLEstimator | None, kl_coef: float) -> Tensor:
    assert kl is not None or kl_coef == 0, f"kl_coef is {kl_coef} but kl is None: pass an estimator of rollouts.algorithms.kl"
    if kl is None or (batch.kl_coef is None and kl_coef == 0):
        return token_rewards
    assert batch.ref_log_probs is not None, "a KL penalty needs ref_log_probs: name it in Algorithm.requires"
    coefficient = kl_coef if batch.kl_coef is None else batch.kl_coef
    return apply_kl_penalty(token_rewards, policy_log_probs(batch), batch.ref_log_probs, batch.loss_mask, coefficient, kl)[0]


def _fill(
    batch: TrainBatch, advantages: Tensor, returns: Tensor | None = None, *, whiten: bool = False, by_group: bool = False
) -> TrainBatch:
    """Fill advantages [B] or [B, T] and returns [B, T], zeroed where loss_mask = 0 and checked; then whiten over the trained tokens of the
    batch or, if by_group, of each group."""
    on, nothing = batch.loss_mask > 0, torch.zeros_like(batch.loss_mask)
    advantages = torch.where(on, advantages[:, None] if advantages.dim() == 1 else advantages, nothing)
    returns = batch.returns if returns is None else torch.where(on, returns, nothing)
    filled = check_advantages(replace(batch, advantages=advantages, returns=returns))  # before whitening, which spreads a NaN to all rows
    if not whiten:
        return filled
    trained = (trained_mask(batch) > 0).to(advantages.dtype)
    if by_group:
        biased = partial(group_std, unbiased=False)  # as AReaL's masked_normalization does, its epsilon included
        normal = normalize_by_group(advantages, batch.group_ids, mask=trained, std_level=biased, epsilon=1e-5)
        return check_advantages(replace(filled, advantages=normal))
    return check_advantages(replace(filled, advantages=whiten_tokens(advantages, trained)))


def _check_rewards(batch: TrainBatch) -> None:
    bad = ~batch.rewards.isfinite()
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise DataError(
            f"the reward of row {row} (group {int(batch.group_ids[row])}) is {batch.rewards[row].item()}: rewards must be finite"
        )


# -- from the rewards of a group


def estimate_group_relative(
    batch: TrainBatch,
    *,
    mean_level: GroupStatistic | None = group_mean,
    std_level: GroupStatistic | None = group_std,
    epsilon: float = 1e-4,
    keep_single: bool = False,
) -> TrainBatch:
    """A_t = (r - mean) / (std + epsilon), see normalize_by_group; the same on every trained token of a row (GRPO, Dr. GRPO, RLOO)."""
    _check_rewards(batch)
    return _fill(
        batch,
        normalize_by_group(
            batch.rewards, batch.group_ids, mean_level=mean_level, std_level=std_level, epsilon=epsilon, keep_single=keep_single
        ),
    )


def estimate_reinforce_plus_plus_baseline(
    batch: TrainBatch,
    *,
    kl: KLEstimator | None = None,
    kl_coef: float = 0.0,
    whiten: bool = True,
    keep_single: bool = False,
) -> TrainBatch:
    """A_t = r - mean of the group - kl_coef * kl_t, then whitened over all trained tokens of the batch.

    Args:
        kl, kl_coef: penalty on each token; the paper puts its KL (k2) into the loss and has none here.
        whiten: whether to whiten.
        keep_single: see normalize_by_group.

    Source: Hu et al. 2025 (REINFORCE++), the variant with baseline.
    """
    _check_rewards(batch)
    centered = normalize_by_group(batch.rewards, batch.group_ids, std_level=None, keep_single=keep_single)
    advantages = _subtract_kl(batch, centered[:, None].expand_as(batch.loss_mask), kl, kl_coef)
    return _fill(batch, advantages, whiten=whiten)


def estimate_greedy_baseline(batch: TrainBatch, *, kl: KLEstimator | None = None, kl_coef: float = 0.0) -> TrainBatch:
    """A_t = G_t - r(greedy sample of the prompt), G_t = the undiscounted reward from token t on; fills returns with G.

    The greedy sample is the row of the group with trainable = False; of several, their mean counts. Without a KL penalty G_t = r.

    Args:
        kl, kl_coef: penalty on each token.

    Source: Li et al. 2023 (ReMax).
    """
    _check_rewards(batch)
    baseline = greedy_baseline(batch.rewards, batch.group_ids, batch.trainable)
    if not bool(baseline.isfinite().all()):
        group = int(batch.group_ids[~baseline.isfinite()][0])
        raise DataError(f"group {group} has no row with trainable = False: sample one greedy answer to every prompt, it is the baseline")
    returns = discounted_returns(penalized_token_rewards(batch, kl, kl_coef), batch.loss_mask)
    return _fill(batch, returns - baseline[:, None], returns)


def estimate_opo(batch: TrainBatch, *, keep_single: bool = False) -> TrainBatch:
    """A = r - sum_i l_i r_i / sum_i l_i over the group, l = number of trained tokens: the baseline of least variance if
    gradients of tokens are alike and uncorrelated.

    Args:
        keep_single: see length_weighted_mean.

    Source: Hao et al. 2025 (On-policy RL with optimal reward baseline).
    """
    _check_rewards(batch)
    lengths = count_tokens(batch.loss_mask)
    return _fill(batch, batch.rewards - length_weighted_mean(batch.rewards, lengths, batch.group_ids, keep_single=keep_single))


def estimate_gpg(
    batch: TrainBatch,
    *,
    valid: GroupStatistic = in_unequal_group,
    f_norm: float = 1.0,
    keep_single: bool = False,
) -> TrainBatch:
    """A = B / B_valid * (r - mean of the group) / f_norm, see gpg_advantages."""
    _check_rewards(batch)
    return _fill(batch, gpg_advantages(batch.rewards, batch.group_ids, valid=valid, f_norm=f_norm, keep_single=keep_single))


def estimate_pass_at_k(batch: TrainBatch, *, std_level: GroupStatistic | None = group_std, epsilon: float = 1e-6) -> TrainBatch:
    """A = (best - second best) / (std + epsilon) for the best row of the group, 0 for the others; see pass_at_k_advantages."""
    _check_rewards(batch)
    return _fill(batch, pass_at_k_advantages(batch.rewards, batch.group_ids, std_level=std_level, epsilon=epsilon))


def estimate_max_rl(batch: TrainBatch) -> TrainBatch:
    """A = (r - mean) / mean of the group, 0 where the mean is not positive; see max_rl_advantages."""
    _check_rewards(batch)
    return _fill(batch, max_rl_advantages(batch.rewards, batch.group_ids))


def estimate_gdpo(
    batch: TrainBatch,
    *,
    components: Sequence[tuple[str, float]],
    std_level: GroupStatistic | None = group_std,
    epsilon: float = 1e-4,
    whiten: bool = True,
    keep_single: bool = False,
) -> TrainBatch:
    """A = sum_k w_k (r_k - mean(r_k)) / (std(r_k) + epsilon) in the group, then whitened over all trained tokens of the batch.

    Args:
        components: (name, weight) of each reward that counts, as batch.reward_components names it.
        std_level, epsilon, keep_single: see gdpo_advantages.
        whiten: whether to whiten.

    Raises: DataError if no row has a score of one of the names.
    Source: Liu et al. 2026 (GDPO).
    """
    _check_rewards(batch)
    assert components, "components is empty, expected (name, weight) of at least one"
    found = batch.reward_components
    assert found is not None, "GDPO needs reward_components: name it in Algorithm.requires"
    missing = [name for name, _ in components if name not in found.names]
    if missing:
        raise DataError(
            f"no sample has a score of the reward component {missing[0]!r}; there are {', '.join(sorted(found.names))}. Name components as "
            "the reward does: those of create_composite_reward, or the metrics of EvaluateResult"
        )
    scores = found.scores[:, [found.names.index(name) for name, _ in components]].to(batch.rewards.dtype)
    weights = torch.tensor([weight for _, weight in components], dtype=scores.dtype, device=scores.device)
    advantages = gdpo_advantages(scores, batch.group_ids, weights, std_level=std_level, epsilon=epsilon, keep_single=keep_single)
    return _fill(batch, advantages, whiten=whiten)


def estimate_pairs(batch: TrainBatch, *, min_difference: float = 0.0) -> TrainBatch:
    """Pair the row of the largest reward in each group with that of the smallest, for losses that compare the two (online DPO).

    Rows that are not trainable, or have no trained token, are in no pair. If rewards are equal, the first row counts; a group whose rewards
    are all equal, or differ by less than min_difference, makes no pair.

    Args:
        min_difference: least difference of the two rewards, at least 0.

    Returns: pair_ids, the group_ids of rows in pairs; advantages 1 in chosen rows, -1 in rejected ones, 0 in the others, which are no
        longer trainable.
    Source: Guo et al. 2024 (Direct language model alignment from online AI feedback), with the best and the worst of several answers as
        in OpenRLHF's iterative DPO; rank_rollouts makes the same pairs of samples.
    """
    _check_rewards(batch)
    candidates = (trained_mask(batch) > 0).any(1)
    pair_ids, sides = torch.full_like(batch.group_ids, -1), torch.zeros_like(batch.rewards)
    for group in batch.group_ids[candidates].unique().tolist():
        rows = ((batch.group_ids == group) & candidates).nonzero()[:, 0]
        rewards = batch.rewards[rows]
        best, worst = int(rewards.argmax()), int(rewards.argmin())
        difference = float(rewards[best] - rewards[worst])
        if difference > 0 and difference >= min_difference:
            pair = rows[[best, worst]]
            pair_ids[pair], sides[pair] = group, sides.new_tensor([1.0, -1.0])
    return replace(_fill(batch, sides), pair_ids=pair_ids, trainable=batch.trainable & (pair_ids >= 0))


# -- along tokens


def estimate_reinforce_plus_plus(
    batch: TrainBatch, *, gamma: float = 1.0, kl: KLEstimator | None = None, kl_coef: float = 0.0, whiten: bool = True
) -> TrainBatch:
    """G_t = r_t + gamma * G_{t+1} of the KL-penalised token rewards, then whitened over all trained tokens; fills returns with G.

    Args:
        gamma: in [0, 1].
        kl, kl_coef: penalty on each token; the paper has k1.
        whiten: whether to whiten.

    Source: Hu et al. 2025 (REINFORCE++).
    """
    _check_rewards(batch)
    returns = discounted_returns(penalized_token_rewards(batch, kl, kl_coef), batch.loss_mask, gamma)
    return _fill(batch, returns, returns, whiten=whiten)


def estimate_gae(
    batch: TrainBatch,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl: KLEstimator | None = None,
    kl_coef: float = 0.0,
    whiten: bool = True,
    by_group: bool = False,
) -> TrainBatch:
    """Generalised advantages of the KL-penalised token rewards and batch.values; fills returns with advantage + value, before whitening.

    Args:
        gamma, lam: in [0, 1].
        kl, kl_coef: penalty on each token.
        whiten: whether to whiten the advantages over all trained tokens.
        by_group: whiten them over the trained tokens of each group instead: AReaL's group_adv_norm, whose std has the divisor n and 1e-5
            added to it. Over the batch it is verl's: divisor n - 1, 1e-8 added to the variance.

    Source: Schulman et al. 2016, equation 16; Ouyang et al. 2022 (InstructGPT) for the penalty on tokens.
    """
    _check_rewards(batch)
    assert batch.values is not None, "GAE needs values: name it in Algorithm.requires"
    advantages = gae(penalized_token_rewards(batch, kl, kl_coef), batch.values, batch.loss_mask, gamma, lam)
    return _fill(batch, advantages, advantages + batch.values, whiten=whiten, by_group=by_group)


def estimate_vtrace(
    batch: TrainBatch,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    clip_rho: float = 1.0,
    clip_pg_rho: float = 1.0,
    kl: KLEstimator | None = None,
    kl_coef: float = 0.0,
    whiten: bool = False,
) -> TrainBatch:
    """V-trace advantages with rho = exp(log-probs of the trainer - rollout_log_probs); fills returns with the targets of the critic.

    The trainer's log-probs are prox_log_probs or, without them, old_log_probs. The advantages already contain the ratio: use them with a
    surrogate that does not correct for the behaviour policy again.

    Args:
        gamma, lam, clip_rho, clip_pg_rho: see vtrace.
        kl, kl_coef: penalty on each token.
        whiten: whether to whiten the advantages over all trained tokens.

    Source: Espeholt et al. 2018 (IMPALA), equation 1 and section 4.2.
    """
    _check_rewards(batch)
    assert batch.values is not None, "V-trace needs values: name it in Algorithm.requires"
    assert batch.rollout_log_probs is not None, "V-trace needs rollout_log_probs: name it in Algorithm.requires"
    target = batch.old_log_probs if batch.prox_log_probs is None else batch.prox_log_probs
    assert target is not None, "V-trace needs old_log_probs or prox_log_probs: name one in Algorithm.requires"
    log_ratio = torch.where(batch.loss_mask > 0, target - batch.rollout_log_probs, torch.zeros_like(target))
    found = vtrace(
        penalized_token_rewards(batch, kl, kl_coef),
        batch.values,
        log_ratio.exp(),
        batch.loss_mask,
        gamma,
        lam,
        clips=RatioClips(clip_rho, clip_pg_rho),
    )
    return _fill(batch, found.advantages, found.errors + batch.values, whiten=whiten)


def estimate_optimal_token_baseline(
    batch: TrainBatch,
    *,
    kl: KLEstimator | None = None,
    kl_coef: float = 0.0,
    keep_tail: bool = True,
    epsilon: float = 1e-8,
    keep_single: bool = False,
) -> TrainBatch:
    """A_t = G_t - b_t, b_t the baseline of least variance among the group's rows at their t-th trained token; fills returns with G.

    The squared norm of a token's gradient is estimated as 1 - p(token), times importance_weights^2 if they are filled.

    Args:
        kl, kl_coef: penalty on each token.
        keep_tail, epsilon, keep_single: see optimal_token_baseline.

    Source: Li et al. 2026 (The Optimal Token Baseline).
    """
    _check_rewards(batch)
    returns = discounted_returns(penalized_token_rewards(batch, kl, kl_coef), batch.loss_mask)
    log_probs = torch.where(batch.loss_mask > 0, policy_log_probs(batch), torch.zeros_like(returns))
    scores = squared_scores(log_probs, importance_weights=batch.importance_weights)
    baseline = optimal_token_baseline(
        returns, scores, batch.loss_mask, batch.group_ids, keep_tail=keep_tail, epsilon=epsilon, keep_single=keep_single
    )
    return _fill(batch, returns - baseline, returns)


def estimate_gigpo(batch: TrainBatch, *, settings: GiGPOSettings | None = None) -> TrainBatch:
    """A_t = A_E + omega * A_S: the episode in its group, plus the step among all visits to the same anchor state; see turn_advantages.

    Reads batch.turns: the turn of each token, anchor state and reward of each turn (NaN where it is unknown). Fills returns with G_k at
    the tokens of turn k, and turns.levels with all terms of the advantages.

    Source: Feng et al. 2025 (GiGPO).
    """
    s = settings or GiGPOSettings()
    _check_rewards(batch)
    turns = batch.turns
    assert turns is not None, "GiGPO needs turns: the samples must carry the turns of their episodes"
    real = turns.states >= 0
    bad = real & turns.rewards.isinf()
    if bool(bad.any()):
        row, turn = (int(i) for i in bad.nonzero()[0])
        raise DataError(f"the reward of turn {turn} of row {row} is {turns.rewards[row, turn].item()}: rewards of turns must be finite")
    levels = estimate_turn_levels(batch.rewards, batch.group_ids, turns, s)
    advantages = turn_advantages(batch.rewards, batch.group_ids, turns, s, levels=levels)
    returns = spread_turns(levels.returns, turns.ids, torch.zeros_like(batch.rewards))
    return replace(_fill(batch, advantages, returns), turns=replace(turns, levels=levels))
