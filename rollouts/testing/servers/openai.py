"""Request and response bodies of the OpenAI-like routes in the parts that both servers share, as pure functions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.testing.servers.models import Draw, Ranked
from rollouts.testing.servers.payloads import Refused, Tokenizer, decode_output, order_top
from rollouts.testing.servers.scheduler import Sequence_


def parse_prompts(prompt: Any, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Parse `prompt` of a completion: a text, ids, or several of either."""
    if isinstance(prompt, str):
        return [tuple(tokenizer.encode(prompt))]
    if prompt and isinstance(prompt[0], int):
        return [tuple(prompt)]
    return [tuple(tokenizer.encode(one)) if isinstance(one, str) else tuple(one) for one in prompt]


def parse_messages(messages: Any, tokenizer: Any, *, without_template: Refused) -> tuple[int, ...]:
    """Parse `messages` of a chat request to its prompt. Raises `without_template` if the tokenizer has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise without_template
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"])


def parse_chat_limit(body: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens of a chat request; None if it names none."""
    return body.get("max_completion_tokens") or body.get("max_tokens")


def describe_head(rid: str, kind: str, model: Any) -> dict[str, Any]:
    """Return the fields with which an answer, or an event of its stream, begins."""
    return {"id": rid, "object": kind, "created": int(time.time()), "model": model}


def describe_completion(index: int, sequence: Sequence_, tokenizer: Tokenizer, log_probs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return one choice of a completion."""
    text = decode_output(sequence, tokenizer)
    return {"index": index, "text": text, "logprobs": log_probs, "finish_reason": sequence.finish}


def describe_message(index: int, sequence: Sequence_, tokenizer: Tokenizer, empty: Sequence[str]) -> dict[str, Any]:
    """Return one choice of a chat; `empty` names the fields of the message that are always null."""
    message = {"role": "assistant", "content": decode_output(sequence, tokenizer), **dict.fromkeys(empty)}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": sequence.finish}


def describe_log_probs(
    draws: Sequence[Draw], count: int | None, tokenizer: Tokenizer, *, as_ids: bool = False, first_offset: int = 0
) -> dict[str, Any] | None:
    """Return `logprobs` of a completion: the sampled token and the `count` most probable ones at each place."""
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


def count_tokens(num_prompt: int, sequences: Sequence[Sequence_]) -> dict[str, Any]:
    """Return the counts with which a usage begins."""
    num_output = sum(len(sequence.draws) for sequence in sequences)
    return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_output, "completion_tokens": num_output}


def add_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the total usage of several prompts; details are those of the first."""
    counts = {key: sum(usage[key] for usage in usages) for key in ("prompt_tokens", "total_tokens", "completion_tokens")}
    return {**usages[0], **counts}
