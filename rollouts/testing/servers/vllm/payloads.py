"""Request and response bodies of vLLM 0.32's generation routes, as pure functions."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollouts.testing.servers.http import Request, Response, json_response
from rollouts.testing.servers.models import Draw, Ranked, Sampling
from rollouts.testing.servers.openai import count_tokens, describe_head, describe_message
from rollouts.testing.servers.payloads import Refused, Tokenizer, order_top
from rollouts.testing.servers.scheduler import Sequence_
from rollouts.testing.servers.vllm.settings import VLLMSettings

FINGERPRINT = "vllm-0.32.0-76e5817c"


@dataclass(frozen=True)
class Limits:
    """Limits against which requests are checked."""

    settings: VLLMSettings
    vocab_size: int
    context_length: int
    has_tokenizer: bool


def error_response(
    status: int, message: str, kind: str = "BadRequestError", param: str | None = None, *, hang_up: bool = False
) -> Response:
    """Return a response in the shape of nearly all of the server's errors."""
    response = json_response({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)
    return Response(status, response.body, response.content_type, hang_up)


def refuse(message: str, param: str | None = None) -> Refused:
    """Return status 400 in the shape of the engine."""
    return Refused(error_response(400, message, param=param))


def refuse_field(kind: str, location: str, message: str, value: Any) -> Refused:
    """Return status 400 in the shape of the validation of bodies."""
    text = f"1 validation error:\n  {{'type': '{kind}', 'loc': '{location}', 'msg': {message!r}, 'input': {_describe_value(value)}}}"
    return Refused(error_response(400, text, "Bad Request", location))


def read_json(request: Request) -> dict[str, Any]:
    """Return the body, which must be a JSON object. Raises Refused."""
    if "application/json" not in request.headers.get("content-type", ""):
        text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refused(error_response(400, text, "Bad Request"))
    try:
        body = request.json()
    except json.JSONDecodeError as error:
        raise refuse_field("json_invalid", f"body.{error.pos}", "JSON decode error", {}) from error
    if not isinstance(body, dict):
        raise refuse_field("model_attributes_type", "body", "Input should be a valid dictionary or object to extract fields from", body)
    return body  # pyright: ignore[reportUnknownVariableType]


def parse_generate(body: Mapping[str, Any], limits: Limits) -> tuple[tuple[int, ...], Sampling, int]:
    """Parse a body of /inference/v1/generate to prompt, sampling and n. Raises Refused."""
    if "token_ids" not in body:
        raise refuse_field("missing", "body.token_ids", "Field required", body)
    tokens = body["token_ids"]
    if not isinstance(tokens, list):
        raise refuse_field("list_type", "body.token_ids", "Input should be a valid list", tokens)
    if not tokens:
        raise refuse_field("too_short", "body.token_ids", "List should have at least 1 item after validation, not 0", tokens)
    for i, token in enumerate(tokens):
        if not isinstance(token, int):
            message = "Input should be a valid integer, unable to parse string as an integer"
            raise refuse_field("int_parsing", f"body.token_ids.{i}", message, token)
    if min(tokens) < 0:
        raise refuse_field("value_error", "body.token_ids", "Value error, token_ids must not contain negative values", tokens)
    if "sampling_params" not in body:
        raise refuse_field("missing", "body.sampling_params", "Field required", body)
    options = body["sampling_params"]
    if not isinstance(options, dict) or not _has_right_types(options):
        raise refuse_field("is_instance_of", "body.sampling_params", "Input should be an instance of SamplingParams", options)
    check_model_name(body.get("model"), limits)
    if "trace_decode_token_ids" in options:
        message = "trace_decode_token_ids is set but trace replay is not enabled. Start the engine with --enable-trace-replay to use it."
        raise refuse(message)
    if "prompt_logprob_token_ids" in options:
        message = "prompt_logprob_token_ids requires the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1). (parameter=prompt_logprob_token_ids)"
        raise refuse(message, "prompt_logprob_token_ids")
    prompt = tuple(tokens)
    sampling, n = parse_sampling(options, prompt, limits, default_max_tokens=limits.context_length)
    check_prompt(prompt, limits)
    return prompt, sampling, n


def _has_right_types(options: Mapping[str, Any]) -> bool:
    kinds: tuple[tuple[str, Any], ...] = (
        ("n max_tokens min_tokens top_k seed logprobs prompt_logprobs", int),
        ("temperature top_p min_p", int | float),
        ("stop_token_ids allowed_token_ids", list),
        ("stop", (str, list)),
    )
    return all(options.get(name) is None or isinstance(options[name], kind) for names, kind in kinds for name in names.split())


def check_model_name(name: Any, limits: Limits) -> None:
    """Raise Refused if the given name is not served."""
    if name is not None and name != limits.settings.model_name:
        message = f"The model `{name}` does not exist. Valid aliases: {limits.settings.model_name}."
        raise Refused(error_response(404, message, "NotFoundError", "model"))


def check_prompt(prompt: Sequence[int], limits: Limits) -> None:
    """Raise Refused if a token is unknown or the context has no room for another one."""
    unknown = [token for token in prompt if token >= limits.vocab_size]
    if unknown:
        raise refuse(f"Token id {max(unknown)} is out of vocabulary")
    length, longest = len(prompt), limits.context_length
    if length > longest:
        raise refuse(
            f"The decoder prompt (length {length}) is longer than the maximum model length of {longest}. Make sure that `max_model_len` is "
            "no smaller than the number of text tokens."
        )
    if length == longest:
        raise refuse(
            f"The decoder prompt (length {length}) plus the number of requested output tokens (at least 1) is longer than the maximum "
            f"model length of {longest}. Make sure that `max_model_len` is no smaller than the number of text tokens (prompt + requested "
            "output tokens)."
        )


def parse_sampling(options: Mapping[str, Any], prompt: Sequence[int], limits: Limits, *, default_max_tokens: int) -> tuple[Sampling, int]:
    """Parse fields of a request to sampling and n; max_tokens is cut to the context. Raises Refused. Unknown fields are ignored."""
    if not _has_right_types(options):
        raise refuse_field("int_parsing", "body", "Input should be a valid number or list", options)
    n, log_probs = _get(options, "n", 1), options.get("logprobs")
    given = Sampling(
        max_tokens=_get(options, "max_tokens", default_max_tokens),
        temperature=float(_get(options, "temperature", 1.0)),
        top_p=float(_get(options, "top_p", 1.0)),
        top_k=_get(options, "top_k", 0),
        min_p=float(_get(options, "min_p", 0.0)),
        allowed=tuple(_get(options, "allowed_token_ids", ())),
        min_tokens=_get(options, "min_tokens", 0),
        ignore_eos=bool(options.get("ignore_eos")),
        seed=options.get("seed"),
        num_top=0 if log_probs is None else log_probs,
    )
    _check_ranges(given, n)
    _check_counts(n, log_probs, limits)
    stop_ids, stop = _parse_stops(options, limits)
    max_tokens = max(1, min(given.max_tokens, limits.context_length - len(prompt)))
    return replace(given, max_tokens=max_tokens, top_k=max(0, given.top_k), stop_token_ids=stop_ids, stop=stop), n


def _check_ranges(given: Sampling, n: int) -> None:
    """Raise Refused if a number is refused by every server."""
    temperature, top_p, log_probs, max_tokens = given.temperature, given.top_p, given.num_top, given.max_tokens
    if n < 1:
        raise refuse(f"n must be at least 1, got {n}.")
    if temperature < 0:
        raise refuse(f"temperature must be non-negative, got {temperature}. (parameter=temperature, value={temperature})", "temperature")
    if not 0 < top_p <= 1:
        raise refuse(f"top_p must be in (0, 1], got {top_p}. (parameter=top_p, value={top_p})", "top_p")
    if given.top_k < -1:
        raise refuse(f"top_k must be 0 (disable), or at least 1, got {given.top_k}.")
    if not 0 <= given.min_p <= 1:
        raise refuse(f"min_p must be in [0, 1], got {given.min_p}.")
    if log_probs < -1:
        raise refuse(f"logprobs must be non-negative or -1, got {log_probs}. (parameter=logprobs, value={log_probs})", "logprobs")
    if max_tokens < 1:
        raise refuse(f"max_tokens must be at least 1, got {max_tokens}. (parameter=max_tokens, value={max_tokens})", "max_tokens")
    if n > 1 and temperature < 1e-5:
        raise refuse(f"n must be 1 when using greedy sampling, got {n}.")


def _check_counts(n: int, log_probs: int | None, limits: Limits) -> None:
    """Raise Refused if more samples or log-probs are requested than this server gives."""
    most_seqs, most_log_probs = limits.settings.max_num_seqs, limits.settings.max_logprobs
    if n > most_seqs:
        raise refuse(f"sampling_params.n must be at most the server's max_num_seqs ({most_seqs}), got {n}.")
    if log_probs is not None and most_log_probs >= 0 and not 0 <= log_probs <= most_log_probs:
        wanted = limits.vocab_size if log_probs < 0 else log_probs
        raise refuse(
            f"Requested sample logprobs of {wanted}, which is greater than max allowed: {most_log_probs} "
            f"(parameter=logprobs, value={log_probs})",
            "logprobs",
        )


def _parse_stops(options: Mapping[str, Any], limits: Limits) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Parse stop tokens and stop strings. Raises Refused."""
    stop_ids = tuple(_get(options, "stop_token_ids", ()))
    unknown = [token for token in stop_ids if token >= limits.vocab_size]
    if unknown:
        raise refuse(
            f"token_id(s) {unknown} in stop_token_ids contain out-of-vocab token ids. Vocabulary size: {limits.vocab_size} "
            f"(parameter=stop_token_ids, value={unknown})",
            "stop_token_ids",
        )
    stop = _get(options, "stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if stop and not limits.has_tokenizer:
        raise refuse(
            "stop strings are not supported on a --tokens-only server because detokenization is disabled. Check stop strings on the "
            "coordinator, or use stop_token_ids."
        )
    return stop_ids, stop


def _get(options: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a field; null counts as absent."""
    value = options.get(name)
    return default if value is None else value


def _describe_value(value: Any) -> str:
    if isinstance(value, list):
        return f"'<list of {len(value)} items>'"
    return f"'<dict of {len(value)} items>'" if isinstance(value, dict) else repr(str(value))


def _clip(log_prob: float) -> float:
    return log_prob if log_prob > -9999.0 else -9999.0  # infinities and NaN are not JSON


def describe_draws(draws: Sequence[Draw], count: int | None, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """Return `logprobs` of a choice of /inference/v1/generate; as text if a tokenizer is given."""
    if count is None:
        return None

    def entry(ranked: Ranked) -> dict[str, Any]:
        if tokenizer is None:
            return {"token_id": ranked.token, "logprob": _clip(ranked.log_prob), "rank": ranked.rank}
        text = tokenizer.decode([ranked.token], skip_special_tokens=True)
        return {"token": text, "logprob": _clip(ranked.log_prob), "bytes": list(text.encode())}

    return {"content": [{**entry(draw.chosen), "top_logprobs": [entry(r) for r in order_top(draw, count)]} for draw in draws]}


def describe_prompt(draws: Sequence[Draw], count: int, tokenizer: Tokenizer | None) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs`: None for the first token, then a table for each."""

    def entry(ranked: Ranked) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.decode([ranked.token], skip_special_tokens=True)
        return {"logprob": _clip(ranked.log_prob), "rank": ranked.rank, "decoded_token": text}

    return [None, *({str(r.token): entry(r) for r in order_top(draw, count + 1 if count >= 0 else -1)} for draw in draws)]


def describe_usage(sequences: Sequence[Sequence_], with_details: bool) -> dict[str, Any]:
    """Return the token counts of one prompt's samples."""
    details = {"cached_tokens": sequences[0].num_cached, "created_cache_tokens": None, "multimodal_tokens": None}
    return {
        **count_tokens(len(sequences[0].prompt), sequences),
        "prompt_tokens_details": details if with_details else None,
        "completion_tokens_details": None,
    }


def describe_choice(
    index: int, sequence: Sequence_, count: int | None, tokenizer: Tokenizer | None, *, is_text: bool, eos_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Return one sample of /inference/v1/generate."""
    text = {} if not is_text or tokenizer is None else {"text": tokenizer.decode(list(sequence.tokens), skip_special_tokens=True)}
    return {
        "index": index,
        "finish_reason": sequence.finish,
        "stop_reason": find_stop_reason(sequence, tokenizer, eos_token_ids),
        "token_ids": list(sequence.tokens),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": sequence.spans(),
        **text,
        "logprobs": describe_draws(sequence.draws, count, tokenizer if is_text else None),
    }


def find_stop_reason(sequence: Sequence_, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> int | str | None:
    """Return the stop token or string; an end of text counts only if the server has no tokenizer."""
    if sequence.finish == "stop" and sequence.matched is None and tokenizer is None and sequence.tokens[-1] in eos_token_ids:
        return sequence.tokens[-1]
    return sequence.matched


def describe_generation(
    request_id: str, model: str, choices: list[dict[str, Any]], usage: Mapping[str, Any], output_mode: str
) -> dict[str, Any]:
    """Return the answer of /inference/v1/generate around its choices."""
    return {
        "request_id": request_id,
        "model": model,
        "created": int(time.time()),
        "usage": usage,
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": output_mode,
        "choices": choices,
    }


def describe_completion(rid: str, model: str, choices: list[dict[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of vLLM's /v1/completions around its choices."""
    return {
        **describe_head(rid, "text_completion", model),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def describe_chat(rid: str, model: str, sequences: Sequence[Sequence_], tokenizer: Tokenizer, usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of vLLM's /v1/chat/completions."""
    empty = ("refusal", "annotations", "audio", "function_call", "reasoning")
    choices = [
        {**describe_message(i, sequence, tokenizer, empty), "stop_reason": sequence.matched, "token_ids": None, "routed_experts": None}
        for i, sequence in enumerate(sequences)
    ]
    answer = describe_completion(rid, model, choices, usage)
    return {**answer, "object": "chat.completion", **dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))}
