"""Environments as a trainer takes them: a class, a function that makes one, or an object; with or without the parts that have defaults."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, Protocol, cast

from rollouts.environments.protocol import Environment, EnvironmentConfig, EnvironmentFactory
from rollouts.errors import ConfigError


class BaseEnvironment(Protocol):
    """Environment with defaults for everything but reset and step; any object with these two methods will do as well.

    class Guess(BaseEnvironment):
        def reset(self, config):
            self.secret = str(config.seed % 10)
            return "Guess a digit."

        def step(self, action):
            right = action.strip() == self.secret
            return ("yes" if right else "no"), float(right), right, {}
    """

    def reset(self, config: EnvironmentConfig) -> Any:
        """Begin anew, in a state that is a function of config. Returns the first observation. May also take no argument."""
        ...

    def step(self, action: Any) -> Any:
        """Carry out an action, the model's text. Returns (observation, reward, done, info)."""
        ...

    def get_state_description(self) -> str:
        """Return the present state as text, for models whose observation is no text; "" = the observation is enough."""
        return ""

    def get_prompt_prefix(self) -> str:
        """Return the text before the first observation, such as rules; "" = none."""
        return ""


def create_environment_factory(environment: Any) -> EnvironmentFactory:
    """Return a function that makes an environment for one episode.

    Args:
        environment: a class without arguments, a function that makes an environment, or an environment, of which each episode gets a copy.

    Raises: ConfigError for anything else, and for an environment that cannot be copied.
    """
    is_class = inspect.isclass(environment)
    plays = hasattr(environment, "step") and hasattr(environment, "reset")
    if (is_class and plays) or (not is_class and callable(environment) and not plays):
        make = cast("Callable[[], Any]", environment)
    elif plays:
        _copy(environment)  # fails before anything is trained
        make = _Copies(environment)
    else:
        raise ConfigError(
            f"environment is {environment!r:.100} ({type(environment).__name__}), expected a class with reset and step, a function that "
            "makes such an object, or one of them"
        )

    def create() -> Any:
        made = make()
        return _complete_later(made) if inspect.isawaitable(made) else complete_environment(made)

    return create


async def _complete_later(made: Any) -> Environment:
    return complete_environment(await made)


class _Copies:
    """Maker of copies of one environment."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def __call__(self) -> Any:
        return _copy(self._environment)


def _copy(environment: Any) -> Any:
    try:
        return copy.deepcopy(environment)
    except Exception as error:  # an error in the user's own __deepcopy__ included
        raise ConfigError(
            f"environment is a {type(environment).__name__} that cannot be copied ({type(error).__name__}: {error}), but every episode "
            "needs one of its own: give its class, or a function that makes one"
        ) from error


def complete_environment(environment: Any) -> Environment:
    """Return an environment with all methods of the protocol: itself, or a shell round one whose reset takes no argument or that leaves
    get_state_description or get_prompt_prefix out. One without reset or step stays as it is, for the error of the episode."""
    methods = ("reset", "step", "get_state_description", "get_prompt_prefix")
    missing = [name for name in methods if not callable(getattr(environment, name, None))]
    if {"reset", "step"} & set(missing) or (not missing and not _resets_plainly(environment)):
        return environment
    return _Completed(environment)


def _resets_plainly(environment: Any) -> bool:
    """Whether reset takes no positional argument."""
    try:
        inspect.signature(environment.reset).bind(None)
    except TypeError:
        return True
    except ValueError:  # a builtin without a signature
        return False
    return False


class _Completed:
    """Environment with the methods that another one leaves out."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._resets_plainly = _resets_plainly(environment)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_environment":
            raise AttributeError(name)
        return getattr(self._environment, name)  # close, aclose, longest_call_s

    def reset(self, config: EnvironmentConfig) -> Any:
        return self._environment.reset() if self._resets_plainly else self._environment.reset(config)

    def step(self, action: Any) -> Any:
        return self._environment.step(action)

    def get_state_description(self) -> str:
        return self._environment.get_state_description() if hasattr(self._environment, "get_state_description") else ""

    def get_prompt_prefix(self) -> str:
        return self._environment.get_prompt_prefix() if hasattr(self._environment, "get_prompt_prefix") else ""
