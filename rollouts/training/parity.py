"""Parity of engine and trainer: the difference of their log-probs for the same tokens and the same weights.

Kernels and precisions cause small differences. A large one means an error: stale weights, a stale prefix cache, another temperature,
tokens that were tokenized again. Importance ratios are off by as much.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import trio
from torch import Tensor

from rollouts.algorithms.preset_parts import is_corrected
from rollouts.algorithms.presets import truncated
from rollouts.backends.protocol import TrainingBackend
from rollouts.batches import select_rows
from rollouts.config import ParityConfig
from rollouts.data.collate import collate_samples
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError, EngineError, raise_single_errors
from rollouts.training.rollout_batch import select_log_probs
from rollouts.training.steps import Metrics, find_trained_rows, submit_forward
from rollouts.training.weight_sync import WeightProbe
from rollouts.types import Algorithm, Completion, Sample, SamplingParams, TrainBatch


class ParityWarning(UserWarning):
    """Log-probs of rollouts and trainer differ by more than the configured threshold."""


@dataclass(frozen=True, kw_only=True)
class LogProbDifference:
    """Difference of an engine's log-probs and the trainer's, over num_tokens tokens; in nats."""

    num_tokens: int
    max_abs: float  # largest |difference|
    mean_abs: float
    kl: float  # KL(engine || trainer) per token, estimated by k3 at the sampled tokens

    def as_metrics(self) -> Metrics:
        """Return the difference as metrics, by the names that a run logs."""
        return {"engine_diff_max": self.max_abs, "engine_diff_mean": self.mean_abs, "engine_kl": self.kl}


def compare_log_probs(engine_log_probs: Tensor, trainer_log_probs: Tensor, mask: Tensor) -> LogProbDifference:
    """Compare two columns of log-probs at the sampled tokens. Pure.

    Args:
        engine_log_probs: # [B, T] from the engine, at sampling time.
        trainer_log_probs: # [B, T] of the same tokens from the trainer.
        mask: # [B, T], > 0 at sampled tokens.

    Returns: the difference; zeros if no token was sampled.
    """
    on = mask > 0
    difference = (trainer_log_probs - engine_log_probs)[on].double()
    if difference.numel() == 0:
        return LogProbDifference(num_tokens=0, max_abs=0.0, mean_abs=0.0, kl=0.0)
    return LogProbDifference(
        num_tokens=difference.numel(),
        max_abs=float(difference.abs().max()),
        mean_abs=float(difference.abs().mean()),
        kl=float((difference.exp() - 1 - difference).mean()),
    )


async def measure_difference(backend: TrainingBackend, batch: TrainBatch, *, max_tokens_per_microbatch: int = 16384) -> LogProbDifference:
    """Recompute the log-probs of a batch in the trainer, at the sampling temperatures, and compare.

    Args:
        batch: a batch with rollout_log_probs, sampled with the backend's present weights.
    """
    assert batch.rollout_log_probs is not None, "the batch has no rollout_log_probs to compare with"
    trainer = await submit_forward(backend, batch, select_log_probs, max_tokens_per_microbatch=max_tokens_per_microbatch).result()
    return compare_log_probs(batch.rollout_log_probs, trainer, batch.loss_mask * batch.trainable[:, None])


async def check_parity(
    engine: InferenceEngine,
    backend: TrainingBackend,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    *,
    pad_id: int = 0,
) -> LogProbDifference:
    """Sample a response to each prompt and compare its log-probs with the trainer's. Both must hold the same weights.

    Args:
        prompts: tokens of each prompt.
        params: sampling parameters; default 64 tokens at temperature 1.

    Raises: ConfigError if params cut the distribution (top_p, top_k, min_p): a trainer computes log-probs of the whole distribution.
    """
    params = params or SamplingParams(max_tokens=64)
    completions: list[Completion | None] = [None] * len(prompts)

    async def generate(i: int) -> None:
        completions[i] = await engine.generate(prompts[i], params, request_id=f"parity-{i:06d}")

    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            for i in range(len(prompts)):
                nursery.start_soon(generate, i)
    samples = [_to_sample(i, completion) for i, completion in enumerate(completions) if completion is not None]
    return await measure_difference(backend, collate_samples(samples, pad_id=pad_id))


def _to_sample(index: int, completion: Completion) -> Sample:
    if completion.truncated_sampling:
        raise ConfigError("check_parity needs samples of the whole distribution: use top_p=1, top_k=0 and min_p=0")
    num_prompt = completion.input_len
    return Sample(
        index=index,
        tokens=(*completion.input_tokens, *completion.output_tokens),
        loss_mask=(0.0,) * num_prompt + (1.0,) * completion.output_len,
        rollout_log_probs=(0.0,) * num_prompt + completion.output_log_probs,
        temperature=completion.temperature,
    )


async def create_weight_probe(backend: TrainingBackend, tokens: Sequence[int], *, tolerance: float, pad_id: int = 0) -> WeightProbe:
    """Create a probe: the log-probs of these tokens that engines with the backend's weights must return.

    Args:
        tokens: at least 2 tokens of any text that the model knows; a few dozen suffice.
        tolerance: largest difference of a log-prob, in nats: 1e-3 between float32 and float32, about 0.3 if one side is bfloat16.
    """
    assert len(tokens) >= 2, f"a probe of {len(tokens)} tokens has no log-prob to compare, expected at least 2"
    sample = Sample(tokens=tuple(tokens), loss_mask=(0.0, *(1.0,) * (len(tokens) - 1)), rollout_log_probs=(0.0,) * len(tokens))
    batch = collate_samples([sample], pad_id=pad_id)
    log_probs = await submit_forward(backend, batch, select_log_probs, max_tokens_per_microbatch=len(tokens)).result()
    return WeightProbe(tokens=tuple(tokens), log_probs=tuple(log_probs[0, 1:].tolist()), tolerance=tolerance)


def select_rows_of_version(batch: TrainBatch, samples: Sequence[Sample], version: int, num_rows: int) -> TrainBatch | None:
    """Select the first rows, at most num_rows, whose sampled tokens are all of one weight version and of the whole distribution.

    None if there is no such row. Log-probs of a cut distribution whose sets are not recorded differ from the trainer's without an error.
    """
    trained = set(find_trained_rows(batch))
    rows = [row for row, sample in enumerate(samples) if row in trained and _is_of_version(sample, version)]
    return select_rows(batch, rows[:num_rows]) if rows else None


def _is_of_version(sample: Sample, version: int) -> bool:
    if sample.weight_versions is None or (sample.truncated_sampling and sample.kept_tokens is None):
        return False
    return all(v == version for v, on in zip(sample.weight_versions, sample.loss_mask, strict=True) if on)


def act_on_difference(difference: LogProbDifference, config: ParityConfig, algorithm: Algorithm) -> Algorithm:
    """Choose the algorithm to train with, given the difference of engine and trainer.

    Raises: EngineError with config.action "stop". Warns with a ParityWarning with "warn" and "correct".
    """
    if difference.mean_abs <= config.threshold:
        return algorithm
    text = (
        f"log-probs of the rollouts and of the trainer differ by {difference.mean_abs:.3g} nats on average (at most "
        f"{difference.max_abs:.3g}, over {difference.num_tokens} tokens), more than the threshold {config.threshold:g}: the engine "
        "serves other weights, a stale prefix cache, another temperature or a lower precision than the trainer"
    )
    if config.action == "stop":
        raise EngineError(f"{text}. Nothing was trained on them. Fix the cause, raise the threshold, or set action='correct'")
    warnings.warn(ParityWarning(text), stacklevel=2)
    return correct(algorithm, config) if config.action == "correct" else algorithm


def correct(algorithm: Algorithm, config: ParityConfig) -> Algorithm:
    """Return the algorithm with its loss corrected for an engine that differs, unless it is corrected, or reads no engine's log-probs."""
    return algorithm if is_corrected(algorithm) or algorithm.compares_pairs else truncated(algorithm, cap=config.cap)
