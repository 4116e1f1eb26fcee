"""Limits on requests to an inference server, and the meaning of its log-probs. Pure."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollouts.engines.request_checks import check_params, check_tokens
from rollouts.errors import EngineContextError, EngineError, EngineRequestError
from rollouts.types import LogProbKind, SamplingParams

ServerKind = Literal["sglang", "vllm"]

INITIAL_LABEL = "default"
"""Weight version that both servers report before the first update."""


@dataclass(frozen=True)
class AtLeast:
    """Size of a vocabulary that may be larger, as a teacher's of the policy's family, whose embedding has more unused rows."""

    size: int


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """Facts of a server that limit requests to it and define the meaning of its answers."""

    kind: ServerKind
    version: str  # version of the server's package
    model_path: str  # directory or hub id that it was started with or, if it reports so, last loaded from
    served_name: str  # name of the model in its routes
    context_length: int  # maximum number of tokens of prompt and output together
    log_prob_kind: LogProbKind  # kind of its output log-probs, for parameters under which the three kinds differ
    weight_version: str  # its label: INITIAL_LABEL, or the one that the last sync set
    vocab_size: int | None = None  # rows of its embedding; None = unknown
    dtype: str | None = None  # dtype of its weights, for instance "float32"; None = unknown
    has_tokenizer: bool = True  # without a tokenizer it cannot look for stop strings
    honors_seeds: bool = True  # whether a seed in a request decides the samples
    device: str | None = None  # device that it computes on, "cpu" or "cuda"; None = unknown
    max_running: int | None = None  # maximum number of sequences that it decodes at the same time; None = unknown
    max_kept: int = 0  # largest top_k with which it returns the sets that tokens are drawn from; 0 = it does not
    is_paused: bool = False
    can_sleep: bool = False  # whether the server was started so that it can release the memory of its GPU and keep its weights


def find_size(vocab_size: int | AtLeast | None) -> int | None:
    """Return the size of a vocabulary that is known exactly or from below."""
    return vocab_size.size if isinstance(vocab_size, AtLeast) else vocab_size


def check_server(name: str, info: ServerInfo, *, expected_model: str | Path | None = None, vocab_size: int | AtLeast | None = None) -> None:
    """Raise EngineError unless the server serves the intended model.

    Args:
        name: name of the engine, for messages.
        expected_model: directory, hub id or served name; None = any.
        vocab_size: rows of the trained model's embedding; AtLeast = or more; None = any.
    """
    if expected_model is not None and not _is_same_model(str(expected_model), info):
        raise EngineError(
            f"{name} serves {info.model_path!r} under the name {info.served_name!r}, expected {str(expected_model)!r}: "
            "it is another server, or it was started with another model"
        )
    if isinstance(vocab_size, AtLeast):
        if info.vocab_size is not None and info.vocab_size < vocab_size.size:
            raise EngineError(
                f"{name} serves a model with a vocabulary of {info.vocab_size} tokens, expected {vocab_size.size} or more, as the policy "
                "has: start it with a model of the policy's family"
            )
    elif vocab_size is not None and info.vocab_size is not None and vocab_size != info.vocab_size:
        raise EngineError(
            f"{name} serves a model with a vocabulary of {info.vocab_size} tokens, expected {vocab_size}: "
            "start it with the model that is trained, or resize the embedding before both are started"
        )


def check_version(name: str, version: str, *, oldest: str, tested: Sequence[str]) -> None:
    """Raise EngineError for a server older than `oldest`; warn about one with which this client was not tested."""
    if parse_version(version) < parse_version(oldest):
        raise EngineError(
            f"{name} runs version {version} of its server, older than {oldest}, whose weight versions and log-probs this client "
            f"reads: install {tested[-1]}"
        )
    if parse_version(version) not in map(parse_version, tested):
        warnings.warn(
            f"{name} runs version {version} of its server; this client was tested with {', '.join(tested)}. Compare the log-probs "
            "of a few rollouts with the trainer's before a long run",
            stacklevel=2,
        )


def parse_version(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "0.32.1rc2+cpu" -> (0, 32, 1); () if it has none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return () if found is None else tuple(int(part) for part in found.group(1).split("."))


def _is_same_model(expected: str, info: ServerInfo) -> bool:
    if expected in (info.model_path, info.served_name):
        return True
    return Path(expected).exists() and Path(expected).resolve() == Path(info.model_path).resolve()


def check_request(
    name: str,
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    n: int,
    info: ServerInfo,
    *,
    max_prompt: int | None = None,
    max_total: int | None = None,
) -> SamplingParams:
    """Check a request and return its parameters with max_tokens cut to the rest of the context (it then ends with "length").

    Args:
        max_prompt: maximum number of tokens of a prompt; default: one less than the context, so that a token can be generated.
        max_total: maximum number of tokens of prompt and output; default: the context.

    Raises: EngineRequestError for a request that the server would refuse or die of; EngineContextError for a prompt that is too long.
    """
    most, total = max_prompt or info.context_length - 1, max_total or info.context_length
    check_tokens(name, request_id, prompt, info.vocab_size)
    if len(prompt) > most:
        raise EngineContextError(
            f"{name}: {request_id} has {len(prompt)} prompt tokens, more than the {most} that fit into the context of "
            f"{info.context_length}: shorten the prompt, or start the server with a longer context"
        )
    if n < 1 or (n > 1 and params.greedy):
        raise EngineRequestError(f"{name}: {request_id} asks for {n} samples{' of greedy decoding, which are all equal' if n > 1 else ''}")
    check_params(name, request_id, params, vocab_size=info.vocab_size, has_tokenizer=info.has_tokenizer)
    if params.untempered_log_probs and not gives_untempered_log_probs(info.log_prob_kind, params):
        raise EngineRequestError(
            f"{name}: {request_id} asks for untempered log-probs, but this server's are {info.log_prob_kind}, at temperature "
            f"{params.temperature:g}: sample from the whole distribution at temperature 1, or use the engine in this process"
        )
    if params.kept_tokens and params.truncates and not records_sets(params, info.max_kept):
        raise EngineRequestError(
            f"{name}: {request_id} asks for the sets that top_p, top_k and min_p leave, which are not read from the answers of {info.kind} "
            f"{info.version}: sample from the whole distribution, use SGLang with a top_k, or the engine in this process"
        )
    return params.new(max_tokens=min(params.max_tokens, total - len(prompt)))


def records_sets(params: SamplingParams, max_kept: int) -> bool:
    """Whether a server returns the sets that tokens are drawn from with these parameters (ServerInfo.max_kept)."""
    return params.truncates and 2 <= params.top_k <= max_kept


def classify_log_probs(kind: LogProbKind, params: SamplingParams) -> LogProbKind:
    """Return the kind of a server's log-probs for these parameters; "sampled" if the values are the same.

    Args:
        kind: kind of the server's log-probs.
    """
    if kind == "tempered" and not params.truncates:
        return "sampled"
    if kind == "untempered" and not params.truncates and temperature_of_log_probs("sampled", params) == 1.0:
        return "sampled"
    return kind


def temperature_of_log_probs(kind: LogProbKind, params: SamplingParams) -> float:
    """Return the temperature by which logits are divided for such log-probs."""
    return 1.0 if params.greedy or kind == "untempered" else params.temperature


def gives_untempered_log_probs(kind: LogProbKind, params: SamplingParams) -> bool:
    """Whether output log-probs are those of the whole policy at temperature 1."""
    whole = kind != "sampled" or not params.truncates
    return whole and temperature_of_log_probs(kind, params) == 1.0
