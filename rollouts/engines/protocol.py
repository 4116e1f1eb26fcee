"""The protocol of inference engines: four methods, and further features that an engine may declare."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, overload

from torch import Tensor

from rollouts.features import read_features, refuse_without_feature
from rollouts.types import Completion, SamplingParams
from rollouts.weight_specs import Bucket, WeightSpec

WEIGHT_VERSION_FILE = "weight_version.json"
"""Name of the file {"weight_version": int} in a directory of exported weights."""


class InferenceEngine(Protocol):
    """Tokens in, tokens out. Every method may be called from many tasks at once.

    An engine with further features declares them in an attribute or property `features: frozenset[EngineFeature]`.
    """

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Sample one completion. Cancelling the call drops the request; abort() makes it return its tokens so far.

        If prompt and params.max_tokens together exceed the context, the budget is cut to the rest of the context, and a completion that
        reaches the end of the context has finish_reason "length". An aborted completion can be sent again as a prompt, with its tokens.

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
        """Return the version of the weights that will sample the next token."""
        ...


ReadBucket: TypeAlias = Callable[[Bucket], Awaitable[Mapping[str, Tensor]]]
"""Return the tensors of a bucket. Buckets are requested in the order of their plan, each at most once, one at a time."""


class WeightChannel(Protocol):
    """A transport from the trainer into the memory of a set of engines: a process group of both, or memory of a GPU that they share."""

    @property
    def wants_device(self) -> bool:
        """Whether tensors should be sent from the trainer's GPU, if they are there."""
        ...

    async def send_weights(self, specs: Sequence[WeightSpec], read: ReadBucket, weight_version: int) -> list[Mapping[str, Any]]:
        """Replace the weights of all engines by those that `read` returns, a bucket at a time: at most two buckets exist here at once.

        Generations in flight continue afterwards, or are sent again. No bucket is read before every engine is ready to receive.

        Args:
            specs: all weights; weights that do not fit an engine's model are refused before any engine is told.

        Returns: each engine's answer to update_weights_from_checkpoint, in the order of the engines.
        Raises: EngineError if an engine did not take them, with the current weights of every engine; errors of `read`.
        """
        ...


class EngineFeature(StrEnum):
    """Capability of an engine besides the four methods of InferenceEngine."""

    MEMORY_UPDATES = "memory_updates"  # takes weights without writing them to disk: InMemoryWeightUpdates
    WEIGHT_VIEWS = "weight_views"  # update_weights copies the tensors before it returns, from any device of this process
    SCORES = "scores"  # returns its log-probs of given tokens: ScoresTokens
    GROUPS = "groups"  # generates all samples of a prompt in one request: GroupGeneration
    METRICS = "metrics"  # reports numbers for the line of metrics of a step: ReportsMetrics
    DISTRUST = "distrust"  # accepts notice that its weights are not those that it reports: DistrustsWeights
    ROUTED_EXPERTS = "routed_experts"  # records the experts of a mixture of experts: Completion.routed_experts
    KEPT_TOKENS = "kept_tokens"  # records the sets that top-p, top-k and min-p left: Completion.kept_tokens
    SLEEP = "sleep"  # releases the memory of its GPU for a while: Sleeps
    MEMBER_CHECKS = "member_checks"  # stands for several engines that can be checked one by one: ChecksMembers


_METHODS: Mapping[EngineFeature, tuple[str, ...]] = MappingProxyType({
    EngineFeature.MEMORY_UPDATES: ("update_weights",),
    EngineFeature.WEIGHT_VIEWS: ("update_weights",),
    EngineFeature.SCORES: ("recompute_output_log_probs",),
    EngineFeature.GROUPS: ("generate_group",),
    EngineFeature.METRICS: ("metrics",),
    EngineFeature.DISTRUST: ("distrust_weights",),
    EngineFeature.ROUTED_EXPERTS: (),
    EngineFeature.KEPT_TOKENS: (),
    EngineFeature.SLEEP: ("sleep", "wake_up"),
    EngineFeature.MEMBER_CHECKS: ("check_each",),
})  # fmt: skip


class InMemoryWeightUpdates(Protocol):
    """An engine with EngineFeature.MEMORY_UPDATES, for typing only."""

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        """Replace the weights between two decode steps; requests in flight continue under the new ones."""
        ...


class ScoresTokens(Protocol):
    """An engine with EngineFeature.SCORES, for typing only."""

    async def recompute_output_log_probs(
        self, input_tokens: Sequence[int], start_index: int, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """Return log-probs of input_tokens[start_index:], start_index >= 1, under the current weights and the full distribution."""
        ...


class GroupGeneration(Protocol):
    """An engine with EngineFeature.GROUPS, for typing only: one request instead of the same prompt n times."""

    async def generate_group(
        self, prompt_tokens: Sequence[int], params: SamplingParams, n: int, *, request_id: str | None = None
    ) -> tuple[Completion, ...]:
        """Sample n completions of one prompt, whose seeds the engine derives from params.seed; abort(request_id) ends all of them."""
        ...


class ReportsMetrics(Protocol):
    """An engine with EngineFeature.METRICS, for typing only."""

    def metrics(self) -> Mapping[str, float]:
        """Return the current numbers, under names that no other part of the line uses."""
        ...


class DistrustsWeights(Protocol):
    """An engine with EngineFeature.DISTRUST, for typing only."""

    def distrust_weights(self, reason: str) -> None:
        """Fail requests with this reason until an update of the weights succeeds."""
        ...


class Sleeps(Protocol):
    """An engine with EngineFeature.SLEEP, for typing only."""

    async def sleep(self) -> None:
        """Release the memory of its GPU, once its requests are done; new ones wait until wake_up. The weights are kept elsewhere.

        Raises: EngineError if it cannot, or was not started so that it can; it is then awake, or fails its requests with the reason.
        """
        ...

    async def wake_up(self) -> None:
        """Take the memory again, with the weights from before sleep(). An engine that is awake stays so. Raises EngineError."""
        ...


class ChecksMembers(Protocol):
    """An engine with EngineFeature.MEMBER_CHECKS, for typing only: a fleet."""

    async def check_each(self, check: Callable[[InferenceEngine], Awaitable[None]]) -> None:
        """Run a check on each engine that this one stands for. Raises EngineError."""
        ...


def with_kept_tokens(params: SamplingParams, engine: object) -> SamplingParams:
    """Return parameters that ask an engine for the sets that it draws from, if they cut its distribution and it can record them."""
    asks = params.truncates and EngineFeature.KEPT_TOKENS in get_engine_features(engine)
    return params.new(kept_tokens=True) if asks else params


def get_engine_features(engine: object) -> frozenset[EngineFeature]:
    """Return the features that an engine declares; none without an attribute `features`. Asserts that it has their methods."""
    return read_features(engine, _METHODS)


@overload
def require_engine_feature(
    engine: object, feature: Literal[EngineFeature.MEMORY_UPDATES], needed_by: str, *, instead: str = "", name: str | None = None
) -> InMemoryWeightUpdates: ...
@overload
def require_engine_feature(
    engine: object, feature: Literal[EngineFeature.SCORES], needed_by: str, *, instead: str = "", name: str | None = None
) -> ScoresTokens: ...
@overload
def require_engine_feature(
    engine: object, feature: Literal[EngineFeature.GROUPS], needed_by: str, *, instead: str = "", name: str | None = None
) -> GroupGeneration: ...
@overload
def require_engine_feature(
    engine: object, feature: Literal[EngineFeature.METRICS], needed_by: str, *, instead: str = "", name: str | None = None
) -> ReportsMetrics: ...
@overload
def require_engine_feature(
    engine: object, feature: Literal[EngineFeature.DISTRUST], needed_by: str, *, instead: str = "", name: str | None = None
) -> DistrustsWeights: ...
@overload
def require_engine_feature(
    engine: object, feature: Literal[EngineFeature.SLEEP], needed_by: str, *, instead: str = "", name: str | None = None
) -> Sleeps: ...
@overload
def require_engine_feature(
    engine: object, feature: Literal[EngineFeature.MEMBER_CHECKS], needed_by: str, *, instead: str = "", name: str | None = None
) -> ChecksMembers: ...
def require_engine_feature(engine: object, feature: EngineFeature, needed_by: str, *, instead: str = "", name: str | None = None) -> Any:
    """Return the engine with the methods of a feature.

    Args:
        needed_by: subject of "needs" in the error.
        instead: a sentence of advice at the end of the error.
        name: name of the engine in the error; None = its attribute `name`, else its class.

    Raises: ConfigError if the engine does not declare the feature.
    """
    if feature not in get_engine_features(engine):
        raise refuse_without_feature(engine, feature, _METHODS, needed_by=needed_by, name=name, instead=instead)
    return engine
