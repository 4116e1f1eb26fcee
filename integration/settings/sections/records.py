"""Records of a run besides its metrics and checkpoints: crash bundles, trajectories, profiles."""

from __future__ import annotations

from dataclasses import dataclass

from rollouts.config import check_not_negative, check_positive, check_setting

CRASH_BUNDLES = ("auto", "full", "linked", "none")  # choices of crash_bundles


@dataclass(frozen=True, kw_only=True)
class TrajectorySection:
    """Rollouts written to rl/trajectories/step_NNNN.jsonl for inspection: whole groups of each step, or every n-th sample."""

    groups: int = 4  # write this many whole groups of each step, spread evenly over it; 0 = none
    every: int | None = None  # write every n-th sample instead of whole groups: 1 = all, 0 = none; None = whole groups
    # module:function or file.py:function, Sample -> bool: only samples for which it is true are written, or groups that have such a sample
    condition: str | None = None
    steps: bool = False  # include the steps of episodes: observation, action, reward, return, advantage and its parts

    def __post_init__(self) -> None:
        check_not_negative(self, "groups")
        check_setting(self.every is None or self.every >= 0, "trajectories.every", self.every, "at least 0, or None")
        alone = self.every is None or self.groups in (0, type(self).groups)
        asked = f"it left out beside trajectories.every {self.every}: a file holds whole groups or every n-th sample"
        check_setting(alone, "trajectories.groups", self.groups, asked)
        none = f"False where trajectories.{'groups' if self.every is None else 'every'} is 0"
        check_setting(self.writes or not self.steps, "trajectories.steps", self.steps, none)

    @property
    def writes(self) -> bool:
        """Whether any rollouts are written."""
        return (self.groups if self.every is None else self.every) > 0


@dataclass(frozen=True, kw_only=True)
class ProfileSection:
    """A profile of some steps of each stage, written to profile/<stage>: a trace in Chrome's format, and a table."""

    steps: int = 0  # steps to profile, which take longer meanwhile; 0 = none
    skip: int = 2  # steps at the beginning of each stage that are not profiled, as they fill memory and caches

    def __post_init__(self) -> None:
        check_not_negative(self, "steps")
        check_positive(self, "skip")
