"""Decoder of the Llama and Qwen families as pure JAX functions over a mapping from Hugging Face's weight names to arrays.

Rows are packed: the real tokens of a batch follow each other in one sequence [N], and every layer but attention works on it. Attention
gathers the contexts into [R, L], so that a token sees only its own context; positions past the end of a context are never read, because
attention is causal. N, R and L are rounded up (round_up), so that batches of about the same size share one compiled program: by at most a
quarter each, beyond the smallest sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np

from rollouts.errors import ConfigError
from rollouts.models.forward.packing import PackedRows

if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    import torch
    from transformers import PreTrainedModel
else:
    with suppress(ImportError):  # an extra; backend.py raises with the install command before calling this module
        import jax
        import jax.numpy as jnp


Array: TypeAlias = "jax.Array"
Weights: TypeAlias = Mapping[str, "jax.Array"]

FAMILIES = ("llama", "qwen2", "qwen3")  # model types that this file implements
ROTARY_KINDS = ("default", "linear", "llama3")  # rotary embeddings with frequencies independent of the row's length
SMALLEST = (128, 8, 16)  # tokens N, contexts R and length L of the smallest program


@dataclass(frozen=True)
class DecoderConfig:
    """Configuration of a decoder. Hashable: it is part of the key of a compiled program."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    inverse_frequencies: tuple[float, ...]  # [D / 2] frequencies of the rotary embedding, radians per position
    rotary_scale: float = 1.0  # factor of its cosines and sines
    normalized_heads: bool = False  # RMSNorm over each query and key (Qwen3)
    tied: bool = False  # the output layer is the embedding


class PackedArrays(NamedTuple):
    """Packed batch of rounded sizes: N tokens, R contexts of at most L tokens, padded with zeros."""

    tokens: Any  # [N] int32
    positions: Any  # [N] int32, restarting at each context
    predicted: Any  # [N] bool: the previous position predicts the token; False at the first of a context and in padding
    temperatures: Any  # [N] float32
    gather: Any  # [R, L] int32: index in [N] of each context's tokens
    place: Any  # [N] int32: index of each token in the flattened [R * L]


def read_decoder_config(model: PreTrainedModel) -> DecoderConfig:
    """Read the configuration of a Hugging Face model. Raises ConfigError naming every feature that this module does not implement."""
    config: Any = model.config
    refused = _list_missing_features(model)
    if refused:
        raise ConfigError(
            f"the JAX backend cannot run this {type(model).__name__}: {'; '.join(refused)}. It implements the decoders "
            f"{', '.join(FAMILIES)}; use --backend.kind pytorch"
        )
    frequencies, scale = _read_rotary(config)
    return DecoderConfig(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        norm_eps=config.rms_norm_eps,
        inverse_frequencies=frequencies,
        rotary_scale=scale,
        normalized_heads=config.model_type == "qwen3",
        tied=bool(config.tie_word_embeddings),
    )


def _list_missing_features(model: PreTrainedModel) -> list[str]:
    config: Any = model.config
    if config.model_type not in FAMILIES:
        return [f"model_type is {config.model_type!r}"]
    if model.get_output_embeddings() is None:
        return ["it has no output layer over the vocabulary (it is no policy)"]
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    found = {
        f"hidden_act is {config.hidden_act!r}, not 'silu'": config.hidden_act not in ("silu", "swish"),
        f"layers of the kinds {kinds} (sliding_window is {getattr(config, 'sliding_window', None)})": bool(kinds),
        f"attention_dropout is {getattr(config, 'attention_dropout', 0.0)}": bool(getattr(config, "attention_dropout", 0.0)),
        f"rope_type is {_rotary(config)[0]!r}": _rotary(config)[0] not in ROTARY_KINDS,
        "its weights are quantized": getattr(config, "quantization_config", None) is not None,
        "some of its parameters are frozen": not all(p.requires_grad for p in cast("torch.nn.Module", model).parameters()),
    }
    return [text for text, holds in found.items() if holds]


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rotary(config: Any) -> tuple[str, float]:
    settings: Mapping[str, Any] = config.rope_parameters
    return str(settings.get("rope_type", "default")), float(settings["rope_theta"])


def _read_rotary(config: Any) -> tuple[tuple[float, ...], float]:
    """Read frequencies and scale of the rotary embedding; kinds other than the plain one by the functions of transformers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, theta = _rotary(config)
    if kind != "default":
        frequencies, scale = cast("Any", ROPE_INIT_FUNCTIONS)[kind](config, "cpu")
        return tuple(frequencies.tolist()), float(scale)
    size = _head_dim(config)
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return tuple((1.0 / np.float32(theta) ** exponents).tolist()), 1.0


def round_up(count: int, smallest: int) -> int:
    """Round a count up to the size of a compiled program: a multiple of `smallest` and of about count / 8; at most a quarter too large."""
    step = max(smallest, 1 << max(0, count.bit_length() - 3))
    return -(-count // step) * step


def pack_arrays(packed: PackedRows, temperatures: torch.Tensor | None) -> PackedArrays:
    """Pack the rows of a batch into numpy arrays of rounded sizes. temperatures: # [B] or None for 1."""
    starts, count = packed.cu_seqlens.numpy(), packed.tokens.numel()
    sizes = np.diff(starts)
    num_tokens, num_rows, length = (round_up(int(n), s) for n, s in zip((count, len(sizes), sizes.max()), SMALLEST, strict=True))
    tokens, positions, place, gather = (np.zeros(shape, np.int32) for shape in (num_tokens, num_tokens, num_tokens, (num_rows, length)))
    tokens[:count], positions[:count] = packed.tokens.numpy(), packed.position_ids.numpy()
    row_of_token = np.repeat(np.arange(len(sizes)), sizes)
    place[:count] = row_of_token * length + positions[:count]
    gather.reshape(-1)[place[:count]] = np.arange(count)
    tempered = np.ones(num_tokens, np.float32)
    if temperatures is not None:
        tempered[:count] = temperatures.numpy()[packed.flat_index.numpy() // packed.shape[1]]
    return PackedArrays(tokens, positions, (positions > 0), tempered, gather, place)


def compute_log_probs(
    weights: Weights, batch: PackedArrays, *, config: DecoderConfig, chunk_size: int, with_entropy: bool
) -> tuple[Array, Array | None]:
    """Compute the log-prob of each packed token given its context so far, and the entropy of that distribution; 0 at the first token.

    Logits exist for chunk_size positions at a time and are recomputed for the gradient.

    Returns: # [N] each, float32; no entropy without with_entropy.
    """
    hidden = run_decoder(weights, batch, config)
    head = weights["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
    predictors = jnp.roll(hidden, 1, axis=0)
    count = hidden.shape[0]
    size = min(chunk_size, count)
    num_chunks = -(-count // size)

    def split(values: Array) -> Array:
        padding = [(0, num_chunks * size - count), *((0, 0),) * (values.ndim - 1)]
        return jnp.pad(values, padding, constant_values=1).reshape(num_chunks, size, *values.shape[1:])

    @jax.checkpoint
    def read_chunk(chunk: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        states, targets, temperatures = chunk
        logits = _product(states, head) / temperatures[:, None]  # [C, V]
        log_p = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0]
        return chosen, -(jnp.exp(log_p) * log_p).sum(-1) if with_entropy else jnp.zeros(())

    log_probs, entropy = jax.lax.map(read_chunk, (split(predictors), split(batch.tokens), split(batch.temperatures)))
    masked = [jnp.where(batch.predicted, x.reshape(-1)[:count], 0.0) for x in ((log_probs, entropy) if with_entropy else (log_probs,))]
    return masked[0], masked[1] if with_entropy else None


def run_decoder(weights: Weights, batch: PackedArrays, config: DecoderConfig) -> Array:
    """Compute the last hidden states # [N, H], after the final norm."""
    angles = batch.positions[:, None].astype(jnp.float32) * jnp.asarray(config.inverse_frequencies, jnp.float32)  # [N, D / 2]
    rotary = tuple(jnp.tile(f(angles), 2)[:, None, :] * config.rotary_scale for f in (jnp.cos, jnp.sin))  # [N, 1, D]
    hidden = weights["model.embed_tokens.weight"][batch.tokens]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        normed = _normalize(hidden, weights[layer + "input_layernorm.weight"], config.norm_eps)
        hidden = hidden + _attend(weights, layer + "self_attn.", normed, rotary, batch, config)
        normed = _normalize(hidden, weights[layer + "post_attention_layernorm.weight"], config.norm_eps)
        gate, up = (_linear(weights, f"{layer}mlp.{name}_proj", normed) for name in ("gate", "up"))
        hidden = hidden + _linear(weights, layer + "mlp.down_proj", jax.nn.silu(gate) * up)
    return _normalize(hidden, weights["model.norm.weight"], config.norm_eps)


def _attend(weights: Weights, layer: str, hidden: Array, rotary: tuple[Array, ...], batch: PackedArrays, config: DecoderConfig) -> Array:
    """Causal attention inside each context: # [N, H] -> [N, H]."""
    query, key, value = (_linear(weights, f"{layer}{name}_proj", hidden).reshape(hidden.shape[0], -1, config.head_dim) for name in "qkv")
    if config.normalized_heads:
        query, key = (_normalize(x, weights[f"{layer}{name}_norm.weight"], config.norm_eps) for x, name in ((query, "q"), (key, "k")))
    query, key = (_rotate(x, rotary) for x in (query, key))
    query, key, value = (x[batch.gather] for x in (query, key, value))  # [R, L, heads, D]
    rows, length = batch.gather.shape
    grouped = query.reshape(rows, length, config.num_kv_heads, -1, config.head_dim)
    scores = jnp.einsum("rqhgd,rkhd->rhgqk", grouped, key, precision="highest") * config.head_dim**-0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("rhgqk,rkhd->rqhgd", shares, value, precision="highest")
    return _linear(weights, layer + "o_proj", mixed.reshape(rows * length, -1)[batch.place])


def _rotate(x: Array, rotary: tuple[Array, ...]) -> Array:
    """Rotary position embedding: # [N, heads, D]; the halves of D are the two coordinates."""
    cos, sin = rotary
    left, right = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate((-right, left), axis=-1) * sin


def _normalize(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis."""
    return weight * (x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps))


def _linear(weights: Weights, name: str, x: Array) -> Array:
    """x @ W.T, plus b if the layer has one."""
    out = _product(x, weights[f"{name}.weight"])
    bias = weights.get(f"{name}.bias")
    return out if bias is None else out + bias


def _product(x: Array, weight: Array) -> Array:
    """x @ W.T in full float32, on accelerators, too."""
    return jnp.matmul(x, weight.T, precision="highest")
