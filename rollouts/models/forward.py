"""Forward pass of a model over the rows of a batch: packed behind each other, attention inside each row, outputs read by a head.

The rows of a micro-batch become one sequence [1, N] whose position ids restart at each row, so no pad token is computed. Attention is the
only part of a transformer that mixes positions, and it stays inside a row: everything else needs no change. On a GPU in half precision one
call attends in all rows; elsewhere rows of one length share a batched call without pads: a micro-batch with few distinct lengths makes few
calls. A row of several contexts is packed as if each of them were a row. A prompt that the rows of a group share can be packed once, as a
sequence of its own; the rest of each row is then a sequence whose tokens attend to the prompt, too (pack_shared). prepare.py makes a model
ready for this, or refuses it.

A head turns the last hidden states into log-probs of a language model, values of a critic or scores of a reward model. A backend takes one
of the three functions as its compute_outputs; everything else about it is the same for all three.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollouts.algorithms.distillation.divergences import TeacherTops, chunked_divergence, chunked_tops
from rollouts.algorithms.logprobs import Foresight, LogitTransform, PackedShift, Sampling, chunked_log_probs, shift_packed
from rollouts.batches import SharedPrompts, find_context_starts, find_shared_prompts, map_kept, map_turns, select_kept
from rollouts.data.model_limits import ModelLimits
from rollouts.errors import ConfigError, DataError
from rollouts.models.linear import ONEDNN, OneDNNLinear
from rollouts.models.replay import check_replayed, replay_experts, select_routers
from rollouts.models.routers import LoadRecord, Routers, record_choices
from rollouts.types import KeptSets, TokenOutputs, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ATTENTION_NAME = "rollouts"
"""Name of attend in transformers' registry."""

USE_ANOTHER = "Use another model, or one of this family without that"
_PASSED_ON = ("scaling", "dropout", "sliding_window")  # keywords of attention that an AttendFn gets
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # keywords of name_boundaries
_UNRELATED = ("position_ids", "use_cache", "output_router_logits", *_BOUNDARIES)  # keywords that our attention does not need


AttendFn: TypeAlias = Callable[[Any, Tensor, Tensor, Tensor, "float | None", float, "int | None"], Tensor]
"""f(module, query [B, Hq, N, D], key [B, Hk, N, D], value, scaling, dropout, window) -> [B, N, Hq, D].

window: most tokens that a token attends to, itself included; None = all before it.
"""

ComputeOutputs: TypeAlias = "Callable[[PreTrainedModel, Tensor, PackedRows, Tensor | None, OutputOptions], TokenOutputs]"
"""f(model, hidden [N, H], packed, temperatures [B] or None, options) -> outputs [B, T]. ConfigError for a model without that head."""


@dataclass(frozen=True, eq=False)
class Continuations:
    """Sequences of PackedRows that begin behind a prompt which is a sequence of its own. M = real tokens of the rows, more than N."""

    sources: Tensor  # [M] int64: packed position of each token of the rows
    flat_index: Tensor  # [M] int64: position of each token of the rows in the flattened [B * T] batch
    prompts: tuple[int, ...]  # tokens of the prompts before the sequences of each entry of same_length; 0 = none
    keys: Tensor  # [K] int64: packed positions that sequences attend to, in the order of by_length: of the prompt, then its own


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The real tokens of a batch behind each other, in R sequences: the contexts of its rows, or shared prompts and what follows them."""

    tokens: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64, restarting at each context
    cu_seqlens: Tensor  # [R + 1] int64: sequence r occupies [cu_seqlens[r], cu_seqlens[r + 1])
    flat_index: Tensor  # [N] int64: position of each packed token in the flattened [B * T] batch; of a shared one, in the first row
    shape: tuple[int, int]  # (B, T)
    same_length: tuple[tuple[int, int], ...]  # (S, L): number of sequences of each distinct length L, the shortest first; those behind
    # prompts of different lengths apart
    by_length: Tensor  # [N] int64: packed positions, sequences of the first length first
    order: Tensor  # [N] int64: position of each packed token in by_length
    shift: PackedShift  # predictors and predicted positions
    cuts: dict[int, PackedRows] = field(default_factory=dict[int, "PackedRows"])  # results of cut
    continuations: Continuations | None = None  # None = no prompt is shared, and the packed tokens are those of the rows
    kept: KeptSets | None = None  # [M] sets that the predicted tokens were drawn from; None = all of the whole vocabulary
    tops: TeacherTops | None = None  # [M] what a teacher finds most probable there; None = no divergence is computed

    def unpack(self, values: Tensor) -> Tensor:
        """Unpack [N, ...] -> [B, T, ...], 0 on pads, a shared token in each of its rows; keeps the gradient."""
        flat = torch.zeros((self.shape[0] * self.shape[1], *values.shape[1:]), dtype=values.dtype, device=values.device)
        if self.continuations is not None:
            values = values.index_select(0, self.continuations.sources)
            return flat.index_copy(0, self.continuations.flat_index, values).view(*self.shape, *values.shape[1:])
        return flat.index_copy(0, self.flat_index, values).view(*self.shape, *values.shape[1:])

    def split_lengths(self, values: Tensor) -> list[Tensor]:
        """Split values [N, ...] of packed tokens into one [S, L, ...] for each distinct length; the gradient is gathered, not scattered."""
        sizes = [count * length for count, length in self.same_length]
        parts = values[None] if len(sizes) == 1 else _Permuted.apply(values, self.by_length, self.order).split(sizes)
        return [part.reshape(*shape, *values.shape[1:]) for part, shape in zip(parts, self.same_length, strict=True)]

    def split_keys(self, values: Tensor) -> list[Tensor]:
        """Split keys or values [N, ...] as split_lengths, those of a shared prompt before those of a sequence: [S, P + L, ...]."""
        if self.continuations is None:
            return self.split_lengths(values)
        prompts = self.continuations.prompts
        shapes = [(count, prompt + length) for (count, length), prompt in zip(self.same_length, prompts, strict=True)]
        parts = values.index_select(0, self.continuations.keys).split([count * length for count, length in shapes])
        return [part.reshape(*shape, *values.shape[1:]) for part, shape in zip(parts, shapes, strict=True)]

    def join_lengths(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of split_lengths to values [N, ...] of packed tokens."""
        flat = [part.flatten(0, 1) for part in parts]
        return flat[0] if len(flat) == 1 else _Permuted.apply(torch.cat(flat), self.order, self.by_length)

    def cut(self, size: int) -> PackedRows:
        """Return the rows with each sequence cut behind every `size` tokens, as attention in chunks sees them; planned once."""
        assert self.continuations is None, f"sequences with shared prompts are not cut, as into chunks of {size}"
        if self.same_length[-1][1] <= size:
            return self
        if size not in self.cuts:
            numbers = (self.position_ids % size == 0).cumsum(0)
            lengths = torch.full((1,), self.tokens.numel(), device=self.tokens.device)
            self.cuts[size] = pack_padded(self.tokens[None], lengths, numbers[None])
        return self.cuts[size]

    def to(self, device: torch.device) -> PackedRows:
        """Return the rows with every tensor on the device."""
        if self.tokens.device == device:
            return self
        assert self.continuations is None, f"shared prompts are packed on the CPU alone, not for {device}"
        moved: dict[str, Any] = {f.name: _send(x, device) for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        kept = None if self.kept is None else map_kept(self.kept, partial(_send, device=device))
        tops = self.tops
        if tops is not None:
            rest = None if tops.rest is None else _send(tops.rest, device)
            tops = replace(tops, ids=_send(tops.ids, device), log_probs=_send(tops.log_probs, device), rest=rest)
        return replace(self, **moved, shift=PackedShift(*(_send(x, device) for x in self.shift)), cuts={}, kept=kept, tops=tops)


class _Permuted(torch.autograd.Function):
    """values[index] for a permutation whose inverse is known: the gradient is gathered by the inverse, where autograd would scatter it."""

    @staticmethod
    def forward(values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return values.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


@dataclass(eq=False)
class ForeseenLoss:
    """A loss known before its outputs: its gradient is computed together with log-probs whose logits are too many to keep."""

    loss: Callable[[TokenOutputs], Tensor]  # pure; called with log-probs of which some are still 0
    foresight: Foresight | None = None  # foresight of the newest pass

    @property
    def failed(self) -> bool:
        """Whether a backward pass had another gradient: the loss of a token depends on other tokens, and to foresee it cost time."""
        return self.foresight is not None and self.foresight.failed

    def foresee(self, packed: PackedRows, positions: Tensor, *, with_entropy: bool) -> Foresight:
        """Return the gradient of the loss with respect to log-probs # [M] at these packed positions."""

        def differentiate(log_probs: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = log_probs.detach().requires_grad_()
                placed = _place(leaf, packed, positions)
                try:
                    loss = self.loss(TokenOutputs(log_probs=placed, entropy=torch.zeros_like(placed) if with_entropy else None))
                except (ValueError, RuntimeError, ArithmeticError, AssertionError):  # incomplete log-probs may be refused
                    return torch.zeros_like(leaf)
                return torch.autograd.grad(loss, leaf, materialize_grads=True)[0] if loss.requires_grad else torch.zeros_like(leaf)

        self.foresight = Foresight(differentiate)
        return self.foresight


@dataclass(frozen=True)
class OutputOptions:
    """Options of the computation of outputs; none changes their meaning."""

    compute_dtype: torch.dtype = torch.float32  # dtype of matrix products with the vocabulary
    chunk_size: int | None = None  # tokens whose logits exist at the same time; None = choose_chunk_size
    with_entropy: bool = False
    native_attention: bool = False  # run rows of one length at a time with the model's own attention instead of packed rows
    native_passes: int = 0  # least number of passes then, some of which count nothing: ranks of a sharded model make equally many
    shares_prompts: bool = False  # run shared prompts once where a batch allows it; see prepare.can_share_prompts
    routers: Routers = field(default_factory=Routers)  # routers of the model; their load is measured
    foreseen: ForeseenLoss | None = None  # loss of these outputs; None = not known yet


def run_rows(
    model: PreTrainedModel, batch: TrainBatch, compute_outputs: ComputeOutputs, options: OutputOptions, packed: PackedRows | None = None
) -> TokenOutputs:
    """Run a packed forward pass and return the result of compute_outputs, placed in [B, T].

    Args:
        model: prepared by prepare.prepare_attention.
        batch: on the model's device.
        options: compute_dtype bfloat16 runs the model's matrix products in bfloat16 (autocast).
        packed: the batch's rows, planned by pack_batch before they were moved, so that nothing waits for the device; None = plan them here.
    """
    packed = pack_batch(batch, batch.tokens.device, share=options.shares_prompts) if packed is None else packed
    record = LoadRecord(options.routers, with_gradient=batch.router_balance is not None and torch.is_grad_enabled())
    with torch.autocast(batch.tokens.device.type, dtype=torch.bfloat16, enabled=options.compute_dtype == torch.bfloat16):
        with record_choices(options.routers, record.note):
            hidden = (run_native if options.native_attention else run_packed)(model, packed)  # [N, H]
        hidden = add_idle_passes(model, hidden, packed, options.native_passes)
    outputs = compute_outputs(model, hidden, packed, batch.temperatures, options)
    return replace(outputs, expert_load=record.sum_up()) if options.routers.modules else outputs


def is_gradient_zero(loss: Tensor, outputs: TokenOutputs) -> bool:
    """Whether a loss has a gradient of exactly zero with respect to all outputs, so that a backward pass would add nothing.

    Args:
        loss: a function of the outputs, not yet differentiated.
    """
    found = [x for x in (outputs.log_probs, outputs.entropy, outputs.values, outputs.divergence) if x is not None and x.requires_grad]
    if not found or not loss.requires_grad:
        return False
    gradients = cast("tuple[Tensor | None, ...]", torch.autograd.grad(loss, found, retain_graph=True, allow_unused=True))
    return all(gradient is None or not bool(gradient.any()) for gradient in gradients)


@contextmanager
def replaying(batch: TrainBatch, options: OutputOptions, packed: PackedRows | None = None) -> Generator[None]:
    """Make the routers of passes of this batch, and of recomputed layers, choose its recorded experts; without any, do nothing.

    Args:
        batch, packed: as in run_rows.

    Raises: ConfigError for a model that cannot replay; DataError for a record of another model.
    """
    calls: dict[tuple[int, int], Tensor] = {}
    if batch.routed_experts is not None:
        options.routers.check_replay()
        recorded = select_routers(options.routers, batch.routed_experts)
        check_replayed(options.routers, recorded)
        packed = pack_batch(batch, batch.tokens.device) if packed is None else packed
        experts = recorded.flatten(0, 1)[packed.flat_index].long()  # [N, routers, k]
        calls = {(1, len(experts)): experts}
        if options.native_attention:
            calls = {(1, 1): torch.full_like(experts[:1], -1)}  # a pass of add_idle_passes
            calls |= dict(zip(packed.same_length, (part.flatten(0, 1) for part in packed.split_lengths(experts)), strict=True))
    with replay_experts(options.routers, calls):
        yield


def check_batch(batch: TrainBatch, limits: ModelLimits) -> None:
    """Raise DataError, with the position in the batch, for the first row beyond the limits of the model."""
    rows, width = batch.tokens.shape
    if batch.teacher_beta is not None and batch.teacher_ids is not None and int(batch.teacher_ids.max()) >= limits.num_embeddings:
        raise DataError(
            f"the teacher names the token {int(batch.teacher_ids.max())}, but the policy has {limits.num_embeddings} embeddings: make the "
            f"teacher with create_reference_backend(..., tops_vocab_size={limits.num_embeddings})"
        )
    if batch.targets is not None and not 0 <= int(batch.targets.min()) <= int(batch.targets.max()) < limits.num_embeddings:
        bad = batch.targets[(batch.targets < 0) | (batch.targets >= limits.num_embeddings)]
        raise DataError(f"a batch has the target {int(bad[0])}, outside the model's {limits.num_embeddings} embeddings")
    too_long = limits.context_length is not None and width > limits.context_length
    if not too_long and int(batch.tokens.min()) >= 0 and int(batch.tokens.max()) < limits.num_embeddings:
        return
    for i in range(rows):
        tokens = batch.tokens[i, : int(batch.lengths[i])]
        longest = len(tokens)
        if batch.context_ids is not None:  # each context is computed as a sequence of its own
            longest = int(batch.context_ids[i, : len(tokens)].unique(return_counts=True)[1].max())
        why = limits.explain(longest, int(tokens.min()), int(tokens.max()))
        if why is not None:
            raise DataError(f"row {i} of {rows} of a batch {why}")


def admit_batch(batch: TrainBatch, limits: ModelLimits, device: torch.device) -> TrainBatch:
    """Check a batch against the model's limits and move it. Raises DataError naming the row that the model cannot take."""
    check_batch(batch, limits)
    return move_batch(batch, device)


def move_batch(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """Return the batch with every column on the device."""
    if batch.tokens.device == device:
        return batch
    send = partial(_send, device=device)
    moved: dict[str, Any] = {f.name: send(getattr(batch, f.name)) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
    if batch.turns is not None:
        moved["turns"] = map_turns(batch.turns, send)
    if batch.kept is not None:
        moved["kept"] = map_kept(batch.kept, send)
    if batch.reward_components is not None:
        moved["reward_components"] = replace(batch.reward_components, scores=send(batch.reward_components.scores))
    return replace(batch, **moved)


def _send(values: Tensor, device: torch.device) -> Tensor:
    """Copy to a device; to a GPU from pinned memory, behind the work already submitted, so that the caller need not wait."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


@contextmanager
def training_mode(model: PreTrainedModel, *, dropout: bool) -> Generator[None]:
    """Run a pass that is trained on, and its backward pass, with or without dropout.

    Without dropout the model is in eval mode, which also keeps the routers of some models from adding noise. Layers that recompute their
    activations in the backward pass stay in training mode, since transformers recomputes in no other; their dropout rates are 0 meanwhile.
    """
    module = cast("torch.nn.Module", model)
    module.train(dropout)
    rates: list[tuple[torch.nn.Module, str, float]] = []
    if not dropout:
        for layer in module.modules():
            if getattr(layer, "gradient_checkpointing", False):
                layer.training = True
                rates += [(layer, name, value) for name, value in vars(layer).items() if isinstance(value, float) and "drop" in name]
    for layer, name, _ in rates:
        setattr(layer, name, 0.0)
    try:
        yield
    finally:
        for layer, name, value in rates:
            setattr(layer, name, value)


def pack_padded(tokens: Tensor, lengths: Tensor, context_ids: Tensor | None = None) -> PackedRows:
    """Plan the packing of padded rows.

    Args:
        tokens: # [B, T] int64, padded on the right.
        lengths: # [B] int64, at least 1.
        context_ids: # [B, T] int64, see TrainBatch; None = each row is one context.

    Returns: PackedRows with N = sum of lengths and R = number of contexts in all rows.
    """
    rows, width = tokens.shape
    assert bool((lengths >= 1).all()), f"every row needs at least one token, found lengths {lengths.tolist()}"
    columns = torch.arange(width, device=tokens.device)
    flat_index = (columns < lengths[:, None]).flatten().nonzero().squeeze(-1)
    begins = (columns == 0).expand(rows, width) if context_ids is None else find_context_starts(context_ids)
    starts = begins.flatten()[flat_index].nonzero().squeeze(-1)  # [R]
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=flat_index.numel())
    sizes = cu_seqlens.diff()
    distinct, counts = sizes.unique(return_counts=True)  # ascending
    by_length = torch.argsort(sizes.repeat_interleave(sizes), stable=True)
    packed_tokens = tokens.flatten()[flat_index]
    return PackedRows(
        tokens=packed_tokens,
        position_ids=torch.arange(flat_index.numel(), device=tokens.device) - starts.repeat_interleave(sizes),
        cu_seqlens=cu_seqlens,
        flat_index=flat_index,
        shape=(rows, width),
        same_length=tuple(zip(cast("list[int]", counts.tolist()), cast("list[int]", distinct.tolist()), strict=True)),
        by_length=by_length,
        order=torch.argsort(by_length),
        shift=shift_packed(packed_tokens, cu_seqlens),
    )


def pack_shared(tokens: Tensor, lengths: Tensor, shared: SharedPrompts) -> PackedRows:
    """Plan the packing of padded rows, with the tokens that rows of a group share packed once, in the first of these rows.

    Args:
        tokens, lengths: as in pack_padded.
        shared: result of find_shared_prompts.

    Returns: PackedRows with a sequence for each shared prompt and one for the rest of each row; a row that shares nothing is one sequence.
    """
    rows, width = tokens.shape
    columns, row_ids = torch.arange(width), torch.arange(rows)
    prompts, leads = shared.lengths, shared.leaders == row_ids
    is_real = columns < lengths[:, None]
    is_own = columns >= torch.where(leads, 0, prompts)[:, None]  # [B, T]
    flat_index = (is_real & is_own).flatten().nonzero().squeeze(-1)
    position_ids, row_of = flat_index % width, flat_index // width
    starts = ((position_ids == 0) | (position_ids == prompts[row_of])).nonzero().squeeze(-1)  # [R]
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=flat_index.numel())
    sizes, offsets = cu_seqlens.diff(), position_ids[starts]  # offsets [R]: tokens of the prompt before a sequence
    packed_at = torch.zeros(rows * width, dtype=torch.int64).index_copy(0, flat_index, torch.arange(flat_index.numel())).view(rows, width)
    sources = packed_at[torch.where(is_own, row_ids[:, None], shared.leaders[:, None]), columns]  # [B, T]
    kinds = sizes * (width + 1) + offsets
    distinct, counts = kinds.unique(return_counts=True)  # ascending: by length, then by the prompt's length
    order = torch.argsort(kinds, stable=True)  # sequences by kind
    keys: list[Tensor] = []
    for kind, same in zip(distinct.tolist(), order.split(cast("list[int]", counts.tolist())), strict=True):
        end = kind % (width + 1) + kind // (width + 1)
        keys.append(sources[row_of[starts[same]], :end].flatten())
    by_length = torch.argsort(kinds.repeat_interleave(sizes), stable=True)
    packed_tokens = tokens.flatten()[flat_index]
    before = torch.where(offsets > 0, sources[row_of[starts], (offsets - 1).clamp(min=0)], -1)
    flat_rows = is_real.flatten().nonzero().squeeze(-1)
    lengths_of_kinds, prompts_of_kinds = (
        cast("list[int]", (distinct // (width + 1)).tolist()),
        cast("list[int]", (distinct % (width + 1)).tolist()),
    )
    return PackedRows(
        tokens=packed_tokens,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        flat_index=flat_index,
        shape=(rows, width),
        same_length=tuple(zip(cast("list[int]", counts.tolist()), lengths_of_kinds, strict=True)),
        by_length=by_length,
        order=torch.argsort(by_length),
        shift=shift_packed(packed_tokens, cu_seqlens, before),
        continuations=Continuations(sources.flatten()[flat_rows], flat_rows, tuple(prompts_of_kinds), torch.cat(keys)),
    )


def pack_batch(batch: TrainBatch, device: torch.device, *, share: bool = False) -> PackedRows:
    """Plan the packing of a batch's rows where they are, and move the plan to the device of the pass.

    Args:
        share: pack shared prompts once, if the batch has any (find_shared_prompts).
    """
    shared = find_shared_prompts(batch) if share else None
    if shared is not None:
        return pack_shared(batch.tokens, batch.lengths, shared)
    packed = pack_padded(batch.tokens, batch.lengths, batch.context_ids)
    if batch.targets is not None:
        targets = batch.targets.flatten()[packed.flat_index[packed.shift.positions]]
        packed = replace(packed, shift=packed.shift._replace(targets=targets))
    if batch.kept is not None:
        predicted = packed.flat_index[packed.shift.positions]
        packed = replace(packed, kept=select_kept(batch.kept, lambda column: column.flatten()[predicted]))
    if batch.teacher_beta is not None and batch.teacher_ids is not None and batch.teacher_tops is not None:
        predicted = packed.flat_index[packed.shift.positions]
        ids, theirs = batch.teacher_ids.flatten(0, 1)[predicted], batch.teacher_tops.flatten(0, 1)[predicted]
        packed = replace(packed, tops=TeacherTops(ids, theirs[:, :-1], float(batch.teacher_beta[0]), theirs[:, -1]))
    return packed.to(device)


def run_packed(model: PreTrainedModel, packed: PackedRows, attend_fn: AttendFn | None = None, **more: Any) -> Tensor:
    """Return the last hidden states of packed rows, after the final norm and before the output layer: # [N, H].

    Args:
        model: prepared by prepare.use_packed_attention.
        attend_fn: attention function for the layers, with the signature of attend_packed without `packed`.
        more: further keywords for the attention function that transformers calls.
    """
    output = cast("Any", get_decoder(model))(
        input_ids=packed.tokens[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        attend_fn=attend_fn or partial(attend_packed, packed=packed),
        **name_boundaries(model, packed),
        **more,
    )
    return output.last_hidden_state[0]


def name_boundaries(model: PreTrainedModel, packed: PackedRows) -> dict[str, Any]:
    """Name the boundaries of packed rows as transformers does, for kernels of linear attention; empty for a model without such layers.

    transformers raises ValueError, naming the package to install, where only its own implementation is there, which mixes rows.
    """
    if "linear_attention" not in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        return {}
    ends, num_tokens = packed.cu_seqlens.int(), packed.tokens.numel()
    rows = torch.arange(len(ends) - 1, dtype=torch.int32, device=ends.device).repeat_interleave(ends.diff(), output_size=num_tokens)
    longest = packed.same_length[-1][1]
    return dict(zip(_BOUNDARIES, (ends, ends, longest, longest, rows[None]), strict=True))


def run_native(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """Return what run_packed returns, from the model's own forward passes: one for each distinct length, over all sequences of that length.

    Args:
        model: prepared by prepare.prepare_attention, with its own attention.
    """
    decoder = cast("Any", get_decoder(model))
    rows = packed.split_lengths(packed.tokens)  # [S, L] each
    return packed.join_lengths([decoder(input_ids=tokens, use_cache=False).last_hidden_state for tokens in rows])


def add_idle_passes(model: PreTrainedModel, hidden: Tensor, packed: PackedRows, num_passes: int) -> Tensor:
    """Return the hidden states of run_native after passes of one token that count nothing, until num_passes were made."""
    decoder, token = cast("Any", get_decoder(model)), packed.tokens[:1][None]
    missing = range(num_passes - len(packed.same_length))
    idle = [decoder(input_ids=token, use_cache=False).last_hidden_state.sum() for _ in missing]
    return hidden + 0.0 * torch.stack(idle).sum() if idle else hidden


def attend(
    module: Any,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,  # [1, Hk, N, D]
    value: Tensor,  # [1, Hk, N, D]
    attention_mask: Tensor | None,
    attend_fn: AttendFn | None = None,
    **call: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls in every layer; calls the attend_fn that the model's caller passed.

    Training and decoding share this entry, because two models made from one config object share its attention setting.

    Raises: ConfigError for a keyword that no attend_fn supports, or a mask of the model's own.
    """
    assert attend_fn is not None, (
        f"a model with attention {ATTENTION_NAME!r} was called without attend_fn: it belongs to a backend or engine. "
        'Use their methods, or model.set_attn_implementation("sdpa") first'
    )
    for name, found in call.items():
        if found is not None and name not in (*_PASSED_ON, *_UNRELATED) and not (name == "is_causal" and found is True):
            raise ConfigError(_explain_refusal(module, name, found))
    if attention_mask is not None:
        raise ConfigError(f"{name_layer(module)} has a mask of its own, which is not computed here: {USE_ANOTHER}")
    return attend_fn(module, query, key, value, call.get("scaling"), call.get("dropout", 0.0), call.get("sliding_window")), None


def attend_packed(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, window: int | None, *, packed: PackedRows
) -> Tensor:
    """Causal attention inside each sequence and the prompt before it. query: # [1, Hq, N, D]; key, value: # [1, Hk, N, D].

    Returns: # [1, N, Hq, D].
    """
    query = tune_queries(module, query, packed.position_ids)
    chunk = find_chunk(module)
    packed = packed if chunk is None else packed.cut(chunk)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [N, H, D]
    grouped = query.shape[1] != key.shape[1]
    if has_varlen(query, value, dropout):
        return attend_varlen(rows, scaling, window, packed).unsqueeze(0)
    outputs: list[Tensor] = []
    queries, keys, values = packed.split_lengths(rows[0]), packed.split_keys(rows[1]), packed.split_keys(rows[2])
    for parts in zip(queries, keys, values, strict=True):  # [S, L, Hq, D], [S, P + L, Hk, D]
        q, k, v = (x.transpose(1, 2) for x in parts)
        length, whole = q.shape[2], k.shape[2]
        is_plain = length == whole and (window is None or length <= window)
        seen = None if is_plain else _see_before(length, whole, window, query.device)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=seen, dropout_p=dropout, is_causal=seen is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(out.transpose(1, 2))  # [S, L, Hq, D]
    return packed.join_lengths(outputs).unsqueeze(0)


def find_chunk(module: Any) -> int | None:
    """Return the size in tokens of the chunks that an attention layer stays inside, as Llama 4's do; None for any other layer."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = cast("Sequence[str]", getattr(config, "layer_types", None) or ())
    if not isinstance(layer, int) or layer >= len(kinds) or kinds[layer] != "chunked_attention":
        return None
    return cast("int", cast("Any", config).attention_chunk_size)


def tune_queries(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Give queries the temperature of their positions in their own sequences (arXiv 2501.19399), in layers of Llama 4 without rotation.

    transformers takes the place in the pass for the position. prepare.early_temperatures makes checks see this.

    Args:
        query: # [B, Hq, N, D].
        positions: # [N] or [B, N].
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    def compute_scale(places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    factor = compute_scale(positions) / compute_scale(torch.arange(query.shape[2], device=query.device))
    return (query * factor[..., None, :, None]).to(query.dtype)


def has_varlen(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether torch has one attention call for all rows on this device, in this dtype and head size; it knows no dropout."""
    if query.device.type != "cuda" or find_attention_dtype(query) not in (torch.bfloat16, torch.float16) or dropout > 0:
        return False
    sizes_fit = query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return sizes_fit and torch.cuda.get_device_capability(query.device) >= (8, 0)


def find_attention_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype that attention computes in: that of autocast, where rotated queries and keys are float32, or the query's."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def attend_varlen(rows: Sequence[Tensor], scaling: float | None, window: int | None, packed: PackedRows) -> Tensor:
    """Attend in all rows by one call (FlashAttention-2, arXiv 2307.08691).

    Args:
        rows: query # [N, Hq, D], key and value # [N, Hk, D].

    Returns: # [N, Hq, D], in the dtype of attention.
    """
    from torch.nn.attention.varlen import varlen_attn  # since torch 2.10; this backend runs without it elsewhere

    query, key, value = (x.to(find_attention_dtype(rows[0])) for x in rows)
    ends, longest = packed.cu_seqlens.int(), packed.same_length[-1][1]
    left = -1 if window is None or window >= longest else window - 1  # tokens before a position that it attends to
    grouped = query.shape[1] != key.shape[1]
    attend_rows: Callable[..., Any] = varlen_attn
    return attend_rows(query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(left, 0), enable_gqa=grouped)


def _see_before(length: int, whole: int, window: int | None, device: torch.device) -> Tensor:
    """Mark the positions that the last `length` of `whole` positions attend to: each to itself and those before it, `window` at most.

    Returns: # [L, W] bool.
    """
    seen = torch.ones(length, whole, dtype=torch.bool, device=device).tril(whole - length)
    return seen if window is None else seen.triu(whole - length + 1 - window)


def compute_log_probs(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> TokenOutputs:
    """Head of a policy: log p(tokens[:, t] | tokens[:, :t]) and, on request, the entropy, computed in chunks of tokens.

    In a row of several contexts a token is conditioned on its own context; both outputs are 0 at the first token of each.
    """
    reading = _read_output_layer(model, hidden, packed, temperatures, options)
    positions = packed.shift.positions
    foreseen = None if options.routers.modules or packed.tops is not None else options.foreseen
    log_probs, entropy = chunked_log_probs(
        reading.inputs,
        reading.weight,
        packed.shift.targets,
        sampling=Sampling(reading.temperatures, packed.kept),
        with_entropy=options.with_entropy,
        foresight=None if foreseen is None else foreseen.foresee(packed, positions, with_entropy=options.with_entropy),
        **reading.settings,
    )
    outputs = TokenOutputs(
        log_probs=_place(log_probs, packed, positions),
        entropy=None if entropy is None else _place(entropy, packed, positions),
    )
    if packed.tops is None:
        return outputs
    if packed.kept is not None:
        raise DataError(
            "a divergence from the teacher is over the whole vocabulary, but tokens were drawn with top_p, top_k or min_p: sample with "
            "--generation.top-p 1, or use the sampled tokens alone: opd"
        )
    found = chunked_divergence(reading.inputs, reading.weight, packed.tops, temperatures=reading.temperatures, **reading.settings)
    return replace(outputs, divergence=_place(found, packed, positions))


@dataclass(frozen=True, eq=False)
class _Reading:
    """Inputs of the output layer at the predictors of M tokens, and the settings of its passes."""

    inputs: Tensor  # [M, K]
    weight: Tensor  # [V, K]
    temperatures: Tensor | None  # [M]
    settings: dict[str, Any]  # bias, chunk_size and transform of the functions in chunks


def _read_output_layer(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> _Reading:
    layer, shift = get_output_layer(model), packed.shift
    if temperatures is not None:
        row_of_token = packed.flat_index // packed.shape[1]
        temperatures = temperatures[row_of_token[shift.positions]]
    inputs = _run_before(layer.before, hidden[shift.predictors], options.compute_dtype)
    transform = layer.transform if layer.module is None else replace(layer.transform or LogitTransform(), products=ONEDNN)
    return _Reading(
        inputs.to(options.compute_dtype),
        layer.weight if layer.token_scale is None else layer.weight * layer.token_scale()[:, None],
        temperatures,
        {"bias": layer.bias, "chunk_size": options.chunk_size, "transform": transform},
    )


def compute_tops(
    model: PreTrainedModel,
    hidden: Tensor,
    packed: PackedRows,
    temperatures: Tensor | None,
    options: OutputOptions,
    *,
    k: int,
    vocab_size: int | None = None,
) -> TokenOutputs:
    """Head of a teacher: compute_log_probs, and beside each token the k that are most probable in its place, computed in chunks.

    Args:
        k, vocab_size: as in chunked_tops.
    """
    outputs = compute_log_probs(model, hidden, packed, temperatures, options)
    reading = _read_output_layer(model, hidden, packed, temperatures, options)
    with torch.no_grad():
        sampling = Sampling(reading.temperatures, packed.kept)
        found = chunked_tops(reading.inputs, reading.weight, k, vocab_size=vocab_size, sampling=sampling, **reading.settings)
    return replace(outputs, tops=_place(found, packed, packed.shift.positions))


def compute_values(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> TokenOutputs:
    """Head of a critic: V(tokens[:, :t]) from the hidden state at t - 1, in float32; 0 at the first token of a context and on pads.

    The value at t does not depend on tokens[:, t], so it can be a baseline of that token. log_probs are zeros: a critic has none. The
    head's dropout, which token-classification models have, is left out.
    """
    shift = packed.shift
    values = read_value_head(model, hidden[shift.predictors], options.compute_dtype)
    return TokenOutputs(log_probs=torch.zeros(packed.shape, device=hidden.device), values=_place(values, packed, shift.positions))


def compute_scores(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> TokenOutputs:
    """Head of a reward model: score of the text up to and including tokens[:, t], from the hidden state at t, float32; 0 on pads.

    Unlike a value it depends on tokens[:, t], so the score of a text is the one at its last token (preferences.score_loss).
    """
    scores = read_value_head(model, hidden, options.compute_dtype)
    return TokenOutputs(log_probs=torch.zeros(packed.shape, device=hidden.device), values=packed.unpack(scores))


def describe_outputs(compute_outputs: ComputeOutputs) -> frozenset[str] | None:
    """Return the kinds of outputs of one of these functions; None for any other function.

    Scores are not values: they depend on the token that a value must not depend on.
    """
    if compute_outputs is compute_log_probs:
        return frozenset({"log_probs", "entropy"})
    if isinstance(compute_outputs, partial) and compute_outputs.func is compute_tops:
        return frozenset({"log_probs", "entropy", "tops"})
    if compute_outputs is compute_values:
        return frozenset({"values"})
    return frozenset({"scores"}) if compute_outputs is compute_scores else None


def _place(values: Tensor, packed: PackedRows, positions: Tensor) -> Tensor:
    """Scatter values [M, ...] of packed positions into [B, T, ...], 0 elsewhere; keeps the gradient."""
    flat = torch.zeros((*packed.tokens.shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return packed.unpack(flat.index_copy(0, positions, values))


def get_decoder(model: PreTrainedModel) -> torch.nn.Module:
    """Return the transformer below the output layer. Raises ConfigError for a model without one."""
    decoder = getattr(model, model.base_model_prefix, None) or getattr(model, "model", None)  # Llama 4's prefix is that of a larger model
    if not isinstance(decoder, torch.nn.Module):
        raise ConfigError(f"{type(model).__name__} has no decoder below its output layer, so log-probs cannot be computed in chunks")
    return decoder


def find_cache_name(module: torch.nn.Module) -> str:
    """Return the name of keys and values as an argument of a model or decoder and in its output: "cache" from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The step from last hidden states to logits: layers of the model's own, one linear layer, and a change of its results."""

    weight: Tensor  # [V, K]
    bias: Tensor | None  # [V]
    transform: LogitTransform | None  # None = no change
    module: OneDNNLinear | None = None  # the layer itself, where it has products of its own
    before: Callable[[Tensor], Tensor] | None = None  # hidden states [..., H] -> what the linear layer reads [..., K]; None = the same
    token_scale: Callable[[], Tensor] | None = None  # () -> learned factors [V] of the logits, as they are now; None = 1

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] from hidden states [..., H], in float32 if they are changed."""
        return self.read(hidden if self.before is None else self.before(hidden))

    def read(self, inputs: Tensor) -> Tensor:
        """Compute logits [..., V] from what the linear layer reads, [..., K]."""
        inputs = inputs.to(self.weight.dtype)  # Mamba's hidden states are float32 in bfloat16, too
        logits = torch.nn.functional.linear(inputs, self.weight, self.bias) if self.module is None else self.module(inputs)
        logits = logits if self.token_scale is None else logits.float() * self.token_scale()
        return logits if self.transform is None else self.transform.apply(logits.float())


def get_output_layer(model: PreTrainedModel) -> OutputLayer:
    """Return the output layer, with the change of logits that the configuration names. Raises ConfigError if it is not linear.

    prepare.check_output_layer compares the result with the model's own logits.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(f"{type(model).__name__} has no linear output layer (found {type(head).__name__})")
    own = {name for name, _ in head.named_parameters()} - {"weight", "bias"}
    scaled = own == {"logit_scale"} and hasattr(head, "logit_scale_factor")  # Dory learns a factor for each token
    if own and not scaled:
        raise ConfigError(f"{type(model).__name__} has an output layer with parameters that are not computed here: {sorted(own)}")
    config: Any = model.config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= 1.0 if getattr(config, name, None) is None else float(getattr(config, name))
    if getattr(config, "logits_mup_width_multiplier", None) is not None:  # Inkling
        scale /= float(config.logits_mup_width_multiplier)
    if getattr(config, "logits_scaling", None) is not None:  # Granite divides by it, HyperCLOVA X multiplies
        scale *= float(config.logits_scaling) ** (1 if str(config.model_type).startswith("hyperclovax") else -1)
    caps = [getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")]
    soft_cap = next((cap for cap in caps if cap is not None), None)
    transform = LogitTransform(scale, soft_cap)
    weight, bias = cast("tuple[Tensor, Tensor | None]", (head.weight, head.bias))
    size = getattr(config, "unpadded_vocab_size", None)  # Inkling drops the logits of rows that only pad the matrix
    module = head if isinstance(head, OneDNNLinear) else None
    if size is not None and size < head.out_features:
        weight, bias, module = weight[:size], None if bias is None else bias[:size], None
    return OutputLayer(
        weight,
        bias,
        None if transform == LogitTransform() else transform,
        module,
        before=find_layers_before(model, head),
        token_scale=partial(_read_token_scale, head) if scaled else None,
    )


def _read_token_scale(head: Any) -> Tensor:
    return head.logit_scale.float() * head.logit_scale_factor


def find_layers_before(model: PreTrainedModel, head: torch.nn.Linear) -> Callable[[Tensor], Tensor] | None:
    """Return the function from last hidden states [..., H] to what a head reads, [..., K], if a model has parameters between them.

    Models of BERT's line have a layer with an activation and a norm there; ModernBERT's decoder has one before the scores, too.
    """
    known = {id(parameter) for module in (get_decoder(model), head) for parameter in module.parameters()}
    if all(id(parameter) in known for parameter in cast("torch.nn.Module", model).parameters()):
        return None
    return partial(_run_to_head, model, head)


class _HeadReached(Exception):
    """Ends a model's forward pass where its head would read; args[0] is what it would read."""


def _run_to_head(model: PreTrainedModel, head: torch.nn.Module, hidden: Tensor) -> Tensor:
    """Run a model's own code between its decoder and a head, neither of which computes anything, on hidden states # [..., H].

    Raises: ConfigError for a model that does not call its decoder, or not this head.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    decoder: Any = get_decoder(model)
    rows = hidden.reshape(1, -1, hidden.shape[-1])

    def give(*_: Any, **__: Any) -> Any:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=cast("Any", rows))

    def stop(_module: Any, inputs: tuple[Tensor, ...]) -> None:
        raise _HeadReached(inputs[0])

    hook = head.register_forward_pre_hook(stop)
    decoder.forward = give  # for this object alone; its class keeps its method
    try:
        cast("Any", model).forward(input_ids=torch.zeros(rows.shape[:2], dtype=torch.int64, device=rows.device), use_cache=False)
    except _HeadReached as reached:
        return reached.args[0].reshape(*hidden.shape[:-1], -1)
    finally:
        del decoder.forward
        hook.remove()
    raise ConfigError(f"{type(model).__name__} does not call its head behind its decoder, so that it cannot be computed here")


def _run_before(before: Callable[[Tensor], Tensor] | None, hidden: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Run the layers before a head in the dtype of the passes."""
    if before is None:
        return hidden
    with torch.autocast(hidden.device.type, dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16):
        return before(hidden)


def read_value_head(model: PreTrainedModel, hidden: Tensor, compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute values or scores [N], float32, from last hidden states [N, H], as get_value_head's layer reads them."""
    head = get_value_head(model)
    inputs = _run_before(find_layers_before(model, head), hidden, compute_dtype)
    bias = None if head.bias is None else head.bias.float()  # pyright: ignore[reportUnnecessaryComparison]
    return torch.nn.functional.linear(inputs.float(), head.weight.float(), bias).squeeze(-1)


def get_value_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Return the layer [1, H] from hidden states to values of a token-classification model. Raises ConfigError if there is none."""
    for name in ("score", "classifier"):  # the names in transformers
        head = getattr(model, name, None)
        if isinstance(head, torch.nn.Linear) and head.out_features == 1:
            return head
    raise ConfigError(
        f"{type(model).__name__} has no value head (a linear layer with one output): "
        "make the backend with create_critic_backend, from a causal language model or from a saved critic"
    )


def name_layer(module: Any) -> str:
    """Name an attention layer and its model, for messages."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    index = getattr(module, "layer_idx", None)
    return f"layer {index} of a model of type {kind!r} ({type(module).__name__})"


def _explain_refusal(module: Any, name: str, found: Any) -> str:
    field = "attn_logit_softcapping" if name == "softcap" else "sinks" if name == "s_aux" else name  # names in configurations
    value = getattr(getattr(module, "config", None), field, None)
    shown = (
        f"{field} = {value!r}"
        if value is not None
        else f"{field} (learned, {list(found.shape)})"
        if isinstance(found, Tensor)
        else f"{field} = {found!r}"
    )
    return f"{name_layer(module)} asks its attention for {shown}, which is not computed here. {USE_ANOTHER}"
