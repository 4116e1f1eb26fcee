"""Reward functions as people write them for TRL and verl."""

from __future__ import annotations

import gc
import re
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from integration.parts.rewards import load_task_reward
from integration.settings.sections.generation import RewardSection
from rollouts.config import RewardConfig
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.evaluate import score_group
from rollouts.rewards.other_frameworks import adapt_reward
from rollouts.rewards.reward_functions import reward_function
from rollouts.types import Message, Sample, Status


def make_group(*responses: str, prompt: Any = "2+2=", **metadata: Any) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            prompt=prompt,
            response=response,
            tokens=(5, 6, 7, 8),
            loss_mask=(0.0, 0.0, 1.0, 1.0),
            status=Status.COMPLETED,
            index=k,
            metadata={name: value[k] if isinstance(value, list) else value for name, value in metadata.items()},
        )
        for k, response in enumerate(responses)
    )


async def score(function: Any, group: tuple[Sample, ...], config: RewardConfig | None = None) -> list[float | None]:
    scored = await score_group(group, adapt_reward(function), config)
    assert scored is not None
    return [sample.reward for sample in scored]


def is_right(completions, answer, **kwargs):
    return [1.0 if truth in completion else 0.0 for completion, truth in zip(completions, answer, strict=True)]


async def test_a_function_of_trl_gets_lists_of_its_columns():
    assert await score(is_right, make_group("4", "it is 5", "it is 7", answer=["4", "4", "7"])) == [1.0, 0.0, 1.0]


async def test_it_is_called_once_with_all_that_trl_gives():
    calls: list[dict[str, Any]] = []

    def record(**kwargs):
        calls.append(kwargs)
        return [0] * len(kwargs["completions"])

    def named(prompts, completions, completion_ids, **kwargs):
        return record(prompts=prompts, completions=completions, completion_ids=completion_ids, **kwargs)

    assert await score(named, make_group("a", "b", level=[1, 2])) == [0.0, 0.0]
    assert calls == [{"prompts": ["2+2="] * 2, "completions": ["a", "b"], "completion_ids": [[7, 8], [7, 8]], "level": [1, 2]}]


async def test_a_conversation_is_messages_as_in_trl():
    def format_reward(completions, **kwargs):
        matches = [re.match(r"^<think>.*?</think>", completion[0]["content"]) for completion in completions]
        return [1.0 if match else 0.0 for match in matches]

    def asks(prompts, completions):
        return [float(prompt[-1]["role"] == "user" and "2+2" in prompt[-1]["content"]) for prompt in prompts]

    prompt = (Message(role="system", content="Think."), Message(role="user", content="2+2="))
    group = make_group("<think>so</think>4", "4", prompt=prompt)
    assert await score(format_reward, group) == [1.0, 0.0]
    assert await score(asks, group) == [1.0, 1.0]


async def test_an_episode_is_the_messages_behind_its_prompt():
    def count(completions):
        return [len(messages) + (messages[-1]["content"] == "4") for messages in completions]

    said = (*(Message(role=role, content="?") for role in ("user", "assistant", "tool")), Message(role="assistant", content="4"))
    sample = Sample(prompt="?", response="4", status=Status.COMPLETED, messages=said)
    assert await score(count, (sample,)) == [4.0]


@pytest.mark.parametrize("convert", [torch.tensor, tuple])
async def test_results_may_be_tensors_and_tuples(convert: Any):
    assert await score(lambda completions: convert([0.5, 1.0]), make_group("a", "b")) == [0.5, 1.0]


async def test_an_async_function_is_awaited():
    async def slow(completions, **kwargs):
        await trio.lowlevel.checkpoint()
        return [float(len(completion)) for completion in completions]

    assert await score(slow, make_group("a", "bcd")) == [1.0, 3.0]


async def _wait(completions, **columns):
    await trio.sleep(0)
    return [1.0 for _ in completions]


def of_a_group(completions, **columns):
    """A plain function as those of TRL: it takes too long, and then returns a coroutine."""
    time.sleep(0.05)
    return _wait(completions)


def of_one_sample(sample: Sample):
    return of_a_group([sample.response])


@pytest.mark.filterwarnings("default:coroutine")
@pytest.mark.parametrize("function", [of_a_group, of_one_sample])
async def test_a_coroutine_that_comes_after_the_deadline_is_closed(function: Any, recwarn: pytest.WarningsRecorder):
    with pytest.raises(RewardError, match=r"did not return within 0\.01 s"):
        await score(function, make_group("4", "5"), RewardConfig(timeout_s=0.01))
    await trio.sleep(0.3)  # the threads return
    gc.collect()
    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)] == []


async def test_a_generator_based_coroutine_is_awaited_as_others_are():
    @types.coroutine
    def wait(values):
        yield from trio.sleep(0).__await__()
        return values

    def of_trl(completions, **kwargs):
        return wait([float(len(text)) for text in completions])

    def of_a_sample(sample):
        return wait(2.0)

    assert await score(of_trl, make_group("4", "55")) == [1.0, 2.0]
    assert await score(of_a_sample, make_group("4", "55")) == [2.0, 2.0]


async def test_none_is_no_judgement_and_never_a_zero():
    def some(completions):
        return [None, 1.0]

    with pytest.raises(RewardError, match="returned None, which says that it does not judge this sample"):
        await score(some, make_group("a", "b"))
    assert await score(some, make_group("a", "b"), RewardConfig(on_error="zero")) == [0.0, 1.0]


async def test_a_column_that_is_not_there_is_named():
    with pytest.raises(RewardError, match=r"is_right needs \['answer'\], but the row of .* has .*'solution'"):
        await score(is_right, make_group("a", solution="4"))


async def test_another_number_of_results_is_an_error_of_the_group():
    with pytest.raises(RewardError, match="returned 1 results for 2 samples"):
        await score(lambda completions: [1.0], make_group("a", "b"))


def test_a_function_that_needs_the_trainer_is_refused():
    def curriculum(completions, trainer_state):
        return [trainer_state.global_step] * len(completions)

    with pytest.raises(ConfigError, match="curriculum needs trainer_state of TRL's trainer"):
        adapt_reward(curriculum)


def test_a_class_and_a_function_without_arguments_are_refused_before_a_run():
    class Judge:
        def __call__(self, sample):
            return 1.0

    def constant():
        return 1.0

    with pytest.raises(ConfigError, match=r"reward function Judge is a class: name a function, or an object of the class"):
        adapt_reward(Judge)
    assert adapt_reward(judge := Judge()) is judge
    with pytest.raises(ConfigError, match=r"constant takes no arguments, expected one, a Sample: write def constant\(sample\)"):
        adapt_reward(constant)


def test_a_function_of_areal_is_not_taken_for_one_of_trl():
    def areal(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
        return float(answer in completions)

    with pytest.raises(ConfigError, match="areal has the parameters of AReaL, whose completions is one text: in code, adapt_reward_fn"):
        adapt_reward(areal)


async def test_a_function_of_verl_gets_one_answer():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth), "length": len(solution_str), "pred": solution_str, "source": data_source}

    group = make_group("4", "55", ground_truth="4", data_source="sums")
    scored = await score_group(group, adapt_reward(compute_score))
    assert scored is not None
    assert [sample.reward for sample in scored] == [1.0, 0.0]
    details = scored[1].reward_details
    assert details is not None and {name: metric.score for name, metric in details.metrics.items()} == {"length": 2.0}


async def test_a_function_of_verl_without_its_truth_or_its_score_is_an_error():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"acc": 1.0}

    with pytest.raises(RewardError, match=r"compute_score needs \['ground_truth'\]"):
        await score(compute_score, make_group("4"))
    with pytest.raises(RewardError, match=r"returned a dict without 'score' for .*: it has \['acc'\]"):
        await score(compute_score, make_group("4", ground_truth="4"))


def test_a_missing_decorator_is_explained():
    def judge(messages, ground_truth):
        return 1.0

    with pytest.raises(
        ConfigError, match=r"judge takes messages, ground_truth, expected one argument, a Sample.*put the decorator @reward_function"
    ):
        adapt_reward(judge)


def test_other_rewards_stay_as_they_are():
    def of_a_sample(sample, bonus=0.0):
        return bonus

    decorated = reward_function(lambda messages: 1.0)
    assert adapt_reward(of_a_sample) is of_a_sample and adapt_reward(decorated) is decorated


def test_the_command_loads_them_from_a_file(tmp_path: Path):
    (tmp_path / "own.py").write_text("def reward_len(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n")
    loaded = load_task_reward(RewardSection(function=f"{tmp_path / 'own.py'}:reward_len"))
    (result,) = loaded.score_samples(make_group("four"))
    assert (result.score, loaded.reward_name) == (4.0, "reward_len")
