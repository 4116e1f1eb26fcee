"""CUDA graphs of decode steps: the kernels of a step are recorded once for each bucket of slots and lengths, and launched together later.

A graph repeats its kernels with the same shapes on the same memory. So a step of a bucket reads tokens and positions from buffers that stay
where they are, computes the bucket's slots, unused ones as well, and attends by one call over the bucket's length. Graphs change no
semantics: the first replay of each is compared with the ordinary step.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rollouts.models.prepare import is_same

_logger = logging.getLogger(__name__)

_LIVE = 256  # live lengths of buckets are multiples of this
_WARM_UPS = 2  # steps before recording, in which libraries allocate and choose their kernels


class Bucket(NamedTuple):
    """Sizes of a decode step that others round up to."""

    slots: int  # slots 0 .. slots - 1 are computed
    live: int  # tokens that attention reads in each slot


def round_up(number: int, unit: int) -> int:
    """Return the least of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... units that is at least a number: less than 1.5 times its units."""
    assert number >= 1 and unit >= 1, f"number is {number} and unit {unit}, expected at least 1"
    units = -(-number // unit)
    power = 1 << (units - 1).bit_length()
    return unit * (power * 3 // 4 if power >= 4 and units <= power * 3 // 4 else power)


def find_bucket(num_slots: int, longest: int, max_slots: int) -> Bucket:
    """Return the bucket of a decode step.

    Args:
        num_slots: slots in use, between 1 and max_slots.
        longest: tokens in the fullest slot, with the new one.
    """
    assert num_slots <= max_slots, f"{num_slots} slots are in use, more than the {max_slots} that there are"
    return Bucket(min(round_up(num_slots, 1), max_slots), round_up(longest, _LIVE))


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Buffers that the step of a bucket reads."""

    tokens: Tensor  # [slots] int64
    positions: Tensor  # [slots] int64, position of each token in its sequence
    live: int  # tokens that attention reads in each slot

    @staticmethod
    def create(bucket: Bucket, device: torch.device) -> StepInputs:
        """Create buffers on a device."""
        tokens, positions = (torch.zeros(bucket.slots, dtype=torch.int64, device=device) for _ in range(2))
        return StepInputs(tokens, positions, bucket.live)

    def fill(self, tokens: Tensor, positions: Sequence[int]) -> None:
        """Write the inputs of A slots. The others get token 0 at position 0 of their own slots, which are free.

        Args:
            tokens: # [A] int64.
            positions: of the tokens, on the host.
        """
        num_free = len(self.tokens) - len(positions)
        self.tokens.zero_()
        self.tokens[: len(positions)].copy_(tokens)
        self.positions.copy_(torch.tensor([*positions, *[0] * num_free]))


class Captured(NamedTuple):
    """A recorded computation."""

    replay: Callable[[], None]  # computes the output anew, from what its buffers hold now
    output: Tensor
    pool: Any  # memory that later recordings share


CaptureFn: TypeAlias = Callable[[Callable[[], Tensor], Any], Captured]
"""f(run, pool of earlier ones or None) -> recording. RuntimeError for a computation that cannot be recorded."""


def capture_graph(run: Callable[[], Tensor], pool: Any, *, device: torch.device) -> Captured:
    """Run a computation on a stream of its own until it is warm, and record it as a CUDA graph."""
    with torch.cuda.device(device):
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads of this process may use the GPU meanwhile, as a trainer beside the engine does
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = run()
    return Captured(graph.replay, output, graph.pool())


class DecodeGraphs:
    """Recorded steps by bucket. They are dropped when keys, values or weights lie elsewhere; weights may change where they are."""

    def __init__(self, run: Callable[[StepInputs], Tensor], weights: Sequence[Tensor], *, name: str, capture: CaptureFn) -> None:
        """
        Args:
            run: computes the last hidden states # [slots, H] of a step from the buffers, the keys and values and the weights.
            weights: parameters and buffers of the model.
            name: name in messages.
        """
        self.is_refused = False
        """Whether a step could not be recorded, or a recorded one computed something else: all later steps are ordinary ones."""
        self._run = run
        self._weights = tuple(weights)
        self._name = name
        self._capture = capture
        self._places: tuple[Any, ...] = ()
        self._recorded: dict[Bucket, tuple[StepInputs, Captured]] = {}

    def step(
        self, bucket: Bucket, tokens: Tensor, positions: Sequence[int], memory: Sequence[Tensor], run_ordinary: Callable[[], Tensor]
    ) -> Tensor:
        """Run a decode step of A sequences; the first of a bucket also as an ordinary step.

        Args:
            bucket: with room for the step, as the memory has room for the bucket.
            tokens, positions: as for StepInputs.fill.
            memory: keys and values.
            run_ordinary: runs the step without a graph # [A, H].

        Returns: last hidden states # [A, H], valid until the next step.
        """
        self._drop_stale(memory)
        if bucket not in self._recorded:
            return self._record(bucket, tokens, positions, run_ordinary())
        inputs, captured = self._recorded[bucket]
        inputs.fill(tokens, positions)
        captured.replay()
        return captured.output[: len(positions)]

    def _drop_stale(self, memory: Sequence[Tensor]) -> None:
        places = tuple((x.data_ptr(), x.shape) for x in memory), tuple(x.data_ptr() for x in self._weights)
        if places != self._places:
            self._recorded.clear()
            self._places = places

    def _record(self, bucket: Bucket, tokens: Tensor, positions: Sequence[int], expected: Tensor) -> Tensor:
        """Record the step of a bucket and compare it with the hidden states of the ordinary one."""
        inputs = StepInputs.create(bucket, tokens.device)
        inputs.fill(tokens, positions)
        pool = next((captured.pool for _, captured in self._recorded.values()), None)
        try:
            captured = self._capture(partial(self._run, inputs), pool)
            captured.replay()
            found = captured.output[: len(positions)]
            problem = "" if is_same(found, expected, expected.dtype) else "it gives other hidden states than the ordinary step"
        except RuntimeError as error:
            self._refuse(bucket, str(error))
            return expected
        if problem:
            self._refuse(bucket, problem)
            return expected
        self._recorded[bucket] = inputs, captured
        return found

    def _refuse(self, bucket: Bucket, problem: str) -> None:
        self.is_refused = True
        self._recorded.clear()
        _logger.warning(
            "%s decodes without CUDA graphs from now on: the graph for %d slots of %d tokens cannot be used: %s",
            self._name,
            *bucket,
            problem,
        )
