"""Checks of log-probs and gradients: trainer against transformers' own forward, engine against trainer, before and after new weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from integration.doctor.findings import Finding, judge, skip
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.protocol import OutputFn, TrainingBackend
from rollouts.batches import select_rows
from rollouts.data.collate import collate_samples
from rollouts.engines.protocol import EngineFeature, InferenceEngine, get_engine_features, require_engine_feature
from rollouts.training.parity import LogProbDifference, check_parity, compare_log_probs
from rollouts.training.rollout_batch import select_log_probs
from rollouts.training.saving.run_checkpoints import require_checkpointing
from rollouts.training.steps import merge_step_metrics, submit_forward
from rollouts.types import LossFn, Sample, SamplingParams, TrainBatch

_MEAN = {"float32": 2e-5, "bfloat16": 0.03, "float16": 0.01}  # nats; the mean over tokens that rounding explains
_WORST = {"float32": 2e-3, "bfloat16": 1.0, "float16": 0.3}  # nats; the worst token
_SPLIT = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.01}  # relative difference of a gradient's norm
_MOST_ROW = 4096  # tokens of the longest row
_LONG_ROW = 160  # tokens of the row of random tokens; engines keep the keys and values of prompts in blocks of 16 to 64 tokens
_ANSWER = 32  # tokens that an engine may answer
_LEARNED = 0.9  # share of the logarithm of the vocabulary from which a loss is no better than chance
_WORSE = 1.15  # share from which it is worse: untrained weights are not sure of anything

ReferenceFn = Callable[[Sequence[int]], Tensor]
"""Tokens [T] to log-probs [T] of each token given those before it, 0 for the first: the forward pass that others are compared with."""


def create_reference(model: Any) -> ReferenceFn:
    """Return the log-probs of transformers' own forward pass, in float32 over the model's logits."""

    def compute(tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
        found = torch.log_softmax(logits[:-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
        return torch.cat([torch.zeros(1), found.cpu()])

    return compute


def find_window(config: Any) -> int | None:
    """Return the shortest attention window or chunk of a model's configuration; None if it has none."""
    text = config.get_text_config()
    sizes = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if getattr(text, "use_sliding_window", True) is False:
        sizes[0] = None
    found = [size for size in sizes if isinstance(size, int) and size > 0]
    return min(found) if found else None


def choose_rows(rows: Sequence[Sequence[int]], *, window: int | None, context: int | None, vocab_size: int, seed: int = 0) -> list[Sample]:
    """Return the rows to compare: the user's, and one of random tokens that is longer than two windows, where the context has room.

    Args:
        rows: token rows of the user's data.
    """
    most = min(_MOST_ROW, context or _MOST_ROW)
    long = min(most, max(_LONG_ROW, (5 * window) // 2 if window else 0))
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(0, vocab_size, (long,), generator=generator).tolist()
    chosen = [list(row)[:most] for row in rows if len(row) >= 2] + [random]
    return [
        Sample(tokens=tuple(row), loss_mask=(0.0, *(1.0,) * (len(row) - 1)), rollout_log_probs=(0.0,) * len(row), index=k, group_index=k)
        for k, row in enumerate(chosen)
    ]


def choose_prompts(rows: Sequence[Sequence[int]], long: Sequence[int], *, context: int | None) -> list[Sequence[int]]:
    """Return prompts for an engine: the beginnings of four of the user's rows, and the beginning of a long row.

    Args:
        long: a row longer than two windows and than the blocks in which engines keep keys and values.
        context: most tokens of a prompt and its answer; None = no limit.
    """
    room = (len(long) if context is None else min(len(long), context)) - _ANSWER - 1
    beginnings = [row[: max(1, min(len(row) - 1, 64))] for row in rows[:4] if len(row) > 1]
    return [*beginnings, long[:room]] if beginnings and room > 0 else beginnings


async def check_trainer(
    backend: TrainingBackend, reference: ReferenceFn, samples: Sequence[Sample], *, precision: str, window: int | None
) -> Finding:
    """Check the trainer's log-probs against the reference's on rows that are packed together."""
    batch = collate_samples(samples, pad_id=0)
    own = await _compute(backend, batch)
    theirs = torch.zeros_like(own)
    for row, sample in enumerate(samples):
        theirs[row, : len(sample.tokens)] = reference(sample.tokens)
    difference = compare_log_probs(theirs, own, batch.loss_mask)
    longest = max(len(sample.tokens) for sample in samples)
    span = "" if window is None else f", {longest / window:.1f} windows at most"
    found = f"{describe(difference)} from transformers' own forward, over {len(samples)} rows of up to {longest} tokens{span}"
    advice = (
        "the trainer computes another model: compare config.json (output head, tied embeddings, attention) and weights with those that "
        "transformers loads, and report a family that differs (docs/models.md)"
    )
    if window is not None and is_beyond(difference, precision):
        within = batch.loss_mask * (torch.arange(batch.loss_mask.shape[1]) < window)
        if not is_beyond(compare_log_probs(theirs, own, within), precision):
            found = f"{found}; the first {window} tokens of each row, a window, agree"
            advice = "the trainer attends beyond the window, or not as far: compare sliding_window and layer_types of config.json"
    if window is not None and longest <= window:
        found = f"{found}; none is longer than a window of {window} tokens, so a wrong one could not be seen"
        return judge("trainer log-probs", found, fails=is_beyond(difference, precision), warns=True, advice=advice)
    return judge("trainer log-probs", found, fails=is_beyond(difference, precision), advice=advice)


async def check_loss(reference: ReferenceFn, rows: Sequence[Sequence[int]], *, vocab_size: int, is_pretrained: bool) -> Finding:
    """Check that a pretrained model predicts the user's texts better than chance, which it does not with the tokenizer of another model."""
    name = "loss on the data"
    if not is_pretrained or not rows:
        return skip(name, "the built-in model starts from random weights" if rows else "no rows to measure")
    found = [reference(row)[1:] for row in rows if len(row) >= 2]
    loss, chance = -float(torch.cat(found).mean()), math.log(vocab_size)
    advice = "untrained weights, or the tokenizer of another model: decode some tokens, and let the model continue a plain text"
    fails, warns = loss > _WORSE * chance, loss > _LEARNED * chance
    if fails:
        advice = "the model is surer of other tokens: the tokenizer is that of another model, or the weights are of another vocabulary"
    return judge(name, f"{loss:.3g} nats per token; chance is {chance:.3g}", fails=fails, warns=warns, advice=advice)


async def check_engine(
    engine: InferenceEngine,
    backend: TrainingBackend,
    prompts: Sequence[Sequence[int]],
    *,
    precision: str,
    max_tokens: int = _ANSWER,
    temperature: float,
) -> list[Finding]:
    """Check the engine's log-probs of what it samples against the trainer's, at temperature 1, at 0.7, and at the run's own."""
    findings: list[Finding] = []
    advice = "the engine has other weights, a lower precision or another temperature than the trainer assumes (docs/engines.md)"
    for value in dict.fromkeys((1.0, 0.7, temperature)):
        difference = await check_parity(engine, backend, prompts, SamplingParams(max_tokens=max_tokens, temperature=value))
        found = f"{describe(difference)} from the trainer's, over {difference.num_tokens} sampled tokens"
        findings.append(judge(f"engine log-probs, temperature {value:g}", found, fails=is_beyond(difference, precision), advice=advice))
        if findings[0].status == "pass":  # so the weights are the same
            advice = (
                "at temperature 1 the two agree: the engine samples, or reports log-probs, at another temperature than it was asked for"
            )
    return findings


async def check_sync(
    engine: InferenceEngine, backend: TrainingBackend, prompts: Sequence[Sequence[int]], *, precision: str, seed: int = 0
) -> Finding:
    """Check that new weights change what the engine answers, prompts that it has kept included, and that it then agrees with the trainer.

    The trainer's weights are multiplied by random factors near 1, synced, and restored.
    """
    params = SamplingParams(max_tokens=16)
    before = await check_parity(engine, backend, prompts, params)  # the engine now keeps the keys and values of these prompts
    weights = dict(await backend.get_weights().result())
    generator = torch.Generator().manual_seed(seed)
    await backend.load_weights({name: _disturb(weight, generator) for name, weight in weights.items()}).result()
    old = await check_parity(engine, backend, prompts, params)  # the engine still has the old weights
    try:
        await bring_weights(engine, backend)
        after = await check_parity(engine, backend, prompts, params)
    finally:
        await backend.load_weights(weights).result()
    await bring_weights(engine, backend)
    told = (before.mean_abs, old.mean_abs, after.mean_abs)
    found = "engine and trainer differ by {:.2g}, with new weights in the trainer alone by {:.2g}, and by {:.2g} after the sync".format(
        *told
    )
    advice = "the engine goes on with old weights, or with their keys and values: look at its prefix cache and at docs/weight-sync.md"
    blind = old.mean_abs <= max(_MEAN[precision], 10 * before.mean_abs)
    return judge("weight sync", found, fails=is_beyond(after, precision), warns=blind, advice=advice)


async def bring_weights(engine: InferenceEngine, backend: TrainingBackend) -> None:
    """Bring the trainer's weights to the engine: in memory where it can, else from the disk."""
    if EngineFeature.MEMORY_UPDATES in get_engine_features(engine):
        updating = require_engine_feature(engine, EngineFeature.MEMORY_UPDATES, "the doctor's weight sync")
        await updating.update_weights(await backend.get_weights().result(), await engine.get_weight_version() + 1)
        return
    with TemporaryDirectory(prefix="rollouts-doctor-") as directory:
        await require_checkpointing(backend).save_checkpoint(Path(directory)).result()
        await engine.update_weights_from_checkpoint(Path(directory))


async def check_repeats(
    backend: TrainingBackend, samples: Sequence[Sample], output_fn: OutputFn = select_log_probs, *, name: str = "log-probs repeat"
) -> Finding:
    """Check that the trainer computes the same log-probs, or other outputs, twice, which dropout would prevent."""
    batch = collate_samples(samples, pad_id=0)
    first, second = await _compute(backend, batch, output_fn), await _compute(backend, batch, output_fn)
    worst = float((first - second).abs().max())
    advice = "dropout is on where ratios are computed, or kernels are not deterministic: set the model's dropout to 0, or --deterministic"
    unit = " nats" if output_fn is select_log_probs else ""
    found = f"two passes over the same rows differ by at most {worst:.2g}{unit}"
    return judge(name, found, fails=not worst <= 1e-2, warns=worst > 0, advice=advice)


async def check_splits(backend: TrainingBackend, samples: Sequence[Sample], *, precision: str) -> Finding:
    """Check that loss and gradient of a step of SFT do not depend on its split into micro-batches. The weights are restored."""
    if len(samples) < 2:
        return skip("splits change nothing", "one row alone cannot be split")
    batch = collate_samples(samples, pad_id=0)
    batch = replace(batch, loss_weights=token_mean(batch))
    return await compare_splits(backend, batch, [[row] for row in range(batch.num_rows)], sft_loss, precision=precision)


async def compare_splits(
    backend: TrainingBackend,
    batch: TrainBatch,
    parts: Sequence[Sequence[int]],
    loss: LossFn,
    *,
    precision: str,
    option: str = "--rl.max-tokens-per-microbatch",
) -> Finding:
    """Compare the loss and the gradient of a batch as one micro-batch with those of its parts. The weights are restored.

    Args:
        parts: rows of each part.
        option: the option that would change the gradient.
    """
    weights = dict(await backend.get_weights().result())
    steps: list[Mapping[str, float]] = []
    for some in ([list(range(batch.num_rows))], parts):
        done = [await backend.forward_backward(select_rows(batch, list(rows)), loss).result() for rows in some]
        steps.append(merge_step_metrics(done) | await backend.optim_step().result())
        await backend.load_weights(weights).result()
    whole, split = steps
    worst = max(abs(whole[key] - split[key]) / max(abs(whole[key]), 1e-8) for key in ("loss", "grad_norm"))
    told = [f"loss {step['loss']:.6g} and gradient norm {step['grad_norm']:.4g}" for step in steps]
    found = f"{told[0]} in one micro-batch, {told[1]} in {len(parts)}"
    advice = f"the gradient would depend on {option}: a loss of your own must be a weighted sum over tokens"
    return judge("splits change nothing", found, fails=not worst <= _SPLIT[precision], advice=advice)


async def _compute(backend: TrainingBackend, batch: TrainBatch, output_fn: OutputFn = select_log_probs) -> Tensor:
    return await submit_forward(backend, batch, output_fn, max_tokens_per_microbatch=2 * _MOST_ROW).result()


def _disturb(weight: Tensor, generator: torch.Generator) -> Tensor:
    if not weight.is_floating_point():
        return weight
    factors = 1 + 0.05 * torch.randn(weight.shape, generator=generator)
    return (weight.float() * factors).to(weight.dtype)


def is_beyond(difference: LogProbDifference, precision: str) -> bool:
    """Whether a difference is more than rounding in this precision explains."""
    return not (difference.mean_abs <= _MEAN[precision] and difference.max_abs <= _WORST[precision])


def describe(difference: LogProbDifference) -> str:
    """Describe a difference: "mean 1e-07, worst 2e-06 nats"."""
    return f"mean {difference.mean_abs:.2g}, worst {difference.max_abs:.2g} nats"
