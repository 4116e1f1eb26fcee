"""Values about the steps of an episode: what was seen, done, paid and learned at each of them. All of them are JSON at heart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from rollouts.types import Message


@dataclass(frozen=True, kw_only=True)
class StepData:
    """One environment step of an episode: one action of the policy, or what was left of it when it failed."""

    system_step_index: int  # position among the actions of its episode, from 0
    observation_data: Any = None  # what the policy saw before it acted, as the environment gave it; JSON values
    action_taken: Any = None  # what the environment was given: the text, or what a parser made of it; JSON values
    raw_policy_output: str = ""  # text of the action, as the policy wrote it, without special tokens at its end
    resulting_messages_history: tuple[Message, ...] = ()  # the conversation up to and with what the environment answered
    policy_tokens: tuple[int, ...] | None = None  # of the action; None = the policy gives text only
    policy_logprobs: tuple[float, ...] | None = None  # nats, one for each of policy_tokens; None = the policy gives none
    policy_value_estimate: float | None = None  # of a critic, before the action
    is_done: bool = False  # whether the episode ended with this step
    step_info: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the environment's info, tool calls, durations, ...; JSON values
    base_reward: float | None = None  # of this step alone; None = nobody said
    return_to_go: float | None = None  # discounted rewards from this step on (G_k)
    advantage: float | None = None  # what the step is trained with
    sample_index: int = 0  # Sample.index of its episode
    group_index: int = 0  # Sample.group_index of its episode

    def __post_init__(self) -> None:
        assert self.system_step_index >= 0, f"system_step_index is {self.system_step_index}, expected at least 0"
        if self.policy_logprobs is not None:
            assert self.policy_tokens is not None, f"step {self.system_step_index} has policy_logprobs, but no policy_tokens"
            assert len(self.policy_logprobs) == len(self.policy_tokens), (
                f"step {self.system_step_index} has {len(self.policy_logprobs)} policy_logprobs for {len(self.policy_tokens)} tokens"
            )

    def to_dict(self) -> dict[str, Any]:
        """The step as plain JSON values."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["resulting_messages_history"] = [message.to_dict() for message in self.resulting_messages_history]
        out["step_info"] = dict(self.step_info)
        for name in ("policy_tokens", "policy_logprobs"):
            out[name] = None if out[name] is None else list(out[name])
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepData:
        """The inverse of to_dict."""
        values = dict(data)
        messages = values.get("resulting_messages_history", ())
        values["resulting_messages_history"] = tuple(m if isinstance(m, Message) else Message.from_dict(m) for m in messages)
        for name in ("policy_tokens", "policy_logprobs"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return cls(**values)


Steps: TypeAlias = tuple[StepData, ...]
"""The steps of one episode, in order."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """An episode as reinforcement learning writes it: s_0, a_0, r_0, s_1, ... For rewards and environments that know no tokens."""

    states: tuple[Any, ...]  # what was seen before each action
    actions: tuple[Any, ...]
    rewards: tuple[float, ...]  # so sum(trajectory.rewards) is the return of the episode
    dones: tuple[bool, ...]  # whether the episode ended with the action

    def __post_init__(self) -> None:
        lengths = {f.name: len(getattr(self, f.name)) for f in fields(self)}
        assert len(set(lengths.values())) == 1, f"a trajectory has one state, action, reward and done for each step, found {lengths}"

    @classmethod
    def from_steps(cls, steps: Steps) -> Trajectory:
        """The trajectory of an episode; a step without a reward counts 0."""
        return cls(
            states=tuple(step.observation_data for step in steps),
            actions=tuple(step.action_taken for step in steps),
            rewards=tuple(0.0 if step.base_reward is None else step.base_reward for step in steps),
            dones=tuple(step.is_done for step in steps),
        )
