"""Requests and answers of SGLang's HTTP routes, as pure functions. Measured with SGLang 0.5.23.

Tokens go in and out as ids. Log-probs of sampled tokens are log_softmax(logits / temperature), before top_p, top_k and min_p; greedy ones
are under temperature 1. A server started with SGLANG_RETURN_ORIGINAL_LOGPROB reports them under temperature 1 always. With the sets that
tokens are drawn from come their log-probs over these sets.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from torch import Tensor

from rollouts.checks import parse_json
from rollouts.engines.http.checks import ServerInfo
from rollouts.engines.http.errors import raise_protocol_errors
from rollouts.engines.http.samples import Generated, expand_spans, read_experts, read_kept, read_log_prob, read_token_ids
from rollouts.errors import EngineProtocolError
from rollouts.types import KeptTokens, RoutedExperts, SamplingParams

PauseMode = Literal["abort", "retract"]
"""Effect of a pause on requests in flight. SGLang's third mode, in_place, mixes keys and values of two policies and is not offered."""

OLDEST_VERSION = "0.5.23"  # begin_weight_update around tensors; weight_versions in answers
TESTED_VERSIONS = ("0.5.23",)
_NOT_FLUSHED = "Weights were updated, but the cache was not flushed"
_KEPT_BACK = 5  # tokens by which max_req_input_len is less than the longest request


def sglang_sampling_params(params: SamplingParams, *, seeded: bool) -> dict[str, Any]:
    """Return the sampling_params of /generate. Parameters that change the distribution are always sent, over a server's preferred values.

    Args:
        params: max_tokens must be within the context: the server refuses more.
        seeded: whether the server runs --enable-deterministic-inference; else a seed has no effect and is not sent.
    """
    sampling: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "min_p": params.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    if params.stop_token_ids:
        sampling["stop_token_ids"] = list(params.stop_token_ids)
    if params.stop:
        sampling["stop"] = list(params.stop)
    if seeded and params.seed is not None:
        sampling["sampling_seed"] = params.seed
    return sampling


def create_sample_ids(wire_id: str, n: int) -> list[str]:
    """Return the ids of the samples of one request: all of one length, because an abort hits every id that begins with the one given."""
    return [f"{wire_id}-{i:06d}" for i in range(n)]


def sglang_payload(
    prompts: Sequence[Sequence[int]], sampling: Sequence[Mapping[str, Any]], request_ids: Sequence[str], *, stream: bool = False
) -> dict[str, Any]:
    """Return the body of /generate for one prompt or several.

    n samples of a prompt are sent as n equal prompts, each with an id: with n > 1 in sampling_params the server discards the id, and
    nothing can be aborted.

    Args:
        sampling: parameters of each prompt, from sglang_sampling_params.
        request_ids: id of each prompt; all of one length, because an abort hits every id that begins with the one given.
    """
    assert len(prompts) == len(sampling) == len(request_ids) >= 1, f"{len(prompts)} prompts, {len(sampling)} params, {len(request_ids)} ids"
    alone = len(prompts) == 1
    return {
        "input_ids": list(prompts[0]) if alone else [list(prompt) for prompt in prompts],
        "sampling_params": dict(sampling[0]) if alone else [dict(one) for one in sampling],
        "rid": request_ids[0] if alone else list(request_ids),
        "return_logprob": True,
        "stream": stream,
    }


def parse_sglang_response(
    response: Any, request_ids: Sequence[str], experts_per_token: int | None = None, *, with_sets: bool = False
) -> tuple[Generated, ...]:
    """Parse the answer of /generate to sglang_payload with these ids, in their order.

    Args:
        experts_per_token: experts of a token in each router, to read those that routers chose; None = they were not asked for.
        with_sets: whether the sets that tokens are drawn from were asked for (return_sampling_mask).

    Raises: EngineProtocolError if the answer is unexpected.
    """
    answers = cast("list[Any]", response) if isinstance(response, list) else [response]
    if len(answers) != len(request_ids):
        raise EngineProtocolError(f"/generate gave {len(answers)} answers to {len(request_ids)} requests")
    pairs = zip(answers, request_ids, strict=True)
    return tuple(_parse_answer(answer, request_id, experts_per_token, with_sets) for answer, request_id in pairs)


def parse_sglang_event(
    event: Any, request_id: str, experts_per_token: int | None = None, *, with_sets: bool = False
) -> tuple[tuple[int, ...], tuple[float, ...], Generated | None]:
    """Parse one event of a stream: all tokens and log-probs so far (streams are cumulative), and the whole once it has ended."""
    with raise_protocol_errors("an event of /generate", event):
        if event["meta_info"]["finish_reason"] is not None:
            whole = _parse_answer(event, request_id, experts_per_token, with_sets)
            return whole.tokens, whole.log_probs, whole
        tokens, log_probs = _read_tokens(event, request_id)
    return tokens, log_probs, None


def prompt_log_probs_payload(tokens: Sequence[int], start_index: int, request_id: str) -> dict[str, Any]:
    """Return the body of /generate that scores tokens[start_index:] and generates nothing.

    Args:
        start_index: at least 1.
    """
    return {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start_index - 1,
        "rid": request_id,
        "stream": False,
    }


def parse_prompt_log_probs(response: Any, tokens: Sequence[int], start_index: int, vocab_size: int | None) -> tuple[float, ...] | None:
    """Parse log-probs of tokens[start_index:] at temperature 1 from the answer to prompt_log_probs_payload; None if it was aborted.

    Args:
        vocab_size: size of the vocabulary, whose last id the server reports as 0, though with its own log-prob.
    """
    with raise_protocol_errors("/generate", response):
        if response["meta_info"]["finish_reason"]["type"] == "abort":
            return None
        entries = response["meta_info"]["input_token_logprobs"]
        ids = [entry[1] for entry in entries]
        log_probs = [entry[0] for entry in entries[1:]]  # the first token has none: no token precedes it
    expected = [0 if vocab_size is not None and token == vocab_size - 1 else token for token in tokens[start_index - 1 :]]
    if ids != expected:
        raise EngineProtocolError(f"/generate gave log-probs of the prompt tokens {ids}, expected those of {expected}")
    return tuple(map(read_log_prob, log_probs))


def is_updated_but_not_flushed(status: int, body: str) -> bool:
    """Whether a refused weight update has in fact taken place, with the old prefix cache still in use."""
    return status == 400 and _NOT_FLUSHED in body


def parse_update_answer(route: str, response: Any) -> None:
    """Raise EngineProtocolError unless a weight route reports success."""
    if not isinstance(response, dict) or cast("dict[str, Any]", response).get("success") is not True:
        raise EngineProtocolError(f'{route} answered {str(response)[:500]}, expected {{"success": true}}')


def sglang_tensor_payload(
    weights: Iterable[tuple[str, Tensor]], tensor_parallel_size: int, *, is_last: bool, label: str | None
) -> dict[str, Any]:
    """Return the body of /update_weights_from_tensor for one bucket: a plain pickle of CPU tensors, once for each tensor parallel rank.

    Args:
        is_last: whether this is the update's last bucket; only then is the cache flushed and the label set.
        label: label of the new weights.
    """
    named = [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in weights]  # clone: a view would carry its whole storage
    data = base64.b64encode(pickle.dumps(named, protocol=pickle.HIGHEST_PROTOCOL)).decode()
    body: dict[str, Any] = {"serialized_named_tensors": [data] * tensor_parallel_size, "flush_cache": is_last}
    if is_last:
        body["weight_version"] = label
    return body


@dataclass(frozen=True)
class SGLangServer:
    """Facts of a server, shared ones and SGLang's own."""

    info: ServerInfo
    max_prompt: int  # tokens of the longest prompt
    max_total: int  # tokens of prompt and output: two less than the context, fewer if the cache is smaller
    tensor_parallel_size: int
    data_parallel_size: int
    streams_deltas: bool  # --incremental-streaming-output
    experts_per_token: int | None = None  # experts of a token in each router; None = unknown, or no mixture of experts


def parse_server_info(server_info: Any, model_info: Any, models: Any) -> SGLangServer:
    """Parse facts from the answers of /server_info, /model_info and /v1/models. Raises EngineProtocolError if one is missing.

    The kind of log-probs is that of a server without SGLANG_RETURN_ORIGINAL_LOGPROB, which no route reports.
    """
    with raise_protocol_errors("/server_info, /model_info or /v1/models", server_info):
        longest = int(server_info["max_req_input_len"])
        return SGLangServer(
            info=ServerInfo(
                kind="sglang",
                version=str(server_info["version"]),
                model_path=str(model_info["model_path"]),
                served_name=str(model_info["served_model_name"]),
                context_length=int(models["data"][0]["max_model_len"]),
                log_prob_kind="tempered",
                weight_version=str(model_info["weight_version"]),
                dtype=str(server_info["dtype"]),
                has_tokenizer=not server_info["skip_tokenizer_init"],
                honors_seeds=bool(server_info["enable_deterministic_inference"]),
                max_running=server_info["max_running_requests"],
                max_kept=int(server_info.get("sampling_mask_max_tokens") or 0),
                can_sleep=bool(server_info.get("enable_memory_saver") and server_info.get("enable_weights_cpu_backup")),
            ),
            max_prompt=longest - 1,
            max_total=longest + _KEPT_BACK - 1,
            tensor_parallel_size=int(server_info["tp_size"]),
            data_parallel_size=int(server_info["dp_size"]),
            streams_deltas=bool(server_info["incremental_streaming_output"]),
        )


def find_foreign_defaults(model_info: Any) -> list[str]:
    """Return names of sampling parameters that the server adds to every request and that our requests leave open."""
    with raise_protocol_errors("/model_info", model_info):
        preferred: Any = model_info["preferred_sampling_params"] or {}
        preferred = parse_json(preferred) if isinstance(preferred, str) else preferred
        return sorted(set(preferred) - set(sglang_sampling_params(SamplingParams(), seeded=False)))


def probe_payload(prompt: Sequence[int]) -> dict[str, Any]:
    """Return the body of /generate that shows the kind of a server's log-probs: of the first and the likeliest, at temperatures 1 and 2."""
    return {
        "input_ids": [list(prompt)] * 2,
        "sampling_params": [{"max_new_tokens": 1, "temperature": t, "ignore_eos": True} for t in (1.0, 2.0)],
        "return_logprob": True,
        "top_logprobs_num": 2,
        "stream": False,
    }


def parse_probe(response: Any) -> Literal["tempered", "untempered"] | None:
    """Return the kind of log-probs, from the gap of the two likeliest tokens at temperatures 1 and 2; None if the gap does not tell."""
    with raise_protocol_errors("/generate", response):
        at_1, at_2 = (answer["meta_info"]["output_top_logprobs"][0] for answer in response)
        gap_1, gap_2 = (float(first[0]) - float(second[0]) for first, second in (at_1, at_2))
    if gap_1 < 1e-3:  # a tie looks the same at any temperature
        return None
    for kind, expected in (("tempered", gap_1 / 2), ("untempered", gap_1)):
        if abs(gap_2 - expected) < 0.1 * gap_1:
            return cast("Literal['tempered', 'untempered']", kind)
    return None


def _parse_answer(answer: Any, request_id: str, experts_per_token: int | None, with_sets: bool) -> Generated:
    with raise_protocol_errors("/generate", answer):
        tokens, log_probs = _read_tokens(answer, request_id)
        meta = answer["meta_info"]
        num_told, kept, whole = len(tokens), None, None
        if with_sets:
            whole, (tokens, log_probs, kept) = log_probs, _read_sets(meta, tokens, request_id)
        finish_reason = meta["finish_reason"]["type"]
        if finish_reason not in ("stop", "length", "abort"):
            raise EngineProtocolError(f"request {request_id} ended with the unknown finish reason {meta['finish_reason']!r}")
        spans = [(str(span["version"]), int(span["start"]), int(span["end"])) for span in meta["weight_versions"]]
        labels = expand_spans(f"request {request_id}", spans, num_told)[: len(tokens)]
        experts = None if experts_per_token is None or not tokens else _read_experts(meta, len(tokens), experts_per_token)
    return Generated(
        tokens=tokens,
        log_probs=log_probs,
        labels=labels,
        finish_reason=finish_reason,
        experts=experts,
        kept=kept,
        whole_log_probs=None if whole is None else whole[: len(tokens)],
    )


def _read_sets(meta: Any, tokens: tuple[int, ...], request_id: str) -> tuple[tuple[int, ...], tuple[float, ...], KeptTokens]:
    """Return the tokens that have a set, their log-probs over these sets, and the sets.

    The server forgets the sets of a request that is aborted while it waits to be computed again: its tokens are then as if never drawn.
    """
    if meta["finish_reason"]["type"] == "abort" and "output_token_sampling_mask" not in meta:
        return (), (), KeptTokens()
    sets, values = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    if len(values) != len(tokens):
        raise EngineProtocolError(f"request {request_id} has {len(tokens)} tokens and log-probs over the sets of {len(values)}")
    return tokens, tuple(map(read_log_prob, values)), read_kept(sets, tokens)


def _read_experts(meta: Any, num_tokens: int, experts_per_token: int) -> RoutedExperts:
    """Read the experts of a sample: numbers of 32 bits # [prompt + tokens - 1, layers, k], in base64."""
    text, num_prompt = meta.get("routed_experts"), int(meta["prompt_tokens"])
    if not isinstance(text, str):
        raise EngineProtocolError("/generate gave no experts of a mixture of experts: start the server with --enable-return-routed-experts")
    values = np.frombuffer(base64.b64decode(text), dtype="<i4")
    return read_experts(values.reshape(num_prompt + num_tokens - 1, -1, experts_per_token), num_prompt, num_tokens)


def _read_tokens(answer: Any, request_id: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    meta = answer["meta_info"]
    if meta["id"] != request_id:
        raise EngineProtocolError(f"/generate answered about request {meta['id']!r}, expected {request_id!r}")
    tokens = read_token_ids(answer["output_ids"])
    entries = meta["output_token_logprobs"]
    if [entry[1] for entry in entries] != list(tokens):
        raise EngineProtocolError(
            f"request {request_id} has {len(tokens)} tokens and log-probs of {len(entries)} tokens that are not the same ones"
        )
    return tokens, tuple(read_log_prob(entry[0]) for entry in entries)
