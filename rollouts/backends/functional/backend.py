"""Functional PyTorch backend: state.py over a Hugging Face model, behind the protocol of training backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch import Tensor

from rollouts.backends.functional.state import ForwardFn, Parameters, accumulate_gradient, apply_update, count_experts, create_state
from rollouts.backends.futures import ImmediateTrainFuture
from rollouts.backends.optim.optimizers import AdamW, ScheduledAdamWArguments, check_rounding, create_rule, takes
from rollouts.backends.optim.updates import check_updated, read_counts
from rollouts.backends.protocol import BackendFeature, OutputFn
from rollouts.backends.pytorch.files import export_model, read_trainer_state, write_checkpoint
from rollouts.backends.unread_metrics import MetricReads, RecordedTokens, list_recorded
from rollouts.backends.weights.export import alone, collect_pieces
from rollouts.errors import BadNumberError, CheckpointError
from rollouts.models.forward.outputs import ComputeOutputs, OutputOptions, compute_log_probs, describe_outputs
from rollouts.models.forward.passes import admit_batch, replaying, run_rows, training_mode
from rollouts.models.loading import open_model, parse_dtype
from rollouts.models.prepare import prepare_model
from rollouts.models.tokens import TokenSpec, describe_tokens
from rollouts.models.weights import (
    check_architecture,
    check_weights_fit,
    describe_model_weights,
    gather_model_weights,
    read_weights,
    stream_weights,
    view_model_weights,
)
from rollouts.types import LossFn, TokenOutputs, TrainBatch
from rollouts.weight_specs import WeightSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


KIND = "torch_func"


def create_forward(model: PreTrainedModel, compute_outputs: ComputeOutputs, options: OutputOptions, *, training: bool) -> ForwardFn:
    """Return the model as a pure function of its parameters: packed rows, log-probs in chunks.

    Args:
        model: prepared by prepare.prepare_attention; only its structure is used, parameters are an argument of the function.
        training: apply dropout, if the batch has it.
    """
    caller = _Caller(model)

    def forward(parameters: Parameters, batch: TrainBatch, with_entropy: bool) -> TokenOutputs:
        dropout = training and batch.has_dropout
        own = replace(options, with_entropy=with_entropy, shares_prompts=options.shares_prompts and not dropout)
        run = partial(run_rows, batch=batch, compute_outputs=compute_outputs, options=own)
        named = {f"model.{name}": value for name, value in parameters.items()}
        with training_mode(model, dropout=dropout), replaying(batch, options):
            return cast("TokenOutputs", torch.func.functional_call(caller, named, (run,)))

    return forward


class TorchFuncTrainingBackend:
    """TrainingBackend and CheckpointingBackend whose whole state is one value, `state`, replaced by each step.

    The steps are the pure functions of state.py; the backend adds moving batches, counting and files. The model always shows the
    parameters of the state (without a copy); to change them, use load_weights.
    """

    features = frozenset(
        {
            BackendFeature.CHECKPOINTS,
            BackendFeature.STAGED_CHECKPOINTS,
            BackendFeature.WEIGHT_STREAM,
            BackendFeature.WEIGHT_VIEWS,
            BackendFeature.OUTPUTS,
            BackendFeature.TOKENS,
            BackendFeature.EXPERTS,
            BackendFeature.RECORDS,
        }
    )

    def __init__(
        self,
        model: PreTrainedModel,
        rule: AdamW,
        *,
        device: str | torch.device = "cpu",
        compute_dtype: torch.dtype = torch.float32,
        chunk_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        weight_version: int = 0,
        compute_outputs: ComputeOutputs = compute_log_probs,
        seed: int = 0,
    ) -> None:
        """
        Args:
            model: moved to the device; its attention is replaced by one that stays inside packed rows.
            rule: the optimizer.
            compute_dtype: dtype of matrix products, float32 or bfloat16; parameters are float32.
            chunk_size: tokens whose logits exist at the same time; None = logprobs.choose_chunk_size.
            tokenizer: saved beside the weights, so that a checkpoint is a complete model directory.
            weight_version: restored from checkpoints; incremented by the code that syncs weights to engines.
            compute_outputs: compute_log_probs (a policy) or compute_values (a critic).
            seed: seed of dropout.

        Raises: ConfigError for a model that is not causal or lacks the head of compute_outputs.
        """
        self.device = torch.device(device)
        self.model: Any = model
        options = OutputOptions(compute_dtype=compute_dtype, chunk_size=chunk_size)
        check_rounding(model, None)
        self.limits, options = prepare_model(model, tokenizer, self.device, compute_outputs, options)
        self.rule = rule
        self.tokenizer = tokenizer
        self.weight_version = weight_version
        self._compute_outputs = compute_outputs
        self._reads = MetricReads()
        self._evaluate = create_forward(self.model, compute_outputs, options, training=False)
        self._routers = options.routers
        self._train = create_forward(self.model, compute_outputs, options, training=True)
        named = cast("dict[str, torch.nn.Parameter]", dict(self.model.named_parameters()))
        self.state = create_state(named, [name for name, parameter in named.items() if parameter.requires_grad], seed=seed)
        self._show()

    @property
    def token_spec(self) -> TokenSpec:
        """Vocabulary of the model, for comparison with another model's."""
        return describe_tokens(self.model, self.tokenizer)

    @property
    def computes(self) -> frozenset[str] | None:
        """Fields of TokenOutputs that this backend fills; None = not known."""
        return describe_outputs(self._compute_outputs)

    # -- TrainingBackend

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[Tensor]:
        """Return output_fn of the model's outputs, without gradient, on the CPU."""
        with torch.no_grad():
            outputs = self._evaluate(self.state.parameters, admit_batch(batch, self.limits, self.device), with_entropy)
        return ImmediateTrainFuture(output_fn(outputs).cpu(), "forward")

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[dict[str, float]]:
        """Add the gradient of loss_fn on this batch. Its metrics are read with the norm in optim_step, or when somebody asks for them."""
        recorded = list_recorded(batch)
        batch = admit_batch(batch, self.limits, self.device)
        self.state, metrics = accumulate_gradient(self.state, batch, loss_fn, self._train, with_entropy=with_entropy)
        return ImmediateTrainFuture(self._reads.add(self._reads.keep_recorded(metrics, recorded)), "forward_backward")

    def optim_step(self) -> ImmediateTrainFuture[dict[str, float]]:
        """Run apply_update. Raises BadNumberError for a non-finite parameter, and as rule.bad_numbers says."""
        try:
            self.state, metrics = apply_update(self.state, self.rule, self._reads.read, self._reads.take_worst)
        except BadNumberError:  # a caller that goes on begins anew
            self.state = replace(self.state, gradients=None, expert_load=None, counted_load=None)
            raise
        self._show()
        check_updated(self.state.parameters.items(), self.state.counts, metrics)
        return ImmediateTrainFuture(metrics, "optim_step")

    def get_weights(self) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Copy the weights to the CPU, tied ones under each of their names."""
        return ImmediateTrainFuture(dict(stream_weights(self.model)), "get_weights")

    def load_weights(self, weights: Mapping[str, Tensor]) -> ImmediateTrainFuture[None]:
        """Replace the weights. Raises CheckpointError if a name or shape does not fit."""
        check_weights_fit(self.model, weights, "the given weights")
        self._replace_parameters(weights)
        return ImmediateTrainFuture(None, "load_weights")

    # -- BackendFeature.EXPERTS

    def check_balance(self) -> None:
        """Raise ConfigError, with the reason, unless the model has a load-balancing loss that is computed here."""
        self._routers.check_balance()

    def check_replay(self) -> None:
        """Raise ConfigError, with the reason, unless the model can replay recorded experts."""
        self._routers.check_replay()

    def count_experts(self, batch: TrainBatch) -> ImmediateTrainFuture[None]:
        """Run forward and add the load of the experts to that of the step."""
        self.state = count_experts(self.state, admit_batch(batch, self.limits, self.device), self._evaluate)
        return ImmediateTrainFuture(None, "count_experts")

    # -- BackendFeature.RECORDS

    def take_recorded(self) -> ImmediateTrainFuture[tuple[RecordedTokens, ...]]:
        """Return what losses told of the tokens of recorded rows since the last call."""
        return ImmediateTrainFuture(self._reads.take_recorded(), "take_recorded")

    # -- BackendFeature.WEIGHT_VIEWS

    def view_weights(self) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Return the weights that are trained, on their device; adapters are merged into copies."""
        return ImmediateTrainFuture(view_model_weights(self.model), "view_weights")

    # -- BackendFeature.WEIGHT_STREAM

    def describe_weights(self) -> ImmediateTrainFuture[tuple[WeightSpec, ...]]:
        """Return names, dtypes and shapes of the weights."""
        return ImmediateTrainFuture(describe_model_weights(self.model), "describe_weights")

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Return copies of the weights with these names."""
        return ImmediateTrainFuture(gather_model_weights(self.model, names, keep_device=keep_device), "gather_weights")

    # -- BackendFeature.CHECKPOINTS

    def save_checkpoint(self, directory: Path | str) -> ImmediateTrainFuture[None]:
        """Write the model directory, and the other state beside it."""
        self.stage_checkpoint(directory).value()
        return ImmediateTrainFuture(None, "save_checkpoint")

    def stage_checkpoint(self, directory: Path | str) -> ImmediateTrainFuture[Callable[[], None]]:
        """Return the function that writes the present state. Nothing is copied: later steps make new tensors."""
        state = {
            "first_moments": dict(self.state.first_moments),
            "second_moments": dict(self.state.second_moments),
            "num_applied": self.state.num_applied,
            "num_passes": self.state.num_passes,
            "seed": self.state.seed,
            **asdict(self.state.counts),
            "weight_version": self.weight_version,
        }
        pieces = collect_pieces(self.model, alone())
        write = partial(write_checkpoint, self.model, self.tokenizer, Path(directory), pieces, KIND, state)
        return ImmediateTrainFuture(write, "stage_checkpoint")

    def load_checkpoint(self, directory: Path | str) -> ImmediateTrainFuture[None]:
        """Restore a checkpoint of save_checkpoint. Raises CheckpointError naming the mismatch."""
        directory = Path(directory)
        check_architecture(self.model, directory)
        weights = read_weights(directory, self.model)
        check_weights_fit(self.model, weights, str(directory))
        saved = read_trainer_state(directory, KIND)
        moments = [{name: value.to(self.device) for name, value in saved[key].items()} for key in ("first_moments", "second_moments")]
        for found in moments:
            if {k: v.shape for k, v in found.items()} != {k: v.shape for k, v in self.state.first_moments.items()}:
                raise CheckpointError(f"{directory} has optimizer moments of other parameters than those that are trained here")
        self._replace_parameters(weights)
        self.state = replace(
            self.state,
            first_moments=MappingProxyType(moments[0]),
            second_moments=MappingProxyType(moments[1]),
            gradients=None,
            expert_load=None,
            counted_load=None,
            num_applied=int(saved["num_applied"]),
            num_passes=int(saved["num_passes"]),
            seed=int(saved["seed"]),
            counts=read_counts(saved),
        )
        self.weight_version = int(saved["weight_version"])
        self._reads = MetricReads()  # numbers of passes before it judge no update behind it
        return ImmediateTrainFuture(None, "load_checkpoint")

    def export_weights(self, directory: Path | str, *, dtype: str | None = None) -> ImmediateTrainFuture[None]:
        """Write config, weights (safetensors) and tokenizer in the layout that from_pretrained and inference servers open."""
        export_model(self.model, self.tokenizer, Path(directory), dtype=dtype)
        return ImmediateTrainFuture(None, "export_weights")

    # -- parts

    def _replace_parameters(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the parameters by weights that fit, tied ones under any of their names; persistent buffers stay the model's."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        tied = {name: names[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False)}
        given = {tied[name]: value.detach().to(self.device, torch.float32, copy=True) for name, value in weights.items() if name in tied}
        self.state = replace(self.state, parameters=MappingProxyType({**self.state.parameters, **given}))
        self._show()

    def _show(self) -> None:
        """Point the model's parameters to the state's, so that reading the model reads the state."""
        for name, parameter in self.model.named_parameters():
            parameter.data = self.state.parameters[name]


@takes(ScheduledAdamWArguments)
def create_torch_func_backend(
    model: str | Path | PreTrainedModel,
    *,
    device: str | torch.device = "cpu",
    compute_dtype: str | torch.dtype = "float32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
    **adamw: Unpack[ScheduledAdamWArguments],
) -> TorchFuncTrainingBackend:
    """Create a functional backend with AdamW and a schedule.

    Args:
        model: a model, or the path of a Hugging Face directory (its tokenizer is loaded, too, unless one is given).
        seed: seed of dropout.
        lr and the other arguments of AdamW and its schedule: see optimizers.ScheduledAdamWArguments.
    """
    rule, dtype = create_rule(**adamw), parse_dtype(compute_dtype)
    rule.require_float32_moments("the functional backend")
    model, tokenizer = open_model(model, tokenizer)
    return TorchFuncTrainingBackend(model, rule, device=device, compute_dtype=dtype, tokenizer=tokenizer, seed=seed)


class _Caller(torch.nn.Module):
    """Module whose forward is any function of the model: functional_call replaces parameters only while a forward runs."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[torch.nn.Module], Any]) -> Any:
        return function(self.model)
