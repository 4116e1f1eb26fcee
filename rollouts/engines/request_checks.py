"""What may be asked of an inference server, and what its log-probs then are of. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.engines.server_info import ServerInfo
from rollouts.errors import EngineContextError, EngineRequestError
from rollouts.types import LogProbKind, SamplingParams


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
    """The parameters to send, max_tokens cut to what the context leaves (the completion then ends with "length").

    Args:
        max_prompt: most tokens of a prompt; default: one less than the context, so that a token can be generated.
        max_total: most tokens of prompt and output; default: the context.

    Raises: EngineRequestError for what the server would refuse, or die of; EngineContextError for a prompt that is too long.
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
    return params.new(max_tokens=min(params.max_tokens, total - len(prompt)))


def check_tokens(name: str, request_id: str, tokens: Sequence[int], vocab_size: int | None) -> None:
    """Raise EngineRequestError for no tokens, or one outside the vocabulary, which kills some servers."""
    if not tokens:
        raise EngineRequestError(f"{name}: {request_id} has an empty prompt; give it at least one token")
    low, high = min(tokens), max(tokens)
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        size = "" if vocab_size is None else f" of {vocab_size}"
        raise EngineRequestError(
            f"{name}: {request_id} has token {low if low < 0 else high}, outside the vocabulary{size}: is it another tokenizer's?"
        )


def check_params(name: str, request_id: str, params: SamplingParams, *, vocab_size: int | None, has_tokenizer: bool) -> None:
    """Raise EngineRequestError for parameters that no engine can follow, some of which would give samples of nothing meant."""

    def refuse(field: str, expected: str) -> EngineRequestError:
        return EngineRequestError(f"{name}: {request_id} has {field} = {getattr(params, field)!r}, expected {expected}")

    if params.max_tokens < 1:
        raise refuse("max_tokens", "at least 1")
    if not 0 <= params.temperature < float("inf"):
        raise refuse("temperature", "at least 0")
    if not 0 < params.top_p <= 1:
        raise refuse("top_p", "more than 0, at most 1")
    if not 0 <= params.min_p <= 1:
        raise refuse("min_p", "between 0 and 1")
    if params.top_k < 0:
        raise refuse("top_k", "at least 0 (0 = off)")
    if params.seed is not None and not 0 <= params.seed < 2**63:
        raise refuse("seed", "0 to 2**63 - 1")
    if params.stop_token_ids and not all(0 <= i < (vocab_size or i + 1) for i in params.stop_token_ids):
        raise refuse("stop_token_ids", f"ids below the vocabulary size of {vocab_size}")
    # letters would be strings of their own, and an empty string is in every text
    if isinstance(params.stop, str) or not all(params.stop):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise refuse("stop", "a tuple of strings that are not empty")
    if params.stop and not has_tokenizer:
        raise refuse("stop", "none: the engine runs without a tokenizer; use stop_token_ids, or start it with its tokenizer")


def classify_log_probs(kind: LogProbKind, params: SamplingParams) -> LogProbKind:
    """What a server's log-probs are of for these parameters: "sampled" wherever that is the same thing.

    Args:
        kind: of the server.
    """
    if kind == "tempered" and not params.truncates:
        return "sampled"
    if kind == "untempered" and not params.truncates and temperature_of_log_probs("sampled", params) == 1.0:
        return "sampled"
    return kind


def temperature_of_log_probs(kind: LogProbKind, params: SamplingParams) -> float:
    """The temperature to divide logits by, to get such log-probs."""
    return 1.0 if params.greedy or kind == "untempered" else params.temperature


def gives_untempered_log_probs(kind: LogProbKind, params: SamplingParams) -> bool:
    """Whether output log-probs are those of the whole policy at temperature 1."""
    whole = kind != "sampled" or not params.truncates
    return whole and temperature_of_log_probs(kind, params) == 1.0
