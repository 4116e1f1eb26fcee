"""Values about the steps of an episode: observations, actions, rewards and advantages. JSON values throughout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeAlias

from rollouts.checks import take_int, take_number, take_text, take_tuple
from rollouts.types import Message, take_message


@dataclass(frozen=True, kw_only=True)
class StepData:
    """One environment step of an episode: one action of the policy."""

    system_step_index: int  # position among the actions of its episode, from 0
    observation_data: Any = None  # observation before the action, as the environment gave it; JSON values
    action_taken: Any = None  # input of the environment: the text, or the result of a parser; JSON values
    raw_policy_output: str = ""  # text of the action, without special tokens at its end
    resulting_messages_history: tuple[Message, ...] = ()  # conversation up to and with the environment's answer
    action_message: int | None = None  # place of the action in that conversation; None = its last message by the assistant
    policy_tokens: tuple[int, ...] | None = None  # tokens of the action; None = the policy gives text only
    policy_logprobs: tuple[float, ...] | None = None  # nats, one for each of policy_tokens; None = the policy gives none
    policy_value_estimate: float | None = None  # estimate of a critic, before the action
    is_done: bool = False  # whether the episode ended with this step
    step_info: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the environment's info, tool calls, durations, ...; JSON values
    base_reward: float | None = None  # reward of this step alone; None = unknown
    return_to_go: float | None = None  # discounted rewards from this step on (G_k)
    advantage: float | None = None  # advantage that the step is trained with
    sample_index: int = 0  # Sample.index of its episode
    group_index: int = 0  # Sample.group_index of its episode

    def __post_init__(self) -> None:
        counts = ("system_step_index", "sample_index", "group_index")
        take: dict[str, Any] = {name: take_int(f"StepData.{name}", getattr(self, name)) for name in counts}
        for name, of in (("policy_tokens", take_int), ("policy_logprobs", take_number)):
            if getattr(self, name) is not None:
                where = f"StepData.{name}"
                take[name] = take_tuple(where, getattr(self, name), partial(of, where), "a sequence of numbers, or None")
        for name in ("policy_value_estimate", "base_reward", "return_to_go", "advantage"):
            if getattr(self, name) is not None:
                take[name] = take_number(f"StepData.{name}", getattr(self, name), finite=False)  # judged where it is used
        where = "StepData.resulting_messages_history"
        take["resulting_messages_history"] = take_tuple(
            where, self.resulting_messages_history, partial(take_message, where), "a sequence of messages"
        )
        take_text("StepData.raw_policy_output", self.raw_policy_output)
        for name, value in take.items():
            if getattr(self, name) is not value:
                object.__setattr__(self, name, value)
        assert self.system_step_index >= 0, f"system_step_index is {self.system_step_index}, expected at least 0"
        if self.action_message is not None:
            count = len(self.resulting_messages_history)
            assert 0 <= self.action_message < count, (
                f"step {self.system_step_index} has action_message {self.action_message}, but {count} messages"
            )
        if self.policy_logprobs is not None:
            assert self.policy_tokens is not None, f"step {self.system_step_index} has policy_logprobs, but no policy_tokens"
            assert len(self.policy_logprobs) == len(self.policy_tokens), (
                f"step {self.system_step_index} has {len(self.policy_logprobs)} policy_logprobs for {len(self.policy_tokens)} tokens"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the step as plain JSON values."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["resulting_messages_history"] = [message.to_dict() for message in self.resulting_messages_history]
        out["step_info"] = dict(self.step_info)
        for name in ("policy_tokens", "policy_logprobs"):
            out[name] = None if out[name] is None else list(out[name])
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepData:
        """Return the step of to_dict's values."""
        values = dict(data)
        messages = values.get("resulting_messages_history", ())
        values["resulting_messages_history"] = tuple(m if isinstance(m, Message) else Message.from_dict(m) for m in messages)
        for name in ("policy_tokens", "policy_logprobs"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return cls(**values)


Steps: TypeAlias = tuple[StepData, ...]
"""The steps of one episode, in order."""


def _take_any(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Episode in the notation of reinforcement learning, s_0, a_0, r_0, s_1, ..., for rewards and environments that know no tokens."""

    states: tuple[Any, ...]  # observation before each action
    actions: tuple[Any, ...]
    rewards: tuple[float, ...]  # one for each step; sum(trajectory.rewards) is the return of the episode
    dones: tuple[bool, ...]  # whether the episode ended with the action

    def __post_init__(self) -> None:
        for f in fields(self):
            if type(getattr(self, f.name)) is not tuple:
                taken = take_tuple(f"Trajectory.{f.name}", getattr(self, f.name), _take_any, "a sequence, one item for each step")
                object.__setattr__(self, f.name, taken)
        object.__setattr__(self, "rewards", tuple(take_number("Trajectory.rewards", reward) for reward in self.rewards))
        lengths = {f.name: len(getattr(self, f.name)) for f in fields(self)}
        assert len(set(lengths.values())) == 1, f"a trajectory has one state, action, reward and done for each step, found {lengths}"

    @classmethod
    def from_steps(cls, steps: Steps) -> Trajectory:
        """Return the trajectory of an episode; a step without a reward counts 0."""
        return cls(
            states=tuple(step.observation_data for step in steps),
            actions=tuple(step.action_taken for step in steps),
            rewards=tuple(0.0 if step.base_reward is None else step.base_reward for step in steps),
            dones=tuple(step.is_done for step in steps),
        )
