"""A real vLLM reads the adapter of a checkpoint, and computes with it what the trainer does."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import create_config, save_tiny_model

from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.lora.config import LoRAConfig
from rollouts.data.collate import collate_samples
from rollouts.engines.http.endpoint import HTTPEndpoint
from rollouts.engines.launch.servers import launch_server
from rollouts.engines.vllm.protocol import GENERATE, parse_prompt_log_probs, prompt_log_probs_payload
from rollouts.types import Sample

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(700)]

TOKENS = tuple(range(5, 25))


async def test_a_served_adapter_gives_the_log_probs_of_the_trainer(tmp_path: Path):
    base = save_tiny_model(tmp_path / "base")
    backend = create_pytorch_backend(base, lr=3e-2, lora=LoRAConfig(rank=8))
    batch = collate_samples([Sample(tokens=TOKENS, loss_mask=(0.0,) + (1.0,) * (len(TOKENS) - 1))])
    batch = replace(batch, loss_weights=token_mean(batch))
    for _ in range(10):
        backend.forward_backward(batch, sft_loss)
        backend.optim_step()
    backend.save_checkpoint(tmp_path)
    adapter = json.dumps({"name": "policy", "path": str(tmp_path / "adapter")})
    config = create_config("vllm", base, extra_args=("--enable-lora", "--max-lora-rank", "8", "--lora-modules", adapter))
    async with launch_server(config, tmp_path / "log", environment=os.environ, startup_s=570) as server, HTTPEndpoint(server.url) as http:

        async def ask(**extra: str) -> torch.Tensor:
            found = parse_prompt_log_probs(await http.post_json(GENERATE, prompt_log_probs_payload(TOKENS, "one") | extra), TOKENS, 1)
            assert found is not None
            return torch.tensor(found)

        trained = backend.forward(batch, lambda outputs: outputs.log_probs).value[0, 1:]
        begun = backend.forward_base(batch, lambda outputs: outputs.log_probs).value[0, 1:]
        assert (trained - begun).abs().max() > 0.3
        torch.testing.assert_close(await ask(model="policy"), trained, atol=1e-4, rtol=0)
        torch.testing.assert_close(await ask(), begun, atol=1e-4, rtol=0)
