"""JAX backend: a decoder, its gradient and AdamW in compiled JAX functions; losses, batches and files as in the other backends.

It needs the extra "jax" (pip install 'rollouts-rl[jax]'); importing this module does not. It computes in float32, with matrix products in
full precision, on JAX's default device.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Unpack, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from rollouts.algorithms.logprobs import choose_chunk_size, token_log_probs
from rollouts.backends.fsdp.load import create_on_meta
from rollouts.backends.futures import ImmediateTrainFuture
from rollouts.backends.jax.model import read_decoder_config
from rollouts.backends.jax.steps import (
    JAXTrainState,
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
from rollouts.backends.optim.optimizers import AdamW, ScheduledAdamWArguments, create_rule, takes
from rollouts.backends.optim.updates import check_skipped, check_updated, read_counts
from rollouts.backends.protocol import BackendFeature, OutputFn
from rollouts.backends.pytorch.files import cast_weights, check_written, finish_export, read_trainer_state, write_trainer_state
from rollouts.backends.unread_metrics import MetricReads, RecordedTokens, list_recorded
from rollouts.config import BadNumbers
from rollouts.data.model_limits import read_limits
from rollouts.errors import CheckpointError, ConfigError
from rollouts.models.forward.passes import admit_batch
from rollouts.models.loading import open_model, parse_dtype
from rollouts.models.prepare import check_same, native_attention, probe_attention
from rollouts.models.tokens import TokenSpec, describe_tokens
from rollouts.models.weights import check_architecture, check_weights_fit, describe_model_weights, first_names, read_weights
from rollouts.types import LossFn, TrainBatch
from rollouts.weight_specs import WeightSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


KIND = "jax"
CPU = torch.device("cpu")  # device of losses
MODULES = ("jax", "optax")


def require_jax() -> None:
    """Raise ConfigError with the install command if a package is missing."""
    missing = [name for name in MODULES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the JAX backend needs {' and '.join(missing)}, which this Python has not: pip install 'rollouts-rl[jax]'")


class JAXTrainingBackend:
    """TrainingBackend and CheckpointingBackend whose whole state is one value, `state`, replaced by each step.

    The steps are the pure functions of rollouts.backends.jax.steps; the backend adds counting and files. Losses are functions on PyTorch
    tensors, as for every backend.
    """

    features = frozenset({
        BackendFeature.CHECKPOINTS, BackendFeature.STAGED_CHECKPOINTS, BackendFeature.WEIGHT_STREAM, BackendFeature.OUTPUTS,
        BackendFeature.TOKENS, BackendFeature.RECORDS,
    })  # fmt: skip

    def __init__(
        self,
        model: PreTrainedModel,
        rule: AdamW,
        *,
        chunk_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        weight_version: int = 0,
    ) -> None:
        """
        Args:
            model: a causal language model of a family that model.py implements; not changed, its weights are copied.
            rule: the optimizer.
            chunk_size: tokens whose logits exist at the same time; None = logprobs.choose_chunk_size.
            tokenizer: saved beside the weights, so that a checkpoint is a complete model directory.
            weight_version: restored from checkpoints; incremented by the code that syncs weights to engines.

        Raises: ConfigError if JAX is missing, the model has features that are not implemented, or its log-probs differ from PyTorch's.
        """
        require_jax()
        self.limits = read_limits(model, tokenizer)
        chunk_size = choose_chunk_size(self.limits.num_embeddings, "cpu") if chunk_size is None else chunk_size
        self._spec = ModelSpec(read_decoder_config(model), chunk_size)
        self.rule = rule
        self.tokenizer = tokenizer
        self.weight_version = weight_version
        self._reads = MetricReads()  # keeps records alone: metrics are on the CPU
        self._skeleton = _create_skeleton(model)
        self._first_names = first_names(cast("dict[str, Tensor]", cast("Any", self._skeleton).state_dict(keep_vars=True)))
        self._generation_config: Any = copy.deepcopy(model.generation_config)
        own = cast("dict[str, Tensor]", model.state_dict())
        self.state = create_jax_state({name: to_array(own[name]) for name in dict.fromkeys(self._first_names.values())}, rule)
        self._check_log_probs(model)

    @property
    def token_spec(self) -> TokenSpec:
        """Vocabulary of the model, for comparison with another model's."""
        return describe_tokens(self._skeleton, self.tokenizer)

    @property
    def computes(self) -> frozenset[str]:
        """Fields of TokenOutputs that this backend fills; None = not known."""
        return frozenset({"log_probs", "entropy"})

    # -- TrainingBackend

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[Tensor]:
        """Return output_fn of the model's outputs, without gradient, on the CPU."""
        outputs = evaluate_batch(self.state.weights, admit_batch(batch, self.limits, CPU), self._spec, with_entropy=with_entropy)
        return ImmediateTrainFuture(output_fn(outputs), "forward")

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[dict[str, float]]:
        """Add the gradient of loss_fn on this batch."""
        recorded = list_recorded(batch)
        batch = admit_batch(batch, self.limits, CPU)
        self.state, metrics = accumulate_gradient(self.state, batch, loss_fn, self._spec, with_entropy=with_entropy)
        metrics = self._reads.keep_recorded(metrics, recorded)
        return ImmediateTrainFuture({name: float(value) for name, value in metrics.items()}, "forward_backward")

    def optim_step(self) -> ImmediateTrainFuture[dict[str, float]]:
        """Run apply_update. Raises BadNumberError for a non-finite parameter, and after max_skipped skipped updates in a row."""
        state, metrics = apply_update(self.state, self.rule)
        self.state = replace(self.state, gradients=None)  # also if the run ends here, before the update counts
        if metrics["update_skipped"]:
            check_skipped(state.counts, "gradient", metrics, self.rule.bad_numbers.max_skipped)
        self.state = state
        check_updated(((name, to_tensor(value)) for name, value in self.state.weights.items()), self.state.counts, metrics)
        return ImmediateTrainFuture(metrics, "optim_step")

    def get_weights(self) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Copy the weights to the CPU, tied ones under each of their names."""
        own = {name: to_tensor(value) for name, value in self.state.weights.items()}
        return ImmediateTrainFuture({name: own[first] for name, first in self._first_names.items()}, "get_weights")

    def load_weights(self, weights: Mapping[str, Tensor]) -> ImmediateTrainFuture[None]:
        """Replace the weights. Raises CheckpointError if a name or shape does not fit."""
        check_weights_fit(self._skeleton, weights, "the given weights")
        self._replace_weights(weights)
        return ImmediateTrainFuture(None, "load_weights")

    # -- BackendFeature.RECORDS

    def take_recorded(self) -> ImmediateTrainFuture[tuple[RecordedTokens, ...]]:
        """Return what losses told of the tokens of recorded rows since the last call."""
        return ImmediateTrainFuture(self._reads.take_recorded(), "take_recorded")

    # -- BackendFeature.WEIGHT_STREAM

    def describe_weights(self) -> ImmediateTrainFuture[tuple[WeightSpec, ...]]:
        """Return names, dtypes and shapes of the weights."""
        return ImmediateTrainFuture(describe_model_weights(self._skeleton), "describe_weights")

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Return copies of the weights with these names, on the CPU: PyTorch and JAX share no other device."""
        own = self.state.weights
        return ImmediateTrainFuture({name: to_tensor(own[self._first_names[name]]) for name in names}, "gather_weights")

    # -- BackendFeature.CHECKPOINTS

    def save_checkpoint(self, directory: Path | str) -> ImmediateTrainFuture[None]:
        """Write the model directory, and the other state beside it."""
        self.stage_checkpoint(directory).value()
        return ImmediateTrainFuture(None, "save_checkpoint")

    def stage_checkpoint(self, directory: Path | str) -> ImmediateTrainFuture[Callable[[], None]]:
        """Return the function that writes the present state. Nothing is copied: later steps make new arrays."""
        return ImmediateTrainFuture(partial(self._write, self.state, self.weight_version, Path(directory)), "stage_checkpoint")

    def load_checkpoint(self, directory: Path | str) -> ImmediateTrainFuture[None]:
        """Restore a checkpoint of save_checkpoint. Raises CheckpointError naming the mismatch."""
        directory = Path(directory)
        check_architecture(self._skeleton, directory)
        weights = read_weights(directory)
        check_weights_fit(self._skeleton, weights, str(directory))
        saved = read_trainer_state(directory, KIND)
        try:
            optimizer = restore_optimizer(self.state.optimizer, saved["optimizer"])
        except ValueError as error:
            raise CheckpointError(f"the optimizer state in {directory} is of another optimizer or model: {error}") from error
        self._replace_weights(weights)
        self.state = replace(self.state, optimizer=optimizer, gradients=None, counts=read_counts(saved))
        self.weight_version = int(saved["weight_version"])
        return ImmediateTrainFuture(None, "load_checkpoint")

    def export_weights(self, directory: Path | str, *, dtype: str | None = None) -> ImmediateTrainFuture[None]:
        """Write config, weights (safetensors, in one file) and tokenizer in the layout that from_pretrained and inference servers open."""
        self._export(self.state, Path(directory), dtype)
        return ImmediateTrainFuture(None, "export_weights")

    # -- parts

    def _write(self, state: JAXTrainState, weight_version: int, directory: Path) -> None:
        """Write a checkpoint of a state, which may be older than the backend's."""
        self._export(state, directory, None)
        others = {"optimizer": flatten_optimizer(state.optimizer), **asdict(state.counts), "weight_version": weight_version}
        write_trainer_state(directory, KIND, others)

    def _export(self, state: JAXTrainState, directory: Path, dtype: str | None) -> None:
        config = copy.deepcopy(self._skeleton.config)
        config.architectures = [type(self._skeleton).__name__]
        config.dtype = torch.float32
        config.save_pretrained(directory)
        if self._generation_config is not None:
            self._generation_config.save_pretrained(directory)
        weights = {name: to_tensor(value) for name, value in state.weights.items()}
        check_written(weights.items(), directory)
        weights = cast_weights(weights, dtype)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        finish_export(self.tokenizer, directory)

    def _replace_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights by ones that fit; tied ones may come under any of their names."""
        given = {self._first_names[name]: to_array(value) for name, value in weights.items()}
        self.state = replace(self.state, weights={name: given[name] for name in self.state.weights})

    def _check_log_probs(self, model: PreTrainedModel) -> None:
        """Raise ConfigError if transformers' model gives other log-probs on random tokens."""
        tokens = torch.randint(0, int(cast("Any", model).config.vocab_size), (2, 9), generator=torch.Generator().manual_seed(0))
        lengths, zeros = torch.tensor([9, 5]), torch.zeros(2)
        ids, trained = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
        batch = TrainBatch(
            tokens=tokens, lengths=lengths, loss_mask=torch.ones(tokens.shape), rewards=zeros, group_ids=ids, trainable=trained
        )
        with _as_it_was(model):
            window = probe_attention(model)
            if window is not None:
                raise ConfigError(f"the JAX backend cannot run this {type(model).__name__}: its attention has sliding_window = {window}")
            expected = _run_natively(model, tokens) * (torch.arange(9) < lengths[:, None])
        found = evaluate_batch(self.state.weights, batch, self._spec).log_probs
        check_same(found, expected, f"{type(model).__name__} gives other log-probs in JAX than in PyTorch")


def check_policy(policy: BadNumbers, name: str) -> None:
    """Raise ConfigError for a policy of an update that this backend cannot follow. name: of the setting, for the message."""
    usual = BadNumbers()
    if changed := [kind for kind in ("loss", "gradient", "gradient_spike", "ratio") if getattr(policy, kind) != getattr(usual, kind)]:
        raise ConfigError(
            f"{name}.{changed[0]} is {getattr(policy, changed[0])!r}, but the JAX backend judges an update in its compiled program, "
            f"which leaves out gradients that are not finite and nothing else: leave it at {getattr(usual, changed[0])!r}, or use "
            "--backend.kind pytorch"
        )


@takes(ScheduledAdamWArguments)
def create_jax_backend(
    model: str | Path | PreTrainedModel,
    *,
    compute_dtype: str | torch.dtype = "float32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    **adamw: Unpack[ScheduledAdamWArguments],
) -> JAXTrainingBackend:
    """Create a JAX backend with AdamW and a schedule.

    Args:
        model: a model, or the path of a Hugging Face directory (its tokenizer is loaded, too, unless one is given).
        compute_dtype: float32.
        lr and the other arguments of AdamW and its schedule: see optimizers.ScheduledAdamWArguments.

    Raises: ConfigError, see JAXTrainingBackend.
    """
    rule = create_rule(**adamw)
    rule.require_float32_moments("the JAX backend")
    check_policy(rule.bad_numbers, "bad_numbers")
    require_jax()
    if parse_dtype(compute_dtype) != torch.float32:
        raise ConfigError(
            f"compute_dtype is {compute_dtype}: the JAX backend computes in float32 only; use that, or --backend.kind pytorch"
        )
    model, tokenizer = open_model(model, tokenizer)
    return JAXTrainingBackend(model, rule, tokenizer=tokenizer)


def _create_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """Create the same model without values: names, shapes and ties of its weights, and its configuration."""
    return create_on_meta(lambda: type(model)(copy.deepcopy(model.config)))


@contextmanager
def _as_it_was(model: PreTrainedModel) -> Generator[None]:
    """Put a model into evaluation mode without gradient in the block; restore its attention and mode afterwards."""
    before, was_training = cast("Any", model.config)._attn_implementation, model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.set_attn_implementation(before)
        model.train(was_training)


def _run_natively(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Compute log-probs with the model as transformers runs it. Returns # [B, T] on the CPU."""
    with native_attention(model):
        device = next(model.parameters()).device
        logits = cast("Any", model)(input_ids=tokens.to(device)).logits
    return token_log_probs(logits, tokens.to(device)).cpu()


TRIED = "torchax 0.0.13 with torch 2.13.0 and jax 0.10.2"
FOUND = "import torchax raises AttributeError: The underlying op of 'aten.prod' has no overload name 'dim_Dimname'"
"""Torchax's operator tables name the overloads for named tensors (aten.prod.dim_Dimname, aten.index_copy.dimname, aten.all.dimname, ...),
which PyTorch removed."""


def create_torchax_backend(model: Any, **settings: Any) -> Never:
    """Raise ConfigError with the attempts, their failures, the packages of this Python, and the alternative."""
    raise ConfigError(
        f"torchax is not supported. Tried: {TRIED}; {FOUND}. Here: {_describe_here()}. "
        "For JAX use --backend.kind jax (create_jax_backend), for a functional state in PyTorch --backend.kind torch_func"
    )


def _describe_here() -> str:
    """Describe the import of torchax in this Python."""
    try:
        importlib.import_module("torchax")
    except ModuleNotFoundError as error:
        if error.name == "torchax":
            return "torchax is not installed"
        return f"import torchax raises {error}"
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"{_name_versions()}, where import torchax raises {type(error).__name__}: {error}"
    return f"{_name_versions()}, which can be imported, but this package has no backend on it"


def _name_versions() -> str:
    return " with ".join(f"{name} {_version_of(name)}" for name in ("torchax", "torch", "jax"))


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
