"""Scores of given tokens: log-probs that a server computes of a prompt. The same road for SGLang and vLLM."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollouts.engines.http.requests import RequestsInFlight
from rollouts.engines.request_checks import check_tokens
from rollouts.errors import EngineError


def check_scoring(
    name: str, tokens: Sequence[int], start_index: int, temperature: float, *, vocab_size: int | None, max_tokens: int, limit: str
) -> None:
    """Raise EngineError for scores that a server cannot compute.

    Args:
        name: name of the engine, for messages.
        start_index: index of the first token to score.
        max_tokens: maximum number of tokens.
        limit: max_tokens in words, as the end of a sentence.
    """
    if temperature != 1.0:
        raise EngineError(f"{name} computes log-probs of given tokens at temperature 1 only, not {temperature:g}: use the training backend")
    check_tokens(name, "recompute_output_log_probs", tokens, vocab_size)
    if not 1 <= start_index <= len(tokens) <= max_tokens:
        raise EngineError(f"{name}: start_index is {start_index} for {len(tokens)} tokens, expected 1 to their number, and {limit}")


async def score_tokens(
    requests: RequestsInFlight, send: Callable[[str], Awaitable[Any]], parse: Callable[[Any], tuple[float, ...] | None]
) -> tuple[float, ...]:
    """Return the scores in a server's answer; the request is repeated if a weight sync aborted it.

    Args:
        send: f(wire id to use) -> the answer.
        parse: f(answer) -> the scores; None = it was aborted.

    Raises: EngineError of `send` and `parse`, or if the engine is closed or unusable.
    """
    found = None
    while found is None:
        found = parse(await requests.call(send))
    return found
