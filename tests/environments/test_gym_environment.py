"""Gymnasium's environments in episodes: by a small class with its methods, and by the package where it is installed."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import needs
import numpy as np
import pytest

from rollouts import EnvironmentConfig, EnvironmentFault, GymEnvironment, reset_environment, step_environment
from rollouts.environments.calls import open_environment
from rollouts.environments.gym import to_json_values


class Corridor:
    """Five cells in a row; 1 goes right, 0 left; the end is worth 1. As Gymnasium wants it, NumPy's values included."""

    def __init__(self, space: Any = None, limit: int = 8):
        self.action_space = SimpleNamespace(n=np.int64(2), start=np.int64(0)) if space is None else space
        self.limit, self.closed, self.resets = limit, 0, []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.resets.append((seed, options))
        self.cell, self.steps = (options or {}).get("cell", 0), 0
        return np.array([self.cell, 4], dtype=np.float32), {}

    def step(self, action: Any):
        self.steps += 1
        self.cell = max(self.cell + (1 if np.all(action == 1) else -1), 0)
        reached = np.bool_(self.cell == 4)
        info = {"prob": np.float64(0.5), "nan": float("nan"), "thing": object, "table": {1: np.arange(2)}}
        return np.array([self.cell, 4], dtype=np.float32), np.float32(reached), reached, self.steps >= self.limit, info

    def close(self) -> None:
        self.closed += 1


async def test_an_episode_in_gymnasiums_form():
    env = Corridor()
    async with open_environment(lambda: GymEnvironment(env, rules="0 left, 1 right")) as environment:
        assert await reset_environment(environment, EnvironmentConfig(seed=2**40 + 7, parameters={"options": {"cell": 2}})) == [2.0, 4.0]
        assert env.resets == [(7, {"cell": 2})]
        step = await step_environment(environment, " 1\n")
        assert step[:3] == ([3.0, 4.0], 0.0, False)
        assert step.info == {"prob": 0.5, "nan": None, "thing": f"{object!r}", "table": {"1": [0, 1]}, "action": 1}
        step = await step_environment(environment, "1")
        assert step[:3] == ([4.0, 4.0], 1.0, True)
        assert "truncated" not in step.info
        assert environment.get_prompt_prefix() == "0 left, 1 right"
        assert environment.get_state_description() == ""
    assert env.closed == 1


async def test_a_time_limit_ends_the_episode_as_truncated():
    environment = GymEnvironment(Corridor(limit=1), describe=lambda observation: f"cell {observation[0]:g}")
    assert await reset_environment(environment, EnvironmentConfig()) == "cell 0"
    step = await step_environment(environment, "0")
    assert (step.observation, step.done, step.info["truncated"]) == ("cell 0", True, True)


@pytest.mark.parametrize("text", ["2", "-1", "right", "", "true", "1.0", "[1]", "1 1", "[" * 100000])
async def test_what_is_no_action_steps_nothing(text: str):
    environment = GymEnvironment(env := Corridor(), invalid_reward=-0.5, max_invalid=2)
    first = await reset_environment(environment, EnvironmentConfig())
    step = await step_environment(environment, text)
    assert step == (first, -0.5, False, {"policy_error": f"no action in {text!r:.100}"})
    assert env.steps == 0
    assert (await step_environment(environment, text)).done


async def test_other_spaces_and_parsers_of_ones_own():
    box = SimpleNamespace(dtype=np.float32, contains=lambda action: action.shape == (2,))
    environment = GymEnvironment(Corridor(box))
    environment.reset(EnvironmentConfig())
    assert (await step_environment(environment, "[0.5, 1]")).info["action"] == [0.5, 1.0]
    for text in ("[1]", '["a", "b"]', "[[1], [2, 3]]"):
        assert "policy_error" in (await step_environment(environment, text)).info
    environment = GymEnvironment(Corridor(), parse_action={"right": 1, "left": 0}.get)
    environment.reset(EnvironmentConfig())
    assert (await step_environment(environment, "right")).info["action"] == 1
    assert "policy_error" in (await step_environment(environment, "up")).info


async def test_what_is_not_gymnasium_is_a_fault():
    class Old(Corridor):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros(2)

        def step(self, action: Any) -> Any:
            return np.zeros(2), 0.0, False, {}

    environment = GymEnvironment(Old())
    with pytest.raises(EnvironmentFault, match=r"Old\.reset returned array.*expected Gymnasium's \(observation, info\)"):
        await reset_environment(environment, EnvironmentConfig())
    with pytest.raises(EnvironmentFault, match=r"Old\.step returned .*expected Gymnasium's \(observation, reward, terminated"):
        await step_environment(environment, "1")


async def test_several_environments_at_once_are_no_episode():
    class Vector(Corridor):
        def step(self, action: Any) -> Any:
            return [0], 0.0, np.array([False]), np.array([False]), {}

    with pytest.raises(EnvironmentFault, match=r"Vector\.step returned terminated array\(\[False\]\).*expected True or False"):
        await step_environment(GymEnvironment(Vector()), "1")


def test_values_become_json():
    assert to_json_values({"a": (1, np.float32(0.5)), 2: {np.int64(3)}, "b": None}) == {"a": [1, 0.5], "2": [3], "b": None}
    assert to_json_values(np.array([1.0, np.inf])) == [1.0, None]


@pytest.mark.more
@needs.GYMNASIUM
async def test_the_package_itself():
    gymnasium = importlib.import_module("gymnasium")
    async with open_environment(lambda: GymEnvironment(gymnasium.make("CartPole-v1"))) as environment:
        first = await reset_environment(environment, EnvironmentConfig(seed=3))
        assert first == await reset_environment(environment, EnvironmentConfig(seed=3))
        assert len(first) == 4
        rewards, done = [], False
        while not done:
            step = await step_environment(environment, "1")
            rewards.append(step.reward)
            done = step.done
        assert 5 < sum(rewards) < 20
