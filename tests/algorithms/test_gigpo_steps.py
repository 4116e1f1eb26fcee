"""GiGPO on StepData: by hand, against loops, against the same episodes as a batch, and nothing given is changed."""

from __future__ import annotations

import copy
import json
import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import advantages as naive
from parity.mapping import load

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.policies import ScriptedAgentPolicy
from rollouts.agents.run import create_episode_generate_fn, run_episode
from rollouts.agents.samples import sample_to_steps
from rollouts.agents.setting import EpisodeSetting
from rollouts.algorithms.anchors import GiGPOSettings, add_weighted, hash_observation, interpolate
from rollouts.algorithms.estimators import estimate_gigpo
from rollouts.algorithms.gigpo_steps import (
    compute_step_levels,
    describe_turns,
    merge_similar_states,
    system_apply_gigpo_to_batch_steps,
    with_step_advantages,
    with_step_levels,
)
from rollouts.algorithms.presets import dapo, gigpo
from rollouts.algorithms.statistics import group_std
from rollouts.backends.factory import create_pytorch_backend
from rollouts.batches import select_rows
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import ConfigError, DataError, RewardError
from rollouts.outcomes import StepOutput
from rollouts.rewards.results import EvaluateResult, align_rewards_with_step_data
from rollouts.steps import StepData
from rollouts.testing import create_tiny_model
from rollouts.training.rollout_batch import train_on_rollouts
from rollouts.types import Message, Prompt, Sample, SamplingParams, Turn

TOKENIZER = create_char_tokenizer()


def make_episode(*steps: tuple[object, float | None], group: int = 0, index: int = 0) -> list[StepData]:
    """Steps from (observation, base_reward)."""
    return [
        StepData(system_step_index=k, observation_data=observation, base_reward=reward, group_index=group, sample_index=index)
        for k, (observation, reward) in enumerate(steps)
    ]


# -- by hand


def test_a_reward_for_whole_episodes_only_reaches_the_steps_through_the_last_one():
    """Two ways from the hall: to the key, which opens the door, or to the cellar. Nobody pays steps; the score is for the door."""
    episodes = [make_episode(("hall", None), ("key", None)), make_episode(("hall", None), ("cellar", None))]
    found = system_apply_gigpo_to_batch_steps(
        episodes, [1.0, 0.0], gamma=0.5, default_step_reward=-0.1, settings=GiGPOSettings(std_level=None)
    )
    # G = (-0.1 + 0.5 * 0.9, 0.9) and (-0.1 - 0.05, -0.1); A_E = +-0.5; only the hall is visited twice: A_S = +-(0.35 + 0.15) / 2
    assert [step.return_to_go for episode in found for step in episode] == pytest.approx([0.35, 0.9, -0.15, -0.1])
    assert [step.advantage for episode in found for step in episode] == pytest.approx([0.5 + 0.25, 0.5, -0.5 - 0.25, -0.5])
    convex = system_apply_gigpo_to_batch_steps(
        episodes, [1.0, 0.0], gamma=0.5, default_step_reward=-0.1, settings=GiGPOSettings(std_level=None, combine=interpolate), omega=0.8
    )
    assert [step.advantage for episode in convex for step in episode] == pytest.approx([0.8 * 0.5 + 0.2 * 0.25, 0.4, -0.45, -0.4])


def test_a_score_is_for_the_episode_and_step_rewards_are_for_the_steps():
    """With rewards of their own, steps do not get the score again: it is A_E alone. A step that nobody judged has the default."""
    episodes = [make_episode(("a", 1.0), ("b", None)), make_episode(("a", 0.0), ("b", 0.5))]
    levels = compute_step_levels(episodes, [0.0, 10.0], settings=GiGPOSettings(gamma=1.0, default_step_reward=0.25, std_level=None))
    assert levels.rewards.tolist() == [[1.0, 0.25], [0.0, 0.5]]
    assert levels.returns.tolist() == [[1.25, 0.25], [0.5, 0.5]]
    assert levels.episode.tolist() == [-5.0, 5.0]
    assert levels.step.tolist() == [[0.375, -0.125], [-0.375, 0.125]]
    assert levels.combined.tolist() == [[-4.625, -5.125], [4.625, 5.125]]
    added = compute_step_levels(episodes, [0.0, 10.0], settings=GiGPOSettings(gamma=1.0, std_level=None, add_final_reward=True))
    assert added.rewards.tolist() == [[1.0, 0.0], [0.0, 10.5]]
    never = compute_step_levels([make_episode(("a", None))], [3.0], settings=GiGPOSettings(add_final_reward=False))
    assert never.returns.tolist() == [[0.0]]


def test_one_group_may_be_paid_and_another_not():
    episodes = [make_episode(("a", 1.0)), make_episode(("a", None)), make_episode(("a", None), group=1)]
    assert compute_step_levels(episodes, [7.0, 8.0, 9.0]).rewards.flatten().tolist() == [1.0, 0.0, 9.0]


def test_what_a_step_is_compared_with_is_told():
    episodes = [make_episode(({"x": 1}, 1.0), ({"x": 2}, 0.0), ({"x": 1}, 0.0)), make_episode(({"x": 1}, 2.0))]
    found = system_apply_gigpo_to_batch_steps(episodes, [0.0, 1.0], gamma=1.0, settings=GiGPOSettings(std_level=None))
    told = found[0][2].step_info["gigpo"]
    assert told == {
        "episode_advantage": -0.5,
        "step_reward": 0.0,
        "return_to_go": 0.0,
        "anchor": told["anchor"],
        "anchor_size": 3,
        "step_advantage": -1.0,
        "advantage": -1.5,
        "state": hash_observation({"x": 1}),
    }
    assert found[0][1].step_info["gigpo"]["anchor_size"] == 1 and found[0][1].step_info["gigpo"]["step_advantage"] == 0.0
    again = [StepData.from_dict(json.loads(json.dumps(step.to_dict()))) for step in found[0]]
    assert again == found[0], "all of it is JSON"


# -- against loops

EPISODES = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.sampled_from([0.0, 0.5, -1.0])), max_size=4)),
    min_size=1,
    max_size=6,
)  # (group, ((observation, base_reward), ...))


@given(EPISODES, st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.4, 1.0]), st.booleans(), st.sampled_from([0.0, -0.1]),
       st.sampled_from([None, True, False]))  # fmt: skip
def test_advantages_and_returns_against_loops(drawn, gamma, omega, convex, default, add_final):
    episodes, groups = [make_episode(*steps, group=group) for group, steps in drawn], [group for group, _ in drawn]
    scores = [float((3 * b) % 4) for b in range(len(drawn))]
    found = system_apply_gigpo_to_batch_steps(
        episodes, scores, GiGPOSettings(combine=interpolate if convex else add_weighted, add_final_reward=add_final, epsilon=0.1),
        gamma=gamma, omega=omega, default_step_reward=default, group_ids=groups,
    )  # fmt: skip
    width = max(len(steps) for _, steps in drawn)
    states = [["abc".index(seen) for seen, _ in steps] + [-1] * (width - len(steps)) for _, steps in drawn]
    own = [[math.nan if reward is None else reward for _, reward in steps] + [0.0] * (width - len(steps)) for _, steps in drawn]
    expected = naive.gigpo(scores, groups, states, own, gamma, omega, 0.1, convex=convex, default=default, add_final=add_final)
    returns = naive.gigpo_returns(scores, groups, states, own, gamma, default=default, add_final=add_final)
    for b, episode in enumerate(found):
        assert [step.advantage for step in episode] == pytest.approx(expected[b][: len(episode)], abs=1e-9)
        assert [step.return_to_go for step in episode] == pytest.approx(returns[b][: len(episode)], abs=1e-9)


def to_samples(drawn, scores) -> list[Sample]:
    """The same episodes as token sequences: two tokens of prompt, then each turn of two tokens followed by one of the environment."""
    samples = []
    for b, (group, steps) in enumerate(drawn):
        turns = tuple(
            Turn(start=2 + 3 * k, end=4 + 3 * k, state=hash_observation(seen), reward=paid) for k, (seen, paid) in enumerate(steps)
        )
        mask = (0.0, 0.0) + (1.0, 1.0, 0.0) * len(steps)
        tokens = tuple((b + t) % 61 + 3 for t in range(len(mask)))
        log_probs = tuple(-0.5 * m for m in mask)
        samples.append(
            Sample(tokens=tokens, loss_mask=mask, rollout_log_probs=log_probs, turns=turns, reward=scores[b], index=b, group_index=group)
        )
    return samples


@given(EPISODES.filter(lambda drawn: any(steps for _, steps in drawn)), st.booleans(), st.sampled_from([None, True, False]),
       st.sampled_from([0.0, -0.1]))  # fmt: skip
def test_steps_and_the_same_episodes_as_a_batch_agree(drawn, convex, add_final, default):
    scores = [float(b % 3) for b in range(len(drawn))]
    combine = interpolate if convex else add_weighted
    settings = GiGPOSettings(gamma=0.9, omega=0.4, combine=combine, default_step_reward=default, add_final_reward=add_final)
    batch = collate_samples(to_samples(drawn, scores))
    episodes = [make_episode(*steps, group=group) for group, steps in drawn]
    steps = system_apply_gigpo_to_batch_steps(episodes, scores, settings, group_ids=[g for g, _ in drawn])
    from_steps = with_step_advantages(batch, steps)
    from_batch = estimate_gigpo(batch, settings=settings)
    torch.testing.assert_close(from_steps.advantages, from_batch.advantages, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(from_steps.returns, from_batch.returns)


class Corridor:
    """Two steps that pay nothing: only the score of the whole episode says what they were worth."""

    def reset(self, config):
        self.left = 2
        return "hall"

    def step(self, action):
        self.left -= 1
        return "hall", 0.0, self.left == 0, {}

    def get_state_description(self):
        return ""

    def get_prompt_prefix(self):
        return ""


async def test_a_score_reaches_the_steps_of_real_episodes_whose_environment_paid_nothing():
    policies = [ScriptedAgentPolicy(["l"]), ScriptedAgentPolicy(["r"])]
    config, prompt = EpisodeConfig(max_turns=2, chat=False), Prompt(content="", index=0)
    episodes = [await run_episode(policy, Corridor, prompt, config) for policy in policies]
    results = [EvaluateResult(1.0), EvaluateResult(0.0)]
    steps = align_rewards_with_step_data(results, [episode.steps for episode in episodes], "batch").raise_unmatched().steps
    levels = compute_step_levels(steps, [1.0, 0.0], settings=GiGPOSettings(gamma=0.5, std_level=None))
    assert levels.returns.tolist() == [[0.5, 1.0], [0.0, 0.0]]
    assert levels.step.tolist() == [[0.125, 0.625], [-0.375, -0.375]]
    own = compute_step_levels([episode.steps for episode in episodes], [1.0, 0.0], settings=GiGPOSettings(gamma=0.5, std_level=None))
    assert [step.base_reward for episode in episodes for step in episode.steps] == [0.0] * 4
    assert own.returns.tolist() == [[0.0, 0.0], [0.0, 0.0]], "an environment that says 0 of each step has judged each step"


# -- one rule for both roads

PAID = st.sampled_from([0.0, 0.5, -1.0])
JUDGED_EPISODES = st.lists(
    st.tuples(
        st.integers(0, 1),  # group
        st.lists(st.tuples(st.sampled_from("ab"), st.none() | PAID), max_size=3),  # observation, and what the environment said
        st.sampled_from(["environment", None, (), []]) | st.dictionaries(st.integers(0, 2), PAID, max_size=3),  # the judge, and steps
        st.sampled_from([0.0, 1.0, 2.0]),  # score
    ),
    min_size=1,
    max_size=5,
).filter(lambda drawn: any(steps for _, steps, _, _ in drawn))


def read_known(steps, judged):
    """The rule of docs/gigpo.md as a loop: what is known of each turn, NaN where nothing is."""
    if judged == "environment":
        return [math.nan if own is None else own for _, own in steps]
    if not judged or not any(k < len(steps) for k in judged):
        return [math.nan for _ in steps]
    return [judged.get(k, math.nan if own is None else own) for k, (_, own) in enumerate(steps)]


@settings(max_examples=60)
@given(JUDGED_EPISODES, st.sampled_from([0.0, -0.25]), st.sampled_from([None, True, False]))
def test_what_is_known_of_turns_is_one_thing_on_both_roads(drawn, default, add_final):
    """Any mixture of environments' rewards, scores alone (None, () and []), and step outputs that name some turns, 0 among them."""
    groups = [group for group, *_ in drawn]
    settings = GiGPOSettings(gamma=0.9, omega=0.4, default_step_reward=default, epsilon=0.1, add_final_reward=add_final)
    scores = [score for *_, score in drawn]
    samples, episodes = [], []
    of_environment = to_samples([(group, steps) for group, steps, _, _ in drawn], scores)
    for b, (group, steps, judged, score) in enumerate(drawn):
        sample, episode = of_environment[b], tuple(make_episode(*steps, group=group, index=b))
        if judged != "environment":
            named = [] if judged == {} else judged and [StepOutput(k, reward) for k, reward in judged.items() if k < len(steps)]
            result = EvaluateResult(score, step_outputs=named)
            sample = result.apply_to(replace(sample, messages=[{"role": "assistant", "content": "x"} for _ in steps]))
            episode = align_rewards_with_step_data(result, episode).raise_unmatched().steps
        samples.append(sample)
        episodes.append(episode)
    batch = collate_samples(samples)
    steps = system_apply_gigpo_to_batch_steps(episodes, scores, settings, group_ids=groups)
    from_steps, from_batch = with_step_advantages(batch, steps), estimate_gigpo(batch, settings=settings)
    torch.testing.assert_close(from_steps.advantages, from_batch.advantages, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(from_steps.returns, from_batch.returns)
    width = max(len(episode) for episode in episodes)
    states = [["ab".index(seen) for seen, _ in steps] + [-1] * (width - len(steps)) for _, steps, _, _ in drawn]
    own = [read_known(steps, judged) + [0.0] * (width - len(steps)) for _, steps, judged, _ in drawn]
    expected = naive.gigpo(scores, groups, states, own, 0.9, 0.4, 0.1, default=default, add_final=add_final)
    for b, row in enumerate(steps):
        assert [step.advantage for step in row] == pytest.approx(expected[b][: len(row)], abs=1e-9)


def test_zero_that_is_said_is_known_and_the_score_stays_out_of_the_steps_in_every_group():
    """The same function judges two groups: in one it found something to pay, in the other nothing. The score is for A_E in both."""
    for paid in (0.0, 1.0):
        episodes = [make_episode(("a", None), ("b", None)), make_episode(("a", None), ("b", None))]
        results = [EvaluateResult(1.0, step_outputs=(StepOutput(0, 0.0), StepOutput(1, paid))),
                   EvaluateResult(0.0, step_outputs=(StepOutput(0, 0.0), StepOutput(1, 0.0)))]  # fmt: skip
        steps = align_rewards_with_step_data(results, episodes, "batch").steps
        levels = compute_step_levels(steps, [1.0, 0.0], settings=GiGPOSettings(gamma=1.0, default_step_reward=-0.5, std_level=None))
        assert levels.rewards.tolist() == [[0.0, paid], [0.0, 0.0]]


# -- against the authors' code

GOLDEN = [
    case
    for case in load(Path(__file__).parents[1] / "data" / "golden" / "gigpo" / "gigpo_outcome_advantage.json")["cases"]
    if case["kwargs"]["step_advantage_w"] > 0
]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["id"].rpartition("/")[2])
def test_steps_have_the_advantages_of_the_authors_code_in_both_conventions(case):
    """Recorded are A_E + w * A_S of rows that are steps; of the other convention what follows from them."""
    given, recorded = case["kwargs"], case["outputs"]
    rows = range(len(given["anchor_obs"]))
    first = [next(t for t, on in enumerate(mask) if on) for mask in given["response_mask"].tolist()]
    expected = torch.tensor([float(recorded["advantages"][row][first[row]]) for row in rows], dtype=torch.float64)
    names = list(dict.fromkeys(given["traj_index"]))
    members = [[row for row in rows if given["traj_index"][row] == name] for name in names]
    groups = list(dict.fromkeys(given["index"]))
    episodes = [
        make_episode(
            *((given["anchor_obs"][row], float(given["rewards"][row])) for row in own), group=groups.index(given["index"][own[0]]), index=b
        )
        for b, own in enumerate(members)
    ]
    scores = [float(given["token_level_rewards"][own[0]].sum()) for own in members]
    std_level = {"mean_norm": None, "mean_std_norm": group_std}[given["mode"]]
    settings = GiGPOSettings(
        gamma=float(given["gamma"]), epsilon=float(given["epsilon"]), across_steps=True, keep_single=True, std_level=std_level
    )
    similarity = float(given["similarity_thresh"]) if given["enable_similarity"] else None
    omega = float(given["step_advantage_w"])
    order = [row for own in members for row in own]
    levels = compute_step_levels(episodes, scores, replace(settings, omega=omega), similarity_threshold=similarity)
    by_sum = [s for e in with_step_levels(episodes, levels) for s in e]
    found = torch.tensor([step.advantage for step in by_sum], dtype=torch.float64)
    torch.testing.assert_close(found, expected[order], rtol=2e-4, atol=2e-5)
    returns = torch.tensor([float(recorded["step_returns"][row]) for row in order], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor([s.return_to_go for s in by_sum], dtype=torch.float64), returns, rtol=1e-5, atol=1e-5)
    episode_level = torch.tensor([s.step_info["gigpo"]["episode_advantage"] for s in by_sum], dtype=torch.float64)
    share = 0.25
    levels = compute_step_levels(episodes, scores, replace(settings, omega=share, combine=interpolate), similarity_threshold=similarity)
    convex = with_step_levels(episodes, levels)
    follows = share * episode_level + (1 - share) * (expected[order] - episode_level) / omega
    torch.testing.assert_close(torch.tensor([s.advantage for e in convex for s in e]).double(), follows, rtol=2e-4, atol=5e-5)


# -- purity, options, bad input


def test_nothing_that_was_given_changes():
    episodes = [make_episode((["a"], 1.0)), make_episode((["a"], 0.0))]
    before, scores = copy.deepcopy(episodes), [1.0, 0.0]
    found = system_apply_gigpo_to_batch_steps(episodes, scores)
    assert episodes == before and scores == [1.0, 0.0]
    assert found is not episodes and all(new is not old for new, old in zip(found, episodes, strict=True))
    assert episodes[0][0].advantage is None and "gigpo" not in episodes[0][0].step_info
    assert system_apply_gigpo_to_batch_steps([], []) == []


def test_the_hash_is_pluggable_and_similarity_needs_none():
    episodes = [make_episode(("door open!", 1.0)), make_episode(("door open.", 0.0))]
    apart = compute_step_levels(episodes, [0.0, 0.0])
    assert apart.step.tolist() == [[0.0], [0.0]] and apart.anchors.tolist() == [[0], [1]]
    by_word = compute_step_levels(
        episodes, [0.0, 0.0], state_hashing_function=lambda seen: seen.split()[0], settings=GiGPOSettings(std_level=None)
    )
    assert by_word.step.tolist() == [[0.5], [-0.5]]
    assert by_word.keys == (("door",), ("door",))
    similar = compute_step_levels(episodes, [0.0, 0.0], similarity_threshold=0.8, settings=GiGPOSettings(std_level=None))
    assert similar.step.tolist() == [[0.5], [-0.5]]
    assert (
        compute_step_levels([*episodes[:1], make_episode(("door open.", 0.0), group=1)], [0.0, 0.0], similarity_threshold=0.8)
        .step.eq(0)
        .all()
    )


async def key_later(seen):
    return "key"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("hashing", "found"),
    [
        (key_later, "key_later gave <coroutine"),
        (list, r"list gave \['d'"),
        (lambda seen: (1, []), r"<lambda> gave \(1, \[\]\)"),
    ],
)
def test_what_is_no_key_is_named_with_its_step(hashing, found):
    with pytest.raises(DataError, match=rf"the state_hashing_function {found}.*for step 0 of episode 0, which is no key"):
        compute_step_levels([make_episode(("door", 1.0))], [0.0], state_hashing_function=hashing)


async def test_a_similarity_of_episodes_makes_their_turns_one_anchor():
    """Two wordings of one state; the keys of the first sample stand for both, and the steps of the same episodes say the same."""

    class Door(Corridor):
        def step(self, action):
            self.left -= 1
            return f"the door is locked {action}", float(action == "."), self.left == 0, {}

    prompt, whole = Prompt(content="", index=0), EpisodeSetting(environment_factory=Door, config=EpisodeConfig(max_turns=2, chat=False))
    engine = InProcessEngine(create_tiny_model(), TOKENIZER)
    by_model = [
        await create_episode_generate_fn([engine], TOKENIZER, SamplingParams(max_tokens=1), setting)(prompt, 6)
        for setting in (whole, replace(whole, similarity=0.9), replace(whole, similarity=0.9, state_key=lambda seen: None))
    ]
    hashed, texts, none = ([[turn.state for turn in sample.turns] for sample in group] for group in by_model)
    assert {row[0] for row in hashed} == {hash_observation("hall")} and len({row[1] for row in hashed}) > 1
    assert {row[0] for row in texts} == {"hall"} and {row[1] for row in texts} == {texts[0][1]} and texts[0][1].startswith("the door")
    assert none == [[None, None]] * 6
    levels = compute_step_levels([sample_to_steps(sample) for sample in by_model[1]], [0.0] * 6, similarity_threshold=0.9)
    assert [len(set(column)) for column in zip(*levels.anchors.tolist(), strict=True)] == [1, 1]
    with pytest.raises(ConfigError, match=r"EpisodeSetting\.similarity is 0"):
        EpisodeSetting(environment_factory=Door, similarity=0.0)


def test_observations_are_compared_by_their_canonical_json():
    assert hash_observation({"a": 1, "b": [2, 3]}) == hash_observation({"b": (2, 3), "a": 1})
    assert hash_observation(torch.tensor([[1, 2]])) == hash_observation([[1, 2]])
    assert hash_observation(Message(role="user", content="x")) == hash_observation({"role": "user", "content": "x"})
    keys = [hash_observation(x) for x in ("1", 1, [1], {"1": 1}, None, "", [], {}, math.nan, "é", True)]
    assert len(set(keys)) == len(keys)
    assert hash_observation({"room": "hall", "bag": ["key"]}) == "79fbc3735f243182f97af405ea04b454", "the same in every process"
    with pytest.raises(DataError, match="type set cannot be written as JSON"):
        hash_observation({1, 2})


@pytest.mark.parametrize(
    ("episodes", "scores", "options", "error", "message"),
    [
        ([make_episode(("a", 1.0))], [1.0, 2.0], {}, DataError, "2 final scores for 1 episodes"),
        ([make_episode(("a", 1.0))], [math.nan], {}, RewardError, "final score of episode 0 is nan"),
        ([make_episode(("a", 1.0)), make_episode(("a", math.inf))], [0.0, 0.0], {}, RewardError, "step 0 of episode 1 has base_reward inf"),
        ([make_episode(("a", 1.0)), []], [0.0, 0.0], {}, DataError, "episode 1 has no steps"),
        ([make_episode(("a", 1.0)) + make_episode(("a", 1.0))], [0.0], {}, DataError, r"system_step_index \[0, 0\]"),
        ([make_episode(("a", 1.0)) + make_episode(("a", 1.0), group=1)], [0.0], {}, DataError, r"steps of groups \[0, 1\]"),
        ([make_episode((1, 1.0))], [0.0], {"similarity_threshold": 0.5}, DataError, "found int at step 0 of episode 0"),
        ([make_episode((object(), 1.0))], [0.0], {}, DataError, "cannot be written as JSON"),
    ],
)
def test_what_cannot_be_compared_is_named(episodes, scores, options, error, message):
    with pytest.raises(error, match=message):
        with_step_levels(episodes, compute_step_levels(episodes, scores, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"omega": math.nan}, "omega is nan, expected a finite number of at least 0"),
        ({"omega": -1.0}, "omega is -1.0"),
        ({"omega": math.inf}, "omega is inf"),
        ({"omega": 1.5, "combine": interpolate}, r"omega is 1.5, expected a finite number in \[0, 1\]"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"gamma": math.nan}, "gamma is nan"),
        ({"epsilon": -1e-6}, "epsilon is -1e-06"),
        ({"default_step_reward": math.nan}, "default_step_reward is nan"),
    ],
)
def test_options_out_of_range_are_refused_on_both_paths(options, message):
    with pytest.raises(ConfigError, match=message):
        GiGPOSettings(**options)
    with pytest.raises(ConfigError, match=message):
        gigpo(**options)


def test_a_similarity_out_of_range_is_refused():
    with pytest.raises(ConfigError, match=r"similarity_threshold is 1\.5"):
        compute_step_levels([make_episode(("a", 1.0))], [1.0], similarity_threshold=1.5)


def test_similar_states_of_a_group_of_samples_become_one():
    texts = ["door open!", None, "a dark room", "door open."]
    group = tuple(
        Sample(tokens=(3, 4), loss_mask=(0.0, 1.0), turns=(Turn(start=1, end=2, state=text, reward=1.0),), index=i)
        for i, text in enumerate(texts)
    )
    merged = merge_similar_states((*group, Sample(index=9)), threshold=0.8)
    assert [sample.turns[0].state for sample in merged[:4] if sample.turns] == ["door open!", None, "a dark room", "door open!"]
    assert merged[4] == Sample(index=9) and group[3].turns[0].state == "door open."
    assert merged[3].turns[0].reward == 1.0


# -- from steps to tokens

TWO = [(0, [("a", 1.0), ("b", 0.0)]), (0, [("a", 0.0)])]


def test_the_advantage_of_a_step_is_at_the_tokens_of_its_turn():
    batch = collate_samples(to_samples(TWO, [1.0, 0.0]))
    steps = [make_episode(*steps) for _, steps in TWO]
    steps = [[replace(step, advantage=10.0 * b + step.system_step_index + 1) for step in row] for b, row in enumerate(steps)]
    found = with_step_advantages(batch, steps)
    assert found.advantages.tolist() == [[0, 0, 1, 1, 0, 2, 2, 0], [0, 0, 11, 11, 0, 0, 0, 0]]
    assert found.returns is None, "not every step has a return_to_go"
    assert batch.advantages is None
    part = select_rows(found, [1])
    assert part.advantages.tolist() == [[0, 0, 11, 11, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda steps: steps[:1], "steps of 1 episodes for 2 rows"),
        (lambda steps: [steps[1], steps[0]], "row 0 has 2 turns, but 1 steps"),
        (lambda steps: [steps[0], [replace(steps[1][0], advantage=None)]], "step 0 of row 1 has advantage None"),
        (lambda steps: [steps[0], [replace(steps[1][0], advantage=math.nan)]], "step 0 of row 1 has advantage nan"),
    ],
)
def test_steps_of_other_rows_are_refused(change, message):
    batch = collate_samples(to_samples(TWO, [1.0, 0.0]))
    steps = system_apply_gigpo_to_batch_steps([make_episode(*steps) for _, steps in TWO], [1.0, 0.0])
    with pytest.raises(DataError, match=message):
        with_step_advantages(batch, change(steps))


async def test_a_ppo_step_on_the_tokens_of_a_good_step_makes_them_more_probable():
    batch = collate_samples(to_samples(TWO, [1.0, 0.0]))
    backend = create_pytorch_backend(create_tiny_model(), lr=1e-2)
    before = await backend.forward(batch, lambda o: o.log_probs).result()
    batch = replace(batch, rollout_log_probs=before)
    steps = system_apply_gigpo_to_batch_steps([make_episode(*steps) for _, steps in TWO], [1.0, 0.0])
    steps[0][1] = replace(steps[0][1], advantage=0.0)  # only the two first steps, from one state, are trained: one is better
    algorithm = replace(dapo(), estimate=partial(with_step_advantages, steps=steps))
    metrics = await train_on_rollouts(backend, batch, algorithm)
    assert metrics["num_tokens"] == 6
    change = await backend.forward(batch, lambda o: o.log_probs).result() - before
    assert change[0, 2:4].sum() > 0 > change[1, 2:4].sum()


def test_what_the_advantage_of_each_step_is_made_of_is_told_at_debug_only(caplog):
    episodes = [make_episode(*steps, group=7) for _, steps in TWO]
    with caplog.at_level(logging.INFO, logger="rollouts"):
        quiet = system_apply_gigpo_to_batch_steps(episodes, [1.0, 0.0], settings=GiGPOSettings(std_level=None))
    assert caplog.messages == []
    with caplog.at_level(logging.DEBUG, logger="rollouts"):
        steps = system_apply_gigpo_to_batch_steps(episodes, [1.0, 0.0], settings=GiGPOSettings(std_level=None))
    assert steps == quiet
    told = steps[0][1].step_info["gigpo"]
    assert len(caplog.messages) == sum(map(len, episodes))
    assert caplog.messages[1] == (
        f"episode 0 (group 7) step 1: episode_advantage=0.5 step_reward={told['step_reward']:.4g} return_to_go={told['return_to_go']:.4g} "
        f"anchor={told['anchor']} anchor_size={told['anchor_size']} step_advantage={told['step_advantage']:.4g} "
        f"advantage={told['advantage']:.4g} state={told['state']}"
    )
    with caplog.at_level(logging.DEBUG, logger="rollouts.algorithms.gigpo_steps"):
        system_apply_gigpo_to_batch_steps(episodes, [1.0, 0.0], settings=GiGPOSettings(std_level=None), group_ids=[3, 4])
    assert caplog.messages[-1].startswith("episode 1 (group 4) step 0: episode_advantage=")


def test_a_level_can_be_told_without_steps():
    batch = estimate_gigpo(collate_samples(to_samples(TWO, [1.0, 0.0])), settings=GiGPOSettings(std_level=None, gamma=1.0))
    assert batch.turns is not None and batch.turns.levels is not None
    (told,) = describe_turns(batch.turns.levels, 1)
    assert told["anchor_size"] == 2 and told["step_advantage"] == -0.5 and told["episode_advantage"] == -0.5 and "state" not in told
