"""A model in training: the verbs of a training client over a PyTorch backend. Methods compute at once; one thread at a time calls them."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.lora.adapters import linear_layers
from rollouts.backends.lora.config import ALL_LINEAR, LoRAConfig
from rollouts.backends.optim.updates import UpdateCounts
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.errors import ConfigError, DataError
from rollouts.tinker.config import TinkerConfig
from rollouts.tinker.losses import LOG_PROBS, NamedLoss
from rollouts.tinker.rows import check_data, collate_data, split_data, split_log_probs
from rollouts.tinker.wire.messages import PassRequest, write_pass_output
from rollouts.tinker.wire.requests import AdamParams, AdapterWish
from rollouts.types import LossFn, TokenOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TrainedModel:
    """Backend of one training client, and whether its gradient is whole."""

    def __init__(self, backend: PyTorchTrainingBackend, lora: LoRAConfig | None, config: TinkerConfig) -> None:
        """
        Args:
            lora: adapters that are trained; None = all weights are.
        """
        self.lora = lora
        self._backend, self._config = backend, config
        self._has_gradient = False
        self._failure: str | None = None  # reason for which the gradient since the last update is not whole

    def run_pass(self, request: PassRequest, loss: NamedLoss, loss_fn: LossFn) -> bytes:
        """Run a pass, with its gradient unless the request has forward_only. Raises DataError, before anything is computed."""
        try:
            check_data(request.data, request.loss_fn, loss, self._backend.limits)
            log_probs: list[NDArray[np.float32]] = []
            total = 0.0
            for part in split_data(request.data, self._config.max_tokens_per_pass):
                batch = collate_data(part, loss)
                if request.forward_only:
                    column = self._backend.forward(batch, lambda outputs: outputs.log_probs).value
                    total += float(loss_fn(TokenOutputs(log_probs=column), batch)[0])
                else:
                    total += self._backend.forward_backward(batch, loss_fn).value["loss"]
                    self._has_gradient = True
                    column = self._backend.take_recorded().value[-1].columns[LOG_PROBS]
                log_probs += split_log_probs(column, part)
        except Exception as error:
            if not request.forward_only:
                self.note_failure(f"a forward_backward of this step failed: {str(error)[:500]}")
            raise
        return write_pass_output(log_probs, {"loss:sum": total})

    def note_failure(self, reason: str) -> None:
        """Note that a part of the gradient is missing, or may be: the next update is refused, with this sentence."""
        self._failure = self._failure or reason

    def update(self, params: AdamParams) -> Mapping[str, float]:
        """Update the weights by AdamW with decay on all that is trained, and clear the gradient.

        Raises: DataError without a whole gradient, which is then dropped; BadNumberError.
        """
        failure, has_gradient = self._failure, self._has_gradient
        self._failure, self._has_gradient = None, False
        if failure is not None or not has_gradient:
            self._backend.drop_gradient()
            raise DataError(f"optim_step: {failure or 'forward_backward was not called since the last one'}")
        for group in self._backend.optimizer.param_groups:
            group["lr"], group["betas"] = params.learning_rate, (params.beta1, params.beta2)
            group["eps"], group["weight_decay"] = params.eps, params.weight_decay
        self._backend.max_grad_norm = params.grad_clip_norm if params.grad_clip_norm > 0 else math.inf
        return dict(self._backend.optim_step().value)

    def save(self, directory: Path) -> None:
        """Write all state of training into an existing directory."""
        self._backend.save_checkpoint(directory)

    def load(self, directory: Path, *, optimizer: bool) -> None:
        """Restore a state that save has written; without the optimizer its moments begin anew. Raises CheckpointError."""
        self._backend.load_checkpoint(directory)
        self._has_gradient, self._failure = False, None
        if not optimizer:
            self._backend.optimizer.state.clear()
            self._backend.counts = UpdateCounts()

    def export(self, directory: Path) -> None:
        """Write the weights as a model directory, adapters merged."""
        self._backend.export_weights(directory)

    def take_weights(self) -> Mapping[str, Any]:
        """Copy the weights, adapters merged."""
        return self._backend.get_weights().value

    def describe(self, user_metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint tells of its model, as JSON."""
        lora = None if self.lora is None else asdict(self.lora)
        return {"base_model": self._config.model_name, "lora": lora, "user_metadata": dict(user_metadata), "saved_at": time.time()}


def create_trained_model(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, lora: LoRAConfig | None, config: TinkerConfig
) -> TrainedModel:
    """Make a model to train of a base model, whose frozen weights adapters share. Raises ConfigError without the package peft,
    or for a base in another precision than float32.
    """
    half = next((name for name, weight in cast("Any", base).named_parameters() if weight.dtype != torch.float32), None)
    if half is not None:  # before adapters would convert the weights that all clients share
        raise ConfigError(f"{half} of the served model is not in float32, which training needs: load the model in float32, without dtype=")
    model = share_weights(base)
    if lora is None:
        model = copy.deepcopy(base)
        cast("Any", model).requires_grad_(True)
    device = next(base.parameters()).device
    backend = create_pytorch_backend(
        model, device=device, compute_dtype=config.compute_dtype, tokenizer=tokenizer, lora=lora, lr=1e-4, max_grad_norm=math.inf
    )
    return TrainedModel(backend, lora, config)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the modules of a model, not its parameters: both models have the same ones."""
    module = cast("Any", model)
    return copy.deepcopy(model, {id(parameter): parameter for parameter in module.parameters()})


def choose_adapters(wish: AdapterWish, base: PreTrainedModel, config: TinkerConfig) -> LoRAConfig:
    """Return the configuration of the adapters that a client asks for. Raises DataError if no layer would get one."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    if not (wish.train_attn and wish.train_mlp):
        targets = tuple(name for name in linear_layers(base) if (wish.train_attn if is_attention(name) else wish.train_mlp))
    if not targets:
        raise DataError(
            "lora_config has train_attn and train_mlp false: adapters of this server are for layers below the output layer, so one of the "
            "two must be true (train_unembed has no effect)"
        )
    seed = config.seed if wish.seed is None else wish.seed
    return LoRAConfig(rank=wish.rank, alpha=config.lora_alpha, target_modules=targets, seed=seed)


def is_attention(name: str) -> bool:
    """Whether a layer, by its name, is a part of attention; linear layers that are not are parts of an MLP."""
    return "attn" in name or "attention" in name
