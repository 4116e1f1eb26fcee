"""gigpo() in both RL loops over an environment whose states repeat."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.run import create_episode_generate_fn
from rollouts.algorithms.presets import decoupled, gigpo
from rollouts.async_rl_loop import run_async_rl_training
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.backends.factory import create_pytorch_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import ParityConfig, RLTrainingConfig, RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.environments.games.grid_world import GridWorld
from rollouts.errors import ConfigError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.rl_loop import run_rl_training
from rollouts.testing import create_tiny_model
from rollouts.types import SamplingParams

PARITY = ParityConfig(num_rows=64, threshold=1e-4, action="stop")


def create_parts() -> tuple[Any, Any, Any]:
    model, tokenizer = create_tiny_model(seed=3), create_char_tokenizer()
    engine = InProcessEngine(copy.deepcopy(model), tokenizer, eos_token_ids=[tokenizer.eos_token_id])
    return create_pytorch_backend(model, lr=1e-2), engine, tokenizer


def configure(engine: InProcessEngine, tokenizer: Any) -> RolloutConfig:
    generate_fn = create_episode_generate_fn(
        [engine], tokenizer, SamplingParams(max_tokens=2), GridWorld, EpisodeConfig(max_turns=4), seed=1
    )
    return RolloutConfig(batch_size=2, n_samples_per_prompt=4, generate_fn=generate_fn)


async def test_the_first_states_of_a_group_are_one_anchor():
    backend, engine, tokenizer = create_parts()
    buffer, estimates = DataBuffer(None), []
    training = RLTrainingConfig(
        num_steps=2, weight_sync="memory", algorithm=gigpo(default_step_reward=-0.1), parity=PARITY, num_minibatches=2, num_epochs=2
    )
    async with AsyncRolloutManager(buffer, configure(engine, tokenizer), engines=[engine]) as manager:
        metrics = await run_rl_training(
            backend, buffer, manager, [engine], training, on_estimates=lambda step, batch, estimate: estimates.append(estimate)
        )
    for line, batch in zip(metrics, estimates, strict=True):
        levels = batch.turns.levels
        first = levels.anchors[:, 0].tolist()
        assert [first.count(anchor) >= 4 for anchor in first] == [True] * 8, "a group begins in one state"
        assert set(first[:4]).isdisjoint(first[4:]), "and another group's state is another anchor"
        assert line["anchor_size_max"] >= 4 and line["num_anchors"] == len(set(levels.anchors[levels.anchors >= 0].tolist()))
        assert line["num_updates"] == 4


async def test_the_asynchronous_loop_with_segment_wise_corrections():
    backend, engine, tokenizer = create_parts()
    buffer = DataBuffer(None)
    asynchronous = AsyncConfig(enabled=True, max_staleness=1, enable_segment_wise_ppo=True)
    training = RLTrainingConfig(num_steps=3, weight_sync="memory", algorithm=decoupled(gigpo(), segment_wise=True))
    rollout = RolloutConfig(**{**vars(configure(engine, tokenizer)), "segment_log_probs": True})
    async with create_workflow_executor(buffer, rollout, asynchronous, engines=[engine]) as executor:
        metrics = await run_async_rl_training(backend, buffer, executor, [engine], training)
    assert all(line["num_anchors"] > 1 and line["num_updates"] == 1 for line in metrics)


async def test_single_answers_are_refused_before_the_first_rollout():
    backend, engine, tokenizer = create_parts()
    buffer = DataBuffer(["a"])
    rollout = RolloutConfig(
        batch_size=1, reward_fn=lambda sample: 1.0, generate_fn=create_generate_fn([engine], tokenizer, SamplingParams(max_tokens=2))
    )
    async with AsyncRolloutManager(buffer, rollout, engines=[engine]) as manager:
        with pytest.raises(ConfigError, match=r"requires turns: .* create_episode_generate_fn"):
            await run_rl_training(
                backend, buffer, manager, [engine], RLTrainingConfig(num_steps=1, weight_sync="memory", algorithm=gigpo())
            )
