"""What an environment is: a world that an episode acts in. Any object with these methods is one; reset and step may be async.

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

An episode gets an environment of its own from a factory, so an environment need not know of others. What it returns is copied, and so are
the parameters that it is given: it may change its own lists in place.

One whose steps make calls with deadlines of their own (tools, a sandbox) may have an attribute `longest_call_s`: seconds, math.inf for
none. They are added to the deadline of a step (EpisodeConfig.timeout_s), which would else end a call before its own deadline does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """What reset is given. Subclass it with fields of your own, or put them into `parameters`."""

    seed: int = 0  # equal seeds give equal first states: all episodes of a group have the same
    parameters: Mapping[str, Any] = field(
        default_factory=dict[str, Any]
    )  # of the task: the metadata of the prompt, "ground_truth" included


class EnvironmentStep(NamedTuple):
    """What step returns; a plain tuple of four will do."""

    observation: Any  # a text, a Message or several (tool results), or a JSON value, which the model is shown as text
    reward: float
    done: bool
    info: Mapping[str, Any]  # JSON values, for rewards and logs


class Environment(Protocol):
    """A world with a state. See the module's docstring."""

    def reset(self, config: EnvironmentConfig) -> Any:
        """Begin anew, in a state that is a function of the configuration. Returns the first observation, or an awaitable of it."""
        ...

    def step(self, action: Any) -> Any:
        """Carry an action out: the text that the model wrote, unless a parser made something of it. Returns an EnvironmentStep."""
        ...

    def get_state_description(self) -> str:
        """The present state as text, for the model where the observation is no text, and for people; "" = the observation says it all."""
        ...

    def get_prompt_prefix(self) -> str:
        """What the model is told before the first observation: rules, the form of an action; "" = nothing."""
        ...


EnvironmentFactory: TypeAlias = Callable[[], "Environment | Awaitable[Environment]"]
"""Makes an environment for one episode. One with `async def aclose(self)` or `close(self)` is closed when its episode is over."""
