"""Rewards by rule, of trajectories, and of what the environment paid."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from rollouts.errors import ConfigError, RewardError
from rollouts.outcomes import EpisodeOutcome, StopReason
from rollouts.rewards.answers import (
    RelativeLengthReward,
    compute_reward,
    create_format_reward,
    create_length_penalty,
    create_numeric_reward,
    exact_match,
    gsm8k_reward,
)
from rollouts.rewards.evaluate import score_group, score_now
from rollouts.rewards.trajectory_rewards import adapt_trajectory_reward, environment_reward, sample_trajectory
from rollouts.steps import Trajectory
from rollouts.types import Message, Sample, Status, Turn


def answer(response: str, truth: Any = None, length: int = 3) -> Sample:
    metadata = {} if truth is None else {"ground_truth": truth}
    return Sample(
        tokens=(1,) * (length + 2), loss_mask=(0.0, 0.0, *(1.0,) * length), response=response, status=Status.COMPLETED, metadata=metadata
    )


NUMBERS = [
    ("the answer is 0.3333334", "0.33333333", 1.0),
    ("0.34", 1 / 3, 0.0),
    ("#### 1,234.50", "1234.5", 1.0),
    ("it is 5", "#### 5", 1.0),
    ("no number", "5", 0.0),
    ("-2", "2", 0.0),
    ("\N{MINUS SIGN}2", -2, 1.0),
    ("1e", "1", 1.0),
]


@pytest.mark.parametrize(("response", "truth", "expected"), NUMBERS)
def test_numbers_are_compared_up_to_a_tolerance(response, truth, expected):
    assert create_numeric_reward()(answer(response, truth)) == expected


def test_tolerances_are_what_they_say():
    assert create_numeric_reward(abs_tol=0.1)(answer("3.2", "3.14")) == 1.0
    assert create_numeric_reward(rel_tol=0.001)(answer("3.2", "3.14")) == 0.0
    with pytest.raises(ConfigError, match="rel_tol is nan"):
        create_numeric_reward(rel_tol=math.nan)
    with pytest.raises(RewardError, match=r"the ground truth of sample 0 .* has no number: 'x'"):
        create_numeric_reward()(answer("1", "x"))
    with pytest.raises(RewardError, match=r"no metadata\['ground_truth'\]"):
        create_numeric_reward()(answer("1"))


def test_form_is_a_regular_expression_of_the_whole_response():
    reward = create_format_reward(r"<think>.+</think>\s*<answer>\d+</answer>")
    assert reward(answer("<think>2\n+2</think>\n<answer>4</answer>\n")) == 1.0
    assert reward(answer("so <think>2</think><answer>4</answer>")) == 0.0
    with pytest.raises(ConfigError, match="not a regular expression"):
        create_format_reward("(")


def test_length_costs_beyond_what_is_free():
    penalty = create_length_penalty(free_tokens=3, per_token=0.5, most=1.5)
    assert [penalty(answer("", length=n)) for n in (1, 3, 4, 5, 100)] == [0.0, 0.0, -0.5, -1.0, -1.5]
    for wrong in ({"free_tokens": -1}, {"per_token": math.inf}, {"most": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            create_length_penalty(**{"free_tokens": 3, "per_token": 0.5, **wrong})


async def test_short_right_answers_come_before_long_ones():
    group = tuple(replace(answer(r, "4", length=n), index=k) for k, (r, n) in enumerate([("4", 2), ("4", 4), ("5", 2), ("5", 6)]))
    scored = await score_group(group, RelativeLengthReward(exact_match))
    assert scored is not None and [sample.reward for sample in scored] == [0.5, 0.0, 0.0, -0.5]
    assert [sample.reward for sample in score_now(group[:1], RelativeLengthReward(exact_match))] == [0.0]


def make_episode() -> Sample:
    messages = [
        Message(role="system", content="s"),
        Message(role="user", content="example"),
        Message(role="assistant", content="shown"),
        Message(role="user", content="go"),
        Message(role="assistant", content="left"),
        Message(role="user", content="wall"),
        Message(role="assistant", content="right"),
        Message(role="user", content="goal"),
    ]
    turns = (Turn(start=1, end=2, reward=-0.1), Turn(start=3, end=4, reward=1.0))
    truth = {"ground_truth": "right"}
    return Sample(tokens=(1,) * 5, loss_mask=(1.0,) * 5, turns=turns, messages=messages, metadata=truth, response="right")


def test_an_episode_as_a_trajectory():
    trajectory = sample_trajectory(make_episode())
    assert trajectory.states == ("s\nexample\nshown\ngo", "wall") and trajectory.actions == ("left", "right")
    assert trajectory.rewards == (-0.1, 1.0) and trajectory.dones == (False, True)
    plain = sample_trajectory(Sample(prompt="2+2=", response="4", reward=1.0))
    assert plain == Trajectory(states=("2+2=",), actions=("4",), rewards=(1.0,), dones=(True,))
    with pytest.raises(RewardError, match="keep the whole conversation"):
        sample_trajectory(replace(make_episode(), messages=None))


def compute_with_environment(trajectory: Trajectory, environment: dict[str, float]) -> float:
    return sum(trajectory.rewards) * environment["scale"]


async def compute_async(trajectory: Trajectory) -> float:
    return trajectory.rewards[-1]


async def test_rewards_of_a_trajectory_with_and_without_environment():
    group = (make_episode(),)
    for function, environment, expected in (
        (compute_with_environment, {"scale": 2.0}, 1.8),
        (lambda trajectory: trajectory.rewards[0], None, -0.1),
        (lambda trajectory: trajectory.rewards[0], {"scale": 2.0}, -0.1),
        (lambda trajectory, environment=None: float(environment is None), None, 1.0),
        (compute_async, None, 1.0),
        (compute_reward, None, 0.9),
    ):
        scored = await score_group(group, adapt_trajectory_reward(function, environment))
        assert scored is not None and scored[0].reward == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"compute_with_environment.* takes an environment, but environment is None"):
        adapt_trajectory_reward(compute_with_environment)
    with pytest.raises(ConfigError, match=r"must take \(trajectory, environment\) or \(trajectory\)"):
        adapt_trajectory_reward(lambda: 1.0)


def test_the_default_reward_of_a_trajectory_is_its_return():
    assert compute_reward(sample_trajectory(make_episode()), {"any": "environment"}) == pytest.approx(0.9)
    assert compute_reward(Sample(metadata={"correct": True})) == 1.0


def test_the_environments_grade_is_a_reward():
    assert environment_reward(make_episode()) == pytest.approx(0.9)
    assert environment_reward(replace(make_episode(), episode=EpisodeOutcome(stop_reason=StopReason.DONE, environment_reward=0.25))) == 0.25
    with pytest.raises(RewardError, match=r"sample 0 .* is no episode"):
        environment_reward(Sample())


@pytest.mark.parametrize(("response", "truth", "expected"), [("0.00005", 0.00005, 1.0), ("5", 0.00005, 0.0), ("16", 1e16, 0.0)])
def test_a_float_is_its_value_however_python_writes_it(response: str, truth: float, expected: float):
    assert create_numeric_reward()(answer(response, truth)) == expected == gsm8k_reward(answer(response, truth))
