"""Workflows as generate functions: whose samples they give, what an interruption does, requests at the same time, reward signatures."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import trio

from rollouts.algorithms.presets import remax
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import GenerationConfig, RewardConfig, RolloutConfig, take_apart
from rollouts.data.collate import collate_samples
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import completion_to_sample
from rollouts.errors import ConfigError, DataError, EpisodeInterrupted, GenerationError, RewardError
from rollouts.generation.contract import PendingGroup, bind_generate_fn, is_finished
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.generation.workflows import (
    LLMRequest,
    ReMaxWorkflow,
    RLVRWorkflow,
    WorkflowData,
    WorkflowEngine,
    adapt_reward_fn,
    create_workflow_generate_fn,
)
from rollouts.rewards.reward_functions import reward_function
from rollouts.testing import FakeEngine, script_answer
from rollouts.types import Message, Prompt, Sample, SamplingParams, Status

TOKENIZER = create_char_tokenizer()
PROMPT = Prompt(content="2 1 >", index=3, metadata={"answer": "12"})
PARAMS = SamplingParams(max_tokens=12)
NO_DEADLINE = RewardConfig(timeout_s=None)  # virtual time does not wait for the thread that a reward runs in


def count_ones(prompt, completions, prompt_ids, completion_ids, **data) -> float:
    return float(completions.count("1"))


async def generate(workflow, engine, n: int = 2, *, prompt: Prompt = PROMPT, partial=(), num_baseline: int = 0):
    generate_fn = create_workflow_generate_fn(workflow, [engine], num_baseline=num_baseline)
    return await bind_generate_fn(generate_fn, n, num_baseline=num_baseline)(PendingGroup(prompt, partial))


# episodes of the user's own


class TwoTurns:
    """Asks twice, and trains on both answers."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    async def arun_episode(self, engine: WorkflowEngine, data: WorkflowData) -> Sample:
        prompt = tuple(TOKENIZER(data["prompt"])["input_ids"])
        sample = Sample(prompt=data["prompt"], metadata={"answer": data["answer"]})
        for _ in range(2):
            completion = await engine.agenerate(LLMRequest(input_ids=sample.tokens or prompt, gconfig=PARAMS))
            self.ids.append(completion.request_id)
            text = TOKENIZER.decode(completion.output_tokens, skip_special_tokens=True)
            sample = replace(completion_to_sample(sample, prompt, completion, sample.response + text), status=Status.ABORTED)
        return replace(sample, status=Status.COMPLETED, reward=1.0)


async def test_an_object_with_arun_episode_gives_the_samples_of_a_group():
    workflow = TwoTurns()
    (sample,) = await generate(workflow, FakeEngine(script_answer([5, 6, 1])), 1)
    assert sample.tokens[-6:] == (5, 6, 1, 5, 6, 1)
    assert (sample.index, sample.group_index, sample.status, sample.reward) == (3, 3, Status.COMPLETED, 1.0)
    assert sample.metadata == {"answer": "12"}
    assert len(set(workflow.ids)) == 2


async def test_a_function_is_a_workflow_too_and_sees_the_data_of_the_prompt():
    seen = []

    async def episode(engine, data):
        seen.append((dict(data), data.n_samples, data.prompt.index, await engine.get_weight_version()))
        return [Sample(tokens=(1,), loss_mask=(0.0,), status=Status.COMPLETED)] * data.n_samples

    prompt = Prompt(content=(Message(role="user", content="hi"),), index=5, metadata={"answer": 4})
    group = await generate(episode, FakeEngine(weight_version=9), 2, prompt=prompt)
    assert [sample.index for sample in group] == [10, 11]
    ((data, *rest),) = seen
    assert data["answer"] == 4
    assert data["messages"][0]["content"] == "hi"
    assert rest == [2, 5, 9]


async def test_the_same_episode_gives_the_same_tokens_whatever_else_runs():
    first = await generate(TwoTurns(), FakeEngine(), 1)
    engine = FakeEngine()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate, TwoTurns(), engine, 1)
        other = await generate(TwoTurns(), engine, 1, prompt=replace(PROMPT, index=4))
    again = await generate(TwoTurns(), engine, 1)
    assert again == first
    assert other[0].tokens != first[0].tokens


async def test_none_drops_the_group_and_a_wrong_number_of_samples_is_an_error():
    async def nothing(engine, data):
        return None

    group = await generate(nothing, FakeEngine(), 2)
    assert [sample.status for sample in group] == [Status.FAILED] * 2

    async def one(engine, data):
        return Sample(tokens=(1,), loss_mask=(1.0,), status=Status.COMPLETED)

    with pytest.raises(GenerationError, match="returned 1 samples for prompt 3, expected n = 2"):
        await generate(one, FakeEngine(), 2)


@pytest.mark.parametrize("in_nursery", [False, True])
async def test_an_interrupted_episode_is_begun_anew(in_nursery: bool, autojump_clock):
    class Nested(TwoTurns):
        async def arun_episode(self, engine, data):
            if not in_nursery:
                return await super().arun_episode(engine, data)
            out = []
            async with trio.open_nursery() as nursery:

                async def run():
                    out.append(await TwoTurns.arun_episode(self, engine, data))

                nursery.start_soon(run)
            return out[0]

    engine = FakeEngine(script_answer([5, 6, 1]), seconds_per_token=1.0)
    groups = []
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            groups.append(await generate(Nested(), engine, 1))

        nursery.start_soon(run)
        await trio.sleep(4.5)  # in the middle of the second answer
        await engine.abort()
    (pending,) = groups[0]
    assert not is_finished(groups[0])
    assert pending.status is Status.PENDING
    assert (pending.index, pending.metadata) == (3, {"answer": "12"})
    again = await generate(Nested(), engine, 1, partial=groups[0])
    assert is_finished(again)


async def test_half_an_answer_is_not_taken_for_a_whole_one(autojump_clock):
    engine = FakeEngine(script_answer([5, 6, 1]), seconds_per_token=1.0)
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(EpisodeInterrupted, match="aborted after 1 tokens"):
                await WorkflowEngine(engine, 3).agenerate(LLMRequest(input_ids=[4], gconfig=PARAMS, rid="mine"))

        nursery.start_soon(ask)
        await trio.sleep(1.5)
        assert engine.pending_requests == ("mine",)
        await engine.abort()


async def give_up(engine: WorkflowEngine, request: LLMRequest) -> Sample:
    return Sample(tokens=(1,), loss_mask=(1.0,), status=Status.COMPLETED)


async def drop(engine: WorkflowEngine, request: LLMRequest) -> None:
    return None


async def fail(engine: WorkflowEngine, request: LLMRequest) -> Sample:
    raise ValueError("the environment is in a state that it should not be in")


async def ask_for_ever(engine: WorkflowEngine, request: LLMRequest) -> Sample:
    for _ in range(100):
        with suppress(EpisodeInterrupted):
            await engine.agenerate(request)
    return await give_up(engine, request)


@pytest.mark.parametrize("then", [give_up, drop, fail, ask_for_ever])
async def test_whatever_an_episode_makes_of_an_interruption_it_is_begun_anew(then, autojump_clock):
    async def episode(engine: WorkflowEngine, data: WorkflowData) -> Sample | None:
        request = LLMRequest(input_ids=[4], gconfig=PARAMS)
        try:
            completion = await engine.agenerate(request)
        except Exception:
            return await then(engine, request)
        return Sample(tokens=completion.output_tokens, loss_mask=(1.0,) * completion.output_len, status=Status.COMPLETED)

    engine = FakeEngine(script_answer([5, 6, 1]), seconds_per_token=1.0)
    groups = []
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            groups.append(await generate(episode, engine, 1))

        nursery.start_soon(run)
        await trio.sleep(1.5)
        await engine.abort()
    assert [sample.status for sample in groups[0]] == [Status.PENDING]
    assert len([call for call in engine.calls if call.method == "generate"]) == 1
    assert is_finished(await generate(episode, engine, 1, partial=groups[0]))


async def test_an_episode_does_not_change_weights(tmp_path):
    with pytest.raises(ConfigError, match="changed by the training loop"):
        await WorkflowEngine(FakeEngine()).update_weights_from_checkpoint(tmp_path)


def test_a_workflow_needs_an_engine_and_an_episode():
    with pytest.raises(ConfigError, match="no engines"):
        create_workflow_generate_fn(TwoTurns(), [])
    with pytest.raises(ConfigError, match="a str without arun_episode"):
        create_workflow_generate_fn("TwoTurns", [FakeEngine()])  # pyright: ignore[reportArgumentType]


# RLVR and ReMax


async def test_rlvr_gives_the_samples_of_create_generate_fn_and_their_rewards():
    engine = FakeEngine()
    group = await generate(RLVRWorkflow(count_ones, PARAMS, TOKENIZER, seed=5), engine, 3)
    plain = await create_generate_fn([FakeEngine()], TOKENIZER, PARAMS, seed=5)(PROMPT, 3)
    assert [replace(sample, reward=None) for sample in group] == list(plain)
    assert [sample.reward for sample in group] == [float(sample.response.count("1")) for sample in plain]


async def test_rlvr_alone_takes_what_a_prompt_may_be():
    workflow = RLVRWorkflow(count_ones, GenerationConfig(max_tokens=5), TOKENIZER)
    for data in ({"prompt": "2 1 >", "answer": "12"}, "2 1 >"):
        (sample,) = await workflow.arun_episode(FakeEngine(script_answer([5, 6, 7, 8, 9, 10])), data)  # pyright: ignore
        assert sample.status is Status.TRUNCATED
        assert sample.reward is not None


async def test_rlvr_goes_on_from_the_tokens_it_has(autojump_clock):
    engine = FakeEngine(script_answer([5] * 11 + [1]), seconds_per_token=1.0)
    workflow = RLVRWorkflow(count_ones, PARAMS, TOKENIZER, reward=NO_DEADLINE)
    groups = []
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            groups.append(await generate(workflow, engine))

        nursery.start_soon(run)
        await trio.sleep(4.5)
        await engine.abort()
    assert [sample.status for sample in groups[0]] == [Status.ABORTED] * 2
    assert [sample.reward for sample in groups[0]] == [None] * 2
    engine.weight_version = 1
    for sample in await generate(workflow, engine, partial=groups[0]):
        assert [sample.weight_versions.count(version) for version in (0, 1)] == [4, 8]
        assert sample.reward is not None


async def test_a_reward_that_fails_follows_the_policy():
    def fail(prompt, completions, prompt_ids, completion_ids, **data):
        raise ValueError("no")

    with pytest.raises(RewardError, match="no"):
        await generate(RLVRWorkflow(fail, PARAMS, TOKENIZER), FakeEngine())
    dropped = await generate(RLVRWorkflow(fail, PARAMS, TOKENIZER, reward=RewardConfig(on_error="drop")), FakeEngine())
    assert {sample.status for sample in dropped} == {Status.FAILED}


def make_workflow_executor(engine: FakeEngine, reward_fn, **asynchronous):
    workflow = RLVRWorkflow(reward_fn, PARAMS, TOKENIZER, reward=NO_DEADLINE)
    config = RolloutConfig(batch_size=1, n_samples_per_prompt=2, generate_fn=create_workflow_generate_fn(workflow, [engine]))
    asynchronous = {"max_staleness": 0, "retry_delay_s": 0.0, **asynchronous}
    return create_workflow_executor(DataBuffer([PROMPT]), config, AsyncConfig(**asynchronous), engines=[engine])


def count_requests(engine: FakeEngine) -> int:
    return sum(call.method == "generate" for call in engine.calls)


async def test_an_interruption_during_rewards_loses_no_answer(autojump_clock):
    async def judge(prompt, completions, prompt_ids, completion_ids, **data) -> float:
        await trio.sleep(20)
        return 0.5

    engine = FakeEngine(script_answer([5, 6, 1]), seconds_per_token=1.0)
    async with make_workflow_executor(engine, judge) as executor:
        await trio.sleep(4)
        assert count_requests(engine) == 2
        await executor.interrupt()
        executor.resume()
        (group,) = await executor.wait(1)
    assert [sample.reward for sample in group] == [0.5, 0.5]
    assert count_requests(engine) == 2, "nothing was generated a second time"


@pytest.mark.parametrize("on_failure", ["retry", "drop"])
async def test_a_reward_that_fails_is_no_failed_rollout(on_failure, autojump_clock):
    async def judge(prompt, completions, prompt_ids, completion_ids, **data) -> float:
        raise ValueError("the judge is ill")

    engine = FakeEngine(script_answer([5, 6, 1]))
    async with make_workflow_executor(engine, judge, on_failure=on_failure) as executor:
        with pytest.raises(RewardError, match="the judge is ill"):
            await executor.wait(1)
        assert count_requests(engine) == 2


async def test_rewards_of_a_workflow_take_the_place_of_those_of_rollouts():
    dropping = RewardConfig(on_error="drop")
    engine = FakeEngine(script_answer([5, 6, 1]))
    config = RolloutConfig(batch_size=1, generate_fn=create_workflow_generate_fn(RLVRWorkflow(count_ones, PARAMS, TOKENIZER), [engine]))
    assert (await AsyncRolloutManager(DataBuffer([PROMPT]), config).generate_batch()).samples[0].reward == 0.0
    before, apart = replace(config), take_apart(config)
    assert config == before and config.reward_fn is None, "a config does not change itself"
    assert (apart.generate_fn, apart.reward_fn) == (config.generate_fn.unscored, config.generate_fn.reward_fn)
    assert take_apart(apart) is apart
    assert (await AsyncRolloutManager(DataBuffer([PROMPT]), apart).generate_batch()).samples[0].reward == 0.0
    generate_fn = create_workflow_generate_fn(RLVRWorkflow(count_ones, PARAMS, TOKENIZER, reward=dropping), [engine])
    assert take_apart(RolloutConfig(batch_size=1, generate_fn=generate_fn)).reward == dropping
    with pytest.raises(ConfigError, match="reward_fn is given, but generate_fn scores"):
        RolloutConfig(batch_size=1, generate_fn=generate_fn, reward_fn=lambda sample: 1.0)
    with pytest.raises(ConfigError, match=r"reward is .* leave one of them out"):
        RolloutConfig(batch_size=1, generate_fn=generate_fn, reward=RewardConfig(timeout_s=1.0))
    elsewhere = create_workflow_generate_fn(RLVRWorkflow(None, PARAMS, TOKENIZER), [engine])
    assert RolloutConfig(batch_size=1, generate_fn=elsewhere, reward_fn=abs).reward_fn is abs


@pytest.mark.parametrize("thinking", [True, False])
async def test_the_chat_template_gets_what_the_workflow_was_given(thinking: bool):
    tokenizer = create_char_tokenizer()
    tokenizer.chat_template = "{{ '7' if enable_thinking else '8' }}{{ extra }}"
    engine = FakeEngine(script_answer([5, 1]))
    workflow = RLVRWorkflow(None, GenerationConfig(max_tokens=5, enable_thinking=thinking), tokenizer, template_kwargs={"extra": "9"})
    await generate(workflow, engine, 1, prompt=Prompt(content=(Message(role="user", content="hi"),), index=1))
    assert list(engine.calls[0].arguments["prompt_tokens"]) == list(TOKENIZER("79" if thinking else "89")["input_ids"])


async def test_remax_asks_for_the_sampled_and_the_greedy_answer_at_once(autojump_clock):
    engine = FakeEngine(seconds_per_token=1.0)
    groups = []
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            groups.append(await generate(ReMaxWorkflow(count_ones, PARAMS, TOKENIZER, reward=NO_DEADLINE), engine, 1, num_baseline=1))

        nursery.start_soon(run)
        await trio.sleep(0.5)
        assert len(set(engine.pending_requests)) == 2
    sampled, greedy = groups[0]
    assert [call.arguments["params"].greedy for call in engine.calls] in ([False, True], [True, False])
    assert (sampled.trainable, greedy.trainable) == (True, False)
    assert greedy.reward is not None


async def test_the_difference_of_rewards_is_the_advantage_of_all_tokens():
    answers = iter([[4, 4, 1], [5, 1]])
    engine = FakeEngine(lambda prompt, seed: next(answers))
    config = RolloutConfig(
        batch_size=1,
        n_baseline_samples=1,
        generate_fn=create_workflow_generate_fn(
            ReMaxWorkflow(lambda p, c, p_ids, c_ids, **data: len(c_ids), PARAMS, TOKENIZER), [engine], num_baseline=1
        ),
    )
    batch = await AsyncRolloutManager(DataBuffer([PROMPT]), config, engines=[engine]).generate_batch()
    sampled, greedy = batch.samples
    advantages = remax().estimate(collate_samples(batch.samples)).advantages
    assert advantages is not None
    difference = (sampled.reward or 0.0) - (greedy.reward or 0.0)
    assert abs(difference) == 1.0
    assert advantages[0].tolist() == [difference * (mask > 0) for mask in sampled.loss_mask] + [0.0] * (
        advantages.shape[1] - len(sampled.tokens)
    )


# reward signatures


async def test_a_reward_function_gets_texts_tokens_and_the_data_of_its_prompt():
    seen = []

    def reward(prompt, completions, prompt_ids, completion_ids, **data):
        seen.append((prompt, completions, prompt_ids, completion_ids, data))
        return 0.5

    prompt_tokens = tuple(TOKENIZER("2 1 >")["input_ids"])
    sample = Sample(
        tokens=(*prompt_tokens, 5, 6, 7),
        loss_mask=(0.0,) * len(prompt_tokens) + (1.0, 0.0, 1.0),
        response="xyz",
        metadata={"answer": "12", "prompt": "hidden by the argument"},
    )
    assert adapt_reward_fn(reward, TOKENIZER)(sample) == 0.5
    decorated = reward_function(lambda messages: 0.25)
    assert adapt_reward_fn(decorated, TOKENIZER)(sample).score == 0.25
    assert seen == [("2 1 >", "xyz", list(prompt_tokens), [5, 6, 7], {"answer": "12"})]

    async def named(prompt, completions, prompt_ids, completion_ids, answer):
        return len(answer)

    more = replace(sample, metadata={"answer": "12", "level": 3})
    assert await adapt_reward_fn(named, TOKENIZER)(more) == 2


async def test_an_image_in_a_prompt_is_refused_by_name():
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file.png"}}]}
    with pytest.raises(DataError, match="image_url"):
        await RLVRWorkflow(count_ones, PARAMS, TOKENIZER).arun_episode(FakeEngine(), {"messages": [message]})
