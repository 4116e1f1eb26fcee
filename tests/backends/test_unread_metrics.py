"""Metrics of a step are read from the device once, together with the norm of its gradient, and are the numbers that they were."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from samples import draw_batch
from torch.utils._python_dispatch import TorchDispatchMode

from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.futures import open_pipeline
from rollouts.batches import select_rows
from rollouts.testing import create_tiny_model
from rollouts.training.steps import submit_optimizer_step
from rollouts.types import LossOutput


class ReadFloats(TorchDispatchMode):
    """Counts numbers that are read from floating-point tensors one by one, as float() and item() do."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def count_lists(monkeypatch: pytest.MonkeyPatch) -> Generator[list[int]]:
    """Yield the sizes of the floating-point tensors that are read as lists in the block."""
    found: list[int] = []
    read = torch.Tensor.tolist

    def tolist(tensor: Any) -> Any:
        found.extend([tensor.numel()] * (tensor.dtype == torch.float64))
        return read(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", tolist)
        yield found


def loss_with_metrics(outputs: Any, batch: Any) -> LossOutput:
    loss, metrics = sft_loss(outputs, batch)
    return LossOutput(loss, {**metrics, "mean": outputs.log_probs.mean(), "max_length": batch.lengths.max(), "given": cast("Any", 0.25)})


CREATORS = (create_pytorch_backend, create_fsdp_backend, create_torch_func_backend)


@pytest.mark.parametrize("create", CREATORS)
async def test_a_step_of_several_micro_batches_is_read_once(create: Any, monkeypatch: pytest.MonkeyPatch):
    backend, batch = create(create_tiny_model(), lr=1e-3), draw_batch(0, (9, 4, 9, 12, 7, 11))
    weights = batch.loss_mask / batch.loss_mask.sum()
    with count_lists(monkeypatch) as lists, ReadFloats() as floats:
        pending = submit_optimizer_step(backend, batch, loss_with_metrics, weigh=lambda _: weights, max_tokens_per_microbatch=13)
        assert len(pending.parts) >= 4
        in_updates = floats.count  # of the norm none, of the optimizer's own counters and the check of new parameters some
        metrics = await pending.result()
    numbers = 4  # loss, num_tokens, mean, max_length; and what sft_loss measures
    assert len(lists) == 1
    assert lists[0] >= len(pending.parts) * numbers + 1
    assert lists[0] % len(pending.parts) == 1  # as many numbers of each part, and the norm
    assert floats.count == in_updates
    assert metrics["given"] == pytest.approx(0.25)
    assert metrics["max_length"] == 12.0
    assert metrics["num_tokens"] == float((batch.loss_mask > 0).sum())


@pytest.mark.parametrize("create", CREATORS)
async def test_a_pipeline_reads_a_step_once_although_its_first_calls_are_done_before_the_last(create: Any, monkeypatch: pytest.MonkeyPatch):
    backend, batch = create(create_tiny_model(), lr=1e-3), draw_batch(0, (9, 4, 9, 12, 7, 11))
    weights, done = batch.loss_mask / batch.loss_mask.sum(), threading.Event()

    def wait_for_the_reader(outputs: Any, batch: Any) -> LossOutput:
        done.wait(0.05)  # so that somebody could read the first call's metrics before the second one
        return loss_with_metrics(outputs, batch)

    with count_lists(monkeypatch) as lists:
        async with open_pipeline(backend) as pipeline:
            pending = submit_optimizer_step(pipeline, batch, wait_for_the_reader, weigh=lambda _: weights, max_tokens_per_microbatch=13)
            await pending.result()
    assert len(pending.parts) >= 4
    assert len(lists) == 1


async def test_the_error_of_a_micro_batch_comes_before_that_of_the_update_without_it():
    backend, batch = create_pytorch_backend(create_tiny_model(), lr=1e-3), draw_batch(0, (9, 4, 9, 12))

    def fail(outputs: Any, batch: Any) -> LossOutput:
        raise ZeroDivisionError("of this loss")

    with pytest.raises(ZeroDivisionError, match="of this loss"):
        async with open_pipeline(backend) as pipeline:
            weigh = batch.loss_mask / batch.loss_mask.sum()
            await submit_optimizer_step(pipeline, batch, fail, weigh=lambda _: weigh, max_tokens_per_microbatch=13).result()


@pytest.mark.parametrize("create", CREATORS)
async def test_no_micro_batch_reads_a_number(create: Any, monkeypatch: pytest.MonkeyPatch):
    backend, batch = create(create_tiny_model(), lr=1e-3), draw_batch(0, (9, 4, 9))
    batch = select_rows(batch, [0, 1, 2])
    with count_lists(monkeypatch) as lists, ReadFloats() as floats:
        futures = [backend.forward_backward(batch, lambda outputs, _: LossOutput(outputs.log_probs.sum(), {})) for _ in range(3)]
        assert not lists
        assert floats.count == 0
        first = await futures[0].result()  # a user who asks gets numbers, and those of all others were read with them
        assert lists == [6]
        assert [future.value for future in futures] == [first] * 3
        assert lists == [6]
    assert {name: type(value) for name, value in first.items()} == {"loss": float, "num_tokens": float}


@pytest.mark.parametrize("create", CREATORS)
async def test_the_numbers_are_those_of_reading_each_at_once(create: Any):
    async def run(*, at_once: bool, piped: bool) -> list[Any]:
        backend, found = create(create_tiny_model(), lr=1e-2), []

        async def train(trained: Any) -> None:
            for step in range(3):
                batch = draw_batch(step, (9, 4, 9, 12))
                parts = []
                for rows in ([0, 1], [2, 3]):
                    part = trained.forward_backward(select_rows(batch, rows), loss_of_sum)
                    parts.append(await part.result() if at_once else part)
                update = await trained.optim_step().result()
                found.append([part if at_once else await cast("Any", part).result() for part in parts] + [update])

        if piped:
            async with open_pipeline(backend) as pipeline:
                await train(pipeline)
        else:
            await train(backend)
        return found

    def loss_of_sum(outputs: Any, batch: Any) -> LossOutput:
        return LossOutput((outputs.log_probs * batch.loss_mask).sum() / 30, {"mean": outputs.log_probs.mean()})

    expected = await run(at_once=True, piped=False)
    assert await run(at_once=False, piped=False) == expected
    assert await run(at_once=True, piped=True) == expected
    assert await run(at_once=False, piped=True) == expected


async def test_a_metric_that_is_no_number_is_refused_by_the_call_that_has_it():
    backend, batch = create_pytorch_backend(create_tiny_model(), lr=1e-3), draw_batch(0, (9, 4))
    with pytest.raises(ValueError, match="one element"):
        backend.forward_backward(batch, lambda outputs, batch: LossOutput(outputs.log_probs.sum(), {"rows": batch.rewards}))
    with pytest.raises(ValueError, match="could not convert"):
        backend.forward_backward(batch, lambda outputs, _: LossOutput(outputs.log_probs.sum(), {"name": cast("Any", "a")}))
