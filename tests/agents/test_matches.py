"""Matches of several roles: turns, rewards, samples of each role, and estimates that compare a role with itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import trio

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.matches import MatchSetting, create_match_generate_fn, run_match
from rollouts.agents.policies import EngineAgentPolicy, ScriptedAgentPolicy
from rollouts.algorithms.presets import grpo, remax
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RolloutConfig
from rollouts.data.collate import collate_samples
from rollouts.data.filters import check_reward_nonzero_std
from rollouts.data.preference_pairs import rank_rollouts
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import create_pending_group, with_reward
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.environments.protocol import EnvironmentConfig
from rollouts.errors import ConfigError, DataError, EnvironmentFault
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.outcomes import StopReason
from rollouts.testing import create_tiny_model
from rollouts.types import Prompt, Sample, SamplingParams, Status

TOKENIZER = create_char_tokenizer()
PARAMS = SamplingParams(max_tokens=2)


class Count:
    """Two players add to a sum in turn; who reaches the goal wins 1, and the other loses 1. Remembers what was done."""

    def __init__(self, goal: int = 3, log: list[Any] | None = None, fault: str = "") -> None:
        self.goal, self.log, self.fault, self.sum = goal, [] if log is None else log, fault, 0

    async def reset(self, config: EnvironmentConfig):
        self.log.append(("reset", config.seed))
        return ("nobody" if self.fault == "first" else "a"), "0"

    async def step(self, role: str, action: str):
        await trio.sleep(0.001)
        if self.fault == "raises" and self.sum == 1:
            raise ValueError("out of cards")
        if self.fault == "reward":
            return "b", "", {"c": 1.0}, {}
        self.sum += 1
        self.log.append((role, action))
        other = "b" if role == "a" else "a"
        rewards = {role: 0.5, other: -0.25}
        if self.sum == self.goal:
            return None, "over", {role: rewards[role] + 1, other: rewards[other] - 1}, {"winner": role}
        return other, f"{self.sum}", rewards, {"sum": self.sum}

    def get_prompt_prefix(self, role: str) -> str:
        return f"you are {role}. "

    def close(self) -> None:
        self.log.append("closed")


def setting_of(**options: Any) -> MatchSetting:
    config = options.pop("config", EpisodeConfig())
    return MatchSetting(environment_factory=lambda: Count(**options), config=config, seed=4)


SCRIPTS: Mapping[str, Any] = {"a": ScriptedAgentPolicy(["x", "y", "z"]), "b": ScriptedAgentPolicy(["u", "v"])}


async def test_roles_act_in_turn_and_each_has_an_episode_of_its_own():
    log: list[Any] = []
    episodes = await run_match(SCRIPTS, setting_of(log=log), Prompt(content=""))
    assert log[1:] == [("a", "x"), ("b", "u"), ("a", "y"), "closed"] and log[0][0] == "reset"
    a, b = episodes["a"], episodes["b"]
    assert [message.content for message in a.messages] == ["you are a. \n0", "x", "2", "y"]
    assert [message.content for message in b.messages] == ["you are b. \n1", "u"]
    assert [step.base_reward for step in a.steps] == [0.5 - 0.25, 0.5 + 1], "what b's action paid counts for the action before it"
    assert [step.base_reward for step in b.steps] == [-0.25 + 0.5 - 0.25 - 1], "what came before its first action counts for that"
    assert (a.stop_reason, b.stop_reason) == (StopReason.DONE, StopReason.DONE)
    assert a.steps[-1].step_info == {"winner": "a"}


async def test_a_role_at_its_limit_ends_the_match():
    log: list[Any] = []
    episodes = await run_match(SCRIPTS, setting_of(goal=9, log=log, config=EpisodeConfig(max_turns=2)), Prompt(content=""))
    assert [role for role, _ in log[1:-1]] == ["a", "b", "a", "b"]
    assert {episode.stop_reason for episode in episodes.values()} == {StopReason.MAX_TURNS}
    assert {episode.sample.status for episode in episodes.values()} == {Status.TRUNCATED}, "b was cut, too"
    assert {len(episode.steps) for episode in episodes.values()} == {2}


async def test_a_role_that_never_acts_has_no_episode_and_cannot_be_trained():
    episodes = await run_match(SCRIPTS, setting_of(goal=1), Prompt(content=""))
    assert list(episodes) == ["a"] and episodes["a"].sample.subgroup == "a"
    frozen = create_match_generate_fn(SCRIPTS, setting_of(goal=1), trained=["a"])
    assert len(await frozen(Prompt(content=""), 2)) == 2
    both = create_match_generate_fn(SCRIPTS, setting_of(goal=1))
    with pytest.raises(DataError, match=r"prompt 0 ended before the first turn of the role 'b'.*leave it out of `trained`, or drop"):
        await both(Prompt(content=""), 2)
    dropped = create_match_generate_fn(SCRIPTS, setting_of(goal=1, config=EpisodeConfig(on_error="drop")))
    group = await dropped(Prompt(content=""), 2)
    assert [sample.status for sample in group] == [Status.COMPLETED, Status.FAILED]
    assert dropped.take_counts()["num_episodes_failed_data"] == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("first", "Count.reset returned .*the role is 'nobody', expected one of a, b"),
        ("raises", "Count.step raised ValueError for the action 'u' of b .*out of cards"),
        ("reward", "the rewards are .*expected a mapping of numbers by role .a, b."),
    ],
)
async def test_faults_of_the_environment_are_told_and_a_dropped_match_fails_for_every_role(fault: str, message: str):
    with pytest.raises(EnvironmentFault, match=message):
        await run_match(SCRIPTS, setting_of(fault=fault), Prompt(content=""))
    episodes = await run_match(SCRIPTS, setting_of(fault=fault, config=EpisodeConfig(on_error="drop")), Prompt(content=""))
    assert {episode.sample.status for episode in episodes.values()} == {Status.FAILED}
    assert len(episodes) == 2


async def test_an_environment_without_the_methods_is_refused_by_name():
    with pytest.raises(EnvironmentFault, match="has no method step, get_prompt_prefix: an environment of several roles has reset, step"):
        factory: Any = type("Half", (), {"reset": lambda self, config: ("a", "")})
        await run_match(SCRIPTS, MatchSetting(environment_factory=factory), Prompt(content=""))


async def play_group(n: int = 6, trained: Any = None) -> tuple[Sample, ...]:
    model = create_tiny_model()
    async with InProcessEngine(copy.deepcopy(model), TOKENIZER, eos_token_ids=[]) as engine:
        policy = EngineAgentPolicy(engine, TOKENIZER, PARAMS)
        generate = create_match_generate_fn({"a": policy, "b": policy}, setting_of(), trained=trained)
        return await generate(Prompt(content="", index=5), n)


async def test_a_group_has_the_samples_of_each_role_and_is_the_same_each_time():
    group = await play_group()
    assert [sample.subgroup for sample in group] == ["a", "b"] * 3
    assert [sample.index for sample in group] == [30 + k for k in range(6)]
    assert {sample.group_index for sample in group} == {5}
    assert [len(sample.turns or ()) for sample in group] == [2, 1] * 3
    assert len({sample.tokens for sample in group}) > 3
    assert await play_group() == group
    opponents = await play_group(3, trained=["b"])
    assert [sample.subgroup for sample in opponents] == ["b"] * 3
    assert await play_group(3, trained=["b"]) == opponents


async def test_each_role_is_compared_with_itself_alone():
    group = [*await play_group()]
    rewards = [1.0, 10.0, 0.0, 10.0, 0.0, 40.0]
    samples = [Sample.from_dict(sample.to_dict() | {"reward": reward}) for sample, reward in zip(group, rewards, strict=True)]
    batch = collate_samples(samples)
    assert batch.group_ids.tolist() == [0, 1] * 3
    estimated = grpo().estimate(batch)
    assert estimated.advantages is not None
    for role in (0, 1):
        rows = estimated.advantages[role::2]
        mask = batch.loss_mask[role::2]
        own = torch.tensor([r[m > 0][0] for r, m in zip(rows, mask, strict=True)])
        assert float(own.sum()) == pytest.approx(0.0, abs=1e-5)
        paid = torch.tensor(rewards[role::2])
        assert own.argmax() == paid.argmax()


async def test_filters_and_pairs_compare_a_role_with_itself_alone():
    group = await play_group()

    def score(rewards: list[float]) -> tuple[Sample, ...]:
        return tuple(with_reward(sample, reward) for sample, reward in zip(group, rewards, strict=True))

    assert not check_reward_nonzero_std(score([1.0, -1.0] * 3)), "who begins always wins, so nothing is learned"
    assert check_reward_nonzero_std(score([1.0, -1.0, 1.0, -1.0, -1.0, 1.0]))
    pairs = rank_rollouts(score([1.0, 5.0, 0.0, 7.0, 0.5, 6.0]))
    assert [(pair.chosen.subgroup, pair.chosen.reward, pair.rejected.reward) for pair in pairs] == [("a", 1.0, 0.0), ("b", 7.0, 5.0)]


async def test_numbers_that_do_not_fit_and_unknown_roles_are_refused():
    with pytest.raises(ConfigError, match=r"n_samples_per_prompt is 5, but each match gives 2 samples \(a, b\)"):
        await play_group(5)
    with pytest.raises(ConfigError, match="the trained roles are c, expected distinct ones of a, b"):
        create_match_generate_fn(SCRIPTS, setting_of(), trained=["c"])
    with pytest.raises(ConfigError, match="0 that are trained"):
        create_match_generate_fn(SCRIPTS, setting_of(), trained=[])


async def test_an_interrupted_match_is_played_again_and_finished_ones_are_kept():
    model = create_tiny_model()
    async with InProcessEngine(copy.deepcopy(model), TOKENIZER, eos_token_ids=[]) as engine:
        policy = EngineAgentPolicy(engine, TOKENIZER, PARAMS)
        generate = create_match_generate_fn({"a": policy, "b": policy}, setting_of(goal=4))
        whole = await generate(Prompt(content=""), 4)
        results: list[Any] = []

        async def interrupted() -> None:
            results.append(await generate(Prompt(content=""), 4))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(interrupted)
            while not engine._pending:
                await trio.sleep(0)
            await engine.abort()
        (half,) = results
        assert Status.PENDING in {sample.status for sample in half}
        again = await generate(Prompt(content=""), 4, partial=half)
        assert [sample.tokens for sample in again] == [sample.tokens for sample in whole]
        mixed = (*whole[:2], *create_pending_group(Prompt(content=""), 4)[2:])
        again = await generate(Prompt(content=""), 4, partial=mixed)
        assert [sample.tokens for sample in again] == [sample.tokens for sample in whole] and again[0] is whole[0]


async def test_the_manager_collects_matches_as_groups():
    model = create_tiny_model()
    async with InProcessEngine(copy.deepcopy(model), TOKENIZER, eos_token_ids=[]) as engine:
        policy = EngineAgentPolicy(engine, TOKENIZER, PARAMS)
        generate = create_match_generate_fn({"a": policy, "b": ScriptedAgentPolicy(["u"])}, setting_of(), trained=["a"])
        config = RolloutConfig(batch_size=2, n_samples_per_prompt=3, generate_fn=generate, reward_fn=lambda s: s.episode.environment_reward)
        buffer = DataBuffer([Prompt(content="", index=i) for i in range(4)], seed=0)
        async with AsyncRolloutManager(buffer, config, engines=[engine]) as manager:
            batch = await manager.generate_batch()
    assert [sample.subgroup for sample in batch.samples] == ["a"] * 6
    assert [sample.reward for sample in batch.samples] == [1.75] * 6


async def test_greedy_matches_are_the_baselines_of_each_role():
    policy = EngineAgentPolicy(InProcessEngine(create_tiny_model(), TOKENIZER), TOKENIZER, PARAMS)
    generate_fn = create_match_generate_fn({"a": policy, "b": policy}, setting_of(), num_greedy=1)
    config = RolloutConfig(batch_size=2, n_samples_per_prompt=4, n_baseline_samples=2, generate_fn=generate_fn, reward_fn=None)
    buffer = DataBuffer([Prompt(content=str(i)) for i in range(2)])
    async with AsyncRolloutManager(buffer, config) as manager:
        samples = (await manager.generate_batch()).samples
    for group in (samples[:6], samples[6:]):
        assert [sample.subgroup for sample in group] == ["a", "b"] * 3
        assert [sample.trainable for sample in group] == [True] * 4 + [False] * 2
        assert len({sample.tokens for sample in group if sample.subgroup == "a"}) > 1
    batch = remax().estimate(collate_samples([with_reward(sample, float(i)) for i, sample in enumerate(samples)]))
    means = (batch.advantages.sum(1) / batch.loss_mask.sum(1).clamp(min=1)).tolist()
    assert means == [-4.0, -4.0, -2.0, -2.0, 0.0, 0.0] * 2  # the reward, minus that of the role's own baseline
    again = await create_match_generate_fn({"a": policy, "b": policy}, setting_of(), num_greedy=2)(Prompt(content="0"), 2)
    assert again[2].tokens == again[4].tokens and again[3].tokens == again[5].tokens
    log: list[Any] = []
    await create_match_generate_fn({"a": policy, "b": policy}, setting_of(log=log), trained=["a"], num_greedy=3)(Prompt(content="0"), 1)
    assert len({line for line in log if line[0] == "b"}) > 2  # the other role plays as always
