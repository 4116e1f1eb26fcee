"""Weights exported for an engine in its dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.jax.backend import create_jax_backend
from rollouts.backends.lora.config import LoRAConfig
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.errors import ConfigError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.rl_loop import train_rl
from rollouts.testing import FakeEngine, create_tiny_model, script_answer
from rollouts.training.rl_parts import RLParts
from rollouts.types import SamplingParams

BACKENDS = {
    "pytorch": create_pytorch_backend,
    "lora": lambda model, lr: create_pytorch_backend(model, lr=lr, lora=LoRAConfig(rank=2)),
    "torch_func": create_torch_func_backend,
    "jax": create_jax_backend,
    "fsdp": create_fsdp_backend,
}


def read(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("kind", BACKENDS)
async def test_an_export_has_the_rounded_weights_under_the_same_names(tmp_path, kind):
    backend = BACKENDS[kind](create_tiny_model(), lr=1e-3)
    for name, dtype in (("whole", None), ("same", "float32"), ("half", "bfloat16")):
        (tmp_path / name).mkdir()
        await backend.export_weights(tmp_path / name, dtype=dtype).result()
    whole, same, half = (read(tmp_path / name) for name in ("whole", "same", "half"))
    assert whole.keys() == same.keys() == half.keys()
    assert all(torch.equal(same[name], value) for name, value in whole.items())
    assert all(half[name].dtype == torch.bfloat16 and torch.equal(half[name], value.bfloat16()) for name, value in whole.items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    assert all(torch.equal(value, half[name]) for name, value in model.state_dict().items() if name in half)
    assert all(value.dtype == torch.float32 for value in (await backend.get_weights().result()).values())


async def test_a_run_exports_in_the_dtype_and_checkpoints_keep_the_trainers(tmp_path):
    async def reward(sample):
        return float(sample.index % 2)

    engine, buffer = FakeEngine(script_answer((5, 6))), DataBuffer(["a", "b"])
    generate = create_generate_fn([engine], create_char_tokenizer(), SamplingParams(max_tokens=4, seed=0))
    rollout = RolloutConfig(batch_size=2, n_samples_per_prompt=2, generate_fn=generate, reward_fn=reward)
    backend = create_pytorch_backend(create_tiny_model(), lr=1e-3)
    parts = RLParts(backend=backend, data_buffer=buffer, engines=[engine], checkpoint_dir=tmp_path)
    config = RLTrainingConfig(num_steps=2, checkpoint_every=2, weight_sync="checkpoint", export_dtype="bfloat16")
    dtypes = []
    original = engine.update_weights_from_checkpoint

    async def update(path):
        dtypes.append({value.dtype for value in read(path).values()})
        return await original(path)

    engine.update_weights_from_checkpoint = update
    await train_rl(parts, AsyncRolloutManager(buffer, rollout), config)
    assert dtypes == [{torch.bfloat16}, {torch.float32}]  # an export, and the checkpoint of the last step in its place
    with pytest.raises(ConfigError, match="export_dtype is 'int8', expected float32, bfloat16, float16 or None"):
        replace(config, export_dtype="int8")
