"""Functions of samples: pending groups of prompts, samples of completions, rollout batches of samples."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress, pairwise
from typing import Any, Protocol, SupportsFloat, runtime_checkable

from rollouts.checks import describe_function, is_finite, require_flag, show_value
from rollouts.errors import DataError, EngineProtocolError, GenerationError, RewardError
from rollouts.types import Completion, FilterFn, Group, KeptTokens, Message, Prompt, RolloutBatch, RoutedExperts, Sample, Status, change


def describe_sample(sample: Sample) -> str:
    """Return the name of a sample for error messages."""
    return f"sample {sample.index} (group {sample.group_index})"


@runtime_checkable
class Evaluation(Protocol):
    """Result of a reward function that applies itself to the sample (rewards.results.EvaluateResult)."""

    def apply_to(self, sample: Sample) -> Sample:
        """Return the sample with its reward and details. Raises RewardError if this is no judgement of the sample."""
        ...


def with_reward(sample: Sample, reward: Any) -> Sample:
    """Return a copy of the sample with its reward set.

    Args:
        reward: anything with a finite float value: a number, a bool (1 or 0), a scalar of numpy or torch; or an Evaluation. A number
            leaves the rewards of turns as they are; see forget_turn_rewards.

    Raises: RewardError if the reward is no number, NaN or infinite, or an Evaluation that does not fit the sample.
    """
    if not isinstance(reward, (float, SupportsFloat)) and isinstance(reward, Evaluation):
        return reward.apply_to(sample)
    if not isinstance(reward, (float, SupportsFloat)) or not is_finite(reward):
        raise RewardError(
            f"{describe_sample(sample)}: the reward is {show_value(reward)}, expected a finite number. "
            "Return a float from the reward function, or drop the sample."
        )
    return change(sample, reward=float(reward))


def sample_messages(sample: Sample) -> tuple[Message, ...]:
    """Return the whole conversation of a sample: its messages, or its prompt and its response where it has none.

    A prompt that is a text counts as a message of the user.
    """
    if sample.messages is not None:
        return sample.messages
    prompt = (Message(role="user", content=sample.prompt),) if isinstance(sample.prompt, str) else sample.prompt
    return (*prompt, Message(role="assistant", content=sample.response))


def find_response_start(sample: Sample) -> int:
    """Return the position of the first token that the policy sampled; the number of tokens if it sampled none."""
    return next((t for t, mask in enumerate(sample.loss_mask) if mask > 0), len(sample.tokens))


def find_actions(sample: Sample) -> tuple[int, ...]:
    """Return the places of the policy's actions among sample_messages(sample), in order.

    Episodes record them (Sample.action_messages), because prompts and environments may speak as the assistant, too. Where nothing is
    recorded, they are the last messages of the assistant: as many as the sample has turns, one where it is no episode, and all of them in
    an episode without tokens (turns ()). A sample without its conversation has its response alone.

    Raises: DataError if the recorded places are not rising ones of messages.
    """
    messages, recorded = sample_messages(sample), sample.action_messages
    if sample.messages is None:
        return (len(messages) - 1,)
    if recorded is None:
        spoken = tuple(k for k, message in enumerate(messages) if message.role == "assistant")
        count = 1 if sample.turns is None else len(sample.turns)
        return spoken[-count:] if count else spoken
    if not all(0 <= place < len(messages) for place in recorded) or any(a >= b for a, b in pairwise(recorded)):
        raise DataError(f"{describe_sample(sample)}: action_messages is {recorded}, but there are {len(messages)} messages")
    return recorded


def count_spoken(messages: Sequence[Message], place: int) -> int:
    """Return the number of the assistant's messages before this place: the index of the message there, if it is the assistant's."""
    return sum(message.role == "assistant" for message in messages[:place])


def collect_reward_data(sample: Sample) -> dict[str, Any]:
    """Return the values that reward functions may ask for by the names of their parameters.

    They are the metadata and, for an episode, its messages and the fields of its EpisodeOutcome, as plain JSON values. A key of the
    metadata hides a value of the same name.
    """
    data: dict[str, Any] = {} if sample.episode is None else {**sample.episode.to_dict(), "num_turns": sample.episode.num_turns}
    if sample.messages is not None:
        data["messages"] = [message.to_dict() for message in sample.messages]
    if sample.action_messages is not None:
        data["action_messages"] = list(sample.action_messages)
    return {**data, **sample.metadata}


def check_training_sample(sample: Sample, *, require_reward: bool = True) -> None:
    """Raise if the sample cannot be trained on.

    Raises: DataError if it has no token, or none with loss_mask > 0; RewardError if its reward is NaN or infinite, or is missing although
        required. FAILED samples always raise DataError.
    """
    where = describe_sample(sample)
    if sample.status is Status.FAILED:
        raise DataError(f"{where} has status FAILED: drop failed samples before they become a batch")
    if not sample.tokens:
        raise DataError(f"{where} has no tokens (status {sample.status.value}): generate or tokenize it before it becomes a batch")
    if not any(mask > 0 for mask in sample.loss_mask):
        raise DataError(f"{where} has {len(sample.tokens)} tokens and none of them has loss_mask > 0: nothing in it would be trained on")
    check_reward(sample, required=require_reward)


def check_reward(sample: Sample, *, required: bool = True) -> None:
    """Raise RewardError if the sample's reward is NaN or infinite, or is None although required."""
    if sample.reward is None:
        if required:
            raise RewardError(f"{describe_sample(sample)} has no reward: score it with with_reward before it becomes a batch")
    elif not is_finite(sample.reward):
        raise RewardError(f"{describe_sample(sample)} has reward {show_value(sample.reward)}: drop it or repair the reward function")


def create_pending_group(prompt: Prompt, n: int, *, num_baseline: int = 0) -> Group:
    """Return the samples of a prompt's rollout before anything is generated: n trainable ones, then num_baseline baselines.

    group_index = prompt.index and index = prompt.index * size + k for k in [0, size), size = n + num_baseline: unique and rising over a
    run in which the size is constant. The prompt's metadata, and with it the ground truth, is copied into each sample. Baseline samples
    have trainable = False.
    """
    assert n >= 1, f"n is {n}, expected at least one sample per prompt"
    size, start = n + num_baseline, prompt.index * (n + num_baseline)
    first = Sample(prompt=prompt.content, group_index=prompt.index)
    return tuple(change(first, index=start + k, trainable=k < n, metadata=dict(prompt.metadata)) for k in range(size))


def completion_to_sample(pending: Sample, prompt_tokens: Sequence[int], completion: Completion, response_text: str) -> Sample:
    """Turn a completion into a Sample, or append it to the ABORTED sample that it continues.

    For a PENDING sample the engine's input is prompt_tokens; for an ABORTED one it is all its tokens. On prompt tokens loss_mask and
    rollout_log_probs are 0 and weight_versions is -1. On generated tokens they are 1, the engine's log-prob and the version that sampled
    the token; versions differ between the parts of a continued sample.

    Args:
        pending: PENDING without tokens, or ABORTED; its prompt, index, group_index and metadata are kept.
        prompt_tokens: the tokenized prompt, without any generated token.
        completion: with input_tokens equal to the engine's input described above.
        response_text: text of the WHOLE response, continued parts included; text that is decoded piece by piece breaks a character that
            spans two tokens.

    Returns: a Sample with status COMPLETED, TRUNCATED or ABORTED for finish_reason "stop", "length" or "abort". truncated_sampling and
        log_prob_kind are those of the last part for which they are not the default; untempered_log_probs are kept if every part has them.
    Asserts: the status of pending; the engine's input equals the tokens of the sample; one temperature over all parts.
    """
    where, prompt = describe_sample(pending), tuple(prompt_tokens)
    assert pending.status in (Status.PENDING, Status.ABORTED), f"{where}: status is {pending.status.value}, expected pending or aborted"
    start = pending if pending.tokens else _start_from_prompt(pending, prompt)  # checked below, with its completion
    assert start.tokens[: len(prompt)] == prompt, (
        f"{where}: its {len(start.tokens)} tokens do not begin with the {len(prompt)} prompt tokens"
    )
    assert completion.input_tokens == start.tokens, (
        f"{where}: completion {completion.request_id} has {completion.input_len} input tokens, "
        f"which differ from the {len(start.tokens)} that the sample has"
    )
    assert not start.context_starts, f"{where} has {1 + len(start.context_starts)} contexts: a completion continues a single one"
    continued = any(mask > 0 for mask in start.loss_mask)
    assert not continued or start.temperature == completion.temperature, (
        f"{where}: sampled at temperature {start.temperature} before it was aborted and at {completion.temperature} after"
    )
    status = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}[completion.finish_reason]
    assert start.rollout_log_probs is not None, f"{where}: the aborted part has no rollout_log_probs"
    assert start.weight_versions is not None, f"{where}: the aborted part has no weight_versions"
    return replace(
        start,
        tokens=start.tokens + completion.output_tokens,
        loss_mask=start.loss_mask + (1.0,) * completion.output_len,
        rollout_log_probs=start.rollout_log_probs + completion.output_log_probs,
        weight_versions=start.weight_versions + completion.output_versions,
        segment_log_probs=None if start.segment_log_probs is None else start.segment_log_probs + completion.output_log_probs,
        segment_versions=None if start.segment_versions is None else start.segment_versions + (-1,) * completion.output_len,
        response=response_text,
        status=status,
        temperature=completion.temperature,
        truncated_sampling=start.truncated_sampling or completion.truncated_sampling,
        log_prob_kind=start.log_prob_kind if completion.log_prob_kind == "sampled" else completion.log_prob_kind,
        untempered_log_probs=_append_untempered(start, completion),
        routed_experts=_append_experts(start, completion),
        kept_tokens=_append_kept(start, completion),
    )


def _start_from_prompt(pending: Sample, prompt: tuple[int, ...]) -> Sample:
    zeros = (0.0,) * len(prompt)
    return change(pending, tokens=prompt, loss_mask=zeros, rollout_log_probs=zeros, weight_versions=(-1,) * len(prompt))


def _append_untempered(start: Sample, completion: Completion) -> tuple[float, ...] | None:
    """Return the untempered log-probs of all tokens; None if they would cover only some of the generated ones."""
    before = start.untempered_log_probs
    if before is None and not any(mask > 0 for mask in start.loss_mask):
        before = (0.0,) * len(start.tokens)
    return None if before is None or completion.untempered_log_probs is None else before + completion.untempered_log_probs


def _append_kept(start: Sample, completion: Completion) -> KeptTokens | None:
    """Return the sets that all tokens were drawn from; None if no part has any, or one that was drawn from a cut distribution has none."""
    before, found = start.kept_tokens, completion.kept_tokens
    if (before is None and start.truncated_sampling) or (found is None and completion.truncated_sampling) or (before is found is None):
        return None
    if before is None:
        before = KeptTokens(counts=tuple(0 if mask > 0 else -1 for mask in start.loss_mask))
    return before + (found or KeptTokens.whole(completion.output_len))


def _append_experts(start: Sample, completion: Completion) -> RoutedExperts | None:
    """Return the experts of all tokens, those of an earlier part as it recorded them; None if a part has none."""
    before, found = start.routed_experts, completion.routed_experts
    if before is not None and not completion.output_len:  # aborted before its first token, which no pass has read
        return before
    if found is None or before is None:
        return None if any(mask > 0 for mask in start.loss_mask) else found
    return before.fill(found)


def group_samples(samples: Iterable[Sample], group_size: int | None = None) -> tuple[Group, ...]:
    """Collect samples into groups by group_index, in any order of arrival.

    Args:
        samples: in any order.
        group_size: required number of samples in each group; None = any number.

    Returns: groups in the order of group_index, the samples of each in the order of index.
    Raises: GenerationError if a group does not have group_size samples, or two of its samples have the same index.
    """
    by_group: dict[int, list[Sample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_index, []).append(sample)
    for group_index, members in by_group.items():
        indices = [sample.index for sample in members]
        if len(set(indices)) < len(indices):
            raise GenerationError(f"group {group_index} has samples with equal index: {sorted(indices)}; each sample needs its own")
        if group_size is not None and len(members) != group_size:
            raise GenerationError(
                f"group {group_index} has {len(members)} samples, expected {group_size}: groups are used whole or not at all"
            )
    return tuple(tuple(sorted(by_group[g], key=lambda sample: sample.index)) for g in sorted(by_group))


def apply_sample_transforms(
    samples: Iterable[Sample],
    reward_fn: Callable[[Sample], float] | None = None,
    filter_fn: FilterFn | None = None,
) -> tuple[Sample, ...]:
    """Score samples, then drop the groups that a filter refuses. Filters look at rewards, so scoring comes first.

    Args:
        samples: in any order; collected into groups by group_index.
        reward_fn: Sample -> reward; None = keep the rewards that are there.
        filter_fn: Group -> keep it?; plain functions only; sees the trainable samples of each group; None = keep all.

    Returns: the samples of the kept groups, groups whole and in the order of group_index.
    Raises: RewardError if reward_fn gives no finite number; GenerationError if filter_fn does not answer with True or False.
    """
    scored = [sample if reward_fn is None else _judge(sample, reward_fn) for sample in samples]
    groups = group_samples(scored)
    return tuple(sample for group in groups if passes_filter(group, filter_fn) for sample in group)


def _judge(sample: Sample, reward_fn: Callable[[Sample], Any]) -> Sample:
    """Score a sample. A number judges the whole, see forget_turn_rewards; an Evaluation applies itself to turns."""
    reward = reward_fn(sample)
    is_number = isinstance(reward, (float, SupportsFloat))
    return with_reward(forget_turn_rewards(sample) if is_number else sample, reward)


def forget_turn_rewards(sample: Sample) -> Sample:
    """Return the sample with the rewards of its turns unknown: a judgement of the whole replaces those of the environment."""
    if sample.turns is None:
        return sample
    return replace(sample, turns=tuple(replace(turn, reward=None) for turn in sample.turns))


def select_trainable(group: Group) -> Group:
    """Return the samples of a group that are to be trained on, without baselines, which only count in its statistics."""
    return tuple([sample for sample in group if sample.trainable])  # no generator: it would cost as much again


def passes_filter(group: Group, filter_fn: FilterFn | None) -> bool:
    """Return True if a filter keeps the group, judged by its trainable samples; None keeps every group.

    A filter asks whether training on the group teaches something. A greedy sample beside n equal ones must not make the group look diverse.

    Raises: GenerationError, naming filter and group, if it answers neither True nor False, or is async: see ask_filter.
    """
    return filter_fn is None or _read_verdict(filter_fn(select_trainable(group)), filter_fn, group)


async def ask_filter(group: Group, filter_fn: FilterFn | None) -> bool:
    """Return passes_filter's answer for a filter that may be async."""
    if filter_fn is None:
        return True
    verdict: Any = filter_fn(select_trainable(group))
    return _read_verdict(await verdict if inspect.isawaitable(verdict) else verdict, filter_fn, group)


def _read_verdict(verdict: Any, filter_fn: FilterFn, group: Group) -> bool:
    about = f" for group {group[0].group_index}" if group else " for a group without samples"
    return require_flag(verdict, f"filter_fn {describe_function(filter_fn)}", about, error=GenerationError)


def mask_truncated(sample: Sample) -> Sample:
    """Return the sample, with loss_mask 0 everywhere if it ran out of its token budget; its reward still counts in its group's statistics.

    A truncated answer may have been on its way to being right; training on its low reward would teach to be short.

    Source: Yu et al. 2025 (DAPO), section 3.4, overlong filtering.
    """
    return replace(sample, loss_mask=(0.0,) * len(sample.tokens)) if sample.status is Status.TRUNCATED else sample


def extract_sample_fields(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return the columns of samples as ragged lists: tokens, loss_masks, rewards (NaN where there is none), group_indices."""
    return {
        "tokens": [list(sample.tokens) for sample in samples],
        "loss_masks": [list(sample.loss_mask) for sample in samples],
        "rewards": [math.nan if sample.reward is None else sample.reward for sample in samples],
        "group_indices": [sample.group_index for sample in samples],
    }


def compute_response_lengths(loss_masks: Iterable[Sequence[float]]) -> list[int]:
    """Count the tokens with loss_mask > 0 in each row."""
    return [sum(mask > 0 for mask in loss_mask) for loss_mask in loss_masks]


def build_batch_metadata(samples: Sequence[Sample], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Count the samples of a batch, as plain JSON values: num_samples, num_groups, num_<status>, and the weight versions that sampled them.

    Args:
        samples: all samples of the batch.
        extra: further entries, which replace computed ones of the same name.
    """
    statuses = Counter(sample.status for sample in samples)
    versions = {version for sample in samples for version in sample.weight_versions or () if version >= 0}
    metadata: dict[str, Any] = {"num_samples": len(samples), "num_groups": len({sample.group_index for sample in samples})}
    metadata.update({f"num_{status.value}": statuses[status] for status in Status if statuses[status]})
    if versions:
        metadata.update(min_weight_version=min(versions), max_weight_version=max(versions))
    return metadata | dict(extra or {})


def convert_to_batch(samples: Iterable[Sample], metadata: Mapping[str, Any] | None = None) -> RolloutBatch:
    """Make a RolloutBatch of samples in any order: groups whole, in the order of group_index.

    Raises: DataError if a sample has no tokens or has FAILED; GenerationError if two samples of a group have the same index.
    """
    ordered = tuple(sample for group in group_samples(samples) for sample in group)
    for sample in ordered:
        if not sample.tokens or sample.status is Status.FAILED:
            raise DataError(
                f"{describe_sample(sample)} has {len(sample.tokens)} tokens and status {sample.status.value}: it cannot be trained on"
            )
    return RolloutBatch(samples=ordered, metadata=build_batch_metadata(ordered, metadata))


def check_versions(samples: Iterable[Sample], newest_version: int) -> None:
    """Refuse samples of a weight version that never existed.

    Args:
        samples: samples without weight_versions and baselines are skipped.
        newest_version: newest version that any engine can have sampled with.

    Raises: EngineProtocolError for a trained token of a later version.
    """
    for sample in samples:
        newest = max(find_trained_versions(sample), default=0) if sample.weight_versions is not None else 0
        if newest > newest_version:
            raise EngineProtocolError(
                f"{describe_sample(sample)} has tokens of weight version {newest}, but the engines were given none after {newest_version}: "
                "an engine serves weights that this run never made, and nobody can say how old its tokens are. Another program updates it, "
                "or it has the weights of an earlier run: start it again or sync the weights before the first rollout, and let one run "
                "alone update an engine"
            )


def count_token_ages(samples: Iterable[Sample], current_version: int) -> dict[int, int]:
    """Return a mapping from versions behind to the number of trained tokens of that age, in the order of age."""
    versions = Counter[int]()
    for sample in samples:
        versions.update(find_trained_versions(sample))
    return {current_version - version: n for version, n in sorted(versions.items(), reverse=True)}


def find_trained_versions(sample: Sample) -> list[int]:
    """Return the weight version of each trained token that the policy sampled; none for a baseline."""
    assert sample.weight_versions is not None, f"{describe_sample(sample)} has no weight_versions"
    if not sample.trainable:  # a baseline may be of any age: only its reward is used
        return []
    return [version for version in compress(sample.weight_versions, sample.loss_mask) if version >= 0]
