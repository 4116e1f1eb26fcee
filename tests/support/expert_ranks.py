"""Program of each of two ranks for test_expert_balance.py: steps of a mixture of experts, and rank 0 also the same in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
import trio
from expert_models import create_expert_model, draw_batch

from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.ranks.distributed import init_distributed, leave_distributed
from rollouts.training.steps import submit_optimizer_step

LENGTHS = ((9, 4, 9, 12, 2, 7), (5,))  # in the second step one rank has no rows


async def train(backend, replays: bool) -> list[dict[str, float]]:
    """Metrics of a step of each kind of batch."""
    found = []
    for seed, lengths in enumerate(LENGTHS):
        batch = draw_batch(seed, lengths)
        if replays:
            noise = torch.rand(*batch.tokens.shape, 3, 6, generator=torch.Generator().manual_seed(seed))
            batch = replace(batch, routed_experts=noise.argsort(-1)[..., :2].to(torch.int16))
        pending = submit_optimizer_step(backend, batch, sft_loss, weigh=token_mean, max_tokens_per_microbatch=14, router_balance_coef=0.7)
        found.append(await pending.result())
    return found


def main(folder: Path) -> None:
    """Write rank_N.json."""
    ranks = init_distributed("cpu")
    found: dict[str, list[dict[str, float]]] = {"ranks": [], "single": []}
    for checkpointing, replays in ((False, False), (True, False), (True, True)):
        config = FSDPConfig(gradient_checkpointing=checkpointing)
        backend = create_fsdp_backend(create_expert_model(), ranks=ranks, config=config, lr=1e-3, max_grad_norm=1e9)
        found["ranks"] += trio.run(train, backend, replays)
        if ranks.rank == 0:
            found["single"] += trio.run(train, create_pytorch_backend(create_expert_model(), lr=1e-3, max_grad_norm=1e9), replays)
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(found))
    leave_distributed()
