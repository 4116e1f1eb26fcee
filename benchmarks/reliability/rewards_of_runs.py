"""A reward for runs whose model answers at random: it depends on the sampled tokens alone, and differs between them."""

from __future__ import annotations

from rollouts.seeds import derive_seed
from rollouts.types import Sample


def random_reward(sample: Sample) -> float:
    """Return 0 or 1, a pure function of the tokens."""
    return float(derive_seed(*sample.tokens) % 2)
