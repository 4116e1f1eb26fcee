"""create_tiny_model: a real Hugging Face model, randomly initialised and very small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def create_tiny_model(
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    seed: int = 0,
    architecture: Literal["qwen3", "llama"] = "qwen3",
    head_dim: int = 8,
) -> PreTrainedModel:
    """Return a causal language model of Hugging Face transformers: float32, on the CPU, in eval mode, random weights.

    Args:
        vocab_size: the ids 0 and 1 are pad and end of text, as in the character tokenizer.
        hidden_size: a multiple of head_dim; two heads share a key and value head if their number is even.
        num_layers: decoder layers.
        seed: same seed, same weights; torch's global generator is left as it was.
        architecture: "qwen3" (normalised queries and keys) or "llama".
        head_dim: width of a head; vLLM on a CPU needs at least 32.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    assert hidden_size % head_dim == 0, f"hidden_size is {hidden_size}, expected a multiple of head_dim, {head_dim}"
    num_heads = hidden_size // head_dim
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2 if num_heads % 2 == 0 else num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)) if architecture == "qwen3" else LlamaForCausalLM(LlamaConfig(**sizes))
    return model.eval()
