"""Checks of the models beside the policy: their tokens, and the teachers of distillation."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from integration.doctor.findings import Finding, judge, skip
from integration.doctor.heads import MOST_TOKENS
from integration.doctor.numbers import ReferenceFn, describe, is_beyond
from integration.parts.model_settings import check_companions
from integration.settings.config import Config
from rollouts.data.collate import collate_samples
from rollouts.errors import ConfigError
from rollouts.training.distillation.teachers import Teacher
from rollouts.training.parity import compare_log_probs
from rollouts.training.steps import find_trained_rows
from rollouts.types import Sample, TrainBatch

_CHANCE = 0.9  # share of the logarithm of the vocabulary from which a teacher tells no more than chance
_SUM = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}  # largest |log| of a sum of probabilities that should be 1


def check_other_tokens(config: Config) -> Finding | None:
    """Check that the models beside the policy have its tokens: ids, special tokens and number of embeddings. None without such a model."""
    teacher = config.teacher
    named = {"reference": config.reference.path, "critic": config.critic.path, "teacher's tokenizer": teacher.tokenizer}
    named |= {f"teacher {name}".strip(): path for name, path in teacher.models.items()}
    given = [name for name, path in named.items() if path is not None]
    if not given:
        return None
    try:
        check_companions(config)
    except ConfigError as error:
        return judge("tokens of other models", str(error), fails=True, advice="values and log-probs would be those of other texts")
    return judge("tokens of other models", f"{', '.join(given)}: the policy's vocabulary and special tokens")


async def check_teacher(
    teacher: Teacher, samples: Sequence[Sample], wanted: Collection[str], *, vocab_size: int, precision: str
) -> tuple[Finding, TrainBatch]:
    """Check that a teacher's log-probs of answers of the policy are log-probs, and tell it from chance.

    Args:
        samples: answers of the policy, with their prompts and the fields of their rows.
        wanted: columns that the algorithm requires of it.

    Returns: the finding, and the batch with the columns of the teacher.
    """
    batch = collate_samples(samples, pad_id=0, require_rewards=False)
    batch = await teacher.fill(batch, samples, wanted, max_tokens=MOST_TOKENS)
    assert batch.teacher_log_probs is not None, "a teacher fills its log-probs"
    on = batch.loss_mask > 0
    theirs = batch.teacher_log_probs[on].float()
    advice = "the teacher's weights or its server are broken: let it continue a plain text"
    bad = int((~torch.isfinite(theirs) | (theirs > _SUM[precision])).sum())
    if bad:
        found = f"{bad} of {len(theirs)} log-probs are not finite or above 0"
        return judge("teacher", found, fails=True, advice=advice), batch
    off = _measure_sums(batch, on)
    surprise, chance = -float(theirs.mean()), math.log(vocab_size)
    own = "" if batch.rollout_log_probs is None else f"the policy's own are {-float(batch.rollout_log_probs[on].mean()):.3g}, "
    found = f"{surprise:.3g} nats per token of {len(samples)} answers of the policy; {own}chance is {chance:.3g}"
    if off is not None:
        found += f"; its most probable tokens and the rest add up to 1 within {off:.1g}"
    if off is not None and not off <= _SUM[precision]:
        return judge("teacher", found, fails=True, advice=advice), batch
    blind = surprise > _CHANCE * chance
    advice = "it knows no more of these answers than chance: untrained weights, the ids of another tokenizer, or a policy far from it"
    return judge("teacher", found, warns=blind, advice=advice), batch


def _measure_sums(batch: TrainBatch, on: Tensor) -> float | None:
    """Return the largest |log| of the sums of the most probable tokens and all others, which are probabilities of everything."""
    if batch.teacher_tops is None:
        return None
    return float(torch.logsumexp(batch.teacher_tops[on].float(), -1).abs().max())


def check_scores(batch: TrainBatch, samples: Sequence[Sample], reference: ReferenceFn, *, precision: str) -> Finding:
    """Check the log-probs of a teacher's server against transformers' own forward of the same model.

    Args:
        batch: the answers with teacher_log_probs; those at temperature 1 are compared.
        reference: forward pass of the model that the server should have.
    """
    assert batch.teacher_log_probs is not None, "the server's scores are missing"
    own = torch.zeros_like(batch.teacher_log_probs)
    rows = [row for row in find_trained_rows(batch) if samples[row].temperature == 1.0]
    if not rows:
        return skip("teacher's server", "the answers are not at temperature 1, whose log-probs the forward pass has")
    for row in rows:
        own[row, : len(samples[row].tokens)] = reference(samples[row].tokens)
    at_one = torch.tensor([[float(sample.temperature == 1.0)] for sample in samples])
    difference = compare_log_probs(batch.teacher_log_probs, own, batch.loss_mask * at_one)
    found = f"{describe(difference)} from a forward pass of --teacher.tokenizer, over {difference.num_tokens} tokens"
    advice = "the server has another model, or scores another position or at another temperature; its version is in docs/distillation.md"
    return judge("teacher's server", found, fails=is_beyond(difference, precision), advice=advice)
