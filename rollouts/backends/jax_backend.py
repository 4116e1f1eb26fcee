"""The JAX backend: a decoder, its gradient and AdamW in compiled JAX functions; losses, batches and files as everywhere else.

It needs the extra "jax" (pip install 'rollouts[jax]'); importing this module does not. What it computes with is float32, with matrix
products in full precision, on JAX's default device.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from rollouts.backends.factory import open_model, parse_dtype
from rollouts.backends.futures import ImmediateTrainFuture
from rollouts.backends.jax_model import read_decoder_config
from rollouts.backends.jax_steps import (
    ModelSpec,
    accumulate_gradient,
    apply_update,
    create_jax_state,
    evaluate_batch,
    flatten_optimizer,
    restore_optimizer,
    to_array,
    to_tensor,
)
from rollouts.backends.model_pass import move_batch
from rollouts.backends.optimizers import AdamW, ScheduledAdamWArguments, create_rule, takes
from rollouts.backends.protocol import OutputFn
from rollouts.backends.sharded_weights import create_on_meta
from rollouts.backends.token_spec import TokenSpec, describe_tokens
from rollouts.backends.trainer_files import finish_export, read_trainer_state, write_trainer_state
from rollouts.backends.updates import UpdateCounts, check_skipped_updates
from rollouts.backends.weight_gather import describe_model_weights
from rollouts.backends.weight_stream import check_architecture, first_names
from rollouts.errors import CheckpointError, ConfigError
from rollouts.logprobs import token_log_probs
from rollouts.model_weights import check_weights_fit, read_weights
from rollouts.packing import check_same, native_attention
from rollouts.types import LossFn, TrainBatch
from rollouts.weight_plan import WeightSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KIND = "jax"
CPU = torch.device("cpu")  # where losses are evaluated
MODULES = ("jax", "optax")


def require_jax() -> None:
    """Raise ConfigError with the command that installs what is missing."""
    missing = [name for name in MODULES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the JAX backend needs {' and '.join(missing)}, which this Python has not: pip install 'rollouts[jax]'")


class JAXTrainingBackend:
    """A TrainingBackend and CheckpointingBackend whose whole state is one value, `state`, replaced by each step.

    The steps are the pure functions of rollouts.backends.jax_steps: what a backend adds is counting and files. Losses are the functions on
    PyTorch tensors that every backend takes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rule: AdamW,
        *,
        chunk_size: int = 1024,
        tokenizer: PreTrainedTokenizerBase | None = None,
        weight_version: int = 0,
        max_skipped_updates: int = 10,
    ) -> None:
        """
        Args:
            model: a causal language model of a family that jax_model implements; its weights are copied, it is not changed.
            rule: the optimizer.
            chunk_size: tokens whose logits exist at the same time.
            tokenizer: saved beside the weights, so that a checkpoint is a complete model directory.
            weight_version: restored from checkpoints; who syncs weights to engines counts it.
            max_skipped_updates: updates in a row with a non-finite gradient before BackendError.

        Raises: ConfigError without JAX, for a model with features that are not implemented, and for one whose log-probs come out different.
        """
        require_jax()
        self._spec = ModelSpec(read_decoder_config(model), chunk_size)
        self.rule = rule
        self.tokenizer = tokenizer
        self.weight_version = weight_version
        self._max_skipped_updates = max_skipped_updates
        self._skeleton = _create_skeleton(model)
        self._first_names = first_names(cast("dict[str, Tensor]", cast("Any", self._skeleton).state_dict(keep_vars=True)))
        self._generation_config: Any = copy.deepcopy(model.generation_config)
        own = cast("dict[str, Tensor]", model.state_dict())
        self.state = create_jax_state({name: to_array(own[name]) for name in dict.fromkeys(self._first_names.values())}, rule)
        self._check_log_probs(model)

    @property
    def token_spec(self) -> TokenSpec:
        """Which tokens the model knows, to compare with those of another model."""
        return describe_tokens(self._skeleton, self.tokenizer)

    @property
    def computes(self) -> frozenset[str]:
        """See DescribesOutputs."""
        return frozenset({"log_probs", "entropy"})

    # -- TrainingBackend

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[Tensor]:
        """output_fn of the model's outputs, without gradient, on the CPU."""
        outputs = evaluate_batch(self.state.weights, move_batch(batch, CPU), self._spec, with_entropy=with_entropy)
        return ImmediateTrainFuture(output_fn(outputs), "forward")

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[dict[str, float]]:
        """Add the gradient of loss_fn on this batch."""
        batch = move_batch(batch, CPU)
        self.state, metrics = accumulate_gradient(self.state, batch, loss_fn, self._spec, with_entropy=with_entropy)
        return ImmediateTrainFuture(metrics, "forward_backward")

    def optim_step(self) -> ImmediateTrainFuture[dict[str, float]]:
        """See apply_update. Raises: BackendError after max_skipped_updates skipped updates in a row."""
        self.state, metrics = apply_update(self.state, self.rule)
        check_skipped_updates(self.state.counts, metrics["grad_norm"], max_skipped_updates=self._max_skipped_updates)
        return ImmediateTrainFuture(metrics, "optim_step")

    def get_weights(self) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """A copy of the weights on the CPU, tied ones under each of their names."""
        own = {name: to_tensor(value) for name, value in self.state.weights.items()}
        return ImmediateTrainFuture({name: own[first] for name, first in self._first_names.items()}, "get_weights")

    def load_weights(self, weights: Mapping[str, Tensor]) -> ImmediateTrainFuture[None]:
        """Replace the weights. Raises CheckpointError if a name or shape does not fit."""
        check_weights_fit(self._skeleton, weights, "the given weights")
        self._replace_weights(weights)
        return ImmediateTrainFuture(None, "load_weights")

    # -- StreamsWeights

    def describe_weights(self) -> ImmediateTrainFuture[tuple[WeightSpec, ...]]:
        """Names, dtypes and shapes of the weights."""
        return ImmediateTrainFuture(describe_model_weights(self._skeleton), "describe_weights")

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Copies of the weights of these names, on the CPU: PyTorch's devices are none of JAX's."""
        own = self.state.weights
        return ImmediateTrainFuture({name: to_tensor(own[self._first_names[name]]) for name in names}, "gather_weights")

    # -- CheckpointingBackend

    def save_checkpoint(self, directory: Path) -> ImmediateTrainFuture[None]:
        """Write the model directory, and the rest of the state beside it."""
        self.export_weights(directory)
        state = {
            "optimizer": flatten_optimizer(self.state.optimizer),
            "num_updates": self.state.counts.num_updates,
            "num_skipped_in_a_row": self.state.counts.num_skipped_in_a_row,
            "weight_version": self.weight_version,
        }
        write_trainer_state(directory, KIND, state)
        return ImmediateTrainFuture(None, "save_checkpoint")

    def load_checkpoint(self, directory: Path) -> ImmediateTrainFuture[None]:
        """Restore what save_checkpoint wrote. Raises CheckpointError saying what does not fit."""
        check_architecture(self._skeleton, directory)
        weights = read_weights(directory)
        check_weights_fit(self._skeleton, weights, str(directory))
        saved = read_trainer_state(directory, KIND)
        try:
            optimizer = restore_optimizer(self.state.optimizer, saved["optimizer"])
        except ValueError as error:
            raise CheckpointError(f"the optimizer state in {directory} is of another optimizer or model: {error}") from error
        self._replace_weights(weights)
        counts = UpdateCounts(int(saved["num_updates"]), int(saved["num_skipped_in_a_row"]))
        self.state = replace(self.state, optimizer=optimizer, gradients=None, counts=counts)
        self.weight_version = int(saved["weight_version"])
        return ImmediateTrainFuture(None, "load_checkpoint")

    def export_weights(self, directory: Path) -> ImmediateTrainFuture[None]:
        """Write config, weights (safetensors, in one file) and tokenizer in the layout that from_pretrained and inference servers open."""
        config = copy.deepcopy(self._skeleton.config)
        config.architectures = [type(self._skeleton).__name__]
        config.dtype = torch.float32
        config.save_pretrained(directory)
        if self._generation_config is not None:
            self._generation_config.save_pretrained(directory)
        weights = {name: to_tensor(value) for name, value in self.state.weights.items()}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        finish_export(self.tokenizer, directory)
        return ImmediateTrainFuture(None, "export_weights")

    # -- parts

    def _replace_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take weights that fit; tied ones may come under any of their names."""
        given = {self._first_names[name]: to_array(value) for name, value in weights.items()}
        self.state = replace(self.state, weights={name: given[name] for name in self.state.weights})

    def _check_log_probs(self, model: PreTrainedModel) -> None:
        """Raise ConfigError if the model itself gives other log-probs, on random tokens."""
        tokens = torch.randint(0, int(cast("Any", model).config.vocab_size), (2, 9), generator=torch.Generator().manual_seed(0))
        lengths, zeros = torch.tensor([9, 5]), torch.zeros(2)
        ids, trained = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
        batch = TrainBatch(
            tokens=tokens, lengths=lengths, loss_mask=torch.ones(tokens.shape), rewards=zeros, group_ids=ids, trainable=trained
        )
        expected = _run_natively(model, tokens) * (torch.arange(9) < lengths[:, None])
        found = evaluate_batch(self.state.weights, batch, self._spec).log_probs
        check_same(found, expected, f"{type(model).__name__} gives other log-probs in JAX than in PyTorch")


@takes(ScheduledAdamWArguments)
def create_jax_backend(
    model: str | Path | PreTrainedModel,
    *,
    compute_dtype: str | torch.dtype = "float32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    **adamw: Unpack[ScheduledAdamWArguments],
) -> JAXTrainingBackend:
    """A JAX backend with AdamW and a schedule.

    Args:
        model: a model, or the path of a Hugging Face directory (its tokenizer is loaded, too, unless one is given).
        compute_dtype: float32.
        lr and the others of AdamW and its schedule: see optimizers.ScheduledAdamWArguments.

    Raises: ConfigError, see JAXTrainingBackend.
    """
    rule = create_rule(**adamw)
    require_jax()
    if parse_dtype(compute_dtype) != torch.float32:
        raise ConfigError(
            f"compute_dtype is {compute_dtype}: the JAX backend computes in float32 only; use that, or --backend.kind pytorch"
        )
    model, tokenizer = open_model(model, tokenizer)
    return JAXTrainingBackend(model, rule, tokenizer=tokenizer)


def _create_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without its numbers: names, shapes and ties of its weights, and its configuration."""
    return create_on_meta(lambda: type(model)(copy.deepcopy(model.config)))


def _run_natively(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Log-probs of the model as transformers runs it; it is left as it was. Returns # [B, T] on the CPU."""
    config: Any = model.config
    before, was_training = config._attn_implementation, model.training
    model.eval()
    try:
        with torch.no_grad(), native_attention(model):
            device = next(model.parameters()).device
            logits = cast("Any", model)(input_ids=tokens.to(device)).logits
    finally:
        model.set_attn_implementation(before)
        model.train(was_training)
    return token_log_probs(logits, tokens.to(device)).cpu()
