"""Checkpoints of a reinforcement-learning run: what they hold besides the policy, and the restoring of all parts from one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollouts.backends.protocol import CheckpointingBackend, TrainingBackend
from rollouts.config import RLTrainingConfig
from rollouts.engines.protocol import InferenceEngine, WeightChannel
from rollouts.errors import CheckpointError, RolloutsError
from rollouts.training.requirements import check_weight_channel
from rollouts.training.rl_parts import RestorableRolloutSource
from rollouts.training.saving.checkpoints import RUN_STATE_FILE
from rollouts.training.saving.run_checkpoints import require_checkpointing, stage_backend
from rollouts.training.saving.run_state import read_run_state
from rollouts.training.weight_sync import ServedWeights, restore_served_weights, write_served_weights
from rollouts.types import KLControl

CRITIC_DIRECTORY = "critic"
"""Directory of the critic in a checkpoint."""


async def stage_beside_policy(
    directory: Path, *, served: ServedWeights | None, version: int, critic: CheckpointingBackend | None
) -> Callable[[], None]:
    """Take the state of an RL checkpoint besides the policy's; return the function that writes it."""
    write_critic: Callable[[], None] | None = None
    if critic is not None:
        (directory / CRITIC_DIRECTORY).mkdir()
        write_critic = await stage_backend(critic, directory / CRITIC_DIRECTORY)

    def write() -> None:
        write_served_weights(directory, served=served, version=version)
        if write_critic is not None:
            write_critic()

    return write


@dataclass(frozen=True)
class ResumePoint:
    """Point from which an interrupted run continues."""

    step: int  # finished steps
    metrics: Mapping[str, float] | None = None  # metrics of that step, whose line is written again; None = its line was written
    served: ServedWeights | None = None  # weights of the engines, if older than the backend's
    kl_control: KLControl | None = None  # KL controller after that step, if the run has one
    best: Mapping[str, Any] | None = None  # state of the keeper of the best checkpoint before the evaluation of that step, if there is one


async def restore_rl_run(
    checkpoint: Path | str,
    backend: TrainingBackend,
    rollout_manager: RestorableRolloutSource,
    inference_engines: Sequence[InferenceEngine],
    config: RLTrainingConfig,
    *,
    critic: TrainingBackend | None = None,
    weight_channel: WeightChannel | None = None,
) -> ResumePoint:
    """Restore backend, critic, manager (with its data position) and engines from a checkpoint of run_rl_training.

    Raises: CheckpointError if the checkpoint is damaged, of another stage or of another architecture, or if it has a critic and none is
        given, or the reverse.
    """
    checkpoint = Path(checkpoint)
    state = read_run_state(checkpoint)
    if state.stage != "rl" or state.rollouts is None:
        raise CheckpointError(f"{checkpoint} is a checkpoint of stage {state.stage!r}, expected 'rl': resume it with its own stage")
    critic_directory = checkpoint / CRITIC_DIRECTORY
    if critic_directory.is_dir() != (critic is not None):
        found, needed = (
            ("no critic", "leave out critic=") if critic is not None else ("a critic", "pass critic= as in the run that wrote it")
        )
        raise CheckpointError(f"{checkpoint} holds {found}: {needed}, or start a new run")
    await require_checkpointing(backend).load_checkpoint(checkpoint).result()
    if critic is not None:
        await require_checkpointing(critic).load_checkpoint(critic_directory).result()
    with _explain_state(checkpoint):
        rollout_manager.load_state_dict(state.rollouts)
    served = await restore_served_weights(
        backend,
        inference_engines,
        checkpoint,
        in_memory=config.weight_sync == "memory",
        channel=check_weight_channel(config, weight_channel),
    )
    kl_coef = state.kl_coef
    kl_control = config.kl_control if config.kl_control is None or kl_coef is None else replace(config.kl_control, kl_coef=kl_coef)
    return ResumePoint(step=state.step, metrics=state.metrics, served=served, kl_control=kl_control, best=state.best)


@contextmanager
def _explain_state(checkpoint: Path) -> Generator[None]:
    """Raise what a source says of a state with a missing or mistyped value as a CheckpointError with the file's name."""
    try:
        yield
    except RolloutsError as error:
        error.add_note(f"in the key 'rollouts' of {checkpoint / RUN_STATE_FILE}")
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"the key 'rollouts' of {checkpoint / RUN_STATE_FILE} is no state of this source of rollouts: "
            f"{type(error).__name__}: {error}. Restore the checkpoint from a copy, or move its directory away, so that --resume takes the "
            "one before it"
        ) from error
