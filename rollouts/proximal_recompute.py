"""Segment log-probs for everything that waits: once per weight version, while somebody still holds exactly those weights.

The tokens that version v - 1 sampled get their log-prob under v. All of them exist as soon as the engines have v, and a trainer holds
exactly v from that sync until its next update. So the recomputation stands there: behind the sync, with rollouts interrupted (what a
running request has is in nobody's hands), before the next update.

    await executor.interrupt()
    served = await publish_weights(..., version=v)
    await recomputer.recompute_all(executor, v)
    executor.set_version(v); executor.resume()

A version counts syncs. With sync_every > 1 the trainer is ahead of the engines between two of them, and what it would say then is the
log-prob of no version: recompute_all does nothing when it is called a second time for a version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import trio

from rollouts.async_config import AsyncConfig
from rollouts.backends.protocol import TrainingBackend
from rollouts.batching import collate_samples
from rollouts.engines.protocol import InferenceEngine, ScoresTokens
from rollouts.episode_columns import split_contexts
from rollouts.errors import ConfigError, EngineError, raise_single_errors
from rollouts.proximal import check_versions, find_due_tokens, start_segments, with_segment_log_probs
from rollouts.resident_samples import EditSamples
from rollouts.rollout_training import select_log_probs
from rollouts.samples import select_trainable
from rollouts.training_steps import submit_forward
from rollouts.types import Sample

Score: TypeAlias = Callable[[Sequence[Sample], int], Awaitable[Sequence[Sequence[float]]]]
"""(samples, version) -> of each sample the log-probs of its tokens under the weights of that version, aligned with tokens. What stands in
front of the first trained token is not read. The samples carry no response beyond the last token that is asked for."""

_PADDED_TOKENS = 1 << 22  # of one batch for the trainer: rows times the longest of them, which bounds the memory of its columns


class HoldsSamples(Protocol):
    """Where samples wait for training, for example a WorkflowExecutor."""

    async def edit_residents(self, edit: EditSamples) -> object:
        """Replace every sample that waits, unfinished ones too, by what `edit` makes of it."""
        ...


class ProximalRecomputer:
    """Gives the samples that wait their segment log-probs (Sample.segment_log_probs).

    Holds the last version that it was done for; that is all of its state, and a checkpoint keeps it as the run's weight version.
    """

    def __init__(self, score: Score, *, last_version: int = -1) -> None:
        """
        Args:
            score: score_with_trainer(backend) or score_with_engines(engines).
            last_version: up to which recompute_all has been done. A run that goes on between two syncs, where the trainer is ahead of the
                engines, passes their version.
        """
        self._score = score
        self._last_version = last_version

    async def recompute_all(self, holder: HoldsSamples, current_version: int) -> int:
        """Do so for every resident sample, the first time that it is called for this version.

        Call it behind the sync that made current_version, before the next update of the trainer, and while no rollout runs.

        Returns: how many tokens got a log-prob; 0 at the second call for a version.
        Raises: DataError if it is not known which version sampled a token; what the trainer or an engine raises. Then nothing is edited.
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
        """The samples, those tokens with their segment log-prob that version current_version - 1 sampled and that have none yet.

        Whoever scores must hold the weights of current_version, and no others. Nothing is computed for samples that are not trained on.

        Returns: the samples in the same order; each has segment_log_probs (the rollout's where nothing was due), unless it has no tokens.
        Raises: as recompute_all.
        """
        edited, _ = await self._add(samples, current_version)
        return edited

    async def _add(self, samples: Sequence[Sample], current_version: int) -> tuple[tuple[Sample, ...], int]:
        """The edited samples, and how many tokens got a log-prob."""
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
) -> ProximalRecomputer | None:
    """The recomputer of a run, which asks the trainer; None where segment-wise PPO is off.

    Args:
        num_steps: that the run has finished. Between two syncs nothing is computed: the trainer is ahead of the engines' version.
        sync_every: steps between two syncs.
        max_tokens_per_microbatch, pad_id: as in score_with_trainer.
    """
    if not asynchronous.segment_wise:
        return None
    score = score_with_trainer(backend, max_tokens_per_microbatch=max_tokens_per_microbatch, pad_id=pad_id)
    return ProximalRecomputer(score, last_version=-1 if num_steps % sync_every == 0 else num_steps // sync_every)


def score_with_trainer(backend: TrainingBackend, *, max_tokens_per_microbatch: int = 16384, pad_id: int = 0) -> Score:
    """A Score that asks the trainer, whose log-probs are those of the loss. It is believed to hold the version that is asked for.

    Args:
        max_tokens_per_microbatch: most real tokens in one forward pass.
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
    """A Score that asks the engines in turn, for a trainer that is busy or ahead of them. They must hold the version that is asked for.

    Args:
        max_requests: at the same time, to each engine.

    Raises: ConfigError if an engine does not score tokens (ScoresTokens), or there is none.
    """
    if not engines:
        raise ConfigError("there are no engines to recompute log-probs with (found 0): pass at least one, or score_with_trainer(backend)")
    for engine in engines:
        if not isinstance(engine, ScoresTokens):
            raise ConfigError(
                f"{getattr(engine, 'name', type(engine).__name__)} cannot say which log-probs it would give: it has no "
                "recompute_output_log_probs(). Use score_with_trainer(backend)"
            )
    return partial(_score_with_engines, tuple(engines), max_requests)


async def _score_with_engines(
    engines: Sequence[InferenceEngine], max_requests: int, samples: Sequence[Sample], version: int
) -> list[tuple[float, ...]]:
    rows: dict[int, tuple[float, ...]] = {}

    async def ask(engine: InferenceEngine, i: int, limiter: trio.CapacityLimiter) -> None:
        assert isinstance(engine, ScoresTokens)
        sample, row = samples[i], [0.0] * len(samples[i].tokens)
        for begin, end in split_contexts(sample):
            start = next((t for t in range(begin + 1, end) if sample.loss_mask[t] > 0), end)
            if start < end:
                async with limiter:
                    row[start:end] = await engine.recompute_output_log_probs(sample.tokens[begin:end], start - begin, sample.temperature)
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


async def _check_holds(engine: InferenceEngine, version: int) -> None:
    found = await engine.get_weight_version()
    if found != version:
        raise EngineError(
            f"{getattr(engine, 'name', type(engine).__name__)} holds weight version {found}, but log-probs under version {version} are "
            "wanted: recompute them behind the sync and before the next one"
        )


def _find_wanted(sample: Sample, current_version: int) -> tuple[int, ...]:
    trained = sample.weight_versions is not None and sample.metadata.get("trainable", True)
    return find_due_tokens(sample, current_version) if trained else ()


def _cut(sample: Sample, length: int) -> Sample:
    """The first tokens of a sample, without what an unfinished one lacks: they are all that its log-probs depend on."""
    return Sample(
        tokens=sample.tokens[:length],
        loss_mask=sample.loss_mask[:length],
        temperature=sample.temperature,
        index=sample.index,
        group_index=sample.group_index,
        context_starts=tuple(start for start in sample.context_starts if start < length),
    )


def _with_log_probs_at(sample: Sample, places: Sequence[int], log_probs: Sequence[float], current_version: int) -> Sample:
    """with_segment_log_probs at some of its places: tokens that already have one under this version keep it."""
    assert sample.segment_log_probs is not None
    values = list(sample.segment_log_probs)
    for place in places:
        values[place] = log_probs[place]
    return with_segment_log_probs(sample, values, current_version)
