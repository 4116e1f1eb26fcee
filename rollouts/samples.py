"""Samples as values: from a prompt to a pending group, from a completion to a Sample, from samples to a RolloutBatch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Protocol, SupportsFloat, TypeGuard, runtime_checkable

from rollouts.errors import DataError, GenerationError, RewardError
from rollouts.types import Completion, Group, Message, Prompt, RolloutBatch, Sample, Status


def derive_seed(*keys: int) -> int:
    """A seed that depends on all keys and on their order: the first 63 bits of blake2b over them.

    The randomness of a sample is keyed by (run seed, prompt index, number of the sample in its group, tokens already there), so it does
    not depend on what else runs, nor on how often the run was interrupted.

    Args:
        keys: integers of any size and sign.

    Returns: an integer in [0, 2**63).
    """
    text = ",".join(str(int(key)) for key in keys)
    return int.from_bytes(blake2b(text.encode("ascii"), digest_size=8).digest(), "big") >> 1


def describe_sample(sample: Sample) -> str:
    """The words by which error messages name a sample."""
    return f"sample {sample.index} (group {sample.group_index})"


def is_finite(number: Any) -> bool:
    """Whether a number (or a scalar of numpy or torch) is finite as a float; an integer beyond the range of floats is not."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def is_finite_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value that may be anything, such as one from JSON, is an int or float that is finite as a float. A bool is not."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and is_finite(value)


def show_value(value: Any, max_length: int = 200) -> str:
    """The repr of a value that may be anything, at most so many characters of it, for messages."""
    try:
        return repr(value)[:max_length]
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # integers of 5,000 digits, too
        return f"a value of the type {type(value).__name__} whose repr raises {type(error).__name__}"


@runtime_checkable
class Evaluation(Protocol):
    """What a reward function may return instead of a number: it knows what becomes of its sample (rewards.results.EvaluateResult)."""

    def apply_to(self, sample: Sample) -> Sample:
        """The sample with its reward, and whatever else there is to keep. Raises RewardError if this is no judgement of it."""
        ...


def with_reward(sample: Sample, reward: Any) -> Sample:
    """A copy of the sample with its reward set.

    Args:
        reward: anything with a finite float value: a number, a bool (1 or 0), a scalar of numpy or torch; or an Evaluation.

    Raises: RewardError if the reward is no number, NaN or infinite, or an Evaluation that does not fit the sample.
    """
    if not isinstance(reward, (float, SupportsFloat)) and isinstance(reward, Evaluation):
        return reward.apply_to(sample)
    if not isinstance(reward, (float, SupportsFloat)) or not is_finite(reward):
        raise RewardError(
            f"{describe_sample(sample)}: the reward is {show_value(reward)}, expected a finite number. "
            "Return a float from the reward function, or drop the sample."
        )
    return replace(sample, reward=float(reward))


def sample_messages(sample: Sample) -> tuple[Message, ...]:
    """The whole conversation of a sample: of an episode metadata["messages"], of another its prompt and its response.

    A prompt that is a text counts as a message of the user.

    Raises: DataError if metadata["messages"] is no list of messages.
    """
    kept = sample.metadata.get("messages")
    if kept is None:
        prompt = (Message(role="user", content=sample.prompt),) if isinstance(sample.prompt, str) else sample.prompt
        return (*prompt, Message(role="assistant", content=sample.response))
    try:
        return tuple(message if isinstance(message, Message) else Message.from_dict(message) for message in kept)
    except (AssertionError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"metadata['messages'] of {describe_sample(sample)} is no list of messages: {error!r}") from error


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


def count_unusable_rewards(samples: Iterable[Sample]) -> int:
    """Number of samples whose reward is missing, NaN or infinite: what a run that drops them reports."""
    return sum(sample.reward is None or not is_finite(sample.reward) for sample in samples)


def create_pending_group(prompt: Prompt, n: int, *, num_baseline: int = 0) -> Group:
    """The samples of a prompt's rollout before anything is generated: n to be trained on, then num_baseline that are not.

    group_index = prompt.index and index = prompt.index * size + k for k in [0, size), size = n + num_baseline: unique and rising over a
    run in which the size is constant. The prompt's metadata, and with it the ground truth, is copied into each sample; baseline samples
    also have trainable = False there.
    """
    assert n >= 1, f"n is {n}, expected at least one sample per prompt"
    size = n + num_baseline
    return tuple(
        Sample(
            prompt=prompt.content,
            index=prompt.index * size + k,
            group_index=prompt.index,
            metadata={**prompt.metadata, **({} if k < n else {"trainable": False})},
        )
        for k in range(size)
    )


def completion_to_sample(pending: Sample, prompt_tokens: Sequence[int], completion: Completion, response_text: str) -> Sample:
    """Turn what an engine returned into a Sample, or append it to an ABORTED sample that it continues.

    For a PENDING sample the engine's input is prompt_tokens; for an ABORTED one it is all tokens that the sample has. On prompt tokens
    loss_mask and rollout_log_probs are 0 and weight_versions is -1; on generated tokens they are 1, the engine's log-prob and the
    version that sampled the token, which in a continued sample differs from part to part.

    Args:
        pending: PENDING without tokens, or ABORTED; its prompt, index, group_index and metadata are kept.
        prompt_tokens: the tokenized prompt, without any generated token.
        completion: its input_tokens equal the engine's input described above.
        response_text: the text of the WHOLE response, continued parts included: decoded piece by piece, a character that spans two
            tokens would break.

    Returns: a Sample with status COMPLETED, TRUNCATED or ABORTED for finish_reason "stop", "length" or "abort". Where top_p, top_k or
        min_p cut the distribution, metadata["truncated_sampling"] is True: the log-probs are not those of the full policy. Where the engine
        gave log-probs of something else than the distribution sampled from, metadata["log_prob_kind"] says of what. Log-probs of the
        untempered policy, if the engine was asked for them every time, are metadata["untempered_log_probs"], aligned with tokens.
    Asserts: pending's status; that the engine's input is what the sample already has; one temperature over all parts.
    """
    where, prompt = describe_sample(pending), tuple(prompt_tokens)
    assert pending.status in (Status.PENDING, Status.ABORTED), f"{where}: status is {pending.status.value}, expected pending or aborted"
    start = pending if pending.tokens else _start_from_prompt(pending, prompt)
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
        metadata=_sampling_metadata(start, completion),
    )


def _start_from_prompt(pending: Sample, prompt: tuple[int, ...]) -> Sample:
    zeros = (0.0,) * len(prompt)
    return replace(pending, tokens=prompt, loss_mask=zeros, rollout_log_probs=zeros, weight_versions=(-1,) * len(prompt))


def _sampling_metadata(start: Sample, completion: Completion) -> dict[str, Any]:
    """The sample's metadata after the completion; log-probs that cover only some of the generated tokens are left out."""
    out = dict(start.metadata)
    if completion.truncated_sampling:
        out["truncated_sampling"] = True
    if completion.log_prob_kind != "sampled":  # for people: the trainer needs no more than the temperature
        out["log_prob_kind"] = completion.log_prob_kind
    before = out.pop("untempered_log_probs", None)
    if before is None and not any(mask > 0 for mask in start.loss_mask):
        before = [0.0] * len(start.tokens)
    if before is not None and completion.untempered_log_probs is not None:
        out["untempered_log_probs"] = [*before, *completion.untempered_log_probs]
    return out


def group_samples(samples: Iterable[Sample], group_size: int | None = None) -> tuple[Group, ...]:
    """Collect samples into groups by group_index, whatever order they arrive in.

    Args:
        samples: in any order.
        group_size: how many samples each group must have; None = any number.

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
    filter_fn: Callable[[Group], bool] | None = None,
) -> tuple[Sample, ...]:
    """Score samples, then drop the groups that a filter refuses. In this order: filters look at rewards.

    Args:
        samples: in any order; collected into groups by group_index.
        reward_fn: Sample -> reward; None = keep the rewards that are there.
        filter_fn: Group -> keep it?; sees the samples with metadata["trainable"] not False; None = keep all.

    Returns: the samples of the kept groups, groups whole and in the order of group_index.
    Raises: RewardError if reward_fn gives no finite number.
    """
    scored = [sample if reward_fn is None else with_reward(sample, reward_fn(sample)) for sample in samples]
    groups = group_samples(scored)
    return tuple(sample for group in groups if passes_filter(group, filter_fn) for sample in group)


def select_trainable(group: Group) -> Group:
    """The samples of a group that are to be trained on: without those that only count in its statistics (metadata["trainable"] False)."""
    return tuple(sample for sample in group if sample.metadata.get("trainable", True))


def passes_filter(group: Group, filter_fn: Callable[[Group], bool] | None) -> bool:
    """Whether a filter keeps the group, judged by the samples that are to be trained on; None keeps every group.

    A filter asks whether training on the group teaches something. A greedy sample beside n equal ones must not make the group look diverse.
    """
    return filter_fn is None or filter_fn(select_trainable(group))


def mask_truncated(sample: Sample) -> Sample:
    """The sample, with loss_mask 0 everywhere if it ran out of its token budget: its reward still counts in its group's statistics.

    A truncated answer may have been on its way to being right; training on its low reward would teach to be short.

    Source: Yu et al. 2025 (DAPO), section 3.4, overlong filtering.
    """
    return replace(sample, loss_mask=(0.0,) * len(sample.tokens)) if sample.status is Status.TRUNCATED else sample


def extract_sample_fields(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The columns of samples as ragged lists: tokens, loss_masks, rewards (NaN where there is none), group_indices."""
    return {
        "tokens": [list(sample.tokens) for sample in samples],
        "loss_masks": [list(sample.loss_mask) for sample in samples],
        "rewards": [math.nan if sample.reward is None else sample.reward for sample in samples],
        "group_indices": [sample.group_index for sample in samples],
    }


def compute_response_lengths(loss_masks: Iterable[Sequence[float]]) -> list[int]:
    """Number of tokens with loss_mask > 0 in each row."""
    return [sum(mask > 0 for mask in loss_mask) for loss_mask in loss_masks]


def build_batch_metadata(samples: Sequence[Sample], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Counts about a batch, as plain JSON values: num_samples, num_groups, num_<status>, and the weight versions that sampled it.

    Args:
        samples: of the batch.
        extra: further entries; they win over the computed ones.
    """
    statuses = Counter(sample.status for sample in samples)
    versions = {version for sample in samples for version in sample.weight_versions or () if version >= 0}
    metadata: dict[str, Any] = {"num_samples": len(samples), "num_groups": len({sample.group_index for sample in samples})}
    metadata.update({f"num_{status.value}": statuses[status] for status in Status if statuses[status]})
    if versions:
        metadata.update(min_weight_version=min(versions), max_weight_version=max(versions))
    return metadata | dict(extra or {})


def convert_to_batch(samples: Iterable[Sample], metadata: Mapping[str, Any] | None = None) -> RolloutBatch:
    """Make a RolloutBatch: groups whole, in the order of group_index, whatever order the samples arrived in.

    Raises: DataError if a sample has no tokens or has FAILED; GenerationError if two samples of a group have the same index.
    """
    ordered = tuple(sample for group in group_samples(samples) for sample in group)
    for sample in ordered:
        if not sample.tokens or sample.status is Status.FAILED:
            raise DataError(
                f"{describe_sample(sample)} has {len(sample.tokens)} tokens and status {sample.status.value}: it cannot be trained on"
            )
    return RolloutBatch(samples=ordered, metadata=build_batch_metadata(ordered, metadata))
