"""Collation and splits: shapes and fills, and that every token ends up in exactly one part."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import make_sample

from rollouts.batches import (
    plan_microbatches,
    plan_minibatches,
    plan_sharded_microbatches,
    plan_shards,
    select_rows,
    split_microbatches,
)
from rollouts.data.collate import check_model_inputs, collate_samples, prepare_grpo_batch, prepare_sft_batch
from rollouts.data.samples import with_reward
from rollouts.errors import DataError, RewardError
from rollouts.outcomes import MetricResult
from rollouts.rewards.results import EvaluateResult
from rollouts.types import RewardComponents, Sample, TrainBatch, Turn, Turns

LENGTHS = st.lists(st.integers(2, 12), min_size=1, max_size=20)


def collate_lengths(lengths: list[int]) -> TrainBatch:
    return collate_samples([make_sample(i, 1, length - 1, group_index=i // 2) for i, length in enumerate(lengths)])


def all_rows(batches: list[TrainBatch]) -> list[list[int]]:
    return [batch.tokens[row, : batch.lengths[row]].tolist() for batch in batches for row in range(batch.num_rows)]


def test_pads_beside_a_long_row_are_no_python_values():
    samples = [make_sample(i, 2, 8, turns=(Turn(start=2, end=10, state="s"),)) for i in range(200)]
    samples.append(make_sample(200, 1, 4095, turns=(Turn(start=1, end=4096),)))
    collate_samples(samples)  # imports and caches
    tracemalloc.start()
    batch = collate_samples(samples)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_tokens = int(batch.lengths.sum())
    assert peak < 100 * num_tokens < 8 * batch.tokens.numel(), f"{peak} bytes for {num_tokens} tokens"


def test_collated_columns():
    a, b = make_sample(0, 2, 1, group_index=9), make_sample(1, 1, 3, group_index=4)
    batch = collate_samples([a, b], pad_id=7, require_rewards=True)
    assert batch.tokens.tolist() == [[100, 101, 102, 7], [200, 201, 202, 203]]
    assert batch.lengths.tolist() == [3, 4]
    assert batch.loss_mask.tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]
    assert batch.rewards.tolist() == [0, 1]
    assert batch.group_ids.tolist() == [0, 1], "numbered in the order of appearance"
    assert batch.trainable.tolist() == [True, True]
    assert batch.temperatures is None
    torch.testing.assert_close(batch.rollout_log_probs, torch.tensor([[0, 0, -0.1, 0], [0, -0.1, -0.2, -0.3]]))
    assert batch.weight_versions is not None
    assert batch.weight_versions.tolist() == [[-1, -1, 0, -1], [-1, 1, 1, 1]]
    assert (batch.tokens.dtype, batch.loss_mask.dtype, batch.weight_versions.dtype) == (torch.int64, torch.float32, torch.int64)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_group_ids_are_dense_and_keep_membership(group_indices):
    batch = collate_samples([make_sample(i, group_index=10 * g) for i, g in enumerate(group_indices)])
    ids = batch.group_ids.tolist()
    assert sorted(set(ids)) == list(range(len(set(group_indices))))
    pairs = set(zip(group_indices, ids, strict=True))
    assert len(pairs) == len(set(ids))


def test_temperatures_are_a_column_only_where_one_differs_from_1():
    batch = collate_samples([make_sample(0), make_sample(1, temperature=0.5)])
    assert batch.temperatures is not None
    assert batch.temperatures.tolist() == [1.0, 0.5]


def test_fractional_masks_survive():
    batch = collate_samples([make_sample(0, 1, 2, loss_mask=(0.0, 0.25, 1.0))])
    assert batch.loss_mask.tolist() == [[0.0, 0.25, 1.0]]


def test_rows_that_are_not_trained_on_still_count_in_statistics():
    rows = [make_sample(0), make_sample(1, trainable=False), make_sample(2, loss_mask=(0.0,) * 5)]
    batch = collate_samples(rows)
    assert batch.trainable.tolist() == [True, False, False]
    assert batch.loss_mask.sum(1).tolist() == [3, 0, 0]
    assert batch.rewards.tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=r"none of the 2 samples.*sample 1"):
        collate_samples(rows[1:])


def test_errors_name_the_sample():
    with pytest.raises(DataError, match="found 0"):
        collate_samples([])
    with pytest.raises(DataError, match=r"sample 8 .* no tokens"):
        collate_samples([make_sample(0), Sample(index=8, reward=1.0)])
    with pytest.raises(RewardError, match=r"sample 5 .* nan"):
        collate_samples([make_sample(0), make_sample(5, reward=math.nan)])
    with pytest.raises(RewardError, match=r"sample 5 .* inf"):
        collate_samples([make_sample(0), make_sample(5, reward=math.inf)])
    with pytest.raises(RewardError, match=r"sample 5 .* no reward"):
        collate_samples([make_sample(5, reward=None)], require_rewards=True)
    with pytest.raises(RewardError, match=r"sample 5 .* no reward"):
        collate_samples([make_sample(0), make_sample(5, reward=None)])
    with pytest.raises(AssertionError, match=r"sample 5 .* no rollout_log_probs"):
        collate_samples([make_sample(0), make_sample(5, rollout_log_probs=None)])
    with pytest.raises(AssertionError, match=r"sample 5 .* no weight_versions"):
        collate_samples([make_sample(5, weight_versions=None), make_sample(0)])


def test_a_length_mismatch_that_slipped_past_construction_is_found_again():
    broken = make_sample(5)
    object.__setattr__(broken, "loss_mask", (1.0,))
    with pytest.raises(AssertionError, match=r"sample 5 .*1 mask entries for 5 tokens"):
        collate_samples([make_sample(0), broken])


def test_supervised_samples_need_no_reward():
    batch = collate_samples([make_sample(0, reward=None, rollout_log_probs=None, weight_versions=None)])
    assert batch.rewards.tolist() == [0.0]
    assert batch.rollout_log_probs is None
    assert batch.weight_versions is None


def test_metrics_of_rewards_are_components_and_what_is_missing_or_invalid_is_nan():
    def scored(index: int, **scores: MetricResult) -> Sample:
        sample = Sample(prompt="", tokens=(1, 2), loss_mask=(0.0, 1.0), index=index)
        return with_reward(sample, EvaluateResult(1.0, metrics=scores)) if scores else with_reward(sample, 0.0)

    right, unknown = MetricResult(1.0), MetricResult(0.0, is_score_valid=False)
    samples = [scored(0, right=right), scored(1, form=MetricResult(0.5), right=unknown), scored(2)]
    components = collate_samples(samples).reward_components
    assert components is not None
    assert components.names == ("right", "form")
    assert torch.equal(components.scores.nan_to_num(-1), torch.tensor([[1.0, -1.0], [-1.0, 0.5], [-1.0, -1.0]]))
    assert collate_samples([scored(0)]).reward_components is None


@given(LENGTHS, st.data())
def test_selected_rows_are_the_rows_trimmed_to_the_longest(lengths, data):
    batch = collate_lengths(lengths)
    turns = Turns(
        ids=torch.arange(batch.tokens.numel()).view_as(batch.tokens), states=batch.lengths[:, None], rewards=batch.lengths[:, None].float()
    )
    full = {f.name: torch.randn(batch.tokens.shape) for f in fields(TrainBatch) if f.name in ("advantages", "values", "loss_weights")}
    components = RewardComponents(names=("a", "b"), scores=torch.rand(batch.num_rows, 2))  # two columns, whatever the width
    batch = replace(batch, turns=turns, temperatures=torch.rand(batch.num_rows) + 0.5, reward_components=components, **full)
    index = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    part = select_rows(batch, index)
    width = max(lengths[i] for i in index)
    assert part.tokens.shape == (len(index), width)
    for f in fields(TrainBatch):
        column, source = getattr(part, f.name), getattr(batch, f.name)
        if isinstance(source, torch.Tensor):
            expected = source[index] if source.dim() == 1 else source[index][:, :width]
            assert torch.equal(column, expected), f.name
    assert part.turns is not None
    assert torch.equal(part.turns.ids, turns.ids[index][:, :width])
    assert torch.equal(part.turns.states, turns.states[index])
    assert part.reward_components is not None
    assert torch.equal(part.reward_components.scores, components.scores[index])


def test_select_rows_refuses_positions_out_of_range():
    batch = collate_lengths([3, 4])
    for index in ([], [2], [-1]):
        with pytest.raises(AssertionError, match="index"):
            select_rows(batch, index)


@given(LENGTHS, st.integers(1, 8), st.integers(0, 2**63 - 1), st.booleans())
def test_minibatches_hold_every_row_once(lengths, num, seed, whole_groups):
    batch = collate_lengths(lengths)
    num = min(num, int(batch.group_ids.max()) + 1 if whole_groups else batch.num_rows)
    plan = plan_minibatches(batch.group_ids.tolist(), num, seed=seed, whole_groups=whole_groups)
    parts = [select_rows(batch, rows) for rows in plan]
    assert sorted(all_rows(parts)) == sorted(all_rows([batch]))
    sizes = [len(set(part.group_ids.tolist())) if whole_groups else part.num_rows for part in parts]
    assert len(parts) == num
    assert max(sizes) - min(sizes) <= 1
    if whole_groups:
        assert sum(sizes) == int(batch.group_ids.max()) + 1, "no group is in two mini-batches"
    assert plan == plan_minibatches(batch.group_ids.tolist(), num, seed=seed, whole_groups=whole_groups)


def test_minibatch_order_depends_on_the_seed_only():
    plans = {str(plan_minibatches([0] * 10, 2, seed=seed)) for seed in range(20)}
    assert len(plans) > 15
    with pytest.raises(AssertionError, match="num_minibatches is 3"):
        plan_minibatches([0, 0, 1, 1], 3, seed=0, whole_groups=True)


@given(st.lists(st.integers(0, 30), max_size=40), st.none() | st.integers(1, 60), st.none() | st.integers(1, 6))
def test_microbatch_plan_keeps_limits_and_every_row(lengths, max_tokens, max_rows):
    plan = plan_microbatches(lengths, max_tokens=max_tokens, max_rows=max_rows)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        assert rows == sorted(rows)
        assert rows
        assert max_rows is None or len(rows) <= max_rows
        total = sum(lengths[row] for row in rows)
        assert max_tokens is None or total <= max_tokens or len(rows) == 1
    assert plan == sorted(plan)
    if max_rows is None and max_tokens is not None and lengths:
        crowded = sum(sum(lengths[row] for row in rows) <= max_tokens / 2 for rows in plan)
        assert crowded <= 1 or len(plan) <= 2 * math.ceil(sum(lengths) / max_tokens) + sum(n > max_tokens for n in lengths)


def pack_slowly(lengths, token_limit, row_limit):
    """First-fit with a look at every part for each row: what plan_microbatches computes with a tree."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    parts = []
    for row in order:
        fits = (p for p in parts if sum(lengths[r] for r in p) + lengths[row] <= token_limit and len(p) < row_limit)
        part = next(fits, None)
        if part is None:
            parts.append(part := [])
        part.append(row)
    return order, parts


@given(st.lists(st.integers(0, 30), max_size=60), st.none() | st.integers(1, 60), st.none() | st.integers(1, 6))
def test_microbatch_plan_is_first_fit_then_balanced(lengths, max_tokens, max_rows):
    token_limit = sum(lengths) if max_tokens is None else max_tokens
    row_limit = len(lengths) if max_rows is None else max_rows
    order, packed = pack_slowly(lengths, token_limit, row_limit)
    balanced = [[] for _ in packed]
    for row in order:
        min(balanced, key=lambda part: (sum(lengths[r] for r in part), len(part), balanced.index(part) if part else -1)).append(row)
    fits = all(len(p) == 1 or (len(p) <= row_limit and sum(lengths[r] for r in p) <= token_limit) for p in balanced)
    assert plan_microbatches(lengths, max_tokens=max_tokens, max_rows=max_rows) == sorted(sorted(p) for p in (balanced if fits else packed))


def plan_shards_slowly(lengths, max_tokens, num_shards):
    """The first number of micro-batches, from the one that rows cut at will would need, for which no rank gets too much."""
    for count in range(min(math.ceil(sum(lengths) / (max_tokens * num_shards)), len(lengths)), len(lengths) + 1):
        plan = plan_shards(lengths, count)
        parts = [[rows[i] for i in part] for rows in plan for part in plan_shards([lengths[row] for row in rows], num_shards)]
        if all(len(part) <= 1 or sum(lengths[row] for row in part) <= max_tokens for part in parts):
            return sorted(plan)
    return []


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 60), st.integers(2, 5))
def test_sharded_plan_has_the_first_number_of_microbatches_that_fits(lengths, max_tokens, num_shards):
    expected = plan_shards_slowly(lengths, max_tokens, num_shards)
    assert plan_sharded_microbatches(lengths, max_tokens=max_tokens, num_shards=num_shards) == expected


class CountedLengths(list):
    """A list that counts how often an entry is read."""

    num_reads = 0

    def __getitem__(self, place):
        self.num_reads += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_plans_of_many_rows_read_each_length_a_few_times(num_shards):
    lengths = CountedLengths(1200 + 7 * i % 800 for i in range(4000))
    plan_sharded_microbatches(lengths, max_tokens=2048, num_shards=num_shards)
    assert lengths.num_reads < 20 * len(lengths), f"{lengths.num_reads / len(lengths):.0f} reads of each length"


def test_microbatches_are_balanced():
    plan = plan_microbatches([10, 9, 8, 3, 2, 1, 1], max_tokens=20)
    assert sorted(sum([10, 9, 8, 3, 2, 1, 1][row] for row in rows) for rows in plan) == [17, 17]
    assert plan_microbatches([3, 3, 7, 7], max_tokens=10) == [[0, 2], [1, 3]], "longest first needs fewer micro-batches"
    assert plan_microbatches([50, 3, 3], max_tokens=10) == [[0], [1, 2]]
    assert plan_microbatches([5, 5, 5], max_rows=2) == [[0, 2], [1]]
    assert plan_microbatches([], max_tokens=3) == []
    assert plan_microbatches([5, 5, 5]) == [[0, 1, 2]]


@given(LENGTHS, st.integers(1, 40))
def test_microbatches_conserve_every_column(lengths, max_tokens):
    batch = collate_lengths(lengths)
    parts = split_microbatches(batch, max_tokens=max_tokens)
    assert sorted(all_rows(parts)) == sorted(all_rows([batch]))
    for name in ("loss_mask", "rollout_log_probs", "rewards", "lengths"):
        total = sum(getattr(part, name).sum(dtype=torch.float64) for part in parts)
        torch.testing.assert_close(total, getattr(batch, name).sum(dtype=torch.float64))
    assert all(part.tokens.shape[1] == int(part.lengths.max()) for part in parts)


def test_gradient_of_a_weighted_sum_is_equal_to_the_unsplit_one():
    batch = collate_lengths([5, 3, 8, 2, 6])
    batch = replace(batch, loss_weights=batch.loss_mask / batch.loss_mask.sum())

    def gradient(parts: list[TrainBatch]) -> torch.Tensor:
        weight = torch.zeros(1000, requires_grad=True)
        for part in parts:
            (part.loss_weights * weight[part.tokens].sin().add(weight[part.tokens])).sum().backward()
        assert weight.grad is not None
        return weight.grad

    whole = gradient([batch])
    shards = [select_rows(batch, rows) for rows in plan_shards(batch.lengths.tolist(), 3)]
    for parts in (split_microbatches(batch, max_tokens=8), split_microbatches(batch, max_rows=2), shards):
        torch.testing.assert_close(gradient(parts), whole)


@given(LENGTHS, st.integers(1, 5))
def test_shards_hold_every_row_once_balanced(lengths, num_shards):
    batch = collate_lengths(lengths)
    num_shards = min(num_shards, batch.num_rows)
    shards = [select_rows(batch, rows) for rows in plan_shards(batch.lengths.tolist(), num_shards)]
    assert len(shards) == num_shards
    assert sorted(all_rows(shards)) == sorted(all_rows([batch]))
    totals = [int(shard.lengths.sum()) for shard in shards]
    assert max(totals) - min(totals) <= max(lengths)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=6), st.sampled_from(["right", "left"]))
def test_prepared_columns_equal_loops_over_positions(shapes, side):
    samples = [make_sample(i, prompt, output) for i, (prompt, output) in enumerate(shapes)]
    advantages = [0.5 - i for i in range(len(samples))]
    inputs = prepare_grpo_batch(samples, advantages, pad_id=3, padding_side=side)
    width = max(len(s.tokens) for s in samples)
    for row, (sample, advantage) in enumerate(zip(samples, advantages, strict=True)):
        n = len(sample.tokens)
        expected = {
            "input_ids": (sample.tokens, 3),
            "labels": (sample.tokens, 3),
            "attention_mask": ([1] * n, 0),
            "position_ids": (range(n), 0),
            "loss_mask": (sample.loss_mask, 0),
            "advantages": ([advantage if mask > 0 else 0 for mask in sample.loss_mask], 0),
            "old_log_probs": (sample.rollout_log_probs, 0),
            "versions": (sample.weight_versions, -1),
        }
        assert set(inputs) == set(expected)
        for name, (values, fill) in expected.items():
            pads = [fill] * (width - n)
            padded = [*values, *pads] if side == "right" else [*pads, *values]
            torch.testing.assert_close(inputs[name][row], torch.tensor(padded, dtype=inputs[name].dtype), msg=name)
    plain = [replace(s, reward=None, rollout_log_probs=None, weight_versions=None) for s in samples]
    supervised = prepare_sft_batch(plain, pad_id=3, padding_side=side)
    assert set(supervised) == {"input_ids", "labels", "attention_mask", "position_ids", "loss_mask"}
    assert all(torch.equal(supervised[name], inputs[name]) for name in supervised)


@pytest.mark.parametrize("side", ["right", "left"])
def test_grpo_loss_of_a_prepared_batch_predicts_the_next_token(side):
    """The loss equals -sum over trained tokens of advantage * log p(token t | logits at t - 1), divided as grpo_loss divides."""
    from rollouts.algorithms.losses import grpo_loss

    samples = [
        make_sample(i, p, o, tokens=tuple((3 * i + 5 * t) % 11 for t in range(p + o))) for i, (p, o) in enumerate([(2, 3), (1, 1), (3, 4)])
    ]
    advantages = [1.0, -0.5, 2.0]
    inputs = prepare_grpo_batch(samples, advantages, padding_side=side)
    logits = torch.randn(*inputs["input_ids"].shape, 11, generator=torch.Generator().manual_seed(0))

    def brute_force(offset: int) -> float:
        total = count = 0.0
        for row, (sample, advantage) in enumerate(zip(samples, advantages, strict=True)):
            start = 0 if side == "right" else logits.shape[1] - len(sample.tokens)
            for t, token in enumerate(sample.tokens):
                if sample.loss_mask[t] > 0:
                    total -= advantage * float(logits[row, start + t - offset].log_softmax(-1)[token])
                    count += 1
        return total / count

    loss = float(grpo_loss(logits, inputs["labels"], inputs["loss_mask"], inputs["advantages"]).loss)
    assert loss == pytest.approx(brute_force(1), rel=1e-5)
    assert abs(loss - brute_force(0)) > 1e-3, "each token would be trained to predict itself"


def test_the_first_token_of_a_row_is_never_trained_on():
    batch = collate_samples([make_sample(0, 0, 3), make_sample(1, 0, 1)])
    assert batch.loss_mask.tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch.trainable.tolist() == [True, False]


def test_preparation_refuses_what_cannot_be_trained_on():
    with pytest.raises(DataError, match="sample 2"):
        prepare_sft_batch([make_sample(0), make_sample(2, loss_mask=(0.0,) * 5)])
    with pytest.raises(RewardError, match="sample 2"):
        prepare_grpo_batch([make_sample(2, reward=None)], [1.0])
    with pytest.raises(AssertionError, match="advantages"):
        prepare_grpo_batch([make_sample(2)], [1.0, 2.0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("labels", torch.zeros(1, 4, dtype=torch.int64)),
        ("labels", torch.zeros(1, 3)),
        ("loss_mask", torch.ones(1, 3, dtype=torch.int64)),
        ("loss_mask", -torch.ones(1, 3)),
        ("attention_mask", torch.full((1, 3), 2)),
        ("advantages", torch.zeros(1)),
        ("versions", torch.zeros(1, 3)),
        ("input_ids", torch.zeros(3, dtype=torch.int64)),
        ("weights", torch.zeros(1, 3)),
    ],
)
def test_model_inputs_of_the_wrong_kind_are_refused_by_name(name, value):
    inputs = prepare_sft_batch([make_sample(0, 1, 2)])
    with pytest.raises(AssertionError, match=name):
        check_model_inputs(inputs | {name: value})


def test_log_probs_do_not_depend_on_the_side_or_width_of_padding():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                    head_dim=8)
    ).eval()  # fmt: skip
    samples = [make_sample(i, 2, n, tokens=tuple((7 * i + t) % 30 + 2 for t in range(2 + n))) for i, n in enumerate((1, 4, 7))]

    def trained_log_probs(rows, side):
        inputs = prepare_sft_batch(rows, padding_side=side)
        with torch.no_grad():
            logits = model(**{k: inputs[k] for k in ("input_ids", "attention_mask", "position_ids")}).logits
        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, inputs["labels"][:, 1:, None])[..., 0]
        return log_probs[inputs["loss_mask"][:, 1:] > 0]

    alone = torch.cat([trained_log_probs([sample], "right") for sample in samples])
    for side in ("right", "left"):
        torch.testing.assert_close(trained_log_probs(samples, side), alone, atol=1e-5, rtol=1e-5)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), max_tokens=st.integers(1, 60), num_shards=st.integers(1, 5))
def test_sharded_microbatches_hold_every_row_once_and_no_rank_gets_too_much(lengths, max_tokens, num_shards):
    plan = plan_sharded_microbatches(lengths, max_tokens=max_tokens, num_shards=num_shards)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(rows for rows in plan)
    for rows in plan:
        for part in plan_shards([lengths[row] for row in rows], num_shards):
            assert len(part) <= 1 or sum(lengths[rows[i]] for i in part) <= max_tokens
    if num_shards == 1:
        assert plan == plan_microbatches(lengths, max_tokens=max_tokens)


def test_shards_without_rows_come_last_and_are_empty():
    assert plan_shards([3, 9], 4) == [[1], [0], [], []]


@given(lengths=st.lists(st.integers(0, 6), max_size=30), num_shards=st.integers(1, 9))
def test_each_row_longest_first_goes_to_the_shard_with_the_fewest_tokens_then_rows_then_number(lengths, num_shards):
    parts: list[list[int]] = [[] for _ in range(num_shards)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        place = min(range(num_shards), key=lambda i: (sum(lengths[r] for r in parts[i]), len(parts[i]), i))
        parts[place].append(row)
    assert plan_shards(lengths, num_shards) == [sorted(part) for part in parts]
