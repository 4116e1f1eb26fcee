"""Checks of requests that are the same for every engine: token ids and sampling parameters. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.config import LEAST_TEMPERATURE
from rollouts.errors import EngineRequestError
from rollouts.types import SamplingParams


def check_tokens(name: str, request_id: str, tokens: Sequence[int], vocab_size: int | None) -> None:
    """Raise EngineRequestError for an empty list, or a token outside the vocabulary, which kills some servers."""
    if not tokens:
        raise EngineRequestError(f"{name}: {request_id} has an empty prompt; give it at least one token")
    low, high = min(tokens), max(tokens)
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        size = "" if vocab_size is None else f" of {vocab_size}"
        raise EngineRequestError(
            f"{name}: {request_id} has token {low if low < 0 else high}, outside the vocabulary{size}: is it another tokenizer's?"
        )


def check_params(name: str, request_id: str, params: SamplingParams, *, vocab_size: int | None, has_tokenizer: bool) -> None:
    """Raise EngineRequestError for parameters that no engine can follow; some of them make servers sample from another distribution."""

    def refuse(field: str, expected: str) -> EngineRequestError:
        return EngineRequestError(f"{name}: {request_id} has {field} = {getattr(params, field)!r}, expected {expected}")

    if params.max_tokens < 1:
        raise refuse("max_tokens", "at least 1")
    if params.temperature and params.temperature < LEAST_TEMPERATURE:
        raise refuse("temperature", f"0 for greedy, or at least {LEAST_TEMPERATURE:g}")
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
    # a string would be taken for its letters, and the empty string is in every text
    if isinstance(params.stop, str) or not all(params.stop):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise refuse("stop", "a tuple of strings that are not empty")
    if params.stop and not has_tokenizer:
        raise refuse("stop", "none: the engine runs without a tokenizer; use stop_token_ids, or start it with its tokenizer")
