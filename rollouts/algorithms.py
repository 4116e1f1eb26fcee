"""Named algorithms: each a function of its hyper-parameters that returns an Algorithm, a composition of parts from the files before.

An Algorithm is a value: it prints, compares and pickles, because it is made of functools.partial and Chain, not of closures. Your own is
`Algorithm(estimate=..., weigh=..., loss=...)`, or `dataclasses.replace` of one of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce

from rollouts.estimators import estimate_group_relative
from rollouts.kl import k3
from rollouts.loss_weights import fixed_length_mean, sample_mean, sample_sum, token_mean
from rollouts.losses import clipped_policy_loss, policy_loss
from rollouts.statistics import batch_mean, group_mean, group_std, leave_one_out_mean
from rollouts.surrogates import reinforce as reinforce_surrogate
from rollouts.types import Algorithm, TrainBatch, Transform


@dataclass(frozen=True)
class Chain:
    """Transforms applied from left to right. A value: it prints, compares and pickles."""

    steps: tuple[Transform, ...]

    def __call__(self, batch: TrainBatch) -> TrainBatch:
        return reduce(lambda value, step: step(value), self.steps, batch)


def chain(*steps: Transform) -> Transform:
    """The transform that applies each step to the result of the one before."""
    return Chain(steps)


def grpo(
    clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.0, epsilon: float = 1e-4, dual: float | None = None
) -> Algorithm:
    """A = (r - mean(group)) / std(group); clipped ratio; mean over tokens of a row, then over rows.

    loss = -1/B sum_i 1/|o_i| sum_t [ min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - kl_coef * k3(p || p_ref) ]

    When: verifiable rewards, several samples per prompt, no critic.

    Args:
        clip_low, clip_high: widths of the clip range.
        kl_coef: of the KL term in the loss; > 0 needs a reference model. The paper uses 0.04; TRL, like us, has 0 by default, since
            rewards that are checked need no anchor.
        epsilon: added to the standard deviation (TRL 1e-4, verl 1e-6, the paper none).
        dual: dual-clip bound for negative advantages, > 1; verl uses 3. None = off, as in the paper.

    Source: Shao et al. 2024 (DeepSeekMath), equations 3 and 4.
    """
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=group_mean, std_level=group_std, epsilon=epsilon),
        weigh=sample_mean,
        loss=partial(clipped_policy_loss, low=clip_low, high=clip_high, dual=dual, kl=k3 if kl_coef > 0 else None, kl_coef=kl_coef),
        requires=frozenset({"rollout_log_probs", "ref_log_probs"} if kl_coef > 0 else {"rollout_log_probs"}),
    )


def dr_grpo(max_tokens: int, clip_low: float = 0.2, clip_high: float = 0.2) -> Algorithm:
    """A = r - mean(group), not divided by the standard deviation; token losses divided by a constant length.

    When: GRPO's preference for long wrong answers and for easy or hard prompts is unwanted.

    Args:
        max_tokens: the constant, usually the token budget of a response.

    Source: Liu et al. 2025 (Understanding R1-Zero-like training), section 3.2.
    """
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=group_mean, std_level=None),
        weigh=partial(fixed_length_mean, length=max_tokens),
        loss=partial(clipped_policy_loss, low=clip_low, high=clip_high),
        requires=frozenset({"rollout_log_probs"}),
    )


def dapo(clip_low: float = 0.2, clip_high: float = 0.28, epsilon: float = 1e-4) -> Algorithm:
    """GRPO's advantages, a wider clip upwards, and a mean over all tokens of the step.

    When: long answers, where GRPO's mean per row starves long rows of gradient. Use it with the check_reward_nonzero_std filter
    (dynamic sampling) and over-sampling.

    Source: Yu et al. 2025 (DAPO), equations 8 to 10.
    """
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=group_mean, std_level=group_std, epsilon=epsilon),
        weigh=token_mean,
        loss=partial(clipped_policy_loss, low=clip_low, high=clip_high),
        requires=frozenset({"rollout_log_probs"}),
    )


def rloo() -> Algorithm:
    """A = r - mean(other samples of the group); loss = -1/B sum_i A_i log p(y_i), on policy.

    When: one update per rollout batch; the ratio is not corrected.

    Source: Ahmadian et al. 2024 (Back to basics), equation 5.
    """
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=leave_one_out_mean, std_level=None),
        weigh=sample_sum,
        loss=partial(policy_loss, surrogate=reinforce_surrogate),
        requires=frozenset({"rollout_log_probs"}),
    )


def reinforce() -> Algorithm:
    """A = r - mean(batch); loss = -1/B sum_i A_i log p(y_i), on policy.

    When: one sample per prompt, or as the simplest thing to compare with.

    Source: Williams 1992, with the batch mean as its baseline.
    """
    return Algorithm(
        estimate=partial(estimate_group_relative, mean_level=batch_mean, std_level=None),
        weigh=sample_sum,
        loss=partial(policy_loss, surrogate=reinforce_surrogate),
        requires=frozenset({"rollout_log_probs"}),
    )
