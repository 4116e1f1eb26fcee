"""Reasons for a group of rollouts having a gradient, or none, in sentences.

A group here is what an advantage compares: samples with the same Sample.group_index and, where there are subgroups, the same subgroup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from integration.view.tokens import SHORT_REASONS, UNTOUCHED
from rollouts.data.records import TrajectoryRecord
from rollouts.types import Sample, Status

_SAME = 1e-6  # difference below which rewards are equal


def find_key(sample: Sample) -> tuple[int, str]:
    """Return the group and the subgroup of a sample, "" for none: what its advantage is compared within."""
    return sample.group_index, sample.subgroup or ""


def name_group(sample: Sample) -> str:
    """Name the group of a sample, and its subgroup if it has one: "group 5, subgroup first"."""
    return f"group {sample.group_index}" + (f", subgroup {sample.subgroup}" if sample.subgroup else "")


def split_groups(records: Iterable[TrajectoryRecord]) -> Iterator[list[TrajectoryRecord]]:
    """Yield the records of each group, of each of its subgroups by itself, by number and name, samples in order."""
    in_order = sorted(records, key=lambda record: (*find_key(record.sample), record.sample.index))
    for _, members in groupby(in_order, key=lambda record: find_key(record.sample)):
        yield list(members)


def explain_gradient(group: Sequence[TrajectoryRecord], *, mask_truncated: bool = False) -> tuple[str, ...]:
    """Explain in sentences whether the update had a gradient from these samples of one group, and why not.

    Args:
        group: records of one group, or of one of its subgroups.
        mask_truncated: whether the run leaves truncated samples out of training.
    """
    estimates = [record.estimate for record in group if record.estimate is not None]
    if not estimates:
        return ("No advantages were recorded: the step did not reach its estimate, or these samples were not trained on.",)
    rewards = max((estimate.group_rewards for estimate in estimates), key=len) or tuple(e.reward for e in estimates)
    told: list[str] = []
    if not any(record.sample.trainable for record in group):
        told.append("No gradient: none of these samples is trainable (trainable is False: failed, or kept only as a baseline).")
    elif not any(mask > 0 for record in group for mask in record.sample.loss_mask):
        told.append("No gradient: no token of these samples has a loss mask above 0.")
    elif mask_truncated and all(record.sample.status is Status.TRUNCATED for record in group):
        told.append("No gradient: each of these samples was cut by the token budget.")
    elif all(estimate.advantages is None for estimate in estimates):
        told.append("The algorithm estimates no advantages; its loss reads other columns.")
    else:
        told.append(_explain_advantages(group, rewards))
    cut = sum(record.sample.status is Status.TRUNCATED for record in group)
    if cut:
        then = ": rl.mask_truncated leaves them out of training." if mask_truncated else "."
        told.append(f"{cut} of {len(group)} samples were cut by the token budget{then}")
    told += explain_clipping(group)
    hidden = len(rewards) - len(group)
    if hidden > 0:
        whole = _name_whole(group)
        told.append(f"{whole[0].upper()}{whole[1:]} has {len(rewards)} samples, of which {len(group)} were recorded.")
    return tuple(told)


def explain_clipping(group: Sequence[TrajectoryRecord]) -> tuple[str, ...]:
    """Tell in a sentence how many trained tokens of these samples the update clipped or left out; nothing where that is not recorded."""
    reasons = [reason for record in group if record.update is not None for reason in record.update.reasons or () if reason]
    if not reasons:
        return ()
    counts = Counter(part for reason in reasons for part in reason.split(", ") if part not in UNTOUCHED)
    if not counts:
        return (f"The update clipped none of its {len(reasons)} tokens and left none out.",)
    meanings = {name: f" ({SHORT_REASONS[name]})" if name in SHORT_REASONS else "" for name in counts}
    each = ", ".join(f"{name} {count}{meanings[name]}" for name, count in sorted(counts.items()))
    touched = sum(any(part not in UNTOUCHED for part in reason.split(", ")) for reason in reasons)
    return (f"The update clipped or left out {touched} of its {len(reasons)} tokens: {each}.",)


def _name_whole(group: Sequence[TrajectoryRecord]) -> str:
    """Name in a sentence what the samples are compared within: "the group", or "group 5, subgroup first"."""
    sample = group[0].sample
    return name_group(sample) if sample.subgroup else "the group"


def _explain_advantages(group: Sequence[TrajectoryRecord], rewards: Sequence[float]) -> str:
    largest: list[float] = []  # largest advantage of each sample, by absolute value
    for record in group:
        advantages = None if record.estimate is None else record.estimate.advantages
        if advantages is not None and record.sample.trainable:
            largest.append(max((a for a, m in zip(advantages, record.sample.loss_mask, strict=True) if m > 0), key=abs, default=0.0))
    whole = _name_whole(group)
    equal = max(rewards) - min(rewards) <= _SAME * max(1.0, *(abs(reward) for reward in rewards))
    zero = sum(value == 0 for value in largest)
    if zero == len(largest) and equal:
        return (
            f"No gradient: all {len(rewards)} rewards of {whole} are {rewards[0]:g}, so that none is better than their mean and "
            "each advantage is 0. A KL term or an entropy bonus may still give one."
        )
    if zero == len(largest):
        return (
            f"No gradient: each advantage is 0, although rewards go from {min(rewards):g} to {max(rewards):g}. Look at reward shaping and "
            "at the algorithm's estimate."
        )
    nothing = f"; {zero} of {len(largest)} recorded samples have an advantage of 0" if zero else ""
    ends = f"{min(largest):.3g} to {max(largest):.3g}, rewards from {min(rewards):g} to {max(rewards):g}"
    return f"{whole[0].upper()}{whole[1:]} has a gradient: advantages go from {ends}{nothing}."
