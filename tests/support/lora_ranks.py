"""Program of each of several ranks for test_lora.py, which runs every case once and writes its findings as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from samples import draw_batch
from torch.distributed.tensor import DTensor

from rollouts.algorithms.losses import sft_loss
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.lora.files import fingerprint_base
from rollouts.backends.ranks.distributed import init_distributed, leave_distributed
from rollouts.errors import CheckpointError
from rollouts.models.weights import adapted_layers, adapter_of

LORA = LoRAConfig(rank=3, alpha=12.0)  # 3 rows on two ranks: shards are not equal
SETTINGS = {"lr": 1e-2, "eps": 1e-5}  # an eps above rounding: with a smaller one a gradient that is only rounding moves a weight as far


def draw_step(seed: int = 0):
    return draw_batch(seed, (7,) if seed % 4 == 2 else (5, 9, 5, 3))


def train(backend, steps):
    return [(backend.forward_backward(draw_step(step), sft_loss).value, backend.optim_step().value) for step in steps]


def select_log_probs(outputs):
    return outputs.log_probs


def main(folder: Path) -> None:
    """
    Args:
        folder: has "model", and "single", a checkpoint of one process after 3 steps, and "wrong_base", one of a base that is not in it.
            "two_ranks" gets a checkpoint of these ranks after 5 steps.
    """
    ranks = init_distributed(timeout_s=60, init_method="env://")
    backend = create_fsdp_backend(folder / "model", **SETTINGS, ranks=ranks, lora=LORA)
    parts = [part for _, layer in adapted_layers(backend.model) for part in adapter_of(layer)]
    found = {
        "sharded": all(isinstance(part, DTensor) and part.to_local().numel() < part.numel() for part in parts),
        "trained": sum(p.numel() for p in backend.model.parameters() if p.requires_grad),
        "fingerprint": fingerprint_base(backend.model),
        "history": train(backend, range(5)),
        "log_probs": backend.forward(draw_step(), select_log_probs).value.tolist(),
        "reference": backend.forward_base(draw_step(), select_log_probs).value.tolist(),
    }
    weights = backend.get_weights().value
    if ranks.rank == 0:
        torch.save(weights, folder / "weights.pt")
    backend.save_checkpoint(folder / "two_ranks")
    found["rest"] = train(backend, range(5, 7))
    backend.load_checkpoint(folder / "single")
    found["resumed"] = train(backend, range(3, 5))
    backend.load_checkpoint(folder / "two_ranks")
    found["again"] = train(backend, range(5, 7))
    before = backend.get_weights().value
    try:
        backend.load_checkpoint(folder / "wrong_base")
    except CheckpointError as error:
        found["refused"] = str(error)
    found["kept"] = all(torch.equal(value, before[name]) for name, value in backend.get_weights().value.items())
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(found))
    leave_distributed()
