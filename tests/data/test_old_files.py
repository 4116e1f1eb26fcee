"""Files that were written when what are fields now were keys of the metadata: trajectories, and the states of both managers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.agents.samples import sample_to_steps
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.config import RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import find_actions, sample_messages
from rollouts.data.trajectories import read_samples, write_samples
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.outcomes import Failure, MetricResult, RewardDetails, StepOutput, StopReason, read_metadata_of_old_files
from rollouts.training.summaries import summarize_episodes, summarize_rewards
from rollouts.types import Message, Prompt, Sample, Status

FILES = Path(__file__).parent / "old_files"


def read(name: str) -> tuple[Sample, ...]:
    return tuple(read_samples(FILES / name))


async def never(prompt, n, partial=()):
    raise AssertionError("nothing is generated here")


def test_samples_of_an_old_file_have_their_values_at_the_fields_and_the_metadata_is_the_users():
    episode, judged, failed, sampled, zeroed, retried, baseline, written = read("trajectories.jsonl")
    assert {json.dumps(sample.metadata) for sample in (episode, judged, failed)} == {'{"ground_truth": "5", "level": {"steps": 1}}'}
    others = (sampled, zeroed, retried, baseline)
    assert {json.dumps(sample.metadata) for sample in others} == {'{"ground_truth": "cd", "messages_seen": 0}'} and written.metadata == {}

    assert episode.messages is not None and episode.episode is not None
    assert [message.role for message in episode.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert find_actions(episode) == episode.action_messages == (1, 3, 5)
    outcome = episode.episode
    assert (outcome.stop_reason, outcome.failure, outcome.error) == (StopReason.DONE, Failure.POLICY, None)
    assert (outcome.num_turns, outcome.num_cut_actions, outcome.num_reformatted, outcome.environment_reward) == (3, 0, 0, 0.5)
    assert [step.reward for step in outcome.steps] == [-0.5, 0.0, 1.0] and outcome.steps[0].info["num_bad_calls"] == 1
    assert [step.action_taken for step in sample_to_steps(episode)] == [step.action for step in outcome.steps]
    assert episode.truncated_sampling and episode.log_prob_kind == "sampled" and episode.reward_details is None
    assert failed.status is Status.FAILED and failed.episode is not None and failed.messages == ()
    assert failed.episode.failure is Failure.INFRASTRUCTURE and "no world" in str(failed.episode.error)
    assert summarize_episodes([episode, failed, baseline])["num_episodes"] == 2.0

    steps = (StepOutput(0, -1.0, reason="no JSON"), StepOutput(2, 1.0))
    assert judged.reward_details == RewardDetails(metrics={"style": MetricResult(0.25, "short")}, steps=steps, reason="half right")
    assert zeroed.reward_details is not None and "no judge" in str(zeroed.reward_details.error)
    assert retried.reward_details == RewardDetails(num_retries=1)
    counts = {"reward/style": 0.25, "num_rewards_zeroed": 1.0, "num_reward_retries": 1.0}
    assert summarize_rewards([judged, zeroed, retried, baseline]) == counts

    assert (sampled.truncated_sampling, sampled.log_prob_kind) == (True, "tempered")
    assert sampled.untempered_log_probs == (0.0, 0.0, -0.75, -1.25, -2.0)
    assert (zeroed.truncated_sampling, zeroed.log_prob_kind, zeroed.untempered_log_probs) == (False, "untempered", None)
    assert [sample.trainable for sample in read("trajectories.jsonl")] == [True] * 6 + [False, True]
    assert sample_messages(written) == (Message(role="user", content="2+2?"), Message(role="assistant", content="4"))
    assert (written.episode, written.action_messages) == (None, None)


def test_what_was_read_of_an_old_file_survives_a_new_one(tmp_path: Path):
    samples = list(read("trajectories.jsonl"))
    write_samples(tmp_path / "new.jsonl", samples)
    assert read_samples(tmp_path / "new.jsonl") == samples
    row = json.loads((tmp_path / "new.jsonl").read_text().splitlines()[0])
    assert row["metadata"] == {"ground_truth": "5", "level": {"steps": 1}} and row["episode"]["stop_reason"] == "done"


def test_keys_of_the_users_own_metadata_stay_there_in_new_files():
    """They are the same words as those of old files."""
    own = {"trainable": False, "messages": [1], "stop_reason": "tired", "steps": 3, "error": None, "reward_metrics": {"x": 1}}
    sample = Sample(tokens=(1, 2), loss_mask=(0.0, 1.0), metadata=own)
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample
    row = sample.to_dict()
    assert read_metadata_of_old_files(row) == row
    old = {"tokens": [1], "loss_mask": [1.0], "metadata": {"steps": 3, "error": None, "failure": "mine"}}
    assert Sample.from_dict(old).metadata == old["metadata"], "without a stop reason they are of no episode"


def test_the_state_of_a_rollout_manager_is_read():
    config = RolloutConfig(batch_size=2, n_samples_per_prompt=2, n_baseline_samples=1, generate_fn=never)
    prompts = [Prompt(content=text, metadata={"ground_truth": text}) for text in "abcd"]
    managers = [AsyncRolloutManager(DataBuffer(prompts, seed=3), config) for _ in range(2)]
    state = json.loads((FILES / "rollout_manager.json").read_text())
    managers[0].load_state_dict(state)
    samples = managers[0].partial_samples
    assert [sample.trainable for sample in samples] == [True, True, False] * 2
    assert [sample.log_prob_kind for sample in samples] == ["tempered", "untempered", "sampled"] * 2
    assert all(sample.metadata == {"ground_truth": "cd", "messages_seen": 0} for sample in samples)
    again = json.loads(json.dumps(managers[0].state_dict()))
    managers[1].load_state_dict(again)
    assert managers[1].partial_samples == samples and managers[1].state_dict() == again


def test_the_state_of_asynchronous_rollouts_is_read():
    config = RolloutConfig(batch_size=1, n_samples_per_prompt=2, n_baseline_samples=1, generate_fn=never)
    prompts = [Prompt(content=text, metadata={"ground_truth": text}) for text in "abcd"]
    executor = create_workflow_executor(DataBuffer(prompts), config, AsyncConfig(max_staleness=1, max_concurrent_rollouts=2))
    executor.load_state_dict(json.loads((FILES / "workflow_executor.json").read_text()))
    samples = executor.resident_samples
    assert [sample.trainable for sample in samples] == [True, True, False] * 2
    assert [sample.truncated_sampling for sample in samples] == [True, True, True, True, False, False]
    assert [sample.untempered_log_probs for sample in samples[3:]] == [(0.0, 0.0, -0.75, -1.25), None, None]
    assert [set(sample.metadata) for sample in samples] == [{"ground_truth"}] * 3 + [{"ground_truth", "messages_seen"}] * 3


@pytest.mark.parametrize("changes", [{"trainable": 1}, {"log_prob_kind": "raw"}, {"episode": {"stop_reason": "done"}}, {"messages": "hi"}])
def test_fields_of_the_wrong_kind_are_refused(changes):
    with pytest.raises(ValueError, match=rf"Sample\.{next(iter(changes))}"):
        replace(Sample(), **changes)
