"""Steps of a training loop: one optimizer step, and a forward pass over a batch of any size.

All jobs are submitted before any is awaited, so a pipelined backend goes from job to job without waiting for the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from rollouts.algorithms.losses import merge_metrics
from rollouts.algorithms.preferences import order_pairs, split_pairs
from rollouts.backends.futures import TrainFuture
from rollouts.backends.protocol import (
    BackendFeature,
    Future,
    OutputFn,
    RoutesExperts,
    TrainingBackend,
    count_shards,
    get_backend_features,
    require_backend_feature,
)
from rollouts.batches import find_shared_prompts, plan_sharded_microbatches, plan_shared_microbatches, select_rows
from rollouts.types import LossFn, TrainBatch

Metrics: TypeAlias = dict[str, float]
EvaluateFn: TypeAlias = Callable[[], Awaitable[Mapping[str, float]]]
"""Measures the current model, for example evaluate_prompts on held-out prompts; its keys are logged unchanged."""


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Whether an action due every `every` finished steps is due after `step` of them; 0 = only after the last."""
    return step == num_steps or (every > 0 and step % every == 0)


def measure_throughput(metrics: Metrics, num_tokens: int) -> None:
    """Add tokens_per_s, the tokens of a step's rows, prompts included, for each second of its step_s, unless that is 0."""
    if metrics.get("step_s", 0.0) > 0:
        metrics["tokens_per_s"] = num_tokens / metrics["step_s"]


@dataclass(frozen=True)
class PendingOptimizerStep:
    """Submitted jobs of one optimizer step."""

    parts: tuple[Future[dict[str, float]], ...]
    update: Future[dict[str, float]]
    counts: tuple[Future[None], ...] = ()  # passes before the others, which count the load of the experts

    async def result(self) -> Metrics:
        """Return the metrics of the whole step: loss (a sum over micro-batches), num_tokens, the loss's means, and those of the update."""
        for count in self.counts:
            await count.result()
        try:
            updated = await self.update.result()  # first, since it reads the metrics of all parts at once
        except Exception:
            for part in self.parts:
                if isinstance(part, TrainFuture) and part.error is not None:  # the reason why there was nothing to update by
                    await part.result()
            raise
        return merge_step_metrics([await part.result() for part in self.parts]) | updated


def submit_optimizer_step(
    backend: TrainingBackend,
    batch: TrainBatch,
    loss: LossFn,
    *,
    weigh: Callable[[TrainBatch], Tensor],
    max_tokens_per_microbatch: int,
    with_entropy: bool = False,
    router_balance_coef: float = 0.0,
) -> PendingOptimizerStep:
    """Submit the forward_backward calls of a batch, split into micro-batches, and the update that follows them.

    The loss weights are computed on the whole batch before it is split, so the gradient does not depend on the split. Rows without a
    trained token have no gradient and are then left out.

    Args:
        batch: the rows of one optimizer step, with advantages if the loss reads them.
        loss: (TokenOutputs, TrainBatch) -> LossOutput.
        weigh: TrainBatch -> loss_weights [B, T].
        max_tokens_per_microbatch: most real tokens of one process in a forward_backward; a longer row has a micro-batch of its own.
        router_balance_coef: coefficient of the load-balancing loss of a mixture of experts, see expert_load.py. Its factors are counted
            over the whole step: with several micro-batches or processes by a further forward pass of each, without gradient.

    Raises: ConfigError for a router_balance_coef that the backend cannot apply.
    """
    batch = select_trained_rows(replace(batch, loss_weights=weigh(batch)))
    micro = _split_step(backend, batch, max_tokens_per_microbatch)
    counts: tuple[Future[None], ...] = ()
    if router_balance_coef:
        balancing = require_balance(backend)
        micro = [replace(part, router_balance=torch.full_like(part.rewards, router_balance_coef)) for part in micro]
        if len(micro) > 1 or count_shards(backend) > 1:
            counts = tuple(balancing.count_experts(part) for part in micro)
    parts = tuple(backend.forward_backward(part, loss, with_entropy=with_entropy) for part in micro)
    return PendingOptimizerStep(parts=parts, update=backend.optim_step(), counts=counts)


def _split_step(backend: TrainingBackend, batch: TrainBatch, max_tokens: int) -> list[TrainBatch]:
    """Split the trained rows of a step into the batches of its calls; of a batch with pair_ids each holds whole pairs, side by side."""
    if batch.pair_ids is not None:
        return split_pairs(select_rows(batch, order_pairs(batch)), max_tokens=max_tokens, num_shards=count_shards(backend))
    plan = [
        [rows[i] for i in part]
        for rows in split_by_gradient(backend, batch)
        for part in plan_backend_microbatches(backend, select_rows(batch, rows), max_tokens)
    ]
    return [select_rows(batch, rows) for rows in plan]


def require_balance(backend: TrainingBackend) -> RoutesExperts:
    """Return the backend as one that balances experts. Raises ConfigError, with the reason, if it or its model cannot."""
    advice = "Set it to 0, or train with the PyTorch, functional or FSDP backend."
    balancing = require_backend_feature(backend, BackendFeature.EXPERTS, "router_balance_coef", instead=advice)
    balancing.check_balance()
    return balancing


def require_replay(backend: TrainingBackend) -> None:
    """Raise ConfigError, with the reason, unless the backend can replay recorded experts."""
    advice = "Set it to False, or train with the PyTorch, functional or FSDP backend."
    require_backend_feature(backend, BackendFeature.EXPERTS, "router_replay", instead=advice).check_replay()


def plan_backend_microbatches(backend: TrainingBackend, batch: TrainBatch, max_tokens: int) -> list[list[int]]:
    """Plan the rows of each call, so that no process of the backend has more than max_tokens at once.

    A prompt that rows share counts once, if the backend computes it once.
    """
    lengths, num_shards = batch.lengths.tolist(), count_shards(backend)
    shared = find_shared_prompts(batch) if _skips_redundant(backend) else None
    if shared is not None and num_shards == 1:
        return plan_shared_microbatches(lengths, shared, max_tokens=max_tokens)
    return plan_sharded_microbatches(lengths, max_tokens=max_tokens, num_shards=num_shards)


def split_by_gradient(backend: TrainingBackend, batch: TrainBatch) -> list[list[int]]:
    """Split the rows of a step in those with an advantage, and behind them those with none, as in a group of equal rewards.

    A backend passes on no gradient that is zero (BackendFeature.REDUNDANCY), which it can only see for a call as a whole. Whether these
    rows have a gradient is the loss's affair: a KL term gives them one.

    Returns: positions of rows, ascending; one list if the batch does not allow it (TrainBatch.skip_redundant) or all rows are of one kind.
    """
    rows = range(batch.num_rows)
    if batch.advantages is None or batch.router_balance is not None or not batch.skip_redundant or not _skips_redundant(backend):
        return [list(rows)]
    has_advantage = ((batch.advantages != 0) & (batch.loss_mask > 0)).any(1).tolist()
    parts = [[row for row in rows if has_advantage[row]], [row for row in rows if not has_advantage[row]]]
    return [part for part in parts if part]


def _skips_redundant(backend: TrainingBackend) -> bool:
    return BackendFeature.REDUNDANCY in get_backend_features(backend)


def find_trained_rows(batch: TrainBatch) -> list[int]:
    """Find the positions of the rows with a gradient: trainable, with a token of loss_mask > 0."""
    on = (batch.loss_mask > 0).any(1) & batch.trainable
    return [row for row, is_trained in enumerate(on.tolist()) if is_trained]


def select_trained_rows(batch: TrainBatch) -> TrainBatch:
    """Select the rows with a gradient; return the batch unchanged if none or all rows have one."""
    rows = find_trained_rows(batch)
    return batch if len(rows) in (0, batch.num_rows) else select_rows(batch, rows)


def merge_step_metrics(parts: Sequence[Mapping[str, float]]) -> Metrics:
    """Merge the metrics of one step's forward_backward calls: losses and token counts add, means are weighted by tokens."""
    assert parts, "an optimizer step needs at least one forward_backward result"
    means = [({k: v for k, v in part.items() if k not in ("loss", "num_tokens")}, int(part["num_tokens"])) for part in parts]
    totals = {key: sum(part[key] for part in parts) for key in ("loss", "num_tokens")}
    return totals | merge_metrics(means)


def mean_step_metrics(steps: Sequence[Mapping[str, float]]) -> Metrics:
    """Average the metrics of several optimizer steps: token-weighted means; num_tokens and num_bad_... add; lr is the last one's."""
    assert steps, "expected the metrics of at least one optimizer step"
    counted = sorted({name for step in steps for name in step if name.startswith("num_bad_")})
    bad = {name: sum(step.get(name, 0.0) for step in steps) for name in counted}
    skip = ("num_tokens", "lr", *bad)
    # a skipped update counts as one step; without tokens it would have no weight in any mean
    means = [({k: v for k, v in step.items() if k not in skip}, max(1, int(step["num_tokens"]))) for step in steps]
    sums = {"num_tokens": sum(s["num_tokens"] for s in steps)} | bad
    return merge_metrics(means) | sums | {k: v for k, v in steps[-1].items() if k == "lr"}


@dataclass(frozen=True, eq=False)
class PendingForward:
    """Submitted forward pass over a batch."""

    batch: TrainBatch
    parts: tuple[tuple[int, ...], ...]  # rows of each micro-batch
    futures: tuple[Future[Tensor], ...]  # one a micro-batch

    async def result(self) -> Tensor:
        """Return [B, T] in the row order of the batch, or [B, T, ...] as output_fn; 0 on pads and in untrained rows."""
        out = torch.zeros(self.batch.tokens.shape, dtype=torch.float32)
        for rows, future in zip(self.parts, self.futures, strict=True):
            part = await future.result()  # [rows, T of the micro-batch <= T, ...]
            if part.dim() > out.dim():
                out = torch.zeros((*out.shape, *part.shape[2:]), dtype=torch.float32)
            out[torch.tensor(rows), : part.shape[1]] = part
        return out


def submit_forward(
    backend: TrainingBackend, batch: TrainBatch, output_fn: OutputFn, *, max_tokens_per_microbatch: int, with_entropy: bool = False
) -> PendingForward:
    """Submit backend.forward over a batch of any size, by micro-batches. Rows without a trained token are not computed."""
    trained = find_trained_rows(batch)
    plan = plan_backend_microbatches(backend, select_rows(batch, trained), max_tokens_per_microbatch) if trained else []
    parts = tuple(tuple(trained[i] for i in part) for part in plan)
    futures = tuple(backend.forward(select_rows(batch, rows), output_fn, with_entropy=with_entropy) for rows in parts)
    return PendingForward(batch, parts, futures)
