"""pass@k, votes, intervals and the paired test against other packages' functions, brute force and simulation."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import needs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.generation.estimates import Estimate, compare_paired, estimate_majority_at_k, estimate_mean, estimate_pass_at_k


def humaneval_pass_at_k(n: int, c: int, k: int) -> float:
    """The function of the paper (Chen et al. 2021, figure 3), transcribed."""
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


@pytest.mark.parametrize("n", [1, 2, 5, 10])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample_and_the_papers_function(n: int):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        exact = Fraction(sum(map(any, subsets)), len(subsets))
        assert estimate_pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-15)
        assert estimate_pass_at_k(n, c, k) == pytest.approx(humaneval_pass_at_k(n, c, k), abs=1e-12)


@pytest.mark.more
@needs.EVALPLUS
def test_pass_at_k_equals_evalplus():
    from evalplus import eval as evalplus

    for k in (1, 5, 100):
        counts = np.arange(201)
        theirs = evalplus.estimate_pass_at_k([200] * 201, counts, k)
        np.testing.assert_allclose([estimate_pass_at_k(200, int(c), k) for c in counts], theirs, atol=1e-12)


def test_pass_at_k_is_unbiased():
    generator, p, k, n = np.random.default_rng(0), 0.3, 4, 8
    found = np.mean([estimate_pass_at_k(n, int(c), k) for c in generator.binomial(n, p, size=20_000)])
    assert found == pytest.approx(1 - (1 - p) ** k, abs=0.006)


def test_a_vote_is_won_by_the_most_frequent_answer_and_shared_by_equal_ones():
    assert estimate_majority_at_k(["a", "a", "b"], [1.0, 1.0, 0.0], 3) == 1.0
    assert estimate_majority_at_k(["a", "b"], [1.0, 0.0], 2) == 0.5
    assert estimate_majority_at_k(["a", None, None], [1.0, 0.0, 0.0], 3) == 1.0  # an answer that is not given does not vote
    assert estimate_majority_at_k([None, None], [0.0, 0.0], 1) == 0.0
    assert estimate_majority_at_k(["a", "a", "b"], [1.0, 1.0, 0.0], 1) == pytest.approx(2 / 3)
    assert estimate_majority_at_k(["a", "a", "b"], [1.0, 1.0, 0.0], 2) == pytest.approx((1 + 0.5 + 0.5) / 3)


def test_a_vote_of_few_among_many_is_near_its_expectation_and_always_the_same():
    answers = ["right"] * 30 + ["wrong"] * 20
    scores = [float(answer == "right") for answer in answers]
    exact = sum(math.comb(30, i) * math.comb(20, 5 - i) for i in (3, 4, 5)) / math.comb(50, 5)
    assert estimate_majority_at_k(answers, scores, 5) == pytest.approx(exact, abs=0.03)
    assert estimate_majority_at_k(answers, scores, 5) == estimate_majority_at_k(answers, scores, 5)


@needs.SCIPY
def test_the_interval_of_independent_samples_is_wilsons():
    from scipy import stats as scipy

    values = [[1.0]] * 30 + [[0.0]] * 70
    found = estimate_mean(values, bounded=True)
    wilson = scipy.binomtest(30, 100).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((wilson.low, wilson.high), abs=1e-3)
    for share in (0.0, 1.0):
        sure, wilson = estimate_mean([[share]] * 20, bounded=True), scipy.binomtest(int(20 * share), 20).proportion_ci(method="wilson")
        assert (sure.low, sure.high) == pytest.approx((wilson.low, wilson.high), abs=1e-12)


def test_samples_of_a_prompt_are_no_independent_draws():
    alone = [[float(i % 2)] for i in range(20)]
    copied = [values * 16 for values in alone]  # 16 equal samples tell no more than one
    assert estimate_mean(copied, bounded=True) == estimate_mean(alone, bounded=True)
    assert estimate_mean(copied) == estimate_mean(alone)


@pytest.mark.parametrize("bounded", [True, False])
def test_intervals_hold_the_true_mean_as_often_as_they_say(bounded: bool):
    generator, covered, num = np.random.default_rng(0), 0, 1000
    for _ in range(num):
        chances = generator.beta(0.7, 0.7, size=60)  # easy and hard prompts; the mean is 0.5
        found = estimate_mean((generator.random((60, 4)) < chances[:, None]).astype(float).tolist(), bounded=bounded)
        covered += found.low <= 0.5 <= found.high
    assert 0.93 <= covered / num <= 0.97


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4), min_size=1, max_size=8), st.sampled_from([0.5, 0.95]))
def test_an_interval_holds_its_own_mean(clusters: list[list[float]], level: float):
    found = estimate_mean(clusters, level=level)
    assert found.low <= found.value <= found.high


@needs.SCIPY
def test_the_paired_test_of_single_samples_is_mcnemars():
    from scipy import stats as scipy

    first, second = [0.0] * 12 + [1.0] * 4 + [1.0] * 30, [1.0] * 12 + [0.0] * 4 + [1.0] * 30
    found = compare_paired(first, second)
    assert found.p_value == pytest.approx(scipy.binomtest(4, 16).pvalue)
    assert (found.num_better, found.num_worse) == (12, 4)
    assert found.difference.value == pytest.approx(8 / 46)


@needs.SCIPY
@pytest.mark.parametrize("num", [10, 60])
def test_the_paired_test_of_means_is_the_permutation_test(num: int):
    from scipy import stats as scipy

    generator = np.random.default_rng(1)
    first = generator.random(num)
    second = first + generator.normal(0.1, 0.3, size=num)
    theirs = scipy.permutation_test(
        (first, second), lambda a, b: np.mean(b - a), permutation_type="samples", n_resamples=20_000, rng=np.random.default_rng(2)
    )
    assert compare_paired(first.tolist(), second.tolist()).p_value == pytest.approx(theirs.pvalue, abs=0.01)


def test_equal_models_have_a_p_value_of_one():
    found = compare_paired([0.5, 1.0], [0.5, 1.0])
    assert (found.p_value, found.num_better, found.num_worse) == (1.0, 0, 0)
    assert found.difference == Estimate(value=0.0, low=0.0, high=0.0, num_prompts=2)
