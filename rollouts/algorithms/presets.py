"""Named algorithms: each a function of its hyper-parameters that returns an Algorithm, a composition of parts from the files before.

An Algorithm is a value: it prints, compares and pickles, because it is made of functools.partial and Chain, not of closures. Your own is
`Algorithm(estimate=..., weigh=..., loss=...)`, or `dataclasses.replace` of one of these. Wrappers take an algorithm and return one:
`decoupled(dapo(clip_high=0.28), cap=5.0)`.

The ratio's anchor is rollout_log_probs, what the engine reported, unless a wrapper says otherwise; an algorithm without a ratio needs none.
A hyper-parameter out of range raises ConfigError.

Log-ratios that a loss grows with are bounded by 20 nats, as in verl: nothing else bounds the ratio of a bad token without dual clip, or
k3. A token beyond (r > e^20, a rollout log-prob of -100 for example) has no gradient, and the step goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from torch import Tensor

from rollouts.algorithms.anchors import Combine, GiGPOSettings, add_weighted
from rollouts.algorithms.corrections import anchor_to_proximal, truncate_weights
from rollouts.algorithms.covariance import select_kl_cov
from rollouts.algorithms.distillation.signals import divergence_loss, estimate_beside_divergence, estimate_from_teacher
from rollouts.algorithms.estimators import (
    estimate_gae,
    estimate_gdpo,
    estimate_gigpo,
    estimate_gpg,
    estimate_greedy_baseline,
    estimate_group_relative,
    estimate_max_rl,
    estimate_opo,
    estimate_pairs,
    estimate_pass_at_k,
    estimate_reinforce_plus_plus,
    estimate_reinforce_plus_plus_baseline,
)
from rollouts.algorithms.kl import KLEstimator, k1, k2, k3
from rollouts.algorithms.loss_weights import fixed_length_mean, sample_mean, sample_sum, token_mean
from rollouts.algorithms.losses import clipped_policy_loss, corrected_loss, gmpo_policy_loss, kl_cov_policy_loss, policy_loss
from rollouts.algorithms.preference_objectives import PairObjective, dpo
from rollouts.algorithms.preferences import paired_loss, paired_mean
from rollouts.algorithms.preset_parts import (
    BOUNDED_RATIO,
    check_clip,
    check_epsilon,
    check_number,
    check_pair_objective,
    check_wraps,
    fill_penalty,
    fill_terms,
    find_loss_only,
    find_required,
    find_required_without_rollouts,
)
from rollouts.algorithms.proximal import Interpolation, approximate_and_anchor
from rollouts.algorithms.statistics import batch_mean, group_mean, group_std, leave_one_out_mean
from rollouts.algorithms.surrogates import (
    LOG_RATIO_BOUND,
    cispo_fractions,
    importance_weighted,
    inside_binary_kl,
    inside_tv,
    outside_fractions,
    sapo_gates,
    sequence_ratio,
)
from rollouts.algorithms.surrogates import cispo as cispo_surrogate
from rollouts.algorithms.surrogates import dppo as dppo_surrogate
from rollouts.algorithms.surrogates import reinforce as reinforce_surrogate
from rollouts.algorithms.surrogates import sapo as sapo_surrogate
from rollouts.errors import ConfigError
from rollouts.types import Algorithm, TrainBatch, Transform


@dataclass(frozen=True)
class Chain:
    """Transforms applied from left to right. A value: it prints, compares and pickles."""

    steps: tuple[Transform, ...]

    def __call__(self, batch: TrainBatch) -> TrainBatch:
        return reduce(lambda value, step: step(value), self.steps, batch)


def chain(*steps: Transform) -> Transform:
    """Chain transforms: each step is applied to the result of the one before."""
    return Chain(steps)


# -- group-relative algorithms


def grpo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    epsilon: float = 1e-4,
    dual: float | None = None,
    entropy_coef: float = 0.0,
    kl: KLEstimator = k3,
) -> Algorithm:
    """A = (r - mean(group)) / std(group); clipped ratio; mean over tokens of a row, then over rows.

    loss = -1/B sum_i 1/|o_i| sum_t [ min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - kl_coef * k3(p || p_ref) + entropy_coef * H ]

    When: verifiable rewards, several samples per prompt, no critic.

    Args:
        clip_low, clip_high: widths of the clip range; clip_low in [0, 1), clip_high >= 0.
        kl_coef: coefficient of the KL term in the loss; > 0 needs a reference model. The paper uses 0.04; TRL has 0, too, since
            rewards that are checked need no anchor.
        epsilon: added to the standard deviation (TRL 1e-4, verl 1e-6, the paper none).
        dual: dual-clip bound for negative advantages, > 1; verl uses 3. None = off, as in the paper.
        entropy_coef: coefficient of the entropy bonus, 0 in the paper.
        kl: estimator of the KL term: k1, abs_kl, k2, k3 (the paper's), or k1_straight_through, k3_straight_through (verl's "k1+", "k3+"),
            whose gradient is that of the divergence. The gradient of k1 alone has mean 0: in a loss it pulls nowhere.

    Source: Shao et al. 2024 (DeepSeekMath), equations 3 and 4. Aggregation as in the paper; TRL's GRPO also counts rows without a trained
    token among B, and verl's default is a mean over tokens.
    """
    check_clip(clip_low, clip_high, dual)
    check_epsilon(epsilon)
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=group_mean, std_level=group_std, epsilon=epsilon),
        weigh=sample_mean,
        loss=partial(
            clipped_policy_loss, low=clip_low, high=clip_high, dual=dual, ratio=BOUNDED_RATIO, **fill_terms(kl_coef, entropy_coef, kl)
        ),
        requires=find_required(kl_coef, entropy_coef),
    )


def dr_grpo(max_tokens: int, clip_low: float = 0.2, clip_high: float = 0.2) -> Algorithm:
    """A = r - mean(group), not divided by the standard deviation; token losses divided by a constant length.

    loss = -1/(B max_tokens) sum_i sum_t min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    When: GRPO's preference for long wrong answers and for easy or hard prompts is unwanted.

    Args:
        max_tokens: the constant, usually the token budget of a response.
        clip_low, clip_high: as in grpo.

    Source: Liu et al. 2025 (Understanding R1-Zero-like training), section 3.2. Rows without a trained token do
    not count in B, as in verl; in TRL they do.
    """
    check_clip(clip_low, clip_high, None)
    check_number("max_tokens", max_tokens, lambda x: x >= 1, "at least 1")
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=group_mean, std_level=None),
        weigh=partial(fixed_length_mean, length=max_tokens),
        loss=partial(clipped_policy_loss, low=clip_low, high=clip_high, ratio=BOUNDED_RATIO),
        requires=frozenset({"rollout_log_probs"}),
    )


def dapo(clip_low: float = 0.2, clip_high: float = 0.28, epsilon: float = 1e-4, dual: float | None = None) -> Algorithm:
    """GRPO's advantages, a wider clip upwards, and a mean over all tokens of the step.

    loss = -1/sum_i |o_i| sum_i sum_t min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    When: long answers, where GRPO's mean per row starves long rows of gradient. Use it with the check_reward_nonzero_std filter
    (dynamic sampling), over-sampling and overlong_penalty.

    Args:
        clip_low, clip_high, dual: as in grpo.
        epsilon: as in grpo.

    Source: Yu et al. 2025 (DAPO), equations 8 to 10: no KL term. TRL and verl have the same objective, verl with dual=3.
    """
    check_clip(clip_low, clip_high, dual)
    check_epsilon(epsilon)
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=group_mean, std_level=group_std, epsilon=epsilon),
        weigh=token_mean,
        loss=partial(clipped_policy_loss, low=clip_low, high=clip_high, dual=dual, ratio=BOUNDED_RATIO),
        requires=frozenset({"rollout_log_probs"}),
    )


def gspo(clip_low: float = 3e-4, clip_high: float = 4e-4, epsilon: float = 1e-4) -> Algorithm:
    """GRPO with the ratio of whole responses: s = (p(y) / p_old(y))^(1 / |y|) in place of each token's ratio.

    loss = -1/B sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    When: mixtures of experts and long responses, where single tokens' ratios are noise.

    Args:
        clip_low, clip_high: widths round 1 of the length-normalised ratio, so much smaller than GRPO's.
        epsilon: added to the standard deviation.

    Source: Zheng et al. 2025 (Group sequence policy optimization), equations 5 to 7; clip widths of its section 5.1. A mean over rows, as
    in the paper, slime and TRL; AReaL has a mean over tokens. The gradient is that of each token's own log-prob, as in verl; with this
    mean and one advantage a row it is the same as theirs through the row's mean.
    """
    check_clip(clip_low, clip_high, None)
    check_epsilon(epsilon)
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=group_mean, std_level=group_std, epsilon=epsilon),
        weigh=sample_mean,
        loss=partial(clipped_policy_loss, low=clip_low, high=clip_high, ratio=partial(sequence_ratio, bound=LOG_RATIO_BOUND)),
        requires=frozenset({"rollout_log_probs"}),
    )


def gmpo(clip_low: float = 0.4, clip_high: float = 0.4, epsilon: float = 1e-4) -> Algorithm:
    """GRPO with the geometric mean of a response's clipped token ratios: loss = -1/B sum_i A_i exp(mean_t d_t).

    d_t is log r_t, clipped to [-clip_low, clip_high] on the side where that lowers the objective.

    When: as gspo; single extreme ratios weigh less than in GRPO's arithmetic mean, yet are clipped token by token.

    Args:
        clip_low, clip_high: widths in nats.
        epsilon: added to the standard deviation.

    Source: Zhao et al. 2025 (Geometric-mean policy optimization). verl adds 1e-8 to |o_i|, and counts rows without a trained token among B.
    """
    check_number("clip_low", clip_low, lambda x: x >= 0, "at least 0 (nats)")
    check_number("clip_high", clip_high, lambda x: x >= 0, "at least 0 (nats)")
    check_epsilon(epsilon)
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=group_mean, std_level=group_std, epsilon=epsilon),
        weigh=sample_mean,
        loss=partial(gmpo_policy_loss, low=clip_low, high=clip_high, bound=LOG_RATIO_BOUND),
        requires=frozenset({"rollout_log_probs"}),
    )


def cispo(clip_high: float = 0.28, clip_low: float = 1.0, epsilon: float = 1e-4) -> Algorithm:
    """GRPO's advantages; the clipped ratio is a weight without gradient, so every token keeps its own.

    loss = -1/sum_i |o_i| sum_i sum_t sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p

    When: several updates per rollout batch; rare tokens whose ratio grows fast (turning points of a solution) go on learning.

    Args:
        clip_high: width above 1: the weight's cap is 1 + clip_high. verl and slime write the width, TRL the cap itself (and recommends 5,
            after ScaleRL, which is clip_high=4 here). The paper does not print its value; 0.28 is that of Trinity-RFT's CISPO.
        clip_low: width below 1, in [0, 1]; 1 = no lower bound, as in the paper.
        epsilon: added to the standard deviation.

    Source: MiniMax-M1 2025, equations 4 and 5.
    """
    check_number("clip_low", clip_low, lambda x: 0 <= x <= 1, "in [0, 1]; 1 = no lower bound")
    check_number("clip_high", clip_high, lambda x: x >= 0, "at least 0")
    check_epsilon(epsilon)
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=group_mean, std_level=group_std, epsilon=epsilon),
        weigh=token_mean,
        loss=partial(
            policy_loss,
            surrogate=partial(cispo_surrogate, low=clip_low, high=clip_high),
            clip_metrics=partial(cispo_fractions, low=clip_low, high=clip_high),
        ),
        requires=frozenset({"rollout_log_probs"}),
    )


def sapo(tau_pos: float = 1.0, tau_neg: float = 1.05, epsilon: float = 1e-4) -> Algorithm:
    """GRPO with a soft gate in place of the clip: loss = -1/B sum_i 1/|o_i| sum_t A sigmoid(tau (r - 1)) 4 / tau.

    When: the hard edge of the clip makes learning jumpy; tokens far off policy fade out smoothly.

    Args:
        tau_pos, tau_neg: > 0, sharpness of the gate for A > 0 and for the others.
        epsilon: added to the standard deviation.

    Source: Gao et al. 2025 (Soft adaptive policy optimization). Aggregation as in the paper, TRL and verl (AReaL: over all tokens).
    """
    check_number("tau_pos", tau_pos, lambda x: x > 0, "more than 0")
    check_number("tau_neg", tau_neg, lambda x: x > 0, "more than 0")
    check_epsilon(epsilon)
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=group_mean, std_level=group_std, epsilon=epsilon),
        weigh=sample_mean,
        loss=partial(
            policy_loss,
            surrogate=partial(sapo_surrogate, tau_pos=tau_pos, tau_neg=tau_neg),
            clip_metrics=partial(sapo_gates, tau_pos=tau_pos, tau_neg=tau_neg),
        ),
        requires=frozenset({"rollout_log_probs"}),
    )


def dppo(low: float = 0.2, high: float = 0.2, cap: float = 20.0, epsilon: float = 1e-4) -> Algorithm:
    """GRPO's advantages; the trust region is about the token's probability, not its ratio.

    loss = -1/sum_i |o_i| sum_i sum_t keep * sg(min(r, cap)) A log p; keep = 0 where p has already moved too far in A's direction:
    p - p_old > high for A > 0, p_old - p > low else.

    When: large vocabularies: a ratio clip stops rare tokens too early and common ones too late.

    Args:
        low, high: most that the token's probability may fall and rise, in [0, 1].
        cap: bound of the detached ratio.
        epsilon: added to the standard deviation.

    Source: Qi et al. 2026 (Rethinking the trust region in LLM reinforcement learning); widths 0.2 as in prime-rl, weight as in verl.
    """
    check_number("low", low, lambda x: 0 <= x <= 1, "in [0, 1]")
    check_number("high", high, lambda x: 0 <= x <= 1, "in [0, 1]")
    return _dppo(inside_tv, low, high, cap, epsilon)


def dppo_kl(low: float = 0.05, high: float = 0.05, cap: float = 20.0, epsilon: float = 1e-4) -> Algorithm:
    """dppo with the trust region measured by the binary KL divergence KL(p_old || p) of the event "this token".

    When: as dppo; the divergence grows without bound where a probable token is about to vanish, so it guards such tokens harder.

    Args:
        low, high: largest divergence for falling and rising tokens, nats, at least 0.
        cap: bound of the detached ratio.
        epsilon: added to the standard deviation.

    Source: Qi et al. 2026 (Rethinking the trust region in LLM reinforcement learning), its KL variant as in verl; widths 0.05 as in the
    runs of SkyRL (pull request 1037) and open-instruct (pull request 1790).
    """
    check_number("low", low, lambda x: x >= 0, "at least 0 (nats)")
    check_number("high", high, lambda x: x >= 0, "at least 0 (nats)")
    return _dppo(inside_binary_kl, low, high, cap, epsilon)


def max_rl(clip_low: float = 0.2, clip_high: float = 0.28) -> Algorithm:
    """A = (r - mean(group)) / mean(group); clipped ratio; mean over all tokens of the step.

    When: rewards 0 and 1, hard prompts among easy ones: dividing by the rate of success makes the expected gradient that of a truncated
    log-likelihood of success, which weighs hard prompts more than GRPO's standard deviation does.

    Args:
        clip_low, clip_high: as in grpo.

    Source: Tajwar et al. 2026 (Maximum Likelihood Reinforcement Learning); the clip and the mean over tokens are DAPO's, for more than one
    update per rollout batch. Rewards must not be negative: a group whose mean is not positive has advantage 0.
    """
    check_clip(clip_low, clip_high, None)
    return Algorithm(
        estimate=estimate_max_rl,
        weigh=token_mean,
        loss=partial(clipped_policy_loss, low=clip_low, high=clip_high, ratio=BOUNDED_RATIO),
        requires=frozenset({"rollout_log_probs"}),
    )


def pass_at_k(clip_low: float = 0.2, clip_high: float = 0.28, divide_by_std: bool = True, epsilon: float = 1e-6) -> Algorithm:
    """A = (best - second best) / std(group) for the best answer of a group, 0 for the others; clipped ratio; mean over all tokens.

    When: the best of k answers is what counts, as with a verifier at hand: k is the number of samples per prompt.

    Args:
        clip_low, clip_high: as in grpo.
        divide_by_std: False leaves the advantage in the units of the reward, as in the paper.
        epsilon: added to the standard deviation.

    Source: Tang et al. 2025 (Optimizing language models for inference time objectives); divided by the standard deviation as verl's
    grpo_passk. Groups whose best reward is shared teach nothing, so with rewards 0 and 1 only a lone solution does.
    """
    check_clip(clip_low, clip_high, None)
    check_epsilon(epsilon)
    return Algorithm(
        estimate=partial(estimate_pass_at_k, std_level=group_std if divide_by_std else None, epsilon=epsilon),
        weigh=token_mean,
        loss=partial(clipped_policy_loss, low=clip_low, high=clip_high, ratio=BOUNDED_RATIO),
        requires=frozenset({"rollout_log_probs"}),
    )


def gdpo(
    components: str | Mapping[str, float], clip_low: float = 0.2, clip_high: float = 0.28, epsilon: float = 1e-4, whiten: bool = True
) -> Algorithm:
    """A = sum_k w_k (r_k - mean(group)) / std(group), each reward by itself, whitened over all tokens; clipped ratio; mean over tokens.

    When: several rewards at once (right, short, well-formed): summed first they collapse into few totals, normalised apart each keeps
    its resolution.

    Args:
        components: rewards by name with their weights: {"right": 1.0, "form": 0.5} or, as text, "right=1 form=0.5"; a name alone weighs 1.
            Names are those of create_composite_reward, or of the metrics of EvaluateResult. The reward that filters see stays the sum that
            the reward function makes.
        clip_low, clip_high: as in grpo.
        epsilon: added to each standard deviation.
        whiten: False leaves out the normalisation over the batch.

    Source: Liu et al. 2026 (GDPO), whitened over the tokens of the batch as in verl; TRL normalises over its rows.
    """
    check_clip(clip_low, clip_high, None)
    check_epsilon(epsilon)
    return Algorithm(
        estimate=partial(estimate_gdpo, components=_parse_components(components), epsilon=epsilon, whiten=whiten),
        weigh=token_mean,
        loss=partial(clipped_policy_loss, low=clip_low, high=clip_high, ratio=BOUNDED_RATIO),
        requires=frozenset({"rollout_log_probs", "reward_components"}),
    )


def _parse_components(components: str | Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """(name, weight) of each reward. Raises ConfigError."""
    pairs: list[tuple[str, Any]] = []
    if isinstance(components, Mapping):
        pairs = [*components.items()]
    else:
        for word in components.replace(",", " ").split():
            name, _, weight = word.partition("=")
            try:
                pairs.append((name, float(weight or "1")))
            except ValueError:
                message = f"components is {components!r}, expected a number as the weight of {name!r}, as in 'right=1 form=0.5'"
                raise ConfigError(message) from None
    names = [name for name, _ in pairs]
    if not names or not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"components is {components!r}, expected different names of rewards with their weights, as 'right=1 form=0.5'")
    for name, weight in pairs:
        check_number(f"the weight of {name!r} in components", weight, lambda x: True, "")
    return tuple((name, float(weight)) for name, weight in pairs)


def kl_cov(fraction: float = 2e-4, coef: float = 1.0, epsilon: float = 1e-4) -> Algorithm:
    """GRPO's advantages; the few tokens whose log-prob and advantage vary together most are held back by coef * |log r|; no clip.

    loss = 1/sum_i |o_i| sum_i sum_t [-r A + coef * selected * |log r|]

    When: entropy collapses early: a small fraction of the tokens causes it, and pulling these back lets the policy go on exploring.

    Args:
        fraction: share of the tokens of a rollout batch that are selected, in [0, 1]; at least one is unless it is 0. verl uses 2e-4.
        coef: strength of the pull at these, at least 0. verl uses 1.
        epsilon: added to the standard deviation.

    Source: Cui et al. 2025 (The entropy mechanism of reinforcement learning for reasoning language models), KL-Cov.
    """
    check_number("fraction", fraction, lambda x: 0 <= x <= 1, "in [0, 1]")
    check_number("coef", coef, lambda x: x >= 0, "at least 0")
    check_epsilon(epsilon)
    return Algorithm(
        estimate=chain(
            partial(estimate_group_relative, mean_level=group_mean, std_level=group_std, epsilon=epsilon),
            partial(select_kl_cov, fraction=fraction),
        ),
        weigh=token_mean,
        loss=partial(kl_cov_policy_loss, coef=coef, ratio=BOUNDED_RATIO),
        requires=frozenset({"rollout_log_probs"}),
    )


def _dppo(inside: Callable[..., Tensor], low: float, high: float, cap: float, epsilon: float) -> Algorithm:
    check_number("cap", cap, lambda x: x > 0, "more than 0")
    check_epsilon(epsilon)
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=group_mean, std_level=group_std, epsilon=epsilon),
        weigh=token_mean,
        loss=partial(
            policy_loss,
            surrogate=partial(dppo_surrogate, low=low, high=high, inside=inside, cap=cap),
            clip_metrics=partial(outside_fractions, inside=inside, low=low, high=high),
        ),
        requires=frozenset({"rollout_log_probs"}),
    )


# -- policy gradients without a clip


def rloo() -> Algorithm:
    """A = r - mean(other samples of the group); loss = -1/B sum_i A_i log p(y_i), on policy.

    When: one update per rollout batch; the ratio is not corrected.

    Source: Ahmadian et al. 2024 (Back to basics). Its reward holds a KL penalty (beta 0.05 in TRL), which is left out here: rewards that
    are checked need no anchor. TRL and AReaL put a clipped ratio round these advantages, for more than one update per rollout batch:
    dataclasses.replace(rloo(), loss=dapo().loss).
    """
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=leave_one_out_mean, std_level=None),
        weigh=sample_sum,
        loss=partial(policy_loss, surrogate=reinforce_surrogate, ratio=None),
    )


def reinforce() -> Algorithm:
    """A = r - mean(batch); loss = -1/B sum_i A_i log p(y_i), on policy.

    When: one sample per prompt, or as the simplest thing to compare with.

    Source: Williams 1992, with the batch mean as its baseline.
    """
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=batch_mean, std_level=None),
        weigh=sample_sum,
        loss=partial(policy_loss, surrogate=reinforce_surrogate, ratio=None),
    )


def remax() -> Algorithm:
    """A = r - r(greedy answer to the same prompt); loss = -1/B sum_i A_i log p(y_i), on policy.

    When: few samples per prompt: the baseline costs one greedy sample a group, which is not trained on. Generate with
    create_generate_fn(num_greedy=1) and RolloutConfig(n_baseline_samples=1).

    Source: Li et al. 2023 (ReMax). The KL penalty in the reward that verl can add is left out here; estimate_greedy_baseline takes it as
    kl and kl_coef, with "ref_log_probs" among requires.
    """
    return Algorithm(
        estimate=estimate_greedy_baseline,
        weigh=sample_sum,
        loss=partial(policy_loss, surrogate=reinforce_surrogate, ratio=None),
        requires=frozenset({"greedy_rows"}),
    )


def opo() -> Algorithm:
    """A = r - sum_j |y_j| r_j / sum_j |y_j| over the group; loss = -1/B sum_i A_i log p(y_i), exactly on policy.

    When: as rloo; the baseline weighted by length is the one of least variance if a response's gradient grows with its length.

    Source: Hao et al. 2025 (On-policy RL with optimal reward baseline), with its plain policy gradient. verl has the same baseline, and by
    default its clipped ratio and a mean over tokens.
    """
    return Algorithm(
        estimate=estimate_opo,
        weigh=sample_sum,
        loss=partial(policy_loss, surrogate=reinforce_surrogate, ratio=None),
    )


def gpg(f_norm: float = 1.0) -> Algorithm:
    """A = alpha (r - mean(group)) / f_norm, alpha = rows / rows in groups with unequal rewards; loss = -mean over tokens of A log p.

    When: the plainest group-relative policy gradient; alpha makes up for groups that teach nothing.

    Args:
        f_norm: > 0; a constant in place of the group's standard deviation.

    Source: Chu et al. 2025 (GPG). verl's alpha counts the rows whose reward is not 0 instead.
    """
    check_number("f_norm", f_norm, lambda x: x > 0, "more than 0")
    return Algorithm(
        estimate=partial(estimate_gpg, f_norm=f_norm),
        weigh=token_mean,
        loss=partial(policy_loss, surrogate=reinforce_surrogate, ratio=None),
    )


# -- advantages along tokens


def reinforce_plus_plus(
    kl_coef: float = 0.01, gamma: float = 1.0, clip_low: float = 0.2, clip_high: float = 0.2, kl: KLEstimator = k1
) -> Algorithm:
    """Token rewards r_T - kl_coef * k1_t, returns to go, whitened over all tokens of the batch; PPO's clip; no critic, no groups.

    A_t = whiten(sum_{s >= t} gamma^(s - t) (r_s - kl_coef * kl_s))

    When: rewards from a model, any number of samples per prompt. With several samples see reinforce_plus_plus_baseline.

    Args:
        kl_coef: coefficient of the KL penalty in the reward; 0 = none, and no reference model. OpenRLHF's default.
        gamma: discount in [0, 1].
        clip_low, clip_high: as in grpo.
        kl: estimator of the penalty: k1 (the paper's), abs_kl, k2 or k3.

    Source: Hu et al. 2025 (REINFORCE++).
    """
    check_clip(clip_low, clip_high, None)
    check_number("kl_coef", kl_coef, lambda x: x >= 0, "at least 0")
    check_number("gamma", gamma, lambda x: 0 <= x <= 1, "in [0, 1]")
    return Algorithm(
        estimate=partial(estimate_reinforce_plus_plus, gamma=gamma, **fill_penalty(kl_coef, kl)),
        weigh=token_mean,
        loss=partial(clipped_policy_loss, low=clip_low, high=clip_high, ratio=BOUNDED_RATIO),
        requires=find_required(kl_coef),
    )


def reinforce_plus_plus_baseline(kl_coef: float = 0.0, clip_low: float = 0.2, clip_high: float = 0.2, kl: KLEstimator = k2) -> Algorithm:
    """A = r - mean(group), whitened over all tokens of the batch; PPO's clip.

    When: several samples per prompt; unlike GRPO it divides by one standard deviation for all prompts, so easy prompts are not blown up.

    Args:
        kl_coef: coefficient of the KL term in the loss; > 0 needs a reference model.
        clip_low, clip_high: as in grpo.
        kl: estimator of the KL term, as in grpo; the paper has k2.

    Source: Hu et al. 2025 (REINFORCE++), the baseline variant.
    """
    check_clip(clip_low, clip_high, None)
    return Algorithm(
        estimate=estimate_reinforce_plus_plus_baseline,
        weigh=token_mean,
        loss=partial(clipped_policy_loss, low=clip_low, high=clip_high, ratio=BOUNDED_RATIO, **fill_terms(kl_coef, kl=kl)),
        requires=find_required(kl_coef),
    )


def ppo(
    gamma: float = 1.0,
    lam: float = 0.95,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    dual: float | None = None,
    entropy_coef: float = 0.0,
    by_group: bool = False,
    kl: KLEstimator = k1,
) -> Algorithm:
    """GAE from a critic, whitened over all tokens of the batch; clipped ratio; mean over tokens.

    delta_t = r_t - kl_coef * kl_t + gamma V_{t+1} - V_t;  A_t = whiten(sum_k (gamma lam)^k delta_{t+k});  critic target = A_t + V_t

    When: rewards along the way, or one sample per prompt. Needs a critic: a second backend with a value head, trained beside the policy.

    Args:
        gamma: discount in [0, 1]; 1 in verl and AReaL, too.
        lam: lambda of GAE, in [0, 1]: 1 = Monte-Carlo returns (verl's and AReaL's default), 0 = one step. The paper uses 0.95.
        clip_low, clip_high, dual, entropy_coef: as in grpo.
        kl_coef: coefficient of the KL penalty in the reward; > 0 needs a reference model.
        by_group: whiten over the tokens of each group instead: AReaL's group_adv_norm, with its standard deviation (divisor n, 1e-5 added
            to it; that of the batch is verl's, divisor n - 1, 1e-8 added to the variance).
        kl: estimator of the penalty: k1 (InstructGPT's), abs_kl, k2 or k3.

    Source: Schulman et al. 2017 (PPO), equations 7, 11 and 12; Schulman et al. 2016 (GAE), equation 16. Whitened over the tokens of the
    rollout batch, as in verl. The clip of the critic's value belongs to its own loss: RLTrainingConfig.value_clip, 0.2 (verl: 0.5).
    """
    check_clip(clip_low, clip_high, dual)
    check_number("gamma", gamma, lambda x: 0 <= x <= 1, "in [0, 1]")
    check_number("lam", lam, lambda x: 0 <= x <= 1, "in [0, 1]")
    check_number("kl_coef", kl_coef, lambda x: x >= 0, "at least 0")
    return Algorithm(
        estimate=partial(estimate_gae, gamma=gamma, lam=lam, **({"by_group": True} if by_group else {}), **fill_penalty(kl_coef, kl)),
        weigh=token_mean,
        loss=partial(clipped_policy_loss, low=clip_low, high=clip_high, dual=dual, ratio=BOUNDED_RATIO, **fill_terms(0.0, entropy_coef)),
        requires=find_required(kl_coef, entropy_coef) | {"values"},
    )


# -- episodes of several turns


def gigpo(
    gamma: float = 0.95,
    omega: float = 1.0,
    combine: Combine = add_weighted,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    default_step_reward: float = 0.0,
    add_final_reward: bool | None = None,
    divide_by_std: bool = True,
    epsilon: float = 1e-6,
    dual: float | None = None,
    entropy_coef: float = 0.0,
    kl: KLEstimator = k3,
) -> Algorithm:
    """GRPO on whole episodes, plus the same on single actions: each is also compared with all others from the same state.

    A = A_E + omega A_S;  A_E = (R - mean(group)) / std(group);  A_S = (G_k - mean(anchor)) / std(anchor);  G_k = r_k + gamma G_{k+1}

    The anchor of an action are all actions in the episodes of its group that began in an equal state (Turn.state). One that nobody else
    began in has A_S = 0. The loss is GRPO's: clipped ratio, mean over the tokens of an episode, then over episodes.

    When: episodes of several actions that begin in one state and meet states again: games, tools, web pages. Rewards of single actions
    help, but one at the end is enough: it reaches earlier actions through gamma.

    Args:
        gamma: discount of step rewards, in [0, 1].
        omega: weight of A_S, at least 0. With combine=interpolate the share of A_E, in [0, 1]: at 1 steps do not count, so choose one.
        combine: add_weighted (A_E + omega A_S, the paper's), interpolate (omega A_E + (1 - omega) A_S), or a function of your own.
        clip_low, clip_high, dual, entropy_coef, kl: as in grpo.
        kl_coef: coefficient of the KL term in the loss; > 0 needs a reference model. The paper uses 0.01.
        default_step_reward: reward of actions whose own reward is unknown, for example -0.01: a cost of each step. Environments give
            every action a reward, 0 included; a reward function that judges whole episodes makes them unknown again.
        add_final_reward: whether the reward of the episode is added to that of its last action. None = in groups of which no action's own
            reward is known, as where a reward function judges whole episodes.
        divide_by_std: False leaves both levels in the units of the rewards (verl-agent's mean_norm).
        epsilon: added to the standard deviations.

    Source: Feng et al. 2025 (GiGPO), equations 3 to 9. verl-agent takes mean and std of A_E over the steps of all episodes, so that long
    ones count more (GiGPOSettings(across_steps=True)), and its loss is a mean over tokens.
    """
    check_clip(clip_low, clip_high, dual)
    settings = GiGPOSettings(
        gamma=gamma,
        omega=omega,
        combine=combine,
        std_level=group_std if divide_by_std else None,
        epsilon=epsilon,
        default_step_reward=default_step_reward,
        add_final_reward=add_final_reward,
    )
    return Algorithm(
        estimate=partial(estimate_gigpo, settings=settings),
        weigh=sample_mean,
        loss=partial(
            clipped_policy_loss, low=clip_low, high=clip_high, dual=dual, ratio=BOUNDED_RATIO, **fill_terms(kl_coef, entropy_coef, kl)
        ),
        requires=find_required(kl_coef, entropy_coef) | {"turns"},
    )


# -- distillation from a teacher


def opd(coef: float = 1.0, reward_coef: float = 0.0, gamma: float = 0.0, bound: float | None = None) -> Algorithm:
    """A_t = coef (log p_teacher(y_t) - log p(y_t)) + reward_coef (r - mean(group)) / std(group); loss = -mean over tokens of r_t A_t.

    On-policy distillation: the policy answers, and the teacher says of every token that was sampled how much more, or less, probable it is
    to it. The expected gradient is that of -KL(policy || teacher) per token.

    When: a better model of the same tokenizer is there; a signal at every token, where a reward has one at the end. Rewards are not needed.

    Args:
        coef: factor of the teacher's signal, at least 0.
        reward_coef: factor of GRPO's advantages of the rewards; 0 = rewards are not trained on.
        gamma: discount in [0, 1] of the signal of later tokens; 0 = each token has its own alone, as in the source.
        bound: most nats of a token's signal on both sides, more than 0; None = no bound.

    Source: Thinking Machines 2025 (On-policy distillation), with the importance-sampling loss and kl_discount_factor 0 of tinker-cookbook;
    Agarwal et al. 2024 (On-policy distillation of language models), where the divergence is over the vocabulary: see gkd.
    """
    check_number("coef", coef, lambda x: x >= 0, "at least 0")
    check_number("reward_coef", reward_coef, lambda x: x >= 0, "at least 0")
    check_number("gamma", gamma, lambda x: 0 <= x <= 1, "in [0, 1]")
    check_number("bound", bound, lambda x: x > 0, "more than 0", optional=True)
    return Algorithm(
        estimate=partial(estimate_from_teacher, coef=coef, gamma=gamma, bound=bound, reward_coef=reward_coef),
        weigh=token_mean,
        loss=partial(policy_loss, surrogate=importance_weighted, ratio=BOUNDED_RATIO),
        requires=frozenset({"rollout_log_probs", "teacher_log_probs"}),
        reads_rewards=reward_coef > 0,
    )


def gkd(beta: float = 0.5, coef: float = 1.0, reward_coef: float = 0.0, clip_low: float = 0.2, clip_high: float = 0.2) -> Algorithm:
    """loss = mean over tokens of coef * JSD_beta(teacher, policy), over the vocabulary, plus reward_coef times GRPO's clipped loss.

    When: as opd, with a teacher in memory: its whole distribution at each token has less variance than the sampled token alone.

    Args:
        beta: 0 = KL(teacher || policy), 1 = KL(policy || teacher), between them the generalized Jensen-Shannon divergence.
        coef: factor of the divergence, at least 0.
        reward_coef: factor of GRPO's advantages of the rewards; 0 = rewards are not trained on.
        clip_low, clip_high: widths of the clip of the rewards' part.

    Source: Agarwal et al. 2024 (On-policy distillation of language models: GKD), equation 1; values and gradients are those of TRL's
    GKDTrainer.generalized_jsd_loss. If a teacher names its K most probable tokens, all others count as one.
    """
    check_number("beta", beta, lambda x: 0 <= x <= 1, "in [0, 1]")
    check_number("coef", coef, lambda x: x >= 0, "at least 0")
    check_number("reward_coef", reward_coef, lambda x: x >= 0, "at least 0")
    check_clip(clip_low, clip_high, None)
    rewards = partial(clipped_policy_loss, low=clip_low, high=clip_high, ratio=BOUNDED_RATIO) if reward_coef else None
    return Algorithm(
        estimate=partial(estimate_beside_divergence, beta=beta, reward_coef=reward_coef),
        weigh=token_mean,
        loss=partial(divergence_loss, coef=coef, beside=rewards),
        requires=frozenset({"rollout_log_probs", "teacher_tops"}),
        reads_rewards=reward_coef > 0,
    )


# -- preferences among rollouts


def online_dpo(
    loss: PairObjective = dpo,
    beta: float | None = None,
    label_smoothing: float | None = None,
    gamma: float | None = None,
    nll_coef: float | None = None,
    min_difference: float = 0.0,
) -> Algorithm:
    """The best and the worst answer of each group are a pair; loss = mean over pairs of -log sigmoid(beta h).

    h = log(p(best) / p_ref(best)) - log(p(worst) / p_ref(worst))

    When: only an order of answers is to be trusted, as of a reward model or of a judge that compares them (PairwiseJudge); rewards count by
    their order alone. A group of equal rewards makes no pair and is not trained on; the other answers of a group are not, either.

    Args:
        loss: of the pairs: dpo, cdpo, robust, ipo, slic, simpo or orpo (preference_objectives.py); kto compares no pairs.
        beta: strength of the pull to the reference, more than 0, or what the loss calls beta; None = the default of the loss, 0.1, for
            simpo 2.
        label_smoothing: share of pairs that are expected to be the wrong way round, in [0, 0.5), of cdpo and robust; None = 0.1.
        gamma: margin of simpo, a finite number; None = 1.
        nll_coef: weight of the negative log-likelihood of the best answer, at least 0, of dpo and slic; None = 0.
        min_difference: least difference of the two rewards of a pair, at least 0; equal rewards never make one.

    Source: Guo et al. 2024 (Direct language model alignment from online AI feedback), with the best and the worst of any number of answers.
    For two answers with different rewards, values and gradients are those of TRL's OnlineDPOTrainer; ipo compares log-probs per token, as
    TRL's DPOTrainer.
    """
    numbers = {"beta": beta, "label_smoothing": label_smoothing, "gamma": gamma, "nll_coef": nll_coef}
    given = {name: number for name, number in numbers.items() if number is not None}
    check_pair_objective(loss, given)
    check_number("min_difference", min_difference, lambda x: x >= 0, "at least 0")
    objective = loss(**given)
    if not objective.compares_pairs:
        raise ConfigError("loss is kto, which compares no pairs: choose dpo, cdpo, robust, ipo, slic, simpo or orpo")
    return Algorithm(
        estimate=partial(estimate_pairs, min_difference=min_difference),
        weigh=paired_mean,
        loss=partial(paired_loss, loss=objective.loss),
        requires=frozenset({"ref_log_probs"} if objective.needs_reference else set[str]()),
        compares_pairs=True,
    )


# -- wrappers: an algorithm to an algorithm


def decoupled(
    algorithm: Algorithm,
    cap: float | None = 5.0,
    floor: float | None = None,
    drop: bool = True,
    segment_wise: bool = False,
    missed_as_proximal: bool = False,
    approximate: Interpolation | None = None,
) -> Algorithm:
    """Anchor an algorithm's ratio to the policy before the update, and weight each token by proximal / behaviour.

    w = p_prox / p_rollout, 0 where w > cap or w < floor (denominators unchanged); ratio = p / p_prox

    When: rollouts are older than the weights (asynchronous training) or the engine's numbers differ from the trainer's.

    Args:
        algorithm: any whose loss uses the ratio.
        cap: largest weight, > 0; tokens above are dropped. AReaL's behav_imp_weight_cap; None = no bound.
        floor: smallest weight, >= 0; tokens below are dropped. None = no bound.
        drop: False clamps weights to the bounds instead of dropping their tokens.
        segment_wise: w uses segment_log_probs, each token's log-prob one weight version after the one that sampled it; the ratio keeps
            prox_log_probs. The samples must carry them (rollouts.asynchronous.recompute).
        missed_as_proximal: with segment_wise, the weight of a token whose segment log-prob was never computed is that of prox_log_probs;
            False = 1.
        approximate: interpolate_log_probs or interpolate_probs of proximal.py: p_prox is taken between p_rollout and the policy's
            own log-probs of the pass that is trained on, by how many versions old the token is, and no pass before the update is needed;
            None = computed by the trainer before the update.

    Source: Hilton et al. 2022 (Batch size-invariance for policy optimization); Fu et al. 2025 (AReaL).
    """
    check_wraps(algorithm, "decoupled")
    if missed_as_proximal and not segment_wise:
        raise ConfigError("missed_as_proximal is True, but segment_wise is False: no token can miss a segment. Set segment_wise=True")
    check_number("cap", cap, lambda x: x > 0, "more than 0", optional=True)
    limit = math.inf if cap is None else cap
    check_number("floor", floor, lambda x: 0 <= x < limit, f"in [0, {limit})", optional=True)
    bounds: dict[str, Any] = {"cap": cap, "floor": floor, "drop": drop, "segment_wise": segment_wise}
    bounds |= {"missed_as_proximal": True} if missed_as_proximal else {}
    requires = algorithm.requires | {"rollout_log_probs"} | ({"segment_log_probs", "weight_versions"} if segment_wise else set())
    if missed_as_proximal or approximate is not None:
        requires |= {"weight_versions", "policy_versions"}
    if approximate is not None:
        correction = partial(approximate_and_anchor, interpolate=approximate, **bounds)
        loss = partial(corrected_loss, correction=correction, loss=algorithm.loss, from_own=True)
        return replace(algorithm, loss=loss, requires=requires)
    return replace(
        algorithm,
        loss=partial(corrected_loss, correction=partial(anchor_to_proximal, **bounds), loss=algorithm.loss),
        requires=requires | {"prox_log_probs"},
        loss_only=find_loss_only(algorithm, "prox_log_probs"),
    )


def recomputed(algorithm: Algorithm) -> Algorithm:
    """Anchor an algorithm's ratio to the trainer's own log-probs of the policy before the update, without a weight.

    When: the engine's log-probs are not to be trusted, or are not there, or to compare with frameworks that always do so (verl's default).

    Args:
        algorithm: any whose loss uses the ratio.

    Source: Schulman et al. 2017 (PPO), section 3, where the ratio's anchor is the policy before the update.
    """
    check_wraps(algorithm, "recomputed", corrects=False)
    return replace(
        algorithm,
        requires=find_required_without_rollouts(algorithm) | {"old_log_probs"},
        loss_only=find_loss_only(algorithm, "old_log_probs"),
    )


def truncated(algorithm: Algorithm, cap: float | None = 2.0, floor: float | None = None) -> Algorithm:
    """`recomputed`, with each token weighted by the truncated ratio of trainer to engine: w = min(p_old / p_rollout, cap).

    When: the engine's kernels or precision differ from the trainer's (truncated importance sampling, TIS).

    Args:
        algorithm: any.
        cap: largest weight, > 0. verl, TRL and slime use 2 to 3; None = no bound.
        floor: smallest weight, >= 0; smaller ones are raised to it. None = no bound.

    Source: Yao et al. 2025 (Your efficient RL framework secretly brings you off-policy RL training).
    """
    check_wraps(algorithm, "truncated")
    check_number("cap", cap, lambda x: x > 0, "more than 0", optional=True)
    limit = math.inf if cap is None else cap
    check_number("floor", floor, lambda x: 0 <= x < limit, f"in [0, {limit})", optional=True)
    return replace(
        algorithm,
        loss=partial(corrected_loss, correction=partial(truncate_weights, cap=cap, floor=floor), loss=algorithm.loss),
        requires=algorithm.requires | {"old_log_probs", "rollout_log_probs"},
        loss_only=find_loss_only(algorithm, "old_log_probs"),
    )
