"""VLLMEngine against vLLM servers that were started in another way, each for one test."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from samples import draw_batch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from rollouts.algorithms.logprobs import gather_log_probs
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.collate import collate_samples
from rollouts.engines.http.endpoint import HTTPEndpoint
from rollouts.engines.launch.commands import ServerConfig
from rollouts.engines.launch.servers import launch_server
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.vllm.protocol import explain_missing_routes
from rollouts.errors import EngineError
from rollouts.models.forward.attention import ATTENTION_NAME
from rollouts.models.prepare import probe_attention
from rollouts.testing import create_tiny_model
from rollouts.types import Sample, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent))
from endless_models import create_endless_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(700)]

PROMPT = (5, 6, 7, 8)


def create_config(path: Path, model: Any = None, **changes) -> ServerConfig:
    """Settings of a server of a model, by default a tiny one, on a CPU."""
    (model or create_tiny_model(hidden_size=64, head_dim=32)).save_pretrained(path)
    create_char_tokenizer().save_pretrained(path)
    settings = {"device": "cpu", "dtype": "float32", "context_length": 512, "max_num_seqs": 16, "env": {"OMP_NUM_THREADS": "1"}}
    return ServerConfig("vllm", str(path), os.environ["VLLM_PYTHON"], **{**settings, **changes})


async def test_raw_log_probs_are_recorded_as_such_and_a_death_fails_what_is_pending(tmp_path: Path):
    model = create_endless_model(51, hidden_size=64, head_dim=32)
    extra_args = ("--logprobs-mode", "raw_logprobs", "--enable-chunked-prefill")
    config = create_config(tmp_path / "model", model, skip_tokenizer_init=True, extra_args=extra_args)
    with pytest.raises(EngineError, match="the vllm server"):
        async with launch_server(config, tmp_path / "log", environment=os.environ, startup_s=570) as server:
            with pytest.warns(UserWarning, match="processed_logprobs"):
                async with VLLMEngine(server.url) as engine:
                    assert (await engine.describe_server()).log_prob_kind == "untempered"
                    params = SamplingParams(max_tokens=50, temperature=0.5, seed=3, untempered_log_probs=True)
                    with pytest.warns(UserWarning, match="gets no seeds"):
                        completion = await engine.generate(PROMPT, params)
                    with pytest.raises(EngineError, match="runs without a tokenizer"):
                        await engine.generate(PROMPT, SamplingParams(stop=("x",)))
                    failures: list[EngineError] = []

                    async def one() -> None:
                        try:
                            await engine.generate_group(PROMPT, SamplingParams(max_tokens=450), 8)
                        except EngineError as error:
                            failures.append(error)

                    with trio.fail_after(60):
                        async with trio.open_nursery() as nursery:
                            for _ in range(8):
                                nursery.start_soon(one)
                            await trio.sleep(0.1)
                            os.killpg(server.pid, signal.SIGKILL)
                    assert len(failures) == 8
                    with trio.fail_after(60), pytest.raises(EngineError, match=r"could not be given the weights"):
                        await engine.update_weights_from_checkpoint(tmp_path / "model")
                    with pytest.raises(EngineError, match="cannot be used"):
                        await engine.generate(PROMPT, SamplingParams())
            await trio.sleep(120)  # until the launcher has noticed
    assert (completion.log_prob_kind, completion.temperature) == ("untempered", 1.0)
    assert completion.finish_reason == ("stop" if completion.output_tokens[-1] == 1 else "length")
    tokens = torch.tensor([PROMPT + completion.output_tokens])
    with torch.no_grad():
        expected = gather_log_probs(model(tokens).logits[0, 3:-1], tokens[0, 4:])
    torch.testing.assert_close(torch.tensor(completion.output_log_probs), expected, atol=1e-4, rtol=0)
    assert completion.untempered_log_probs == completion.output_log_probs


async def test_a_server_without_its_switches_is_refused_with_their_names(tmp_path: Path):
    config = create_config(
        tmp_path / "model", extra_args=("--no-enable-scale-out",), env={"OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "0"}
    )
    async with launch_server(config, tmp_path / "log", environment=os.environ, startup_s=570) as server:
        with pytest.raises(EngineError, match="--enable-scale-out"):
            async with VLLMEngine(server.url):
                pass
        async with HTTPEndpoint(server.url) as raw:
            with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"), explain_missing_routes("the server"):
                await raw.get_json("/server_info")


async def test_a_model_trained_beyond_its_window_is_served_with_the_trainers_log_probs(tmp_path: Path):
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64, "max_position_embeddings": 512, "sliding_window_pattern": 2}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(Gemma3TextConfig(**sizes, pad_token_id=0, bos_token_id=None, eos_token_id=1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:  # so that a token at the other end of the window counts
                parameter.mul_(3)
    backend = create_pytorch_backend(model, lr=1e-3)
    assert probe_attention(model) == 64
    model.set_attn_implementation(ATTENTION_NAME)
    for seed in range(5):
        backend.forward_backward(draw_batch(seed, (200, 77, 180), vocab_size=96), sft_loss)
        backend.optim_step()
    backend.export_weights(tmp_path / "trained")
    config = create_config(tmp_path / "trained", model)
    async with launch_server(config, tmp_path / "log", environment=os.environ, startup_s=570) as server, VLLMEngine(server.url) as engine:
        for length in (5, 40, 200):
            prompt = draw_batch(length, (length,), vocab_size=96).tokens[0].tolist()
            completion = await engine.generate(tuple(prompt), SamplingParams(max_tokens=90, seed=length))
            mask = (0.0,) * length + (1.0,) * len(completion.output_tokens)
            sample = Sample(tokens=(*prompt, *completion.output_tokens), loss_mask=mask, index=0)
            found = backend.forward(collate_samples([sample]), lambda outputs: outputs.log_probs).value[0, length:]
            torch.testing.assert_close(torch.tensor(completion.output_log_probs), found, atol=1e-4, rtol=0)
