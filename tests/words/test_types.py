"""The values: frozen, checked on construction, lossless through JSON."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import make_batch

from rollouts.config import GenerationConfig, OptimizerConfig, RLTrainingConfig, RolloutConfig, SFTTrainingConfig
from rollouts.engines.launch.commands import ServerConfig
from rollouts.errors import ConfigError, DataError
from rollouts.steps import StepData, Trajectory
from rollouts.types import (
    Completion,
    KeptSets,
    Message,
    Prompt,
    RewardComponents,
    RolloutBatch,
    Sample,
    SamplingParams,
    Status,
    TrainBatch,
    Turn,
    Turns,
)

TEXT = st.text(max_size=8)
CALLS = st.lists(st.fixed_dictionaries({"id": TEXT, "function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT})}), max_size=2)
MESSAGES = st.builds(
    Message,
    role=TEXT,
    content=st.none() | TEXT,
    name=st.none() | TEXT,
    tool_call_id=st.none() | TEXT,
    tool_calls=st.none() | CALLS.map(tuple),
)
METADATA = st.dictionaries(TEXT, st.none() | st.integers() | TEXT | st.lists(st.booleans()), max_size=3)
CONTENTS = TEXT | st.lists(MESSAGES, min_size=1, max_size=3).map(tuple)


@st.composite
def turns(draw, num_tokens: int) -> tuple[Turn, ...]:
    cuts = sorted(draw(st.sets(st.integers(0, num_tokens), max_size=4)))
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    return tuple(Turn(start=a, end=b, state=draw(st.none() | TEXT), reward=draw(st.floats(-9, 9))) for a, b in pairs)


@st.composite
def samples(draw) -> Sample:
    n = draw(st.integers(0, 5))

    def column(values):
        return st.lists(values, min_size=n, max_size=n).map(tuple)

    return Sample(
        prompt=draw(CONTENTS),
        tokens=draw(column(st.integers(0, 99))),
        loss_mask=draw(column(st.sampled_from([0.0, 0.5, 1.0]))),
        rollout_log_probs=draw(st.none() | column(st.floats(-9, 0))),
        weight_versions=draw(st.none() | column(st.integers(-1, 9))),
        response=draw(TEXT),
        reward=draw(st.none() | st.floats(-9, 9)),
        status=draw(st.sampled_from(Status)),
        index=draw(st.integers(0, 99)),
        group_index=draw(st.integers(0, 99)),
        temperature=draw(st.floats(0.1, 2)),
        turns=draw(st.none() | turns(n)),
        context_starts=tuple(sorted(draw(st.sets(st.integers(1, n - 1), max_size=2)))) if n > 1 else (),
        metadata=draw(METADATA),
    )


@given(samples())
def test_sample_round_trip_through_json(sample):
    data = json.loads(json.dumps(sample.to_dict()))
    before = deepcopy(data)
    assert Sample.from_dict(data) == sample
    assert data == before, "from_dict must not change its argument"
    assert Sample.from_dict(sample.to_dict()) == sample
    assert Sample.from_dict({}) == Sample()


@given(st.builds(Prompt, content=CONTENTS, index=st.integers(0, 99), metadata=METADATA))
def test_prompt_round_trip_through_json(prompt):
    assert Prompt.from_dict(json.loads(json.dumps(prompt.to_dict()))) == prompt


@given(MESSAGES)
def test_message_round_trip_through_json(message):
    assert Message.from_dict(json.loads(json.dumps(message.to_dict()))) == message


def test_message_with_unknown_keys_is_refused():
    with pytest.raises(AssertionError, match="weight"):
        Message.from_dict({"role": "user", "content": "x", "weight": 1})


def test_values_are_frozen():
    for value, name in (
        (Sample(), "reward"),
        (Prompt(content=""), "index"),
        (SamplingParams(), "top_p"),
        (RolloutBatch(samples=()), "samples"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": (1.0,)}, "loss_mask has 1 entries for 2 tokens"),
        ({"loss_mask": (1.0, -1.0)}, "negative"),
        ({"loss_mask": (1.0, math.nan)}, "NaN"),
        ({"rollout_log_probs": (0.0,)}, "rollout_log_probs has 1 entries"),
        ({"weight_versions": (0, 0, 0)}, "weight_versions has 3 entries"),
        ({"temperature": 0.0}, "temperature"),
        ({"turns": (Turn(start=1, end=3),)}, "does not lie behind the turn before it, inside the 2 tokens"),
        ({"turns": (Turn(start=1, end=1),)}, "does not lie behind"),
        ({"turns": (Turn(start=0, end=2), Turn(start=1, end=2))}, "does not lie behind"),
        ({"context_starts": (0,)}, "context_starts"),
        ({"context_starts": (2,)}, "context_starts"),
        ({"context_starts": (1, 1)}, "context_starts"),
    ],
)
def test_inconsistent_samples_are_refused_by_name(changes, message):
    values = {"tokens": (1, 2), "loss_mask": (0.0, 1.0), "index": 7, "group_index": 3}
    with pytest.raises(AssertionError, match=rf"sample 7 \(group 3\).*{message}"):
        Sample(**(values | changes))


def test_rollout_batch_reads_its_samples():
    batch = RolloutBatch(
        samples=(
            Sample(tokens=(1, 2, 3), loss_mask=(0.0, 0.5, 1.0), reward=2.0),
            Sample(tokens=(4,), loss_mask=(0.0,)),
        )
    )
    assert batch.tokens == [[1, 2, 3], [4]]
    assert batch.loss_masks == [[0.0, 0.5, 1.0], [0.0]]
    assert batch.response_lengths == [2, 0]
    assert batch.rewards[0] == 2.0
    assert math.isnan(batch.rewards[1])


def test_completion_lengths():
    completion = Completion(
        request_id="r", input_tokens=(1, 2), output_tokens=(3,), output_log_probs=(-1.0,), output_versions=(0,), finish_reason="stop"
    )
    assert (completion.input_len, completion.output_len) == (2, 1)
    for name in ("output_log_probs", "output_versions", "untempered_log_probs"):
        with pytest.raises(AssertionError, match=name):
            replace(completion, **{name: (0, 0)})


def test_sampling_params_derivation():
    params = SamplingParams(temperature=0.7, top_p=0.9)
    greedy = params.new(greedy=True, max_tokens=5)
    assert (greedy.temperature, greedy.greedy, greedy.top_p, greedy.max_tokens) == (0.0, True, 1.0, 5)
    assert (params.temperature, params.max_tokens) == (0.7, 256)
    assert greedy.new(greedy=False).temperature == 1.0
    with pytest.raises(AssertionError, match="either"):
        params.new(greedy=True, temperature=1.0)


PER_ROW = {"lengths", "rewards", "group_ids", "trainable", "temperatures", "kl_coef", "router_balance", "policy_versions", "recorded",
           "teacher_beta", "pair_ids"}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        f.name
        for f in fields(TrainBatch)
        if f.name
        not in (
            "tokens",
            "turns",
            "reward_components",
            "dropout",
            "skip_redundant",
            "routed_experts",
            "kept",
            "teacher_ids",
            "teacher_tops",
        )
    ],
)
def test_columns_of_the_wrong_shape_are_refused_by_name(name):
    assert make_batch(torch.ones(2, 3)).num_rows == 2
    right, wrong = ((2,), (3,)) if name in PER_ROW else ((2, 3), (2, 2))
    make_batch(torch.ones(2, 3), **{name: torch.ones(right)})
    with pytest.raises(AssertionError, match=rf"{name} has shape \({wrong[0]},.*expected"):
        make_batch(torch.ones(2, 3), **{name: torch.ones(wrong)})


def test_tokens_of_a_teacher_of_the_wrong_shape_are_refused():
    ids = torch.zeros(2, 3, 4, dtype=torch.int32)
    make_batch(torch.ones(2, 3), teacher_ids=ids, teacher_tops=torch.zeros(2, 3, 5))
    with pytest.raises(AssertionError, match="teacher_tops has shape"):
        make_batch(torch.ones(2, 3), teacher_ids=ids, teacher_tops=torch.zeros(2, 3, 4))


def test_kept_sets_of_the_wrong_shape_are_refused():
    sets = KeptSets(ids=torch.zeros(0, dtype=torch.int32), starts=torch.zeros(2, 3), counts=torch.zeros(2, 3))
    make_batch(torch.ones(2, 3), kept=sets)
    with pytest.raises(AssertionError, match=r"kept_counts has shape \(2, 2\)"):
        make_batch(torch.ones(2, 3), kept=replace(sets, counts=torch.zeros(2, 2)))


def test_reward_components_of_the_wrong_shape_are_refused():
    make_batch(torch.ones(2, 3), reward_components=RewardComponents(names=("a",), scores=torch.zeros(2, 1)))
    with pytest.raises(AssertionError, match=r"reward_components has shape \(2, 3\)"):
        make_batch(torch.ones(2, 3), reward_components=RewardComponents(names=("a", "b"), scores=torch.zeros(2, 3)))


def test_tokens_and_turns_of_the_wrong_shape_are_refused():
    with pytest.raises(AssertionError, match="tokens"):
        make_batch(torch.ones(2, 3), tokens=torch.zeros(3, dtype=torch.int64))
    ids, states, rewards = torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 4)
    make_batch(torch.ones(2, 3), turns=Turns(ids=ids, states=states, rewards=rewards))
    with pytest.raises(AssertionError, match="turns_rewards"):
        make_batch(torch.ones(2, 3), turns=Turns(ids=ids, states=states, rewards=rewards[:, :3]))


# -- what a user constructs: converted, or refused with the value

ROW: dict[str, Any] = {"tokens": (5, 6), "loss_mask": (0.0, 1.0)}
USER = [{"role": "user", "content": "hi"}]


def test_messages_may_be_dicts_and_lists():
    messages = (Message(role="user", content="hi"),)
    for content in (USER, tuple(USER), messages, list(messages)):
        assert Prompt(content=content).content == Sample(prompt=content).prompt == messages
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    (message,) = Prompt(content=[{"role": "assistant", "tool_calls": [call]}]).content
    assert message.tool_calls == (call,)
    step = StepData(system_step_index=0, resulting_messages_history=USER, policy_tokens=[3], policy_logprobs=np.array([-0.5]))
    assert (step.resulting_messages_history, step.policy_tokens, step.policy_logprobs) == (messages, (3,), (-0.5,))


def test_columns_of_arrays_tensors_and_lists_become_tuples_of_plain_numbers():
    plain = Sample(**ROW, rollout_log_probs=(0.0, -1.5), weight_versions=(-1, 3), reward=1.0, index=4)
    for column in (list, np.array, torch.tensor):
        log_probs, versions = column([0.0, -1.5]), column([-1, 3])
        sample = Sample(
            tokens=column([5, 6]), loss_mask=column([0.0, 1.0]), rollout_log_probs=log_probs, weight_versions=versions,
            reward=torch.tensor(1.0), index=np.int64(4),
        )  # fmt: skip
        assert sample == plain and json.loads(json.dumps(sample.to_dict())) == plain.to_dict()
    items = Sample(tokens=(np.int64(5), torch.tensor(6)), loss_mask=(False, True), reward=np.bool_(True).item())
    assert items.to_dict() == Sample(**ROW, reward=1.0).to_dict()
    assert {type(x) for x in (*items.tokens, *items.loss_mask, items.reward)} == {int, float}


def test_nothing_in_a_value_changes_with_the_list_that_it_was_made_of():
    tokens, stop = [5, 6], ["END"]
    sample, params = Sample(tokens=tokens, loss_mask=[0.0, 1.0]), SamplingParams(stop=stop)
    tokens.append(7), stop.append("x")
    assert (sample.tokens, params.stop) == ((5, 6), ("END",))


@pytest.mark.parametrize(
    ("create", "arguments", "said"),
    [
        (Message, {"role": 3}, "Message.role is 3 .int., expected a text"),
        (Message, {"role": "user", "content": [{"type": "text"}]}, "Message.content"),
        (Message, {"role": "user", "tool_calls": "f()"}, "Message.tool_calls is 'f..'"),
        (Message, {"role": "user", "tool_calls": ["f()"]}, "Message.tool_calls holds 'f..'"),
        (Prompt, {"content": 7}, "Prompt.content is 7"),
        (Prompt, {"content": USER[0]}, "Prompt.content is .'role'"),  # one message, not a list of them
        (Prompt, {"content": [{"content": "hi"}]}, "with a role"),
        (Prompt, {"content": [{"role": "user", "txt": "hi"}]}, "no other keys than"),
        (Prompt, {"content": ["hi"]}, "Prompt.content holds 'hi'"),
        (Prompt, {"content": "x", "index": 1.5}, "Prompt.index is 1.5"),
        (Prompt, {"content": "x", "index": True}, "Prompt.index is True"),
        (Prompt, {"content": "x", "metadata": ["y"]}, "Prompt.metadata"),
        (Sample, {**ROW, "prompt": [1, 2]}, "Sample.prompt holds 1"),
        (Sample, {**ROW, "tokens": "ab"}, "Sample.tokens is 'ab'"),
        (Sample, {**ROW, "tokens": (5, 6.5)}, "Sample.tokens is 6.5"),
        (Sample, {**ROW, "tokens": (5, True)}, "Sample.tokens is True"),
        (Sample, {**ROW, "loss_mask": (0.0, "1")}, "Sample.loss_mask is '1'"),
        (Sample, {**ROW, "rollout_log_probs": (0.0, math.nan)}, "Sample.rollout_log_probs holds nan"),
        (Sample, {**ROW, "rollout_log_probs": (0.0, -math.inf)}, "Sample.rollout_log_probs holds -inf"),
        (Sample, {**ROW, "weight_versions": (-1, 0.5)}, "Sample.weight_versions is 0.5"),
        (Sample, {**ROW, "reward": "1"}, "Sample.reward is '1'"),
        (Sample, {**ROW, "reward": torch.zeros(2)}, "Sample.reward"),
        (Sample, {**ROW, "status": "done"}, "Sample.status is 'done', expected one of pending"),
        (Sample, {**ROW, "turns": [{"start": 0, "end": 1}]}, "Sample.turns holds"),
        (Sample, {**ROW, "response": None}, "Sample.response is None"),
        (Sample, {**ROW, "metadata": None}, "Sample.metadata is None"),
        (Turn, {"start": 0.0, "end": 1}, "Turn.start is 0.0"),
        (Turn, {"start": 0, "end": 1, "reward": "1"}, "Turn.reward is '1'"),
        (Turn, {"start": 0, "end": 1, "state": ["a"]}, r"Turn.state is \['a'\]"),
        (Sample, {**ROW, "temperature": "1"}, "Sample.temperature is '1'"),
        (Sample, {**ROW, "temperature": math.inf}, "Sample.temperature is inf"),
        (SamplingParams, {"stop": "END"}, "SamplingParams.stop is 'END', expected a tuple"),
        (SamplingParams, {"stop": (3,)}, "SamplingParams.stop is 3"),
        (SamplingParams, {"stop_token_ids": 2}, "SamplingParams.stop_token_ids is 2"),
        (SamplingParams, {"max_tokens": 1.5}, "SamplingParams.max_tokens is 1.5"),
        (SamplingParams, {"max_tokens": True}, "SamplingParams.max_tokens is True"),
        (SamplingParams, {"temperature": math.nan}, "SamplingParams.temperature is nan"),
        (SamplingParams, {"top_p": "0.9"}, "SamplingParams.top_p is '0.9'"),
        (SamplingParams, {"seed": 0.5}, "SamplingParams.seed is 0.5"),
        (StepData, {"system_step_index": "0"}, "StepData.system_step_index"),
        (StepData, {"system_step_index": 0, "policy_tokens": "ab"}, "StepData.policy_tokens is 'ab'"),
        (StepData, {"system_step_index": 0, "base_reward": "1"}, "StepData.base_reward is '1'"),
        (StepData, {"system_step_index": 0, "resulting_messages_history": ["hi"]}, "resulting_messages_history holds 'hi'"),
        (Trajectory, {"states": "s", "actions": ("a",), "rewards": (1.0,), "dones": (True,)}, "Trajectory.states is 's'"),
        (Trajectory, {"states": ("s",), "actions": ("a",), "rewards": ("1",), "dones": (True,)}, "Trajectory.rewards is '1'"),
        (GenerationConfig, {"stop": "END"}, "stop is 'END'"),
        (GenerationConfig, {"greedy": "False"}, "GenerationConfig.greedy is 'False'"),
        (RLTrainingConfig, {"seed": 0.5}, "RLTrainingConfig.seed is 0.5"),
        (RLTrainingConfig, {"mask_truncated": "False"}, "RLTrainingConfig.mask_truncated is 'False'"),
        (RLTrainingConfig, {"probe_tokens": "8"}, "RLTrainingConfig.probe_tokens is '8'"),
        (SFTTrainingConfig, {"seed": None}, "SFTTrainingConfig.seed is None"),
        (RolloutConfig, {"batch_size": 1, "segment_log_probs": 1}, "RolloutConfig.segment_log_probs is 1"),
        (OptimizerConfig, {"betas": 0.9}, "OptimizerConfig.betas is 0.9"),
        (OptimizerConfig, {"betas": [0.9]}, r"OptimizerConfig.betas is \[0.9\]"),
        (partial(ServerConfig, "vllm", "m", "python"), {"tensor_parallel_size": None}, "tensor_parallel_size is None"),
        (partial(ServerConfig, "vllm", "m", "python"), {"tensor_parallel_size": True}, "tensor_parallel_size is True"),
        (partial(ServerConfig, "vllm", "m", "python"), {"port": "80"}, "port is '80'"),
        (partial(ServerConfig, "vllm", "m", "python"), {"extra_args": "--x"}, "extra_args is '--x'"),
        (partial(ServerConfig, "vllm", "m", "python"), {"memory_fraction": "0.5"}, "memory_fraction is '0.5'"),
    ],
)  # fmt: skip
def test_what_a_field_does_not_mean_is_refused_with_the_value(create: Any, arguments: dict[str, Any], said: str):
    with pytest.raises((DataError, ConfigError), match=said):
        create(**arguments)
