"""What the episodes of a batch have in common, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rollouts.episode_config import StopReason
from rollouts.types import Sample


def summarize_episodes(samples: Sequence[Sample]) -> dict[str, float]:
    """Statistics of the episodes among samples.

    Returns: num_episodes, num_episodes_<stop reason> for each reason that there is, turns_mean, turns_max, environment_reward_mean,
        policy_failure_fraction (episodes with an action that the environment could not read), and, where there are any,
        num_branched_episodes (of several contexts), num_reformatted (answers that the template shows otherwise than they were sampled)
        and num_cut_actions (that reached their token budget).
        Of episodes with tools: num_tool_calls, num_bad_calls (the model's fault) and num_tool_errors (the tools'), also where they are 0.
        {} if no sample is an episode.
    """
    episodes = [sample for sample in samples if "stop_reason" in sample.metadata]
    if not episodes:
        return {}
    reasons = Counter(str(sample.metadata["stop_reason"]) for sample in episodes)
    turns = [float(sample.metadata.get("num_turns", 0)) for sample in episodes]
    count = len(episodes)
    metrics = {"num_episodes": float(count)}
    metrics.update({f"num_episodes_{reason.value}": float(reasons[reason.value]) for reason in StopReason if reasons[reason.value]})
    metrics["turns_mean"] = sum(turns) / count
    metrics["turns_max"] = max(turns)
    metrics["environment_reward_mean"] = sum(float(sample.metadata.get("environment_reward", 0.0)) for sample in episodes) / count
    metrics["policy_failure_fraction"] = sum(sample.metadata.get("failure") == "policy" for sample in episodes) / count
    extra = {
        "num_branched_episodes": sum(bool(sample.context_starts) for sample in episodes),
        "num_reformatted": sum(int(sample.metadata.get("num_reformatted", 0)) for sample in episodes),
        "num_cut_actions": sum(int(sample.metadata.get("num_cut_actions", 0)) for sample in episodes),
    }
    return metrics | {name: float(value) for name, value in extra.items() if value} | _count_calls(episodes)


def _count_calls(episodes: Sequence[Sample]) -> dict[str, float]:
    """Sums of what a ToolEnvironment counts in its infos; {} if there was no call."""
    infos = [step["info"] for sample in episodes for step in sample.metadata.get("steps", ()) if "num_tool_calls" in step["info"]]
    names = ("num_tool_calls", "num_bad_calls", "num_tool_errors")
    return {name: float(sum(info.get(name, 0) for info in infos)) for name in names} if infos else {}
