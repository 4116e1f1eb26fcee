"""PyTorch backend: one process, one device, packed rows, chunked log-probs, float32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollouts.backends.futures import ImmediateTrainFuture
from rollouts.backends.lora.adapters import adapters_off
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.lora.files import Adapters, SavedAdapters, check_has_no_adapters, check_lora
from rollouts.backends.optim.optimizers import check_rounding
from rollouts.backends.optim.updates import (
    Scheduler,
    UpdateCounts,
    check_updated,
    judge_update,
    read_counts,
    trained_parameters,
    update_parameters,
)
from rollouts.backends.protocol import BackendFeature, OutputFn, list_metrics
from rollouts.backends.pytorch.files import (
    OPTIMIZER,
    SHARDED_DIRECTORY,
    TRAINER_FILE,
    check_optimizer_fits,
    copy_to_host,
    export_model,
    read_trainer_state,
    restore_random_state,
    take_random_state,
    write_checkpoint,
)
from rollouts.backends.ranks.distributed import Ranks
from rollouts.backends.unread_metrics import MetricReads, RecordedTokens, list_recorded
from rollouts.backends.weights.export import alone, collect_pieces
from rollouts.config import BadNumbers
from rollouts.models.expert_load import add_balance, add_loads, summarize_load
from rollouts.models.forward.outputs import ComputeOutputs, ForeseenLoss, OutputOptions, compute_log_probs, describe_outputs
from rollouts.models.forward.packing import PackedRows, pack_batch
from rollouts.models.forward.passes import check_batch, is_gradient_zero, move_batch, replaying, run_rows, training_mode
from rollouts.models.prepare import prepare_model
from rollouts.models.tokens import TokenSpec, describe_tokens
from rollouts.models.weights import (
    check_architecture,
    check_weights_fit,
    copy_weights,
    describe_model_weights,
    gather_model_weights,
    read_weights,
    stream_weights,
    view_model_weights,
)
from rollouts.types import ExpertLoad, LossFn, TokenOutputs, TrainBatch
from rollouts.weight_specs import WeightSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


KIND = "pytorch"
_FEATURES = frozenset(
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


class PyTorchTrainingBackend:
    """TrainingBackend and CheckpointingBackend over a Hugging Face model and a torch optimizer.

    The model is a policy (a causal language model) or, with compute_outputs=compute_values, a critic.

    Every method runs at once and returns an ImmediateTrainFuture; open_pipeline moves the same methods into a worker thread. Given the
    same weights, batches and number of threads, results are bitwise equal on a CPU.

    The optimizer updates float32 parameters, or bfloat16 ones if it rounds stochastically. With compute_dtype=bfloat16 matrix products run
    in bfloat16 (autocast); log-probs, softmax and the loss stay float32. Dropout is active in forward_backward of batches that have it
    (TrainBatch.has_dropout), and off in forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Scheduler | None = None,
        device: str | torch.device = "cpu",
        compute_dtype: torch.dtype = torch.float32,
        max_grad_norm: float = 1.0,
        chunk_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        weight_version: int = 0,
        bad_numbers: BadNumbers | None = None,
        compute_outputs: ComputeOutputs = compute_log_probs,
        lora: LoRAConfig | None = None,
    ) -> None:
        """
        Args:
            model: moved to the device; its attention is replaced by one that stays inside packed rows.
            optimizer: over the parameters of this model.
            compute_dtype: float32 or bfloat16.
            max_grad_norm: norm that the gradient is scaled down to; inf = no clipping.
            chunk_size: tokens whose logits exist at the same time; None = logprobs.choose_chunk_size.
            tokenizer: saved beside the weights, so that a checkpoint is a complete model directory.
            weight_version: restored from checkpoints; incremented by the code that syncs weights to engines.
            bad_numbers: reaction to a loss, gradient or ratio that is not finite or too large; None = BadNumbers().
            compute_outputs: function of the hidden states: compute_log_probs (a policy) or compute_values (a critic).
            lora: the config that lora.add_adapters was called with; the optimizer updates the adapters alone. Snapshots and exports have
                merged weights; load_weights replaces the weights below the adapters and resets the adapters.

        Raises: ConfigError for a model that is not causal or lacks the head of compute_outputs, and for weights trained in bfloat16 by an
            optimizer that rounds to the nearest number.
        """
        assert max_grad_norm > 0, f"max_grad_norm is {max_grad_norm}, expected > 0"
        check_lora(model, lora)
        check_rounding(model, optimizer)
        self.device = torch.device(device)
        self.model: Any = model
        options = OutputOptions(compute_dtype=compute_dtype, chunk_size=chunk_size)
        self.limits, self._options = prepare_model(model, tokenizer, self.device, compute_outputs, options)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.weight_version = weight_version
        self.counts = UpdateCounts()
        self.max_grad_norm = max_grad_norm  # may be set between two updates
        self._bad_numbers = bad_numbers or BadNumbers()
        self._has_gradient = False
        self._foresees = True  # False once a loss had another gradient than foreseen: then none is foreseen any more
        self._load: ExpertLoad | None = None  # load of the passes since the last update
        self._counted: ExpertLoad | None = None  # load that count_experts has counted since the last update
        self._finite: frozenset[object] = frozenset()  # parameters that the last update found finite, see CheckedWeights
        self._reads = MetricReads()
        self._compute_outputs = compute_outputs
        self._adapters = None if lora is None else Adapters(model, lora)

    @property
    def features(self) -> frozenset[BackendFeature]:
        """Features of all backends of this class, ADAPTERS if this one trains adapters, REDUNDANCY if its model can share prompts."""
        adapters = frozenset[BackendFeature]() if self._adapters is None else {BackendFeature.ADAPTERS}
        return _FEATURES | adapters | ({BackendFeature.REDUNDANCY} if self._options.shares_prompts else frozenset())

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
        self.model.eval()
        batch, packed = self._admit(batch)
        with torch.no_grad(), replaying(batch, self._options, packed):
            outputs = self._run(batch, packed, with_entropy)
        return ImmediateTrainFuture(output_fn(outputs).cpu(), "forward")

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[dict[str, float]]:
        """Add the gradient of loss_fn on this batch.

        The metrics stay on the device until someone reads them, or the update, which reads those of all calls before it by one copy.

        Returns: see TrainingBackend; for a batch with advantages and skip_redundant also zero_gradient_fraction: 1 if the gradient is
            exactly zero and no backward pass was run through the model, else 0.
        """
        recorded = list_recorded(batch)
        batch, packed = self._admit(batch, dropout=batch.has_dropout)
        with training_mode(self.model, dropout=batch.has_dropout), replaying(batch, self._options, packed):
            foreseen = ForeseenLoss(lambda outputs: loss_fn(outputs, batch)[0]) if self._foresees else None
            outputs = self._run(batch, packed, with_entropy, foreseen)
            loss, metrics = loss_fn(outputs, batch)
            loss = add_balance(loss, batch, outputs.expert_load, self._counted)
            # the first pass of a step runs backward in any case: a parameter without a gradient would not be decayed
            has_gradient = not (self._skips(batch) and self._has_gradient and is_gradient_zero(loss, outputs))
            if has_gradient:
                loss.backward()
        self._foresees = self._foresees and not (foreseen is not None and foreseen.failed)
        self._load = add_loads(self._load, outputs.expert_load)
        self._has_gradient = True
        skipped = {"zero_gradient_fraction": float(not has_gradient)} if self._skips(batch) else {}
        metrics = {**self._reads.keep_recorded(metrics, recorded), **skipped}
        return ImmediateTrainFuture(self._reads.add(list_metrics(loss, metrics, batch)), "forward_backward")

    def forward_base(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[Tensor]:
        """Run forward without the adapters."""
        assert self._adapters is not None, "forward_base needs a backend with adapters: make it with lora=LoRAConfig(...)"
        with adapters_off(self.model):
            return self.forward(batch, output_fn, with_entropy=with_entropy)

    def optim_step(self) -> ImmediateTrainFuture[dict[str, float]]:
        """Clip, update, advance the schedule, clear the gradient.

        An update with a bad number is not applied: parameters and optimizer state are unchanged, and update_skipped is 1.

        Returns: grad_norm (before clipping), lr (of this update), update_skipped, and num_bad_<kind> of an update left out; for a mixture
            of experts those of summarize_load.
        Raises: BadNumberError as BadNumbers says, or after max_skipped skipped updates in a row, or if an update left a
            non-finite parameter.
        """
        assert self._has_gradient, "optim_step was called without a forward_backward since the last one"
        load, self._load, self._counted, self._has_gradient = self._load, None, None, False  # also if a bad number ends the run
        self._finite = frozenset()  # until check_updated has read them again: torch does not count the writes of fused optimizers
        metrics, self.counts = update_parameters(
            self.optimizer, self.scheduler, self.counts, max_grad_norm=self.max_grad_norm, read=self._reads.read, judge=self._judge
        )
        metrics |= summarize_load(load)
        self._finite = check_updated(trained_parameters(self.model), self.counts, metrics)
        return ImmediateTrainFuture(metrics, "optim_step")

    def drop_gradient(self) -> None:
        """Forget the passes since the last update: gradient, load of experts, records of tokens, and bad numbers among their metrics."""
        self.optimizer.zero_grad(set_to_none=True)
        self._has_gradient = False
        self._load = self._counted = None
        self._reads = MetricReads()

    def get_weights(self) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Copy the weights to the CPU, tied ones under each of their names."""
        return ImmediateTrainFuture(dict(stream_weights(self.model)), "get_weights")

    def load_weights(self, weights: Mapping[str, Tensor]) -> ImmediateTrainFuture[None]:
        """Replace the weights. Raises CheckpointError if a name or shape does not fit."""
        check_weights_fit(self.model, weights, "the given weights")
        copy_weights(self.model, weights)
        if self._adapters is not None:
            self._adapters.replaced_base(self.optimizer)
        return ImmediateTrainFuture(None, "load_weights")

    # -- BackendFeature.EXPERTS

    def check_balance(self) -> None:
        """Raise ConfigError, with the reason, unless the model has a load-balancing loss that is computed here."""
        self._options.routers.check_balance()

    def check_replay(self) -> None:
        """Raise ConfigError, with the reason, unless the model can replay recorded experts."""
        self._options.routers.check_replay()

    def count_experts(self, batch: TrainBatch) -> ImmediateTrainFuture[None]:
        """Run forward and add the load of the experts to that of the step."""
        batch, packed = self._admit(batch)
        with training_mode(self.model, dropout=False), torch.no_grad(), replaying(batch, self._options, packed):
            outputs = self._run(batch, packed, with_entropy=False)
        self._counted = add_loads(self._counted, outputs.expert_load)
        return ImmediateTrainFuture(None, "count_experts")

    # -- BackendFeature.RECORDS

    def take_recorded(self) -> ImmediateTrainFuture[tuple[RecordedTokens, ...]]:
        """Return the columns of tokens that losses gave for recorded rows since the last call."""
        return ImmediateTrainFuture(self._reads.take_recorded(), "take_recorded")

    # -- BackendFeature.WEIGHT_VIEWS

    def view_weights(self) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Return the weights that are trained, on their device; adapters are merged into copies."""
        return ImmediateTrainFuture(view_model_weights(self.model, self._finite), "view_weights")

    # -- BackendFeature.WEIGHT_STREAM

    def describe_weights(self) -> ImmediateTrainFuture[tuple[WeightSpec, ...]]:
        """Return names, dtypes and shapes of the weights."""
        return ImmediateTrainFuture(describe_model_weights(self.model), "describe_weights")

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Return copies of the weights with these names."""
        return ImmediateTrainFuture(gather_model_weights(self.model, names, keep_device=keep_device), "gather_weights")

    # -- BackendFeature.CHECKPOINTS

    def save_checkpoint(self, directory: Path | str) -> ImmediateTrainFuture[None]:
        """Write the model directory, and optimizer, schedule, random state and counters beside it."""
        self._stage(Path(directory), copied=False)()
        return ImmediateTrainFuture(None, "save_checkpoint")

    def stage_checkpoint(self, directory: Path | str) -> ImmediateTrainFuture[Callable[[], None]]:
        """Copy the state, and return the function that writes it; adapters, which are small, are written now."""
        return ImmediateTrainFuture(self._stage(Path(directory), copied=True), "stage_checkpoint")

    def _stage(self, directory: Path, *, copied: bool) -> Callable[[], None]:
        if self._adapters is not None:
            self._adapters.save(directory, partial(export_model, self.model, self.tokenizer, base_alone=True))
        rng = take_random_state(self.device)
        state = {
            "optimizer": self.optimizer.state_dict(),
            OPTIMIZER: type(self.optimizer).__name__,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "rng": rng["cpu"],
            "cuda_rng": rng["cuda"],
            **asdict(self.counts),
            "weight_version": self.weight_version,
        }
        pieces = collect_pieces(self.model, alone(), copied=copied)
        return partial(write_checkpoint, self.model, self.tokenizer, directory, pieces, KIND, copy_to_host(state) if copied else state)

    def load_checkpoint(self, directory: Path | str) -> ImmediateTrainFuture[None]:
        """Restore a checkpoint of save_checkpoint, or one of FSDPTrainingBackend.

        Raises: CheckpointError naming the mismatch, before anything is overwritten.
        """
        directory = Path(directory)
        check_architecture(self.model, directory)
        if (directory / SHARDED_DIRECTORY).is_dir():
            return self._load_sharded(directory)
        weights: dict[str, Tensor] = {}
        adapters: SavedAdapters | None = None
        if self._adapters is None:
            check_has_no_adapters(directory)
            weights = read_weights(directory, self.model)
            check_weights_fit(self.model, weights, str(directory))
        else:
            adapters = self._adapters.read(directory)
        state = read_trainer_state(directory, KIND)
        check_optimizer_fits(self.optimizer, state, directory / TRAINER_FILE)
        if self._adapters is None or adapters is None:
            copy_weights(self.model, weights)
        else:
            self._adapters.restore(adapters, self._read_weights)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        restore_random_state({"cpu": state["rng"], "cuda": state["cuda_rng"]}, self.device)
        self.counts = read_counts(state)
        self.weight_version = int(state["weight_version"])
        self.drop_gradient()
        return ImmediateTrainFuture(None, "load_checkpoint")

    def export_weights(self, directory: Path | str, *, dtype: str | None = None) -> ImmediateTrainFuture[None]:
        """Write config, weights (safetensors) and tokenizer in the layout that from_pretrained and inference servers open."""
        export_model(self.model, self.tokenizer, Path(directory), dtype=dtype)
        return ImmediateTrainFuture(None, "export_weights")

    # -- parts

    def _judge(self, norm: float, counts: UpdateCounts) -> str | None:
        return judge_update(norm, counts, worst=self._reads.take_worst(), policy=self._bad_numbers)

    def _load_sharded(self, directory: Path) -> ImmediateTrainFuture[None]:
        from rollouts.backends.fsdp.checkpoint import load_sharded  # imports torch.distributed, which this backend does not need

        ranks = Ranks(rank=0, world_size=1, device=self.device, timeout_s=float("inf"))
        progress = load_sharded(self.model, self.optimizer, self.scheduler, directory, ranks=ranks, adapters=self._adapters)
        self.counts, self.weight_version = progress.counts, progress.weight_version
        self.drop_gradient()
        return ImmediateTrainFuture(None, "load_checkpoint")

    def _read_weights(self, directory: Path) -> None:
        weights = read_weights(directory, self.model)
        check_weights_fit(self.model, weights, str(directory))
        copy_weights(self.model, weights)

    def _admit(self, batch: TrainBatch, *, dropout: bool = False) -> tuple[TrainBatch, PackedRows]:
        """Check a batch and plan its rows where it is, then move both to the device. With dropout no rows share tokens."""
        check_batch(batch, self.limits)
        share = self._options.shares_prompts and not dropout
        return move_batch(batch, self.device), pack_batch(batch, self.device, share=share)

    def _skips(self, batch: TrainBatch) -> bool:
        """Whether no backward pass is run for this batch where its gradient is zero."""
        return self._options.shares_prompts and batch.skip_redundant and batch.advantages is not None

    def _run(self, batch: TrainBatch, packed: PackedRows, with_entropy: bool, foreseen: ForeseenLoss | None = None) -> TokenOutputs:
        options = replace(self._options, with_entropy=with_entropy, foreseen=foreseen)
        return run_rows(self.model, batch, self._compute_outputs, options, packed)
