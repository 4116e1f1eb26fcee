"""Log-probs of segments: tokens of one sample under the weights one version after the one that sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from rollouts.data.samples import describe_sample
from rollouts.errors import DataError
from rollouts.types import Sample

# -- on samples, one version after the one that sampled


def check_versions(samples: Sequence[Sample]) -> None:
    """Raise DataError if the weight version that sampled a trained token is unknown.

    Segment-wise corrections need these versions: an engine that does not report them would make every token look like a missed one.
    """
    for sample in samples:
        versions = (-1,) * len(sample.tokens) if sample.weight_versions is None else sample.weight_versions
        if min(compress(versions, sample.loss_mask), default=0) < 0:
            place = next(t for t, mask in enumerate(sample.loss_mask) if mask > 0 and versions[t] < 0)
            found = "no weight_versions" if sample.weight_versions is None else f"weight version {versions[place]} at token {place}"
            raise DataError(
                f"{describe_sample(sample)} has {found}, but segment-wise corrections need the version that sampled each trained token: "
                "use an engine that reports versions (Completion.output_versions), or set segment_wise (enable_segment_wise_ppo) to False"
            )


def start_segments(sample: Sample) -> Sample:
    """Return the sample with segment_log_probs: rollout_log_probs where it has none, marked as not computed. Unchanged without either."""
    if sample.segment_log_probs is not None or sample.rollout_log_probs is None:
        return sample
    return replace(sample, segment_log_probs=sample.rollout_log_probs, segment_versions=(-1,) * len(sample.tokens))


def find_segment_tokens(sample: Sample, current_version: int) -> tuple[int, ...]:
    """Return the positions of trained tokens that version current_version - 1 sampled: their log-prob under current_version is now due.

    The first token of a context is never due, since nothing predicts it.

    Args:
        sample: with weight_versions.
        current_version: version of the weights that are about to be replaced.
    """
    assert sample.weight_versions is not None, f"{describe_sample(sample)} has no weight_versions"
    if current_version - 1 not in sample.weight_versions:  # thousands of samples may wait, most of them without such tokens
        return ()
    pairs = enumerate(zip(sample.weight_versions, sample.loss_mask, strict=True))
    firsts = {0, *sample.context_starts}
    return tuple(place for place, (version, mask) in pairs if mask > 0 and version == current_version - 1 and place not in firsts)


def find_due_tokens(sample: Sample, current_version: int) -> tuple[int, ...]:
    """Return find_segment_tokens without the tokens that have their log-prob under current_version already."""
    known = sample.segment_versions
    places = find_segment_tokens(sample, current_version)
    return places if known is None else tuple(place for place in places if known[place] != current_version)


def find_missed_tokens(sample: Sample, current_version: int) -> tuple[int, ...]:
    """Return the positions of trained tokens of earlier versions without a computed segment log-prob: their window is closed.

    Nothing holds the version after theirs any more. Their weight is 1, or that of the proximal policy (anchor_to_proximal).

    Args:
        current_version: version of the weights that train, after the tokens of find_due_tokens got their log-probs.
    """
    assert sample.weight_versions is not None, f"{describe_sample(sample)} has no weight_versions"
    known = sample.segment_versions or (-1,) * len(sample.tokens)
    rows = enumerate(zip(sample.weight_versions, known, sample.loss_mask, strict=True))
    firsts = {0, *sample.context_starts}
    return tuple(p for p, (version, own, mask) in rows if mask > 0 and 0 <= version < current_version and own < 0 and p not in firsts)


def with_segment_log_probs(sample: Sample, log_probs: Sequence[float], current_version: int) -> Sample:
    """Return a copy of the sample with segment_log_probs from `log_probs` at find_segment_tokens; other tokens keep theirs.

    Args:
        sample: with rollout_log_probs and weight_versions. Tokens without a segment log-prob start with the rollout's.
        log_probs: aligned with tokens, under the weights of current_version; only find_segment_tokens are read.
        current_version: version of those weights.

    Returns: recompute_version = current_version, and segment_versions at the due tokens; the sample itself if none is due.
    """
    due = find_segment_tokens(sample, current_version)
    if not due:
        return sample
    where = describe_sample(sample)
    start = sample.segment_log_probs if sample.segment_log_probs is not None else sample.rollout_log_probs
    assert start is not None, f"{where} has neither segment_log_probs nor rollout_log_probs"
    assert len(log_probs) == len(sample.tokens), f"{where}: {len(log_probs)} log_probs for {len(sample.tokens)} tokens"
    values, versions = list(start), list(sample.segment_versions or (-1,) * len(sample.tokens))
    for place in due:
        values[place], versions[place] = float(log_probs[place]), current_version
    return replace(sample, segment_log_probs=tuple(values), segment_versions=tuple(versions), recompute_version=current_version)
