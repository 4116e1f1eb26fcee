"""AsyncConfig: bounds on generation ahead of training, and handling of rollouts that fail, hang, or become too old."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from rollouts.config import RLTrainingConfig, RolloutConfig, check_choice, check_count, check_not_negative, check_positive
from rollouts.config_files import is_number
from rollouts.errors import ConfigError

WhenQueueFull = Literal["raise", "wait"]
RolloutOrder = Literal["finished", "submitted"]
OnStale = Literal["retry", "drop"]
OnFailure = Literal["raise", "retry", "drop"]
InFlight = Literal["continue", "interrupt"]
CheckpointInFlight = Literal["restart", "interrupt"]
MissedSegment = Literal["rollout", "proximal"]


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Settings of rollouts generated during training. All counts are of groups: all samples of one prompt."""

    enabled: bool = False  # generate rollouts during training; False = generate and train in turn
    max_staleness: int = 1  # weight versions that a trained token may be behind; 0 = same numbers as the synchronous loop
    max_concurrent_rollouts: int | None = None  # groups that may be generated at once; None = (max_staleness + 1) * groups per version
    queue_size: int | None = None  # maximum number of finished groups in the queue; None = (max_staleness + 1) * groups per version
    when_queue_full: WhenQueueFull = "raise"  # raise = an error that says "increase queue_size"; wait = the producer waits for space
    # order of groups for training: finished = first finished first; submitted = in the order of their prompts, in which batches do not
    # depend on timing and the trainer waits for stragglers
    order: RolloutOrder = "finished"
    # reaction to a group that became too old: retry = generate its prompt anew under newer weights; drop = give it up
    on_stale: OnStale = "retry"
    # reaction to a rollout that raised: raise = end the run; retry = generate the prompt again; drop = give the group up
    on_failure: OnFailure = "retry"
    max_attempts: int = 3  # failed attempts of a prompt after which the run ends, with on_failure retry
    max_stale_attempts: int | None = None  # attempts of a prompt that became too old after which it is given up; None = no limit
    retry_delay_s: float = 1.0  # seconds to wait between a failure and the next attempt
    # seconds after which a group is aborted, to continue from its tokens in the next attempt; None = no limit
    rollout_timeout_s: float | None = None
    patience_s: float | None = 3600.0  # seconds to wait without the end of any rollout before the run ends; None = forever
    # rollouts in progress at a weight sync: continue = engines swap the weights under them; interrupt = they are aborted and continue from
    # their tokens; None = continue, or interrupt if segment-wise PPO needs their tokens
    in_flight: InFlight | None = None
    # rollouts in progress at a checkpoint: restart = saved as they were when last stopped, so that a resumed run generates their newest
    # tokens again; interrupt = aborted as for a weight sync, and saved with all tokens
    checkpoint_in_flight: CheckpointInFlight = "restart"
    # compute a proximal policy for each token, one weight version after its own; None = no, or as --enable-segment-wise-ppo says
    enable_segment_wise_ppo: bool | None = None
    # log-prob in place of a segment log-prob that was never computed: rollout = that of the token's rollout; proximal = the ordinary
    # proximal one
    missed_segment: MissedSegment = "rollout"

    def __post_init__(self) -> None:
        for name in ("enabled", "enable_segment_wise_ppo"):
            value = getattr(self, name)
            if not isinstance(value, bool | None if name == "enable_segment_wise_ppo" else bool):
                raise ConfigError(f"AsyncConfig.{name} is {value!r}, expected True or False")
        check_count(self, "max_staleness")
        check_positive(self, "max_attempts")
        check_not_negative(self, "retry_delay_s")
        if not self.retry_delay_s < math.inf:
            raise ConfigError(f"AsyncConfig.retry_delay_s is {self.retry_delay_s!r}, expected a finite number of seconds")
        for name in ("max_concurrent_rollouts", "queue_size", "max_stale_attempts"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        for name in ("rollout_timeout_s", "patience_s"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value < math.inf):
                raise ConfigError(f"AsyncConfig.{name} is {value!r}, expected a finite number of seconds above 0, or None for no limit")
        choices = {
            "when_queue_full": get_args(WhenQueueFull),
            "order": get_args(RolloutOrder),
            "on_stale": get_args(OnStale),
            "on_failure": get_args(OnFailure),
            "checkpoint_in_flight": get_args(CheckpointInFlight),
            "missed_segment": get_args(MissedSegment),
        }
        for name, known in choices.items():
            check_choice(self, name, known)
        if self.in_flight is not None:
            check_choice(self, "in_flight", get_args(InFlight))
        if self.segment_wise and self.in_flight == "continue":
            raise ConfigError(
                "AsyncConfig.in_flight is 'continue', but enable_segment_wise_ppo is True: it must see the tokens of unfinished rollouts "
                "at each weight sync. Leave in_flight out, or set it to 'interrupt'"
            )

    @property
    def segment_wise(self) -> bool:
        """Whether each token gets its own proximal policy."""
        return bool(self.enable_segment_wise_ppo)

    @property
    def interrupts(self) -> bool:
        """Whether rollouts are aborted around a weight sync, to continue from their tokens."""
        return self.segment_wise or self.in_flight == "interrupt"

    def concurrent_groups(self, batch_size: int) -> int:
        """Return max_concurrent_rollouts, or its default.

        Args:
            batch_size: groups trained on under one weight version: groups in a batch * steps between two syncs.
        """
        return (self.max_staleness + 1) * batch_size if self.max_concurrent_rollouts is None else self.max_concurrent_rollouts

    def queue_groups(self, batch_size: int) -> int:
        """Return queue_size, or its default. batch_size: as in concurrent_groups."""
        return (self.max_staleness + 1) * batch_size if self.queue_size is None else self.queue_size


def check_async_config(asynchronous: AsyncConfig, rollout: RolloutConfig, training: RLTrainingConfig | None = None) -> None:
    """Raise ConfigError if the settings of asynchronous rollouts contradict those of batches or of training.

    Args:
        rollout: settings of batches.
        training: settings of the loop; None = not yet known.
    """
    if asynchronous.queue_size is not None and asynchronous.queue_size < rollout.batch_size:
        raise ConfigError(
            f"AsyncConfig.queue_size is {asynchronous.queue_size}, but a batch has {rollout.batch_size} groups: increase queue_size to at "
            f"least {rollout.batch_size}, or leave it out"
        )
    if rollout.over_sampling_factor != 1.0:
        raise ConfigError(
            f"RolloutConfig.over_sampling_factor is {rollout.over_sampling_factor:g}, but asynchronous rollouts are not generated batch by "
            "batch: leave it at 1.0, and raise AsyncConfig.max_staleness or max_concurrent_rollouts to have more groups under way"
        )
    reads_segments = training is not None and training.algorithm is not None and "segment_log_probs" in training.algorithm.requires
    if training is not None and asynchronous.segment_wise != reads_segments:
        found, advice = (
            ("does not read segment_log_probs", "wrap it in decoupled(..., segment_wise=True), or set enable_segment_wise_ppo=False")
            if asynchronous.segment_wise
            else ("requires segment_log_probs", "set enable_segment_wise_ppo=True, or segment_wise=False in the algorithm")
        )
        switch = f"AsyncConfig.enable_segment_wise_ppo is {asynchronous.segment_wise}"
        raise ConfigError(f"{switch}, but the algorithm {found}: {advice}")
