"""A program of the openai client is trained through a gateway over vLLM, and nothing is trained on but what the server has said.

VLLM_PYTHON=path/to/venv/bin/python pytest -m vllm tests/real_servers/test_vllm_agents.py
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import needs
import pytest
import torch
from conftest import HeldServer
from ledgers import list_trained

from rollouts.algorithms.logprobs import gather_log_probs
from rollouts.algorithms.presets import grpo
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.futures import open_pipeline
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import ParityConfig, RLTrainingConfig, RolloutConfig
from rollouts.data.collate import collate_samples
from rollouts.data.prompts import DataBuffer
from rollouts.engines.protocol import WEIGHT_VERSION_FILE
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.gateway import AgentTask, GatewayConfig, create_agent_generate_fn
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.rl_loop import run_rl_training
from rollouts.types import RolloutBatch, Sample, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent))
from endless_models import create_endless_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(700)]

TOLERANCE = 1e-4  # nats, float32
NUM_STEPS, NUM_PROMPTS, N, NUM_ANSWERS = 3, 2, 4, 4
SIZES = {"hidden_size": 64, "head_dim": 32}
TOOLS: Any = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {"e": {"type": "string"}}}}}]


class Wire(httpx.AsyncHTTPTransport):
    """The way to a server, which notes each prompt that the server was sent, and the tokens and log-probs that it answered."""

    def __init__(self) -> None:
        super().__init__()
        self.said: Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = Counter()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if request.method == "POST" and request.url.path.endswith("/generate"):
            body = await response.aread()
            response = httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(body))
            asked, found = json.loads(await request.aread()), json.loads(body)
            (choice,) = found["choices"]
            if choice["logprobs"] is not None:  # the others only score tokens
                log_probs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
                self.said[tuple(asked["token_ids"]), tuple(choice["token_ids"]), log_probs] += 1
        return response


async def play(task: AgentTask) -> float:
    """Have three turns, of which the second one offers tools; then the history is edited, and the last question asked again."""
    import openai

    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=120) as http:
        client = openai.AsyncOpenAI(base_url=task.openai_base_url, api_key=task.api_key, http_client=http, max_retries=0)

        async def ask(messages: list[Any]) -> Any:
            return (await client.chat.completions.create(model="any", messages=messages, tools=TOOLS, temperature=0)).choices[0].message

        messages: list[Any] = [{"role": "user", "content": task.prompt.content}]
        for question in ("and then?", "why?"):
            messages += [await ask(messages), {"role": "user", "content": question}]
        answer = await ask(messages)
        edited: list[Any] = [*messages[:2], {"role": "user", "content": "in other words?"}]
        again = await ask(edited)
        return float(sum(map(ord, f"{answer.content}{again.content}")) % 3)


def compute_log_probs(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> torch.Tensor:
    """Compute the log-probs of tokens behind a prompt by the model's own forward pass."""
    whole = torch.tensor([prompt + tokens])
    with torch.no_grad():
        return gather_log_probs(model(whole).logits[0, len(prompt) - 1 : -1] / temperature, whole[0, len(prompt) :])


@needs.OPENAI
async def test_a_program_is_trained_on_what_the_server_has_said(vllm_server: HeldServer, tmp_path: Path):
    wire, tokenizer = Wire(), create_char_tokenizer()
    model, shadow = create_endless_model(51, **SIZES), create_endless_model(51, **SIZES)
    model.save_pretrained(tmp_path / "initial")
    (tmp_path / "initial" / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": 0}))
    backend = create_pytorch_backend(model, lr=2e-3)
    trained: Counter[Any] = Counter()
    largest = {"server and trainer": 0.0, "server and model": 0.0, "server and the weights before": 0.0}
    weights: list[dict[str, torch.Tensor]] = []

    def compare(sample: Sample, version: int) -> None:
        assert sample.rollout_log_probs is not None
        found = backend.forward(collate_samples([sample]), lambda outputs: outputs.log_probs).value[0]
        mask, recorded = torch.tensor(sample.loss_mask) > 0, torch.tensor(sample.rollout_log_probs)
        largest["server and trainer"] = max(largest["server and trainer"], float((found - recorded)[mask].abs().max()))
        for prompt, tokens, log_probs, versions in list_trained(sample):
            assert set(versions) == {version}
            for name, at in (("server and model", version), ("server and the weights before", version - 1)):
                if at >= 0:
                    shadow.load_state_dict(weights[at], strict=False)
                    own = compute_log_probs(shadow, prompt, tokens, sample.temperature)
                    largest[name] = max(largest[name], float((own - torch.tensor(log_probs)).abs().max()))
            trained[prompt, tokens, log_probs] += 1

    async with VLLMEngine(vllm_server.url, transport=wire) as engine:
        await engine.update_weights_from_checkpoint(tmp_path / "initial")
        params, gateway = SamplingParams(max_tokens=12, temperature=0.9), GatewayConfig(chat=False)
        generate = create_agent_generate_fn(play, [engine], tokenizer, params, gateway=gateway)
        rollout = RolloutConfig(batch_size=NUM_PROMPTS, n_samples_per_prompt=N, generate_fn=generate)
        training = RLTrainingConfig(
            num_steps=NUM_STEPS, algorithm=grpo(), parity=ParityConfig(threshold=TOLERANCE, action="stop"), probe_tolerance=1e-3
        )
        buffer = DataBuffer([f"{i} {i + 1} >" for i in range(NUM_PROMPTS)])
        async with open_pipeline(backend) as pipeline, AsyncRolloutManager(buffer, rollout, engines=[engine]) as manager:

            async def note(step: int, batch: RolloutBatch) -> None:  # before the update of this step
                found = await pipeline.get_weights().result()
                weights.append({name: value.detach().clone() for name, value in found.items()})
                assert len(batch.samples) == NUM_PROMPTS * N
                for sample in batch.samples:
                    assert len(sample.turns or ()) == NUM_ANSWERS
                    assert len(sample.context_starts) == 1  # the edited history is a context of its own
                    compare(sample, len(weights) - 1)

            history = await run_rl_training(
                pipeline, buffer, manager, [engine], training, checkpoint_dir=tmp_path / "run", on_rollouts=note
            )
        assert await engine.get_weight_version() == NUM_STEPS
    assert len(history) == len(weights) == NUM_STEPS
    assert trained == wire.said, "a token was trained on that the server has not said, or lost"
    assert largest["server and trainer"] < TOLERANCE, largest
    assert largest["server and model"] < TOLERANCE, largest
    assert largest["server and the weights before"] > 100 * TOLERANCE, largest
    assert max(line["engine_diff_max"] for line in history) < TOLERANCE
    print(largest)
