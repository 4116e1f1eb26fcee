"""Tiny models whose sequences are still running when something happens to them."""

from __future__ import annotations

from typing import Any

import torch

from rollouts.testing import create_tiny_model


def create_endless_model(seed: int, **sizes: Any) -> Any:
    """A tiny model that differs much from seed to seed, has lively greedy answers, and hardly ever samples its end of text.

    Args:
        sizes: of create_tiny_model.
    """
    model: Any = create_tiny_model(seed=seed, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
        # one dimension of the residual stream tells the end of text from all other tokens, and nothing else
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.model.norm.weight[0] = 200
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 0.3
        embedding[1] = 0
        embedding[1, 0] = -0.3
    return model
