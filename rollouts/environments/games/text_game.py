"""Games in text: SimpleGameEnvironment makes an environment of three pure functions; TextGameEnv is an example, a guessing game.

    def begin(generator, parameters):                  # -> state, first observation
        return generator.randrange(10), "Guess a digit."

    def play(secret, guess):                           # -> GameTurn
        return GameTurn(state=secret, observation="yes" if guess == secret else "no", reward=float(guess == secret), done=guess == secret)

    environment = SimpleGameEnvironment(begin, play, create_number_parser(0, 9), max_steps=5)

A parser turns the model's text into an action or None. After None the game does not move, the model is told, and a step is used up.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from rollouts.environments.observations import Observation
from rollouts.environments.protocol import EnvironmentConfig, EnvironmentStep
from rollouts.errors import ConfigError

ActionParser: TypeAlias = Callable[[str], Any]
"""f(model's text) -> action as JSON values; None = there is none in it."""


@dataclass(frozen=True, kw_only=True)
class GameTurn:
    """Result of an action."""

    state: Any  # state of the game from now on
    observation: Observation
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


class SimpleGameEnvironment:
    """A game as an environment. Its only mutable value is the state."""

    def __init__(
        self,
        begin: Callable[[random.Random, Mapping[str, Any]], tuple[Any, Observation]],
        play: Callable[[Any, Any], GameTurn],
        parse_action: ActionParser,
        *,
        rules: str = "",
        describe: Callable[[Any], str] | None = None,
        max_steps: int = 20,
        invalid_observation: Observation = "That is no action.",
        invalid_reward: float = 0.0,
    ) -> None:
        """
        Args:
            begin: (generator, parameters of the episode) -> (state, first observation); the generator is seeded with the episode's seed.
            play: (state, action) -> GameTurn; changes nothing.
            parse_action: parser of the model's text.
            rules: text of get_prompt_prefix.
            describe: state -> text, for get_state_description.
            max_steps: actions after which the episode ends.
            invalid_observation, invalid_reward: observation and reward for a text without an action.

        Raises: ConfigError if max_steps is not at least 1.
        """
        if max_steps < 1:
            raise ConfigError(f"max_steps is {max_steps}, expected at least 1")
        self._begin, self._play, self._parse_action = begin, play, parse_action
        self._rules, self._describe, self._max_steps = rules, describe, max_steps
        self._invalid = GameTurn(state=None, observation=invalid_observation, reward=invalid_reward)
        self._state: Any = None
        self._num_steps = 0

    def reset(self, config: EnvironmentConfig) -> Observation:
        """Begin a game: equal seeds and parameters give equal games."""
        self._state, observation = self._begin(random.Random(config.seed), config.parameters)
        self._num_steps = 0
        return observation

    def step(self, action: str) -> EnvironmentStep:
        """Play an action. info: the game's, "action" as parsed, or "policy_error"; "outcome": "max_steps" if these ended the game."""
        self._num_steps += 1
        parsed = self._parse_action(action)
        turn = self._invalid if parsed is None else self._play(self._state, parsed)
        if parsed is not None:
            self._state = turn.state
        info = {**turn.info, **({"policy_error": f"no action in {action!r:.100}"} if parsed is None else {"action": parsed})}
        is_over = not turn.done and self._num_steps >= self._max_steps
        if is_over:
            info["outcome"] = "max_steps"
        return EnvironmentStep(turn.observation, turn.reward, turn.done or is_over, info)

    def get_state_description(self) -> str:
        """Return the text of `describe` for the state, "" without it."""
        return "" if self._describe is None else self._describe(self._state)

    def get_prompt_prefix(self) -> str:
        """Return the rules."""
        return self._rules


# -- parsers of actions


def create_word_parser(words: Sequence[str] | Mapping[str, Any]) -> ActionParser:
    """Create a parser that finds the last of these words in a text, in any case; a mapping's values are the actions."""
    actions = {word.lower(): words[word] for word in words} if isinstance(words, Mapping) else {word.lower(): word for word in words}
    return partial(_parse_word, actions=actions)


def create_number_parser(low: int, high: int) -> ActionParser:
    """Create a parser that returns the last whole number in a text if it lies in [low, high]."""
    return partial(_parse_number, low=low, high=high)


def create_tag_parser(tag: str = "action", inner: ActionParser | None = None) -> ActionParser:
    """Create a parser of the text between the last <action> and </action>, stripped and passed to `inner` if given."""
    return partial(_parse_tag, tag=tag, inner=inner)


def _parse_word(text: str, actions: Mapping[str, Any]) -> Any:
    choices = "|".join(re.escape(word) for word in sorted(actions, key=len, reverse=True))
    found = re.findall(rf"(?<!\w)(?:{choices})(?!\w)", text.lower())
    return actions[found[-1]] if found else None


def _parse_number(text: str, low: int, high: int) -> int | None:
    found = re.findall(r"(?<![\w.])-?[0-9]{1,18}(?!\w|\.[0-9])", text)
    return int(found[-1]) if found and low <= int(found[-1]) <= high else None


def _parse_tag(text: str, tag: str, inner: ActionParser | None) -> Any:
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    if not found:
        return None
    return found[-1].strip() if inner is None else inner(found[-1].strip())


# -- an example


class TextGameEnv(SimpleGameEnvironment):
    """Guess a number from 0 on. Hints after a wrong guess: > the number is greater, < it is smaller. Reward 1 for finding it, else 0."""

    def __init__(self, *, num_numbers: int = 10, max_guesses: int = 4, rules: str = "") -> None:
        """
        Args:
            num_numbers: the secret is one of 0 to num_numbers - 1; parameters["secret"], or drawn from the seed.
            max_guesses: guesses until the episode ends; four well-chosen ones suffice for ten numbers.
            rules: rules for the model; "" for one that learns them from rewards, GUESSING_RULES for one that can read.
        """
        super().__init__(
            partial(_draw_secret, num_numbers=num_numbers),
            _guess,
            create_number_parser(0, num_numbers - 1),
            rules=rules,
            describe=_describe_secret,
            max_steps=max_guesses,
            invalid_observation="!",
        )


GUESSING_RULES = "Guess a number. You are told > if it is greater and < if it is smaller. Answer with the number alone."


def _draw_secret(generator: random.Random, parameters: Mapping[str, Any], num_numbers: int) -> tuple[int, str]:
    return int(parameters.get("secret", generator.randrange(num_numbers))), "?"


def _guess(secret: int, guess: int) -> GameTurn:
    observation = "=" if guess == secret else ">" if secret > guess else "<"
    return GameTurn(state=secret, observation=observation, reward=float(guess == secret), done=guess == secret)


def _describe_secret(secret: int) -> str:
    return f"the number is {secret}"


def guess_by_halves(observations: Sequence[str], guesses: Sequence[int], num_numbers: int = 10) -> int:
    """Return an expert's guess after these observations (the first is no hint) and guesses: the middle of the remaining numbers."""
    low, high = 0, num_numbers - 1
    for hint, guess in zip(observations[1:], guesses, strict=True):
        low, high = (guess + 1, high) if hint == ">" else (low, guess - 1)
    return (low + high) // 2
