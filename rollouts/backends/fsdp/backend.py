"""FSDP backend: a model sharded over processes; each process computes a part of the rows of every call.

Every process (rank) has one FSDPTrainingBackend, calls the same methods in the same order with the same arguments, and gets the same
results; a rank takes its own rows out of a batch. With one process it is a TrainingBackend like any other and needs no launcher.

If one process leads (it alone has the batches), the other ranks are given only their rows: forward_shard and forward_backward_shard compute
this rank's part; the functions of ranks/rows.py come before and after them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rollouts.backends.fsdp.checkpoint import (
    AsyncWriter,
    Progress,
    WriteFuture,
    load_sharded,
    save_adapters,
    save_sharded,
    take_snapshot,
    write_snapshot,
)
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.model import call_gathered, create_mesh, drop_gathered, is_sharded, shard_model
from rollouts.backends.futures import ImmediateTrainFuture
from rollouts.backends.lora.adapters import adapters_off, assign
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.lora.files import Adapters, check_lora
from rollouts.backends.optim.optimizers import check_rounding
from rollouts.backends.optim.updates import (
    Scheduler,
    UpdateCounts,
    Worst,
    check_updated,
    judge_update,
    trained_parameters,
    update_parameters,
)
from rollouts.backends.protocol import BackendFeature, Future, OutputFn, list_metrics
from rollouts.backends.ranks.distributed import Ranks, all_gather, explain_failures, gather_values, init_distributed
from rollouts.backends.ranks.rows import (
    combine_metrics,
    combine_recorded,
    combine_rows,
    count_unit_rows,
    pack_recorded,
    plan_rank_rows,
    select_part,
)
from rollouts.backends.unread_metrics import MetricReads, RecordedTokens, UnreadMetrics, list_recorded
from rollouts.backends.weights.export import export_sharded
from rollouts.config import BadNumbers
from rollouts.data.model_limits import read_limits
from rollouts.errors import BadNumberError
from rollouts.models.expert_load import add_balance, add_loads, stack_load, summarize_load, unstack_load
from rollouts.models.forward.outputs import ComputeOutputs, ForeseenLoss, OutputOptions, compute_log_probs, describe_outputs
from rollouts.models.forward.packing import PackedRows, pack_batch
from rollouts.models.forward.passes import check_batch, move_batch, replaying, run_rows, training_mode
from rollouts.models.prepare import can_share_prompts, check_head, check_master_weights, inspect_routers, prepare_attention
from rollouts.models.replay import check_replayed
from rollouts.models.tokens import TokenSpec, describe_tokens
from rollouts.models.weights import base_weights, check_weights_fit, describe_model_weights, gather_model_weights, stream_weights
from rollouts.types import ExpertLoad, LossFn, TokenOutputs, TrainBatch
from rollouts.weight_specs import WeightSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FEATURES = frozenset({
    BackendFeature.CHECKPOINTS, BackendFeature.STAGED_CHECKPOINTS, BackendFeature.WEIGHT_STREAM, BackendFeature.OUTPUTS,
    BackendFeature.TOKENS, BackendFeature.EXPERTS, BackendFeature.SHARDS, BackendFeature.RECORDS,
})  # fmt: skip

_OUTPUTS = ("log_probs", "entropy", "values", "divergence", "tops")
"""Columns of TokenOutputs that a pass may compute."""


class FSDPTrainingBackend:
    """A TrainingBackend and CheckpointingBackend over a Hugging Face model whose parameters, gradients and optimizer state are sharded.

    For any number of ranks, results equal PyTorchTrainingBackend's with the same weights and batches up to rounding: losses are sums over
    tokens, gradients are summed over ranks, and the norm of the whole gradient is clipped.

    Every method runs at once and returns an ImmediateTrainFuture. All of them exchange messages between ranks, so all ranks must call them
    in the same order. A rank without rows computes a dummy row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        create_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        *,
        config: FSDPConfig | None = None,
        ranks: Ranks | None = None,
        mesh: DeviceMesh | None = None,
        create_schedule: Callable[[torch.optim.Optimizer], Scheduler] | None = None,
        max_grad_norm: float = 1.0,
        chunk_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        weight_version: int = 0,
        bad_numbers: BadNumbers | None = None,
        compute_outputs: ComputeOutputs = compute_log_probs,
        rows_per_unit: int = 1,
        save_in_background: bool = False,
        lora: LoRAConfig | None = None,
    ) -> None:
        """
        Args:
            model: the same on every rank: whole, and then sharded here, or already sharded by shard_model (with the same mesh and config)
                and materialized.
            create_optimizer: called with the sharded parameters, after the model was sharded.
            config: None = FSDPConfig().
            ranks: result of init_distributed; None = call init_distributed().
            mesh: result of create_mesh; None = made here.
            create_schedule: creates the schedule of the learning rate; None = constant.
            max_grad_norm: norm that the gradient is scaled down to, unless config.clip_grad is set; inf = no clipping.
            chunk_size, tokenizer, weight_version, bad_numbers, compute_outputs: as in PyTorchTrainingBackend.
            rows_per_unit: consecutive rows of forward_backward that go to one rank together: 2 for losses that compare the rows of a pair.
            save_in_background: save_checkpoint returns when everything is copied to host memory, and writes during training; the next
                save_checkpoint and close() wait for the write and raise its error.
            lora: as in PyTorchTrainingBackend; for a model that is already sharded, init_adapters must have made the adapters.

        Raises: ConfigError if the model is not causal or cannot be sharded, or the ranks cannot be arranged as asked.
        """
        assert max_grad_norm > 0, f"max_grad_norm is {max_grad_norm}, expected > 0"
        assert rows_per_unit >= 1, f"rows_per_unit is {rows_per_unit}, expected at least 1"
        self.config = FSDPConfig() if config is None else config
        self.ranks = init_distributed() if ranks is None else ranks
        self.device = self.ranks.device
        self.tokenizer = tokenizer
        self.weight_version = weight_version
        self.counts = UpdateCounts()
        self.rows_per_unit = rows_per_unit
        self._max_grad_norm = max_grad_norm if self.config.clip_grad is None else self.config.clip_grad
        dtype = torch.float32 if self.config.mixed_precision is None else torch.bfloat16
        self._options = OutputOptions(compute_dtype=dtype, chunk_size=chunk_size)
        self._bad_numbers = bad_numbers or BadNumbers()
        self._compute_outputs = compute_outputs
        self._has_gradient = False
        self._foresees = True  # whether gradients of losses were as foreseen, if any was
        self._load: ExpertLoad | None = None  # load of this rank's passes since the last update
        self._counted: ExpertLoad | None = None  # load on all ranks, counted since the last update
        self._reads = MetricReads()  # metrics of this rank's rows
        self.unread: dict[int, UnreadMetrics] = {}  # metrics that a leading rank has not asked for, by the number of its call
        check_lora(model, lora)
        self._writer, self._save_in_background = AsyncWriter(self.ranks), save_in_background
        with self._operation("sharding the model"):
            if not is_sharded(model):
                mesh = create_mesh(self.config, self.device, self.ranks.world_size) if mesh is None else mesh
                model = shard_model(model, mesh, self.config)  # moves one layer at a time to the device
            self.model: Any = model
            check_master_weights(self.model, dtype)
            self.limits = read_limits(self.model, tokenizer)
            self._check_model()
        self._adapters = None if lora is None else Adapters(self.model, lora)
        self.optimizer = create_optimizer(self.model)
        check_rounding(self.model, self.optimizer)
        self.scheduler = None if create_schedule is None else create_schedule(self.optimizer)

    @property
    def num_shards(self) -> int:
        """Number of ranks."""
        return self.ranks.world_size

    @property
    def features(self) -> frozenset[BackendFeature]:
        """Features of all backends of this class, and ADAPTERS if this one trains adapters."""
        return _FEATURES if self._adapters is None else _FEATURES | {BackendFeature.ADAPTERS}

    @property
    def token_spec(self) -> TokenSpec:
        """Vocabulary of the model, for comparison with another model's."""
        return describe_tokens(self.model, self.tokenizer)

    @property
    def computes(self) -> frozenset[str] | None:
        """Fields of TokenOutputs that this backend fills; None = not known."""
        return describe_outputs(self._compute_outputs)

    # -- TrainingBackend: the same batch on every rank

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[Tensor]:
        """Return output_fn of the model's outputs for all rows, without gradient, on the CPU."""
        self.check_rows(batch)
        plan = plan_rank_rows(batch.lengths.tolist(), self.num_shards)
        part = self.forward_shard(select_part(batch, plan[self.ranks.rank]), output_fn, with_entropy=with_entropy)
        parts = gather_values(self.ranks, part, operation="gathering the outputs of a forward pass")
        return ImmediateTrainFuture(combine_rows(parts, plan, (batch.num_rows, batch.tokens.shape[1])), "forward")

    def forward_base(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[Tensor]:
        """Run forward without the adapters."""
        assert self._adapters is not None, "forward_base needs a backend with adapters: make it with lora=LoRAConfig(...)"
        with adapters_off(self.model):
            return self.forward(batch, output_fn, with_entropy=with_entropy)

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[dict[str, float]]:
        """Add the gradient of loss_fn on this batch. Loss and metrics cover the rows of all ranks.

        With one rank they stay on the device until they are read, as in PyTorchTrainingBackend. Several ranks exchange theirs here, since
        each must take part; a rank that leads (LeadingBackend) asks the others once a step.
        """
        self.check_rows(batch)
        plan = plan_rank_rows(batch.lengths.tolist(), self.num_shards, count_unit_rows(batch, self.rows_per_unit))
        part = self.forward_backward_shard(select_part(batch, plan[self.ranks.rank]), loss_fn, with_entropy=with_entropy)
        if self.num_shards == 1:
            return ImmediateTrainFuture(part, "forward_backward")
        parts = gather_values(self.ranks, part.read(), operation="gathering the metrics of a forward_backward")
        return ImmediateTrainFuture(combine_metrics(parts), "forward_backward")

    def optim_step(self) -> ImmediateTrainFuture[dict[str, float]]:
        """Clip, update, advance the schedule, clear the gradient; the same on every rank.

        If a number is bad on one rank, all ranks do the same with the update, see BadNumbers.

        Returns: grad_norm (whole gradient, before clipping), lr (of this update), update_skipped; for a mixture of experts those of
            summarize_load, over all ranks.
        Raises: BadNumberError as BadNumbers says, or after max_skipped skipped updates in a row, or if an update left a
            non-finite parameter.
        """
        assert self._has_gradient, "optim_step was called without a forward_backward since the last one"
        load, self._load, self._counted, self._has_gradient = self._load, None, None, False  # also if a bad number ends the run
        with self._operation("optim_step"):
            metrics, self.counts = update_parameters(
                self.optimizer,
                self.scheduler,
                self.counts,
                max_grad_norm=self._max_grad_norm,
                read=self._read_norm,
                judge=self._judge,
            )
            metrics |= summarize_load(self._sum_load(load))
        self._check_updated(metrics)
        return ImmediateTrainFuture(metrics, "optim_step")

    def get_weights(self) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Copy the whole weights to the CPU of every rank, tied ones under each of their names; stream_weights needs less memory."""
        return ImmediateTrainFuture(dict(self.stream_weights()), "get_weights")

    def load_weights(self, weights: Mapping[str, Tensor]) -> ImmediateTrainFuture[None]:
        """Replace the weights by whole tensors; each rank takes its shards. Raises CheckpointError if one does not fit."""
        check_weights_fit(self.model, weights, "the given weights")
        own = base_weights(self.model)
        with self._operation("load_weights"), torch.no_grad():
            for name, value in weights.items():
                assign(own[name], value)
        if self._adapters is not None:
            self._adapters.replaced_base(self.optimizer)
        return ImmediateTrainFuture(None, "load_weights")

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, whole tensor on the CPU) of each weight; all ranks must iterate to the end."""
        with self._operation("gathering a weight"):
            yield from stream_weights(self.model)

    # -- BackendFeature.EXPERTS

    def check_balance(self) -> None:
        """Raise ConfigError, with the reason, unless the model has a load-balancing loss that is computed here."""
        self._options.routers.check_balance()

    def check_replay(self) -> None:
        """Raise ConfigError, with the reason, unless the model can replay recorded experts."""
        self._options.routers.check_replay()

    def check_rows(self, batch: TrainBatch) -> None:
        """Raise DataError for rows that this model cannot compute, before ranks wait for one another."""
        check_batch(batch, self.limits)
        if batch.routed_experts is not None:
            self.check_replay()
            check_replayed(self._options.routers, batch.routed_experts)

    def count_experts(self, batch: TrainBatch) -> ImmediateTrainFuture[None]:
        """Run forward and add the load of the experts on the rows of all ranks to that of the step."""
        self.check_rows(batch)
        plan = plan_rank_rows(batch.lengths.tolist(), self.num_shards, count_unit_rows(batch, self.rows_per_unit))
        self.count_experts_shard(select_part(batch, plan[self.ranks.rank]))
        return ImmediateTrainFuture(None, "count_experts")

    # -- BackendFeature.RECORDS

    def take_recorded(self) -> ImmediateTrainFuture[tuple[RecordedTokens, ...]]:
        """Return what losses told of the tokens of recorded rows of all ranks since the last call; every rank must call it."""
        parts = gather_values(self.ranks, pack_recorded(self.take_recorded_shard()), operation="gathering the records of an update")
        return ImmediateTrainFuture(combine_recorded(parts), "take_recorded")

    # -- BackendFeature.WEIGHT_STREAM

    def describe_weights(self) -> ImmediateTrainFuture[tuple[WeightSpec, ...]]:
        """Return names, dtypes and whole shapes of the weights, tied ones once; sends nothing."""
        return ImmediateTrainFuture(describe_model_weights(self.model), "describe_weights")

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Return copies of the whole weights with these names, on every rank."""
        with self._operation("gather_weights"):
            weights = gather_model_weights(self.model, names, keep_device=keep_device)
        return ImmediateTrainFuture(weights, "gather_weights")

    # -- BackendFeature.CHECKPOINTS

    def save_checkpoint(self, directory: Path | str) -> Future[None]:
        """Write the model directory, and each rank's other state into its subdirectory `sharded`. Any number of ranks can load it.

        Args:
            directory: existing directory on a file system that all ranks share.

        Raises: CheckpointError on all ranks if one of them cannot write.
        """
        directory = Path(directory)
        if self._save_in_background:
            with self._operation("save_checkpoint"):
                self._writer.wait()  # never hold two copies
                return self._begin_write(directory, "save_checkpoint")
        with self._operation("save_checkpoint"):
            self._save_adapters(directory)
            save_sharded(*self._trained(), directory, tokenizer=self.tokenizer, ranks=self.ranks)
        return ImmediateTrainFuture(None, "save_checkpoint")

    def stage_checkpoint(self, directory: Path | str) -> ImmediateTrainFuture[Callable[[], None]]:
        """Copy this rank's part of the state and begin to write it; the function that is returned waits for the parts of all ranks."""
        with self._operation("stage_checkpoint"):
            self._writer.settle()
            future = self._begin_write(Path(directory), "stage_checkpoint")
        return ImmediateTrainFuture(future.wait, "stage_checkpoint")

    def _begin_write(self, directory: Path, operation: str) -> WriteFuture:
        self._save_adapters(directory)
        snapshot = take_snapshot(*self._trained(), ranks=self.ranks, copied=True)
        write = partial(write_snapshot, snapshot, self.model, directory, tokenizer=self.tokenizer)
        return self._writer.start(lambda ranks: write(ranks=ranks), operation)

    def _save_adapters(self, directory: Path) -> None:
        if self._adapters is not None:  # adapters are small
            save_adapters(self._adapters, self.model, directory, ranks=self.ranks)

    def _trained(self) -> tuple[PreTrainedModel, torch.optim.Optimizer, Scheduler | None, Progress]:
        return self.model, self.optimizer, self.scheduler, Progress(self.counts, self.weight_version)

    def load_checkpoint(self, directory: Path | str) -> ImmediateTrainFuture[None]:
        """Restore a checkpoint that save_checkpoint wrote on any number of ranks, or one of PyTorchTrainingBackend.

        Raises: CheckpointError on all ranks, naming the mismatch.
        """
        with self._operation("load_checkpoint"):
            progress = load_sharded(self.model, self.optimizer, self.scheduler, Path(directory), ranks=self.ranks, adapters=self._adapters)
        self.counts, self.weight_version = progress.counts, progress.weight_version
        self._has_gradient = False
        self._load = self._counted = None
        self._reads = MetricReads()  # numbers of passes before it judge no update behind it
        return ImmediateTrainFuture(None, "load_checkpoint")

    def export_weights(self, directory: Path | str, *, dtype: str | None = None) -> ImmediateTrainFuture[None]:
        """Write config, weights (safetensors) and tokenizer in the layout that from_pretrained and inference servers open."""
        with self._operation("export_weights"):
            export_sharded(self.model, Path(directory), self.tokenizer, ranks=self.ranks, dtype=dtype)
        return ImmediateTrainFuture(None, "export_weights")

    def close(self) -> None:
        """Wait for the checkpoint that is being written in the background, and raise its error."""
        self._writer.close()

    # -- the rows of this rank alone

    def forward_shard(self, shard: TrainBatch | None, output_fn: OutputFn, *, with_entropy: bool = False) -> Tensor | None:
        """Run forward on this rank's rows; all ranks must call it.

        Args:
            shard: None = this rank has no rows.

        Returns: tensor of output_fn, [rows, T of the shard] on the CPU; None without rows.
        """
        self.model.eval()
        batch, packed = self._place(shard)
        with self._operation("forward"), torch.no_grad(), replaying(batch, self._options, packed):
            try:
                outputs = self._run(batch, packed, with_entropy)
            finally:
                drop_gathered(self.model)
            return None if shard is None else output_fn(outputs).cpu()

    def forward_backward_shard(self, shard: TrainBatch | None, loss_fn: LossFn, *, with_entropy: bool = False) -> UnreadMetrics:
        """Run forward_backward on this rank's rows; all ranks must call it. The resulting gradient covers the rows of all ranks.

        Args:
            shard: None = this rank has no rows.

        Returns: {"loss", "num_tokens", and the loss's metrics} of this rank's rows; without rows, zeros and no metrics. They are read with
            the norm of the gradient in optim_step, or when somebody asks for them; no other rank takes part in that.
        """
        recorded = {} if shard is None else list_recorded(shard)
        batch, packed = self._place(shard, dropout=shard is not None and shard.has_dropout)
        with (
            training_mode(self.model, dropout=batch.has_dropout),
            self._operation("forward_backward"),
            replaying(batch, self._options, packed),
        ):
            try:
                foreseen = ForeseenLoss(lambda outputs: loss_fn(outputs, batch)[0]) if self._foresees and shard is not None else None
                outputs = self._run(batch, packed, with_entropy, foreseen)
                if shard is None:  # as many exchanges as the other ranks, and a gradient of zero
                    values = self._reads.add(self._reads.keep_recorded({"loss": 0.0, "num_tokens": 0.0}, recorded))
                    torch.autograd.backward([0.0 * x.sum() for x in _differentiable(outputs)])
                else:
                    loss, metrics = loss_fn(outputs, batch)
                    assert batch.router_balance is None or self._counted is not None or self.num_shards == 1, (
                        "a batch with router_balance needs count_experts first: this rank knows the experts of its own rows only"
                    )
                    loss = add_balance(loss, batch, outputs.expert_load, self._counted)
                    loss.backward()
                    self._foresees = self._foresees and not (foreseen is not None and foreseen.failed)
                    self._load = add_loads(self._load, outputs.expert_load)
                    self._has_gradient = True  # also if a metric is no number
                    kept = self._reads.keep_recorded(metrics, recorded)
                    values = self._reads.add(list_metrics(loss, kept, batch), _combine_one if self.num_shards == 1 else dict)
            finally:
                drop_gathered(self.model)
        self._has_gradient = True
        return values

    def take_recorded_shard(self) -> tuple[RecordedTokens, ...]:
        """Run take_recorded on this rank's rows; no other rank takes part."""
        return self._reads.take_recorded()

    def count_experts_shard(self, shard: TrainBatch | None) -> None:
        """Run count_experts on this rank's rows; all ranks must call it.

        Args:
            shard: None = this rank has no rows.
        """
        batch, packed = self._place(shard)
        with training_mode(self.model, dropout=False), self._operation("count_experts"), torch.no_grad():
            try:
                with replaying(batch, self._options, packed):
                    outputs = self._run(batch, packed, with_entropy=False)
            finally:
                drop_gathered(self.model)
            self._counted = add_loads(self._counted, self._sum_load(None if shard is None else outputs.expert_load))

    # -- parts

    def _place(self, shard: TrainBatch | None, *, dropout: bool = False) -> tuple[TrainBatch, PackedRows]:
        """Plan the rows of a shard where it is, and move both to the device; rows that count nothing in place of a shard without rows.

        Args:
            dropout: with it no rows share tokens.
        """
        batch = self._dummy_batch() if shard is None else shard
        return move_batch(batch, self.device), pack_batch(batch, self.device, share=self._options.shares_prompts and not dropout)

    def _read_norm(self, norm: Tensor) -> float:
        """Read the norm of the whole gradient, and the metrics of this rank that nobody has read."""
        full = getattr(norm, "full_tensor", None)  # a method that all ranks must call
        return self._reads.read(norm if full is None else full())

    def _judge(self, norm: float, counts: UpdateCounts) -> str | None:
        """Judge the update by the numbers of all ranks, so that all decide alike."""
        own = self._reads.take_worst()
        found = gather_values(self.ranks, (own.is_loss_finite, own.max_ratio), operation="looking at the losses of an update")
        worst = reduce(Worst.merge, (Worst(bool(is_finite), ratio) for is_finite, ratio in found))
        return judge_update(norm, counts, worst=worst, policy=self._bad_numbers)

    def _sum_load(self, load: ExpertLoad | None) -> ExpertLoad | None:
        """Sum the loads of all ranks' rows; None = this rank has none. Every rank must call it."""
        routers = self._options.routers
        if not routers.modules:
            return None
        total = torch.zeros(len(routers.modules), 2 * routers.num_experts + 2, device=self.device)
        if load is not None:
            total += stack_load(load).detach()
        parts = all_gather(self.ranks, total, operation="gathering the load of the experts")
        return unstack_load(torch.stack(parts).sum(0))

    def _run(self, batch: TrainBatch, packed: PackedRows, with_entropy: bool, foreseen: ForeseenLoss | None = None) -> TokenOutputs:
        """Run run_rows inside the call that gathers the root's parameters; that call knows tensors only."""
        passes = self._agree_on_passes(packed)
        options = replace(self._options, with_entropy=with_entropy, native_passes=passes, foreseen=foreseen)

        def run() -> dict[str, Tensor]:
            outputs = run_rows(self.model, batch, self._compute_outputs, options, packed)
            columns: dict[str, Tensor | None] = {name: getattr(outputs, name) for name in _OUTPUTS}
            # not views: the backward pass hooks these very tensors
            found = {name: x.clone() for name, x in columns.items() if x is not None}
            return found if outputs.expert_load is None else {**found, "load": stack_load(outputs.expert_load)}

        found = call_gathered(self.model, run)
        load = found.pop("load", None)
        return TokenOutputs(**found, expert_load=None if load is None else unstack_load(load))

    def _agree_on_passes(self, packed: PackedRows) -> int:
        """Return the number of passes of native rows that every rank makes, since each pass gathers layers from all of them."""
        own = len(packed.same_length)
        if not self._options.native_attention or self.ranks.world_size == 1:
            return own
        counts = all_gather(self.ranks, torch.tensor(own, device=self.device), operation="counting the passes of all ranks")
        return int(torch.stack(counts).max())

    def _check_updated(self, metrics: Mapping[str, float]) -> None:
        """Run check_updated on all ranks, each on its part of the parameters; all raise the same error."""
        problem: BadNumberError | None = None
        try:
            check_updated(trained_parameters(self.model), self.counts, metrics)
        except BadNumberError as error:
            problem = error
        found = gather_values(self.ranks, None if problem is None else str(problem), operation="looking at the updated parameters")
        first = next((text for text in found if text is not None), None)
        if first is not None:
            raise BadNumberError(first, "parameter", {name: metrics[name] for name in ("grad_norm", "lr")}) from problem

    def _check_model(self) -> None:
        """Find the model's way through attention. Raises ConfigError if it has none on these ranks, or not the head that is read."""

        def check() -> None:
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._options.compute_dtype == torch.bfloat16):
                native = prepare_attention(self.model)
                self._options = replace(self._options, native_attention=native, routers=inspect_routers(self.model, native=native))
            check_head(self.model, self._compute_outputs, self._options, self.device)
            shares = can_share_prompts(self.model, self._compute_outputs, self._options, self.device)
            self._options = replace(self._options, shares_prompts=shares)

        with torch.no_grad():
            call_gathered(self.model, check)
        drop_gathered(self.model)

    def _dummy_batch(self) -> TrainBatch:
        """Return a row with loss weights of zero."""
        row = torch.zeros((1, 2), device=self.device)
        return TrainBatch(
            tokens=row.long(),
            lengths=torch.full((1,), 2, device=self.device),
            loss_mask=row,
            rewards=row[:, 0],
            group_ids=row[:, 0].long(),
            trainable=row[:, 0] > 0,
        )

    @contextmanager
    def _operation(self, name: str) -> Generator[None]:
        """Make this rank's device current in the calling thread, and name a failed exchange after the operation."""
        with explain_failures(self.ranks, name):
            if self.device.type == "cuda":
                with torch.cuda.device(self.device):
                    yield
            else:
                yield


def _combine_one(own: Mapping[str, float]) -> dict[str, float]:
    return combine_metrics([own])


def _differentiable(outputs: TokenOutputs) -> list[Tensor]:
    return [x for name in _OUTPUTS if (x := getattr(outputs, name)) is not None and x.requires_grad]
