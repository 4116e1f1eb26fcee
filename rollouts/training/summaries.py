"""Metrics of a step: summaries of its rollouts, and the signs in several steps in a row that a run cannot learn.

All functions are pure. The loops call look() during the run and log its warnings; the summary of a run calls it again on the lines of
metrics.jsonl.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rollouts.data.samples import count_token_ages, select_trainable
from rollouts.outcomes import EpisodeOutcome, Failure, StopReason
from rollouts.types import RolloutBatch, Sample, Status


def summarize_rollouts(rollouts: RolloutBatch, weight_version: int) -> dict[str, float]:
    """Compute reward and length statistics, the manager's counts, and staleness_max: the age of the oldest token in weight versions.

    The statistics cover the trained samples; baseline_reward_mean covers the other samples, if there are any.
    """
    trained = select_trainable(rollouts.samples)
    others = [sample.reward or 0.0 for sample in rollouts.samples if not sample.trainable]
    baseline = {"baseline_reward_mean": sum(others) / len(others)} if others else {}
    ages = count_token_ages((sample for sample in trained if sample.weight_versions is not None), weight_version)
    counts = {key: float(value) for key, value in rollouts.metadata.items() if isinstance(value, int | float)}
    staleness = {"staleness_max": float(max(ages))} if ages else {}
    rows = trained or rollouts.samples
    counts.update(summarize_samples(rows))  # num_samples, which both have, excludes baseline samples
    if any(sample.reward_details is not None for sample in rows):
        counts.update(summarize_rewards(rows))
    if any(sample.episode is not None for sample in rows):
        counts.update(summarize_episodes(rows))
    return counts | baseline | staleness | {"weight_version": float(weight_version)}


def summarize_samples(samples: Sequence[Sample]) -> dict[str, float]:
    """Compute statistics of one batch of rollouts.

    Args:
        samples: at least one; of any number of groups, in any order.

    Returns: reward_mean, _std (population), _min, _max (all NaN if a sample has no reward); zero_std_fraction, the fraction of groups
        (subgroups, where there are any) with equal rewards, which have no group-relative advantage; response_length_mean, _min, _max in
        trained tokens; truncated_fraction; num_samples.
    """
    assert samples, "expected at least one sample"
    n = len(samples)
    rewards = [math.nan if sample.reward is None else sample.reward for sample in samples]
    mean = math.fsum(rewards) / n
    by_group: defaultdict[tuple[int, str | None], list[float]] = defaultdict(list)
    for sample, reward in zip(samples, rewards, strict=True):
        by_group[sample.group_index, sample.subgroup].append(reward)
    lengths = [sum(mask > 0 for mask in sample.loss_mask) for sample in samples]
    return {
        "reward_mean": mean,
        "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / n),
        "reward_min": math.nan if math.isnan(mean) else min(rewards),
        "reward_max": math.nan if math.isnan(mean) else max(rewards),
        "zero_std_fraction": sum(all(reward == group[0] for reward in group) for group in by_group.values()) / len(by_group),
        "response_length_mean": sum(lengths) / n,
        "response_length_min": float(min(lengths)),
        "response_length_max": float(max(lengths)),
        "truncated_fraction": sum(sample.status is Status.TRUNCATED for sample in samples) / n,
        "num_samples": float(n),
    }


def summarize_rewards(samples: Sequence[Sample]) -> dict[str, float]:
    """Summarize what reward functions reported besides scores; only keys with values.

    Returns: reward/NAME, the mean score of each metric over the samples with a valid one; num_invalid/NAME, the samples with an invalid
        one; num_rewards_zeroed, failed rewards that count as 0 by policy; num_reward_retries.
    """
    scores: dict[str, list[float]] = {}
    counts: dict[str, float] = {}
    for sample in samples:
        details = sample.reward_details
        if details is None:
            continue
        for name, metric in details.metrics.items():
            if metric.is_score_valid:
                scores.setdefault(f"reward/{name}", []).append(metric.score)
            else:
                counts[f"num_invalid/{name}"] = counts.get(f"num_invalid/{name}", 0.0) + 1.0
        for name, count in (
            ("num_rewards_zeroed", float(details.error is not None)),
            ("num_reward_retries", float(details.num_retries)),
        ):
            if count:
                counts[name] = counts.get(name, 0.0) + count
    return {name: _mean(values) for name, values in scores.items()} | counts


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # only the sum overflows: the mean of floats is a float
        return math.fsum(value / len(values) for value in values)


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


def summarize_mismatch(metrics: Mapping[str, float]) -> dict[str, float]:
    """Summarize the mismatch of rollout and trainer policy from the metrics of a step (losses.policy_loss).

    Returns: mismatch_kl, an estimate of KL(rollout || trainer): rollout_kl or, if the ratio's anchor is the rollout itself, approx_kl (with
        several updates on a batch, their mean); empty if the metrics have neither.
    """
    found = metrics.get("rollout_kl", metrics.get("approx_kl"))
    return {} if found is None else {"mismatch_kl": found}


PATIENCE = 5
"""Steps in a row before a warning: one or two such steps are chance in small batches."""

MOST = 0.9
"""Share of cut answers from which a run is warned: rewards then compare beginnings of answers."""

FAR = 0.5
"""Nats for each token from which a single step is warned of: ten times a healthy approx_kl, which no small batch reaches by chance."""

Stage = Literal["sft", "dpo", "rl"]


@dataclass(frozen=True, kw_only=True)
class Signs:
    """Number of consecutive steps, up to the newest, with each sign."""

    broken: int = 0  # the loss was not finite, or an update was skipped because its gradient was not finite
    truncated: int = 0  # at least MOST of the answers reached their token budget
    far: int = 0  # approx_kl was above FAR
    equal: int = 0  # all rewards were equal, and not the best reward
    flat: int = 0  # rewards differed, but never within a group
    still: int = 0  # no token was trained, or loss and gradient were 0
    frozen: int = 0  # the learning rate was 0
    best: float | None = None  # highest reward of the steps in which rewards differed
    told: frozenset[str] = frozenset()  # names of signs with a warning already given


def look(signs: Signs, metrics: Mapping[str, object], *, stage: Stage) -> tuple[Signs, tuple[str, ...]]:
    """Add a step.

    If all rewards of a step are 1, or equal the highest reward seen while rewards differed, the run has nothing left to learn: the step has
    no sign but a broken loss.

    Args:
        metrics: metrics of the step: loss, grad_norm, num_tokens, update_skipped and lr; in RL also those of summarize_samples. A
            sign with missing metrics is absent.
        stage: stage of the step; decides the names of settings.

    Returns: the signs with this step, and a warning for a sign that has lasted PATIENCE steps (far: one) without a warning: at most one,
        the first of broken, truncated, far, equal, still (with flat for its cause), frozen.
    """
    number = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
    low, high = number.get("reward_min", math.nan), number.get("reward_max", math.nan)
    is_equal = low == high
    solved = is_equal and (high == 1.0 or (signs.best is not None and high >= signs.best))
    found = {
        "broken": not math.isfinite(number.get("loss", math.nan if "loss" in metrics else 0.0)) or number.get("update_skipped") == 1.0,
        "truncated": number.get("truncated_fraction", 0.0) >= MOST and not solved,
        "far": number.get("approx_kl", 0.0) > FAR,
        "equal": is_equal and not solved,
        "flat": number.get("zero_std_fraction") == 1.0 and not is_equal,
        "still": (number.get("num_tokens") == 0.0 or number.get("grad_norm") == 0.0) and not solved,
        "frozen": number.get("lr") == 0.0 and not solved,
    }
    best = signs.best if is_equal or math.isnan(high) else max(high, high if signs.best is None else signs.best)
    counts = {name: getattr(signs, name) + 1 if there else 0 for name, there in found.items()}
    signs = replace(signs, best=best, **counts)
    name = next((name for name, count in counts.items() if count >= (1 if name == "far" else PATIENCE) and name != "flat"), None)
    if name is None or name in signs.told:
        return signs, ()
    return replace(signs, told=signs.told | {name}), (_describe_sign(name, signs, number, stage=stage),)


def _describe_far(number: Mapping[str, float]) -> str:
    """Write the warning of a large approx_kl. Only the updates move the policy from an anchor that the trainer recomputed (rollout_kl).

    From log-probs of the engine it is far by its numerics and by the age of tokens, too, and by updates only if there are several.
    """
    far = f"approx_kl is {number['approx_kl']:.2g} nats for each token, where up to 0.05 is usual"
    less = "lower --rl.optimizer.lr, or train less on a batch (--rl.num-epochs, --rl.num-minibatches)"
    age = number.get("staleness_max", 0.0)
    if "rollout_kl" in number and not age:
        return f"the updates of a step of RL moved the policy far from the one that sampled: {far}: {less}"
    causes = ["look whether engine and trainer agree (--engine.parity-rows 8)"]
    if age:
        old = f"the oldest token is {age:g} weight version{'s' if age > 1 else ''} old"
        causes.insert(0, f"{old}: lower --rl.asynchronous.max-staleness or --rl.optimizer.lr")
    elif number.get("num_updates") != 1.0:
        causes.append(less)
    return f"the policy of a step of RL is far from the log-probs of its rollouts: {far}: {'; '.join(causes)}"


def find_warnings(lines: Iterable[Mapping[str, object]], *, stage: Stage) -> tuple[str, ...]:
    """Find the warnings of a stage, in the order of the steps that caused them.

    Args:
        lines: metrics of its steps, in order.
        stage: see look.
    """
    signs, found = Signs(), list[str]()
    for line in lines:
        signs, texts = look(signs, line, stage=stage)
        found.extend(texts)
    return tuple(found)


def _describe_sign(name: str, signs: Signs, number: Mapping[str, float], *, stage: Stage) -> str:
    """Write the warning of a sign, with the setting to change."""
    section, in_rl = "preference" if stage == "dpo" else stage, stage == "rl"
    steps = f"the last {PATIENCE} steps of {stage.upper()}"
    if name == "far":
        return _describe_far(number)
    if name == "broken":
        return (
            f"{steps} had a loss or a gradient that is not finite, and no update: lower --{section}.optimizer.lr, or compute "
            "in float32 (--backend.compute-dtype float32)"
        )
    if name == "truncated":
        share, were = ("every answer", "was") if number["truncated_fraction"] == 1.0 else ("nearly all answers", "were")
        masked = ", and --rl.mask-truncated leaves nothing to train on" if number.get("num_tokens") == 0.0 else ""
        return (
            f"{share} of {steps} {were} cut by the token budget (truncated_fraction is {number['truncated_fraction']:.3g}){masked}: raise "
            "--generation.max-tokens, or "
            "look whether the model ever ends its answers (--generation.stop, an SFT stage before)"
        )
    if name == "equal":
        return (
            f"all rewards of {steps} were {number['reward_max']:g}, so that nothing says which answers are better: look at the answers, "
            "give a reward that tells them apart (--reward.function), easier problems (--data.path) or a model that solves some (--mode "
            "sft+rl)"
        )
    if name == "frozen":
        return f"the learning rate of {steps} was 0, so that nothing was learned: raise --{section}.optimizer.lr"
    if number.get("num_tokens") == 0.0:
        cause = "--rl.mask-truncated, or a generate_fn whose loss_mask is 0" if in_rl else "answers in --data.path, --data.max-length"
        return f"{steps} had no token to train on: look at {cause}"
    if signs.flat:
        return (
            f"in {steps} all answers to a prompt had the same reward, so that the gradient was 0: raise --rl.samples-per-prompt or "
            "--generation.temperature, choose problems that are neither too easy nor too hard, or a finer --reward.function"
        )
    cause = "--rl.algorithm and its coefficients" if in_rl else "the weights of the loss masks in --data.path"
    return f"{steps} had a gradient of 0, so that nothing was learned: look at {cause}"
