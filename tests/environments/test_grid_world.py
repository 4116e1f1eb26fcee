"""The grid world: moves, ends, seeds, states that repeat, prompts and experts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rollouts import EnvironmentConfig
from rollouts.chat.char_tokenizer import ALPHABET
from rollouts.environments.games.grid_world import (
    RULES,
    GridWorld,
    GridWorldConfig,
    choose_expert_move,
    choose_noisy_move,
    create_grid_world_prompts,
    draw_holes,
    find_way,
    move,
    parse_move,
)
from rollouts.errors import DataError


def walk(actions: str, config: EnvironmentConfig, world: GridWorld | None = None) -> list[tuple[str, float, bool, dict]]:
    world = world or GridWorld()
    world.reset(config)
    steps = []
    for letter in actions:
        step = world.step(letter)
        steps.append((step.observation, step.reward, step.done, dict(step.info)))
    return steps


ENDS = {"start": [0, 0], "goal": [2, 1]}


def test_a_walk_to_the_goal():
    assert GridWorld().reset(EnvironmentConfig(parameters=ENDS)) == "00>21"
    assert walk("rdr", EnvironmentConfig(parameters=ENDS)) == [
        ("10>21", 0.0, False, {}),
        ("11>21", 0.0, False, {}),
        ("21>21", 1.0, True, {"outcome": "goal"}),
    ]


def test_edges_stop_and_what_is_no_move_costs_a_step():
    assert walk("ul?", EnvironmentConfig(parameters=ENDS)) == [
        ("00>21", 0.0, False, {}),
        ("00>21", 0.0, False, {}),
        ("00>21", 0.0, False, {"policy_error": "'?' names no move"}),
    ]
    assert [move((3, 3), letter, 4) for letter in "udlr"] == [(3, 2), (3, 3), (2, 3), (3, 3)]


def test_an_episode_ends_after_max_steps():
    config = GridWorldConfig(parameters=ENDS, max_steps=2, step_reward=-0.1)
    assert walk("uu", config)[-1] == ("00>21", -0.1, True, {"outcome": "max_steps"})
    assert walk("rr", GridWorldConfig(parameters={"start": [0, 1], "goal": [2, 1]}, max_steps=2))[-1][1:] == (
        1.0,
        True,
        {"outcome": "goal"},
    )


def test_equal_seeds_begin_equally_and_others_do_not():
    starts = [GridWorld().reset(EnvironmentConfig(seed=seed)) for seed in range(20)]
    assert starts == [GridWorld().reset(EnvironmentConfig(seed=seed)) for seed in range(20)]
    assert len(set(starts)) > 10


def test_different_ways_meet_in_equal_states():
    config = EnvironmentConfig(parameters={"start": [0, 0], "goal": [3, 3]})
    assert walk("rd", config)[-1][0] == walk("dr", config)[-1][0] == walk("drlr", config)[-1][0]


@pytest.mark.parametrize(
    ("text", "letter"),
    [("u", "u"), (" R\n", "r"), ("down", "d"), ("I go left, then up.", "u"), ("ud", None), ("", None), ("upward", None), ("north", None)],
)
def test_moves_are_read_from_text(text: str, letter: str | None):
    assert parse_move(text) == letter


def test_holes_end_the_episode_and_cut_nothing_off():
    for layout_seed in range(50):
        config = GridWorldConfig(num_holes=4, layout_seed=layout_seed)
        holes = draw_holes(config)
        assert len(holes) == 4
        for prompt in create_grid_world_prompts(0, 20, config):
            way = find_way(tuple(prompt.metadata["start"]), tuple(prompt.metadata["goal"]), config)
            steps = walk(way, replace(config, parameters=prompt.metadata))
            assert [step[2] for step in steps] == [False] * (len(way) - 1) + [True]
            assert steps[-1][3] == {"outcome": "goal"}
            assert str(len(way)) == prompt.metadata["ground_truth"]
    config = GridWorldConfig(num_holes=1, layout_seed=3, size=3)
    ((column, row),) = draw_holes(config)
    letter = next(m for m in "udlr" if move((column, row), m, 3) != (column, row))
    beside = move((column, row), letter, 3)
    back = {"u": "d", "d": "u", "l": "r", "r": "l"}[letter]
    goal = next([x, y] for x in range(3) for y in range(3) if (x, y) not in {(column, row), beside})
    last = walk(back, replace(config, parameters={"start": list(beside), "goal": goal}))[-1]
    assert last[1:] == (0.0, True, {"outcome": "hole"})


def test_a_shortest_way_without_holes_is_the_sum_of_the_distances():
    assert find_way((0, 0), (3, 3)) == "dddrrr"
    assert find_way((2, 2), (2, 2)) == ""
    for prompt in create_grid_world_prompts(1, 50):
        (x, y), (gx, gy) = prompt.metadata["start"], prompt.metadata["goal"]
        assert int(prompt.metadata["ground_truth"]) == abs(x - gx) + abs(y - gy)


def test_prompts_are_different_and_a_function_of_the_seed():
    prompts = create_grid_world_prompts(5, 240)
    assert len({str(prompt.metadata) for prompt in prompts}) == 240
    assert [prompt.index for prompt in prompts] == list(range(240))
    assert prompts == create_grid_world_prompts(5, 240)
    assert prompts[:10] != create_grid_world_prompts(6, 10)
    with pytest.raises(DataError, match="241 prompts asked for, but this grid has 240 pairs"):
        create_grid_world_prompts(5, 241)


def test_experts_reach_the_goal_and_noisy_ones_err_in_their_share():
    assert choose_expert_move("00>30") == "r"
    generator = random.Random(0)
    moves = [choose_noisy_move("00>30", generator, wrong_share=0.4) for _ in range(2000)]
    assert moves.count("r") / 2000 == pytest.approx(0.7, abs=0.04)
    assert [choose_noisy_move("00>30", generator, wrong_share=0.0) for _ in range(20)] == ["r"] * 20


def test_settings_and_places_that_cannot_be_are_refused():
    with pytest.raises(DataError, match="size is 11, expected 2 to 10"):
        GridWorldConfig(size=11)
    with pytest.raises(DataError, match="num_holes is 5"):
        GridWorldConfig(num_holes=5)
    with pytest.raises(DataError, match="max_steps is 0"):
        GridWorldConfig(max_steps=0)
    for place in ([4, 0], [0], "00", [0, 0.5], None):
        with pytest.raises(DataError, match=r"goal is .*expected \[column, row\]"):
            GridWorld().reset(EnvironmentConfig(parameters={"start": [0, 0], "goal": place}))


def test_everything_is_short_and_made_of_the_small_vocabulary():
    assert set("".join(f"{a}{b}>{c}{d}" for a, b, c, d in ["0123", "4567", "8990"]) + "udlr") <= set(ALPHABET[:61])
    world = GridWorld(rules=RULES)
    world.reset(EnvironmentConfig(parameters=ENDS))
    assert world.get_state_description() == "@...\n..G.\n....\n...."
    assert world.get_prompt_prefix() == RULES
    assert GridWorld().get_prompt_prefix() == ""
