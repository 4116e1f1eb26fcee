"""Weights that reach engines through a channel, a bucket at a time: from a backend, from a directory, in the loop."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from samples import draw_batch
from test_rl_loop import make_run, read_without_timings, run

from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.futures import open_pipeline
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.config import RLTrainingConfig
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import BadNumberError, CheckpointError, ConfigError, EngineError
from rollouts.rl_loop import run_rl_training
from rollouts.testing import FakeEngine, create_tiny_model
from rollouts.testing.backends import FakeWeightChannel
from rollouts.training.metrics import JSONLLogger
from rollouts.training.saving.rl_checkpoints import restore_rl_run
from rollouts.training.saving.run_state import read_run_state
from rollouts.training.weight_streams import stream_directory
from rollouts.training.weight_sync import Exports, hold_weights, publish_weights, restore_served_weights, write_served_weights
from rollouts.types import Sample
from rollouts.weight_specs import plan_weights

CHANNEL = RLTrainingConfig(num_steps=4, weight_sync="channel")


def make_backend(seed: int = 0) -> PyTorchTrainingBackend:
    model = create_tiny_model(seed=seed)
    return PyTorchTrainingBackend(model, torch.optim.AdamW(model.parameters()))


async def test_the_loop_sends_its_weights_through_the_channel():
    parts = make_run()
    channel = FakeWeightChannel([parts[3]])
    history = await run(parts, replace(CHANNEL, sync_every=2), weight_channel=channel)
    assert [m["weight_version"] for m in history] == [0, 0, 1, 1]
    assert channel.buckets == [("num_updates",)] * 2
    assert float(parts[3].weights["num_updates"]) == 4
    assert await parts[3].get_weight_version() == 2


async def test_a_channel_and_the_setting_belong_together():
    parts = make_run()
    with pytest.raises(ConfigError, match="no weight_channel was given"):
        await run(parts, CHANNEL)
    with pytest.raises(ConfigError, match="leave it out"):
        await run(parts, replace(CHANNEL, weight_sync="memory"), weight_channel=FakeWeightChannel([parts[3]]))
    with pytest.raises(ConfigError, match="open it with the run's engines"):
        await run(parts, CHANNEL, weight_channel=FakeWeightChannel([]))


async def test_a_run_through_a_channel_is_resumed_with_the_numbers_of_the_uninterrupted_one(tmp_path: Path):
    straight_log, log = tmp_path / "straight.jsonl", tmp_path / "resumed.jsonl"
    parts = make_run()
    await run(parts, CHANNEL, JSONLLogger(straight_log), checkpoint_dir=tmp_path / "a", weight_channel=FakeWeightChannel([parts[3]]))
    asked = iter([False, True])
    parts = make_run()
    channel = FakeWeightChannel([parts[3]])
    await run(parts, CHANNEL, JSONLLogger(log), checkpoint_dir=tmp_path / "b", weight_channel=channel, should_stop=lambda: next(asked))
    checkpoint = tmp_path / "b" / "step_0002"
    with log.open("r+b") as file:
        file.truncate(read_run_state(checkpoint).metrics_bytes)
    backend, buffer, manager, engine = make_run()
    channel = FakeWeightChannel([engine])
    point = await restore_rl_run(checkpoint, backend, manager, [engine], CHANNEL, weight_channel=channel)
    assert (await engine.get_weight_version(), channel.buckets) == (2, [("num_updates",)])
    async with manager:
        options = {"resume": point, "weight_channel": channel, "checkpoint_dir": tmp_path / "b", "clock": lambda: 0.0}
        await run_rl_training(backend, buffer, manager, [engine], CHANNEL, JSONLLogger(log), **options)
    assert read_without_timings(log) == read_without_timings(straight_log)


async def test_weights_are_read_in_buckets_and_kept_on_the_disk_where_a_checkpoint_needs_them_later(tmp_path: Path):
    backend, engine = make_backend(), FakeEngine()
    whole = await backend.get_weights().result()
    channel = FakeWeightChannel([engine], bucket_bytes=10_000)
    async with open_pipeline(backend) as pipeline:
        publish = partial(publish_weights, pipeline, [engine], exports=Exports(tmp_path), channel=channel, keep_snapshot=True)
        served = await publish(version=1)
        assert len(channel.buckets) > 5
        assert all(tensor.equal(whole[name]) for name, tensor in engine.weights.items())
        assert (served.version, served.directory) == (1, tmp_path / "weights_v000001")
        checkpoint = tmp_path / "step_0001"
        checkpoint.mkdir()
        write_served_weights(checkpoint, served=served, version=1)
        await pipeline.load_weights({name: tensor + 1 for name, tensor in whole.items()}).result()
        restored = await restore_served_weights(pipeline, [engine], checkpoint, in_memory=False, channel=channel)
        assert all(tensor.equal(whole[name]) for name, tensor in engine.weights.items()), "those that were served, not the newest"
        assert restored.directory == checkpoint / "served_weights"
        assert (await publish(version=2, keep_snapshot=False)).directory is None
        assert engine.weights["model.norm.weight"].equal(whole["model.norm.weight"] + 1)
    assert (await hold_weights(backend, version=3, exports=Exports(tmp_path))).directory is not None


@pytest.mark.parametrize("wants_device", [True, False])
async def test_tensors_stay_on_the_device_where_the_channel_wants_them_there(wants_device: bool):
    class Noting(PyTorchTrainingBackend):
        kept = frozenset[bool]()

        def gather_weights(self, names, *, keep_device=False):
            self.kept |= {keep_device}
            return super().gather_weights(names, keep_device=keep_device)

    model, engine = create_tiny_model(), FakeEngine()
    backend, channel = Noting(model, torch.optim.AdamW(model.parameters())), FakeWeightChannel([engine])
    channel.wants_device = wants_device
    await publish_weights(backend, [engine], version=1, exports=None, channel=channel)
    assert backend.kept == {wants_device}


async def test_a_bucket_that_is_refused_ends_the_sync_with_an_error_and_the_old_version(tmp_path: Path):
    backend, engine = make_backend(), FakeEngine()
    channel = FakeWeightChannel([engine], bucket_bytes=10_000, fails_at=2)
    with pytest.raises(EngineError, match="bucket 2 was refused"):
        await publish_weights(backend, [engine], version=1, exports=None, channel=channel)
    assert (await engine.get_weight_version(), engine.weights) == (0, None)


async def test_a_directory_of_several_files_is_read_a_bucket_at_a_time(tmp_path: Path):
    model = create_tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    specs, read = await stream_directory(tmp_path)
    own = model.state_dict()
    for bucket in plan_weights(specs, 10_000).buckets:
        came = await read(bucket)
        assert all(came[name].equal(own[name]) for name in bucket.names)
    assert {spec.name for spec in specs} == set(own) - {"lm_head.weight"}
    next(iter(sorted(tmp_path.glob("model-*.safetensors")))).write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        await stream_directory(tmp_path)
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        await stream_directory(tmp_path / "empty")


@pytest.mark.parametrize("kind", ["pytorch", "torch_func", "lora"])
async def test_lent_weights_are_those_that_are_trained_and_adapters_are_merged_into_copies(kind: str):
    create = create_torch_func_backend if kind == "torch_func" else create_pytorch_backend
    backend = create(create_tiny_model(), lr=1e-2, **({"lora": LoRAConfig(rank=2)} if kind == "lora" else {}))
    await backend.forward_backward(draw_batch(0, (5, 9)), sft_loss).result()
    await backend.optim_step().result()
    copies = await backend.get_weights().result()
    async with open_pipeline(backend) as pipeline:
        lent = await pipeline.view_weights().result()
    assert [*lent] == [*copies] and all(torch.equal(value, copies[name]) for name, value in lent.items())
    trained = {parameter.data_ptr() for parameter in backend.model.parameters()}
    assert lent["model.norm.weight"].data_ptr() in trained
    assert (lent["model.layers.0.mlp.up_proj.weight"].data_ptr() in trained) == (kind != "lora")


async def test_weights_that_the_last_update_found_finite_are_read_again_only_if_they_were_written_to():
    backend = create_pytorch_backend(create_tiny_model(), lr=1e-2)
    norm = backend.model.model.norm.weight
    engine = InProcessEngine(create_tiny_model(), eos_token_ids=())

    async def publish(version: int) -> None:
        await publish_weights(backend, [engine], version=version, exports=None)

    async with engine:
        with torch.no_grad():
            norm[0] = math.nan
        with pytest.raises(EngineError, match=r"model\.norm\.weight"):
            await publish(1)  # no update has looked at them
        with torch.no_grad():
            norm.fill_(1.0)
        await backend.forward_backward(draw_batch(0, (5, 9)), sft_loss).result()
        await backend.optim_step().result()
        await publish(1)
        with torch.no_grad():
            norm[0] = math.inf
        before = await engine.recompute_output_log_probs((5, 6, 7), 1)
        with pytest.raises(EngineError, match=r"model\.norm\.weight"):
            await publish(2)
        assert await engine.recompute_output_log_probs((5, 6, 7), 1) == before
        with torch.no_grad():
            norm[0] = 1.0
        await backend.forward_backward(draw_batch(1, (5, 9)), sft_loss).result()
        await backend.optim_step().result()
        norm.data[0] = math.nan  # a write that torch does not count shows that nothing is read a second time
        await publish(2)
        assert all(map(math.isnan, await engine.recompute_output_log_probs((5, 6, 7), 1)))


async def test_weights_that_an_update_has_broken_are_refused_though_torch_does_not_count_its_writes():
    model = create_tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    backend = PyTorchTrainingBackend(model, optimizer)
    engine = InProcessEngine(create_tiny_model(), eos_token_ids=())
    async with engine:
        await backend.forward_backward(draw_batch(0, (5, 9)), sft_loss).result()
        await backend.optim_step().result()
        await publish_weights(backend, [engine], version=1, exports=None)
        optimizer.param_groups[0]["lr"] = math.inf
        await backend.forward_backward(draw_batch(1, (5, 9)), sft_loss).result()
        with pytest.raises(BadNumberError, match="NaN or infinite"):
            backend.optim_step()
        with pytest.raises(EngineError, match="NaN weight"):
            await publish_weights(backend, [engine], version=2, exports=None)


async def test_an_engine_of_this_process_copies_lent_weights_and_one_that_keeps_them_gets_copies():
    backend = make_backend()
    model = copy.deepcopy(backend.model)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    kept, lent = FakeEngine(), []

    class Lending(PyTorchTrainingBackend):
        def view_weights(self):
            lent.append(1)
            return super().view_weights()

    backend = Lending(backend.model, backend.optimizer)
    async with InProcessEngine(model, eos_token_ids=()) as engine:
        await publish_weights(backend, [engine], version=1, exports=None)
        assert len(lent) == 1
        expected = await engine.recompute_output_log_probs((5, 6, 7), 1)
        rows = collate_samples([Sample(prompt="", tokens=(5, 6, 7), loss_mask=(0.0, 1.0, 1.0), response="", rollout_log_probs=(0.0,) * 3)])
        found = await backend.forward(rows, lambda outputs: outputs.log_probs).result()
        assert expected == pytest.approx(found[0, 1:].tolist(), abs=1e-5)
        with torch.no_grad():
            backend.model.model.norm.weight.zero_()  # as an update in place would
        assert await engine.recompute_output_log_probs((5, 6, 7), 1) == expected
        await publish_weights(backend, [kept], version=1, exports=None)
        await publish_weights(backend, [engine, kept], version=2, exports=None)
        served = await publish_weights(backend, [engine], version=3, exports=None, keep_snapshot=True)
        assert len(lent) == 1
        with torch.no_grad():
            backend.model.model.norm.weight.fill_(3.0)
        assert not kept.weights["model.norm.weight"].any() and not served.snapshot["model.norm.weight"].any()
