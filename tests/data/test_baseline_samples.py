"""Samples beside those that are trained on, such as ReMax's greedy one: generated, carried over and scored with their group."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RolloutConfig
from rollouts.data.collate import collate_samples
from rollouts.data.filters import check_reward_nonzero_std
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import mask_truncated, passes_filter
from rollouts.errors import CheckpointError, ConfigError, GenerationError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import GroupSettings, create_generate_fn, generate_group
from rollouts.generation.sync_batches import generate_rollout_batch
from rollouts.seeds import derive_seed
from rollouts.testing import FakeEngine, random_answer
from rollouts.types import Group, Prompt, Sample, SamplingParams, Status


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return create_char_tokenizer()


PARAMS = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9)


def ragged_delay(prompt_tokens: tuple[int, ...], seed: int | None) -> float:
    return 0.5 + derive_seed(0 if seed is None else seed) % 5


async def reward_length(sample: Sample) -> float:
    return float(sum(sample.loss_mask))


def make_manager(tokenizer: Any, engine: FakeEngine, **changes: Any) -> AsyncRolloutManager:
    options: dict[str, Any] = {
        "batch_size": 3,
        "n_samples_per_prompt": 2,
        "n_baseline_samples": 1,
        "generate_fn": create_generate_fn([engine], tokenizer, PARAMS, num_greedy=1),
        "reward_fn": reward_length,
        "grace_s": 1.0,
    }
    buffer = DataBuffer([{"prompt": f"{i}=", "ground_truth": str(i)} for i in range(7)], seed=3)
    return AsyncRolloutManager(buffer, RolloutConfig(**(options | changes)), engines=[engine])


async def test_the_greedy_sample_is_the_last_and_changes_no_other(tokenizer: Any):
    engine = FakeEngine()
    prompt = Prompt(content="1=", index=4, metadata={"ground_truth": "1"})
    with_greedy = await generate_group(engine, tokenizer, prompt, 3, PARAMS, settings=GroupSettings(num_greedy=1))
    requests = [call.arguments for call in engine.calls]
    plain = await generate_group(FakeEngine(), tokenizer, prompt, 3, PARAMS)
    assert [sample.tokens for sample in with_greedy[:3]] == [sample.tokens for sample in plain]
    assert [sample.trainable for sample in with_greedy] == [True, True, True, False]
    assert [sample.index for sample in with_greedy] == [16, 17, 18, 19]
    assert with_greedy[3].metadata["ground_truth"] == "1"
    assert len({request["request_id"] for request in requests}) == 4
    greedy = [request["params"] for request in requests if request["params"].greedy]
    assert [(p.temperature, p.top_p, p.top_k, p.max_tokens) for p in greedy] == [(0.0, 1.0, 0, 12)]


async def test_a_batch_has_whole_groups_with_their_baseline_sample(tokenizer: Any, autojump_clock: trio.testing.MockClock):
    manager = make_manager(tokenizer, FakeEngine(seconds_per_token=ragged_delay))
    batch = await manager.generate_batch()
    assert len(batch.samples) == 3 * 3
    assert [sample.trainable for sample in batch.samples] == [True, True, False] * 3
    assert [sample.index for sample in batch.samples] == list(range(9))
    assert all(sample.reward is not None for sample in batch.samples)
    rows = collate_samples(batch.samples)
    assert rows.trainable.tolist() == [True, True, False] * 3
    assert float(rows.loss_mask[~rows.trainable].sum()) == 0
    assert rows.rewards.tolist() == batch.rewards


async def test_stopped_groups_are_continued_greedy_sample_and_all(tokenizer: Any, autojump_clock: trio.testing.MockClock):
    engine = FakeEngine(random_answer(mean_length=6), seconds_per_token=ragged_delay)
    manager = make_manager(tokenizer, engine, over_sampling_factor=2.0, grace_s=0.5)
    for _ in range(4):
        batch = await manager.generate_batch()
        assert [sample.trainable for sample in batch.samples] == [True, True, False] * 3
        state = json.loads(json.dumps(manager.state_dict()))
        manager = make_manager(tokenizer, engine, over_sampling_factor=2.0, grace_s=0.5)
        manager.load_state_dict(state)
    requests = [call.arguments for call in engine.calls if call.method == "generate"]
    prompt_length = min(len(request["prompt_tokens"]) for request in requests)
    continued = [request["params"].greedy for request in requests if len(request["prompt_tokens"]) > prompt_length]
    assert any(continued)
    assert not all(continued)


async def test_filters_see_the_trained_samples_only(tokenizer: Any):
    seen: list[Group] = []

    def filter_fn(group: Group) -> bool:
        seen.append(group)
        return len(seen) > 1

    await make_manager(tokenizer, FakeEngine(), filter_fn=filter_fn).generate_batch()
    assert {len(group) for group in seen} == {2}
    assert all(sample.trainable for group in seen for sample in group)


def test_a_greedy_sample_does_not_make_equal_rewards_look_different():
    group = tuple(Sample(reward=r, index=k, trainable=r == 1.0) for k, r in enumerate((1.0, 1.0, 0.0)))
    assert check_reward_nonzero_std(group)
    assert not passes_filter(group, check_reward_nonzero_std)
    assert passes_filter(group, None)


async def test_a_generate_function_without_them_is_refused_with_what_to_do(tokenizer: Any):
    engine = FakeEngine()
    with pytest.raises(GenerationError, match=r"returned 2 samples.*expected n = 2 and 1 baseline samples \(such as num_greedy=1"):
        await make_manager(tokenizer, engine, generate_fn=create_generate_fn([engine], tokenizer, PARAMS)).generate_batch()
    with pytest.raises(ConfigError, match="n_baseline_samples"):
        make_manager(tokenizer, engine, n_baseline_samples=-1)


def test_a_users_function_need_not_mark_them():
    def generate_fn(prompt: Prompt, n: int) -> list[Sample]:
        return [Sample(prompt=prompt.content, tokens=(1, 2), loss_mask=(0.0, 1.0), status=Status.COMPLETED) for _ in range(n + 2)]

    config = RolloutConfig(
        batch_size=2, n_samples_per_prompt=1, n_baseline_samples=2, generate_fn=generate_fn, reward_fn=lambda sample: 0.5
    )
    batch = generate_rollout_batch(DataBuffer(["a", "b"]), config)
    assert [sample.trainable for sample in batch.samples] == [True, False, False] * 2


async def test_a_state_with_another_number_of_them_is_refused(tokenizer: Any):
    state = make_manager(tokenizer, FakeEngine()).state_dict()
    with pytest.raises(CheckpointError, match="n_baseline_samples 1, but the config has 0"):
        make_manager(tokenizer, FakeEngine(), n_baseline_samples=0).load_state_dict(state)


def test_a_truncated_sample_keeps_its_reward_and_loses_its_mask():
    sample = Sample(tokens=(1, 2, 3), loss_mask=(0.0, 1.0, 1.0), reward=0.5, status=Status.TRUNCATED)
    masked = mask_truncated(sample)
    assert (masked.loss_mask, masked.reward, masked.tokens) == ((0.0, 0.0, 0.0), 0.5, (1, 2, 3))
    completed = Sample(tokens=(1, 2, 3), loss_mask=(0.0, 1.0, 1.0), reward=0.5, status=Status.COMPLETED)
    assert mask_truncated(completed) is completed
    other = Sample(tokens=(1, 2), loss_mask=(0.0, 1.0), reward=1.5, status=Status.COMPLETED)
    batch = collate_samples([masked, other])
    assert batch.rewards.tolist() == [0.5, 1.5]
    assert batch.group_ids.tolist() == [0, 0]
    assert batch.loss_mask.sum(1).tolist() == [0.0, 1.0]
