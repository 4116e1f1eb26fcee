"""Answers of an inference server: samples with the weight versions of their tokens, and checks of them. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollouts.engines.http.checks import INITIAL_LABEL
from rollouts.errors import EngineProtocolError
from rollouts.types import FinishReason, KeptTokens, RoutedExperts, SamplingParams


@dataclass(frozen=True)
class Generated:
    """Result of one HTTP request for one sample."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    labels: tuple[str, ...]  # the server's label of the weights that sampled each token
    finish_reason: FinishReason
    experts: RoutedExperts | None = None  # experts of prompt and tokens but the last one, which no pass has read; None = not recorded
    kept: KeptTokens | None = None  # sets that the tokens were drawn from; None = not recorded
    whole_log_probs: tuple[float, ...] | None = None  # over all tokens where log_probs are over these sets; None = log_probs are

    def __post_init__(self) -> None:
        n = len(self.tokens)
        assert self.kept is None or len(self.kept) == n, f"{len(self.kept or ())} sets for {n} tokens"
        assert len(self.log_probs) == n, f"{len(self.log_probs)} log-probs for {n} tokens"
        assert self.whole_log_probs is None or len(self.whole_log_probs) == n, f"{len(self.whole_log_probs or ())} log-probs for {n} tokens"
        assert len(self.labels) == n, f"{len(self.labels)} labels for {n} tokens"


# -- versions


def label_of(version: int) -> str:
    """Return the server's label for a version."""
    return str(version)


def version_of(name: str, label: str, initial_version: int | None) -> int:
    """Return the version for a server's label.

    Args:
        initial_version: version of the weights that the server was started with; None = it has got others since, so INITIAL_LABEL means
            that it was restarted.

    Raises: EngineProtocolError for an unknown label.
    """
    if label == INITIAL_LABEL:
        if initial_version is None:
            raise EngineProtocolError(
                f"{name} serves its initial weights, although it had confirmed newer ones: it was started again. Sync the weights before "
                "generating"
            )
        return initial_version
    if not (label.isascii() and label.isdecimal()):
        raise EngineProtocolError(
            f"{name} labels its weights {label!r}, expected {INITIAL_LABEL!r} or a number: another program updates this server"
        )
    return int(label)


def expand_spans(name: str, spans: Iterable[tuple[str, int, int]], num_tokens: int) -> tuple[str, ...]:
    """Return one label per token from half-open spans (label, start, end). Raises EngineProtocolError unless they cover all tokens."""
    labels: list[str] = []
    spans = list(spans)
    for label, start, end in spans:
        if start != len(labels) or not start <= end <= num_tokens:
            break
        labels.extend([label] * (end - start))
    if len(labels) != num_tokens:
        raise EngineProtocolError(
            f"{name} says which weights sampled {len(labels)} of {num_tokens} tokens: its spans are {spans!r}, expected to follow one "
            "another from 0 to the end"
        )
    return tuple(labels)


# -- experts


def read_experts(values: NDArray[np.integer[Any]], num_prompt: int, num_tokens: int) -> RoutedExperts:
    """Read the experts of one sample # [prompt + tokens - 1, layers, k] of integers. Raises EngineProtocolError for another shape."""
    expected = num_prompt + num_tokens - 1
    if values.ndim != 3 or len(values) != expected or 0 in values.shape[1:]:
        raise EngineProtocolError(
            f"it gave the experts of its routers as an array of the shape {values.shape}, expected ({expected}, layers, experts of a token)"
        )
    if not np.issubdtype(values.dtype, np.integer) or int(values.min()) < 0 or int(values.max()) > np.iinfo(np.int16).max:
        raise EngineProtocolError(f"it gave experts of the type {values.dtype} between {values.min()} and {values.max()}, expected int16")
    return RoutedExperts(data=values.astype("<i2").tobytes(), num_routers=values.shape[1], top_k=values.shape[2])


# -- checks of samples


def read_token_ids(values: Iterable[Any]) -> tuple[int, ...]:
    """Read token ids from JSON. Raises EngineProtocolError for anything but a whole number, such as 7.9 or true."""
    ids = tuple(values)
    wrong = [value for value in ids if type(value) is not int]
    if wrong:
        raise EngineProtocolError(f"it gave the token id {wrong[0]!r}, expected a whole number")
    return ids


def read_kept(sets: Iterable[Iterable[Any]], tokens: Sequence[int]) -> KeptTokens:
    """Read the sets of token ids from which tokens were drawn. Raises EngineProtocolError for a set without its token."""
    rising = [sorted(set(read_token_ids(ids))) for ids in sets]
    if len(rising) != len(tokens):
        raise EngineProtocolError(f"it gave the sets that {len(rising)} tokens were drawn from, expected those of {len(tokens)}")
    lacking = [place for place, (token, ids) in enumerate(zip(tokens, rising, strict=True)) if token not in ids]
    if lacking:
        raise EngineProtocolError(
            f"token {lacking[0]} of its answer is {tokens[lacking[0]]}, which is not in the set that it was drawn from"
        )
    data = np.fromiter((token for ids in rising for token in ids), dtype="<i4")
    return KeptTokens(data=data.tobytes(), counts=tuple(map(len, rising)))


def read_log_prob(value: Any, floor: float = -math.inf) -> float:
    """Read a log-prob from JSON. Raises EngineProtocolError unless it is finite, above the floor and at most 0 (1e-4 for rounding)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not max(floor, -sys.float_info.max) < value <= 1e-4:
        lowest = "" if floor == -math.inf else f" and above {floor:g}, which stands for -inf and NaN"
        raise EngineProtocolError(
            f"it gave the log-prob {value!r}, expected a finite number of at most 0{lowest}: look whether the logits of the server's model "
            "are finite"
        )
    return float(value)


def check_generated(result: Generated, params: SamplingParams, vocab_size: int | None) -> None:
    """Raise EngineProtocolError for a sample that the trained model cannot have given, or that was not requested.

    Args:
        vocab_size: rows of the model's embedding; None = unknown.
    """
    if len(result.tokens) > params.max_tokens:
        raise EngineProtocolError(f"it gave {len(result.tokens)} tokens, but at most {params.max_tokens} were asked for")
    limit = math.inf if vocab_size is None else vocab_size
    kept = np.frombuffer(b"" if result.kept is None else result.kept.data, dtype="<i4")
    outside = [token for token in result.tokens if not 0 <= token < limit] + kept[(kept < 0) | (kept >= limit)].tolist()
    if outside:
        size = "" if vocab_size is None else f" of {vocab_size}"
        raise EngineProtocolError(
            f"it gave the token id {outside[0]}, outside the vocabulary{size}: it serves another model than is trained"
        )


def check_order(answer: str, versions: Sequence[int], oldest: int, newest: float = math.inf, *, may_fall: bool = False) -> None:
    """Refuse an answer that the server's weights cannot have given in this order.

    Args:
        answer: subject of the message: "the server sampled tokens of the request".
        versions: versions of the tokens of one answer, in order.
        oldest: oldest version confirmed when the request was sent, or given to the server since.
        newest: newest version ever given to the server.
        may_fall: whether older weights were given to the server while it answered.

    Raises: EngineProtocolError.
    """
    if not versions:
        return
    lowest, highest = min(versions), max(versions)
    falls = lowest != highest and not may_fall and any(later < earlier for earlier, later in pairwise(versions))
    if oldest <= lowest and highest <= newest and not falls:
        return
    if falls:
        wrong = f"with versions that fall, from {highest} to {versions[-1]}, although no older weights were given to it"
    elif lowest < oldest:
        wrong = f"with weight version {lowest}, but {oldest} was confirmed before"
    else:
        wrong = f"with weight version {highest}, but it was given none after {newest}"
    raise EngineProtocolError(
        f"{answer} {wrong}: it was started again, or another program updates it. Sync the weights before generating, and let "
        "one run alone update a server"
    )
