"""Rewards for runs whose model answers at random: they depend on the sampled tokens, and differ between them."""

from __future__ import annotations

from rollouts.seeds import derive_seed
from rollouts.types import Sample


def random_reward(sample: Sample) -> float:
    """Return 0 or 1, a pure function of the tokens."""
    return float(derive_seed(*sample.tokens) % 2)


def exploding_reward(sample: Sample) -> float:
    """Return random_reward, and from the tenth prompt on one whose gradient has no finite norm."""
    return random_reward(sample) if (sample.group_index or 0) < 9 else 1e30 * (-1) ** (sample.index or 0)
