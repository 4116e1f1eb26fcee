"""Games in text: parsers of actions, a game of pure functions, and guessing a number."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts import EnvironmentConfig, EnvironmentFault, step_environment
from rollouts.chat.char_tokenizer import ALPHABET
from rollouts.environments.calls import check_step
from rollouts.environments.games.text_game import (
    GUESSING_RULES,
    GameTurn,
    SimpleGameEnvironment,
    TextGameEnv,
    create_number_parser,
    create_tag_parser,
    create_word_parser,
    guess_by_halves,
)
from rollouts.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), (" 7\n", 7), ("no, not 3: 12", 12), ("-1", -1), ("13", None), ("-2", None), ("", None), ("x7", None), ("7x", None),
     ("1.5", None), ("I say 5.", 5), ("9" * 30, None), ("٣", None)],
)  # fmt: skip
def test_numbers_are_read_from_text(text: str, number: int | None):
    assert create_number_parser(-1, 12)(text) == number


def test_words_are_read_from_text():
    parse = create_word_parser(["go north", "go", "take+drop"])
    assert parse("I GO NORTH now") == "go north"
    assert parse("go north, then go") == "go"
    assert parse("take+drop") == "take+drop"
    assert parse("gone") is None
    assert create_word_parser({"yes": 1, "no": 0})("well, no") == 0


def test_tags_are_read_from_text():
    parse = create_tag_parser()
    assert parse("<action>look</action> or <action> go\n</action>") == "go"
    assert parse("<action>go") is None
    assert create_tag_parser("move", create_number_parser(0, 9))("4 <move>7</move> 5") == 7
    assert create_tag_parser("move", create_number_parser(0, 9))("<move>x</move>") is None


def begin(generator: Any, parameters: Any) -> tuple[Any, Any]:
    return (generator.randrange(100), ()), {"exits": ["n"]}


def play(state: Any, action: str) -> GameTurn:
    seed, path = state
    return GameTurn(state=(seed, (*path, action)), observation=f"{action} of {seed}", reward=0.5, info={"steps": len(path)})


def test_a_game_of_three_functions():
    game = SimpleGameEnvironment(
        begin, play, create_word_parser("ns"), rules="Walk.", describe=str, max_steps=3, invalid_observation="?", invalid_reward=-1.0
    )
    assert game.reset(EnvironmentConfig(seed=4)) == {"exits": ["n"]}
    seed = game.step("n").observation.removeprefix("n of ")
    assert check_step(game.step("fly")) == ("?", -1.0, False, {"policy_error": "no action in 'fly'"})
    assert game.get_state_description() == f"({seed}, ('n',))"
    assert game.step("s") == (f"s of {seed}", 0.5, True, {"steps": 1, "action": "s", "outcome": "max_steps"})
    assert game.get_prompt_prefix() == "Walk."
    game.reset(EnvironmentConfig(seed=4))
    assert game.get_state_description() == f"({seed}, ())"
    with pytest.raises(ConfigError, match="max_steps is 0"):
        SimpleGameEnvironment(begin, play, str, max_steps=0)


async def test_a_game_that_fails_is_a_fault():
    def broken(state: Any, action: Any) -> GameTurn:
        raise IndexError("off the map")

    game = SimpleGameEnvironment(begin, broken, str)
    game.reset(EnvironmentConfig())
    with pytest.raises(EnvironmentFault, match=r"SimpleGameEnvironment\.step raised IndexError .*off the map"):
        await step_environment(game, "n")


def guess(secret: int, texts: list[str], **settings: Any) -> list[tuple[str, float, bool]]:
    game = TextGameEnv(**settings)
    assert game.reset(EnvironmentConfig(parameters={"secret": secret})) == "?"
    return [tuple(game.step(text))[:3] for text in texts]


def test_guessing_a_number():
    assert guess(6, ["4", "8", "6"]) == [(">", 0.0, False), ("<", 0.0, False), ("=", 1.0, True)]
    assert guess(6, ["x", "10", "1", "2"]) == [("!", 0.0, False), ("!", 0.0, False), (">", 0.0, False), (">", 0.0, True)]
    assert guess(25, ["25"], num_numbers=30) == [("=", 1.0, True)]
    assert set("?<>=!") <= set(ALPHABET[:61])
    assert TextGameEnv(rules=GUESSING_RULES).get_prompt_prefix() == GUESSING_RULES


def test_equal_seeds_have_equal_secrets():
    def secret(seed: int) -> str:
        game = TextGameEnv()
        game.reset(EnvironmentConfig(seed=seed))
        return game.get_state_description()

    assert [secret(seed) for seed in range(50)] == [secret(seed) for seed in range(50)]
    assert len({secret(seed) for seed in range(50)}) == 10


def test_guessing_by_halves_finds_each_of_ten_numbers_in_four():
    for number in range(10):
        game = TextGameEnv()
        observations, guesses = [game.reset(EnvironmentConfig(parameters={"secret": number}))], []
        done, reward = False, 0.0
        while not done:
            guesses.append(guess_by_halves(observations, guesses))
            observation, reward, done, _ = game.step(str(guesses[-1]))
            observations.append(observation)
        assert reward == 1.0
