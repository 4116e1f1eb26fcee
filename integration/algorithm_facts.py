"""What can be found out about an Algorithm beforehand: the coefficients of its KL terms, and whether groups of one teach it anything."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from rollouts import estimators
from rollouts.algorithms import Chain
from rollouts.errors import DataError
from rollouts.types import Algorithm, TrainBatch, Turns


def find_kl_coefs(algorithm: Algorithm) -> dict[str, list[float]]:
    """The coefficients other than 0 of its KL terms, by where they are: "in the reward" (estimate) and "in the loss".

    Of a function that is no functools.partial, such as a closure, it is not known what it holds: nothing is found there.
    """
    places = {"in the reward": algorithm.estimate, "in the loss": algorithm.loss}
    found = {place: [float(k["kl_coef"]) for k in _find_keywords(part) if k.get("kl_coef")] for place, part in places.items()}
    return {place: coefficients for place, coefficients in found.items() if coefficients}


def _find_keywords(part: Any) -> Iterator[dict[str, Any]]:
    """The keywords of every partial in a composition."""
    inside: tuple[Any, ...] = part.steps if isinstance(part, Chain) else ()
    if isinstance(part, partial):
        yield part.keywords
        inside = (part.func, *part.args, *part.keywords.values())
    for value in inside:
        yield from _find_keywords(value)


def learns_from_single_samples(algorithm: Algorithm) -> bool:
    """Whether a group of one sample can have an advantage other than 0, found out by two such groups with unequal rewards.

    True, too, for an estimator that is not of rollouts.estimators: of that it is not known what else it reads.
    """
    parts = algorithm.estimate.steps if isinstance(algorithm.estimate, Chain) else (algorithm.estimate,)
    functions = [part.func if isinstance(part, partial) else part for part in parts]
    if any(getattr(function, "__module__", None) != estimators.__name__ for function in functions):
        return True
    equal = torch.full((2, 3), -1.0)
    batch = TrainBatch(
        tokens=torch.zeros(2, 3, dtype=torch.int64),
        lengths=torch.tensor([2, 3]),
        loss_mask=torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0]]),
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 1]),
        trainable=torch.tensor([True, True]),
        values=torch.zeros(2, 3),
        turns=Turns(ids=torch.tensor([[-1, 0, -1], [-1, 0, 0]]), states=torch.tensor([[0], [1]]), rewards=torch.zeros(2, 1)),
        **dict.fromkeys(("rollout_log_probs", "old_log_probs", "prox_log_probs", "ref_log_probs"), equal),
    )
    try:
        advantages = algorithm.estimate(batch).advantages
    except DataError:  # it needs something else in each group, such as ReMax's greedy row
        return True
    return advantages is None or bool((advantages != 0).any())
