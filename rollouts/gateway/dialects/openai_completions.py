"""OpenAI's completions (POST /v1/completions): a text or token ids, without a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from rollouts.gateway.dialects.dialect import JSON, Dialect, count_usage, dump, list_log_probs, read_head, write_openai_refusal
from rollouts.gateway.dialects.fields import refuse, refuse_unsupported
from rollouts.gateway.dialects.openai_chat import SAMPLING, read_sampling, write_late_refusal
from rollouts.gateway.refusals import Body
from rollouts.gateway.requests import Answered, GatewayRequest, Reply

_KNOWN: Mapping[str, str | None] = MappingProxyType({
    **SAMPLING, "prompt": None, "logprobs": None, "best_of": None, "echo": "the prompt is not scored",
    "suffix": "the policy writes behind its prompt",
})  # fmt: skip
_DEFAULT_MAX_TOKENS = 16  # the default of the API


def read_completion(body: Body) -> GatewayRequest:
    """Read a request. Raises Refusal."""
    fields, request = read_head(body, _KNOWN)
    request = read_sampling(fields, request)
    if fields.get("best_of") not in (None, 1):
        raise fields.refuse_unsupported("best_of", "every answer is returned: use n")
    count = fields.read_int("logprobs", least=0, most=100)
    if count:
        raise refuse_unsupported("logprobs", count, "engines return the log-prob of the sampled token alone: send 0")
    wishes = request.wishes
    if wishes.max_tokens is None:
        wishes = replace(wishes, max_tokens=_DEFAULT_MAX_TOKENS)
    return replace(request, prompt=_read_prompt(fields.get("prompt")), given_as="prompt", wishes=wishes, log_probs=count is not None)


def _read_prompt(value: Any) -> str | tuple[int, ...]:
    items = cast("list[Any]", value) if isinstance(value, list) else None
    if items is not None and len(items) == 1 and isinstance(items[0], (str, list)):
        return _read_prompt(items[0])
    if isinstance(value, str) and value:
        return value
    if items and all(type(token) is int and 0 <= token < 2**31 for token in items):
        return tuple(items)
    raise refuse("prompt", value, "a text, or a list of token ids, not empty; several prompts need several requests")


def write_completion(request: GatewayRequest, answered: Answered) -> JSON:
    """Return the whole answer."""
    choices = [_write_choice(request, index, reply) for index, reply in enumerate(answered.replies)]
    out = _frame(request, answered) | {"choices": choices, "usage": count_usage(answered)}
    return out | ({"prompt_token_ids": list(answered.replies[0].completion.input_tokens)} if request.token_ids else {})


def write_completion_events(request: GatewayRequest, answered: Answered) -> Iterator[str]:
    """Return the events of a stream: one for each choice."""
    for index, reply in enumerate(answered.replies):
        yield f"data: {dump(_frame(request, answered) | {'choices': [_write_choice(request, index, reply)]})}"
    if request.include_usage:
        yield f"data: {dump(_frame(request, answered) | {'choices': [], 'usage': count_usage(answered)})}"
    yield "data: [DONE]"


def _frame(request: GatewayRequest, answered: Answered) -> JSON:
    return {"id": f"cmpl-{answered.id}", "object": "text_completion", "created": answered.created, "model": request.model}


def _write_choice(request: GatewayRequest, index: int, reply: Reply) -> JSON:
    finish = "length" if reply.finish == "length" else "stop"
    choice: JSON = {"index": index, "text": reply.text, "logprobs": None, "finish_reason": finish}
    if request.log_probs:
        pairs, offsets = list_log_probs(reply), [0]
        for text, _ in pairs:
            offsets.append(offsets[-1] + len(text))
        choice["logprobs"] = {
            "tokens": [text for text, _ in pairs],
            "token_logprobs": [log_prob for _, log_prob in pairs],
            "top_logprobs": None,
            "text_offset": offsets[:-1],
        }
    if request.token_ids:
        choice["token_ids"] = list(reply.completion.output_tokens)
    return choice


OPENAI_COMPLETIONS = Dialect(
    name="completions",
    read=read_completion,
    write=write_completion,
    write_events=write_completion_events,
    write_refusal=write_openai_refusal,
    write_late_refusal=write_late_refusal,
)
