"""Objectives of training on preferences: a loss, and what the loop must give it. One function for each paper.

>>> objective = simpo(beta=2.0, gamma=1.0)
>>> objective.needs_reference, objective.compares_pairs
(False, True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from rollouts.algorithms.kto import kto_loss
from rollouts.algorithms.preferences import (
    check_smoothing,
    hinge_pair_loss,
    ipo_pair_loss,
    orpo_loss,
    preference_loss,
    robust_pair_loss,
    simpo_pair_loss,
    smoothed_pair_loss,
)
from rollouts.types import LossFn


@dataclass(frozen=True)
class PreferenceObjective:
    """A loss on answers of which some are preferred, and the columns that it reads."""

    loss: LossFn  # once per micro-batch; a weighted sum over pairs, or over answers
    needs_reference: bool = True  # whether it reads batch.ref_log_probs
    compares_pairs: bool = True  # True = rows 2i and 2i + 1 are a pair; False = each answer is good or bad by itself (KTO)


PairObjective: TypeAlias = Callable[..., PreferenceObjective]
"""Objective of pairs as a function of its numbers: dpo, cdpo, robust_dpo, ipo, slic, orpo or simpo of this file, or the caller's own."""


def dpo(*, beta: float = 0.1, nll_coef: float = 0.0) -> PreferenceObjective:
    """-log sigmoid of beta times the difference of the log-ratios.

    Args:
        beta: > 0; strength of the pull to the reference.
        nll_coef: weight of the negative log-likelihood of chosen answers, see preference_loss; 0 = none.

    Source: Rafailov et al. 2023 (DPO), equation 7.
    """
    return PreferenceObjective(partial(preference_loss, beta=_above_0(beta), nll_coef=nll_coef))


def cdpo(*, beta: float = 0.1, label_smoothing: float = 0.1) -> PreferenceObjective:
    """DPO that expects a share of pairs to be the wrong way round. Source: Mitchell 2023, equation 3; see smoothed_pair_loss."""
    check_smoothing(label_smoothing)
    pair_loss = partial(smoothed_pair_loss, label_smoothing=label_smoothing)
    return PreferenceObjective(partial(preference_loss, beta=_above_0(beta), pair_loss=pair_loss))


def robust_dpo(*, beta: float = 0.1, label_smoothing: float = 0.1) -> PreferenceObjective:
    """DPO without the bias of exchanged pairs. Source: Chowdhury et al. 2024, equation 10; see robust_pair_loss."""
    check_smoothing(label_smoothing)
    pair_loss = partial(robust_pair_loss, label_smoothing=label_smoothing)
    return PreferenceObjective(partial(preference_loss, beta=_above_0(beta), pair_loss=pair_loss))


def ipo(*, beta: float = 0.1) -> PreferenceObjective:
    """Squared distance of the difference of log-ratios per token from 1 / (2 beta). Source: Azar et al. 2023 (IPO), equation 17."""
    return PreferenceObjective(partial(preference_loss, beta=_above_0(beta), pair_loss=ipo_pair_loss, average=True))


def slic(*, beta: float = 0.1, nll_coef: float = 0.0) -> PreferenceObjective:
    """Hinge loss of the difference of log-ratios. Source: Zhao et al. 2023 (SLiC-HF), equation 1; see hinge_pair_loss.

    Args:
        nll_coef: weight of the regularizer, the negative log-likelihood of chosen answers; 0 = none, as in TRL.
    """
    return PreferenceObjective(partial(preference_loss, beta=_above_0(beta), pair_loss=hinge_pair_loss, nll_coef=nll_coef))


def kto(*, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> PreferenceObjective:
    """Good and bad answers, each by itself. Source: Ethayarajh et al. 2024 (KTO), equation 8; see kto_loss."""
    loss = partial(kto_loss, beta=_above_0(beta), desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    return PreferenceObjective(loss, compares_pairs=False)


def orpo(*, beta: float = 0.1) -> PreferenceObjective:
    """Likelihood of chosen answers and the ratio of the odds, without a reference. Source: Hong et al. 2024 (ORPO), equation 6.

    Args:
        beta: weight of the odds ratio, lambda in the paper.
    """
    return PreferenceObjective(partial(orpo_loss, beta=beta), needs_reference=False)


def simpo(*, beta: float = 2.0, gamma: float = 1.0) -> PreferenceObjective:
    """DPO on log-probs per token, with a margin and without a reference. Source: Meng et al. 2024 (SimPO), equation 6.

    Args:
        beta: 2 to 2.5 in the paper; 10 for models that are far from uniform.
        gamma: margin of the rewards; the paper takes 0.3 to 1.6.
    """
    loss = partial(preference_loss, beta=_above_0(beta), pair_loss=partial(simpo_pair_loss, gamma=gamma), reference_free=True, average=True)
    return PreferenceObjective(loss, needs_reference=False)


def _above_0(beta: float) -> float:
    assert beta > 0, f"beta is {beta}, expected more than 0"
    return beta
