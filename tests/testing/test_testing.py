"""The fakes keep the promises of the protocols they stand in for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from samples import draw_batch

from rollouts.backends.protocol import BackendFeature, TrainingBackend, get_backend_features
from rollouts.engines.protocol import WEIGHT_VERSION_FILE, EngineFeature, InferenceEngine, get_engine_features
from rollouts.errors import CheckpointError, EngineError
from rollouts.testing import FakeBackend, FakeEngine, create_tiny_model, random_answer, script_answer
from rollouts.testing.engines import Call
from rollouts.types import Completion, LossOutput, SamplingParams, TokenOutputs, TrainBatch


def mean_negative_log_prob(outputs: TokenOutputs, batch: TrainBatch) -> LossOutput:
    loss = -(outputs.log_probs * batch.loss_mask).sum()
    return LossOutput(loss, {"nll": loss / batch.loss_mask.sum()})


async def test_answer_ends_by_itself_or_is_cut() -> None:
    engine = FakeEngine(script_answer([5, 6, 1]))
    whole = await engine.generate((2, 3), SamplingParams(max_tokens=3))
    cut = await engine.generate((2, 3), SamplingParams(max_tokens=2))
    assert (whole.output_tokens, whole.finish_reason, whole.input_tokens) == ((5, 6, 1), "stop", (2, 3))
    assert (cut.output_tokens, cut.finish_reason) == ((5, 6), "length")
    assert whole.request_id != cut.request_id


async def test_a_hundred_requests_take_as_long_as_one(autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(script_answer([1]), seconds_per_token=0.05)
    async with trio.open_nursery() as nursery:
        for k in range(100):
            nursery.start_soon(engine.generate, (k,), SamplingParams())
    assert trio.current_time() == pytest.approx(0.05)
    assert len(engine.calls) == 100
    assert engine.pending_requests == ()


async def test_abort_returns_the_tokens_so_far_of_the_named_requests(autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(script_answer([5, 6, 7, 8]), seconds_per_token=1.0)
    done: dict[str, Completion] = {}

    async def ask(name: str) -> None:
        done[name] = await engine.generate((3,), SamplingParams(), request_id=name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "a")
        nursery.start_soon(ask, "b")
        await trio.sleep(2.5)
        assert engine.pending_requests == ("a", "b")
        await engine.abort(["a"])
    assert (done["a"].output_tokens, done["a"].finish_reason) == ((5, 6), "abort")
    assert (done["b"].output_tokens, done["b"].finish_reason) == ((5, 6, 7, 8), "stop")


async def test_tokens_carry_the_version_of_their_moment(autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(script_answer([5, 6, 7, 8]), seconds_per_token=1.0, weight_version=3)
    done: list[Completion] = []

    async def ask() -> None:
        done.append(await engine.generate((3,), SamplingParams()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(2.5)
        await engine.update_weights({"w": torch.ones(1)}, 9)
    assert done[0].output_versions == (3, 3, 9, 9)
    assert engine.weights is not None
    assert engine.weights["w"].item() == 1.0


async def test_random_answers_depend_on_prompt_and_seed_alone() -> None:
    answer = random_answer(vocab_size=16, mean_length=4)
    assert answer((1, 2), 7) == answer((1, 2), 7)
    assert len({tuple(answer((1, 2), seed)) for seed in range(50)}) > 25
    assert len({tuple(answer((prompt,), 7)) for prompt in range(50)}) > 25
    for seed in range(50):
        tokens = answer((1, 2), seed)
        assert tokens[-1] == 1
        assert 1 <= len(tokens) <= 7
        assert all(3 <= token < 16 for token in tokens[:-1])


async def test_a_scripted_failure_reaches_the_caller_and_leaves_nothing_pending(autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(seconds_per_token=1.0, error_for=lambda prompt, seed: ValueError("boom") if prompt == (4,) else None)
    await engine.generate((3,), SamplingParams())
    with pytest.raises(ValueError, match="boom"):
        await engine.generate((4,), SamplingParams())
    assert engine.pending_requests == ()


async def test_a_cancelled_request_is_dropped(autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(script_answer([5] * 10), seconds_per_token=1.0)
    with trio.move_on_after(2.5):
        await engine.generate((3,), SamplingParams())
    assert engine.pending_requests == ()


async def test_engine_takes_the_version_of_the_directory(tmp_path: Path) -> None:
    engine = FakeEngine(weight_version=4)
    assert (await engine.update_weights_from_checkpoint(tmp_path))["weight_version"] == 5
    (tmp_path / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": 11}))
    assert await engine.update_weights_from_checkpoint(tmp_path) == {"success": True, "weight_version": 11}
    assert await engine.get_weight_version() == 11
    with pytest.raises(EngineError, match="not a directory"):
        await engine.update_weights_from_checkpoint(tmp_path / "absent")
    assert await engine.get_weight_version() == 11


async def test_a_failing_update_keeps_the_old_weights(tmp_path: Path) -> None:
    engine = FakeEngine(weight_version=4, update_error=EngineError("out of memory"))
    with pytest.raises(EngineError, match="out of memory"):
        await engine.update_weights({}, 5)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.update_weights_from_checkpoint(tmp_path)
    assert await engine.get_weight_version() == 4


async def test_backend_calls_the_loss_and_its_losses_move() -> None:
    backend = FakeBackend()
    before = await backend.forward_backward(draw_batch(0, (3, 2), vocab_size=8), mean_negative_log_prob).result()
    update = await backend.optim_step().result()
    after = await backend.forward_backward(draw_batch(0, (3, 2), vocab_size=8), mean_negative_log_prob).result()
    assert before == {"loss": 3.0, "num_tokens": 3.0, "nll": 1.0}
    assert after["loss"] == 1.5
    assert update == {"grad_norm": 1.0, "lr": 1e-3}
    assert [call.method for call in backend.calls] == ["forward_backward", "optim_step", "forward_backward"]


async def test_forward_is_zero_at_the_first_token_and_on_pads() -> None:
    log_probs = await FakeBackend().forward(draw_batch(0, (3, 2), vocab_size=8), lambda outputs: outputs.log_probs).result()
    assert log_probs.tolist() == [[0.0, -1.0, -1.0], [0.0, -1.0, 0.0]]


async def test_jobs_take_their_time_one_after_another(autojump_clock: trio.testing.MockClock) -> None:
    backend = FakeBackend(seconds_per_job=2.0)
    first, second = backend.optim_step(), backend.optim_step()
    assert not first.done()
    await first.result()
    assert trio.current_time() == 2.0
    assert first.done()
    assert not second.done()
    await second.result()
    assert trio.current_time() == 4.0


async def test_a_scripted_job_failure_comes_through_its_future() -> None:
    backend = FakeBackend(error_for=lambda method, count: ValueError("boom") if (method, count) == ("optim_step", 1) else None)
    await backend.optim_step().result()
    failing = backend.optim_step()
    with pytest.raises(ValueError, match="boom"):
        await failing.result()
    assert backend.num_updates == 1


async def test_weights_and_checkpoints_round_trip(tmp_path: Path) -> None:
    backend, other, third = FakeBackend(), FakeBackend(), FakeBackend()
    for _ in range(3):
        backend.optim_step()
    await other.load_weights(await backend.get_weights().result()).result()
    await backend.save_checkpoint(tmp_path).result()
    await third.load_checkpoint(tmp_path).result()
    assert (other.num_updates, third.num_updates) == (3, 3)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        await third.load_checkpoint(tmp_path / "absent").result()


async def test_one_list_shows_the_order_of_calls_between_fakes() -> None:
    calls: list[Call] = []
    engine, backend = FakeEngine(calls=calls), FakeBackend(calls=calls)
    await engine.generate((3,), SamplingParams())
    backend.optim_step()
    await engine.abort()
    assert [(call.who, call.method) for call in calls] == [("engine", "generate"), ("backend", "optim_step"), ("engine", "abort")]


def test_fakes_have_the_shape_of_the_protocols() -> None:
    engine: InferenceEngine = FakeEngine()
    backend: TrainingBackend = FakeBackend()
    assert get_engine_features(engine) == {EngineFeature.MEMORY_UPDATES}
    assert get_backend_features(backend) == {BackendFeature.CHECKPOINTS}


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_tiny_model_is_a_function_of_its_seed_and_leaves_the_global_generator(architecture: Any) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    model = create_tiny_model(seed=1, architecture=architecture)
    assert torch.equal(torch.rand(1), expected)
    same, other = create_tiny_model(seed=1, architecture=architecture), create_tiny_model(seed=2, architecture=architecture)
    weights: Mapping[str, torch.Tensor] = model.state_dict()
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in weights.items())
    assert any(not torch.equal(value, other.state_dict()[name]) for name, value in weights.items())
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 5]])).logits
    assert logits.shape == (1, 3, 64)
    assert bool(logits.isfinite().all())
