"""Steps of an episode as values: lossless through JSON, refused where they contradict themselves, and their return is their sum."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.steps import StepData, Trajectory
from rollouts.types import Message

TEXT = st.text(max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
NUMBERS = st.none() | st.floats(-9, 9)


@st.composite
def steps(draw) -> StepData:
    tokens = draw(st.none() | st.lists(st.integers(0, 63), max_size=4).map(tuple))
    log_probs = (
        None if tokens is None else draw(st.none() | st.lists(st.floats(-9, 0), min_size=len(tokens), max_size=len(tokens)).map(tuple))
    )
    return StepData(
        system_step_index=draw(st.integers(0, 9)),
        observation_data=draw(VALUES),
        action_taken=draw(VALUES),
        raw_policy_output=draw(TEXT),
        resulting_messages_history=draw(st.lists(st.builds(Message, role=TEXT, content=st.none() | TEXT), max_size=2).map(tuple)),
        policy_tokens=tokens,
        policy_logprobs=log_probs,
        policy_value_estimate=draw(NUMBERS),
        is_done=draw(st.booleans()),
        step_info=draw(st.dictionaries(TEXT, VALUES, max_size=2)),
        base_reward=draw(NUMBERS),
        return_to_go=draw(NUMBERS),
        advantage=draw(NUMBERS),
        sample_index=draw(st.integers(0, 9)),
        group_index=draw(st.integers(0, 9)),
    )


@given(steps())
def test_step_round_trip_through_json(step):
    data = json.loads(json.dumps(step.to_dict()))
    assert set(data) == {f.name for f in fields(StepData)}
    assert StepData.from_dict(data) == step
    assert StepData.from_dict(step.to_dict()) == step


def test_a_step_needs_its_number_only():
    step = StepData(system_step_index=0)
    assert (step.base_reward, step.advantage, step.return_to_go) == (None, None, None)
    assert StepData.from_dict({"system_step_index": 0}) == step
    with pytest.raises(FrozenInstanceError):
        step.advantage = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"system_step_index": -1}, "system_step_index is -1"),
        ({"policy_logprobs": (-1.0,)}, "no policy_tokens"),
        ({"policy_tokens": (3, 4), "policy_logprobs": (-1.0,)}, "1 policy_logprobs for 2 tokens"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(AssertionError, match=message):
        StepData(**({"system_step_index": 0} | changes))


def test_the_sum_of_a_trajectory_is_its_return():
    episode = tuple(
        StepData(system_step_index=k, observation_data={"at": k}, action_taken="right", base_reward=reward, is_done=k == 2)
        for k, reward in enumerate((0.25, None, 1.0))
    )
    trajectory = Trajectory.from_steps(episode)
    assert trajectory.states == ({"at": 0}, {"at": 1}, {"at": 2})
    assert trajectory.actions == ("right",) * 3
    assert trajectory.dones == (False, False, True)
    assert sum(trajectory.rewards) == 1.25
    assert Trajectory.from_steps(()) == Trajectory(states=(), actions=(), rewards=(), dones=())


def test_columns_of_different_length_are_no_trajectory():
    with pytest.raises(AssertionError, match="'rewards': 1"):
        Trajectory(states=(1, 2), actions=(1, 2), rewards=(0.0,), dones=(False, True))
