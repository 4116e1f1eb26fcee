"""Program of each of two ranks for test_distributed.py: steps of models with their own attention, on rank 0 also in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from samples import draw_batch

from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.ranks.distributed import init_distributed, leave_distributed

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4},
    "gpt_oss": {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}
LENGTHS = ((5, 9, 5, 3, 12, 7, 5), (6,), (8, 8, 8, 2))  # ranks have other numbers of distinct lengths; one has no rows in the second


def create_model(family: str) -> Any:
    """Return a tiny random model."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family]})).float()


def train(backend: Any, *, replays: bool) -> list[dict[str, float]]:
    """Return the metrics of a step on each batch, and the mean log-prob after it.

    Args:
        replays: give each token two experts at random in each of three routers.
    """
    found = []
    for seed, lengths in enumerate(LENGTHS):
        batch = replace(draw_batch(seed, lengths, vocab_size=50), dropout=False)
        if replays:
            scores = torch.rand(*batch.tokens.shape, 3, 4, generator=torch.Generator().manual_seed(seed))
            batch = replace(batch, routed_experts=scores.argsort(-1)[..., :2].to(torch.int16))
        metrics = backend.forward_backward(batch, sft_loss).value | backend.optim_step().value
        log_probs = backend.forward(batch, lambda outputs: outputs.log_probs).value
        found.append({**metrics, "log_prob": float(log_probs.sum() / sum(lengths))})
    return found


def main(folder: Path) -> None:
    """Write rank_N.json."""
    ranks = init_distributed("cpu")
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for family in FAMILIES:
        settings = {"lr": 1e-3, "eps": 1e-5}
        for checkpointing in (False, True):
            config = FSDPConfig(gradient_checkpointing=checkpointing)
            name = f"{family}, recomputed: {checkpointing}"
            backend = create_fsdp_backend(create_model(family), ranks=ranks, config=config, **settings)
            found[name] = {"ranks": train(backend, replays=family == "gpt_oss")}
            if ranks.rank == 0:
                backend = create_pytorch_backend(create_model(family), **settings)
                found[name]["single"] = train(backend, replays=family == "gpt_oss")
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(found))
    leave_distributed()
