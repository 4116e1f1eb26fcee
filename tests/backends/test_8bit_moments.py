"""Adam's moments in 8 bits and weights in bfloat16, with torchao's optimizer."""

from __future__ import annotations

import needs
import pytest
import torch
from samples import draw_batch

from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.errors import CheckpointError
from rollouts.testing import create_tiny_model

pytestmark = [pytest.mark.more, pytest.mark.timeout(400), needs.TORCHAO]  # torch.compile takes a minute of an idle core


def create_backend(moments="8bit", dtype=torch.float32, lr=3e-3):
    torch.manual_seed(0)
    model = create_tiny_model(hidden_size=64).to(dtype)
    return create_pytorch_backend(model, lr=lr, weight_decay=0.1, moments=moments, compute_dtype=dtype)


async def train(backend, steps):
    losses = []
    for _ in range(steps):
        losses.append((await backend.forward_backward(draw_batch(0, (30, 20, 40)), sft_loss).result())["loss"])
        await backend.optim_step().result()
    return losses


def state_bytes(backend):
    moments = [x for values in backend.optimizer.state.values() for key, x in values.items() if key != "step"]
    parts = [[getattr(x, name) for name in ("codes", "scale")] if hasattr(x, "codes") else [x] for x in moments]
    return sum(part.numel() * part.element_size() for found in parts for part in found)


async def test_training_is_that_of_float32_moments_within_the_rounding_of_blocks_and_they_take_a_quarter():
    quantized, exact = create_backend(), create_backend("float32")
    found, expected = await train(quantized, 12), await train(exact, 12)
    assert found[0] == expected[0]
    assert found == pytest.approx(expected, rel=0.02)
    assert found != expected
    assert expected[-1] < 0.8 * expected[0]
    sizes = [p.numel() for p in exact.model.parameters()]
    assert state_bytes(exact) == 8 * sum(sizes)
    assert state_bytes(quantized) == sum(2 * (n + 4 * n // 256) if n >= 4096 else 8 * n for n in sizes) < 0.35 * 8 * sum(sizes)
    for (name, a), (_, b) in zip(quantized.model.named_parameters(), exact.model.named_parameters(), strict=True):
        if a.numel() < 4096:  # moments in float32, and Adam's first update does not depend on a gradient's size
            torch.testing.assert_close(a, b, atol=0.01, rtol=0, msg=name)


def test_updates_below_the_last_bit_of_bfloat16_count_on_average():
    backend = create_backend(dtype=torch.bfloat16, lr=1e-4)
    weight = backend.model.model.embed_tokens.weight
    with torch.no_grad():
        weight.fill_(1.0)  # the next smaller number is 2 ** -8 away, 39 times the learning rate
    for _ in range(20):
        for parameter in backend.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        weight.grad = torch.ones_like(weight)
        backend.optimizer.step()
    moved = 1 - weight.float()
    assert moved.mean().item() == pytest.approx(20 * 1e-4, rel=0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, dtype):
    whole, first = create_backend(dtype=dtype), create_backend(dtype=dtype)
    torch.manual_seed(1)
    await train(whole, 3)
    expected = await train(whole, 3)
    torch.manual_seed(1)
    await train(first, 3)
    await first.save_checkpoint(tmp_path).result()
    resumed = create_backend(dtype=dtype)
    await resumed.load_checkpoint(tmp_path).result()
    assert await train(resumed, 3) == expected
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_checkpoint_that_is_written_beside_later_updates_holds_the_moments_of_its_own_step(tmp_path, dtype):
    backend = create_backend(dtype=dtype)
    await train(backend, 2)
    await backend.save_checkpoint(tmp_path / "now").result()
    write = await backend.stage_checkpoint(tmp_path / "staged").result()
    await train(backend, 2)
    write()
    found, expected = (create_backend(dtype=dtype) for _ in range(2))
    for other, name in ((found, "staged"), (expected, "now")):
        await other.load_checkpoint(tmp_path / name).result()
        torch.manual_seed(1)  # of stochastic rounding
        await train(other, 1)
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), expected.model.parameters(), strict=True))


async def test_a_checkpoint_of_other_moments_is_refused_before_anything_is_loaded(tmp_path):
    for name, moments in (("a", "8bit"), ("b", "float32")):
        backend = create_backend(moments)
        await train(backend, 1)
        await backend.save_checkpoint(tmp_path / name).result()
        other = create_backend("float32" if moments == "8bit" else "8bit")
        before = [p.clone() for p in other.model.parameters()]
        with pytest.raises(CheckpointError, match=r"has the state of AdamW\w*, but the optimizer is AdamW\w*: resume with the moments"):
            other.load_checkpoint(tmp_path / name)
        assert all(torch.equal(a, b) for a, b in zip(before, other.model.parameters(), strict=True))


async def test_a_moment_that_is_not_finite_is_never_saved(tmp_path):
    backend = create_backend()
    await train(backend, 1)
    state = backend.optimizer.state[backend.model.model.embed_tokens.weight]
    state["exp_avg"].scale[0] = float("nan")
    with pytest.raises(CheckpointError, match=r"exp_avg\.scale is not finite"):
        backend.save_checkpoint(tmp_path)
