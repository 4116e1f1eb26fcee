"""Estimates from n scored samples for each prompt: pass@k, majority votes, intervals that know of prompts, and a test of two models.

All functions are pure; where they draw random numbers, they draw the same ones in every call.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

MOST_SUBSETS = 2000  # subsets of k samples that are all looked at; of more, as many random ones
MOST_SIGNS = 16  # prompts with a difference up to which all assignments of signs are looked at
NUM_RANDOM_SIGNS = 100_000


def estimate_pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Estimate the probability that at least one of k samples is right, without bias: 1 - C(n - c, k) / C(n, k).

    Args:
        num_samples: n, at least k.
        num_right: c, of these n.
        k: at least 1.

    Source: Chen et al. 2021 (Evaluating large language models trained on code), equation 1.
    """
    assert 1 <= k <= num_samples, f"k is {k}, expected 1 to {num_samples}, the number of samples"
    assert 0 <= num_right <= num_samples, f"{num_right} of {num_samples} samples are right"
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def estimate_majority_at_k(answers: Sequence[Hashable | None], scores: Sequence[float], k: int) -> float:
    """Estimate the score of the most frequent answer among k samples.

    Args:
        answers: answer of each sample of a prompt; None = none was given, which does not vote.
        scores: score of each sample, for example 1 if it is right. The score of an answer is the mean of its samples.
        k: number of samples that vote, 1 to len(answers).

    Returns: the mean over all subsets of k samples or, if these are more than MOST_SUBSETS, over that many random ones. Equally frequent
        answers share the vote; without any answer the score is 0.
    """
    n = len(answers)
    assert len(scores) == n, f"{len(scores)} scores for {n} answers"
    assert 1 <= k <= n, f"k is {k}, expected 1 to {n}, the number of samples"
    by_answer: defaultdict[Hashable, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            by_answer[answer].append(score)
    means = {answer: math.fsum(found) / len(found) for answer, found in by_answer.items()}
    if math.comb(n, k) <= MOST_SUBSETS:
        subsets: list[Sequence[int]] = list(itertools.combinations(range(n), k))
    else:
        generator = np.random.Generator(np.random.Philox(0))
        subsets = [generator.choice(n, size=k, replace=False).tolist() for _ in range(MOST_SUBSETS)]
    return math.fsum(_vote([answers[i] for i in subset], means) for subset in subsets) / len(subsets)


def _vote(answers: Sequence[Hashable | None], means: dict[Hashable, float]) -> float:
    counts: defaultdict[Hashable, int] = defaultdict(int)
    for answer in answers:
        if answer is not None:
            counts[answer] += 1
    most = max(counts.values(), default=0)
    winners = [means[answer] for answer, count in counts.items() if count == most]
    return math.fsum(winners) / len(winners) if winners else 0.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over samples, and an interval that holds the true one with the probability of its level."""

    value: float
    low: float
    high: float
    num_prompts: int


def estimate_mean(clusters: Sequence[Sequence[float]], *, bounded: bool = False, level: float = 0.95) -> Estimate:
    """Estimate a mean from the values of each prompt's samples, which are alike: the prompts are the independent draws, not the samples.

    Args:
        clusters: values of the samples of each prompt, at least one each. The mean is over all samples.
        bounded: whether values are between 0 and 1. The interval is then Wilson's for the number of independent draws that have this
            variance, and is neither empty nor outside of [0, 1] if all values are equal; otherwise the mean +- z standard errors.
        level: probability, between 0 and 1.

    Returns: with a single prompt and unbounded values an infinite interval.
    Source: the standard error of clusters of Liang and Zeger 1986 with the factor P / (P - 1); Wilson 1927 with the effective sample size
        of Korn and Graubard 1998.
    """
    assert clusters and all(clusters), "expected at least one prompt, and one value for each"
    assert 0 < level < 1, f"level is {level}, expected more than 0 and less than 1"
    num_prompts, num_values = len(clusters), sum(map(len, clusters))
    mean = math.fsum(value for values in clusters for value in values) / num_values
    z = NormalDist().inv_cdf(0.5 + level / 2)
    residuals = (math.fsum(value - mean for value in values) for values in clusters)
    variance = math.fsum(r * r for r in residuals) / num_values**2
    variance = variance * num_prompts / (num_prompts - 1) if num_prompts > 1 else math.inf
    if not bounded:
        width = z * math.sqrt(variance)
        return Estimate(value=mean, low=mean - width, high=mean + width, num_prompts=num_prompts)
    spread = mean * (1 - mean)
    effective = float(num_prompts) if not 0 < variance < math.inf else max(1.0, spread / variance)
    center, scale = (mean + z * z / (2 * effective)), 1 + z * z / effective
    width = z * math.sqrt(max(0.0, spread) / effective + z * z / (4 * effective**2))
    low, high = max(0.0, (center - width) / scale), min(1.0, (center + width) / scale)
    return Estimate(value=mean, low=min(low, mean), high=max(high, mean), num_prompts=num_prompts)


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """The difference of two models on the same prompts."""

    difference: Estimate  # mean over prompts of the second model's mean minus the first one's
    p_value: float  # two-sided: probability of a difference at least as large if the models were interchangeable on each prompt
    num_better: int  # prompts on which the second model's mean is larger
    num_worse: int  # prompts on which it is smaller


def compare_paired(first: Sequence[float], second: Sequence[float], *, level: float = 0.95) -> PairedComparison:
    """Compare two models by their means on the same prompts.

    The p-value is that of the permutation test that exchanges the models on each prompt: exact if all differences have one size, as with
    one right or wrong sample for each prompt (then it is McNemar's exact test), or if at most MOST_SIGNS prompts differ; else from
    NUM_RANDOM_SIGNS random exchanges.

    Args:
        first, second: mean of each prompt, in the same order.
        level: probability of the interval of the difference.
    """
    assert len(first) == len(second) >= 1, f"{len(first)} and {len(second)} prompts, expected as many, and at least one"
    differences = [b - a for a, b in zip(first, second, strict=True)]
    moved = [d for d in differences if d != 0]
    return PairedComparison(
        difference=estimate_mean([[d] for d in differences], level=level),
        p_value=_permutation_p(moved),
        num_better=sum(d > 0 for d in moved),
        num_worse=sum(d < 0 for d in moved),
    )


def _permutation_p(moved: Sequence[float]) -> float:
    if not moved:
        return 1.0
    sizes = np.abs(np.asarray(moved))
    n = len(moved)
    if np.ptp(sizes) <= 1e-12 * sizes.max():
        fewer = min(sum(d > 0 for d in moved), sum(d < 0 for d in moved))
        return min(1.0, 2 * sum(math.comb(n, i) for i in range(fewer + 1)) / 2**n)
    observed = abs(math.fsum(moved)) * (1 - 1e-12)
    if n <= MOST_SIGNS:
        signs = np.asarray(list(itertools.product((-1.0, 1.0), repeat=n)))
        return float((np.abs(signs @ sizes) >= observed).mean())
    generator = np.random.Generator(np.random.Philox(0))
    found, left = 0, NUM_RANDOM_SIGNS
    while left:
        count = min(left, 10_000)
        signs = generator.integers(0, 2, size=(count, n), dtype=np.int8) * 2 - 1
        found += int((np.abs(signs @ sizes) >= observed).sum())
        left -= count
    return (found + 1) / (NUM_RANDOM_SIGNS + 1)  # the observed exchange is one of them
