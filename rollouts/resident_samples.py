"""ResidentSamples: the samples of unfinished batches that are not being generated, to be looked at and edited in one place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from rollouts.errors import GenerationError
from rollouts.finished_rollouts import FinishedRollouts
from rollouts.generate_fns import PendingGroup
from rollouts.prompt_schedule import PromptSchedule
from rollouts.rollout_runs import RolloutRuns
from rollouts.types import Group, Sample

EditSamples: TypeAlias = Callable[[tuple[Sample, ...]], Awaitable[Sequence[Sample]]]
"""Samples -> the same samples in the same order, some of them with other values."""


class ResidentSamples:
    """All samples that an executor has and that no engine works on: finished groups by age, then those that are being scored, then what
    stopped groups have, both by index. It holds none of them: they stay where they are."""

    def __init__(self, schedule: PromptSchedule, finished: FinishedRollouts, runs: RolloutRuns) -> None:
        self._schedule = schedule
        self._finished = finished
        self._runs = runs
        self._editing = False

    @property
    def is_being_edited(self) -> bool:
        """Whether they may change at any moment, so that none of them must be handed out."""
        return self._editing

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What they are now."""
        unfinished = (*self._runs.scoring, *self._schedule.waiting)
        groups = [rollout.group for rollout in self._finished.rollouts] + [pending.samples for pending in unfinished]
        return tuple(sample for group in groups for sample in group)

    async def edit(self, edit: EditSamples) -> None:
        """Change them, while rollouts go on: what finishes or is stopped during the edit is not in it. If `edit` raises, nothing changes.

        Until it ends stopped groups do not start, and what is being scored does not come to its end.

        Raises: GenerationError if other samples come back; what `edit` raises.
        """
        assert not self._editing, "edit_residents() is already running; await it before the next call"
        self._editing = True
        edited_pending: list[PendingGroup] = []
        pending, scoring = self._schedule.hold_back(), self._runs.hold_scoring()
        edited_scoring: dict[int, Group] = {}
        try:
            rollouts = self._finished.rollouts
            groups = [rollout.group for rollout in rollouts]
            groups += [group.samples for group in (*(run.pending for run in scoring), *pending)]
            samples = tuple(sample for group in groups for sample in group)
            edited = tuple(await edit(samples)) if samples else ()
            _check_same_samples(samples, edited)
            rest = iter(edited)
            edited_groups = [tuple(next(rest) for _ in group) for group in groups]
            num_finished, num_scoring = len(rollouts), len(scoring)
            self._finished.replace_groups(zip(rollouts, edited_groups[:num_finished], strict=True))
            of_scoring, of_pending = edited_groups[num_finished:][:num_scoring], edited_groups[num_finished + num_scoring :]
            edited_scoring = {run.index: group for run, group in zip(scoring, of_scoring, strict=True)}
            edited_pending = [PendingGroup(old.prompt, group) for old, group in zip(pending, of_pending, strict=True)]
        finally:
            self._schedule.release(edited_pending)
            self._runs.release_scoring(scoring, edited_scoring)
            self._editing = False


def _check_same_samples(before: Sequence[Sample], after: Sequence[Sample]) -> None:
    found = [(sample.group_index, sample.index) for sample in after]
    if found != [(sample.group_index, sample.index) for sample in before]:
        raise GenerationError(
            f"an edit of {len(before)} resident samples returned {len(after)} samples, or others, or in another order: return each of them "
            "at its place"
        )
