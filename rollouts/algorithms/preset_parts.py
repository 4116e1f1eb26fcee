"""Shared parts of the named algorithms: terms that may be off, checks of hyper-parameters, and the columns that a composition reads."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any

from rollouts.algorithms.estimators import (
    estimate_gae,
    estimate_gdpo,
    estimate_gigpo,
    estimate_gpg,
    estimate_greedy_baseline,
    estimate_group_relative,
    estimate_max_rl,
    estimate_opo,
    estimate_pass_at_k,
    estimate_reinforce_plus_plus,
    estimate_reinforce_plus_plus_baseline,
)
from rollouts.algorithms.kl import KLEstimator, bounded, k3
from rollouts.algorithms.losses import KLTerm, clipped_policy_loss, corrected_loss, gmpo_policy_loss, policy_loss
from rollouts.algorithms.surrogates import LOG_RATIO_BOUND, token_ratio
from rollouts.errors import ConfigError
from rollouts.types import Algorithm, LossOutput, TrainBatch

BOUNDED_RATIO = partial(token_ratio, bound=LOG_RATIO_BOUND)
BOUNDED_K3 = bounded(k3, log_ratio=LOG_RATIO_BOUND)

_ESTIMATES_FROM_REWARDS: tuple[Callable[..., TrainBatch], ...] = (
    estimate_group_relative,
    estimate_greedy_baseline,
    estimate_opo,
    estimate_gpg,
    estimate_max_rl,
    estimate_pass_at_k,
    estimate_gdpo,
    estimate_reinforce_plus_plus,
    estimate_reinforce_plus_plus_baseline,
    estimate_gae,
    estimate_gigpo,
)
"""Estimators that read no log-probs unless a KL penalty is on, and then old_log_probs if they are filled."""

_LOSSES_THAT_PREFER_OLD: tuple[Callable[..., LossOutput], ...] = (policy_loss, clipped_policy_loss, gmpo_policy_loss)
"""Losses that read rollout_log_probs for a metric only, once old_log_probs are filled."""


# -- terms and settings of a preset


def fill_terms(kl_coef: float, entropy_coef: float = 0.0, kl: KLEstimator = k3) -> dict[str, Any]:
    """Return the keywords of policy_loss for the KL and entropy terms that are on. k3, which grows exponentially, is bounded."""
    check_number("kl_coef", kl_coef, lambda x: x >= 0, "at least 0")
    check_number("entropy_coef", entropy_coef, lambda x: x >= 0, "at least 0")
    return ({"kl": KLTerm(BOUNDED_K3 if kl is k3 else kl, kl_coef)} if kl_coef > 0 else {}) | (
        {"entropy_coef": entropy_coef} if entropy_coef > 0 else {}
    )


def fill_penalty(kl_coef: float, kl: KLEstimator) -> dict[str, Any]:
    """Return the keywords of a KL penalty in the rewards, if it is on."""
    return {"kl": kl, "kl_coef": kl_coef} if kl_coef > 0 else {}


def find_required(kl_coef: float = 0.0, entropy_coef: float = 0.0) -> frozenset[str]:
    """Return the required columns: rollout_log_probs, and those of the terms that are on."""
    names = {"rollout_log_probs"}
    if kl_coef > 0:
        names.add("ref_log_probs")
    if entropy_coef > 0:
        names.add("entropy")
    return frozenset(names)


def check_clip(clip_low: float, clip_high: float, dual: float | None) -> None:
    """Raise ConfigError unless the widths of a clip, and the ratio beyond which dual clip holds, are in their ranges."""
    check_number(
        "clip_low", clip_low, lambda x: 0 <= x < 1, "in [0, 1): it is a width, the ratio is clipped to [1 - clip_low, 1 + clip_high]"
    )
    check_number("clip_high", clip_high, lambda x: x >= 0, "at least 0")
    check_number("dual", dual, lambda x: x > 1, "more than 1", optional=True)


def check_epsilon(epsilon: float) -> None:
    """Raise ConfigError unless the summand of a standard deviation is at least 0."""
    check_number("epsilon", epsilon, lambda x: x >= 0, "at least 0")


def check_number(name: str, value: object, accepts: Callable[[Any], bool], expected: str, *, optional: bool = False) -> None:
    """Raise ConfigError unless the value is a finite number that is accepted or, if it is optional, None."""
    if optional and value is None:
        return
    number = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if not number or not accepts(value):
        what = expected if number else f"a finite number {expected}"
        raise ConfigError(f"{name} is {value!r}, expected {what}{', or None' if optional else ''}")


_OBJECTIVE_NUMBERS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("beta", lambda x: x > 0, "more than 0"),
    ("label_smoothing", lambda x: 0 <= x < 0.5, "in [0, 0.5)"),
    ("gamma", lambda x: True, ""),
    ("nll_coef", lambda x: x >= 0, "at least 0"),
)


def check_pair_objective(objective: Callable[..., Any], given: Mapping[str, float]) -> None:
    """Raise ConfigError for a number out of its range, or one that the objective does not take."""
    parameters, name = inspect.signature(objective).parameters, getattr(objective, "__name__", repr(objective))
    taken = [key for key, _, _ in _OBJECTIVE_NUMBERS if key in parameters]
    for key, accepts, expected in _OBJECTIVE_NUMBERS:
        if key not in given:
            continue
        check_number(key, given[key], accepts, expected)
        if key not in taken:
            raise ConfigError(f"{key} is {given[key]!r}, but the loss {name} has none: it takes {' and '.join(taken) or 'no number'}")


# -- columns that an algorithm reads, for its wrappers


def is_corrected(algorithm: Algorithm) -> bool:
    """Whether its loss weights tokens by a ratio of the trainer's policy to the one that sampled them: decoupled and truncated do."""
    return isinstance(algorithm.loss, partial) and algorithm.loss.func is corrected_loss


def find_loss_only(algorithm: Algorithm, column: str) -> frozenset[str]:
    """Find the columns that only the losses read, once a wrapper has added the column of the policy's log-probs.

    The column is among them if the algorithm did not require it and its estimator reads rewards, groups and values only.
    Any other function may read it.
    """
    estimate, settings = _take_apart(algorithm.estimate)
    from_rewards = estimate in _ESTIMATES_FROM_REWARDS and not settings.get("kl_coef")  # a penalty in the rewards reads log-probs
    return algorithm.loss_only | ({column} if from_rewards and column not in algorithm.requires else frozenset())


def find_required_without_rollouts(algorithm: Algorithm) -> frozenset[str]:
    """Find the columns required once old_log_probs anchor the ratio: no rollout_log_probs, unless another function may read them."""
    (estimate, _), (loss, settings) = _take_apart(algorithm.estimate), _take_apart(algorithm.loss)
    known = estimate in _ESTIMATES_FROM_REWARDS and loss in _LOSSES_THAT_PREFER_OLD and settings.get("reweigh") is None
    return algorithm.requires - ({"rollout_log_probs"} if known else set())


def _take_apart(part: Callable[..., Any]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return the function of a partial, and its keywords."""
    return (part.func, part.keywords) if isinstance(part, partial) else (part, {})


def check_wraps(algorithm: object, wrapper: str, *, corrects: bool = True) -> None:
    """Raise ConfigError unless `wrapper` was given an algorithm and, if it is a correction, one that has none yet."""
    if not isinstance(algorithm, Algorithm):
        name = getattr(algorithm, "__name__", None) if callable(algorithm) else None
        found = repr(algorithm) if name is None else f"the function {name}"
        raise ConfigError(f"{wrapper}(...) was given {found}, expected an algorithm: write {wrapper}({name or 'grpo'}())")
    if algorithm.compares_pairs:
        raise ConfigError(
            f"{wrapper}(...) was given an algorithm that compares pairs of whole answers with a reference: its loss reads no log-probs of "
            f"the rollouts, and there is nothing to correct. Leave {wrapper}(...) out"
        )
    if corrects and is_corrected(algorithm):
        raise ConfigError(
            f"{wrapper}(...) was given an algorithm that already has a correction, and its tokens would be weighted twice: "
            "use one of decoupled and truncated"
        )
