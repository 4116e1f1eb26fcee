"""The generation routes of the fake vLLM."""

from __future__ import annotations

import base64
import io
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollouts.testing.servers.http import Answer, EventStream, Request, dump_json, json_response
from rollouts.testing.servers.models import Sampling
from rollouts.testing.servers.options import ChooseExperts
from rollouts.testing.servers.payloads import Refused, Tokenizer
from rollouts.testing.servers.scheduler import Sequence_, follow, run_streams
from rollouts.testing.servers.vllm import payloads
from rollouts.testing.servers.vllm.engine import EngineDead, VLLMEngineCore
from rollouts.testing.servers.vllm.payloads import Limits, error_response, read_json

Send = Callable[[str], Awaitable[None]]


class VLLMGeneration:
    """Route /inference/v1/generate, and the parts shared with other generation routes."""

    def __init__(self, core: VLLMEngineCore, limits: Limits, tokenizer: Tokenizer | None) -> None:
        self.num_in_flight = 0
        self._core, self._limits, self._tokenizer = core, limits, tokenizer
        self._max_queued, self._with_details = limits.settings.max_num_queued_reqs, limits.settings.prompt_tokens_details

    async def generate(self, request: Request) -> Answer:
        """POST /inference/v1/generate."""
        body = read_json(request)
        prompt, sampling, n = payloads.parse_generate(body, self._limits)
        options = body["sampling_params"]
        style = _Style(
            options.get("logprobs"),
            body.get("output_mode") or "tokens",
            self._tokenizer,
            self._core.model.eos_token_ids,
            self._limits.settings.choose_experts,
        )
        prompt_count = options.get("prompt_logprobs")
        rid = f"generate-tokens-{body.get('request_id') or random_id()}"
        sequences = self.create_sequences([rid], [prompt], sampling, n, body, reads_cache=prompt_count is None)
        if body.get("stream"):
            return EventStream(lambda send: self._stream(sequences, body, style, send))
        await self.run(sequences)
        usage = self.describe_usage(sequences)
        choices = [style.describe(i, sequence) for i, sequence in enumerate(sequences)]
        answer = payloads.describe_generation(rid, self._limits.settings.model_name, choices, usage, style.mode)
        if prompt_count is not None:
            answer["prompt_logprobs"] = self.score(prompt, prompt_count)
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = list(prompt)
        return json_response(answer)

    def score(self, prompt: tuple[int, ...], count: int) -> list[dict[str, Any] | None]:
        """Return log-probs of a prompt at temperature 1."""
        self._core.check_weights()
        return payloads.describe_prompt(self._core.model.score(prompt, count), count, self._tokenizer)

    def create_sequences(
        self,
        rids: Sequence[str],
        prompts: Sequence[tuple[int, ...]],
        sampling: Sampling,
        n: int,
        body: Mapping[str, Any],
        *,
        reads_cache: bool,
    ) -> list[Sequence_]:
        """Create n samples of each prompt. Raises Refused if the queue is full."""
        if self._max_queued is not None and self.num_in_flight + n * len(prompts) > self._max_queued:
            text = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
            raise Refused(error_response(503, text, "Service Unavailable"))
        salt = str(body.get("cache_salt") or "")
        # each sample of a seeded request has its own seed, the same in every repetition
        seeds = [None if sampling.seed is None else sampling.seed + 1_000_003 * j for j in range(n)]
        return [
            Sequence_(rid, prompt, replace(sampling, seed=seed), salt, None if reads_cache else 0)
            for rid, prompt in zip(rids, prompts, strict=True)
            for seed in seeds
        ]

    async def run(self, sequences: Sequence[Sequence_]) -> None:
        """Generate all sequences."""
        self.num_in_flight += len(sequences)
        try:
            await self._core.scheduler.run_all(sequences)
        finally:
            self.num_in_flight -= len(sequences)

    async def _stream(self, sequences: Sequence[Sequence_], body: Mapping[str, Any], style: _Style, send: Send) -> None:
        rid = sequences[0].rid

        async def stream_one(index: int, sequence: Sequence_) -> None:
            async for part, is_last in follow(sequence):
                choice = style.describe(index, part)
                if not is_last:
                    choice.update(finish_reason=None, stop_reason=None, weight_versions=None)
                await send(dump_json({"request_id": rid, "usage": None, "output_mode": style.mode, "choices": [choice]}))

        def describe_end() -> dict[str, Any]:
            return {"request_id": rid, "usage": self.describe_stream_usage(sequences), "output_mode": style.mode, "choices": []}

        await self.stream(sequences, body, stream_one, describe_end, send)

    async def stream(
        self,
        sequences: Sequence[Sequence_],
        body: Mapping[str, Any],
        stream_one: Callable[[int, Sequence_], Awaitable[None]],
        describe_end: Callable[[], Mapping[str, Any]],
        send: Send,
    ) -> None:
        """Generate all sequences while they are streamed, and end the stream: the usage if the body asks for it, or the engine's death."""
        try:
            await run_streams(self.run, sequences, stream_one)
        except EngineDead as error:
            await send(dump_json({"error": {"message": str(error), "type": "InternalServerError", "param": None, "code": 500}}))
        else:
            if (body.get("stream_options") or {}).get("include_usage"):
                await send(dump_json(describe_end()))
        await send("[DONE]")

    def describe_usage(self, sequences: Sequence[Sequence_]) -> dict[str, Any]:
        """Return the usage of the samples of one prompt."""
        return payloads.describe_usage(sequences, self._with_details)

    def describe_stream_usage(self, sequences: Sequence[Sequence_]) -> dict[str, Any]:
        """Return the usage for the end of a stream."""
        usage = self.describe_usage(sequences)
        del usage["completion_tokens_details"]
        return {**usage, "prompt_tokens_details": {"cached_tokens": sequences[0].num_cached} if self._with_details else None}


class _Style:
    """Options of a request for the description of its choices."""

    def __init__(
        self,
        count: int | None,
        mode: str,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        choose_experts: ChooseExperts | None,
    ) -> None:
        self.mode = mode
        self._choose_experts = choose_experts
        self._count, self._tokenizer, self._eos_token_ids = count, tokenizer, eos_token_ids

    def describe(self, index: int, sequence: Sequence_) -> dict[str, Any]:
        choice = payloads.describe_choice(
            index, sequence, self._count, self._tokenizer, is_text=self.mode == "text", eos_token_ids=self._eos_token_ids
        )
        if self._choose_experts is not None and sequence.tokens:
            file = io.BytesIO()
            np.save(file, self._choose_experts((*sequence.prompt, *sequence.tokens))[:-1])
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return choice


def random_id() -> str:
    """Return an id for a request without one."""
    return uuid.uuid4().hex[:16]
