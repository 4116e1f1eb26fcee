"""Checkpoints beside training: the state of their step, whole or not at all, waited for, and their errors raised."""

from __future__ import annotations

import errno
import random
import threading
import time
from pathlib import Path

import pytest
import trio
from forked import Child
from samples import make_row

from rollouts.backends.futures import ImmediateTrainFuture
from rollouts.backends.protocol import BackendFeature
from rollouts.config import SFTTrainingConfig
from rollouts.errors import BackendError, CheckpointError, ConfigError
from rollouts.sft_loop import run_sft_training
from rollouts.testing import FakeBackend
from rollouts.training.saving.run_checkpoints import note_checkpoint, open_checkpoints
from rollouts.training.saving.run_state import RunState, read_run_state

PATIENCE_S = 60
ROWS = [make_row((3, 4 + index, 5)) for index in range(4)]


class StagingBackend(FakeBackend):
    """Copies its only number; what writes it can be made to wait, or to fail."""

    features = FakeBackend.features | {BackendFeature.STAGED_CHECKPOINTS}

    def __init__(self, *, waits_for_update: int | None = None, errors: dict[int, Exception] | None = None) -> None:
        super().__init__()
        self.errors = {} if errors is None else errors
        self.waits_for, self.reached = waits_for_update, threading.Event()
        self.written: list[int] = []

    def optim_step(self):
        future = super().optim_step()
        if self.num_updates == self.waits_for:
            self.reached.set()
        return future

    def stage_checkpoint(self, directory: Path):
        copied = self.num_updates

        def write() -> None:
            if self.waits_for is not None and copied < self.waits_for:
                assert self.reached.wait(PATIENCE_S), f"update {self.waits_for} waits for the checkpoint of update {copied}"
            if copied in self.errors:
                (directory / "a part").write_text("of a file")
                raise self.errors[copied]
            (directory / "copied").write_text(str(copied))
            self.written.append(copied)

        return ImmediateTrainFuture(write, "stage_checkpoint")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


async def train(backend, directory: Path, *, num_steps: int = 3, every: int = 1, **others):
    config = SFTTrainingConfig(num_steps=num_steps, batch_size=2, checkpoint_every=every)
    return await run_sft_training(backend, ROWS, config, checkpoint_dir=directory, **others)


async def test_the_next_update_does_not_wait_and_the_checkpoint_has_the_state_of_its_own_step(tmp_path: Path):
    backend = StagingBackend(waits_for_update=2)
    await train(backend, tmp_path)
    assert names(tmp_path) == ["step_0002", "step_0003"]
    assert backend.written == [1, 2, 3]
    assert [(tmp_path / name / "copied").read_text() for name in names(tmp_path)] == ["2", "3"]
    assert read_run_state(tmp_path / "step_0002").step == 2


async def test_run_state_and_metrics_are_those_of_the_moment_in_which_a_checkpoint_is_taken(tmp_path: Path):
    backend, rollouts = StagingBackend(waits_for_update=1), {"position": [1]}
    async with open_checkpoints(backend, tmp_path, 2) as checkpoints:
        assert checkpoints is not None
        await checkpoints.save(RunState(stage="rl", step=1, metrics={}, rollouts=rollouts), {})
        rollouts["position"].append(2)
        backend.num_updates = 7
        backend.reached.set()
        path = await checkpoints.wait()
    assert path == tmp_path / "step_0001"
    assert read_run_state(path) == RunState(stage="rl", step=1, metrics={}, rollouts={"position": [1]})
    assert (path / "copied").read_text() == "0"


async def test_a_full_disk_ends_the_run_before_the_step_after_next_with_the_message_of_an_awaited_write(tmp_path: Path):
    backend = StagingBackend(waits_for_update=2, errors={1: full_disk()})
    with pytest.raises(
        CheckpointError, match=r"the disk is full: a checkpoint in .* bytes free. Older checkpoints are as they were"
    ) as raised:
        await train(backend, tmp_path, num_steps=1000, every=1)
    assert "in step 1; there is no checkpoint before it" in raised.value.__notes__
    assert names(tmp_path) == []
    assert backend.num_updates == 2


async def test_a_failed_write_is_noticed_long_before_the_next_checkpoint(tmp_path: Path):
    backend = StagingBackend(errors={1: full_disk()})
    slow = StepsThatTakeTime(backend)
    with pytest.raises(CheckpointError, match="the disk is full"):  # of the first step; the next checkpoint is the last step's
        await train(slow, tmp_path, num_steps=4000, every=2000, start_step=1999)
    assert backend.num_updates <= 2000


class StepsThatTakeTime:
    """Lets other tasks and threads run in each update."""

    def __init__(self, backend) -> None:
        self._backend = backend
        self.features = backend.features

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def optim_step(self):
        time.sleep(0.001)
        return self._backend.optim_step()


async def test_the_error_of_the_last_checkpoint_is_raised_by_the_run(tmp_path: Path):
    with pytest.raises(CheckpointError, match="the disk is full"):
        await train(StagingBackend(errors={3: full_disk()}), tmp_path)
    assert names(tmp_path) == ["step_0001", "step_0002"]


async def test_an_error_of_training_waits_for_the_checkpoint_and_keeps_its_error_as_a_note(tmp_path: Path):
    def make(errors) -> StagingBackend:
        backend = StagingBackend(waits_for_update=2, errors=errors)

        def fail_second_update(method: str, earlier: int) -> Exception | None:
            if (method, earlier) != ("optim_step", 1):
                return None
            backend.reached.set()  # only now the first checkpoint is written
            return BackendError("boom")

        backend._error_for = fail_second_update
        return backend

    backend = make({})
    with pytest.raises(BackendError, match="boom"):
        await train(backend, tmp_path / "written")
    assert names(tmp_path / "written") == ["step_0001"]
    with pytest.raises(BackendError, match="boom") as raised:
        await train(make({1: full_disk()}), tmp_path / "full")
    assert any(note.startswith("beside it, a checkpoint could not be written: the disk is full") for note in raised.value.__notes__)


async def test_a_cancelled_run_completes_the_checkpoint_that_it_has_begun(tmp_path: Path):
    backend = StagingBackend(waits_for_update=1)
    with trio.move_on_after(PATIENCE_S) as scope:
        async with open_checkpoints(backend, tmp_path, 2) as checkpoints:
            assert checkpoints is not None
            await checkpoints.save(RunState(stage="sft", step=1), {})
            scope.cancel()
            threading.Timer(0.05, backend.reached.set).start()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert names(tmp_path) == ["step_0001"]
    assert backend.written == [0]


@pytest.mark.parametrize("is_nested", [False, True])
async def test_a_cancelled_run_tells_that_its_checkpoint_could_not_be_written(is_nested: bool, tmp_path: Path):
    backend = StagingBackend(waits_for_update=1, errors={0: full_disk()})
    with pytest.raises(CheckpointError, match="the disk is full"), trio.move_on_after(PATIENCE_S) as scope:
        async with open_checkpoints(backend, tmp_path, 2) as checkpoints:
            assert checkpoints is not None
            await checkpoints.save(RunState(stage="sft", step=1), {})
            scope.cancel()
            threading.Timer(0.05, backend.reached.set).start()
            if is_nested:  # its nursery raises a group, as that of an asynchronous run
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()


async def test_the_advice_of_a_failure_counts_the_checkpoint_that_is_being_written(tmp_path: Path):
    backend = StagingBackend(waits_for_update=1)
    with pytest.raises(BackendError, match="boom") as raised:
        async with open_checkpoints(backend, tmp_path, 2) as checkpoints:
            assert checkpoints is not None
            await checkpoints.save(RunState(stage="sft", step=1), {})
            threading.Timer(0.2, backend.reached.set).start()
            async with note_checkpoint(2, checkpoints):
                raise BackendError("boom")
    assert [note.partition(": --resume")[0] for note in raised.value.__notes__] == [
        f"in step 2; the last checkpoint, of finite weights, is {tmp_path / 'step_0001'}"
    ]


async def test_a_backend_that_cannot_save_is_refused_before_the_first_step(tmp_path: Path):
    backend = FakeBackend()
    backend.features = frozenset()
    with pytest.raises(ConfigError, match="lacks the feature checkpoints"):
        await train(backend, tmp_path)
    assert backend.num_updates == 0


KILLED = """
import sys, time, trio
from pathlib import Path
from rollouts.backends.futures import ImmediateTrainFuture
from rollouts.backends.protocol import BackendFeature
from rollouts.testing import FakeBackend
from rollouts.training.saving.checkpoints import latest_checkpoint
from rollouts.training.saving.run_state import RunState
from rollouts.training.saving.run_checkpoints import open_checkpoints

class Backend(FakeBackend):
    features = FakeBackend.features | {BackendFeature.STAGED_CHECKPOINTS}
    def stage_checkpoint(self, directory):
        step = self.num_updates
        def write():
            for k in range(3):
                (directory / f"part_{k}").write_bytes(step.to_bytes(8, "big") * 25000)
        return ImmediateTrainFuture(write, "stage_checkpoint")

async def main(directory):
    newest = latest_checkpoint(directory)
    backend = Backend()
    backend.num_updates = 0 if newest is None else int(newest.name.removeprefix("step_"))
    print(backend.num_updates)
    async with open_checkpoints(backend, directory, 1) as checkpoints:
        while True:
            backend.num_updates += 1
            step = backend.num_updates
            await checkpoints.save(RunState(stage="sft", step=step), {})
            print(step - 1)  # complete: this one has waited for it
            backend.num_updates += 1  # training goes on while it is written
            await trio.sleep(0.005)
            backend.num_updates -= 1

trio.run(main, Path(sys.argv[1]))
"""


def test_kill_at_any_moment_of_a_write_never_loses_a_checkpoint_that_the_run_has_waited_for(tmp_path: Path):
    rng = random.Random(0)
    directory, seen = tmp_path / "checkpoints", 0
    for life in range(6):
        with Child(KILLED, directory, folder=tmp_path / f"life_{life}") as child:
            assert int(child.wait_for_lines(1)[0]) >= seen
            child.wait_for_lines(rng.randrange(3, 6))
            time.sleep(0.01 * rng.random())
            child.kill()
            seen = max(seen, *map(int, child.out.splitlines()))
        found = [path for path in directory.iterdir() if path.name.startswith("step_")]
        newest = max(found, key=lambda path: int(path.name.removeprefix("step_")))
        step = int(newest.name.removeprefix("step_"))
        assert seen <= step <= seen + 1
        assert read_run_state(newest).step == step
        assert (newest / "part_2").read_bytes() == step.to_bytes(8, "big") * 25000
        seen = step
