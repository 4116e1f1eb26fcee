"""What the OpenAI-like routes of both servers read and write, as pure functions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.engines.fakes.models import Draw, Ranked
from rollouts.engines.fakes.scheduler import Sequence_
from rollouts.engines.fakes.vllm_payloads import FINGERPRINT, Tokenizer, order_top


def parse_prompts(prompt: Any, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """`prompt` of a completion: a text, ids, or several of either."""
    if isinstance(prompt, str):
        return [tuple(tokenizer.encode(prompt))]
    if prompt and isinstance(prompt[0], int):
        return [tuple(prompt)]
    return [tuple(tokenizer.encode(one)) if isinstance(one, str) else tuple(one) for one in prompt]


def decode_output(sequence: Sequence_, tokenizer: Tokenizer) -> str:
    """The text without its stop token, or from the stop string on."""
    tokens = list(sequence.tokens)
    if sequence.finish == "stop" and not isinstance(sequence.matched, str):
        tokens = tokens[:-1]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return text.partition(sequence.matched)[0] if isinstance(sequence.matched, str) else text


def describe_log_probs(
    draws: Sequence[Draw], count: int | None, tokenizer: Tokenizer, *, as_ids: bool = False, first_offset: int = 0
) -> dict[str, Any] | None:
    """`logprobs` of a completion: the sampled token and the `count` most probable ones at each place."""
    if count is None:
        return None

    def name(ranked: Ranked) -> str:
        return f"token_id:{ranked.token}" if as_ids else tokenizer.decode([ranked.token], skip_special_tokens=True)

    offsets: list[int] = []
    offset = first_offset
    for draw in draws:
        offsets.append(offset)
        offset += len(name(draw.chosen))
    return {
        "text_offset": offsets,
        "token_logprobs": [draw.chosen.log_prob for draw in draws],
        "tokens": [name(draw.chosen) for draw in draws],
        "top_logprobs": [{name(r): r.log_prob for r in order_top(draw, count + 1 if count else 1)} for draw in draws],
    }


def describe_completion(rid: str, model: str, choices: list[dict[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of vLLM's /v1/completions around its choices."""
    return {
        "id": rid,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def add_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The usage of several prompts together; details are those of the first."""
    counts = {key: sum(usage[key] for usage in usages) for key in ("prompt_tokens", "total_tokens", "completion_tokens")}
    return {**usages[0], **counts}


def describe_chat(rid: str, model: str, sequences: Sequence[Sequence_], tokenizer: Tokenizer, usage: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of vLLM's /v1/chat/completions."""
    nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", "content": decode_output(sequence, tokenizer), **nothing},
            "logprobs": None,
            "finish_reason": sequence.finish,
            "stop_reason": sequence.matched,
            "token_ids": None,
            "routed_experts": None,
        }
        for i, sequence in enumerate(sequences)
    ]
    answer = describe_completion(rid, model, choices, usage)
    return {**answer, "object": "chat.completion", **dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))}
