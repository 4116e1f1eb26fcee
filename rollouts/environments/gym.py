"""Gymnasium's environments for episodes. Gymnasium itself is not imported: any object with its methods will do.

def make():
    return GymEnvironment(gymnasium.make("FrozenLake-v1", is_slippery=False), describe=lambda cell: f"You are on cell {cell}.")

create_episode_generate_fn(engines, tokenizer, params, make, EpisodeConfig(max_turns=20))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from rollouts.checks import parse_json, read_flag
from rollouts.environments.protocol import EnvironmentConfig, EnvironmentStep
from rollouts.errors import EnvironmentFault


class GymLike(Protocol):
    """The part of gymnasium.Env that is used."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Mapping[str, Any]]:
        """Return the first observation and info."""
        ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Mapping[str, Any]]:
        """Return observation, reward, terminated, truncated, info."""
        ...

    def close(self) -> None:
        """Free all resources."""
        ...


class GymEnvironment:
    """One Gymnasium environment, for one episode."""

    def __init__(
        self,
        env: GymLike,
        *,
        parse_action: Callable[[str], Any] | None = None,
        describe: Callable[[Any], str] | None = None,
        rules: str = "",
        invalid_reward: float = 0.0,
        max_invalid: int = 10,
    ) -> None:
        """
        Args:
            env: an environment of gymnasium.make.
            parse_action: text -> action, None = there is none in it. Default: for a Discrete space the number alone, else JSON; a value
                outside of env.action_space is no action.
            describe: env's observation -> text; None = JSON.
            rules: text of get_prompt_prefix.
            invalid_reward: reward of a text without an action; env is not stepped and the model sees the same observation again.
            max_invalid: number of such texts that ends the episode; env's own time limit does not count them.
        """
        self._env, self._describe, self._rules = env, describe, rules
        self._parse = parse_action
        self._invalid_reward, self._max_invalid = invalid_reward, max_invalid
        self._observation: Any = None
        self._num_invalid = 0

    def reset(self, config: EnvironmentConfig) -> Any:
        """Reset with the configuration's seed (of 31 bits), and with parameters["options"] if given."""
        options = config.parameters.get("options")
        result: Any = self._env.reset(seed=config.seed % 2**31, options=None if options is None else dict(options))
        if not isinstance(result, tuple) or len(cast("tuple[Any, ...]", result)) != 2:
            raise EnvironmentFault(
                f"{type(self._env).__name__}.reset returned {result!r:.200} ({type(result).__name__}), expected Gymnasium's "
                "(observation, info); environments of gym before 0.26 need Gymnasium's compatibility wrapper"
            )
        self._num_invalid = 0
        return self._show(result[0])

    def step(self, action: str) -> EnvironmentStep:
        """Step if the text holds an action. info: env's, "action", "truncated" if a limit ended the episode; or "policy_error"."""
        parsed = self._parse_text(action)
        if parsed is None:
            self._num_invalid += 1
            info = {"policy_error": f"no action in {action!r:.100}"}
            return EnvironmentStep(self._observation, self._invalid_reward, self._num_invalid >= self._max_invalid, info)
        result: Any = self._env.step(parsed)
        if not isinstance(result, tuple) or len(cast("tuple[Any, ...]", result)) != 5:
            raise EnvironmentFault(
                f"{type(self._env).__name__}.step returned {result!r:.200} ({type(result).__name__}), expected Gymnasium's "
                "(observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, env_info = cast("tuple[Any, ...]", result)
        info = {**to_json_values(env_info), "action": to_json_values(parsed)}
        ends = {"terminated": read_flag(terminated), "truncated": read_flag(truncated)}
        if None in ends.values():
            raise EnvironmentFault(
                f"{type(self._env).__name__}.step returned terminated {terminated!r:.100} and truncated {truncated!r:.100}, expected "
                "True or False for each: several environments at once (a vector environment) are no episode"
            )
        if ends["truncated"]:
            info["truncated"] = True
        return EnvironmentStep(self._show(observation), reward, any(ends.values()), info)

    def get_state_description(self) -> str:
        """Return "": the observation describes the state."""
        return ""

    def get_prompt_prefix(self) -> str:
        """Return the rules."""
        return self._rules

    def close(self) -> None:
        """Close env."""
        self._env.close()

    def _show(self, observation: Any) -> Any:
        self._observation = to_json_values(observation) if self._describe is None else self._describe(observation)
        return self._observation

    def _parse_text(self, text: str) -> Any:
        space: Any = getattr(self._env, "action_space", None)
        if self._parse is not None:
            return self._parse(text)
        try:
            action: Any = parse_json(text.strip())
        except ValueError:
            return None
        is_discrete = hasattr(space, "n") and hasattr(space, "start")
        if is_discrete:
            first = int(space.start)
            is_action = isinstance(action, int) and not isinstance(action, bool) and first <= action < first + int(space.n)
            return action if is_action else None
        if isinstance(action, list) and hasattr(space, "dtype"):
            action = _to_array(cast("list[Any]", action), space.dtype)
        return action if action is not None and (space is None or space.contains(action)) else None


def to_json_values(value: Any) -> Any:
    """Convert a value to JSON values: arrays and tensors to lists, keys to texts, non-finite numbers to None, others to their repr."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json_values(entry) for key, entry in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json_values(entry) for entry in cast("list[Any]", value)]
    if hasattr(value, "tolist"):
        return to_json_values(value.tolist())
    return f"{value!r:.200}"


def _to_array(entries: list[Any], dtype: Any) -> Any:
    import numpy as np

    try:
        return np.asarray(entries, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        return None
