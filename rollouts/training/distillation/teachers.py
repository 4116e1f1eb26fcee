"""Teachers of distillation: frozen models that say of every sampled token how probable it is to them.

A teacher fills columns of a batch, as a reference does: teacher_log_probs and, if it is a model with them, teacher_ids and teacher_tops. It
is a value made of what computes: a backend (ModelTeacher), engines that score tokens (EngineTeacher), or several teachers of which each
row has its own (TeacherByColumn). No token is tokenized again: a teacher reads the ids that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import trio
from torch import Tensor

from rollouts.backends.protocol import TrainingBackend, find_outputs, find_token_spec
from rollouts.batches import select_rows
from rollouts.data.samples import describe_sample
from rollouts.engines.protocol import EngineFeature, InferenceEngine, require_engine_feature
from rollouts.errors import ConfigError, DataError, raise_single_errors
from rollouts.training.distillation.context import TeacherContext, add_context, shift_back
from rollouts.training.steps import find_trained_rows, submit_forward
from rollouts.types import Sample, TokenOutputs, TrainBatch

TEACHER_COLUMNS = ("teacher_log_probs", "teacher_tops")
"""Columns that a teacher fills; teacher_ids come with teacher_tops."""

_FILLED = ("teacher_log_probs", "teacher_ids", "teacher_tops")


class Teacher(Protocol):
    """Teacher of distillation."""

    @property
    def fills(self) -> frozenset[str]:
        """Columns of TEACHER_COLUMNS that it can fill."""
        ...

    async def fill(self, batch: TrainBatch, samples: Sequence[Sample], wanted: Collection[str], *, max_tokens: int) -> TrainBatch:
        """Return the batch with the wanted columns, 0 in rows without a trained token.

        Args:
            samples: those of the rows.
            wanted: columns of `fills`.
            max_tokens: most real tokens of one forward pass.

        Raises: DataError for a sample that it cannot judge; errors of its backend or engine.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ModelTeacher:
    """Teacher that is a model of this run: a frozen one (create_reference_backend), or the policy itself with a context."""

    backend: TrainingBackend
    context: TeacherContext | None = None  # None = it reads what the policy read

    @property
    def fills(self) -> frozenset[str]:
        """Columns that it can fill; the most probable tokens if its backend was made with num_tops."""
        return frozenset(TEACHER_COLUMNS) if "tops" in (find_outputs(self.backend) or ()) else frozenset({"teacher_log_probs"})

    async def fill(self, batch: TrainBatch, samples: Sequence[Sample], wanted: Collection[str], *, max_tokens: int) -> TrainBatch:
        """See Teacher. Runs one forward pass over the trained rows."""
        rows = find_trained_rows(batch)
        read, shifts = batch, [0] * batch.num_rows
        if self.context is not None:
            spec = find_token_spec(self.backend)
            read, shifts = add_context(self.context, batch, samples, rows, None if spec is None else spec.context_length)
        read = replace(read, routed_experts=None)  # the experts of another model are its own
        output_fn = _select_both if "teacher_tops" in wanted else _select_log_probs
        found = await submit_forward(self.backend, read, output_fn, max_tokens_per_microbatch=max_tokens).result()
        found = shift_back(found, batch, rows, shifts)
        if "teacher_tops" not in wanted:
            return replace(batch, teacher_log_probs=found)
        k = (found.shape[-1] - 2) // 2
        tops, ids = found[..., 1 : 2 + k], found[..., 2 + k :].to(torch.int32)
        return replace(batch, teacher_log_probs=found[..., 0].contiguous(), teacher_tops=tops.contiguous(), teacher_ids=ids)


def _select_log_probs(outputs: TokenOutputs) -> Tensor:
    return outputs.log_probs


def _select_both(outputs: TokenOutputs) -> Tensor:
    """Return log-probs of the tokens, then those of the most probable ones and of all others, then the ids. # [B, T, 2 + 2 K]"""
    assert outputs.tops is not None, "the teacher's backend computes no most probable tokens: make it with num_tops="
    return torch.cat([outputs.log_probs[..., None], outputs.tops], -1)


@dataclass(frozen=True, kw_only=True)
class EngineTeacher:
    """Teacher that is one engine, or several with the same model, which score given tokens: a vLLM or SGLang server, for example."""

    engines: tuple[InferenceEngine, ...]
    max_requests: int = 64  # most requests at the same time to each engine

    @property
    def fills(self) -> frozenset[str]:
        """Columns that it can fill: log-probs of the sampled tokens."""
        return frozenset({"teacher_log_probs"})

    async def fill(self, batch: TrainBatch, samples: Sequence[Sample], wanted: Collection[str], *, max_tokens: int) -> TrainBatch:
        """See Teacher. Sends one request for each context of each trained row.

        Raises: ConfigError for an engine that does not score; DataError for tokens that were drawn from less than the whole vocabulary.
        """
        scorers = [
            require_engine_feature(engine, EngineFeature.SCORES, "a teacher", instead="Give the teacher as a model directory.")
            for engine in self.engines
        ]
        if batch.kept is not None:
            raise DataError(
                "tokens were drawn with top_p, top_k or min_p, and a server scores over the whole vocabulary: sample with top_p=1, top_k=0 "
                "and min_p=0, or give the teacher as a model directory"
            )
        out = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        limiters = [trio.CapacityLimiter(self.max_requests) for _ in scorers]

        async def ask(row: int, begin: int, end: int, start: int) -> None:
            which = row % len(scorers)
            async with limiters[which]:
                tokens = batch.tokens[row, begin:end].tolist()
                scores = await scorers[which].recompute_output_log_probs(tokens, start - begin, samples[row].temperature)
            out[row, start:end] = torch.tensor(scores, dtype=torch.float32)

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for row in find_trained_rows(batch):
                    for begin, end in _find_contexts(batch, row):
                        scored = (batch.loss_mask[row, begin:end] > 0).nonzero()
                        if len(scored):
                            nursery.start_soon(ask, row, begin, begin + int(scored[-1]) + 1, begin + int(scored[0]))
        return replace(batch, teacher_log_probs=out)


def _find_contexts(batch: TrainBatch, row: int) -> list[tuple[int, int]]:
    """Return (start, end) of each context of a row."""
    length = int(batch.lengths[row])
    if batch.context_ids is None:
        return [(0, length)]
    ids = batch.context_ids[row, :length]
    starts = [0, *((ids[1:] != ids[:-1]).nonzero().flatten() + 1).tolist()]
    return list(zip(starts, [*starts[1:], length], strict=True))


@dataclass(frozen=True, kw_only=True)
class TeacherByColumn:
    """Several teachers, of which each row has the one that a field of its data names."""

    column: str  # field of Sample.metadata
    teachers: Mapping[str, Teacher]  # by the value of that field, at least one

    def __post_init__(self) -> None:
        if not self.teachers:
            raise ConfigError(f"there is no teacher for any value of {self.column!r}: give teachers= at least one")

    @property
    def fills(self) -> frozenset[str]:
        """Columns that all of them can fill."""
        return frozenset.intersection(*(teacher.fills for teacher in self.teachers.values()))

    async def fill(self, batch: TrainBatch, samples: Sequence[Sample], wanted: Collection[str], *, max_tokens: int) -> TrainBatch:
        """See Teacher. All teachers compute at the same time."""
        parts: dict[str, list[int]] = {}
        for row in find_trained_rows(batch):
            parts.setdefault(self._find(samples[row]), []).append(row)
        filled: dict[str, TrainBatch] = {}

        async def fill_part(name: str, rows: Sequence[int]) -> None:
            own = [samples[row] for row in rows]
            filled[name] = await self.teachers[name].fill(select_rows(batch, rows), own, wanted, max_tokens=max_tokens)

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for name, rows in parts.items():
                    nursery.start_soon(fill_part, name, rows)
        return replace(batch, **_join(batch, parts, filled))

    def _find(self, sample: Sample) -> str:
        row = dict(sample.metadata)  # the user's own keys
        found = row.get(self.column)
        if str(found) not in self.teachers:
            raise DataError(
                f"{describe_sample(sample)} has {self.column} = {found!r}, for which there is no teacher: there are "
                f"{', '.join(self.teachers)}"
            )
        return str(found)


def _join(batch: TrainBatch, parts: Mapping[str, Sequence[int]], filled: Mapping[str, TrainBatch]) -> dict[str, Tensor]:
    """Join the columns that teachers filled for some rows each."""
    columns: dict[str, Tensor] = {}
    for column in _FILLED:
        found = {name: value for name, part in filled.items() if (value := getattr(part, column)) is not None}
        for name, value in found.items():
            if column not in columns:
                columns[column] = torch.zeros((*batch.tokens.shape, *value.shape[2:]), dtype=value.dtype)
            columns[column][torch.tensor(parts[name]), : value.shape[1]] = value
    return columns


def list_teacher_backends(teacher: Teacher) -> dict[str, TrainingBackend]:
    """Return the backends that a teacher computes with, each under its name in messages."""
    if isinstance(teacher, ModelTeacher):
        return {"teacher": teacher.backend}
    if isinstance(teacher, TeacherByColumn):
        found = {name: list_teacher_backends(one) for name, one in teacher.teachers.items()}
        return {f"teacher of {name}": backend for name, backends in found.items() for backend in backends.values()}
    return {}
