"""Servers that release the memory of their GPU while the policy is trained: both kinds, fleets, and the loop."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
from server_waits import wait_for_tokens

from rollouts.async_rl_loop import train_async_rl
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.http.endpoint import RetryPolicy
from rollouts.engines.protocol import EngineFeature, get_engine_features
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import ConfigError, EngineError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.rl_loop import train_rl
from rollouts.testing import (
    FakeBackend,
    FakeEngine,
    FakeSGLangServer,
    FakeVLLMServer,
    Fault,
    SGLangSettings,
    VLLMSettings,
    create_tiny_model,
    script_answer,
)
from rollouts.training.rl_parts import RLParts
from rollouts.types import SamplingParams

FAST = RetryPolicy(budget_s=0.5, first_wait_s=0.01, longest_wait_s=0.05)
KINDS = {
    "vllm": (FakeVLLMServer, VLLMSettings(can_sleep=True), VLLMEngine, "/sleep", "/wake_up"),
    "sglang": (FakeSGLangServer, SGLangSettings(can_sleep=True), SGLangEngine, "/release_memory_occupation", "/resume_memory_occupation"),
}
PARAMS = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture
def model_path(tmp_path):
    create_tiny_model().save_pretrained(tmp_path / "served")
    return tmp_path / "served"


@asynccontextmanager
async def open_pair(kind, model_path, **settings):
    create_server, options, create_engine, *_ = KINDS[kind]
    async with create_server(model_path, settings=replace(options, **settings)) as server, create_engine(server.url, retry=FAST) as engine:
        yield server, engine


def count(server, route):
    return sum(request.path == route for request in server.received)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_sleeps_once_it_has_answered_and_new_requests_wait_until_it_is_awake(kind, model_path):
    async with open_pair(kind, model_path) as (server, engine):
        expected = await engine.generate((5, 6, 7), PARAMS)
        found = []

        async def ask():
            found.append(await engine.generate((5, 6, 7), PARAMS))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_for_tokens(server, 1)
            await engine.sleep()
            assert len(found) == 1  # its tokens were not lost
            nursery.start_soon(ask)
            await trio.sleep(0.1)
            assert len(found) == 1
            await engine.sleep()  # again is nothing
            assert await engine.get_weight_version() == 0
            await engine.wake_up()
        await engine.wake_up()
        assert [completion.output_tokens for completion in found] == [expected.output_tokens] * 2
        assert (count(server, KINDS[kind][3]), count(server, KINDS[kind][4])) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_weights_are_refused_while_a_server_is_asleep_and_taken_afterwards(kind, model_path):
    async with open_pair(kind, model_path) as (_, engine):
        await engine.sleep()
        for call in (lambda: engine.update_weights_from_checkpoint(model_path), engine.resume):
            with pytest.raises(EngineError, match=r"is asleep: call wake_up\(\) first"):
                await call()
        await engine.wake_up()
        assert (await engine.update_weights_from_checkpoint(model_path))["success"]
        assert await engine.generate((5, 6), PARAMS)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_would_lose_its_weights_is_refused_before_it_is_told(kind, model_path):
    async with open_pair(kind, model_path, can_sleep=False) as (server, engine):
        with pytest.raises(EngineError, match=r"start it with --enable-sleep-mode .vLLM., or with --enable-memory-saver"):
            await engine.sleep()
        assert count(server, KINDS[kind][3]) == 0
        await engine.generate((5, 6), PARAMS)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_is_closed_leaves_its_server_awake(kind, model_path):
    async with open_pair(kind, model_path) as (server, engine):
        await engine.sleep()
        await engine.__aexit__(None, None, None)
        assert count(server, KINDS[kind][4]) == 1
        async with KINDS[kind][2](server.url, retry=FAST) as other:
            await other.generate((5, 6), PARAMS)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_cannot_be_woken_up_fails_its_requests_with_the_reason(kind, model_path):
    async with open_pair(kind, model_path) as (server, engine):
        await engine.sleep()
        server.add_fault(Fault("status", path=KINDS[kind][4], body="no memory"))
        with pytest.raises(EngineError, match="no memory"):
            await engine.wake_up()
        with pytest.raises(EngineError, match="it was asleep, and could not be woken up"):
            await engine.generate((5, 6), PARAMS)
        await engine.wake_up()
        assert await engine.generate((5, 6), PARAMS)


async def test_a_paused_server_is_paused_again_when_it_wakes_up(model_path):
    async with open_pair("vllm", model_path) as (server, engine):
        await engine.pause()
        await engine.sleep()
        await engine.wake_up()
        assert server.core.is_paused
        await engine.resume()
        assert await engine.generate((5, 6), PARAMS)


async def test_a_fleet_sleeps_as_a_whole_or_not_at_all(model_path):
    async with open_pair("vllm", model_path) as (first, one), open_pair("vllm", model_path) as (second, two):
        async with EngineFleet([one, two]) as fleet:
            assert EngineFeature.SLEEP in get_engine_features(fleet)
            await fleet.sleep()
            assert first.core.is_sleeping and second.core.is_sleeping
            await fleet.wake_up()
            second.add_fault(Fault("status", path="/sleep", body="cannot sleep"))
            with pytest.raises(EngineError, match="cannot sleep"):
                await fleet.sleep()
            assert not first.core.is_sleeping and not second.core.is_sleeping
            await fleet.generate((5, 6), PARAMS)


def parts_of(engines):
    async def reward(sample):
        return float(len(sample.response) % 2)

    buffer = DataBuffer(["a", "b", "c", "d"])
    rollout = RolloutConfig(
        batch_size=2,
        n_samples_per_prompt=2,
        generate_fn=create_generate_fn(engines, create_char_tokenizer(), SamplingParams(max_tokens=4, seed=0)),
        reward_fn=reward,
    )
    parts = RLParts(backend=FakeBackend(), data_buffer=buffer, engines=engines)
    return parts, AsyncRolloutManager(buffer, rollout)


@pytest.mark.parametrize("kind", KINDS)
async def test_engines_sleep_while_the_policy_is_trained_and_at_no_other_time(kind, model_path):
    async with open_pair(kind, model_path) as (server, engine):
        asleep = []

        def is_asleep():
            return server.core.is_sleeping if kind == "vllm" else not server.core.has_memory

        class Watching(FakeBackend):
            def forward_backward(self, batch, loss_fn, *, with_entropy=False):
                asleep.append(is_asleep())
                return super().forward_backward(batch, loss_fn, with_entropy=with_entropy)

        parts, source = parts_of([engine])
        config = RLTrainingConfig(num_steps=2, sync_every=3, weight_sync="memory", sleep_engines=True)
        history = await train_rl(replace(parts, backend=Watching()), source, config)
        assert asleep and all(asleep) and len(history) == 2
        assert not is_asleep()
        assert count(server, KINDS[kind][3]) == count(server, KINDS[kind][4]) == 3  # before the first rollout, and in each step


async def test_engines_wake_up_if_training_fails(model_path):
    class Failing(FakeBackend):
        def forward_backward(self, batch, loss_fn, *, with_entropy=False):
            raise RuntimeError("out of memory")

    async with open_pair("vllm", model_path) as (server, engine):
        parts, source = parts_of([engine])
        parts = replace(parts, backend=Failing())
        with pytest.raises(RuntimeError, match="out of memory"):
            await train_rl(parts, source, RLTrainingConfig(num_steps=2, sync_every=3, weight_sync="memory", sleep_engines=True))
        assert not server.core.is_sleeping
        assert await engine.generate((5, 6), PARAMS)


async def test_a_run_whose_server_cannot_sleep_ends_before_its_first_rollout(model_path):
    async with open_pair("vllm", model_path, can_sleep=False) as (server, engine):
        parts, source = parts_of([engine])
        config = RLTrainingConfig(num_steps=2, weight_sync="memory", sleep_engines=True)
        with pytest.raises(EngineError, match="start it with --enable-sleep-mode"):
            await train_rl(parts, source, config)
        assert count(server, "/inference/v1/generate") == 0


async def test_asynchronous_runs_and_engines_without_the_feature_are_refused(model_path):
    config = RLTrainingConfig(num_steps=2, weight_sync="memory", sleep_engines=True)
    parts, source = parts_of([FakeEngine(script_answer((5, 6)))])
    with pytest.raises(ConfigError, match=r"lacks the feature sleep .sleep, wake_up., which sleep_engines needs"):
        await train_rl(parts, source, config)
    async with open_pair("vllm", model_path) as (_, engine):
        parts, source = parts_of([engine])
        async with create_workflow_executor(parts.data_buffer, source.config, AsyncConfig(max_staleness=1), engines=[engine]) as executor:
            with pytest.raises(ConfigError, match="sleep_engines is set, but the engines generate while the policy is trained"):
                await train_async_rl(parts, executor, config)


@pytest.mark.parametrize("kind", ["vllm"])
async def test_engines_wake_up_if_training_is_cancelled(kind, model_path):
    scope = trio.CancelScope()

    class Stopping(FakeBackend):
        def forward_backward(self, batch, loss_fn, *, with_entropy=False):
            scope.cancel()
            return super().forward_backward(batch, loss_fn, with_entropy=with_entropy)

    async with open_pair(kind, model_path) as (server, engine):
        parts, source = parts_of([engine])
        config = RLTrainingConfig(num_steps=2, sync_every=3, weight_sync="memory", sleep_engines=True)
        with scope:
            await train_rl(replace(parts, backend=Stopping()), source, config)
        assert not server.core.is_sleeping
        with trio.fail_after(20):
            await engine.generate((5, 6), PARAMS)


async def test_a_fleet_of_servers_that_cannot_sleep_says_so_once(model_path):
    async with open_pair("vllm", model_path, can_sleep=False) as (_, one), open_pair("vllm", model_path, can_sleep=False) as (_, two):
        async with EngineFleet([one, two]) as fleet:
            with pytest.raises(EngineError, match="--enable-sleep-mode"):
                await fleet.sleep()
