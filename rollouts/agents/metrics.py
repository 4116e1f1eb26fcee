"""Metrics of the episodes of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rollouts.outcomes import EpisodeOutcome, Failure, StopReason
from rollouts.types import Sample


def summarize_episodes(samples: Sequence[Sample]) -> dict[str, float]:
    """Summarize the episodes among samples.

    Returns: num_episodes, num_episodes_<stop reason> for each reason that occurs, turns_mean, turns_max, environment_reward_mean,
        policy_failure_fraction (episodes with an action that the environment could not read), and, if there are any,
        num_branched_episodes (of several contexts), num_reformatted (answers that the template renders differently than sampled)
        and num_cut_actions (actions that reached their token budget).
        For episodes with tools: num_tool_calls, num_bad_calls (the model's fault) and num_tool_errors (the tools'), also if they are 0.
        {} if no sample is an episode.
    """
    played = [sample for sample in samples if sample.episode is not None]
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    if not episodes:
        return {}
    reasons = Counter(episode.stop_reason for episode in episodes)
    turns = [float(episode.num_turns) for episode in episodes]
    count = len(episodes)
    metrics = {"num_episodes": float(count)}
    metrics.update({f"num_episodes_{reason.value}": float(reasons[reason]) for reason in StopReason if reasons[reason]})
    metrics["turns_mean"] = sum(turns) / count
    metrics["turns_max"] = max(turns)
    metrics["environment_reward_mean"] = sum(float(episode.environment_reward) for episode in episodes) / count
    metrics["policy_failure_fraction"] = sum(episode.failure is Failure.POLICY for episode in episodes) / count
    extra = {
        "num_branched_episodes": sum(bool(sample.context_starts) for sample in played),
        "num_reformatted": sum(episode.num_reformatted for episode in episodes),
        "num_cut_actions": sum(episode.num_cut_actions for episode in episodes),
    }
    return metrics | {name: float(value) for name, value in extra.items() if value} | _count_calls(episodes)


def _count_calls(episodes: Sequence[EpisodeOutcome]) -> dict[str, float]:
    """Add up the counts that a ToolEnvironment writes into its infos; {} if there was no call."""
    infos = [step.info for episode in episodes for step in episode.steps if "num_tool_calls" in step.info]
    names = ("num_tool_calls", "num_bad_calls", "num_tool_errors")
    return {name: float(sum(info.get(name, 0) for info in infos)) for name in names} if infos else {}
