"""Requests and answers of vLLM's HTTP routes, as pure functions. Measured with vLLM 0.32.0.

Tokens go in and out as ids, through /inference/v1/generate. A flag of the server selects the log-probs: "processed" ones are of the
distribution sampled from, after temperature, top_p, top_k and min_p; "raw" ones (vLLM's default) are of the policy at temperature 1.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from rollouts.engines.http.checks import ServerInfo
from rollouts.engines.http.errors import raise_protocol_errors
from rollouts.engines.http.requests import WireRequest
from rollouts.engines.http.samples import Generated, expand_spans, read_experts, read_log_prob, read_token_ids
from rollouts.errors import EngineError, EngineProtocolError, EngineRequestError, EngineStatusError
from rollouts.seeds import derive_seed
from rollouts.types import FinishReason, LogProbKind, RoutedExperts, SamplingParams

TESTED_VERSIONS = ("0.32.0",)
OLDEST_VERSION = "0.32"  # earlier versions give no weight versions of tokens, and log-probs of another shape

GENERATE = "/inference/v1/generate"
ID_PREFIX = "generate-tokens-"
"""Prefix that the server adds to an id; it aborts by the whole id."""

LOWEST_TEMPERATURE = 0.01
"""Lowest temperature above 0: below it the server uses this temperature instead."""

LOG_PROB_KINDS: tuple[tuple[str, LogProbKind], ...] = (("processed_logprobs", "sampled"), ("raw_logprobs", "untempered"))
"""Kind of log-probs by --logprobs-mode."""

_FLOOR = -9999.0  # stands for -inf and NaN
_FINISH_REASONS: tuple[tuple[str, FinishReason], ...] = (
    ("stop", "stop"),
    ("length", "length"),
    ("abort", "abort"),
    ("repetition", "length"),  # cut off by the server's detection of loops, not ended by the model
)


def vllm_payload(request: WireRequest, eos_token_ids: Collection[int] = ()) -> dict[str, Any]:
    """Return the body of /inference/v1/generate. Parameters that change the distribution are always sent.

    Args:
        eos_token_ids: end-of-text ids of the model; a server started with --generation-config vllm knows only the tokenizer's.
    """
    params = request.params
    sampling: dict[str, Any] = {
        "n": request.n,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "logprobs": 0,  # only the sampled token's log-prob; null would give none
        "detokenize": bool(params.stop),  # only stop strings need the text
    }
    if params.seed is not None:  # sample i gets seed + i, so that neighboring seeds would give groups the same samples
        sampling["seed"] = params.seed if request.n == 1 else derive_seed(params.seed, request.n)
    stop_token_ids = sorted({*params.stop_token_ids, *eos_token_ids})
    if stop_token_ids:
        sampling["stop_token_ids"] = stop_token_ids
    if params.stop:
        sampling |= {"stop": list(params.stop), "skip_special_tokens": False}  # a stop string may contain the text of a special token
    return {"token_ids": list(request.tokens), "sampling_params": sampling, "request_id": request.wire_id, "stream": False}


def check_params(name: str, request_id: str, params: SamplingParams, n: int, info: ServerInfo) -> None:
    """Raise EngineRequestError for parameters that only vLLM refuses, or changes without an error."""
    if 0 < params.temperature < LOWEST_TEMPERATURE:
        raise EngineRequestError(
            f"{name}: {request_id} has temperature = {params.temperature:g}, for which vLLM would use {LOWEST_TEMPERATURE}: use that, or 0"
        )
    if info.max_running is not None and n > info.max_running:
        raise EngineRequestError(
            f"{name}: {request_id} asks for {n} samples, more than the {info.max_running} sequences that the server decodes at a time: "
            "start it with a larger --max-num-seqs, or ask for less at once"
        )


def parse_vllm_response(response: Any, request: WireRequest, *, with_experts: bool = False) -> tuple[Generated, ...]:
    """Parse the answer of /inference/v1/generate, one result for each sample in order.

    Args:
        with_experts: read the experts that routers chose.

    Raises: EngineProtocolError if the answer is unexpected, or has no experts.
    """
    with raise_protocol_errors(GENERATE, response):
        choices = sorted(response["choices"], key=lambda choice: choice["index"])
        if response["request_id"] != ID_PREFIX + request.wire_id:
            raise EngineProtocolError(f"{GENERATE} answered about {response['request_id']!r}, expected {ID_PREFIX + request.wire_id!r}")
        if [choice["index"] for choice in choices] != list(range(request.n)):
            raise EngineProtocolError(f"{GENERATE} gave the samples {[choice['index'] for choice in choices]}, expected {request.n}")
        if response["usage"]["prompt_tokens"] != len(request.tokens):
            raise EngineProtocolError(
                f"{GENERATE} took {response['usage']['prompt_tokens']} prompt tokens, but {len(request.tokens)} were sent: something "
                "between here and the model tokenizes again"
            )
        return tuple(_parse_choice(choice, len(request.tokens), with_experts) for choice in choices)


def _parse_choice(choice: Any, num_prompt: int, with_experts: bool) -> Generated:
    tokens = read_token_ids(choice["token_ids"])
    entries = choice["logprobs"]["content"]
    if tuple(entry["token_id"] for entry in entries) != tokens:
        raise EngineProtocolError(f"{GENERATE} gave {len(tokens)} tokens and log-probs of {len(entries)} that are not the same ones")
    finish_reason = dict(_FINISH_REASONS).get(choice["finish_reason"])
    if finish_reason is None:
        raise EngineProtocolError(f"{GENERATE} ended a sample with the unknown finish reason {choice['finish_reason']!r}")
    spans = [(str(span["version"]), int(span["start"]), int(span["end"])) for span in choice["weight_versions"]]
    return Generated(
        tokens=tokens,
        log_probs=tuple(read_log_prob(entry["logprob"], _FLOOR) for entry in entries),
        labels=expand_spans(GENERATE, spans, len(tokens)),
        finish_reason=finish_reason,
        experts=_read_experts(choice["routed_experts"], num_prompt, len(tokens)) if with_experts and tokens else None,
    )


def _read_experts(text: Any, num_prompt: int, num_tokens: int) -> RoutedExperts:
    """Read the experts of a sample: an array of numpy's file format # [prompt + tokens - 1, layers, k], in base64."""
    if not isinstance(text, str):
        raise EngineProtocolError(
            f"{GENERATE} gave no experts of a mixture of experts: start the server with --enable-return-routed-experts and the variable "
            "VLLM_USE_V2_MODEL_RUNNER=1"
        )
    try:
        values = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except Exception as error:  # numpy reads the header as an expression of Python, and allocates what it says
        raise EngineProtocolError(f"{GENERATE} gave experts that are not an array in numpy's file format: {error}") from error
    return read_experts(values, num_prompt, num_tokens)


def prompt_log_probs_payload(tokens: Sequence[int], wire_id: str) -> dict[str, Any]:
    """Return the body of /inference/v1/generate that scores tokens. The server generates one more, for which they must leave room."""
    sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
    return {"token_ids": list(tokens), "sampling_params": sampling, "request_id": wire_id, "stream": False}


def parse_prompt_log_probs(response: Any, tokens: Sequence[int], start_index: int) -> tuple[float, ...] | None:
    """Parse log-probs of tokens[start_index:] from the answer to prompt_log_probs_payload, at temperature 1 in any mode of the server;
    None if a weight sync aborted the request.

    Args:
        start_index: at least 1.
    """
    with raise_protocol_errors(GENERATE, response):
        entries = response["prompt_logprobs"]
        if response["choices"][0]["finish_reason"] == "abort" and (entries is None or len(entries) < len(tokens)):
            return None
        if len(entries) != len(tokens):
            raise EngineProtocolError(f"{GENERATE} gave log-probs of {len(entries)} prompt tokens, expected {len(tokens)}")
        return tuple(read_log_prob(entries[i][str(tokens[i])]["logprob"], _FLOOR) for i in range(start_index, len(tokens)))


def parse_version_answer(version: Any) -> str:
    """Return the version in the answer of /version."""
    with raise_protocol_errors("/version", version):
        return str(version["version"])


def parse_server_info(server_info: Any, models: Any, version: Any, weight_info: Any, is_paused: Any) -> ServerInfo:
    """Parse facts from the answers of /server_info (as JSON), /v1/models, /version, /weight_info and /is_paused.

    Raises: EngineProtocolError if one is missing; EngineError for a --logprobs-mode that gives no log-probs.
    """
    with raise_protocol_errors("/server_info, /v1/models, /version, /weight_info or /is_paused", server_info):
        model = server_info["vllm_config"]["model_config"]
        card = models["data"][0]
        mode = model["logprobs_mode"]
        kind = dict(LOG_PROB_KINDS).get(mode)
        if kind is None:
            raise EngineError(f"the server gives {mode!r} instead of log-probs: start it with --logprobs-mode processed_logprobs")
        device = str(server_info["vllm_config"]["device_config"]["device"]).split(":")[0]
        scheduler = server_info["vllm_config"]["scheduler_config"]
        return ServerInfo(
            kind="vllm",
            version=parse_version_answer(version),
            model_path=str(card["root"]),
            served_name=str(card["id"]),
            context_length=int(card["max_model_len"]),
            log_prob_kind=kind,
            weight_version=str(weight_info["weight_version"]),
            dtype=str(model["dtype"]).removeprefix("torch."),
            has_tokenizer=not model["skip_tokenizer_init"],
            # a chunked prefill of a request with a seed ends the server: torch's generators of a CPU have no offset to reset
            honors_seeds=not (device == "cpu" and scheduler["enable_chunked_prefill"]),
            device=device,
            max_running=scheduler["max_num_seqs"],
            is_paused=bool(is_paused["is_paused"]),
            can_sleep=bool(model.get("enable_sleep_mode")) or device == "cpu",  # on a CPU it pauses alone
        )


def parse_load_answer(response: Any) -> None:
    """Raise EngineProtocolError unless every worker reports that it loaded the weights (by an empty answer)."""
    results = cast("Mapping[str, Any]", response).get("results") if isinstance(response, dict) else None
    if not isinstance(results, list) or not results or any(result is not None for result in cast("list[Any]", results)):
        raise EngineProtocolError(f"/collective_rpc reload_weights answered {str(response)[:500]}, expected one null for each worker")


@contextmanager
def explain_missing_routes(name: str) -> Generator[None]:
    """Name the switch that the server lacks if a route answers 403 or 404."""
    try:
        yield
    except EngineStatusError as error:
        if error.status == 404:
            raise EngineError(
                f"{name} has no {error.url}: it is no vLLM server, or one without its routes for weights. Start it with the environment "
                "variable VLLM_SERVER_DEV_MODE=1, reachable from a private network only, because these routes ask for no key"
            ) from error
        if error.status == 403:
            raise EngineError(f"{name} does not take token ids ({error.reason}): start it with --enable-scale-out") from error
        if error.status == 401:
            raise EngineError(f"{name} wants another API key ({error.reason}): pass api_key") from error
        raise
