"""filters: our compositions for the vectors of this group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parity.mapping import Parity, Rule
from rollouts.algorithms.advantages import penalize_overlong
from rollouts.data.filters import check_reward_nonzero_std
from rollouts.data.samples import compute_response_lengths, group_samples
from rollouts.errors import GenerationError
from rollouts.types import Sample


def dynamic_sampling(rewards: Tensor, group_size: int) -> Mapping[str, Any]:
    """Rows as samples, in groups of neighbors."""
    rows = [
        Sample(tokens=(0,), loss_mask=(1.0,), reward=reward, group_index=row // group_size, index=row)
        for row, reward in enumerate(rewards.tolist())
    ]
    groups = group_samples(rows, group_size)
    kept = [group for group in groups if check_reward_nonzero_std(group)]
    dropped = [group for group in groups if not check_reward_nonzero_std(group)]
    return {
        "kept_rows": [sample.index for group in kept for sample in group],
        "n_group_kept": len(kept),
        "n_group_filtered": len(dropped),
    }


NOT_WHOLE = Rule(
    reason="a group that is not whole is an error with us; AReaL then returns all rows",
    applies=lambda kwargs, _: kwargs["rewards"].numel() % kwargs["group_size"] != 0,
    raises=GenerationError,
    given={"rewards": lambda rewards: rewards[:-1]},
)
NOTHING_KEPT = Rule(
    reason="where all groups have equal rewards we keep none, and the loop asks for more prompts; AReaL then returns all rows",
    applies=lambda _, outputs: outputs["n_group_kept"] == 0,
    gives=lambda outputs: {**outputs, "kept_rows": []},
    given={"rewards": torch.zeros(6), "group_size": 2},
    theirs={"kept_rows": [0, 1, 2, 3, 4, 5], "n_group_kept": 0, "n_group_filtered": 3},
)


def overlong_penalty(
    rewards: Tensor, loss_mask: Tensor, overlong_tokens: int, overlong_penalty_factor: float, max_response_length: int
) -> Mapping[str, Any]:
    return {
        "rewards": penalize_overlong(
            rewards,
            torch.tensor(compute_response_lengths(loss_mask.tolist())),
            max_tokens=max_response_length,
            buffer=overlong_tokens,
            factor=overlong_penalty_factor,
            bounded=False,
        )
    }


MAPPINGS: dict[str, Parity] = {
    "areal_dynamic_sampling_v0_3_4": Parity(
        run=dynamic_sampling,
        ours="filters.check_reward_nonzero_std on samples.group_samples",
        rules=(NOT_WHOLE, NOTHING_KEPT),
    ),
    "areal_overlong_penalty": Parity(
        run=overlong_penalty,
        ours="advantages.penalize_overlong(bounded=False)",
        note="by default ours ends at factor, as in the paper",
    ),
}
NOT_OFFERED: dict[str, str] = {}
