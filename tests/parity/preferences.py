"""preferences: our compositions for the vectors of this group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from samples import make_batch
from torch import Tensor

from parity.mapping import Parity, Rule
from rollouts.algorithms.kto import kto_loss, kto_reference_point
from rollouts.algorithms.loss_weights import sample_mean
from rollouts.algorithms.preferences import (
    PairLoss,
    dpo_loss,
    hinge_pair_loss,
    ipo_pair_loss,
    measure_pairs,
    odds_ratio_loss,
    order_pairs,
    pair_mean,
    paired_loss,
    preference_loss,
    robust_pair_loss,
    sigmoid_pair_loss,
    simpo_pair_loss,
    smoothed_pair_loss,
)
from rollouts.algorithms.presets import online_dpo
from rollouts.types import TokenOutputs


def at_the_end(sums: Tensor, mask: Tensor) -> Tensor:
    """Sums over rows as a column of tokens: each at the first token of its row, which TRL always trains."""
    return torch.cat([sums[:, None], torch.zeros_like(mask[:, 1:])], 1)


def dpo(
    per_token_logps: Tensor,
    completion_mask: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    beta: float,
    loss_type: str,
    label_smoothing: float,
) -> Mapping[str, Any]:
    """Rows of TRL are chosen answers, then rejected ones; ours are pairs."""
    pairs = len(ref_chosen_logps)
    order = [row for pair in range(pairs) for row in (pair, pairs + pair)]
    mask = completion_mask[order]
    refs = at_the_end(torch.cat([ref_chosen_logps, ref_rejected_logps])[order], mask.double())
    batch = make_batch(mask, ref_log_probs=refs, group_ids=torch.arange(pairs).repeat_interleave(2))
    batch = replace(batch, loss_weights=pair_mean(batch))
    losses: dict[str, PairLoss] = {
        "hinge": hinge_pair_loss,
        "ipo": ipo_pair_loss,
        "robust": partial(robust_pair_loss, label_smoothing=label_smoothing),
    }
    outputs = TokenOutputs(log_probs=per_token_logps[order])
    loss = partial(preference_loss, outputs, batch, beta=beta)
    found = loss(pair_loss=losses.get(loss_type, sigmoid_pair_loss), average=loss_type in ("ipo", "sigmoid_norm")).loss
    sums = (per_token_logps.detach() * completion_mask).sum(1)
    metrics = dpo_loss(sums[:pairs], sums[pairs:], ref_chosen_logps, ref_rejected_logps, beta=beta).metrics
    return {
        "loss": found,
        "metrics": {
            "rewards_chosen": metrics["reward_chosen"],
            "rewards_rejected": metrics["reward_rejected"],
            "rewards_accuracies": metrics["reward_accuracy"],
            "rewards_margins": metrics["reward_margin"],
            "logps_chosen": metrics["log_prob_chosen"],
            "logps_rejected": metrics["log_prob_rejected"],
        },
    }


def kto(
    per_token_logps: Tensor,
    completion_mask: Tensor,
    label: Tensor,
    ref_logps: Tensor,
    KL_logps: Tensor,
    ref_KL_logps: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Mapping[str, Any]:
    mask = completion_mask.double()
    point = kto_reference_point(KL_logps[:, None], ref_KL_logps[:, None], torch.ones_like(KL_logps)[:, None])
    batch = make_batch(mask, rewards=label.double(), ref_log_probs=at_the_end(ref_logps, mask), values=torch.full_like(mask, float(point)))
    batch = replace(batch, loss_weights=sample_mean(batch))
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    loss, metrics = kto_loss(TokenOutputs(log_probs=per_token_logps), batch, beta=beta, **weights)
    return {"loss": loss, "kl": metrics["kto_kl"]}


def orpo(policy_chosen_logps: Tensor, policy_rejected_logps: Tensor, beta: float) -> Mapping[str, Any]:
    """TRL's function is the second of our two terms."""
    loss, metrics = odds_ratio_loss(policy_chosen_logps, policy_rejected_logps, beta=beta)
    return {
        "loss": loss + policy_chosen_logps.mean(),
        "log_odds": metrics["log_odds"],
        "rewards_chosen": metrics["reward_chosen"],
        "rewards_rejected": metrics["reward_rejected"],
    }


def cpo(
    policy_chosen_logps: Tensor, policy_rejected_logps: Tensor, beta: float, loss_type: str, label_smoothing: float, simpo_gamma: float
) -> Mapping[str, Any]:
    losses: dict[str, PairLoss] = {
        "simpo": partial(simpo_pair_loss, gamma=simpo_gamma),
        "sigmoid": partial(smoothed_pair_loss, label_smoothing=label_smoothing),
        "hinge": hinge_pair_loss,
        "ipo": ipo_pair_loss,
    }
    loss, metrics = dpo_loss(policy_chosen_logps, policy_rejected_logps, None, None, beta=beta, pair_loss=losses[loss_type])
    return {"loss": loss, "rewards_chosen": metrics["reward_chosen"], "rewards_rejected": metrics["reward_rejected"]}


def online(
    logprobs: Tensor, ref_logprobs: Tensor, completion_mask: Tensor, rewards: Tensor, beta: float, loss_type: str
) -> Mapping[str, Any]:
    """Two answers to each prompt, the first ones before the second ones."""
    algorithm = online_dpo(beta=beta)
    if loss_type == "ipo":
        objective = partial(preference_loss, beta=beta, pair_loss=ipo_pair_loss)
        algorithm = replace(algorithm, loss=partial(paired_loss, loss=objective))
    groups = torch.arange(len(rewards) // 2).repeat(2)
    batch = algorithm.estimate(make_batch(completion_mask, ref_log_probs=ref_logprobs, group_ids=groups, rewards=rewards))
    batch = replace(batch, loss_weights=algorithm.weigh(batch))
    rows, sums = order_pairs(batch), (logprobs.detach() * completion_mask).sum(1)
    refs = (ref_logprobs * completion_mask).sum(1)
    chosen, rejected = rows[0::2], rows[1::2]
    metrics = dpo_loss(sums[chosen], sums[rejected], refs[chosen], refs[rejected], beta=beta).metrics
    return {
        "loss": algorithm.loss(TokenOutputs(log_probs=logprobs), batch).loss,
        "metrics": {
            "rewards/chosen": metrics["reward_chosen"],
            "rewards/rejected": metrics["reward_rejected"],
            "rewards/margins": metrics["reward_margin"],
            "rewards/accuracies": metrics["reward_accuracy"],
            "logps/chosen": metrics["log_prob_chosen"],
            "logps/rejected": metrics["log_prob_rejected"],
            "objective/scores_margin": measure_pairs(batch)["reward_gap"],
        },
    }


def is_tied(kwargs: Mapping[str, Any], _: Mapping[str, Any]) -> bool:
    first, second = kwargs["rewards"].chunk(2)
    return bool((first == second).any())


TIED = Rule(
    reason="two answers of equal rewards are a pair there, of which the first is preferred; here they are no pair",
    applies=is_tied,
    given={"rewards": torch.zeros_like},
)
BOTH = ("policy_chosen_logps", "policy_rejected_logps")
MAPPINGS: dict[str, Parity] = {
    "trl_dpo": Parity(
        run=dpo,
        ours="preferences.preference_loss(pair_loss=sigmoid_pair_loss, hinge_pair_loss, ipo_pair_loss, robust_pair_loss; average=...)",
        wrt=("per_token_logps",),
        grad_mask="completion_mask",
        note="IPO and sigmoid_norm take log-probs per token, which is average=True; rewards in the metrics are then per token, too",
    ),
    "trl_online_dpo": Parity(
        run=online,
        ours="presets.online_dpo (estimators.estimate_pairs, preferences.paired_loss)",
        wrt=("logprobs",),
        grad_mask="completion_mask",
        rules=(TIED,),
        note="IPO compares sums over answers there; online_dpo(loss=ipo) has log-probs per token, as DPOTrainer",
    ),
    "trl_kto": Parity(
        run=kto,
        ours="kto.kto_loss, kto_reference_point, with loss_weights.sample_mean",
        wrt=("per_token_logps",),
        grad_mask="completion_mask",
        note="the reference point is that of the whole step; TRL's is the mean over a process's micro-batch",
    ),
    "trl_orpo": Parity(
        run=orpo,
        ours="preferences.odds_ratio_loss",
        wrt=BOTH,
        note="the likelihood term is the mean over an answer's tokens and then over pairs; TRL's is over all tokens of chosen answers and "
        "their prompts",
    ),
    "trl_cpo": Parity(
        run=cpo,
        ours="preferences.dpo_loss without a reference (pair_loss=simpo_pair_loss, smoothed_pair_loss, hinge_pair_loss, ipo_pair_loss)",
        wrt=BOTH,
    ),
}
NOT_OFFERED: dict[str, str] = {}
