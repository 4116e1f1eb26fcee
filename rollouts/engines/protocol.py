"""What the loops need of an inference engine, and what they can use where an engine has it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from rollouts.types import Completion, SamplingParams
from rollouts.weight_plan import Bucket, WeightSpec

WEIGHT_VERSION_FILE = "weight_version.json"
"""Name of the file {"weight_version": int} that a directory of exported weights carries beside them."""


class InferenceEngine(Protocol):
    """Tokens in, tokens out. Every method may be called from many tasks at once."""

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Sample one completion. Cancelling the call drops the request; abort() makes it return what there is.

        Where prompt and params.max_tokens together exceed the context, the budget is cut to what the prompt leaves, and a completion that
        reaches the end of the context has finish_reason "length". One that abort() ended can be sent again as a prompt, with what it has.

        Raises: EngineError, before anything is sent, for a prompt that leaves no room for a token, and for ids outside the vocabulary; and
            after the engine's `async with` block.
        """
        ...

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Make pending generate() calls return with finish_reason "abort" and the tokens so far; None = all of them."""
        ...

    async def update_weights_from_checkpoint(self, checkpoint_path: Path) -> Mapping[str, Any]:
        """Load a Hugging Face directory. The new version is the one in WEIGHT_VERSION_FILE, else the old one plus 1.

        Returns at least {"success": True, "weight_version": int}. Raises EngineError and keeps the old weights if it cannot.
        """
        ...

    async def get_weight_version(self) -> int:
        """Version of the weights that the next token will be sampled with."""
        ...


@runtime_checkable
class InMemoryWeightUpdates(Protocol):
    """An engine that takes weights without a detour over the disk."""

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        """Replace the weights between two decode steps; in-flight requests go on under the new ones."""
        ...


ReadBucket: TypeAlias = Callable[[Bucket], Awaitable[Mapping[str, Tensor]]]
"""Gives the tensors of a bucket. Buckets are asked for in the order of their plan, each at most once, one at a time."""


class WeightChannel(Protocol):
    """A way from the trainer into the memory of a set of engines: a process group of both, or memory of a GPU that they share."""

    @property
    def wants_device(self) -> bool:
        """Whether tensors should come on the trainer's GPU, if they are there."""
        ...

    async def send_weights(self, specs: Sequence[WeightSpec], read: ReadBucket, weight_version: int) -> list[Mapping[str, Any]]:
        """Replace the weights of all engines by those that `read` gives, a bucket at a time: more than two buckets never exist here.

        What generates goes on afterwards, or is sent again. Nothing is read before every engine is ready to receive.

        Args:
            specs: all weights; what does not fit an engine's model is refused before any engine is told.

        Returns: what each engine answers to update_weights_from_checkpoint, in the order of the engines.
        Raises: EngineError if an engine did not take them, which says of every engine what it has now; what `read` raises.
        """
        ...


@runtime_checkable
class ScoresTokens(Protocol):
    """An engine that says what log-probs it would give tokens that are already there."""

    async def recompute_output_log_probs(
        self, input_tokens: Sequence[int], start_index: int, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """Log-probs of input_tokens[start_index:], start_index >= 1, under the weights of this moment and the full distribution."""
        ...


@runtime_checkable
class GroupGeneration(Protocol):
    """An engine that generates all samples of a prompt in one request, which spares it the same prompt n times."""

    async def generate_group(
        self, prompt_tokens: Sequence[int], params: SamplingParams, n: int, *, request_id: str | None = None
    ) -> tuple[Completion, ...]:
        """n completions of one prompt, whose seeds the engine derives from params.seed; abort(request_id) ends all of them."""
        ...


@runtime_checkable
class ReportsMetrics(Protocol):
    """An engine with numbers for the line of metrics of a step."""

    def metrics(self) -> Mapping[str, float]:
        """The numbers of this moment, by names that no other part of the line has."""
        ...
