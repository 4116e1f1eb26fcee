"""advantages: our compositions for the vectors of this group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity import peers
from parity.mapping import Parity, Rule, group_numbers, has_nan, pad_rows, zero_nans
from rollouts.algorithms import advantages as adv
from rollouts.algorithms import kl as kls
from rollouts.algorithms import statistics as stats

KL = {"k1": kls.k1, "k2": kls.k2, "k3": kls.k3}


# -- verl


def row_rewards(token_level_rewards: Tensor) -> Tensor:
    return adv.sum_token_rewards(token_level_rewards)


def along(row: Tensor, mask: Tensor) -> Tensor:
    """One value a row on every masked-in token."""
    return torch.where(mask > 0, row[:, None], torch.zeros_like(row)[:, None])


def verl_grpo(token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo):
    std_level = stats.group_std if norm_adv_by_std_in_grpo else None
    rewards = row_rewards(token_level_rewards)
    found = adv.normalize_by_group(rewards, group_numbers(index), std_level=std_level, epsilon=epsilon, keep_single=True)
    return {"advantages": along(found, response_mask), "returns": along(found, response_mask)}


def verl_passk(token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo):
    std_level = stats.group_std if norm_adv_by_std_in_grpo else None
    found = adv.pass_at_k_advantages(row_rewards(token_level_rewards), group_numbers(index), std_level=std_level, epsilon=epsilon)
    return {"advantages": along(found, response_mask), "returns": along(found, response_mask)}


def verl_rloo(token_level_rewards, response_mask, index, *, keep_single):
    rewards = row_rewards(token_level_rewards)
    found = adv.normalize_by_group(
        rewards, group_numbers(index), mean_level=stats.leave_one_out_mean, std_level=None, keep_single=keep_single
    )
    return {"advantages": along(found, response_mask), "returns": along(found, response_mask)}


def verl_opo(token_level_rewards, response_mask, index):
    rewards = row_rewards(token_level_rewards)
    baseline = adv.length_weighted_mean(rewards, stats.count_tokens(response_mask), group_numbers(index), keep_single=True)
    found = along(adv.compute_advantages(rewards, baseline), response_mask)
    return {"advantages": found, "returns": found}


def verl_gpg(token_level_rewards, response_mask, index, f_norm):
    found = adv.gpg_advantages(
        row_rewards(token_level_rewards), group_numbers(index), valid=adv.is_not_zero, f_norm=f_norm, keep_single=True
    )
    return {"advantages": along(found, response_mask), "returns": along(found, response_mask)}


def whiten(x: Tensor, mask: Tensor, **options: Any) -> Tensor:
    return stats.whiten(x, mask, count_epsilon=1e-8, **options)


def verl_gdpo_single(token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo):
    std_level = stats.group_std if norm_adv_by_std_in_grpo else None
    rewards = row_rewards(token_level_rewards)
    found = adv.gdpo_advantages(rewards[:, None], group_numbers(index), std_level=std_level, epsilon=1e-6, keep_single=True)
    whitened = whiten(along(found, response_mask), response_mask)
    return {"advantages": whitened, "returns": whitened}


def verl_gdpo_multi(rewards, reward_weights, response_mask, index):
    weights = None if reward_weights is None else torch.tensor(reward_weights, dtype=torch.float64)
    found = adv.gdpo_advantages(rewards, group_numbers(index), weights, epsilon=1e-6, keep_single=True)
    return {"advantages": whiten(along(found, response_mask), response_mask)}


def verl_reinforce_plus_plus(token_level_rewards, response_mask, gamma):
    returns = adv.discounted_returns(token_level_rewards, response_mask, gamma)
    return {"returns": returns, "advantages": whiten(returns, response_mask)}


def verl_reinforce_plus_plus_baseline(token_level_rewards, response_mask, index):
    rewards = row_rewards(token_level_rewards)
    found = adv.normalize_by_group(rewards, group_numbers(index), std_level=None, keep_single=True)
    whitened = whiten(along(found, response_mask), response_mask)
    return {"advantages": whitened, "returns": whitened}


def verl_remax(token_level_rewards, reward_baselines, response_mask):
    returns = adv.discounted_returns(token_level_rewards, response_mask)
    return {"returns": returns, "advantages": adv.compute_advantages(returns, reward_baselines[:, None])}


def verl_gae(token_level_rewards, values, response_mask, gamma, lam):
    advantages = adv.gae(token_level_rewards, values, response_mask, gamma, lam)
    returns = peers.lambda_returns(token_level_rewards, values, response_mask, gamma, lam)
    return {"advantages": whiten(advantages, response_mask), "returns": returns}


def verl_masked_whiten(values, mask, shift_mean):
    return {
        "whitened": whiten(values, mask, shift_mean=shift_mean),
        "mean": stats.masked_mean(values, mask, epsilon=1e-8),
        "var": stats.masked_var(values, mask, epsilon=1e-8),
        "var_biased": stats.masked_var(values, mask, unbiased=False, epsilon=1e-8),
    }


def verl_optimal_token_baseline(
    token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared, rollout_is_weights, handle_zero_tail, *, compact
):
    returns = adv.discounted_returns(token_level_rewards, response_mask)
    scores = adv.squared_scores(old_log_probs, sum_pi_squared, rollout_is_weights)
    baseline = adv.optimal_token_baseline(
        returns, scores, response_mask, group_numbers(index), compact=compact, keep_tail=handle_zero_tail, keep_single=True
    )
    return {"returns": returns, "advantages": adv.compute_advantages(returns, baseline)}


def verl_lone_row(kwargs: Mapping[str, Any], _: Mapping[str, Any]) -> bool:
    groups, filled = group_numbers(kwargs["index"]), (kwargs["response_mask"] > 0).any(dim=1)
    lone = any(int(filled[groups == g].sum()) == 1 < int((groups == g).sum()) for g in groups.unique())
    return lone and not kwargs["handle_zero_tail"]


LONE_ROW = Rule(
    reason="a group with one row that has tokens is a group of one here; there the row is its own baseline",
    applies=verl_lone_row,
    given={
        "index": lambda index: ["one"] * len(index),
        "response_mask": lambda mask: torch.cat((torch.ones_like(mask[:1]), torch.zeros_like(mask[1:]))),
        "handle_zero_tail": False,
    },
)


SINGLE = "a group of one gets 0 by default; with keep_single=True it keeps its reward, as here"

VERL = {
    "verl_grpo": Parity(run=verl_grpo, ours="advantages.normalize_by_group(keep_single=True)", mask="response_mask", note=SINGLE),
    "verl_grpo_vectorized": Parity(
        run=verl_grpo, ours="advantages.normalize_by_group(keep_single=True)", mask="response_mask", note=SINGLE
    ),
    "verl_grpo_passk": Parity(run=verl_passk, ours="advantages.pass_at_k_advantages", mask="response_mask"),
    "verl_rloo": Parity(
        run=partial(verl_rloo, keep_single=True),
        ours="advantages.normalize_by_group(mean_level=leave_one_out_mean)",
        mask="response_mask",
        note=SINGLE,
    ),
    "verl_rloo_vectorized": Parity(
        run=partial(verl_rloo, keep_single=False), ours="advantages.normalize_by_group(mean_level=leave_one_out_mean)", mask="response_mask"
    ),
    "verl_opo": Parity(run=verl_opo, ours="advantages.length_weighted_mean", mask="response_mask", note=SINGLE),
    "verl_gpg": Parity(run=verl_gpg, ours="advantages.gpg_advantages(valid=is_not_zero)", mask="response_mask", note=SINGLE),
    "verl_gdpo_single": Parity(
        run=verl_gdpo_single, ours="advantages.gdpo_advantages, statistics.whiten", mask="response_mask", note=SINGLE
    ),
    "verl_gdpo_multi": Parity(run=verl_gdpo_multi, ours="advantages.gdpo_advantages, statistics.whiten", mask="response_mask", note=SINGLE),
    "verl_reinforce_plus_plus": Parity(
        run=verl_reinforce_plus_plus, ours="advantages.discounted_returns, statistics.whiten", mask="response_mask"
    ),
    "verl_reinforce_plus_plus_baseline": Parity(
        run=verl_reinforce_plus_plus_baseline,
        ours="advantages.normalize_by_group(std_level=None), statistics.whiten",
        mask="response_mask",
        note=SINGLE,
    ),
    "verl_remax": Parity(run=verl_remax, ours="advantages.discounted_returns, compute_advantages", mask="response_mask"),
    "verl_gae": Parity(run=verl_gae, ours="advantages.gae, peers.lambda_returns, statistics.whiten", mask="response_mask"),
    "verl_masked_whiten": Parity(run=verl_masked_whiten, ours="statistics.whiten, masked_mean, masked_var", mask="mask"),
    "verl_optimal_token_baseline": Parity(
        run=partial(verl_optimal_token_baseline, compact=False),
        ours="advantages.optimal_token_baseline(compact=False)",
        mask="response_mask",
        note=SINGLE,
        rules=(LONE_ROW,),
    ),
    "verl_tir_optimal_token_baseline": Parity(
        run=partial(verl_optimal_token_baseline, compact=True), ours="advantages.optimal_token_baseline", mask="response_mask", note=SINGLE
    ),
}


# -- AReaL


def areal_masked_normalization(x, mask, unbiased, eps):
    std_level = partial(stats.batch_std, unbiased=unbiased)
    one_group = torch.zeros(x.shape[0], dtype=torch.int64)
    return {"out": adv.normalize_by_group(x, one_group, mask=mask, mean_level=stats.batch_mean, std_level=std_level, epsilon=eps)}


UNDEFINED = "a statistic of one or no entry is NaN there; here its result is 0"
NO_SPREAD = Rule(
    reason=UNDEFINED,
    applies=has_nan,
    gives=zero_nans,
    given={"mask": lambda mask: torch.zeros_like(mask).index_fill(0, torch.tensor([0]), 1) * (torch.arange(mask.shape[1]) == 0)},
    theirs={"out": lambda rows: [[math.nan] * len(row) for row in rows]},
)
NO_PEERS = Rule(
    reason=UNDEFINED,
    applies=has_nan,
    gives=zero_nans,
    given={"n_samples_per_prompt": 1, "rollout_batch_size": lambda _: 1, "rewards": lambda rewards: rewards[:1]},
    theirs={"rewards": [math.nan]},
)


def blocks(rows: int, size: int) -> Tensor:
    """Consecutive groups of `size` rows."""
    return torch.arange(rows).div(size, rounding_mode="floor")


MEANS = {
    ("group", False): stats.group_mean,
    ("group", True): stats.leave_one_out_mean,
    ("batch", False): stats.batch_mean,
    ("batch", True): stats.batch_leave_one_out_mean,
}
SCALES = {"group": stats.group_rms, "batch": stats.batch_rms}


def areal_normalize(x: Tensor, mask: Tensor | None, config: Mapping[str, Any]) -> Tensor:
    scale = SCALES.get(config["std_level"])
    return adv.normalize_by_group(
        x,
        blocks(x.shape[0], config["group_size"]),
        mask=mask,
        mean_level=MEANS.get((config["mean_level"], bool(config["mean_leave1out"]))),
        std_level=None if scale is None else partial(scale, unbiased=bool(config["std_unbiased"])),
        std_of_centered=True,
        epsilon=config["eps"],
        keep_single=config["mean_level"] == "group" and bool(config["mean_leave1out"]),
    )


def areal_normalization(x, loss_mask, eps, **config):
    return {"out": areal_normalize(x, loss_mask, {**config, "eps": eps})}


def leftover(rows: int, config: Mapping[str, Any]) -> bool:
    return rows % config["group_size"] != 0 and "group" in (config["mean_level"], config["std_level"])


def pipeline_leftover(kwargs: Mapping[str, Any], _: Mapping[str, Any]) -> bool:
    configs = [kwargs[name] for name in ("reward_norm", "adv_norm") if kwargs[name] is not None]
    return any(leftover(kwargs["rewards"].shape[0], config) for config in configs)


BY_FIVE = {"mean_level": "group", "std_level": "group", "group_size": 5, "mean_leave1out": False, "std_unbiased": True, "eps": 1e-5}
SMALLER = "rows behind the last whole group have mean 0 and std 0 there; here they are a smaller group"
LEFTOVER = Rule(reason=SMALLER, applies=lambda kwargs, _: leftover(kwargs["x"].shape[0], kwargs), given=BY_FIVE)
PIPELINE_LEFTOVER = Rule(reason=SMALLER, applies=pipeline_leftover, given={"reward_norm": BY_FIVE})


def shift(x: Tensor) -> Tensor:
    """Position t gets what stands at t + 1."""
    return torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), dim=1)


def areal_ppo_compute_advantages(
    input_ids_shape,
    attention_mask,
    loss_mask,
    logprobs,
    ref_logp,
    values,
    rewards,
    reward_bias,
    reward_scaling,
    reward_clip,
    reward_norm,
    adv_norm,
    kl_ctl,
    kl_estimator,
    discount,
    gae_lambda,
    mask_no_eos_with_zero,
):
    mask, real = shift(loss_mask), shift(attention_mask)
    nothing = torch.zeros_like(logprobs)
    log_probs = torch.where(mask > 0, shift(logprobs), nothing)
    values = nothing if values is None else values
    cut_off = attention_mask[:, -1] > 0
    score = adv.shape_rewards(rewards, bias=reward_bias, scale=reward_scaling, low=-reward_clip, high=reward_clip)
    score = score if reward_norm is None else areal_normalize(score, None, reward_norm)
    score = adv.zero_truncated_rewards(score, cut_off) if mask_no_eos_with_zero else score
    penalize = partial(
        adv.apply_kl_penalty,
        log_probs=log_probs,
        ref_log_probs=nothing if ref_logp is None else ref_logp,
        mask=mask,
        kl_coef=kl_ctl,
        kl=kls.bounded(KL[kl_estimator], value=10.0),
    )
    token_rewards, _ = penalize(adv.reward_at_last_token(score, real))
    bootstrap = torch.where(cut_off, values[:, -1], torch.zeros_like(score))
    options = {"gamma": discount, "lam": gae_lambda, "bootstrap": bootstrap}
    advantages = adv.gae(token_rewards, values, mask, **options)
    return {
        "advantages": advantages if adv_norm is None else areal_normalize(advantages, mask, adv_norm),
        "returns": peers.lambda_returns(token_rewards, values, mask, **options),
        "kl_rewards": penalize(nothing)[0],
        "tot_rewards": token_rewards,
        "loss_mask": mask,
        "logprobs": log_probs,
    }


def unpack(packed: Tensor, lengths: Sequence[int]) -> Tensor:
    return pad_rows(packed.split(list(lengths)))


def pack(rows: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return [row[:n] for row, n in zip(rows, lengths, strict=True)]


def areal_packed_gae(
    kl_ctl,
    clip_reward_value,
    log_probs,
    ref_log_probs,
    reward_score,
    cu_seqlens,
    seq_no_eos_mask,
    mask_no_eos_with_zero,
    values,
    gamma,
    lam,
):
    lengths = cu_seqlens.diff().tolist()
    value_rows = values.split([n + 1 for n in lengths])
    last, state_values = torch.stack([row[-1] for row in value_rows]), pad_rows([row[:-1] for row in value_rows])
    log_probs, ref_log_probs = unpack(log_probs, lengths), unpack(ref_log_probs, lengths)
    mask = pad_rows([torch.ones(n) for n in lengths])
    cut_off, nothing = seq_no_eos_mask > 0, torch.zeros_like(reward_score)
    score = adv.shape_rewards(reward_score, low=-clip_reward_value, high=clip_reward_value)
    score = adv.zero_truncated_rewards(score, cut_off) if mask_no_eos_with_zero else score
    token_rewards, _ = adv.apply_kl_penalty(adv.reward_at_last_token(score, mask), log_probs, ref_log_probs, mask, kl_ctl, kls.k1)
    options = {"gamma": gamma, "lam": lam, "bootstrap": torch.where(cut_off, last, nothing)}
    found = {
        "kl_rewards": adv.apply_kl_penalty(torch.zeros_like(log_probs), log_probs, ref_log_probs, mask, kl_ctl, kls.k1)[0],
        "tot_rewards": token_rewards,
        "advantages": adv.gae(token_rewards, state_values, mask, **options),
        "returns": peers.lambda_returns(token_rewards, state_values, mask, **options),
    }
    return {name: pack(rows, lengths) for name, rows in found.items()}


AREAL = {
    "areal_masked_normalization": Parity(
        run=areal_masked_normalization,
        ours="advantages.normalize_by_group(mean_level=batch_mean, std_level=batch_std)",
        mask="mask",
        rules=(NO_SPREAD,),
    ),
    "areal_normalization": Parity(
        run=areal_normalization,
        ours="advantages.normalize_by_group(std_of_centered=True, std_level=group_rms)",
        note="the std is of the rewards by default; AReaL's is of what the mean leaves",
        mask="loss_mask",
        rules=(LEFTOVER,),
    ),
    "areal_ppo_compute_advantages": Parity(
        run=areal_ppo_compute_advantages,
        ours="advantages.shape_rewards, zero_truncated_rewards, apply_kl_penalty, gae(bootstrap=...), normalize_by_group",
        mask=lambda kwargs: shift(kwargs["loss_mask"]),
        rules=(PIPELINE_LEFTOVER,),
    ),
    "areal_realhf_packed_rewards_gae_v0_3_0": Parity(
        run=areal_packed_gae,
        ours="advantages.shape_rewards, zero_truncated_rewards, apply_kl_penalty, gae(bootstrap=...), peers.lambda_returns",
    ),
}


# -- TRL


def trl_grpo_advantages(rewards_per_func, reward_weights, num_generations, scale_rewards, multi_objective_aggregation):
    groups = blocks(rewards_per_func.shape[0], num_generations)
    rewards, scored = adv.combine_rewards(rewards_per_func, reward_weights)
    if multi_objective_aggregation == "normalize_then_sum":
        rewards = adv.gdpo_advantages(rewards_per_func, groups, reward_weights)
        found = adv.normalize_by_group(rewards, groups, mask=scored, mean_level=stats.batch_mean, std_level=stats.batch_std)
    else:
        std_level = {"group": stats.group_std, "batch": stats.batch_std, "none": None}[scale_rewards]
        found = adv.normalize_by_group(rewards, groups, mask=scored, std_level=std_level)
    return {"advantages": found}


def trl_rloo_advantages(
    rewards_per_func,
    reward_weights,
    num_generations,
    reward_clip_range,
    beta,
    old_per_token_logps,
    ref_per_token_logps,
    completion_mask,
    normalize_advantages,
):
    groups = blocks(rewards_per_func.shape[0], num_generations)
    rewards, scored = adv.combine_rewards(rewards_per_func, reward_weights)
    if reward_clip_range is not None:
        rewards = adv.shape_rewards(rewards, low=reward_clip_range[0], high=reward_clip_range[1])
    if beta != 0:
        rewards, _ = adv.apply_kl_penalty(rewards, old_per_token_logps, ref_per_token_logps, completion_mask, beta, kls.k1)
    found = adv.normalize_by_group(rewards, groups, mask=scored, mean_level=stats.leave_one_out_mean, std_level=None)
    if normalize_advantages:
        found = adv.normalize_by_group(found, groups, mask=scored, mean_level=stats.batch_mean, std_level=stats.batch_std)
    return {"advantages": found}


def trl_lone_rows(kwargs: Mapping[str, Any], _: Mapping[str, Any]) -> bool:
    counts = (~kwargs["rewards_per_func"].isnan().all(dim=1)).view(-1, kwargs["num_generations"]).sum(dim=1)
    return bool(kwargs["normalize_advantages"]) and bool((counts == 1).any())


NO_PEER = Rule(
    reason="a row without a peer has advantage 0 and counts in the batch statistics here; there it is NaN and does not",
    applies=trl_lone_rows,
    given={"normalize_advantages": True, "rewards_per_func": lambda x: x.index_fill(0, torch.arange(1, len(x)), math.nan)},
)


TRL = {
    "trl_grpo_advantages": Parity(
        run=trl_grpo_advantages, ours="advantages.combine_rewards, normalize_by_group(mask=...), gdpo_advantages"
    ),
    "trl_rloo_advantages": Parity(
        run=trl_rloo_advantages,
        ours="advantages.combine_rewards, apply_kl_penalty, normalize_by_group(mean_level=leave_one_out_mean)",
        rules=(NO_PEER,),
    ),
}


# -- slime, prime-rl, rlax


def slime_gae(rewards, values, gamma, lambd):
    mask = torch.ones_like(rewards)
    advantages = adv.gae(rewards, values, mask, gamma, lambd)
    returns = peers.lambda_returns(rewards, values, mask, gamma, lambd)
    return {"advantages": advantages, "advantages_chunked": advantages, "returns": returns}


def slime_group_reward_norm(rewards, n_samples_per_prompt, rollout_batch_size, advantage_estimator, grpo_std_normalization):
    rows = rewards.shape[0]
    groups = blocks(rows, n_samples_per_prompt if rows == n_samples_per_prompt * rollout_batch_size else rows)
    divides = advantage_estimator in ("grpo", "gspo", "cispo") and grpo_std_normalization
    return {"rewards": adv.normalize_by_group(rewards, groups, std_level=stats.group_std if divides else None, epsilon=1e-6)}


def slime_reinforce_plus_plus(rewards, kl, loss_masks, kl_coef, gamma):
    lengths = [row.numel() for row in kl]
    mask, kl_rows = pad_rows(loss_masks), pad_rows(kl)
    everywhere = pad_rows([torch.ones_like(row) for row in kl])
    penalize = partial(
        adv.apply_kl_penalty, log_probs=kl_rows, ref_log_probs=torch.zeros_like(kl_rows), mask=mask, kl_coef=kl_coef, kl=kls.k1
    )
    token_rewards, _ = penalize(adv.reward_at_last_token(rewards, mask))
    returns = adv.discounted_returns(token_rewards, everywhere, gamma)  # slime discounts through masked tokens
    baseline, _ = penalize(rewards[:, None].expand_as(kl_rows))
    found = {
        "returns": returns,
        "returns_whitened": stats.whiten(returns, mask),
        "baseline_adv": baseline,
        "baseline_adv_whitened": stats.whiten(baseline, mask),
    }
    return {name: pack(rows, lengths) for name, rows in found.items()}


def prime_grpo(rewards, num_output_tokens, num_total_tokens, num_turns, length_penalty):
    group = torch.zeros(rewards.shape[0], dtype=torch.int64)
    if length_penalty is not None:
        rewards = adv.penalize_length(
            rewards,
            group,
            num_output_tokens=torch.tensor(num_output_tokens),
            num_total_tokens=torch.tensor(num_total_tokens),
            num_turns=torch.tensor(num_turns),
            weights=tuple(length_penalty),
        )
    return {"advantages": adv.normalize_by_group(rewards, group, std_level=None)}


def prime_maxrl(rewards):
    return {"advantages": adv.max_rl_advantages(rewards, torch.zeros(rewards.shape[0], dtype=torch.int64))}


def rlax_returns(r_t, discount_t, lambda_, values):
    rewards, gamma, states, bootstrap = r_t[None], discount_t[None], values[None, :-1], values[-1:]
    mask = torch.ones_like(rewards)
    return {
        "gae": adv.gae(rewards, states, mask, gamma, lambda_, bootstrap=bootstrap)[0],
        "lambda_returns": peers.lambda_returns(rewards, states, mask, gamma, lambda_, bootstrap=bootstrap)[0],
        "discounted_returns": adv.discounted_returns(rewards, mask, gamma, bootstrap=bootstrap)[0],
    }


def rlax_vtrace(v_tm1, v_t, r_t, discount_t, rho_tm1, lambda_, clip_rho_threshold, clip_pg_rho_threshold):
    found = adv.vtrace(
        r_t[None],
        v_tm1[None],
        rho_tm1[None],
        torch.ones_like(r_t)[None],
        discount_t[None],
        lambda_,
        clips=adv.RatioClips(clip_rho_threshold, clip_pg_rho_threshold),
        next_values=v_t[None],
    )
    return {"vtrace_errors": found.errors[0], "pg_advantage": found.advantages[0], "q_estimate": found.q_values[0]}


OTHERS = {
    "slime_gae": Parity(run=slime_gae, ours="advantages.gae, peers.lambda_returns"),
    "slime_group_reward_norm": Parity(run=slime_group_reward_norm, ours="advantages.normalize_by_group", rules=(NO_PEERS,)),
    "slime_reinforce_plus_plus": Parity(
        run=slime_reinforce_plus_plus,
        ours="advantages.apply_kl_penalty, discounted_returns, statistics.whiten",
        mask="loss_masks",
        note="REINFORCE++ steps over masked tokens; slime discounts through them: pass a mask of all tokens to discounted_returns",
    ),
    "prime_grpo": Parity(run=prime_grpo, ours="advantages.penalize_length, normalize_by_group(std_level=None)"),
    "prime_maxrl": Parity(run=prime_maxrl, ours="advantages.max_rl_advantages"),
    "rlax_gae_lambda_returns": Parity(
        run=rlax_returns, ours="advantages.gae, peers.lambda_returns, discounted_returns (discounts of steps, bootstrap)"
    ),
    "rlax_vtrace": Parity(run=rlax_vtrace, ours="advantages.vtrace"),
}

MAPPINGS: dict[str, Parity] = {**VERL, **AREAL, **TRL, **OTHERS}
NOT_OFFERED: dict[str, str] = {}
