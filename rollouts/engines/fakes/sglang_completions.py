"""The OpenAI-like routes of the fake SGLang."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollouts.engines.fakes import openai_payloads as openai
from rollouts.engines.fakes.scheduler import Sequence_
from rollouts.engines.fakes.server import Answer, Request, json_response
from rollouts.engines.fakes.sglang_payloads import error_object, parse_generate, read_json, refuse
from rollouts.engines.fakes.vllm_payloads import Refused, Tokenizer

RunAll = Callable[[Mapping[str, Any], Sequence[Sequence_]], Awaitable[None]]


class SGLangCompletions:
    """/v1/completions and /v1/chat/completions; no streams."""

    def __init__(self, run: RunAll, tokenizer: Tokenizer | None) -> None:
        """run: (body of /generate, sequences) -> when all of them are generated. Raises Refused."""
        self._run = run
        self._tokenizer = tokenizer

    async def complete(self, request: Request) -> Answer:
        """POST /v1/completions."""
        body = read_json(request, ["prompt"])
        tokenizer = self._require_tokenizer()
        prompts = openai.parse_prompts(body["prompt"], tokenizer)
        count = body.get("logprobs")
        sequences = await self._generate(request, body, prompts, body.get("max_tokens") or 16, count or 0)
        choices = [
            {
                "index": i,
                "text": openai.decode_output(sequence, tokenizer),
                "logprobs": self._describe_log_probs(sequence, count, tokenizer),
                "finish_reason": sequence.finish,
                "matched_stop": sequence.matched,
            }
            for i, sequence in enumerate(sequences)
        ]
        return json_response(_describe("text_completion", body, choices, prompts, sequences))

    async def chat(self, request: Request) -> Answer:
        """POST /v1/chat/completions."""
        body = read_json(request, ["messages"])
        tokenizer: Any = self._require_tokenizer()
        if getattr(tokenizer, "chat_template", None) is None:
            text = (
                "Cannot use chat template functions because tokenizer.chat_template is not set and no template argument was passed! For "
                "information about writing templates and setting the tokenizer.chat_template attribute, please see the documentation at "
                "https://huggingface.co/docs/transformers/main/en/chat_templating"
            )
            raise Refused(error_object(400, text, "BadRequest"))
        encoded = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=True, return_dict=True)
        prompts: list[tuple[int, ...]] = [tuple(encoded["input_ids"])]
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        sequences = await self._generate(request, body, prompts, max_tokens, 0)
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": openai.decode_output(sequence, tokenizer), "reasoning_content": None},
                "logprobs": None,
                "finish_reason": sequence.finish,
                "matched_stop": sequence.matched,
            }
            for i, sequence in enumerate(sequences)
        ]
        return json_response(_describe("chat.completion", body, choices, prompts, sequences))

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise refuse("The OpenAI-compatible routes need a tokenizer, and the engine was initialized with skip_tokenizer_init=True.")
        return self._tokenizer

    async def _generate(
        self, request: Request, body: Mapping[str, Any], prompts: Sequence[tuple[int, ...]], max_tokens: int | None, num_top: int
    ) -> list[Sequence_]:
        names = ("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "ignore_eos")
        options = {name: body[name] for name in names if body.get(name) is not None}
        options |= {"sampling_seed": body.get("seed"), "max_new_tokens": max_tokens}
        generation = parse_generate(
            {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": options, "top_logprobs_num": num_top},
            request,
            self._tokenizer,
        )
        sequences = [Sequence_(*parts) for parts in zip(generation.rids, generation.prompts, generation.samplings, strict=True)]
        await self._run(body, sequences)
        return sequences

    def _describe_log_probs(self, sequence: Sequence_, count: int | None, tokenizer: Tokenizer) -> dict[str, Any] | None:
        found = openai.describe_log_probs(sequence.draws, count, tokenizer)
        return found and {**found, "text_offset": [-1] * len(sequence.draws)}


def _describe(
    kind: str, body: Mapping[str, Any], choices: list[dict[str, Any]], prompts: Sequence[tuple[int, ...]], sequences: Sequence[Sequence_]
) -> dict[str, Any]:
    spans = sequences[0].spans()
    return {
        "id": uuid.uuid4().hex,
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model"),
        "choices": choices,
        "usage": _describe_usage(prompts, sequences),
        "metadata": {"weight_version": spans[-1]["version"] if spans else None, "weight_versions": spans},
    }


def _describe_usage(prompts: Sequence[tuple[int, ...]], sequences: Sequence[Sequence_]) -> dict[str, Any]:
    num_prompt, num_output = sum(map(len, prompts)), sum(len(sequence.draws) for sequence in sequences)
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }
