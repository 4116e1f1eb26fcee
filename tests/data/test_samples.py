"""From prompt to Sample to RolloutBatch: masks, versions, continuation, grouping, rewards."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import make_sample

from rollouts.data.filters import check_reward_nonzero_std, make_threshold_filter
from rollouts.data.samples import (
    apply_sample_transforms,
    ask_filter,
    build_batch_metadata,
    check_training_sample,
    completion_to_sample,
    compute_response_lengths,
    convert_to_batch,
    create_pending_group,
    extract_sample_fields,
    group_samples,
    with_reward,
)
from rollouts.errors import DataError, GenerationError, RewardError
from rollouts.seeds import derive_seed
from rollouts.types import Completion, Group, Prompt, RoutedExperts, Sample, Status, Turn


def test_an_integer_beyond_floats_is_no_reward():
    for huge in (10**400, 10**5000):
        with pytest.raises(RewardError, match="expected a finite number"):
            with_reward(Sample(), huge)
        with pytest.raises(RewardError, match="repair the reward function"):
            check_training_sample(make_sample(reward=huge))


def make_completion(inputs, outputs, version=0, finish_reason="stop", **changes):
    return Completion(
        request_id="r",
        input_tokens=tuple(inputs),
        output_tokens=tuple(outputs),
        output_log_probs=tuple(-0.5 - i for i in range(len(outputs))),
        output_versions=(version,) * len(outputs),
        finish_reason=finish_reason,
        **changes,
    )


def test_derive_seed_depends_on_every_key_and_their_order():
    seeds = {derive_seed(*keys) for keys in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (12,), (1, 2), (-1,), (2**80,)]}
    assert len(seeds) == 10
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3)
    assert derive_seed(0) == 4761921975702974394, "derive_seed must never change: saved runs depend on it"


def test_pending_group_has_rising_indices_and_its_own_metadata():
    prompt = Prompt(content="1+1=", index=5, metadata={"ground_truth": "2"})
    group = create_pending_group(prompt, 3)
    assert [s.index for s in group] == [15, 16, 17]
    assert {s.group_index for s in group} == {5}
    assert all(s.status is Status.PENDING and s.tokens == () and s.prompt == "1+1=" for s in group)
    assert all(s.metadata == {"ground_truth": "2"} for s in group)
    assert group[0].metadata is not prompt.metadata
    following = create_pending_group(replace(prompt, index=6), 3)
    assert min(s.index for s in following) > max(s.index for s in group)


@pytest.mark.parametrize(("finish_reason", "status"), [("stop", Status.COMPLETED), ("length", Status.TRUNCATED), ("abort", Status.ABORTED)])
def test_completion_becomes_sample(finish_reason, status):
    (pending,) = create_pending_group(Prompt(content="ab", metadata={"k": 1}), 1)
    sample = completion_to_sample(pending, [7, 8], make_completion([7, 8], [9, 1], 4, finish_reason, temperature=0.7), "x")
    assert sample.tokens == (7, 8, 9, 1)
    assert sample.loss_mask == (0.0, 0.0, 1.0, 1.0)
    assert sample.rollout_log_probs == (0.0, 0.0, -0.5, -1.5)
    assert sample.weight_versions == (-1, -1, 4, 4)
    assert (sample.status, sample.response, sample.temperature, sample.metadata) == (status, "x", 0.7, {"k": 1})
    assert pending.tokens == ()


def test_aborted_sample_goes_on_with_versions_of_both_parts():
    (pending,) = create_pending_group(Prompt(content="ab"), 1)
    partial = completion_to_sample(pending, [7, 8], make_completion([7, 8], [9], 0, "abort"), "x")
    done = completion_to_sample(partial, [7, 8], make_completion([7, 8, 9], [5, 1], 3), "xy")
    assert done.tokens == (7, 8, 9, 5, 1)
    assert done.weight_versions == (-1, -1, 0, 3, 3)
    assert done.rollout_log_probs == (0.0, 0.0, -0.5, -0.5, -1.5)
    assert done.loss_mask == (0.0, 0.0, 1.0, 1.0, 1.0)
    assert (done.response, done.status) == ("xy", Status.COMPLETED)


def test_sample_aborted_before_its_first_token_goes_on_at_any_temperature():
    (pending,) = create_pending_group(Prompt(content="ab"), 1)
    partial = completion_to_sample(pending, [7], make_completion([7], [], 0, "abort"), "")
    assert (partial.tokens, partial.loss_mask, partial.status) == ((7,), (0.0,), Status.ABORTED)
    assert completion_to_sample(partial, [7], make_completion([7], [1], 1, temperature=0.5), "").tokens == (7, 1)


def test_completion_that_does_not_continue_the_sample_is_refused():
    (pending,) = create_pending_group(Prompt(content="ab"), 1)
    partial = completion_to_sample(pending, [7, 8], make_completion([7, 8], [9], 0, "abort"), "x")
    with pytest.raises(AssertionError, match="sample 0"):
        completion_to_sample(partial, [7, 8], make_completion([7, 8], [5]), "y")
    with pytest.raises(AssertionError, match=r"temperature 1\.0"):
        completion_to_sample(partial, [7, 8], make_completion([7, 8, 9], [5], temperature=0.5), "y")
    with pytest.raises(AssertionError, match="completed"):
        completion_to_sample(make_sample(), [3, 4], make_completion([3, 4], [5]), "y")
    with pytest.raises(AssertionError, match="do not begin"):
        completion_to_sample(partial, [8, 8], make_completion([7, 8, 9], [5]), "y")


def test_untempered_log_probs_and_truncated_sampling_are_kept():
    (pending,) = create_pending_group(Prompt(content="ab"), 1)
    first = make_completion([7], [9], 0, "abort", untempered_log_probs=(-0.25,), truncated_sampling=True)
    partial = completion_to_sample(pending, [7], first, "x")
    assert (partial.truncated_sampling, partial.untempered_log_probs, partial.metadata) == (True, (0.0, -0.25), {})
    second = make_completion([7, 9], [5], 0, untempered_log_probs=(-0.75,))
    whole = completion_to_sample(partial, [7], second, "xy")
    assert (whole.truncated_sampling, whole.untempered_log_probs) == (True, (0.0, -0.25, -0.75)), "one part of it was cut"
    without = completion_to_sample(partial, [7], make_completion([7, 9], [5]), "xy")
    assert without.untempered_log_probs is None, "a column that covers only some tokens would be misread"


def test_log_probs_of_something_else_than_the_distribution_sampled_from_are_marked():
    (pending,) = create_pending_group(Prompt(content="ab"), 1)
    assert completion_to_sample(pending, [7], make_completion([7], [9]), "x").log_prob_kind == "sampled"
    partial = completion_to_sample(pending, [7], make_completion([7], [9], 0, "abort", log_prob_kind="untempered"), "x")
    assert partial.log_prob_kind == "untempered"
    whole = completion_to_sample(partial, [7], make_completion([7, 9], [5]), "xy")
    assert whole.log_prob_kind == "untempered", "some of its log-probs are"


@pytest.mark.parametrize("reward", [1, 0.5, True, np.float32(0.5), torch.tensor(2.0)])
def test_with_reward_takes_every_finite_number(reward):
    scored = with_reward(make_sample(reward=None), reward)
    assert scored.reward == float(reward)
    assert type(scored.reward) is float


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, None, "1.0", [1.0]])
def test_with_reward_refuses_everything_else_and_names_the_sample(reward):
    with pytest.raises(RewardError, match="sample 3"):
        with_reward(make_sample(index=3), reward)


def test_check_training_sample():
    check_training_sample(make_sample())
    check_training_sample(make_sample(reward=None), require_reward=False)
    with pytest.raises(RewardError, match=r"sample 4 .* no reward"):
        check_training_sample(make_sample(index=4, reward=None))
    with pytest.raises(RewardError, match="nan"):
        check_training_sample(make_sample(reward=math.nan), require_reward=False)
    with pytest.raises(DataError, match="no tokens"):
        check_training_sample(Sample(reward=1.0))
    with pytest.raises(DataError, match="loss_mask > 0"):
        check_training_sample(make_sample(loss_mask=(0.0,) * 5))
    with pytest.raises(DataError, match="FAILED"):
        check_training_sample(replace(make_sample(), status=Status.FAILED))


@given(st.permutations(range(12)), st.integers(1, 4))
def test_groups_do_not_depend_on_the_order_of_arrival(order, group_size):
    samples = [make_sample(index=i, group_index=i // group_size) for i in range(12)]
    groups = group_samples([samples[i] for i in order])
    assert [s.index for group in groups for s in group] == list(range(12))
    assert all(len({s.group_index for s in group}) == 1 for group in groups)
    assert len(groups) == math.ceil(12 / group_size)
    assert convert_to_batch([samples[i] for i in order]).samples == tuple(samples)


def test_incomplete_groups_and_equal_indices_are_refused():
    samples = [make_sample(index=i, group_index=i // 2) for i in range(4)]
    assert len(group_samples(samples, 2)) == 2
    with pytest.raises(GenerationError, match="group 1 has 1 samples, expected 2"):
        group_samples(samples[:3], 2)
    with pytest.raises(GenerationError, match="equal index"):
        group_samples([*samples, samples[0]])


def test_rewards_come_before_filters():
    samples = [make_sample(index=i, group_index=i // 2, reward=None, response=str(i % 3)) for i in range(6)]
    random.Random(0).shuffle(samples)
    kept = apply_sample_transforms(samples, lambda s: float(s.response == "0"), check_reward_nonzero_std)
    assert [s.index for s in kept] == [0, 1, 2, 3]
    assert [s.reward for s in kept] == [1.0, 0.0, 0.0, 1.0]
    assert all(s.reward is None for s in samples)
    assert len(apply_sample_transforms(samples)) == 6
    with pytest.raises(RewardError, match="sample"):
        apply_sample_transforms(samples, lambda s: math.nan)


def test_a_reward_function_that_gives_a_number_judges_the_whole():
    turns = (Turn(start=3, end=4, reward=0.5),)
    sample = make_sample(index=0, group_index=0, reward=None, turns=turns)
    (judged,) = apply_sample_transforms([sample], lambda s: 1.0)
    assert judged.reward == 1.0 and [turn.reward for turn in judged.turns] == [None]
    assert with_reward(sample, 1.0).turns == turns, "shaping a reward says nothing of turns"


async def refuse_later(group: Group) -> bool:
    return False


BAD_FILTERS = [
    (lambda group: "no", r"<lambda> returned 'no' \(str\) for group 0, expected True or False"),
    (
        make_threshold_filter,
        r"filter_fn make_threshold_filter returned <function .*it makes functions: call",
    ),
    (lambda group: None, "returned None"),
    (lambda group: len(group), r"returned 2 \(int\)"),
]


@pytest.mark.parametrize(("filter_fn", "message"), BAD_FILTERS)
async def test_a_filter_answers_with_true_or_false(filter_fn, message):
    group = tuple(make_sample(index=i, group_index=0) for i in range(2))
    with pytest.raises(GenerationError, match=message):
        apply_sample_transforms(group, None, filter_fn)
    with pytest.raises(GenerationError, match=message):
        await ask_filter(group, filter_fn)


async def test_a_filter_may_be_async_where_it_can_be_awaited():
    group = tuple(make_sample(index=i, group_index=0) for i in range(2))
    assert await ask_filter(group, refuse_later) is False
    assert await ask_filter(group, lambda group: refuse_later(group)) is False
    assert await ask_filter(group, lambda group: np.bool_(len(group) == 2)) is True
    assert await ask_filter(group, None) is True
    with pytest.raises(GenerationError, match=r"refuse_later returned <coroutine .*it is async"):
        apply_sample_transforms(group, None, refuse_later)


def test_convert_to_batch_and_its_fields():
    newest = make_sample(index=1, num_output=2, reward=None, weight_versions=(-1, -1, 3, 5))
    samples = [newest, make_sample(index=0, num_output=4, reward=1.0, weight_versions=None)]
    batch = convert_to_batch(samples, {"epoch_id": 7})
    assert [s.index for s in batch.samples] == [0, 1]
    assert batch.response_lengths == [4, 2] == compute_response_lengths(batch.loss_masks)
    assert batch.tokens == [list(s.tokens) for s in batch.samples]
    assert batch.rewards[0] == 1.0
    assert math.isnan(batch.rewards[1])
    assert batch.metadata == {
        "num_samples": 2, "num_groups": 1, "num_completed": 2, "min_weight_version": 3, "max_weight_version": 5, "epoch_id": 7,
    }  # fmt: skip
    fields = extract_sample_fields(batch.samples)
    assert fields["tokens"] == batch.tokens
    assert fields["loss_masks"] == batch.loss_masks
    assert fields["group_indices"] == [0, 0]
    assert build_batch_metadata([]) == {"num_samples": 0, "num_groups": 0}
    with pytest.raises(DataError, match="sample 9"):
        convert_to_batch([Sample(index=9)])


def test_a_continuation_without_a_token_keeps_the_experts():
    record = RoutedExperts(data=bytes(8), num_routers=1, top_k=1)  # four tokens
    (pending,) = create_pending_group(Prompt(content="p"), 1)
    first = completion_to_sample(pending, (3, 4), make_completion((3, 4), (5, 6), finish_reason="abort", routed_experts=record), "ab")
    again = completion_to_sample(first, (3, 4), make_completion(first.tokens, (), finish_reason="abort"), "ab")
    assert first.routed_experts == again.routed_experts == record
