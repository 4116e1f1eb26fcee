"""Keys and values of running sequences in slots, and the two forward passes over them: prefill of prompts, one token for every slot.

The model is a Hugging Face decoder whose attention is replaced by attend_slots; no cache object of transformers is involved. Running
sequences occupy slots 0 .. A - 1, so a decode step computes nothing for free slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollouts.engines.inprocess.blocks import BLOCK_TOKENS, Beginning, Extension, KeptBlocks, attend_after, cut_blocks, depends_on_length
from rollouts.engines.inprocess.experts import ExpertRecorder
from rollouts.engines.inprocess.graphs import DecodeGraphs, StepInputs, capture_graph, find_bucket
from rollouts.errors import ConfigError
from rollouts.models.forward.attention import attend_packed, find_chunk, tune_queries
from rollouts.models.forward.output_layers import get_decoder, get_output_layer
from rollouts.models.forward.packing import PackedRows, pack_padded
from rollouts.models.forward.passes import run_packed
from rollouts.models.prepare import (
    check_layer_kinds,
    check_output_layer,
    check_same,
    draw_check_tokens,
    early_temperatures,
    find_check_length,
    native_attention,
    open_choices,
    probe_attention,
)
from rollouts.models.replay import Choices

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_ROUND = 16  # live lengths are rounded up to this many tokens, so that shapes repeat


class Run(NamedTuple):
    """Neighbouring slots that one call of attention reads."""

    start: int
    stop: int
    live: int  # tokens that it reads in each slot


def plan_runs(lengths: Sequence[int], device_type: str) -> tuple[Run, ...]:
    """Cut slots, in their order, into runs of like lengths, so that a long sequence does not make attention read its length in all slots.

    Each cut is the one that saves most; there is none that saves less than a call of attention costs: the time of reading 1,024 tokens on a
    CPU, measured for small models, and of 65,536 on a GPU, estimated from its bandwidth and the time of a kernel's launch.

    Args:
        lengths: tokens in each slot, with the new one, at least 1.
    """
    call = 1024 if device_type == "cpu" else 65_536
    rounded = -(-np.asarray(lengths) // _ROUND) * _ROUND
    runs: list[Run] = []
    waiting = [(0, len(lengths))]
    while waiting:
        start, stop = waiting.pop()
        part = rounded[start:stop]
        whole = len(part) * int(part.max())
        cut = 0
        if whole - int(part.sum()) > call:
            sizes = np.arange(1, len(part))
            costs = sizes * np.maximum.accumulate(part)[:-1] + sizes[::-1] * np.maximum.accumulate(part[::-1])[-2::-1]
            best = int(costs.argmin())
            cut = best + 1 if int(costs[best]) + call < whole else 0
        if cut:
            waiting += [(start + cut, stop), (start, start + cut)]  # the left one is next
        else:
            runs.append(Run(start, stop, int(part.max())))
    return tuple(runs)


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """Input of attention in one decode step over A sequences."""

    keys: Tensor  # [layers, S, Hk, T, D]
    values: Tensor  # [layers, S, Hk, T, D]
    rows: Tensor  # [A] int64, 0 .. A - 1
    positions: Tensor  # [A] int64, position of the new token
    runs: tuple[Run, ...]  # all slots, in order
    mask: Tensor  # [A, 1, 1, L] bool, True = attend; L = longest live length of the runs
    near: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict[tuple["int | None", "int | None"], Tensor])

    def see(self, window: int | None, chunk: int | None) -> Tensor:
        """Return the mask of a layer, made by the first layer of its kind.

        Args:
            window: most tokens attended to; None = all.
            chunk: size of the chunks of positions that attention stays inside; None = no chunks.
        """
        places = torch.arange(self.mask.shape[-1], device=self.mask.device)
        if all(size is None or len(places) <= size for size in (window, chunk)):
            return self.mask
        if (window, chunk) not in self.near:
            first = torch.zeros_like(self.positions) if window is None else self.positions - window + 1
            first = first if chunk is None else first.maximum(self.positions - self.positions % chunk)
            self.near[window, chunk] = self.mask & (places >= first[:, None])[:, None, None]
        return self.near[window, chunk]


@dataclass(frozen=True, eq=False)
class Prefix:
    """A prefilled prompt."""

    keys: Tensor  # [layers, Hk, n, D]
    values: Tensor  # [layers, Hk, n, D]
    logits: Tensor  # [V] float32, for the token after it
    experts: Tensor | None = None  # [n, routers, k] int16; None = not recorded

    @property
    def length(self) -> int:
        """Number of tokens n."""
        return self.keys.shape[2]


class Decoding(Protocol):
    """Decoding of running sequences in slots 0 .. A - 1, by SlotModel or native.NativeModel. Each uses its own prefixes."""

    recorder: ExpertRecorder
    experts: Tensor | None
    """Experts of the tokens of the last decode step, by slot # [A, routers, k] int16; None = not recorded."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Sequence[Any]:
        """Run prompts. Returns their prefixes, which have logits [V] for the token after them, and experts."""
        ...

    def forget(self) -> None:
        """Drop what is kept for later prompts: the weights have changed."""
        ...

    def hidden_states(self, tokens: Sequence[int]) -> Tensor:
        """Return the last hidden states of one row. # [N, H]"""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] in float32 from hidden states [..., H]."""
        ...

    def fill(self, slots: Sequence[int], prefix: Any) -> None:
        """Put a prefix into several slots."""
        ...

    def decode(self, tokens: Tensor, positions: Sequence[int]) -> Tensor:
        """Append one token to each of the first A slots and return the logits after it. # [A, V]"""
        ...

    def move(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Put the sequences of slots into other slots."""
        ...

    def free(self, num_used: int) -> None:
        """Give back the slots from num_used on."""
        ...


@dataclass(frozen=True, eq=False)
class Prefill:
    """Input of attention over packed prompts, and each layer's keys and values # [Hk, N, D], filled in as the layers run."""

    packed: PackedRows
    captured: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]])


def attend_and_capture(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, window: int | None, *, prefill: Prefill
) -> Tensor:
    """Run attend_packed, and store the layer's keys and values."""
    prefill.captured[cast("int", module.layer_idx)] = (key[0], value[0])
    return attend_packed(module, query, key, value, scaling, dropout, window, packed=prefill.packed)


def attend_slots(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, window: int | None, *, step: DecodeStep
) -> Tensor:
    """Attend from one new token for each slot: write its key and value, then attend to all keys and values of the slot.

    query: # [A, Hq, 1, D]; key, value: # [A, Hk, 1, D]. Returns # [A, 1, Hq, D].
    """
    layer = cast("int", module.layer_idx)
    keys, values = step.keys[layer], step.values[layer]
    keys[step.rows, :, step.positions] = key[:, :, 0]
    values[step.rows, :, step.positions] = value[:, :, 0]
    query = tune_queries(module, query, step.positions[:, None])
    num_rows, num_heads, _, width = query.shape
    num_kv_heads, mask = keys.shape[1], step.see(window, find_chunk(module))
    # heads that share a key are queries of one attention call: no key is copied
    grouped = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, width)
    outputs = [
        scaled_dot_product_attention(
            grouped[start:stop],
            keys[start:stop, :, :live],
            values[start:stop, :, :live],
            attn_mask=mask[start:stop, ..., :live],
            scale=scaling,
        )
        for start, stop, live in step.runs
    ]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).reshape(num_rows, 1, num_heads, width)


class SlotModel:
    """A model with slots. Holds weights, keys and values; independent of requests."""

    def __init__(self, model: PreTrainedModel, *, max_slots: int, name: str, kept_tokens: int = 0, cuda_graphs: bool = False) -> None:
        """
        Args:
            model: used by this object alone from now on; its attention is replaced.
            max_slots: maximum number of sequences at the same time; memory grows with the actual number.
            kept_tokens: maximum number of tokens with keys and values kept for later prompts that begin alike; 0 = none, and no prompt is
                computed in blocks.
            cuda_graphs: decode by CUDA graphs; without effect on a CPU, for a model whose rotation depends on the length of the pass, and
                while experts are recorded.

        Raises: ConfigError if decoding over slots gives other logits than the model's own forward pass.
        """
        check_layer_kinds(model)
        self.model = model.eval()
        self.max_slots = max_slots
        self.device = next(model.parameters()).device
        self._name = name
        self._decoder: Any = get_decoder(model)
        self._head = get_output_layer(model)
        self._keys = self._values = torch.empty(0)
        self.recorder = ExpertRecorder()
        self.experts: Tensor | None = None
        self._blocks: KeptBlocks | None = None  # None = no prompt is cut into blocks
        self._in_blocks = False
        self.graphs: DecodeGraphs | None = None  # None = every step is an ordinary one
        self._check()
        self._in_blocks = self.device.type == "cpu"  # whether each block is a pass of its own, see blocks.py
        by_length = depends_on_length(model.config.get_text_config())
        self._blocks = None if kept_tokens < BLOCK_TOKENS or by_length else KeptBlocks(most_tokens=kept_tokens)
        if cuda_graphs and self.device.type == "cuda" and not by_length:
            self.graphs = DecodeGraphs(self.run_bucket, self.list_weights(), name=name, capture=partial(capture_graph, device=self.device))

    @property
    def num_allocated(self) -> tuple[int, int]:
        """Allocated slots, and tokens in each slot."""
        return (self._keys.shape[1], self._keys.shape[3]) if self._keys.numel() else (0, 0)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Run several prompts, what is not kept of them packed one after another."""
        begun = [self._begin(prompt) for prompt in prompts]
        rows = [row for row in begun if row is not None]
        fresh = [prompt for prompt, row in zip(prompts, begun, strict=True) if row is None]
        rest, whole = iter(self._finish(rows) if rows else []), iter(self._prefill_whole(fresh) if fresh else [])
        prefixes = [next(whole if row is None else rest) for row in begun]
        if self._blocks is not None and not self._in_blocks:
            for prompt, prefix in zip(prompts, prefixes, strict=True):
                self._keep(self._blocks, prompt, prefix)
        return prefixes

    def forget(self) -> None:
        """Drop the keys and values kept for later prompts."""
        if self._blocks is not None:
            self._blocks.clear()

    def _begin(self, prompt: Sequence[int]) -> Beginning | None:
        """Return a prompt with its first tokens: those that are kept and, on a CPU, the rest of its blocks, computed one by one.

        None = nothing of it, so that it can be computed with others.
        """
        blocks = self._blocks
        if blocks is None:
            return None
        found = blocks.find(prompt)
        num_blocks = blocks.count_whole(prompt) if self._in_blocks else len(found)
        if not num_blocks:
            return None
        # room for whole blocks, so that the place of a key in memory, on which the last bits of products may depend, is aligned
        room = (self._kv_shape[0], self._kv_shape[1], -(-len(prompt) // blocks.size) * blocks.size, self._kv_shape[2])
        with torch.inference_mode():
            keys, values = (torch.empty(room, dtype=self._kv_dtype, device=self.device) for _ in range(2))
            row = Beginning(prompt, keys, values)
            for block in found:
                row.put(block)
            for place in range(len(found), num_blocks):
                self._extend([(row, (place + 1) * blocks.size)])
        if self._in_blocks:
            self._keep(blocks, prompt, row)
        return row

    def _keep(self, blocks: KeptBlocks, prompt: Sequence[int], whole: Prefix | Beginning) -> None:
        """Keep the blocks of a prompt that are not kept yet."""
        found = blocks.find(prompt)
        new = range(len(found), blocks.count_whole(prompt))
        if new:
            with torch.inference_mode():
                blocks.keep(prompt, [*found, *cut_blocks(whole.keys, whole.values, whole.experts, new, blocks.size)])

    def _finish(self, rows: Sequence[Beginning]) -> list[Prefix]:
        """Run the remaining tokens of prompts, packed one after another."""
        with torch.inference_mode():
            hidden = self._extend([(row, len(row.tokens)) for row in rows])
            logits = self.compute_logits(hidden)
            return [
                Prefix(
                    keys=row.keys[:, :, : row.length],
                    values=row.values[:, :, : row.length],
                    logits=logits[i],
                    experts=row.experts,
                )
                for i, row in enumerate(rows)
            ]

    def _extend(self, rows: Sequence[tuple[Beginning, int]]) -> Tensor:
        """Compute the next tokens of beginnings, each up to an end. Returns the last hidden state of each. # [len(rows), H]"""
        packed = self._pack([row.tokens[row.length : end] for row, end in rows])
        starts = torch.tensor([row.length for row, _ in rows], device=self.device)
        sizes = [end - row.length for row, end in rows]
        shifted = replace(packed, position_ids=packed.position_ids + starts.repeat_interleave(packed.cu_seqlens.diff()))
        attend_fn = partial(attend_after, step=Extension(rows, shifted.position_ids))
        hidden, experts = self.recorder.run(lambda: run_packed(self.model, shifted, attend_fn))
        for i, (row, end) in enumerate(rows):
            row.note_experts(None if experts is None else experts.split(sizes)[i])
            row.length = end
        return hidden[packed.cu_seqlens[1:] - 1]

    def _prefill_whole(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Run several prompts from their beginning, packed one after another."""
        packed = self._pack(prompts)
        prefill = Prefill(packed)
        captured = prefill.captured
        with torch.inference_mode():
            attend_fn = partial(attend_and_capture, prefill=prefill)
            hidden, experts = self.recorder.run(lambda: run_packed(self.model, packed, attend_fn))  # [N, H]
            logits = self.compute_logits(hidden[packed.cu_seqlens[1:] - 1])
            keys = torch.stack([captured[layer][0] for layer in sorted(captured)])  # [layers, Hk, N, D]
            values = torch.stack([captured[layer][1] for layer in sorted(captured)])
        bounds = cast("list[int]", packed.cu_seqlens.tolist())
        return [
            Prefix(
                keys=keys[:, :, start:end],
                values=values[:, :, start:end],
                logits=logits[i],
                experts=None if experts is None else experts[start:end],
            )
            for i, (start, end) in enumerate(pairwise(bounds))
        ]

    def hidden_states(self, tokens: Sequence[int]) -> Tensor:
        """Return the last hidden states of one row. # [N, H]"""
        with torch.inference_mode():
            return run_packed(self.model, self._pack([tokens]))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] in float32 from hidden states [..., H]."""
        with torch.inference_mode():
            return self._head.compute_logits(hidden).float()

    def fill(self, slots: Sequence[int], prefix: Prefix) -> None:
        """Copy a prefix into several slots."""
        if not self._keys.numel():
            self._kv_shape = (prefix.keys.shape[0], prefix.keys.shape[1], prefix.keys.shape[3])
            self._kv_dtype = prefix.keys.dtype
        self._reserve(max(slots) + 1, prefix.length + 1)
        index = torch.tensor(slots, device=self.device)
        with torch.inference_mode():
            self._keys[:, index, :, : prefix.length] = prefix.keys[:, None]
            self._values[:, index, :, : prefix.length] = prefix.values[:, None]

    def decode(self, tokens: Tensor, positions: Sequence[int]) -> Tensor:
        """Append one token to each of the first A slots and return the logits after it.

        Args:
            tokens: # [A] int64.
            positions: position of each token in its sequence, on the host: reading them from a GPU would wait for it at each token.

        Returns: # [A, V] float32.
        """
        longest, graphs = max(positions) + 1, self.graphs
        runs = plan_runs([position + 1 for position in positions], self.device.type)

        def run_ordinary() -> Tensor:
            return self._run_step(tokens, torch.tensor(positions, device=self.device), runs)

        with torch.inference_mode():
            if graphs is None or graphs.is_refused or self.recorder.routers.modules:
                self._reserve(len(positions), longest)
                return self.compute_logits(run_ordinary())
            bucket = find_bucket(len(positions), longest, self.max_slots)
            self._reserve(*bucket)
            return self.compute_logits(graphs.step(bucket, tokens, positions, (self._keys, self._values), run_ordinary))

    def run_bucket(self, inputs: StepInputs) -> Tensor:
        """Run a decode step that reads its buffers alone, by one call of attention. Returns the last hidden states. # [slots, H]"""
        return self._run_step(inputs.tokens, inputs.positions, (Run(0, len(inputs.tokens), inputs.live),))

    def list_weights(self) -> list[Tensor]:
        """List the parameters and buffers that a step reads."""
        return [*self.model.parameters(), *self.model.buffers()]

    def _run_step(self, tokens: Tensor, positions: Tensor, runs: tuple[Run, ...]) -> Tensor:
        """Append one token to each of the first A slots. tokens, positions: # [A] int64. Returns the last hidden states. # [A, H]"""
        mask = torch.arange(max(run.live for run in runs), device=self.device) <= positions[:, None]
        rows = torch.arange(len(tokens), device=self.device)
        step = DecodeStep(self._keys, self._values, rows, positions, runs, mask[:, None, None])
        call = {"input_ids": tokens[:, None], "position_ids": positions[:, None], "attend_fn": partial(attend_slots, step=step)}
        output, self.experts = self.recorder.run(lambda: self._decoder(**call, use_cache=False))
        return output.last_hidden_state[:, 0]

    def move(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Copy slots to other slots (distinct from all sources); longest: tokens in the fullest of them."""
        if sources:
            source, target = torch.tensor(sources, device=self.device), torch.tensor(targets, device=self.device)
            with torch.inference_mode():
                self._keys[:, target, :, :longest] = self._keys[:, source, :, :longest]
                self._values[:, target, :, :longest] = self._values[:, source, :, :longest]

    def free(self, num_used: int) -> None:
        """Keep the memory for later sequences."""

    def _pack(self, rows: Sequence[Sequence[int]]) -> PackedRows:
        width = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        return pack_padded(padded, torch.tensor([len(row) for row in rows], device=self.device))

    def _reserve(self, num_slots: int, num_tokens: int) -> None:
        """Grow the memory to at least num_slots slots of at least num_tokens tokens, keeping its contents."""
        have_slots, have_tokens = self.num_allocated
        if num_slots <= have_slots and num_tokens <= have_tokens:
            return
        slots = have_slots if num_slots <= have_slots else min(self.max_slots, max(num_slots, 2 * have_slots))
        tokens = have_tokens if num_tokens <= have_tokens else max(2 * _ROUND, -(-num_tokens // _ROUND) * _ROUND, have_tokens * 3 // 2)
        tokens = -(-tokens // _ROUND) * _ROUND
        shape = self._kv_shape
        with torch.inference_mode():
            # zeros, not uninitialised memory: a NaN behind the mask would still spoil a sum
            keys = torch.zeros(shape[0], slots, shape[1], tokens, shape[2], dtype=self._kv_dtype, device=self.device)
            values = torch.zeros_like(keys)
            if have_slots:
                keys[:, :have_slots, :, :have_tokens] = self._keys
                values[:, :have_slots, :, :have_tokens] = self._values
        self._keys, self._values = keys, values

    def _check(self) -> None:
        """Compare decoding over slots with the model's own forward pass on random tokens, in rows longer than its windows."""
        try:
            with torch.inference_mode():
                length = find_check_length(self.model, probe_attention(self.model), at_least=7)
                rows = draw_check_tokens(self.model, (2, length))
                with early_temperatures(self.model), open_choices(self.model) as choices:
                    compared = self._compare(rows, choices)
                    dtype = self._head.weight.dtype
        except ConfigError as error:
            raise ConfigError(f"{self._name}: {error}") from error
        except (TypeError, RuntimeError, AssertionError, AttributeError, LookupError, ValueError) as error:
            raise ConfigError(f"{self._name}: {type(self.model).__name__} cannot decode over slots: {error}") from error
        for what, found, expected in compared:
            check_same(found, expected, f"{self._name}: {type(self.model).__name__} gives other logits when {what}", dtype)
        self._keys = self._values = torch.empty(0)
        with torch.inference_mode():  # the check may widen the model, and its caches, to float32
            self._kv_dtype = self._prefill_whole([rows[0, :1].tolist()])[0].keys.dtype

    def _compare(self, rows: Tensor, choices: Choices) -> list[tuple[str, Tensor, Tensor]]:
        """Return logits of late tokens of rows # [2, n]: how they were computed, and their values so and in the model's own pass."""
        length = rows.shape[1]
        numbers = torch.arange(2 * length).view(2, length)  # numbers of the tokens in choices
        with native_attention(self.model):
            check_output_layer(self.model)
            with choices.record():
                expected = self.model(input_ids=rows, use_cache=False).logits.float()
        ends = [length - 3, length - 2]
        begun = torch.cat([numbers[i, :end] for i, end in enumerate(ends)])
        with choices.replay({(1, len(begun)): begun}):
            prefixes = self.prefill([rows[i, :end].tolist() for i, end in enumerate(ends)])
        for slot, prefix in enumerate(prefixes):
            self.fill([slot], prefix)
        found = torch.empty(0)
        for positions in (ends, [end + 1 for end in ends]):
            with choices.replay({(2, 1): numbers[[0, 1], positions]}):
                found = self.decode(rows[[0, 1], positions], positions)
        decoded = ("it decodes over slots", found, expected[[0, 1], [end + 1 for end in ends]])
        size = ends[0] // 2 + 1  # one block, and a rest of another length
        self._blocks, self._in_blocks = KeptBlocks(most_tokens=0, size=size), True
        with choices.replay({(1, size): numbers[0, :size], (1, ends[0] - size): numbers[0, size : ends[0]]}):
            (parts,) = self.prefill([rows[0, : ends[0]].tolist()])
        return [decoded, ("a prompt is computed in parts", parts.logits, expected[0, ends[0] - 1])]
