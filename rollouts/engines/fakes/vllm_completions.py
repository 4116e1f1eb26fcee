"""The OpenAI-like routes of the fake vLLM."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import trio

from rollouts.engines.fakes import openai_payloads as openai
from rollouts.engines.fakes import vllm_payloads as payloads
from rollouts.engines.fakes.models import Sampling
from rollouts.engines.fakes.scheduler import Sequence_, follow
from rollouts.engines.fakes.server import Answer, EventStream, Request, json_response
from rollouts.engines.fakes.vllm_generation import VLLMGeneration, random_id
from rollouts.engines.fakes.vllm_payloads import FINGERPRINT, Limits, Refused, Tokenizer, error_response, read_json, refuse, refuse_field

_DEFAULT_MAX_TOKENS = 16


class VLLMCompletions:
    """/v1/completions and /v1/chat/completions. Both take what they are not told from the model's generation_config.json."""

    def __init__(
        self, generation: VLLMGeneration, limits: Limits, tokenizer: Tokenizer | None, generation_config: Mapping[str, Any]
    ) -> None:
        self._generation = generation
        self._limits = limits
        self._tokenizer = tokenizer
        self._defaults = dict(generation_config)

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise refuse("Unable to get tokenizer because `skip_tokenizer_init=True`")
        return self._tokenizer

    async def complete(self, request: Request) -> Answer:
        """POST /v1/completions."""
        body = {**self._defaults, **read_json(request)}
        payloads.check_model_name(body.get("model"), self._limits)
        tokenizer = self._require_tokenizer()
        prompts = self._parse_prompts(body, tokenizer)
        sampling, n = self._parse_sampling(body, prompts)
        for prompt in prompts:
            self._check_prompt(prompt)
        rid = f"cmpl-{body.get('request_id') or random_id()}"
        rids = [f"{rid}-{i}" for i in range(len(prompts))]
        sequences = self._generation.create_sequences(rids, prompts, sampling, n, body, reads_cache="prompt_logprobs" not in body)
        if body.get("stream"):
            return EventStream(lambda send: self._stream(rid, sequences, n, body, tokenizer, send))
        await self._generation.run(sequences)
        choices = [self._describe(i, sequence, body, tokenizer) for i, sequence in enumerate(sequences)]
        usages = [self._generation.describe_usage(sequences[i : i + n]) for i in range(0, len(sequences), n)]
        return json_response(openai.describe_completion(rid, self._limits.model_name, choices, openai.add_usage(usages)))

    async def chat(self, request: Request) -> Answer:
        """POST /v1/chat/completions."""
        body = {**self._defaults, **read_json(request)}
        payloads.check_model_name(body.get("model"), self._limits)
        tokenizer: Any = self._require_tokenizer()
        if "messages" not in body:
            raise refuse_field("missing", "body.messages", "Field required", body)
        if getattr(tokenizer, "chat_template", None) is None:
            raise refuse("The model has no chat template.")
        encoded = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=True, return_dict=True)
        prompt: tuple[int, ...] = tuple(encoded["input_ids"])
        payloads.check_prompt(prompt, self._limits)
        options = {**body, "logprobs": None, "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens")}
        sampling, n = payloads.parse_sampling(options, prompt, self._limits, default_max_tokens=self._limits.context_length)
        rid = f"chatcmpl-{body.get('request_id') or random_id()}"
        sequences = self._generation.create_sequences([rid], [prompt], sampling, n, body, reads_cache=True)
        await self._generation.run(sequences)
        usage = self._generation.describe_usage(sequences)
        if usage["prompt_tokens_details"]:
            usage["prompt_tokens_details"]["created_cache_tokens"] = 0
        return json_response(openai.describe_chat(rid, self._limits.model_name, sequences, tokenizer, usage))

    def _parse_prompts(self, body: Mapping[str, Any], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
        prompt = body.get("prompt")
        if prompt is None:
            raise refuse("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt")
        if prompt in ([], ""):
            raise refuse("You must pass at least one prompt")
        for i, token in enumerate(prompt):
            if isinstance(token, int) and token < 0:
                raise refuse_field("greater_than_equal", f"body.prompt.{i}", "Input should be greater than or equal to 0", token)
        return openai.parse_prompts(prompt, tokenizer)

    def _parse_sampling(self, body: Mapping[str, Any], prompts: Sequence[tuple[int, ...]]) -> tuple[Sampling, int]:
        longest = max(prompts, key=len)
        sampling, n = payloads.parse_sampling(body, longest, self._limits, default_max_tokens=_DEFAULT_MAX_TOKENS)
        return sampling, n

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        longest = self._limits.context_length
        if len(prompt) >= longest:
            text = (
                f"This model's maximum context length is {longest} tokens. However, your prompt contains {len(prompt)} input tokens, which "
                "exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={len(prompt)})"
            )
            raise Refused(error_response(400, text, param="input_tokens"))
        payloads.check_prompt(prompt, self._limits)

    def _describe(self, index: int, sequence: Sequence_, body: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
        with_ids, count = bool(body.get("return_token_ids")), body.get("prompt_logprobs")
        as_ids = bool(body.get("return_tokens_as_token_ids"))
        return {
            "index": index,
            "text": openai.decode_output(sequence, tokenizer),
            "logprobs": openai.describe_log_probs(sequence.draws, body.get("logprobs"), tokenizer, as_ids=as_ids),
            "finish_reason": sequence.finish,
            "stop_reason": sequence.matched,
            "token_ids": list(sequence.tokens) if with_ids else None,
            "prompt_logprobs": None if count is None else self._generation.score(sequence.prompt, count),
            "prompt_token_ids": list(sequence.prompt) if with_ids else None,
            "routed_experts": None,
        }

    async def _stream(
        self,
        rid: str,
        sequences: Sequence[Sequence_],
        n: int,
        body: Mapping[str, Any],
        tokenizer: Tokenizer,
        send: Callable[[str], Awaitable[None]],
    ) -> None:
        head = openai.describe_completion(rid, self._limits.model_name, [], {})
        head = {key: head[key] for key in ("id", "object", "created", "model")}

        async def stream_one(index: int, sequence: Sequence_) -> None:
            is_first = True
            offset = 0
            async for part, is_last in follow(sequence):
                choice = self._describe(index, part, {**body, "prompt_logprobs": None}, tokenizer)
                choice["logprobs"] = openai.describe_log_probs(part.draws, body.get("logprobs"), tokenizer, first_offset=offset)
                offset += len(choice["text"])
                del choice["prompt_logprobs"], choice["routed_experts"]
                choice.update({} if is_first else {"prompt_token_ids": None})
                choice.update({} if is_last else {"finish_reason": None, "stop_reason": None})
                await send(json.dumps({**head, "choices": [choice]}, separators=(",", ":")))
                is_first = False

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._generation.run, sequences)
            for index, sequence in enumerate(sequences):
                nursery.start_soon(stream_one, index, sequence)
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = openai.add_usage([self._generation.describe_stream_usage(sequences[i : i + n]) for i in range(0, len(sequences), n)])
            await send(json.dumps({**head, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}, separators=(",", ":")))
        await send("[DONE]")
