"""Anchor states, step returns and the two levels of advantages against loops and by hand."""

from __future__ import annotations

from functools import partial

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import advantages as naive

from rollouts.algorithms.anchors import (
    GiGPOSettings,
    add_weighted,
    anchor_groups,
    compute_turn_levels,
    episode_advantages,
    fill_turn_rewards,
    find_similar,
    gigpo_advantages,
    interpolate,
    similarity,
    state_key,
    step_advantages,
    step_returns,
    summarize_anchors,
    turn_advantages,
)
from rollouts.types import Turns

STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.sampled_from("abc"), st.sampled_from([0.0, 1.0, -0.5, 2.0])),
    min_size=1,
    max_size=12,
)  # group, trajectory of the group, state, reward


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance)


def columns(steps):
    groups = torch.tensor([group for group, *_ in steps])
    trajectories = torch.tensor([10 * group + number for group, number, *_ in steps])
    return groups, trajectories, [state for *_, state, _ in steps], torch.tensor([r for *_, r in steps], dtype=torch.float64)


# -- anchor states


@given(STEPS)
def test_equal_states_of_one_group_are_one_anchor(steps):
    groups, _, states, _ = columns(steps)
    found = anchor_groups(states, groups).tolist()
    keys = list(zip(groups.tolist(), states, strict=True))
    assert found == [list(dict.fromkeys(keys)).index(key) for key in keys]


@pytest.mark.parametrize(
    ("same", "other"),
    [
        ([[1, 0], [2, 3]], [[1, 0], [2, 4]]),
        ({"room": "hall", "bag": ["key"]}, {"room": "hall", "bag": []}),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])),
        (("a", 1), ["a", "1"]),
        (7, "7"),
        ([], {}),
    ],
)
def test_states_may_be_nested(same, other):
    again = {**same} if isinstance(same, dict) else same
    found = anchor_groups([same, other, again], torch.zeros(3, dtype=torch.int64))
    assert found.tolist() == [0, 1, 0]


def test_the_order_of_keys_and_the_kind_of_sequence_do_not_matter():
    assert state_key({"a": 1, "b": [2, 3]}) == state_key({"b": (2, 3), "a": 1})
    with pytest.raises(AssertionError, match="a state of type set cannot be compared"):
        state_key({1, 2})


def test_similar_texts_join_the_first_that_is_near_enough():
    states = ["You see a red apple.", "You see a red apple!", "A dark cave.", "You see a red apple.", "You see a red appl"]
    groups = torch.tensor([0, 0, 0, 1, 0])
    assert anchor_groups(states, groups, threshold=0.9).tolist() == [0, 0, 1, 2, 0]
    assert anchor_groups(states, groups, threshold=1.0).tolist() == [0, 1, 2, 3, 4]
    assert similarity("abcd", "bcde") == pytest.approx(0.75)
    with pytest.raises(AssertionError, match="threshold is 0"):
        anchor_groups(states, groups, threshold=0)
    with pytest.raises(AssertionError, match="similarity needs states that are text, found int"):
        anchor_groups([1], torch.tensor([0]), threshold=0.5)
    with pytest.raises(AssertionError, match="group_ids has shape"):
        anchor_groups(["a"], groups)


# -- one row a step


@given(STEPS, st.sampled_from([0.0, 0.5, 1.0]))
def test_step_returns_against_loops(steps, gamma):
    _, trajectories, _, rewards = columns(steps)
    ids, values = trajectories.tolist(), rewards.tolist()
    expected = [sum(gamma**k * values[j] for k, j in enumerate(j for j in range(i, len(ids)) if ids[j] == ids[i])) for i in range(len(ids))]
    close(step_returns(rewards, trajectories, gamma), expected)


def test_no_step_has_no_return():
    assert step_returns(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0.9).shape == (0,)


@given(STEPS, st.booleans())
def test_episode_advantages_against_loops(steps, across_steps):
    groups, trajectories, _, _ = columns(steps)
    rewards = (trajectories * 7 % 5).double()  # one for each trajectory
    ids = trajectories.tolist()
    entries = [i for i in range(len(ids)) if across_steps or ids[i] not in ids[:i]]
    expected: list[float] = []
    for i, group in enumerate(groups.tolist()):
        pool = [rewards[j].item() for j in entries if groups[j] == group]
        expected.append((rewards[i].item() - oracles.mean(pool)) / (oracles.std(pool) + 0.1))
    close(episode_advantages(rewards, groups, trajectories, across_steps=across_steps, epsilon=0.1), expected)


def test_a_group_of_one_episode_is_zero_or_keeps_its_reward():
    rewards, groups, trajectories = torch.tensor([2.0, 2.0, 1.0, 3.0]), torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 2])
    assert episode_advantages(rewards, groups, trajectories, std_level=None).tolist() == [0.0, 0.0, -1.0, 1.0]
    assert episode_advantages(rewards, groups, trajectories, std_level=None, keep_single=True).tolist() == [2.0, 2.0, -1.0, 1.0]
    across = episode_advantages(rewards, groups, trajectories, std_level=None, keep_single=True, across_steps=True)
    assert across.tolist() == [0.0, 0.0, -1.0, 1.0]  # two entries, the steps of one episode


def test_a_state_visited_once_has_no_step_advantage():
    returns, anchors = torch.tensor([5.0, 1.0, 3.0]), torch.tensor([4, 2, 2])
    assert step_advantages(returns, anchors, std_level=None).tolist() == [0.0, -1.0, 1.0]
    assert step_advantages(returns, anchors).tolist()[0] == 0.0


# -- both levels, and rows that are episodes


@st.composite
def episodes(draw):
    rows, turns = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, turns), min_size=rows, max_size=rows))
    pick = st.lists(st.integers(0, 2), min_size=turns, max_size=turns)
    states = [[s if k < n else -1 for k, s in enumerate(draw(pick))] for n in lengths]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    step_rewards = torch.rand(rows, turns, generator=generator, dtype=torch.float64)
    rewards = torch.rand(rows, generator=generator, dtype=torch.float64)
    groups = draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))
    return rewards, torch.tensor(groups), torch.tensor(states), torch.where(torch.tensor(states) >= 0, step_rewards, torch.nan)


@pytest.mark.parametrize("convex", [False, True])
@pytest.mark.parametrize("omega", [0.0, 1.0, 0.3])
@given(case=episodes())
def test_advantages_of_turns_against_loops(omega, convex, case):
    rewards, groups, states, step_rewards = case
    rows, num_turns = states.shape
    ids = torch.arange(num_turns).repeat_interleave(2).expand(rows, -1)
    ids = torch.where(states.repeat_interleave(2, dim=1) >= 0, ids, -1)
    turns = Turns(ids=ids, states=states, rewards=step_rewards)
    found = turn_advantages(
        rewards, groups, turns, settings=GiGPOSettings(gamma=0.9, omega=omega, epsilon=0.1, combine=interpolate if convex else add_weighted)
    )
    steps = (rewards.tolist(), groups.tolist(), states.tolist(), step_rewards.tolist())
    expected = naive.gigpo(*steps, 0.9, omega, 0.1, convex=convex, add_final=False)
    episode = oracles.grpo_advantages(rewards.tolist(), groups.tolist(), 0.1)
    for b in range(rows):
        for t, k in enumerate(ids[b].tolist()):
            close(found[b, t], expected[b][k] if k >= 0 else (omega if convex else 1.0) * episode[b], 1e-9)


@pytest.mark.parametrize(("omega", "convex", "across_steps"), [(1.0, False, False), (0.4, False, True), (0.4, True, False)])
@given(case=episodes())
def test_steps_as_rows_and_turns_of_episodes_agree(omega, convex, across_steps, case):
    rewards, groups, states, step_rewards = case
    rows, num_turns = states.shape
    turns = Turns(ids=torch.where(states >= 0, torch.arange(num_turns), -1), states=states, rewards=step_rewards)
    combine = interpolate if convex else add_weighted
    settings = GiGPOSettings(gamma=0.9, omega=omega, epsilon=0.1, combine=combine, across_steps=across_steps)
    by_turn = turn_advantages(rewards, groups, turns, settings)
    steps = [(b, k) for b in range(rows) for k in range(num_turns) if states[b, k] >= 0]
    row = torch.tensor([b for b, _ in steps], dtype=torch.int64)
    if set(row.tolist()) != set(range(rows)):
        return  # an episode without a step has no row of its own, but counts in the mean of its group
    anchors = anchor_groups([states[b, k].item() for b, k in steps], groups[row])
    step_values = torch.stack([step_rewards[b, k] for b, k in steps])
    by_step = gigpo_advantages(rewards[row], step_values, groups[row], row, anchors, settings)
    close(by_step, torch.stack([by_turn[b, k] for b, k in steps]), 1e-9)


def test_two_answers_to_one_state_by_hand():
    states, rewards = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    turns = Turns(ids=torch.tensor([[0, -1, 1], [0, -1, 1]]), states=states, rewards=rewards)
    found = turn_advantages(
        torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), turns, settings=GiGPOSettings(gamma=0.5, omega=2.0, std_level=None)
    )
    torch.testing.assert_close(found, torch.tensor([[0.5 + 2 * 0.25, 0.5, 0.5], [-0.5 - 2 * 0.25, -0.5, -0.5]]))


def test_episodes_without_a_turn_have_their_episode_advantage_everywhere():
    none = torch.zeros(2, 0)
    turns = Turns(ids=torch.full((2, 3), -1), states=none.long(), rewards=none)
    found = turn_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), turns, settings=GiGPOSettings(std_level=None))
    assert found.tolist() == [[0.5] * 3, [-0.5] * 3]


# -- conventions, sparse rewards, metrics


def test_the_two_conventions_by_hand():
    episode, step = torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5])
    assert add_weighted(episode, step, 2.0).tolist() == [2.0, 0.0]
    assert interpolate(episode, step, 0.75).tolist() == [0.875, -0.625]
    assert interpolate(episode, step, 1.0).tolist() == episode.tolist()
    with pytest.raises(AssertionError, match="omega is 2"):
        interpolate(episode, step, 2.0)


def test_rewards_for_whole_episodes_go_to_their_last_turns():
    own = torch.tensor([[0.0, 0.0, 9.0], [5.0, 0.0, 9.0], [0.0, 9.0, 9.0]])
    real = torch.tensor([[True, True, False], [True, True, False], [True, False, False]])
    known, rewards = own != 0, torch.tensor([1.0, 2.0, 3.0])
    fill = partial(fill_turn_rewards, own, known, rewards, real=real, default_step_reward=-1.0)
    one_group, two = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1])
    paid = [[-1.0, -1.0, 0.0], [5.0, -1.0, 0.0], [-1.0, 0.0, 0.0]]
    assert fill(one_group).tolist() == paid, "somebody of the group was paid"
    assert fill(two).tolist() == [*paid[:2], [2.0, 0.0, 0.0]]
    assert fill(two, add_final_reward=True).tolist() == [[-1.0, 0.0, 0.0], [5.0, 1.0, 0.0], [2.0, 0.0, 0.0]]
    assert fill(two, add_final_reward=False).tolist() == paid
    nothing = torch.zeros(2, 0)
    assert fill_turn_rewards(nothing, nothing.bool(), rewards[:2], two[:2], nothing.bool()).shape == (2, 0)


def test_levels_say_nothing_about_turns_that_are_not_there():
    states = torch.tensor([[0, 1, 0], [0, -1, -1]])
    rewards = torch.tensor([[1.0, 0.0, 0.0], [3.0, torch.nan, torch.nan]], dtype=torch.float64)
    levels = compute_turn_levels(
        torch.tensor([1.0, 3.0]).double(), torch.tensor([4, 4]), states, rewards, settings=GiGPOSettings(gamma=1.0, std_level=None)
    )
    assert levels.episode.tolist() == [-1.0, 1.0]
    assert levels.returns.tolist() == [[1.0, 0.0, 0.0], [3.0, 0.0, 0.0]]
    close(levels.step, [[1 - 4 / 3, 0.0, -4 / 3], [3 - 4 / 3, 0.0, 0.0]])
    close(levels.combined, [[-4 / 3, -1.0, -7 / 3], [8 / 3, 0.0, 0.0]])
    assert (levels.anchors >= 0).tolist() == (states >= 0).tolist()
    assert levels.anchors[0, 0] == levels.anchors[0, 2] == levels.anchors[1, 0] != levels.anchors[0, 1]


def test_sizes_of_anchors_are_counted():
    anchors = torch.tensor([[0, 0, 1, -1], [2, 2, 2, 0], [3, -1, -1, -1]])
    assert summarize_anchors(anchors) == {
        "num_anchors": 4.0,
        "anchor_size_mean": 2.0,
        "anchor_size_max": 3.0,
        "anchor_single_fraction": 0.25,
        "anchors_of_1": 2.0,
        "anchors_of_2": 0.0,
        "anchors_of_3_to_4": 2.0,
        "anchors_of_5_to_8": 0.0,
        "anchors_of_9_to_16": 0.0,
        "anchors_of_17_or_more": 0.0,
    }
    many = summarize_anchors(torch.zeros(40, dtype=torch.int64))
    assert many["anchors_of_17_or_more"] == 1.0 and many["anchor_single_fraction"] == 0.0
    assert summarize_anchors(torch.tensor([[-1]])) == {"num_anchors": 0.0}
    sizes = [1, 2, 4, 5, 8, 9, 16, 17]
    counted = summarize_anchors(torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)))
    assert [counted[name] for name in counted if name.startswith("anchors_of_")] == [1.0, 1.0, 1.0, 2.0, 2.0, 1.0]


def test_texts_exactly_as_similar_as_the_threshold_are_one_state():
    bound = similarity("a key", "a door")
    assert 0 < bound < 1
    assert find_similar("a key", ["a sword", "a door"], bound) == 1
    assert find_similar("a key", ["a door"], bound + 1e-6) == 1, "one more than there are: it is similar to none"
