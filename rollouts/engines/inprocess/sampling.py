"""Sampling of tokens from logits: temperature, top-k, top-p, min-p, one uniform number for each row. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SamplingRows:
    """Sampling parameters of R rows."""

    temperatures: Tensor  # [R] float32; 0 = greedy
    top_p: Tensor  # [R] float32 in (0, 1]; 1 = off
    top_k: Tensor  # [R] int64; 0 = off
    min_p: Tensor  # [R] float32 in [0, 1]; 0 = off
    truncates: bool  # whether any row is truncated

    @classmethod
    def stack(cls, rows: Sequence[tuple[float, float, int, float, bool]], device: torch.device) -> SamplingRows:
        """Create the parameters of R >= 1 rows from those of each, in the order of the fields; most batches have equal rows."""
        distinct = set(rows)
        if len(distinct) == 1:
            columns = [torch.full((len(rows),), value, device=device) for value in rows[0][:4]]
        else:
            columns = [torch.tensor(column, device=device) for column in list(zip(*rows, strict=True))[:4]]
        return cls(columns[0], columns[1], columns[2], columns[3], truncates=any(row[4] for row in distinct))

    def select(self, index: Tensor) -> SamplingRows:
        """Return the rows at the given positions."""
        return SamplingRows(self.temperatures[index], self.top_p[index], self.top_k[index], self.min_p[index], self.truncates)


def truncate_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return logits with -inf at tokens outside the kept set. The most probable token is always kept.

    top-k keeps the k largest; top-p then keeps the shortest run of tokens, from the largest down, whose probability among those left by
    top-k reaches top_p; min-p keeps tokens with at least min_p times the largest probability.

    Args:
        logits: # [R, V], already divided by the temperature.
        top_k: # [R] int64, 0 = off.
        top_p: # [R], 1 = off.
        min_p: # [R], 0 = off.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    k = torch.where(top_k > 0, top_k, logits.shape[-1])
    ordered = ordered.masked_fill(rank >= k[:, None], -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    drop = (before >= top_p[:, None]) & (top_p[:, None] < 1) & (rank > 0)
    drop |= ordered < ordered[:, :1] + min_p[:, None].log()  # a ratio of probabilities, independent of their normalisation
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(drop, -torch.inf))


class Draws(NamedTuple):
    """Tokens drawn from R rows."""

    tokens: Tensor  # [R] int64
    log_probs: Tensor  # [R] float32, of the distribution that they were drawn from
    is_kept: Tensor | None  # [R, V] bool, tokens that truncation left; None = no row is truncated


def sample_tokens(logits: Tensor, rows: SamplingRows, uniforms: Tensor) -> Draws:
    """Sample one token for each row by inversion of the cumulative distribution: it depends on that row's logits and uniform number only.

    Args:
        logits: # [R, V] float32.
        uniforms: # [R] float64 in [0, 1).

    Returns: tokens, and log_probs under the sampling distribution (temperature and truncation applied). Greedy rows take the largest logit;
        their log-prob is at temperature 1 without truncation.
    """
    greedy = rows.temperatures == 0
    scaled = logits / torch.where(greedy, torch.ones_like(rows.temperatures), rows.temperatures)[:, None]
    if rows.truncates:
        top_k, top_p, min_p = (torch.where(greedy, off, value) for off, value in ((0, rows.top_k), (1.0, rows.top_p), (0.0, rows.min_p)))
        scaled = truncate_logits(scaled, top_k, top_p, min_p)
    log_probs = scaled.log_softmax(-1)
    cumulative = log_probs.to(torch.float64).exp_().cumsum(-1)
    threshold = uniforms.to(cumulative.device)[:, None] * cumulative[:, -1:]
    # right=True: the first token whose cumulative probability exceeds the threshold, never one of probability 0
    drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    best = logits.argmax(-1)
    tokens = torch.where(greedy | (drawn >= logits.shape[-1]), best, drawn)
    return Draws(tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1), scaled > -torch.inf if rows.truncates else None)


def read_kept(is_kept: Tensor) -> list[bytes]:
    """Return the ids of the tokens that are kept in each row # [R, V] bool, as int32 and rising; the device is waited for once."""
    places = is_kept.nonzero().to(torch.int32).cpu().numpy()
    bounds = places[:, 0].searchsorted(np.arange(1, len(is_kept)))
    return [ids.tobytes() for ids in np.split(places[:, 1], bounds)]


class UniformStream:
    """Uniform numbers of one request: number t belongs to its token t, independent of the rest of the batch."""

    def __init__(self, seed: int, block: int = 64) -> None:
        """seed: 0 to 2^63 - 1."""
        self._generator = np.random.Generator(np.random.Philox(key=seed))
        self._block = block
        self._values: list[float] = []

    def __getitem__(self, token: int) -> float:
        while token >= len(self._values):
            self._values.extend(self._generator.random(self._block).tolist())
        return self._values[token]
