"""Calling environments: what they return is checked, deadlines hold, they are closed, and faults say what was found."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import trio
from trio.testing import MockClock

from rollouts import (
    DataError,
    EnvironmentConfig,
    EnvironmentFault,
    EpisodeInterrupted,
    Message,
    SandboxError,
    ToolFault,
    reset_environment,
    step_environment,
)
from rollouts.environments.calls import check_step, open_environment
from rollouts.environments.observations import observation_to_json, observation_to_messages, observation_to_text


class Echo:
    """Shows the last action and takes note of being closed."""

    def __init__(self, *, result: Any = None, error: Exception | None = None, first: Any = "ready"):
        self.result, self.error, self.first, self.closed = result, error, first, 0

    def reset(self, config: EnvironmentConfig) -> Any:
        if self.error is not None:
            raise self.error
        return self.first

    def step(self, action: Any) -> Any:
        if self.error is not None:
            raise self.error
        return (f"you said {action}", 1, False, {"length": len(action)}) if self.result is None else self.result

    def get_state_description(self) -> str:
        return ""

    def get_prompt_prefix(self) -> str:
        return ""

    def close(self) -> None:
        self.closed += 1


class AsyncEcho(Echo):
    """The same with async methods, which take a second each."""

    async def reset(self, config: EnvironmentConfig) -> Any:
        await trio.sleep(1)
        return super().reset(config)

    async def step(self, action: Any) -> Any:
        await trio.sleep(1)
        return super().step(action)

    async def aclose(self) -> None:
        await trio.sleep(1)
        self.closed += 1


@pytest.mark.parametrize("kind", [Echo, AsyncEcho])
@pytest.mark.parametrize("in_thread", [False, True])
async def test_sync_and_async_environments_are_called_alike(kind: type[Echo], in_thread: bool, autojump_clock: MockClock):
    if kind is Echo:
        autojump_clock.autojump_threshold = math.inf  # virtual time must not jump over threads
    async with open_environment(kind, in_thread=in_thread) as environment:
        assert await reset_environment(environment, EnvironmentConfig(), in_thread=in_thread) == "ready"
        step = await step_environment(environment, "go", in_thread=in_thread)
        assert step == ("you said go", 1.0, False, {"length": 2})
        assert type(step.reward) is float
    assert environment.closed == 1


async def test_a_factory_may_be_async():
    async def make() -> Echo:
        return Echo()

    async with open_environment(make) as environment:
        assert isinstance(environment, Echo)


async def test_what_reset_and_step_raise_is_a_fault_that_says_what_and_where():
    environment = Echo(error=ValueError("no such level"))
    with pytest.raises(EnvironmentFault, match=r"Echo\.reset raised ValueError .*test_environment_calls\.py:\d+\): no such level"):
        await reset_environment(environment, EnvironmentConfig())
    with pytest.raises(EnvironmentFault, match=r"Echo\.step raised ValueError for the action 'jump'") as caught:
        await step_environment(environment, "jump")
    assert isinstance(caught.value.__cause__, ValueError)
    for error in (ToolFault("mine"), DataError("mine"), SandboxError("mine"), EpisodeInterrupted("mine")):
        with pytest.raises(type(error), match=r"^mine$"):
            await step_environment(Echo(error=error), "jump")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("text", "step returned 'text' (str), expected (observation, reward, done, info)"),
        (("a", 1.0, True), "3 values, expected (observation, reward, done, info)"),
        (("a", 1.0, True, False, {}), "five values, as Gymnasium's environments return"),
        (("a", float("nan"), True, {}), "the reward is nan (float), expected a finite number"),
        (("a", float("inf"), True, {}), "the reward is inf (float)"),
        (("a", "1", True, {}), "the reward is '1' (str), expected a finite number"),
        (("a", None, True, {}), "the reward is None (NoneType)"),
        (("a", np.zeros(2), True, {}), "the reward is array([0., 0.]) (ndarray)"),
        (("a", 10**400, True, {}), "expected a finite number"),
        (("a", 0, 1, {}), "done is 1 (int), expected True or False"),
        (("a", 0, None, {}), "done is None"),
        (("a", 0, True, None), "info is None (NoneType), expected a mapping"),
        (("a", 0, True, {"x": {1, 2}}), "info['x'] is {1, 2} (set), expected JSON values"),
        (("a", 0, True, {"x": [0.0, float("nan")]}), "info['x'][1] is nan, expected JSON values"),
        (("a", 0, True, {3: "x"}), "info has the key 3 (int), not a text"),
        ((np.zeros(2), 0, True, {}), "the observation is array([0., 0.]) (ndarray), expected a text, Messages, or JSON values"),
        (([Message(role="tool", content="x"), "y"], 0, True, {}), "the observation[0] is Message("),
        (("half \ud83d", 0, True, {}), "with half of a surrogate pair in it"),
        ((Message(role="tool", content="\ud83d"), 0, True, {}), "the observation['content'] is"),
    ],
)
async def test_what_is_no_step_is_a_fault_that_says_what_was_returned(result: Any, message: str):
    with pytest.raises(EnvironmentFault, match=re.escape(message)) as caught:
        await step_environment(Echo(result=result), "a")
    assert repr(result)[:150] in str(caught.value)


def test_numbers_and_truths_of_numpy_and_torch_are_understood():
    step = check_step(["seen", np.float32(0.5), np.True_, {}])
    assert (step.reward, step.done) == (0.5, True)
    assert type(step.reward) is float
    assert type(step.done) is bool
    assert check_step(({"x": [1, None]}, torch.tensor(2.0), False, {})).reward == 2.0
    assert check_step(("", True, False, {})).reward == 1.0


async def test_a_reset_in_the_style_of_gymnasium_is_refused_with_advice():
    with pytest.raises(EnvironmentFault, match="wrap it in GymEnvironment"):
        await reset_environment(Echo(first=([0.0], {})), EnvironmentConfig())
    with pytest.raises(EnvironmentFault, match=r"Echo\.reset returned array"):
        await reset_environment(Echo(first=np.zeros(1)), EnvironmentConfig())


async def test_a_deadline_ends_async_methods(autojump_clock: MockClock):
    environment = AsyncEcho()
    with pytest.raises(EnvironmentFault, match=r"AsyncEcho\.step did not return within 0.5 s for the action 'a'"):
        await step_environment(environment, "a", timeout_s=0.5)
    with pytest.raises(EnvironmentFault, match=r"AsyncEcho\.reset did not return within 0.5 s"):
        await reset_environment(environment, EnvironmentConfig(), timeout_s=0.5)


async def test_a_deadline_leaves_a_hanging_thread_behind_and_cancellation_does(autojump_clock: MockClock):
    released = threading.Event()

    class Hanging(Echo):
        def step(self, action: Any) -> Any:
            released.wait(30)
            return super().step(action)

    autojump_clock.autojump_threshold = float("inf")
    autojump_clock.rate = 1000.0
    with pytest.raises(EnvironmentFault, match=r"Hanging\.step did not return within 1 s"):
        await step_environment(Hanging(), "a", timeout_s=1, in_thread=True)
    with trio.move_on_after(1) as scope:
        await step_environment(Hanging(), "a", in_thread=True)
    assert scope.cancelled_caught
    released.set()


async def test_an_environment_is_closed_also_when_its_episode_fails_or_is_canceled(autojump_clock: MockClock):
    made: list[AsyncEcho] = []

    def make() -> AsyncEcho:
        made.append(AsyncEcho())
        return made[-1]

    with pytest.raises(KeyError):
        async with open_environment(make):
            raise KeyError("mine")
    with trio.move_on_after(3):
        async with open_environment(make) as environment:
            await reset_environment(environment, EnvironmentConfig())
            await trio.sleep_forever()
    assert [environment.closed for environment in made] == [1, 1]


async def test_closing_that_hangs_ends_at_the_deadline_and_masks_no_other_error(autojump_clock: MockClock):
    class Stuck(Echo):
        async def aclose(self) -> None:
            await trio.sleep_forever()

    with pytest.raises(EnvironmentFault, match=r"Stuck\.aclose did not return within 2 s at the end of its episode"):
        async with open_environment(Stuck, timeout_s=2):
            pass
    with pytest.raises(KeyError) as caught:
        async with open_environment(Stuck):
            raise KeyError("mine")
    assert "and then Stuck.aclose did not return within 10 s" in caught.value.__notes__[0]


async def test_a_factory_that_fails_or_makes_no_environment_is_a_fault():
    def broken() -> Any:
        raise OSError("no display")

    with pytest.raises(EnvironmentFault, match="the factory of environments raised OSError"):
        async with open_environment(broken):
            pass
    with pytest.raises(EnvironmentFault, match="which has no method reset, step, get_state_description, get_prompt_prefix"):
        async with open_environment(lambda: object()):  # type: ignore[arg-type, return-value]
            pass


async def test_fields_of_a_users_own_configuration_reach_reset():
    @dataclass(frozen=True, kw_only=True)
    class MazeConfig(EnvironmentConfig):
        width: int = 3

    class Maze(Echo):
        def reset(self, config: EnvironmentConfig) -> Any:
            assert isinstance(config, MazeConfig)
            return {"width": config.width, "seed": config.seed, "name": config.parameters["name"]}

    observation = await reset_environment(Maze(), MazeConfig(width=7, seed=2, parameters={"name": "hedge"}))
    assert observation == {"width": 7, "seed": 2, "name": "hedge"}


def test_observations_are_shown_as_text_and_messages():
    tool = Message(role="tool", content="4", tool_call_id="call_0")
    assert observation_to_messages("hello") == (Message(role="user", content="hello"),)
    assert observation_to_messages("hello", role="tool") == (Message(role="tool", content="hello"),)
    assert observation_to_messages(tool) == (tool,)
    assert observation_to_messages([tool, tool]) == (tool, tool)
    assert observation_to_messages("") == observation_to_messages(None) == ()
    assert observation_to_messages({"b": [1, 2], "a": None}) == (Message(role="user", content='{"a":null,"b":[1,2]}'),)
    assert observation_to_messages({"b": 1}, description="b is one") == (Message(role="user", content="b is one"),)
    assert observation_to_text("seen", "described") == "seen"
    assert observation_to_text(None, "described") == "described"
    assert observation_to_text((tool, Message(role="user", content="go on"))) == "4\ngo on"
    assert observation_to_text(tool) == "4"
    assert observation_to_json((tool,)) == [{"role": "tool", "content": "4", "tool_call_id": "call_0"}]
    assert observation_to_json(tool) == tool.to_dict()
    assert observation_to_json({"a": 1}) == {"a": 1}


class Board:
    """Shows its own list, which it changes in place."""

    def reset(self, config: EnvironmentConfig) -> list[int]:
        self.board, self.info = [0, 0], {"moves": []}
        return self.board

    def step(self, action: Any):
        self.board[int(action)] = 1
        self.info["moves"].append(action)
        return self.board, 0.0, all(self.board), self.info

    def get_state_description(self) -> str:
        return ""

    def get_prompt_prefix(self) -> str:
        return ""


async def test_what_an_environment_does_to_its_own_values_changes_no_step_that_was_taken():
    board = Board()
    seen = [await reset_environment(board, EnvironmentConfig())]
    steps = [await step_environment(board, action) for action in "01"]
    assert [*seen, *(step.observation for step in steps)] == [[0, 0], [1, 0], [1, 1]]
    assert [step.info for step in steps] == [{"moves": ["0"]}, {"moves": ["0", "1"]}]
    call = {"function": {"name": "add"}}
    step = check_step((Message(role="assistant", content="", tool_calls=(call,)), 0.0, False, {}))
    call["function"]["name"] = "sub"
    assert step.observation.tool_calls == ({"function": {"name": "add"}},)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ([Message(role="tool", content="4"), Message(role="tool")], r"content of message 1 .* is None"),
        (CYCLE, "nested too deep, or holds itself"),
    ],
)
async def test_an_observation_that_no_conversation_can_hold_is_a_fault_of_the_environment(observation: Any, message: str):
    class Shows(Board):
        def reset(self, config: EnvironmentConfig) -> Any:
            return observation

    with pytest.raises(EnvironmentFault, match=f"Shows.reset returned .*{message}"):
        await reset_environment(Shows(), EnvironmentConfig())
    with pytest.raises(EnvironmentFault, match=message):
        check_step((observation, 0.0, False, {}))
    with pytest.raises(EnvironmentFault, match="too deep"):
        check_step(("", 0.0, False, {"x": CYCLE}))
