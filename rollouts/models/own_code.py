"""Models whose own code in transformers computes rows in a way of its own: what is mended before a pass, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.models.forward import get_decoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def mend_own_code(model: PreTrainedModel) -> None:
    """Let a model compute what its own code cannot, in place; repeating it is harmless. To be called before the first pass.

    The recurrence of xLSTM mixes float32 with the dtype of half-precision weights, and fails in rows of a chunk or more. It is computed
    in float32 there, and its result is rounded to the dtype of the weights.

    Raises: ConfigError for a model whose results depend on the length of a row, on its pad tokens, or on random numbers.
    """
    decoder: Any = get_decoder(model)
    kind = type(model).__name__
    if getattr(decoder, "attention_type", None) == "block_sparse":  # BigBird's decoder leaves it behind in its first short row
        raise ConfigError(
            f"{kind} attends to random blocks of tokens, also later ones, in long rows (attention_type = 'block_sparse' in its "
            "config.json): set attention_type to 'original_full' there"
        )
    if "lengths" in inspect.signature(decoder.forward).parameters:  # XLM, Flaubert
        raise ConfigError(
            f"{kind} takes each pad token of a row (pad_token_id = {model.config.pad_token_id}) for one that its end lacks, so a token "
            "that was sampled changes what is read after it. Use another model"
        )
    if hasattr(model.config, "lsh_attn_chunk_length"):
        raise ConfigError(
            f"{kind} is Reformer: it fills rows up to the sizes of its chunks, and attends to tokens that random hashes choose, so a "
            "row has no log-probs that could be computed twice. Use another model"
        )
    for module in cast("torch.nn.Module", model).modules():
        if type(module).__name__ == "xLSTMBackend":  # transformers' own; the package xlstm has kernels that need no help
            for name in ("_inference_fn", "_train_fn"):
                kernel: Any = getattr(module, name)
                if getattr(kernel, "func", None) is not _compute_widened:
                    setattr(module, name, partial(_compute_widened, kernel))


def _compute_widened(kernel: Callable[..., Any], *, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Any:
    """Call a kernel of xLSTM, in float32 if its inputs are in half precision and autocast does not choose the dtypes of its products."""
    dtype = query.dtype
    if dtype == torch.float32 or torch.is_autocast_enabled(query.device.type):
        return kernel(query=query, key=key, value=value, **more)
    more = {name: x.float() if isinstance(x, Tensor) else x for name, x in more.items()}
    found = kernel(query=query.float(), key=key.float(), value=value.float(), **more)
    return (found[0].to(dtype), *found[1:]) if isinstance(found, tuple) else found.to(dtype)
