"""Protocol of environments, the worlds that episodes act in. Any object with these methods is one; reset and step may be async.

    class Guess:                                        # a number from 1 to 9
        def reset(self, config):
            self.number = random.Random(config.seed).randint(1, 9)
            return "Guess a number from 1 to 9."
        def step(self, action):
            right = action.strip() == str(self.number)
            return ("yes" if right else "no"), float(right), right, {}
        def get_state_description(self):
            return ""
        def get_prompt_prefix(self):
            return "Answer with one digit."

An episode gets an environment of its own from a factory, so environments need not know of each other. Their results are copied, and so
are the parameters that they get: an environment may change its own lists in place.

An environment whose steps make calls with deadlines of their own (tools, a sandbox) may have an attribute `longest_call_s`: seconds,
math.inf for none. They are added to the deadline of a step (EpisodeConfig.timeout_s), which would otherwise end a call too early.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

OnToolError = Literal["observe", "raise"]
"""Handling of a tool that fails: the model is told, or the episode ends with an environment error."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Argument of reset. Subclass it with fields of your own, or put them into `parameters`."""

    seed: int = 0  # equal seeds give equal first states; all episodes of a group have the same
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the prompt's metadata, "ground_truth" included


class EnvironmentStep(NamedTuple):
    """Result of step; a plain tuple of four will do."""

    observation: Any  # a text, a Message or several (tool results), or a JSON value, shown to the model as text
    reward: float
    done: bool
    info: Mapping[str, Any]  # JSON values, for rewards and logs


class Environment(Protocol):
    """A world with a state. See the module's docstring."""

    def reset(self, config: EnvironmentConfig) -> Any:
        """Begin anew, in a state that is a function of the configuration. Returns the first observation, or an awaitable of it."""
        ...

    def step(self, action: Any) -> Any:
        """Carry out an action: the model's text, or a parser's value for it. Returns an EnvironmentStep, or an awaitable of it."""
        ...

    def get_state_description(self) -> str:
        """Return the present state as text, for people and for models whose observation is no text; "" = the observation is enough."""
        ...

    def get_prompt_prefix(self) -> str:
        """Return the text before the first observation, such as rules and the form of an action; "" = none."""
        ...


class MultiAgentStep(NamedTuple):
    """Result of a step of a MultiAgentEnvironment; a plain tuple of four will do."""

    role: str | None  # role that acts next; None = the match has ended
    observation: Any  # its observation: a text, a Message or several, or a JSON value; at the end shown to no model
    rewards: Mapping[str, float]  # reward by role, for any of the roles; 0 where one is left out
    info: Mapping[str, Any]  # JSON values, for rewards and logs, in the episode of the role that has acted


class MultiAgentEnvironment(Protocol):
    """A world in which several roles act, one at a time; reset and step may be async. See agents/matches.py.

    A reward that a role gets between two of its actions counts for the earlier one.
    """

    def reset(self, config: EnvironmentConfig) -> Any:
        """Begin anew. Returns (role that acts first, what it is shown), or an awaitable of it."""
        ...

    def step(self, role: str, action: Any) -> Any:
        """Carry out an action of the role whose turn it is. Returns a MultiAgentStep, or an awaitable of it."""
        ...

    def get_prompt_prefix(self, role: str) -> str:
        """Return the text before a role's first observation, such as its rules; "" = none."""
        ...


MultiAgentFactory: TypeAlias = Callable[[], "MultiAgentEnvironment | Awaitable[MultiAgentEnvironment]"]
"""f() -> an environment for one match, closed after it as other environments are."""

EnvironmentFactory: TypeAlias = Callable[[], "Environment | Awaitable[Environment]"]
"""f() -> an environment for one episode. An environment with `async def aclose(self)` or `close(self)` is closed after it."""
