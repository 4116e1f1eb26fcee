"""Request and response bodies of SGLang 0.5's generation route, as pure functions."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollouts.testing.servers.http import Request, Response, json_response
from rollouts.testing.servers.models import Draw, Ranked, Sampling
from rollouts.testing.servers.payloads import Refused, Tokenizer, decode_output
from rollouts.testing.servers.scheduler import Sequence_

_SAMPLING_FIELDS = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex", "ebnf", "structural_tag", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed",
    "custom_params", "beam_width", "watermark", "choice",
)  # fmt: skip
_GREEDY_BELOW = 1e-6
MAX_KEPT = 4096  # --sampling-mask-max-tokens: tokens of the largest set that is returned
_NO_LIMIT = 1 << 40  # default of max_new_tokens: up to the context


@dataclass(frozen=True)
class Generation:
    """A body of /generate, checked and expanded: one entry for each sample."""

    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    rids: tuple[str, ...]
    is_list: bool  # whether the answer is a list
    is_stream: bool
    with_log_probs: bool
    log_prob_start: int  # first prompt token whose log-prob is requested; -1 = none
    num_top: int
    token_ids: tuple[int, ...] | None
    with_text: bool  # whether log-probs carry the text of their tokens
    with_prompt_ids: bool
    with_experts: bool
    with_sets: bool  # whether the answer has the sets that tokens were drawn from
    salt: str


def refuse(message: str) -> Refused:
    """Return status 400 in the shape of the generation route."""
    return Refused(json_response({"error": {"message": message}}, 400))


def refuse_plain(message: str) -> Refused:
    """Return status 400 in the shape of the check of the JSON's fields."""
    return Refused(json_response({"error": message}, 400))


def refuse_body(kind: str, location: str, message: str, value: Any, request: Request) -> Refused:
    """Return status 400 in the shape of the validation of bodies."""
    entry = f"{{'type': '{kind}', 'loc': {location}, 'msg': {message!r}, 'input': {value!r}}}"
    text = f'1 validation error:\n  {entry}\n\n  File "http_server.py", in the route\n    {request.method} {request.path} [{entry}]'
    return Refused(error_object(400, text, "Bad Request"))


def error_object(status: int, message: str, kind: str) -> Response:
    """Return an error response in the shape of HTTP errors."""
    return json_response({"object": "error", "message": message, "type": kind, "param": None, "code": status}, status)


def read_json(request: Request, required: Sequence[str] = ()) -> dict[str, Any]:
    """Return the body, which must be a JSON object with the required fields. Raises Refused."""
    if not request.body:
        raise refuse_body("missing", "('body',)", "Field required", None, request)
    try:
        body = request.json()
    except json.JSONDecodeError as error:
        message = "Input should be a dictionary or an instance of GenerateReqInput"
        raise refuse_body("dataclass_type", "('body',)", message, request.body, request) from error
    if not isinstance(body, dict):
        raise refuse_body("dataclass_type", "('body',)", "Input should be a dictionary", body, request)
    for name in required:
        if name not in body:
            raise refuse_body("missing", f"('body', '{name}')", "Field required", body, request)
    return body  # pyright: ignore[reportUnknownVariableType]


def parse_generate(body: Mapping[str, Any], request: Request, tokenizer: Tokenizer | None) -> Generation:
    """Parse a body of /generate, with the checks made before the request waits. Raises Refused."""
    try:
        return _parse_generate(body, request, tokenizer)
    except (TypeError, ValueError, AttributeError) as error:  # a field of a wrong type that no client would send on purpose
        raise refuse_body("value_error", "('body',)", f"Value error, {error}", str(body)[:200], request) from error


def _parse_generate(body: Mapping[str, Any], request: Request, tokenizer: Tokenizer | None) -> Generation:
    prompts, is_batch = _parse_prompts(body, request, tokenizer)
    options = body.get("sampling_params") or {}
    per_prompt: list[dict[str, Any]] = options if isinstance(options, list) else [options] * len(prompts)
    for one in per_prompt:
        unknown = [name for name in one if name not in _SAMPLING_FIELDS]
        if unknown:
            raise refuse_plain(f"unknown field `{unknown[0]}`, expected one of {', '.join(f'`{name}`' for name in _SAMPLING_FIELDS)}")
    n = per_prompt[0].get("n") or 1
    rids = _create_rids(body.get("rid"), len(prompts), n)
    num_top, token_ids = body.get("top_logprobs_num") or 0, body.get("token_ids_logprob")
    wanted = () if token_ids is None else tuple(token_ids)
    samplings = [_parse_sampling(one, num_top, wanted) for one in per_prompt for _ in range(n)]
    return Generation(
        prompts=tuple(prompt for prompt in prompts for _ in range(n)),
        samplings=tuple(samplings),
        rids=rids,
        is_list=is_batch or n > 1,
        is_stream=bool(body.get("stream")),
        with_log_probs=bool(body.get("return_logprob")),
        log_prob_start=body["logprob_start_len"] if isinstance(body.get("logprob_start_len"), int) else -1,
        num_top=num_top,
        token_ids=None if token_ids is None else wanted,
        with_text=bool(body.get("return_text_in_logprobs")),
        with_prompt_ids=bool(body.get("return_prompt_token_ids")),
        with_experts=bool(body.get("return_routed_experts")),
        with_sets=bool(body.get("return_sampling_mask")),
        salt=f"{body.get('extra_key') or ''}{body.get('cache_salt') or ''}",
    )


def _parse_prompts(body: Mapping[str, Any], request: Request, tokenizer: Tokenizer | None) -> tuple[list[tuple[int, ...]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if text is None and ids is None:
        raise refuse("Either text, input_ids or input_embeds should be provided.")
    if text is not None:
        if tokenizer is None:
            raise refuse(
                "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. Please provide input_ids or "
                "re-initialize the engine with skip_tokenizer_init=False."
            )
        texts = [text] if isinstance(text, str) else list(text)
        return [tuple(tokenizer.encode(one)) for one in texts], not isinstance(text, str)
    if not ids or any(row == [] for row in ids):  # an empty row of a batch would be answered from the memory of its neighbor
        raise refuse("input_ids cannot be empty.")
    is_batch = isinstance(ids[0], list)
    rows: list[list[Any]] = ids if is_batch else [ids]
    for row in rows:
        for token in row:
            if not isinstance(token, int):
                message = f"Value error, elements must be int or list; got {type(token).__name__}"
                raise refuse_body("value_error", "('body', 'input_ids')", message, ids, request)
    return [tuple(row) for row in rows], is_batch


def _create_rids(given: Any, num_prompts: int, n: int) -> tuple[str, ...]:
    """Return ids of all samples: the given ones for one sample each, new ones for several."""
    if given is None or n > 1:
        return tuple(uuid.uuid4().hex for _ in range(num_prompts * n))
    if isinstance(given, str):
        return (given,) if num_prompts == 1 else tuple(f"{given}_{i}" for i in range(num_prompts))
    twice = sorted({rid for rid in given if given.count(rid) > 1})
    if twice:
        raise refuse(f"Duplicate request IDs detected within the request: {twice}")
    return tuple(given)


def _check_types(options: Mapping[str, Any]) -> None:
    """Raise Refused if a number is not one."""
    kinds = {"f64": "temperature top_p min_p frequency_penalty presence_penalty repetition_penalty"}
    kinds["i64"] = "max_new_tokens top_k min_new_tokens n sampling_seed"
    for kind, names in kinds.items():
        for name in names.split():
            value = options.get(name)
            if value is not None and not isinstance(value, int | float if kind == "f64" else int):
                type_name = "string" if isinstance(value, str) else "floating point" if isinstance(value, float) else type(value).__name__
                raise refuse_plain(f"invalid type: {type_name} {json.dumps(value)}, expected {kind}")


def _parse_sampling(options: Mapping[str, Any], num_top: int, token_ids: tuple[int, ...]) -> Sampling:
    _check_types(options)
    temperature = options.get("temperature", 1.0)
    top_k = options.get("top_k", -1)
    stop = options.get("stop") or ()
    max_tokens = options.get("max_new_tokens", 128)
    return Sampling(
        max_tokens=_NO_LIMIT if max_tokens is None else max_tokens,
        temperature=0.0 if 0 <= temperature < _GREEDY_BELOW else temperature,
        top_p=options.get("top_p", 1.0),
        top_k=top_k if top_k > 0 else 0,
        min_p=options.get("min_p", 0.0),
        min_tokens=options.get("min_new_tokens", 0),
        ignore_eos=bool(options.get("ignore_eos")),
        stop_token_ids=tuple(options.get("stop_token_ids") or ()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=options.get("sampling_seed"),
        num_top=num_top,
        token_ids=token_ids,
    )


def check_sample(
    prompt: Sequence[int], sampling: Sampling, body: Mapping[str, Any], context_length: int, tokenizer: Tokenizer | None
) -> Sampling:
    """Check a request whose turn has come. Return the sampling with max_tokens filled in. Raises Refused."""
    if not math.isfinite(sampling.temperature) or sampling.temperature < 0:
        raise refuse(f"temperature must be a non-negative finite number, got {sampling.temperature}.")
    if not 0 < sampling.top_p <= 1:
        raise refuse(f"top_p must be in (0, 1], got {sampling.top_p}.")
    if not 0 <= sampling.min_p <= 1:
        raise refuse(f"min_p must be in [0, 1], got {sampling.min_p}.")
    if sampling.max_tokens < 0:
        raise refuse(f"max_new_tokens must be at least 0, got {sampling.max_tokens}.")
    if sampling.stop and tokenizer is None:
        raise refuse(
            f"stop={list(sampling.stop)} is unavailable when skip_tokenizer_init=True (requires tokenizer to decode tokens to text for "
            "matching)."
        )
    if body.get("return_sampling_mask") and sampling.temperature > 0 and not 1 < sampling.top_k <= MAX_KEPT:
        raise refuse(
            f"return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= {MAX_KEPT}; got top_k="
            f"{sampling.top_k or 1 << 30}. Lower top_k or increase --sampling-mask-max-tokens."
        )
    length = len(prompt)
    if length >= context_length:
        raise refuse(f"The input ({length} tokens) is longer than the model's context length ({context_length} tokens).")
    if sampling.max_tokens == _NO_LIMIT:
        return replace(sampling, max_tokens=context_length - length)
    if length + sampling.max_tokens > context_length:
        raise refuse(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens. You requested a total of "
            f"{length + sampling.max_tokens} tokens: {length} tokens from the input messages and {sampling.max_tokens} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within the limit."
        )
    return sampling


def describe_sample(
    sequence: Sequence_,
    generation: Generation,
    tokenizer: Tokenizer | None,
    *,
    label: str,
    started_at: float,
    vocab_size: int,
    prompt_draws: Sequence[Draw] | None = None,
    is_final: bool = True,
) -> dict[str, Any]:
    """Return one sample of the answer, or one event of its stream.

    Args:
        label: the server's current weight version.
        started_at: time of arrival of the request, in seconds of time.monotonic().
        vocab_size: number of ids.
        prompt_draws: log-probs of the prompt after its first token, if requested.
        is_final: whether the sample is finished and this describes its end.
    """
    tokens = list(sequence.tokens)
    text = {} if tokenizer is None else {"text": decode_output(sequence, tokenizer)}
    elapsed = {"e2e_latency": time.monotonic() - started_at}
    sent_at = {"response_sent_to_client_ts": time.time()}
    log_probs = _describe_log_probs(sequence, generation, tokenizer, prompt_draws, vocab_size)
    no_span = [{"version": label, "start": 0, "end": 0}]
    if sequence.was_queued:
        meta: dict[str, Any] = {
            "id": sequence.rid,
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": label,
            **elapsed,
            "weight_versions": sequence.spans() or no_span,
            **log_probs,
            "completion_tokens": len(tokens),
            **sent_at,
        }
        return {"text": "", **text, "output_ids": tokens, "meta_info": meta}
    meta = {
        "id": sequence.rid,
        "finish_reason": describe_finish(sequence) if is_final else None,
        "prompt_tokens": len(sequence.prompt),
        "weight_version": sequence.labels[-1] if sequence.labels else label,
        "num_retractions": sequence.num_retractions,
        **log_probs,
        **(_describe_sets(sequence) if generation.with_sets else {}),
        "reasoning_tokens": 0,
        "completion_tokens": len(tokens),
        "cached_tokens": sequence.num_cached,
        **({"weight_versions": sequence.spans() or no_span} if is_final else {}),
        "cached_tokens_details": {"device": sequence.num_cached, "host": 0} if sequence.num_cached else None,
        "dp_rank": None,
        **(elapsed if is_final else {}),
        **({} if generation.is_stream else sent_at),
    }
    prompt_ids = {"prompt_token_ids": list(sequence.prompt)} if generation.with_prompt_ids else {}
    return {**text, "output_ids": tokens, "meta_info": meta, **prompt_ids}


def describe_finish(sequence: Sequence_) -> dict[str, Any]:
    """Return the finish reason of a sample."""
    if sequence.finish == "abort":
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    if sequence.finish == "stop":
        return {"type": "stop", "matched": sequence.tokens[-1] if sequence.matched is None else sequence.matched}
    return {"type": "length", "length": len(sequence.draws)}


def _echo(token: int, vocab_size: int) -> int:
    """Return the id that is reported for a prompt token: the last one of the vocabulary comes back as 0."""
    return token if token < vocab_size - 1 else 0


def _describe_sets(sequence: Sequence_) -> dict[str, Any]:
    """Return the sets that tokens were drawn from, and their log-probs over these. An aborted request that waits has lost them."""
    return {
        "output_token_sampling_mask": [list(draw.kept or (draw.chosen.token,)) for draw in sequence.draws],
        "output_token_sampling_logprobs": [draw.kept_log_prob for draw in sequence.draws],
        "output_token_sampling_mask_length": len(sequence.draws),
    }


def _describe_log_probs(
    sequence: Sequence_, generation: Generation, tokenizer: Tokenizer | None, prompt_draws: Sequence[Draw] | None, vocab_size: int
) -> dict[str, Any]:
    if not generation.with_log_probs:
        return {}

    def triple(ranked: Ranked) -> list[Any]:
        text = tokenizer.decode([ranked.token]) if tokenizer is not None and generation.with_text else None
        return [ranked.log_prob, ranked.token, text]

    prompt: list[Any] = []
    top: list[Any] = []
    selected: list[Any] = []
    if prompt_draws is not None:
        first = generation.log_prob_start  # the first requested token never has a log-prob, at any position
        rows = prompt_draws[first:]
        prompt = [[None, _echo(sequence.prompt[first], vocab_size), None]]
        prompt += [[draw.chosen.log_prob, _echo(draw.chosen.token, vocab_size), *triple(draw.chosen)[2:]] for draw in rows]
        top = [None, *(list(map(triple, draw.top)) for draw in rows)]
        selected = [None, *(list(map(triple, draw.selected)) for draw in rows)]
    found: dict[str, Any] = {
        "input_token_logprobs": prompt,
        "output_token_logprobs": [triple(draw.chosen) for draw in sequence.draws],
        "output_token_logprobs_length": len(sequence.draws),
    }
    if generation.num_top:
        found |= {"input_top_logprobs": top, "output_top_logprobs": [list(map(triple, d.top)) for d in sequence.draws]}
    if generation.token_ids is not None:
        found |= {
            "input_token_ids_logprobs": selected,
            "output_token_ids_logprobs": [list(map(triple, d.selected)) for d in sequence.draws],
        }
    return found
