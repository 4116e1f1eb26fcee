"""Segment log-probs for all waiting samples: once per weight version, while a model still holds exactly those weights.

Tokens sampled by version v - 1 get their log-prob under v. All of them exist as soon as the engines have v, and a trainer holds
exactly v from that sync until its next update. So the recomputation takes place after the sync, with rollouts interrupted (the tokens of
a running request are not available), and before the next update.

    await executor.interrupt()
    served = await publish_weights(..., version=v)
    await recomputer.recompute_all(executor, v)
    executor.set_version(v); executor.resume()

A version counts syncs. With sync_every > 1 the trainer is ahead of the engines between two of them, and its log-probs then belong to
no version: recompute_all does nothing when it is called a second time for a version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import trio

from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.finished import EditSamples
from rollouts.backends.protocol import TrainingBackend
from rollouts.data.collate import collate_samples, split_contexts
from rollouts.data.samples import select_trainable
from rollouts.data.segments import check_versions, find_due_tokens, start_segments, with_segment_log_probs
from rollouts.engines.protocol import EngineFeature, InferenceEngine, ScoresTokens, require_engine_feature
from rollouts.errors import ConfigError, EngineError, raise_single_errors
from rollouts.training.rollout_batch import select_log_probs
from rollouts.training.steps import submit_forward
from rollouts.types import Sample

Score: TypeAlias = Callable[[Sequence[Sample], int], Awaitable[Sequence[Sequence[float]]]]
"""(samples, version) -> log-probs of each sample's tokens under the weights of that version, aligned with tokens. Values before the
first trained token are not read. The samples have no response beyond the last token whose log-prob is requested."""

_PADDED_TOKENS = 1 << 22  # maximum of rows * longest row of one batch for the trainer: bounds the memory of its columns


class HoldsSamples(Protocol):
    """Holder of samples that wait for training, for example a WorkflowExecutor."""

    async def edit_residents(self, edit: EditSamples) -> object:
        """Replace every waiting sample, unfinished ones too, by its edited one."""
        ...


class ProximalRecomputer:
    """Add segment log-probs to the waiting samples (Sample.segment_log_probs).

    Its only state is the last version that was recomputed; a checkpoint stores it as the run's weight version.
    """

    def __init__(self, score: Score, *, last_version: int = -1) -> None:
        """
        Args:
            score: score_with_trainer(backend) or score_with_engines(engines).
            last_version: weight version up to which recompute_all has been done. A run that resumes between two syncs, while the
                trainer is ahead of the engines, passes their version.
        """
        self._score = score
        self._last_version = last_version

    async def recompute_all(self, holder: HoldsSamples, current_version: int) -> int:
        """Add segment log-probs to every resident sample, at the first call for this version.

        Call it after the sync that made current_version, before the next update of the trainer, and while no rollout runs.

        Returns: the number of tokens that got a log-prob; 0 at the second call for a version.
        Raises: DataError if the version of a token is unknown; errors of the trainer or an engine. Then nothing is edited.
        """
        if current_version <= self._last_version:
            await trio.lowlevel.checkpoint()
            return 0
        num_tokens = 0

        async def edit(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
            nonlocal num_tokens
            edited, num_tokens = await self._add(samples, current_version)
            return edited

        await holder.edit_residents(edit)
        self._last_version = current_version
        return num_tokens

    async def add_proximal_log_probs(self, samples: Sequence[Sample], current_version: int) -> tuple[Sample, ...]:
        """Return the samples with segment log-probs of tokens that version current_version - 1 sampled and that have none yet.

        The scorer must hold exactly the weights of current_version. Nothing is computed for samples that are not trained on.

        Returns: the samples in the same order; each has segment_log_probs (the rollout's if none was due), unless it has no tokens.
        Raises: as recompute_all.
        """
        edited, _ = await self._add(samples, current_version)
        return edited

    async def _add(self, samples: Sequence[Sample], current_version: int) -> tuple[tuple[Sample, ...], int]:
        """Return the edited samples, and the number of tokens that got a log-prob."""
        check_versions(select_trainable(tuple(samples)))
        edited = [start_segments(sample) for sample in samples]
        wanted = {position: _find_wanted(sample, current_version) for position, sample in enumerate(edited)}
        due = {position: places for position, places in wanted.items() if places}
        if due:
            asked = [_cut(edited[position], places[-1] + 1) for position, places in due.items()]
            for position, log_probs in zip(due, await self._score(asked, current_version), strict=True):
                edited[position] = _with_log_probs_at(edited[position], due[position], log_probs, current_version)
        else:
            await trio.lowlevel.checkpoint()
        return tuple(edited), sum(map(len, due.values()))


def create_proximal_recomputer(
    asynchronous: AsyncConfig,
    backend: TrainingBackend,
    *,
    num_steps: int = 0,
    sync_every: int = 1,
    max_tokens_per_microbatch: int = 16384,
    pad_id: int = 0,
    score: Score | None = None,
) -> ProximalRecomputer | None:
    """Create the recomputer of a run, which uses the trainer unless `score` is given; None without segment-wise PPO.

    Args:
        num_steps: steps that the run has finished. Between two syncs nothing is computed: the trainer is ahead of the engines' version.
        sync_every: steps between two syncs.
        max_tokens_per_microbatch, pad_id: as in score_with_trainer.
        score: used instead of the trainer, for example score_with_engines(engines).
    """
    if not asynchronous.segment_wise:
        return None
    if score is None:
        score = score_with_trainer(backend, max_tokens_per_microbatch=max_tokens_per_microbatch, pad_id=pad_id)
    return ProximalRecomputer(score, last_version=-1 if num_steps % sync_every == 0 else num_steps // sync_every)


def score_with_trainer(backend: TrainingBackend, *, max_tokens_per_microbatch: int = 16384, pad_id: int = 0) -> Score:
    """Create a Score that uses the trainer, with the log-probs of the loss. It must hold the requested version, which is not checked.

    Args:
        max_tokens_per_microbatch: maximum number of real tokens in one forward pass.
    """
    return partial(_score_with_trainer, backend, max_tokens_per_microbatch, pad_id)


async def _score_with_trainer(
    backend: TrainingBackend, max_tokens: int, pad_id: int, samples: Sequence[Sample], version: int
) -> list[list[float]]:
    rows: dict[int, list[float]] = {}
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].tokens), i))
    while order:
        size = max(1, _PADDED_TOKENS // len(samples[order[0]].tokens))
        part, order = order[:size], order[size:]
        batch = collate_samples([samples[i] for i in part], pad_id=pad_id)
        pending = submit_forward(backend, batch, select_log_probs, max_tokens_per_microbatch=max_tokens)
        for i, row in zip(part, (await pending.result()).tolist(), strict=True):
            rows[i] = row[: len(samples[i].tokens)]
    return [rows[i] for i in range(len(samples))]


def score_with_engines(engines: Sequence[InferenceEngine], *, max_requests: int = 64) -> Score:
    """Create a Score that uses the engines in turn, for a trainer that is busy or ahead of them. They must hold the requested version.

    Args:
        max_requests: maximum number of requests at the same time to each engine.

    Raises: ConfigError if an engine does not score tokens (EngineFeature.SCORES), or there is none.
    """
    if not engines:
        raise ConfigError("there are no engines to recompute log-probs with (found 0): pass at least one, or score_with_trainer(backend)")
    for engine in engines:
        _require_scores(engine)
    return partial(_score_with_engines, tuple(engines), max_requests)


async def _score_with_engines(
    engines: Sequence[InferenceEngine], max_requests: int, samples: Sequence[Sample], version: int
) -> list[tuple[float, ...]]:
    rows: dict[int, tuple[float, ...]] = {}

    async def ask(engine: InferenceEngine, i: int, limiter: trio.CapacityLimiter) -> None:
        scorer, sample, row = _require_scores(engine), samples[i], [0.0] * len(samples[i].tokens)
        for begin, end in split_contexts(sample):
            start = next((t for t in range(begin + 1, end) if sample.loss_mask[t] > 0), end)
            if start < end:
                async with limiter:
                    row[start:end] = await scorer.recompute_output_log_probs(sample.tokens[begin:end], start - begin, sample.temperature)
        rows[i] = tuple(row)

    for engine in engines:
        await _check_holds(engine, version)
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            limiters = [trio.CapacityLimiter(max_requests) for _ in engines]
            for i in range(len(samples)):
                nursery.start_soon(ask, engines[i % len(engines)], i, limiters[i % len(engines)])
    for engine in engines:  # an update in between would have made them the log-probs of another version
        await _check_holds(engine, version)
    return [rows[i] for i in range(len(samples))]


def _require_scores(engine: InferenceEngine) -> ScoresTokens:
    return require_engine_feature(engine, EngineFeature.SCORES, "score_with_engines", instead="Use score_with_trainer(backend).")


async def _check_holds(engine: InferenceEngine, version: int) -> None:
    found = await engine.get_weight_version()
    if found != version:
        raise EngineError(
            f"{getattr(engine, 'name', type(engine).__name__)} holds weight version {found}, but log-probs under version {version} are "
            "wanted: recompute them behind the sync and before the next one"
        )


def _find_wanted(sample: Sample, current_version: int) -> tuple[int, ...]:
    trained = sample.weight_versions is not None and sample.trainable
    return find_due_tokens(sample, current_version) if trained else ()


def _cut(sample: Sample, length: int) -> Sample:
    """Return the first tokens of a sample, without fields that an unfinished one lacks: its log-probs depend on nothing else."""
    return Sample(
        tokens=sample.tokens[:length],
        loss_mask=sample.loss_mask[:length],
        temperature=sample.temperature,
        index=sample.index,
        group_index=sample.group_index,
        context_starts=tuple(start for start in sample.context_starts if start < length),
    )


def _with_log_probs_at(sample: Sample, places: Sequence[int], log_probs: Sequence[float], current_version: int) -> Sample:
    """Apply with_segment_log_probs at some places of the sample: tokens with a log-prob under this version keep it."""
    assert sample.segment_log_probs is not None
    values = list(sample.segment_log_probs)
    for place in places:
        values[place] = log_probs[place]
    return with_segment_log_probs(sample, values, current_version)
