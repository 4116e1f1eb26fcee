"""Tiny mixture-of-experts models, and ragged batches for them."""

from __future__ import annotations

from typing import Any

import torch

from rollouts.data.collate import collate_samples
from rollouts.types import LossOutput, Sample, TokenOutputs, TrainBatch

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 6},
    "olmoe": {"num_experts": 6},
    "granitemoe": {"num_local_experts": 6},
    "gpt_oss": {"num_local_experts": 6, "sliding_window": 8},
    "deepseek_v2": {**LATENT, **ROUTED, "num_key_value_heads": 4, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, **ROUTED, "num_key_value_heads": 4},
    "glm4_moe": ROUTED,
}


def create_expert_model(family: str = "qwen3_moe", seed: int = 0, **settings: Any) -> Any:
    """Return a causal language model whose experts differ and whose routers are far from uniform."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    wanted = {**SIZES, **FAMILIES.get(family, {}), **settings}
    if family in ("deepseek_v2", "deepseek_v3"):
        del wanted["head_dim"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**wanted)).float().eval()
        for name, parameter in model.named_parameters():
            if "experts" in name or "gate" in name or "router" in name:
                parameter.data = 0.5 * torch.randn(parameter.shape)
    return model


def draw_batch(seed: int = 0, lengths: tuple[int, ...] = (9, 4, 9, 12, 2, 7)) -> TrainBatch:
    """Ragged rows, in which every token but the first is trained."""
    generator = torch.Generator().manual_seed(seed)
    rows = [tuple(torch.randint(3, 48, (n,), generator=generator).tolist()) for n in lengths]
    return collate_samples([Sample(tokens=row, loss_mask=(0.0, *(1.0 for _ in row[1:])), index=i) for i, row in enumerate(rows)])


def no_loss(outputs: TokenOutputs, batch: TrainBatch) -> LossOutput:
    """Loss of 0: the gradient is that of the load-balancing loss."""
    return LossOutput(0.0 * outputs.log_probs.sum(), {})


def read_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of a model's parameters that have one other than 0."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
