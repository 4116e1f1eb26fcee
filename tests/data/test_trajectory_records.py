"""Files of a training step's samples: aligned with the tokens, complete for the group, lossless; steps beside samples."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st
from samples import make_sample
from test_trajectories import finite, json_values, messages

from integration.run.step_files import TrajectoryWriter, load_condition
from integration.settings.sections.records import TrajectorySection
from rollouts.agents.config import EpisodeConfig
from rollouts.agents.policies import EngineAgentPolicy
from rollouts.agents.run import run_episode_group
from rollouts.algorithms.estimators import estimate_gigpo
from rollouts.algorithms.gigpo_steps import system_apply_gigpo_to_batch_steps
from rollouts.algorithms.presets import dr_grpo, grpo
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.collate import collate_samples
from rollouts.data.records import (
    TOKEN_COLUMNS,
    UPDATE_COLUMNS,
    Estimate,
    TrajectoryRecord,
    UpdateRecord,
    attach_estimates,
    derive_steps,
    group_steps,
    shorten_log_probs,
)
from rollouts.data.trajectories import read_records, read_samples, read_steps, select_groups, select_steps, write_records, write_steps
from rollouts.errors import ConfigError, DataError, OutputError
from rollouts.steps import StepData
from rollouts.testing import FakeBackend, FakeEngine, random_answer
from rollouts.training.rollout_batch import UpdatePlan, train_on_rollouts
from rollouts.types import Message, Prompt, RolloutBatch, Sample, SamplingParams, TrainBatch, Turn


def make_written(index: int, *, group: int = 0, reward: float = 0.0, length: int = 3, **changes: Any) -> Sample:
    """Return a sample as a run writes it: with its prompt and all columns."""
    return make_sample(index, 1, length, group, **({"prompt": "a", "reward": reward, "weight_versions": (-1,) + (0,) * length} | changes))


SAMPLES = (
    make_written(0, reward=1.0, length=2),
    make_written(1, reward=0.0, length=4),
    make_written(2, group=7, reward=0.3, length=1),
    make_written(3, group=7, reward=0.1, length=3),
)


async def estimate(algorithm: Any, samples: tuple[Sample, ...] = SAMPLES, **options: Any) -> list[TrainBatch]:
    seen: list[TrainBatch] = []
    await train_on_rollouts(FakeBackend(), collate_samples(samples), algorithm, plan=UpdatePlan(**options), on_estimate=seen.append)
    return seen


async def test_the_estimate_of_a_sample_is_its_row_without_padding():
    (batch,) = await estimate(dr_grpo(8))
    records = attach_estimates(SAMPLES, SAMPLES[::-2], batch)  # in another order than the rows
    assert [record.sample for record in records] == [SAMPLES[3], SAMPLES[1]]
    found = [record.estimate for record in records]
    assert found[0] == Estimate(reward=0.1, advantages=(0.0, *(pytest.approx(-0.1),) * 3), group_rewards=(0.3, 0.1))
    assert found[1] == Estimate(reward=0.0, advantages=(0.0, -0.5, -0.5, -0.5, -0.5), group_rewards=(1.0, 0.0))
    assert [record.estimate for record in attach_estimates(SAMPLES, SAMPLES[:1], None)] == [None]


async def test_what_is_observed_has_its_advantages_and_no_update_has_happened_yet():
    order: list[str] = []

    class Watched(FakeBackend):
        def optim_step(self):
            order.append("update")
            return super().optim_step()

    async def observe(batch: TrainBatch) -> None:
        assert batch.advantages is not None
        order.append("observed")

    await train_on_rollouts(Watched(), collate_samples(SAMPLES), grpo(), on_estimate=observe, plan=UpdatePlan(num_epochs=2))
    assert order == ["observed", "update", "update"]


async def test_updates_go_on_while_what_is_observed_is_being_written_and_wait_for_its_end():
    order, updated = list[str](), trio.Event()

    class Watched(FakeBackend):
        def optim_step(self):
            updated.set()
            order.append("update")
            return super().optim_step()

    async def write(batch: TrainBatch) -> None:
        order.append("begun")
        await updated.wait()
        await trio.sleep(0.01)
        order.append("written")

    with trio.fail_after(5):
        await train_on_rollouts(Watched(), collate_samples(SAMPLES), grpo(), on_estimate=write)
    assert order == ["begun", "update", "written"]


async def test_a_failure_of_what_is_written_beside_the_updates_is_raised_as_it_is():
    async def write(batch: TrainBatch) -> None:
        await trio.sleep(0)
        raise OutputError("the disk is full")

    with pytest.raises(OutputError, match="the disk is full"):
        await train_on_rollouts(FakeBackend(), collate_samples(SAMPLES), grpo(), on_estimate=write)


def test_returns_and_values_of_a_critic_are_kept():
    batch = collate_samples(SAMPLES)
    batch = replace(batch, returns=batch.loss_mask * 0.5, values=batch.loss_mask * 0.25)
    (record,) = attach_estimates(SAMPLES, SAMPLES[:1], batch)
    assert record.estimate == Estimate(reward=1.0, returns=(0.0, 0.5, 0.5), values=(0.0, 0.25, 0.25), group_rewards=(1.0, 0.0))


def test_numbers_of_float32_are_written_short_and_read_back_exactly():
    batch = replace(collate_samples(SAMPLES[:1]), advantages=torch.tensor([[0.0, 0.3, 1 / 3]]))
    (record,) = attach_estimates(SAMPLES[:1], SAMPLES[:1], batch)
    assert record.estimate is not None and record.estimate.advantages is not None
    assert json.dumps(record.estimate.advantages[1]) == "0.3"
    assert torch.equal(torch.tensor(record.estimate.advantages), batch.advantages[0])  # type: ignore[index]


# -- files


@st.composite
def steps(draw: st.DrawFn) -> StepData:
    tokens = draw(st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple))
    return StepData(
        system_step_index=draw(st.integers(0, 3)),
        observation_data=draw(json_values),
        action_taken=draw(json_values),
        raw_policy_output=draw(st.text(max_size=4)),
        resulting_messages_history=draw(messages),
        policy_tokens=tokens,
        policy_logprobs=None if tokens is None else draw(st.none() | st.just((-0.5,) * len(tokens))),
        policy_value_estimate=draw(st.none() | finite),
        is_done=draw(st.booleans()),
        step_info=draw(st.dictionaries(st.text(max_size=3), json_values, max_size=2)),
        base_reward=draw(st.none() | finite),
        return_to_go=draw(st.none() | finite),
        advantage=draw(st.none() | finite),
        sample_index=draw(st.integers(0, 2)),
        group_index=draw(st.integers(0, 2)),
    )


@st.composite
def records(draw: st.DrawFn) -> TrajectoryRecord:
    sample = make_written(draw(st.integers(0, 99)), length=draw(st.integers(0, 3)), metadata=draw(st.dictionaries(st.text(), finite)))
    column = st.none() | st.just(tuple(0.1 * k for k in range(len(sample.tokens))))
    rewards = draw(st.lists(finite, max_size=3).map(tuple))
    constant = st.just((0.5,) * len(sample.tokens))
    columns = {name: draw(column | constant) for name in TOKEN_COLUMNS}
    known = Estimate(reward=draw(finite), group_rewards=rewards, **columns)
    reasons = draw(st.none() | st.just(tuple("kept" if k % 2 else "clip_low, dropped" for k in range(len(sample.tokens)))))
    seen = UpdateRecord(**{name: draw(column | constant) for name in UPDATE_COLUMNS}, reasons=reasons)
    return TrajectoryRecord(
        sample=sample,
        estimate=draw(st.none() | st.just(known)),
        steps=draw(st.lists(steps(), max_size=2).map(tuple)),
        update=draw(st.none() | st.just(seen)),
    )


@given(st.lists(records(), max_size=3))
def test_records_round_trip_through_a_file_and_are_samples_for_those_who_want_no_more(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("records") / "step_0001.jsonl"
    assert write_records(path, written) == len(written)
    assert read_records(path) == read_records(str(path)) == written
    assert read_samples(str(path)) == [record.sample for record in written]
    assert read_steps(str(path)) == [step for record in written for step in record.steps]
    assert write_records(str(path), written, append=True) == len(written)
    assert read_records(path) == [*written, *written]


@given(st.lists(steps(), max_size=5))
def test_steps_round_trip_through_a_file_and_are_read_as_episodes(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("steps") / "steps.jsonl"
    assert write_steps(path, written) == len(written)
    assert read_steps(path) == written
    found = read_records(path)
    assert [record.steps for record in found] == list(group_steps(written))
    assert all((r.sample.index, r.sample.group_index) == (s.sample_index, s.group_index) for r in found for s in r.steps)


def test_a_file_may_hold_samples_and_steps(tmp_path: Path):
    path = tmp_path / "mixed.jsonl"
    write_steps(path, [StepData(system_step_index=1, sample_index=4), StepData(system_step_index=0, sample_index=4)])
    write_records(path, [TrajectoryRecord(sample=SAMPLES[0])], append=True)
    first, second = read_records(path)
    assert (first.sample, first.steps) == (SAMPLES[0], ())
    assert (second.sample.index, [step.system_step_index for step in second.steps]) == (4, [0, 1])
    with pytest.raises(DataError, match=r"mixed\.jsonl:1 is not a sample: "):
        read_samples(path)


def test_what_a_step_cannot_hold_is_named_and_no_half_file_is_left(tmp_path: Path):
    path = tmp_path / "steps.jsonl"
    bad = StepData(system_step_index=2, sample_index=5, group_index=1, observation_data=object())
    with pytest.raises(DataError, match=r"step 2 of sample 5 \(group 1\) cannot be written as JSON: .*Keep its observation"):
        write_steps(path, [StepData(system_step_index=0), bad])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"system_step_index": -1}, r"f\.jsonl:1 is not a step: AssertionError: system_step_index is -1"),
        ({"system_step_index": 0, "colour": 1}, r"f\.jsonl:1 is not a step: TypeError"),
        ({"system_step_index": 0, "policy_logprobs": [0.5]}, r"f\.jsonl:1 is not a step: .*no policy_tokens"),
        ({"tokens": [], "estimate": 3}, r"f\.jsonl:1 is not a sample: "),
        ({"estimate": {"reward": 0.0, "advantages": [1.0]}}, r"f\.jsonl:1 is not a sample: .*1 advantages for 0 tokens"),
        ({"tokens": [], "update": {"ratios": [1.0]}}, r"f\.jsonl:1 is not a sample: .*1 ratios for 0 tokens"),
        ({"steps": [3]}, r"f\.jsonl:1 is not a sample: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: dict[str, Any], message: str):
    (tmp_path / "f.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=message):
        read_records(tmp_path / "f.jsonl")


def test_steps_are_kept_by_whole_episodes():
    given_steps = [StepData(system_step_index=k, sample_index=s, base_reward=float(s == 2 and k == 1)) for k in (1, 0) for s in range(4)]
    assert len(select_steps(given_steps)) == 8
    kept = select_steps(given_steps, every=2, condition=lambda episode: any(step.base_reward for step in episode))
    assert [(step.sample_index, step.system_step_index) for step in kept] == [(2, 0), (2, 1)]
    with pytest.raises(AssertionError, match="every is 0"):
        select_steps(given_steps, every=0)


# -- steps of a sample that is an episode

EPISODE = make_written(
    5,
    group=2,
    length=9,
    tokens=tuple(range(3, 13)),
    rollout_log_probs=(0.0,) + (-0.5,) * 9,
    loss_mask=(0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0),
    turns=(Turn(start=2, end=4, state="s0", reward=0.25), Turn(start=6, end=9, reward=1.0)),
    messages=(
        Message(role="system", content="play"),
        Message(role="assistant", content="an example in the prompt"),
        Message(role="user", content="room 1"),
        Message(role="assistant", content="go"),
        Message(role="user", content="room 2"),
        Message(role="assistant", content="stop"),
        Message(role="user", content="done"),
    ),
)


def test_steps_of_an_episode_say_what_was_seen_done_and_earned():
    known = Estimate(reward=1.25, advantages=(0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 1.0, 2.0, 3.0, 0.0))
    first, second = derive_steps(TrajectoryRecord(sample=EPISODE, estimate=known))
    assert first.observation_data == [message.to_dict() for message in EPISODE.messages[:3]]
    assert (first.action_taken, first.base_reward, first.advantage, first.is_done) == ("go", 0.25, 0.5, False)
    assert first.step_info == {"state": "s0"}
    assert first.resulting_messages_history[-1] == Message(role="user", content="room 2")
    assert (second.observation_data, second.raw_policy_output, second.base_reward, second.advantage) == ("room 2", "stop", 1.0, 2.0)
    assert (second.policy_tokens, second.is_done, second.step_info) == ((9, 10, 11), True, {})
    assert len(second.resulting_messages_history) == 7
    assert {(step.sample_index, step.group_index) for step in (first, second)} == {(5, 2)}


async def test_steps_of_real_episodes_and_what_gigpo_made_of_them_survive_a_file(tmp_path: Path):
    class Rooms:
        def reset(self, config):
            self.left = 3
            return "hall"

        def step(self, action):
            self.left -= 1
            return ["hall", "attic"][self.left % 2], float(len(action)), self.left == 0, {"left": self.left, "tools": [{"name": "x"}]}

        def get_state_description(self):
            return ""

        def get_prompt_prefix(self):
            return ""

    tokenizer = create_char_tokenizer()
    policy = EngineAgentPolicy(FakeEngine(random_answer(mean_length=3)), tokenizer, SamplingParams(max_tokens=4))
    played = await run_episode_group(policy, Rooms, Prompt(content="", index=2), 4, EpisodeConfig(max_turns=3, chat=False))
    episodes = [episode for episode in played if episode is not None]
    samples = tuple(episode.sample for episode in episodes)
    batch = estimate_gigpo(collate_samples(samples))
    records = [replace(record, steps=derive_steps(record)) for record in attach_estimates(samples, samples, batch)]
    write_records(tmp_path / "episodes.jsonl", records)
    assert read_records(tmp_path / "episodes.jsonl") == records
    made = system_apply_gigpo_to_batch_steps([episode.steps for episode in episodes], [sample.reward for sample in samples])
    for episode, record, by_steps in zip(episodes, records, made, strict=True):
        for own, step, other in zip(episode.steps, record.steps, by_steps, strict=True):
            parts = step.step_info["gigpo"]
            assert replace(step, advantage=None, return_to_go=None, step_info=own.step_info) == own, "all else is what the episode had"
            assert step.step_info.keys() == own.step_info.keys() | {"state", "gigpo"}
            assert (step.advantage, step.return_to_go) == pytest.approx((other.advantage, other.return_to_go), abs=1e-4)
            assert parts["anchor_size"] == other.step_info["gigpo"]["anchor_size"] > 1
    write_steps(tmp_path / "steps.jsonl", [step for steps in made for step in steps])
    assert group_steps(read_steps(tmp_path / "steps.jsonl")) == tuple(map(tuple, made))


def test_a_run_writes_steps_where_it_is_told_to(tmp_path: Path):
    with TrajectoryWriter(tmp_path, TrajectorySection(every=1, steps=True)) as writer:
        writer.write(1, RolloutBatch(samples=(EPISODE, SAMPLES[0])), None)
    with_steps, single = read_records(tmp_path / "step_0001.jsonl")
    assert with_steps.steps == derive_steps(TrajectoryRecord(sample=EPISODE)) and single.steps == ()
    with pytest.raises(ConfigError, match=r"trajectories\.steps is True, expected False where trajectories\.every is 0"):
        TrajectorySection(every=0, steps=True)


def test_steps_without_a_conversation_or_an_estimate_say_less_and_other_samples_have_none():
    (first, _) = derive_steps(TrajectoryRecord(sample=replace(EPISODE, messages=None)))
    assert (first.observation_data, first.action_taken, first.advantage) == (None, None, None)
    assert (first.policy_tokens, first.policy_logprobs, first.base_reward) == ((5, 6), (-0.5, -0.5), 0.25)
    assert derive_steps(TrajectoryRecord(sample=SAMPLES[0])) == ()
    own = (StepData(system_step_index=0),)
    assert derive_steps(TrajectoryRecord(sample=EPISODE, steps=own)) == own


def test_steps_of_a_file_without_written_steps_are_those_of_its_episodes(tmp_path: Path):
    record = TrajectoryRecord(sample=EPISODE)
    write_records(tmp_path / "f.jsonl", [record, TrajectoryRecord(sample=SAMPLES[0])])
    assert tuple(read_steps(tmp_path / "f.jsonl")) == derive_steps(record) != ()


# -- columns of tokens


def test_every_column_of_a_step_is_recorded_and_equal_numbers_in_a_row_cost_little(tmp_path: Path):
    batch = collate_samples(SAMPLES)
    numbers = torch.arange(batch.tokens.numel()).reshape(batch.tokens.shape) / 7
    columns = {name: numbers + 100 * k for k, name in enumerate(TOKEN_COLUMNS)}
    records = attach_estimates(SAMPLES, SAMPLES, replace(batch, **columns))
    write_records(tmp_path / "f.jsonl", records)
    assert read_records(tmp_path / "f.jsonl") == list(records)
    for row, record in enumerate(records):
        for name in TOKEN_COLUMNS:
            assert getattr(record.estimate, name) == pytest.approx(columns[name][row, : len(record.sample.tokens)].tolist(), rel=1e-6)
    long = Estimate(reward=1.0, advantages=(0.0,) * 50 + (0.3125,) * 1000)
    assert long.to_dict() == {"reward": 1.0, "advantages": {"runs": [[50, 0.0], [1000, 0.3125]]}, "group_rewards": []}
    assert Estimate.from_dict(long.to_dict()) == long
    for runs in ([[10**12, 0.0]], [[-1, 0.0]], [[1.5, 0.0]], [[True, 0.0]]):
        with pytest.raises(AssertionError, match="tokens"):
            Estimate.from_dict({"reward": 0.0, "advantages": {"runs": runs}})


def test_estimates_of_older_versions_are_read():
    old = {"reward": 1.0, "advantages": [0.0, 0.5], "returns": None, "values": None, "group_rewards": [1.0], "turns": None}
    assert Estimate.from_dict(old) == Estimate(reward=1.0, advantages=(0.0, 0.5), group_rewards=(1.0,))


async def test_loss_weights_are_recorded_where_they_are_known(tmp_path: Path):
    (batch,) = await estimate(grpo())
    rollouts, weigh = RolloutBatch(samples=SAMPLES), grpo().weigh
    for step, known in ((1, weigh), (2, None)):
        with TrajectoryWriter(tmp_path, TrajectorySection(every=1), known) as writer:
            writer.write(step, rollouts, batch)
    first, second = (read_records(tmp_path / f"step_000{step}.jsonl") for step in (1, 2))
    weights = weigh(batch)
    for row, record in enumerate(first):
        assert record.estimate.loss_weights == pytest.approx(weights[row, : len(record.sample.tokens)].tolist(), rel=1e-6)
    assert all(record.estimate.loss_weights is None for record in second)


# -- which ones a run keeps


def only_good(sample: Sample) -> bool:
    return bool(sample.reward)


def failing(sample: Sample) -> bool:
    return 1 / sample.index > 0


def section(name: str, every: int | None = 1) -> TrajectorySection:
    return TrajectorySection(every=every, condition=f"{__name__}:{name}")


async def test_a_run_keeps_every_nth_sample_for_which_the_condition_holds(tmp_path: Path):
    (batch,) = await estimate(grpo())
    rollouts = RolloutBatch(samples=SAMPLES)
    with TrajectoryWriter(tmp_path, section("only_good")) as writer:
        writer.hold(3, rollouts)
        writer.write(3, rollouts, batch)
    kept = read_records(tmp_path / "step_0003.jsonl")
    assert [record.sample.index for record in kept] == [0, 2, 3]
    assert all(record.estimate is not None for record in kept)
    with TrajectoryWriter(tmp_path, section("only_good", every=2)) as writer:
        writer.write(4, rollouts, batch)
    assert [record.sample.index for record in read_records(tmp_path / "step_0004.jsonl")] == [0, 2]
    for none in (TrajectorySection(every=0), TrajectorySection(groups=0)):
        with TrajectoryWriter(tmp_path / "none", none) as writer:
            writer.hold(1, rollouts)
        assert not (tmp_path / "none").exists()


def make_groups(num_groups: int, size: int) -> tuple[Sample, ...]:
    return tuple(make_written(k, group=3 * (k // size), length=2) for k in range(num_groups * size))


def test_by_default_a_run_keeps_whole_groups_whatever_the_order_of_its_batch(tmp_path: Path):
    samples = make_groups(10, 3)
    written: list[str] = []
    for seed in range(3):
        with TrajectoryWriter(tmp_path, TrajectorySection()) as writer:
            writer.write(1, RolloutBatch(samples=tuple(random.Random(seed).sample(samples, len(samples)))), None)
        written.append((tmp_path / "step_0001.jsonl").read_text())
    assert len(set(written)) == 1
    kept = read_samples(tmp_path / "step_0001.jsonl")
    assert [s.group_index for s in kept] == [g for g in (0, 6, 15, 21) for _ in range(3)], "evenly spread, each whole"
    assert len(select_groups(samples, count=99)) == 30, "a step with fewer groups is kept whole"


def test_a_condition_chooses_groups_that_have_such_a_sample():
    samples = make_groups(6, 2)
    kept = select_groups(samples, count=2, condition=lambda sample: sample.index in (3, 6, 9))
    assert [s.index for s in kept] == [2, 3, 6, 7]
    assert select_groups(samples, count=2, condition=lambda sample: False) == ()


def test_groups_and_single_samples_exclude_each_other():
    assert TrajectorySection(every=64, groups=0).writes and not TrajectorySection(every=0).writes
    with pytest.raises(ConfigError, match=r"trajectories\.groups is 8, expected it left out beside trajectories\.every 64"):
        TrajectorySection(every=64, groups=8)
    with pytest.raises(ConfigError, match=r"trajectories\.steps is True, expected False where trajectories\.groups is 0"):
        TrajectorySection(groups=0, steps=True)
    for bad in ({"groups": -1}, {"every": -1}):
        with pytest.raises(ConfigError, match="is -1"):
            TrajectorySection(**bad)


def test_rollouts_of_a_step_that_failed_are_written_without_advantages(tmp_path: Path):
    with pytest.raises(RuntimeError, match="out of memory"):
        with TrajectoryWriter(tmp_path, TrajectorySection(every=1)) as writer:
            writer.hold(1, RolloutBatch(samples=SAMPLES[:2]))  # of which nothing was trained on
            writer.hold(2, RolloutBatch(samples=SAMPLES[2:]))
            raise RuntimeError("out of memory")
    assert read_records(tmp_path / "step_0001.jsonl") == [TrajectoryRecord(sample=shorten_log_probs(sample)) for sample in SAMPLES[:2]]
    assert read_samples(tmp_path / "step_0002.jsonl") == [shorten_log_probs(sample) for sample in SAMPLES[2:]]


def test_a_condition_that_fails_is_named_and_does_not_hide_another_error(tmp_path: Path):
    with TrajectoryWriter(tmp_path, section("failing")) as writer:
        with pytest.raises(DataError, match=r"trajectories.condition '.*:failing' failed on sample 0 \(group 0\): ZeroDivisionError"):
            writer.write(1, RolloutBatch(samples=SAMPLES), None)
    with pytest.raises(RuntimeError) as caught:
        with TrajectoryWriter(tmp_path, section("failing")) as writer:
            writer.hold(1, RolloutBatch(samples=SAMPLES))
            raise RuntimeError("first")
    assert "could not be written: trajectories.condition" in caught.value.__notes__[0]
    with pytest.raises(ConfigError, match="has no function 'no_such'"):
        load_condition(section("no_such"))
    with pytest.raises(ConfigError, match=r"trajectories\.every is 0"):
        load_condition(section("only_good", every=0))
