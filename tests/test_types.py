"""The values: frozen, checked on construction, lossless through JSON."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.types import Completion, Message, Prompt, RolloutBatch, Sample, SamplingParams, Status, TrainBatch, Turn, Turns

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
    assert (greedy.temperature, greedy.greedy, greedy.top_p, greedy.max_tokens) == (0.0, True, 0.9, 5)
    assert (params.temperature, params.max_tokens) == (0.7, 256)
    assert greedy.new(greedy=False).temperature == 1.0
    with pytest.raises(AssertionError, match="either"):
        params.new(greedy=True, temperature=1.0)


def make_train_batch(**changes) -> TrainBatch:
    values = {
        "tokens": torch.zeros(2, 3, dtype=torch.int64),
        "lengths": torch.tensor([3, 2]),
        "loss_mask": torch.ones(2, 3),
        "rewards": torch.zeros(2),
        "group_ids": torch.zeros(2, dtype=torch.int64),
        "trainable": torch.ones(2, dtype=torch.bool),
    }
    return TrainBatch(**(values | changes))


PER_ROW = {"lengths", "rewards", "group_ids", "trainable", "temperatures", "kl_coef", "policy_versions"}


@pytest.mark.parametrize("name", [f.name for f in fields(TrainBatch) if f.name not in ("tokens", "turns")])
def test_columns_of_the_wrong_shape_are_refused_by_name(name):
    assert make_train_batch().num_rows == 2
    right, wrong = ((2,), (3,)) if name in PER_ROW else ((2, 3), (2, 2))
    make_train_batch(**{name: torch.ones(right)})
    with pytest.raises(AssertionError, match=rf"{name} has shape \({wrong[0]},.*expected"):
        make_train_batch(**{name: torch.ones(wrong)})


def test_tokens_and_turns_of_the_wrong_shape_are_refused():
    with pytest.raises(AssertionError, match="tokens"):
        make_train_batch(tokens=torch.zeros(3, dtype=torch.int64))
    ids, states, rewards = torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 4)
    make_train_batch(turns=Turns(ids=ids, states=states, rewards=rewards))
    with pytest.raises(AssertionError, match="turns_rewards"):
        make_train_batch(turns=Turns(ids=ids, states=states, rewards=rewards[:, :3]))
