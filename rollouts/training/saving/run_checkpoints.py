"""Checkpoints of a run: when one is due, and RunCheckpoints, which writes them beside the training that follows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio

from rollouts.backends.protocol import (
    BackendFeature,
    CheckpointingBackend,
    TrainingBackend,
    get_backend_features,
    require_backend_feature,
)
from rollouts.errors import BackendError, CheckpointError, raise_single_errors
from rollouts.training.saving.checkpoints import list_checkpoints, run_shielded, stage_checkpoint
from rollouts.training.saving.run_state import RunState
from rollouts.training.steps import is_due


def is_checkpoint_due(step: int, every: int, num_steps: int, metrics: Mapping[str, float], *, stopping: bool) -> bool:
    """Whether a checkpoint is written after `step` finished steps: after the last, and if it is due and the weights have changed.

    If all updates of a step were skipped, the previous checkpoint has the same weights. None is written then, so that a run that ends
    after many skipped updates continues from before the first.

    Args:
        metrics: metrics of the last of these steps.
        stopping: whether the run ends here.
    """
    has_changed = metrics.get("update_skipped", 0.0) < 1.0
    return stopping or step == num_steps or (has_changed and is_due(step, every, num_steps))


def require_checkpointing(backend: TrainingBackend) -> CheckpointingBackend:
    """Return the backend as a CheckpointingBackend. Raises ConfigError if it is none, before anything is trained."""
    advice = "Add its methods to the backend, or pass checkpoint_dir=None."
    return require_backend_feature(backend, BackendFeature.CHECKPOINTS, "checkpoint_dir", instead=advice)


async def stage_backend(backend: CheckpointingBackend, directory: Path) -> Callable[[], None]:
    """Take the state of a backend; return the function that writes it into an existing directory, to be called once, in any thread.

    A backend without BackendFeature.STAGED_CHECKPOINTS has written everything before this returns.
    """
    if BackendFeature.STAGED_CHECKPOINTS in get_backend_features(backend):
        staging = require_backend_feature(backend, BackendFeature.STAGED_CHECKPOINTS, "a checkpoint beside training")
        return await staging.stage_checkpoint(directory).result()
    await backend.save_checkpoint(directory).result()
    return lambda: None


class RunCheckpoints:
    """Checkpoints of a run, of which one at a time is written beside the training that follows it. Made by open_checkpoints."""

    def __init__(self, backend: TrainingBackend, directory: Path, keep_last_n: int, nursery: trio.Nursery) -> None:
        self._backend, self._directory, self._keep_last_n, self._nursery = require_checkpointing(backend), directory, keep_last_n, nursery
        self._ended = trio.Event()
        self._ended.set()
        self._error: Exception | None = None
        self._path: Path | None = None

    async def save(
        self,
        state: RunState,
        metrics: Mapping[str, float],
        *,
        protected: Collection[Path] = (),
        stage_more: Callable[[Path], Awaitable[Callable[[], None]]] | None = None,
    ) -> None:
        """Take the state for an exact continuation, and begin to write it to step_NNNN. Waits for the previous checkpoint.

        Args:
            state: state of the run after the last finished step; what it holds is read now.
            metrics: metrics of that step. If one of its updates was skipped, which may be the first of many, no checkpoint
                is deleted.
            protected: further checkpoints to keep.
            stage_more: takes the state of further files; as stage_backend.

        Raises: CheckpointError of this checkpoint or the previous one; older checkpoints are untouched then.
        """
        await self.wait()
        step = state.step

        async def stage(directory: Path) -> Callable[[], None]:
            write = await stage_backend(self._backend, directory)
            write_more = None if stage_more is None else await stage_more(directory)

            def write_all() -> None:
                write()
                if write_more is not None:
                    write_more()

            return write_all

        with _note_directory(step, self._directory):
            complete = await stage_checkpoint(
                self._directory,
                step,
                stage=stage,
                run_state=state.to_dict(),
                keep_last_n=self._keep_last_n,
                protected=(*protected, *_protect_while_skipping(self._directory, metrics)),
            )
        self._ended = trio.Event()
        self._nursery.start_soon(self._write, step, complete)

    async def wait(self) -> Path | None:
        """Wait until the last checkpoint is complete; return its path, None before the first. Raises its error, once."""
        await self._ended.wait()
        self.check()
        return self._path

    async def list_complete(self) -> list[Path]:
        """Wait for the checkpoint that is being written, also if canceled, and list the complete ones, the oldest first."""
        with trio.CancelScope(shield=True):
            await self._ended.wait()
        return list_checkpoints(self._directory)

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def set_error(self, error: Exception) -> None:
        """Keep the error of a write for the next check() or wait()."""
        self._error = error

    async def _write(self, step: int, complete: Callable[[], Path]) -> None:
        try:
            with _note_directory(step, self._directory):
                self._path = await run_shielded(complete)  # begun, it is completed whatever ends the run
        except Exception as error:  # it is raised where the run looks, so that the step under way ends first
            self.set_error(error)
        finally:
            self._ended.set()


@asynccontextmanager
async def open_checkpoints(
    backend: TrainingBackend, directory: Path | str | None, keep_last_n: int
) -> AsyncGenerator[RunCheckpoints | None]:
    """Write the checkpoints of a run beside its training; the end of the block waits for the last one, however the block ends.

    Yields: None without a directory.
    Raises: ConfigError for a backend that cannot save; at the end of the block, also of a canceled one, the error of the last checkpoint.
        It is a note on the error that ended the block, if one did.
    """
    if directory is None:
        yield None
        return
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            checkpoints = RunCheckpoints(backend, Path(directory), keep_last_n, nursery)
            try:
                yield checkpoints
            except BaseException as ended:
                try:
                    with trio.CancelScope(shield=True):
                        await checkpoints.wait()
                except Exception as error:
                    if is_cancelled(ended):  # trio drops it, and would drop its notes
                        raise error from ended
                    ended.add_note(f"beside it, a checkpoint could not be written: {error}")
                raise
            await checkpoints.wait()


def is_cancelled(ended: BaseException) -> bool:
    """Whether a block was only cancelled; nurseries in it raise groups."""
    if isinstance(ended, BaseExceptionGroup):
        return all(map(is_cancelled, ended.exceptions))
    return isinstance(ended, trio.Cancelled)


def _protect_while_skipping(checkpoint_dir: Path, metrics: Mapping[str, float]) -> tuple[Path, ...]:
    skipped = any(value > 0 for name, value in metrics.items() if name.rpartition("/")[2] == "update_skipped")
    return tuple(list_checkpoints(checkpoint_dir)) if skipped else ()


@asynccontextmanager
async def note_checkpoint(step: int, checkpoints: RunCheckpoints | None) -> AsyncGenerator[None]:
    """Note on a training failure in the block its step, counted from 1, and the checkpoint from which the run can continue.

    The checkpoint that is being written counts, so it is waited for.
    """
    try:
        yield
    except (BackendError, CheckpointError) as error:
        if isinstance(error, BackendError):
            error.step = step
        found = [] if checkpoints is None else await checkpoints.list_complete()
        error.add_note(_advise_where_to_go_on(step, found))
        raise


@contextmanager
def _note_directory(step: int, directory: Path) -> Generator[None]:
    """Note on a failure to write a checkpoint the step and the checkpoint from which the run can continue."""
    try:
        yield
    except (BackendError, CheckpointError) as error:
        error.add_note(_advise_where_to_go_on(step, list_checkpoints(directory)))
        raise


def _advise_where_to_go_on(step: int, checkpoints: Sequence[Path]) -> str:
    if not checkpoints:
        return f"in step {step}; there is no checkpoint before it"
    before = f"; if it fails there, too, move that directory away, and {checkpoints[-2].name} is next" if checkpoints[1:] else ""
    return (
        f"in step {step}; the last checkpoint, of finite weights, is {checkpoints[-1]}: --resume goes on from there{before}. With other "
        "settings, such as a lower learning rate, begin from its weights: --model.path"
    )
