"""Advantages of whole samples [B] and along tokens [B, T].

Singleton groups and groups of equal rewards have a defined result everywhere: advantage 0 unless the caller asks for something else, never
NaN. Along tokens, t + 1 always means the next token with mask > 0: tokens between two of them (an environment's) are stepped over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rollouts.algorithms.kl import KLEstimator, k1
from rollouts.algorithms.statistics import (
    GroupStatistic,
    batch_mean,
    group_centered,
    group_count,
    group_max,
    group_mean,
    group_min,
    group_std,
    group_sum,
    masked_entries,
    masked_mean,
)
from rollouts.checks import check_finite, check_shapes

# -- rewards of whole samples, [B] -> [B]


def shape_rewards(rewards: Tensor, *, bias: float = 0.0, scale: float = 1.0, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """clip((r + bias) * scale, low, high).

    Args:
        rewards: # [B].
        bias, scale: applied before clipping.
        low, high: range of the result.

    Returns: # [B].
    """
    assert low <= high, f"low {low} is above high {high}"
    return ((rewards + bias) * scale).clamp(low, high)


def combine_rewards(components: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """r_i = sum_k w_k r_ik over the components that scored row i.

    Args:
        components: # [B, K], NaN where a component gave no score.
        weights: # [K]; None = 1 each.

    Returns: rewards # [B], 0 where no component scored; scored # [B] bool.
    """
    scored = ~components.isnan()
    kept = torch.where(scored, components, torch.zeros_like(components))
    return (kept if weights is None else kept * weights).sum(dim=1), scored.any(dim=1)


def zero_truncated_rewards(rewards: Tensor, truncated: Tensor) -> Tensor:
    """0 for rows that were cut off before they ended, r for the others: an unfinished answer gets no reward, positive or negative.

    Args:
        rewards: # [B].
        truncated: # [B] bool.

    Returns: # [B].
    Source: the option mask_no_eos_with_zero of AReaL. To remove the gradient of such rows: samples.mask_truncated.
    """
    check_shapes(truncated=(truncated, tuple(rewards.shape)))
    return torch.where(truncated, torch.zeros_like(rewards), rewards)


def penalize_length(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    num_output_tokens: Tensor,
    num_total_tokens: Tensor,
    num_turns: Tensor,
    weights: tuple[float, float, float],
) -> Tensor:
    """r_i - mean(r) * (w_out * out_i / max(out) + w_in * in_i / max(in) + w_turns * turns_i / max(turns)), all over the group.

    The penalty is proportional to the mean reward, so that groups without a solution are not pushed to be short.

    Args:
        rewards, group_ids: # [B].
        num_output_tokens: # [B] tokens that the policy sampled.
        num_total_tokens: # [B] all tokens; in = total - output.
        num_turns: # [B].
        weights: (w_out, w_in, w_turns).

    Returns: # [B].
    Source: the length penalty of prime-rl's GRPO.
    """
    penalty = torch.zeros_like(rewards)
    for weight, cost in zip(weights, (num_output_tokens, num_total_tokens - num_output_tokens, num_turns), strict=True):
        cost = cost.to(rewards.dtype)
        penalty = penalty + weight * cost / group_max(cost, group_ids).clamp(min=1)
    return rewards - group_mean(rewards, group_ids) * penalty


def penalize_overlong(
    rewards: Tensor, lengths: Tensor, *, max_tokens: int, buffer: int, factor: float = 1.0, bounded: bool = True
) -> Tensor:
    """r_i - factor * clip((length_i - (max_tokens - buffer)) / buffer, 0, 1): free up to max_tokens - buffer, then rising to factor.

    Args:
        rewards: # [B].
        lengths: # [B] tokens that the policy sampled.
        max_tokens: length from which on the penalty is `factor`.
        buffer: > 0; number of tokens before max_tokens at which the penalty begins (the paper: 4,096 of 20,480).
        bounded: False lets the penalty grow beyond max_tokens (AReaL).

    Returns: # [B].
    Source: Yu et al. 2025 (DAPO), equation 13.
    """
    assert buffer > 0, f"buffer is {buffer}, expected more than 0"
    excess = ((lengths.to(rewards.dtype) - (max_tokens - buffer)) / buffer).clamp(min=0)
    return rewards - factor * (excess.clamp(max=1) if bounded else excess)


# -- advantages of whole samples, [B] -> [B]


def compute_advantages(rewards: Tensor, baseline: float | Tensor = 0.0, scale: float | Tensor = 1.0) -> Tensor:
    """A = (r - baseline) / scale.

    Args:
        rewards: # [B] finite.
        baseline: a number, or # [B].
        scale: a number, or # [B]; not 0.

    Returns: # [B].
    """
    check_finite("rewards", rewards)
    return (rewards - baseline) / scale


def normalize_by_group(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    mask: Tensor | None = None,
    mean_level: GroupStatistic | None = group_mean,
    std_level: GroupStatistic | None = group_std,
    std_of_centered: bool = False,
    epsilon: float = 1e-4,
    keep_single: bool = False,
) -> Tensor:
    """A = (r - mean) / (std + epsilon), mean and std each over the group, over the batch, or not at all.

    Groups of one, and groups whose rewards are all equal, get exactly 0 if the mean of the group is subtracted; so does a batch of equal
    rewards with that of the batch.

    Args:
        rewards: # [B], or # [B, T] for values of tokens; finite where mask > 0.
        group_ids: # [B].
        mask: the shape of rewards; entries with mask = 0 are not counted. None = all count.
        mean_level: group_mean, batch_mean, leave_one_out_mean, batch_leave_one_out_mean, or None.
        std_level: group_std, batch_std (or partial(..., unbiased=False)), or None.
        std_of_centered: whether the std is taken of the centered values instead of the rewards. They differ if the levels do: TRL divides
            group-centered rewards by the std of all rewards, AReaL by that of the centered ones (and about 0: group_rms, batch_rms).
        epsilon: added to the standard deviation. The paper has none; TRL uses 1e-4, AReaL 1e-5, verl and slime 1e-6; we follow TRL.
        keep_single: a group with one entry keeps its reward (verl), as if its mean were 0; else it gets 0 if a mean of the group is
            subtracted.

    Returns: the shape of rewards, 0 where mask = 0. A std of 0 (one entry, equal rewards) counts as 1: values without spread are not
        scaled, so a group whose rewards are equal, centered on the mean of the batch, does not outweigh all others by 1 / epsilon.
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2.
    """
    if mask is not None:
        values, ids = masked_entries(rewards, mask, group_ids)
        found = normalize_by_group(
            values,
            ids,
            mean_level=mean_level,
            std_level=std_level,
            std_of_centered=std_of_centered,
            epsilon=epsilon,
            keep_single=keep_single,
        )
        return torch.zeros_like(rewards).masked_scatter(mask > 0, found)
    check_finite("rewards", rewards)
    if mean_level is group_mean:
        centered = group_centered(rewards, group_ids)
    elif mean_level is batch_mean:
        centered = group_centered(rewards, torch.zeros_like(group_ids))
    else:
        centered = rewards if mean_level is None else rewards - mean_level(rewards, group_ids)
    alone = group_count(rewards, group_ids) == 1
    if keep_single:
        centered = torch.where(alone, rewards, centered)
    if std_level is None:
        return centered
    std = std_level(centered if std_of_centered else rewards, group_ids)
    return _divide(centered, std, epsilon)


def greedy_baseline(rewards: Tensor, group_ids: Tensor, trainable: Tensor) -> Tensor:
    """Mean reward of the group's untrained rows (ReMax: the one greedy sample of the prompt).

    Args:
        rewards, group_ids: # [B].
        trainable: # [B] bool.

    Returns: # [B]; NaN in a group whose rows are all trained.
    Source: Li et al. 2023 (ReMax).
    """
    apart = (~trainable).to(rewards.dtype)
    return group_sum(torch.where(trainable, torch.zeros_like(rewards), rewards), group_ids) / group_sum(apart, group_ids)


def length_weighted_mean(rewards: Tensor, lengths: Tensor, group_ids: Tensor, *, keep_single: bool = False) -> Tensor:
    """b = sum_i l_i r_i / sum_i l_i over the group: OPO's baseline.

    Args:
        rewards, group_ids: # [B].
        lengths: # [B] number of trained tokens of each row.
        keep_single: the baseline of a group of one is 0, else its own reward.

    Returns: # [B]; the reward itself in groups whose rewards are all equal, 0 in groups without tokens.
    Source: Hao et al. 2025 (On-policy RL with optimal reward baseline).
    """
    lengths = lengths.to(rewards.dtype)
    total = group_sum(lengths, group_ids)
    offset = rewards - group_centered(rewards, group_ids)  # about the mean, so that equal rewards give exactly themselves
    shifted = group_sum(lengths * (rewards - offset), group_ids) / total.clamp(min=1)
    baseline = torch.where(total > 0, offset + shifted, torch.zeros_like(rewards))
    return torch.where(group_count(rewards, group_ids) == 1, torch.zeros_like(rewards), baseline) if keep_single else baseline


def in_unequal_group(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Rows of groups whose rewards are not all equal: rows with a learning signal. Returns # [B] bool."""
    return group_max(rewards, group_ids) > group_min(rewards, group_ids)


def is_not_zero(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Rows with a reward other than 0. Returns # [B] bool."""
    return rewards != 0


def gpg_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    valid: GroupStatistic = in_unequal_group,
    f_norm: float = 1.0,
    keep_single: bool = False,
) -> Tensor:
    """A = B / B_valid * (r - mean of the group) / f_norm: compensates for rows without a gradient.

    Args:
        rewards, group_ids: # [B].
        valid: (rewards, group_ids) -> # [B] bool, the rows that B_valid counts: in_unequal_group (the paper), or is_not_zero (verl).
        f_norm: constant in place of the standard deviation, > 0.
        keep_single: see normalize_by_group.

    Returns: # [B]; all 0 where no row is valid.
    Source: Chu et al. 2025 (GPG), with the scale of verl or of the paper.
    """
    assert f_norm > 0, f"f_norm is {f_norm}, expected > 0"
    centered = normalize_by_group(rewards, group_ids, std_level=None, keep_single=keep_single)
    num_valid = valid(rewards, group_ids).sum().to(rewards.dtype)
    return torch.where(num_valid > 0, centered * (rewards.numel() / num_valid.clamp(min=1)) / f_norm, torch.zeros_like(centered))


def pass_at_k_advantages(
    rewards: Tensor, group_ids: Tensor, *, std_level: GroupStatistic | None = group_std, epsilon: float = 1e-6
) -> Tensor:
    """A = (r_best - r_second) / (std + epsilon) for the best row of the group, 0 for all others: only the maximum of k samples counts.

    Args:
        rewards, group_ids: # [B].
        std_level: see normalize_by_group.
        epsilon: added to the standard deviation.

    Returns: # [B]; 0 for all rows if the best reward is shared, and for groups of one.
    Source: Tang et al. 2025 (Optimizing language models for inference time objectives): E[max_i r_i] with its leave-one-out baseline.
    """
    check_finite("rewards", rewards)
    best = rewards == group_max(rewards, group_ids)
    alone_at_top = best & (group_sum(best.to(rewards.dtype), group_ids) == 1) & (group_count(rewards, group_ids) > 1)
    second = group_max(torch.where(best, torch.full_like(rewards, -torch.inf), rewards), group_ids)
    gap = torch.where(alone_at_top, rewards - second, torch.zeros_like(rewards))
    return gap if std_level is None else _divide(gap, std_level(rewards, group_ids), epsilon)


def max_rl_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A = (r - mean) / mean of the group; 0 where the mean is not positive.

    Divided by the success rate, the expected gradient is that of a truncated log-likelihood of success, which weighs hard prompts more.

    Args:
        rewards: # [B] at least 0, for example 1 for a solution and 0 for none. Negative ones can bring a mean near 0, and advantages then
            have no bound; with rewards >= 0 none is larger than n - 1 in a group of n.
        group_ids: # [B].

    Returns: # [B].
    Source: Tajwar et al. 2026 (Maximum Likelihood Reinforcement Learning).
    """
    check_finite("rewards", rewards)
    mean = group_mean(rewards, group_ids)
    return torch.where(mean > 0, group_centered(rewards, group_ids) / torch.where(mean > 0, mean, 1), torch.zeros_like(rewards))


def gdpo_advantages(
    components: Tensor,
    group_ids: Tensor,
    weights: Tensor | None = None,
    *,
    std_level: GroupStatistic | None = group_std,
    epsilon: float = 1e-4,
    keep_single: bool = False,
) -> Tensor:
    """A = sum_k w_k (r_k - mean(r_k)) / (std(r_k) + epsilon): each reward is normalised in its group before they are summed.

    Several rewards summed first collapse into few distinct totals; normalised separately, each keeps its resolution. The paper then
    normalises the sum over the batch: normalize_by_group(..., mean_level=batch_mean, std_level=batch_std), or whiten over tokens.

    Args:
        components: # [B, K], NaN where a component gave no score; such an entry is not counted.
        group_ids: # [B].
        weights: # [K]; None = 1 each.
        std_level, epsilon, keep_single: see normalize_by_group.

    Returns: # [B].
    Source: Liu et al. 2026 (GDPO).
    """
    parts = [
        normalize_by_group(r, group_ids, mask=~r.isnan(), std_level=std_level, epsilon=epsilon, keep_single=keep_single)
        for r in components.unbind(dim=1)
    ]
    return combine_rewards(torch.stack(parts, dim=1), weights)[0]


# -- token rewards


def reward_at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Token rewards of an outcome reward: the whole reward on each row's last token with mask > 0.

    Args:
        rewards: # [B].
        mask: # [B, T]; a row without any token gets no reward.

    Returns: # [B, T].
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask > 0, positions, -1).amax(dim=1)  # [B], -1 = none
    return torch.where(positions == last[:, None], rewards[:, None], torch.zeros_like(rewards[:, None]))


def sum_token_rewards(token_rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum the token rewards of each row, only of tokens with mask > 0 if a mask is given. # [B, T] -> # [B]."""
    return (token_rewards if mask is None else torch.where(mask > 0, token_rewards, torch.zeros_like(token_rewards))).sum(dim=1)


def apply_kl_penalty(
    rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    kl_coef: float | Tensor,
    kl: KLEstimator = k1,
) -> tuple[Tensor, Tensor]:
    """r - kl_coef * kl(log_probs, ref_log_probs) at every token with mask > 0, and the mean KL for a controller.

    Args:
        rewards: # [B, T] token rewards, each reduced by the KL of its token; or # [B], reduced by the sum over the row.
        log_probs: # [B, T] of the sampling policy, detached.
        ref_log_probs: # [B, T].
        mask: # [B, T].
        kl_coef: a number, or # [B].
        kl: estimator of KL(policy || reference) at each token: k1, k2, k3 or another of rollouts.algorithms.kl.

    Returns: penalised rewards in the shape of rewards; the mean KL over tokens, a scalar.
    Source: Ziegler et al. 2019, equation 2.
    """
    check_shapes(log_probs=(log_probs, tuple(mask.shape)), ref_log_probs=(ref_log_probs, tuple(mask.shape)))
    on, nothing = mask > 0, torch.zeros_like(log_probs)
    estimate = torch.where(on, kl(torch.where(on, log_probs, nothing), torch.where(on, ref_log_probs, nothing)), nothing)
    per_row = kl_coef[:, None] if isinstance(kl_coef, Tensor) else kl_coef
    penalty = per_row * estimate
    return rewards - (penalty if rewards.dim() == 2 else penalty.sum(dim=1)), masked_mean(estimate, on.to(estimate.dtype))


# -- along tokens, [B, T] -> [B, T]


def discounted_returns(token_rewards: Tensor, mask: Tensor, gamma: float | Tensor = 1.0, *, bootstrap: Tensor | None = None) -> Tensor:
    """G_t = r_t + gamma_t * G_{t+1} over the masked-in tokens.

    Args:
        token_rewards, mask: # [B, T].
        gamma: in [0, 1]; a number, or # [B, T], the discount of the rewards after each token.
        bootstrap: # [B] value of the state behind the last masked-in token; None = 0.

    Returns: # [B, T], 0 where mask = 0.
    """
    columns: list[Tensor] = []
    running = token_rewards.new_zeros(token_rewards.shape[0]) if bootstrap is None else bootstrap
    for t in reversed(range(token_rewards.shape[1])):
        on = mask[:, t] > 0
        running = torch.where(on, token_rewards[:, t] + _at(gamma, t) * running, running)
        columns.append(torch.where(on, running, torch.zeros_like(running)))
    return _join(columns, token_rewards)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 0.95,
    *,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """A_t = delta_t + gamma_t * lam_t * A_{t+1}, delta_t = r_t + gamma_t * V_{t+1} - V_t, over the masked-in tokens.

    values[:, t] is the value of the state that token t was chosen in.

    Args:
        token_rewards, values, mask: # [B, T].
        gamma, lam: in [0, 1]; a number, or # [B, T].
        bootstrap: # [B] value of the state behind the last masked-in token, for truncated rows; None = 0, the end of the episode.

    Returns: # [B, T], 0 where mask = 0.
    Source: Schulman et al. 2016, equation 16.
    """
    columns: list[Tensor] = []
    advantage = values.new_zeros(values.shape[0])
    next_value = advantage if bootstrap is None else bootstrap
    for t in reversed(range(values.shape[1])):
        on = mask[:, t] > 0
        here = token_rewards[:, t] + _at(gamma, t) * (next_value + _at(lam, t) * advantage) - values[:, t]
        advantage = torch.where(on, here, advantage)
        next_value = torch.where(on, values[:, t], next_value)
        columns.append(torch.where(on, advantage, torch.zeros_like(advantage)))
    return _join(columns, values)


def squared_scores(log_probs: Tensor, sum_of_squared_probs: Tensor | None = None, importance_weights: Tensor | None = None) -> Tensor:
    """|grad log p(y_t)|^2 with respect to the logits = 1 - 2 p(y_t) + sum_v p(v)^2, times the squared importance weight.

    Args:
        log_probs: # [B, T] of the sampled tokens.
        sum_of_squared_probs: # [B, T] over the vocabulary, see logprobs.sum_of_squared_probs. None = its unbiased estimate p(y_t), hence
            1 - p(y_t): the expectation of both over y_t is 1 - sum_v p(v)^2.
        importance_weights: # [B, T] factors of each token's gradient; None = 1.

    Returns: # [B, T] >= 0, also at masked places.
    """
    probs = log_probs.exp()
    scores = 1 - 2 * probs + (probs if sum_of_squared_probs is None else sum_of_squared_probs)
    return scores if importance_weights is None else scores * importance_weights.square()


def optimal_token_baseline(
    returns: Tensor,
    scores: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    compact: bool = True,
    keep_tail: bool = True,
    epsilon: float = 1e-8,
    keep_single: bool = False,
) -> Tensor:
    """b_t = sum_i W_it G_it / (sum_i W_it + epsilon) over the rows i of the group that have a token t, W_it = sum_{u <= t} scores_iu.

    The baseline of least variance that depends on the position only: W is the squared norm of the gradient up to t.

    Args:
        returns: # [B, T] G, rewards from each token on.
        scores: # [B, T] squared norm of each token's gradient, see squared_scores.
        mask: # [B, T].
        group_ids: # [B].
        compact: a token's t is its number among the masked-in tokens of its row (rows with environment tokens, prompts of any length);
            False = its column, for rows whose responses begin at column 0.
        keep_tail: for a row longer than all others of its group, baseline 0 after the second longest, instead of its own return.
        epsilon: added to the sum of weights.
        keep_single: the baseline of the only row with tokens in its group is 0, else its own return.

    Returns: # [B, T], 0 where mask = 0.
    Source: Li et al. 2026 (The Optimal Token Baseline); verl's optimal_token_baseline and its multi-turn form.
    """
    check_shapes(returns=(returns, tuple(mask.shape)), scores=(scores, tuple(mask.shape)), group_ids=(group_ids, (mask.shape[0],)))
    on = mask > 0
    zeros = torch.zeros_like(returns)
    returns, weights = torch.where(on, returns, zeros), torch.where(on, scores, zeros).cumsum(dim=1)
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(on)
    positions = (on.cumsum(dim=1) - 1).clamp(min=0) if compact else columns
    names, dense = torch.unique(group_ids, return_inverse=True)
    places = (dense[:, None] * mask.shape[1] + positions)[on]  # one number for each pair of group and t
    sums = torch.zeros(2, names.numel() * mask.shape[1], dtype=returns.dtype, device=returns.device)
    sums = sums.index_add(1, places, torch.stack(((weights * returns)[on], weights[on])))
    baseline = zeros.masked_scatter(on, (sums[0] / (sums[1] + epsilon))[places])

    lengths = on.sum(dim=1).to(returns.dtype)
    if keep_tail:
        longest = lengths == group_max(lengths, group_ids)
        alone_at_top = longest & (group_sum(longest.to(lengths.dtype), group_ids) == 1)
        second = group_max(torch.where(longest, torch.zeros_like(lengths), lengths), group_ids)
        baseline = torch.where(alone_at_top[:, None] & (positions >= second[:, None]), zeros, baseline)
    single = (group_sum((lengths > 0).to(lengths.dtype), group_ids) == 1)[:, None]
    return torch.where(single, zeros if keep_single else returns, baseline)


class VTrace(NamedTuple):
    """Result of vtrace. Each # [B, T], 0 where mask = 0."""

    errors: Tensor  # vs_t - V(s_t); the targets of the critic are values + errors
    advantages: Tensor  # clipped ratio * (q_values - values)
    q_values: Tensor  # r_t + gamma_t * (lam_t * vs_{t+1} + (1 - lam_t) * V_{t+1})


@dataclass(frozen=True)
class RatioClips:
    """Upper bounds of ratios in V-trace."""

    rho: float = 1.0  # in the temporal differences; decides which policy's values come out
    pg_rho: float = 1.0  # in the advantages

    def __post_init__(self) -> None:
        assert self.rho > 0 and self.pg_rho > 0, f"rho {self.rho} and pg_rho {self.pg_rho} must be > 0"


def vtrace(
    token_rewards: Tensor,
    values: Tensor,
    ratios: Tensor,
    mask: Tensor,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 1.0,
    *,
    clips: RatioClips = RatioClips(),
    next_values: Tensor | None = None,
) -> VTrace:
    """vs_t - V_t = delta_t + gamma_t * lam_t * min(1, rho_t) * (vs_{t+1} - V_{t+1}): V-trace.

    delta_t = min(clips.rho, rho_t) * (r_t + gamma_t * V_{t+1} - V_t)

    Off-policy values of the policy whose ratio to the behaviour policy is rho; with rho = 1 and lam = 1 the plain returns.

    Args:
        token_rewards, values, mask: # [B, T].
        ratios: # [B, T] rho = p(token) / p_behaviour(token), detached.
        gamma, lam: in [0, 1]; a number, or # [B, T].
        next_values: # [B, T] V_{t+1} in delta, for truncated rows or rows in which an episode ends; None = the value of the next
            masked-in token, 0 behind the last.

    Source: Espeholt et al. 2018 (IMPALA), equation 1 and section 4.2.
    """
    nothing = values.new_zeros(values.shape[0])
    error, next_value = nothing, nothing
    next_target, behind = next_value, torch.zeros_like(nothing, dtype=torch.bool)  # behind: a masked-in token follows
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for t in reversed(range(values.shape[1])):
        on, rho, discount = mask[:, t] > 0, ratios[:, t], _at(gamma, t)
        after = next_value if next_values is None else next_values[:, t]
        delta = rho.clamp(max=clips.rho) * (token_rewards[:, t] + discount * after - values[:, t])
        error_here = delta + discount * _at(lam, t) * rho.clamp(max=1) * error
        follow = _at(lam, t) * next_target + (1 - _at(lam, t)) * next_value
        q_value = token_rewards[:, t] + discount * torch.where(behind, follow, after)
        advantage = rho.clamp(max=clips.pg_rho) * (q_value - values[:, t])
        error = torch.where(on, error_here, error)
        next_value = torch.where(on, values[:, t], next_value)
        next_target = torch.where(on, values[:, t] + error, next_target)
        behind = behind | on
        for columns, column in zip(parts, (error, advantage, q_value), strict=True):
            columns.append(torch.where(on, column, nothing))
    return VTrace(*(_join(columns, values) for columns in parts))


def _join(columns: list[Tensor], like: Tensor) -> Tensor:
    """Join columns, last to first, to one tensor: # [B, T], also if T = 0."""
    return torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(like)


def _divide(x: Tensor, std: Tensor, epsilon: float) -> Tensor:
    """x / (std + epsilon), a std of 0 counting as 1."""
    return x / (torch.where(std == 0, torch.ones_like(std), std) + epsilon)


def _at(x: float | Tensor, t: int) -> float | Tensor:
    return x[:, t] if isinstance(x, Tensor) else x
