"""Episodes in both RL loops: rollouts over an environment are trained on as they were sampled, whatever interrupts them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import trio
from chat_templates import QWEN3, create_tokenizer

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.run import EpisodeWorkflow, create_episode_generate_fn
from rollouts.agents.setting import EpisodeSetting
from rollouts.algorithms.presets import grpo
from rollouts.async_rl_loop import run_async_rl_training
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.backends.factory import create_pytorch_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import ParityConfig, RLTrainingConfig, RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.environments.games.grid_world import GridWorld
from rollouts.errors import EnvironmentFault
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.workflows import create_workflow_generate_fn
from rollouts.rl_loop import run_rl_training
from rollouts.testing import FakeBackend, FakeEngine, create_tiny_model, random_answer
from rollouts.types import SamplingParams

PARAMS = SamplingParams(max_tokens=4)
TRAINING = RLTrainingConfig(
    num_steps=2, weight_sync="memory", algorithm=grpo(), parity=ParityConfig(num_rows=64, threshold=1e-4, action="stop")
)


class Echo:
    """Pays for digits, and fails at given steps."""

    def reset(self, config: Any):
        self.step_number = 0
        return f"{config.seed % 10}?"

    def step(self, action: str):
        self.step_number += 1
        return f"{len(action)}.", float(sum(c.isdigit() for c in action)), False, {}

    def get_state_description(self):
        return ""

    def get_prompt_prefix(self):
        return ""


def create_parts(tokenizer, factory=Echo, config=EpisodeConfig(max_turns=3), template_kwargs=None, **options: Any):
    model = create_tiny_model(vocab_size=len(tokenizer), seed=3)
    engine = InProcessEngine(copy.deepcopy(model), tokenizer, eos_token_ids=[tokenizer.eos_token_id])
    backend = create_pytorch_backend(model, lr=1e-2)
    setting = EpisodeSetting(environment_factory=factory, config=config, seed=1, template_kwargs=template_kwargs or {})
    generate_fn = create_episode_generate_fn([engine], tokenizer, PARAMS, setting, **options)
    return backend, engine, RolloutConfig(batch_size=2, n_samples_per_prompt=3, generate_fn=generate_fn)


async def run_sync(backend, engine, rollout, training=TRAINING):
    buffer, batches = DataBuffer(None), []
    async with AsyncRolloutManager(buffer, rollout, engines=[engine]) as manager:
        metrics = await run_rl_training(backend, buffer, manager, [engine], training, on_rollouts=lambda step, batch: batches.append(batch))
    return metrics, batches


async def run_async(backend, engine, rollout, asynchronous, training=TRAINING):
    buffer, batches = DataBuffer(None), []
    async with create_workflow_executor(buffer, rollout, asynchronous, engines=[engine]) as executor:
        metrics = await run_async_rl_training(
            backend, buffer, executor, [engine], training, on_rollouts=lambda step, batch: batches.append(batch)
        )
    return metrics, batches


async def test_both_loops_train_on_episodes_whose_log_probs_the_trainer_has():
    metrics, batches = await run_sync(*create_parts(create_char_tokenizer()))
    assert [line["num_episodes"] for line in metrics] == [6.0, 6.0]
    assert metrics[0]["num_episodes_max_turns"] == 6.0
    assert metrics[0]["turns_mean"] == metrics[0]["turns_max"] == 3.0
    assert metrics[0]["environment_reward_mean"] == metrics[0]["reward_mean"]
    assert metrics[0]["num_episodes_failed_infrastructure"] == metrics[0]["num_episodes_failed_data"] == 0
    assert metrics[0]["grad_norm"] > 0
    assert all(len(sample.turns) == 3 for batch in batches for sample in batch.samples)
    asynchronous = AsyncConfig(enabled=True, max_staleness=0)
    same_metrics, same = await run_async(*create_parts(create_char_tokenizer()), asynchronous)
    assert [batch.samples for batch in same] == [batch.samples for batch in batches]
    assert [line["loss"] for line in same_metrics] == [line["loss"] for line in metrics]


async def test_episodes_of_several_contexts_are_trained_on_as_they_were_sampled():
    config = EpisodeConfig(max_turns=3, on_rewrite="branch")
    parts = create_parts(create_tokenizer(QWEN3), config=config, template_kwargs={"enable_thinking": False})
    metrics, batches = await run_sync(*parts)
    assert all(len(sample.context_starts) == 2 for batch in batches for sample in batch.samples)
    assert metrics[0]["num_branched_episodes"] == 6.0
    assert all(line["grad_norm"] > 0 for line in metrics)


async def test_rows_that_end_at_different_turns_train_together():
    def wants_stop(text: str) -> bool:
        return len(text) % 2 == 1

    metrics, batches = await run_sync(*create_parts(create_char_tokenizer(), GridWorld, wants_stop=wants_stop))
    assert len({len(sample.turns) for batch in batches for sample in batch.samples}) > 1
    assert metrics[0]["num_episodes_agent"] > 0


class Broken(Echo):
    """Fails in some of its first states."""

    def reset(self, config: Any):
        self.is_broken = config.seed % 3 == 1
        return super().reset(config)

    def step(self, action: str):
        if self.is_broken and self.step_number == 1:
            raise OSError("the world is gone")
        return super().step(action)


async def test_failures_are_counted_by_their_kind_and_the_rest_of_a_batch_is_trained_on():
    parts = create_parts(create_char_tokenizer(), Broken, EpisodeConfig(max_turns=3, on_error="drop"))
    metrics, batches = await run_sync(*parts)
    failed = sum(line["num_episodes_failed_infrastructure"] for line in metrics)
    assert failed == 3 * sum(line["num_groups_dropped"] for line in metrics) > 0
    assert all(len(batch.samples) == 6 for batch in batches)
    with pytest.raises(EnvironmentFault, match=r"Broken.step raised OSError.*the world is gone"):
        await run_sync(*create_parts(create_char_tokenizer(), Broken))


async def test_an_interrupted_rollout_ends_as_it_would_have_ended(autojump_clock):
    def create(seconds):
        engine = FakeEngine(random_answer(mean_length=4), seconds_per_token=lambda prompt, seed: seconds * (1 + seed % 5))
        generate_fn = create_episode_generate_fn(
            [engine], create_char_tokenizer(), SamplingParams(max_tokens=8), Echo, EpisodeConfig(max_turns=3), seed=4
        )
        return engine, generate_fn

    _, undisturbed = create(0.0)
    engine, generate_fn = create(1.0)
    rollout = RolloutConfig(batch_size=2, n_samples_per_prompt=3, generate_fn=generate_fn)
    asynchronous = AsyncConfig(enabled=True, max_staleness=2, in_flight="interrupt", patience_s=10000.0)
    training = RLTrainingConfig(num_steps=4, weight_sync="memory")
    buffer, batches = DataBuffer(None), []
    async with create_workflow_executor(buffer, rollout, asynchronous, engines=[engine]) as executor:
        await run_async_rl_training(
            FakeBackend(seconds_per_job=7.0), buffer, executor, [engine], training,
            clock=trio.current_time, on_rollouts=lambda step, batch: batches.append(batch),
        )  # fmt: skip
    aborted = [call for call in engine.calls if call.method == "abort"]
    ids = [call.arguments["request_id"] for call in engine.calls if call.method == "generate"]
    assert aborted
    assert len(set(ids)) < len(ids), "some episodes were begun again"
    assert len(batches) == 4
    for batch in batches:
        for sample in batch.samples:
            (expected,) = [s for s in await undisturbed(buffer_prompt(sample.group_index), 3) if s.index == sample.index]
            assert sample.tokens == expected.tokens
            assert sample.reward == expected.reward


def buffer_prompt(index: int):
    buffer = DataBuffer(None)
    return buffer.get_prompts(index + 1)[index]


async def test_a_workflow_plays_the_same_episodes():
    tokenizer = create_char_tokenizer()
    engine = InProcessEngine(create_tiny_model(), tokenizer)
    config = EpisodeConfig(max_turns=2)
    generate_fn = create_workflow_generate_fn(EpisodeWorkflow(tokenizer, PARAMS, Echo, config, seed=1), [engine])
    direct = create_episode_generate_fn([engine], tokenizer, PARAMS, Echo, config, seed=1)
    (prompt,) = DataBuffer(None).get_prompts(1)
    assert await generate_fn(prompt, 3) == await direct(prompt, 3)


async def test_what_fails_in_the_episodes_of_a_workflow_is_in_the_metrics():
    tokenizer = create_char_tokenizer()
    backend, engine, rollout, *_ = create_parts(tokenizer)
    workflow = EpisodeWorkflow(tokenizer, PARAMS, Broken, EpisodeConfig(max_turns=3, on_error="drop"), seed=4)
    generate_fn = create_workflow_generate_fn(workflow, [engine])
    metrics, _ = await run_sync(backend, engine, replace(rollout, generate_fn=generate_fn))
    failed = sum(line["num_episodes_failed_infrastructure"] for line in metrics)
    assert failed == 3 * sum(line["num_groups_dropped"] for line in metrics) > 0
