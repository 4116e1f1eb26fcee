from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import trio

from rollouts.backends.futures import ImmediateTrainFuture, TrainFuture, open_pipeline
from rollouts.backends.protocol import BackendFeature, get_backend_features
from rollouts.errors import BackendError, ConfigError
from rollouts.testing import FakeBackend


class ScriptedBackend:
    """Jobs that are whatever the test says, run in the pipeline's thread."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.job = lambda: None

    def optim_step(self):
        self.order.append("optim_step")
        return ImmediateTrainFuture(self.job(), "optim_step")

    def load_weights(self, weights):
        self.order.append("load_weights")
        return ImmediateTrainFuture(None, "load_weights")

    forward = forward_backward = get_weights = None


async def test_a_future_gives_its_value_before_and_after_it_is_set(autojump_clock):
    future: TrainFuture[int] = TrainFuture("op")
    seen: list[int] = []

    async def wait() -> None:
        seen.append(await future.result())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await trio.sleep(1)
        assert not future.done()
        future.set_result(5)
    assert seen == [5, 5]
    assert await future.result() == 5
    with pytest.raises(AssertionError, match="finished already"):
        future.set_result(6)


async def test_none_is_a_result_and_errors_name_their_operation():
    future: TrainFuture[None] = TrainFuture("load_weights")
    future.set_result(None)
    assert await future.result() is None
    failed: TrainFuture[None] = TrainFuture("optim_step")
    failed.set_error(ValueError("no"))
    with pytest.raises(ValueError, match="no") as caught:
        await failed.result()
    assert "optim_step" in caught.value.__notes__[0]


async def test_an_immediate_future_is_done():
    future = ImmediateTrainFuture(3, "x")
    assert future.done()
    assert await future.result() == 3


async def test_jobs_run_in_order_and_none_travels():
    backend = ScriptedBackend()
    async with open_pipeline(backend) as pipeline:
        futures = [pipeline.optim_step(), pipeline.load_weights({}), pipeline.optim_step()]
        assert await futures[1].result() is None
    assert backend.order == ["optim_step", "load_weights", "optim_step"]
    assert all(f.done() for f in futures)


async def test_the_event_loop_runs_while_a_job_does():
    backend = ScriptedBackend()
    started, may_end = threading.Event(), threading.Event()

    def job() -> str:
        started.set()
        assert may_end.wait(60), "the event loop was blocked by the job"
        return "done"

    backend.job = job
    async with open_pipeline(backend) as pipeline:
        first, second = pipeline.optim_step(), pipeline.optim_step()
        while not started.is_set():
            await trio.sleep(0.001)
        assert not first.done()  # generation could go on here
        may_end.set()
        assert [await first.result(), await second.result()] == ["done", "done"]


async def test_training_overlaps_generation_by_virtual_time(autojump_clock):
    backend = FakeBackend(seconds_per_job=0.05)
    start = trio.current_time()
    future = backend.optim_step()
    await trio.sleep(0.05)  # generation
    await future.result()
    assert trio.current_time() - start == pytest.approx(0.05)


async def test_an_error_reaches_who_awaits_it_and_the_pipeline_goes_on():
    backend = ScriptedBackend()
    backend.job = lambda: 1 / 0
    async with open_pipeline(backend) as pipeline:
        with pytest.raises(ZeroDivisionError) as caught:
            await pipeline.optim_step().result()
        assert any("optim_step" in note for note in caught.value.__notes__)
        backend.job = lambda: 7
        assert await pipeline.optim_step().result() == 7


async def test_an_error_that_nobody_awaited_is_raised_when_the_block_closes():
    backend = ScriptedBackend()
    backend.job = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        async with open_pipeline(backend) as pipeline:
            pipeline.optim_step()
    with pytest.raises(BaseExceptionGroup):
        async with open_pipeline(backend) as pipeline:
            pipeline.optim_step()
            pipeline.optim_step()


async def test_cancelling_a_waiter_leaves_the_backend_usable():
    backend = ScriptedBackend()
    may_end = threading.Event()
    backend.job = lambda: may_end.wait(60)
    async with open_pipeline(backend) as pipeline:
        future = pipeline.optim_step()
        with trio.move_on_after(0.01) as scope:
            await future.result()
        assert scope.cancelled_caught
        may_end.set()
        assert await future.result() is True
        assert await pipeline.optim_step().result() is True


async def test_an_exception_in_the_block_drops_jobs_that_have_not_begun_and_arrives_as_itself():
    backend = ScriptedBackend()
    started, may_end = threading.Event(), threading.Event()

    def job() -> None:
        started.set()
        may_end.wait(60)

    backend.job = job
    futures: list[TrainFuture[object]] = []
    with pytest.raises(KeyError, match="mine"):
        async with open_pipeline(backend) as pipeline:
            futures += [pipeline.optim_step(), pipeline.optim_step()]
            while not started.is_set():
                await trio.sleep(0.001)
            may_end.set()
            raise KeyError("mine")
    assert len(backend.order) == 1
    with pytest.raises(BackendError, match="dropped"):
        await futures[1].result()


async def test_submitting_after_the_block_is_an_assertion():
    async with open_pipeline(ScriptedBackend()) as pipeline:
        pass
    with pytest.raises(AssertionError, match="after the block"):
        pipeline.optim_step()


async def test_a_pipeline_checkpoints_if_its_backend_does(tmp_path: Path):
    async with open_pipeline(FakeBackend()) as pipeline:
        assert BackendFeature.CHECKPOINTS in get_backend_features(pipeline)
        await pipeline.save_checkpoint(tmp_path).result()
        await pipeline.load_checkpoint(tmp_path).result()
    async with open_pipeline(ScriptedBackend()) as bare:
        assert not get_backend_features(bare)
        with pytest.raises(
            ConfigError, match=r"ScriptedBackend lacks the feature checkpoints .*Pipeline\.save_checkpoint needs; it declares none"
        ):
            bare.save_checkpoint(tmp_path)


async def test_the_worker_is_one_thread_at_a_time():
    backend = ScriptedBackend()
    running = threading.Lock()

    def job() -> None:
        assert running.acquire(blocking=False), "two jobs ran at once"
        torch.ones(10).sum()
        running.release()

    backend.job = job
    async with open_pipeline(backend) as pipeline:
        futures = [pipeline.optim_step() for _ in range(50)]
        for future in futures:
            await future.result()
