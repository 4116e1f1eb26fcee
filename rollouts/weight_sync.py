"""Bring new weights to every inference engine at once, and make sure that they arrived.

All engines are updated in one nursery, so the slowest decides how long it takes. An engine counts as updated when it says so AND, asked
afterwards, reports the version that was meant. A failure of one does not stop the others; it ends in one EngineError that says which
engines sample from the new weights and which do not, because a batch from two policies at once must never come unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import trio
from torch import Tensor

from rollouts.engines.protocol import (
    WEIGHT_VERSION_FILE,
    InferenceEngine,
    InMemoryWeightUpdates,
    ReadBucket,
    ScoresTokens,
    WeightChannel,
)
from rollouts.errors import CheckpointError, ConfigError, EngineError, EngineProtocolError
from rollouts.weight_plan import WeightSpec


@runtime_checkable
class _ReportsVersion(Protocol):
    async def get_weight_version(self) -> int: ...


@runtime_checkable
class _DistrustsWeights(Protocol):
    def distrust_weights(self, reason: str) -> None: ...


@runtime_checkable
class _ChecksEach(Protocol):
    async def check_each(self, check: Callable[[InferenceEngine], Awaitable[None]]) -> None: ...


@dataclass(frozen=True)
class WeightProbe:
    """Log-probs that show an engine's outputs to be those of the new weights; from engine_parity.create_weight_probe."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]  # nats, of tokens[1:] given those before, temperature 1, from whoever has the new weights
    tolerance: float  # nats, of the largest difference

    def __post_init__(self) -> None:
        assert len(self.log_probs) == len(self.tokens) - 1 >= 1, f"{len(self.log_probs)} log-probs for {len(self.tokens)} tokens"
        assert self.tolerance > 0, f"tolerance is {self.tolerance}, expected more than 0"


async def sync_weights_to_engines(
    engines: Sequence[InferenceEngine], checkpoint_path: Path | str, *, probe: WeightProbe | None = None
) -> list[Mapping[str, Any]]:
    """Let every engine load the weights of a directory.

    Args:
        engines: may be empty.
        checkpoint_path: a Hugging Face directory that each engine can open under this path. If it has a WEIGHT_VERSION_FILE, every engine
            must report that version afterwards; else the version that it answered with.
        probe: what the outputs must be afterwards; catches engines that say they have the weights and do not use them.

    Returns: what the engines answered, in the order of `engines`.
    Raises: CheckpointError if the path is not a directory or its version file cannot be read, and ConfigError if an engine cannot answer
        the probe, before any engine is asked; EngineError if an engine failed, naming its position and type, the cause, and which engines
        have the new weights. One that fails the probe, and can, refuses to generate until it gets weights that pass.
    """
    path = Path(checkpoint_path)
    version = await trio.to_thread.run_sync(_read_expected_version, path)
    updates = [partial(engine.update_weights_from_checkpoint, path) for engine in engines]
    return await _update_all(engines, updates, version, f"the weights in {path}", probe)


async def sync_weights_in_memory(
    engines: Sequence[InferenceEngine | InMemoryWeightUpdates],
    weights: Mapping[str, Tensor],
    weight_version: int,
    *,
    probe: WeightProbe | None = None,
) -> list[Mapping[str, Any]]:
    """Hand the same weights to every engine, without the disk.

    Args:
        engines: each with update_weights(); may be empty.
        weights: by parameter name; must not be written to while engines hold them.
        weight_version: that every engine must report afterwards.
        probe: see sync_weights_to_engines.

    Returns: what the engines answered, in the order of `engines`.
    Raises: ConfigError if an engine cannot take weights in memory, before any engine is asked; EngineError as sync_weights_to_engines.
    """
    updates: list[Callable[[], Awaitable[Mapping[str, Any]]]] = []
    for position, engine in enumerate(engines):
        if not isinstance(engine, InMemoryWeightUpdates):
            raise ConfigError(
                f"{_describe(position, engine)} has no update_weights() and cannot take weights in memory: "
                "export them to a directory and use sync_weights_to_engines"
            )
        updates.append(partial(engine.update_weights, weights, weight_version))
    return await _update_all(engines, updates, weight_version, f"weight version {weight_version}", probe)


async def sync_weights_over_channel(
    engines: Sequence[InferenceEngine],
    channel: WeightChannel,
    specs: Sequence[WeightSpec],
    read: ReadBucket,
    weight_version: int,
    *,
    probe: WeightProbe | None = None,
) -> list[Mapping[str, Any]]:
    """Send weights to the engines of a channel, bucket by bucket, and confirm on each engine that they are there.

    Args:
        engines: those of the channel, in its order.
        specs, read: the weights, see WeightChannel.send_weights.
        weight_version: that every engine must report afterwards.
        probe: see sync_weights_to_engines.

    Returns: what the engines answered, in the order of `engines`.
    Raises: EngineError as WeightChannel.send_weights and sync_weights_to_engines; ConfigError if an engine cannot answer the probe, before
        any engine is asked.
    """
    _check_can_probe(engines, probe)
    answers = await channel.send_weights(specs, read, weight_version)
    if len(answers) != len(engines):
        raise ConfigError(f"the weight channel has {len(answers)} engines, but the run has {len(engines)}: open it with the run's engines")

    async def repeat(answer: Mapping[str, Any]) -> Mapping[str, Any]:
        await trio.lowlevel.checkpoint()
        return answer

    updates = [partial(repeat, answer) for answer in answers]
    return await _update_all(engines, updates, weight_version, f"weight version {weight_version}", probe)


def _check_can_probe(engines: Sequence[object], probe: WeightProbe | None) -> None:
    for position, engine in enumerate(engines):
        if probe is not None and not isinstance(engine, ScoresTokens):
            raise ConfigError(
                f"{_describe(position, engine)} has no recompute_output_log_probs() and cannot answer a probe of its weights: "
                "sync without one"
            )


async def _update_all(
    engines: Sequence[object],
    updates: Sequence[Callable[[], Awaitable[Mapping[str, Any]]]],
    version: int | None,
    what: str,
    probe: WeightProbe | None,
) -> list[Mapping[str, Any]]:
    """Run all updates at once; return the answers in order, or raise one error about all that failed."""
    _check_can_probe(engines, probe)
    answers: dict[int, Mapping[str, Any]] = {}
    failures: dict[int, Exception] = {}

    async def update_one(position: int) -> None:
        with _RecordFailure(failures, position):
            answer = await updates[position]()
            await _check_version(engines[position], answer, version)
            if probe is not None:
                await _check_outputs(engines[position], probe)
            answers[position] = answer

    async with trio.open_nursery() as nursery:
        for position in range(len(engines)):
            nursery.start_soon(update_one, position)
    if failures:
        causes = [failures[position] for position in sorted(failures)]
        error = EngineError(_describe_failures(engines, failures, what))
        raise error from (causes[0] if len(causes) == 1 else ExceptionGroup("updates that failed", causes))
    return [answers[position] for position in range(len(engines))]


class _RecordFailure:
    """What goes wrong in the block becomes an entry of `failures`, so that it does not cancel the updates of the other engines.

    Cancellation and Ctrl-C pass through.
    """

    def __init__(self, failures: dict[int, Exception], position: int) -> None:
        self._failures, self._position = failures, position

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self._failures[self._position] = error
            return True
        return False


async def _check_version(engine: object, answer: Mapping[str, Any], expected: int | None) -> None:
    """Compare what the engine answered, what it says when asked, and what was meant."""
    if answer.get("success") is not True or "weight_version" not in answer:
        raise EngineProtocolError(f'its answer is {dict(answer)!r}, expected {{"success": True, "weight_version": int}}')
    reported = answer["weight_version"]
    if expected is not None and reported != expected:
        raise EngineError(f"it reports weight version {reported} after the update, expected {expected}")
    if isinstance(engine, _ReportsVersion):
        actual = await engine.get_weight_version()
        if actual != reported:
            raise EngineError(f"it answered with weight version {reported}, but get_weight_version() gives {actual}")


async def _check_outputs(engine: object, probe: WeightProbe) -> None:
    """Compare the log-probs that the engine, or each of many behind it, gives the probe's tokens with those of the new weights."""
    if isinstance(engine, _ChecksEach):
        return await engine.check_each(partial(_check_outputs, probe=probe))
    assert isinstance(engine, ScoresTokens), f"{type(engine).__name__} has no recompute_output_log_probs()"
    found = await engine.recompute_output_log_probs(probe.tokens, 1)
    if len(found) != len(probe.log_probs):
        raise EngineProtocolError(f"it gave {len(found)} log-probs for the {len(probe.log_probs)} tokens of a probe")
    differences = [abs(a - b) for a, b in zip(found, probe.log_probs, strict=True)]
    worst = max(differences)
    if not worst <= probe.tolerance:  # NaN included
        reason = (
            f"it reports the new version, but its log-probs of a probe are off by up to {worst:.3g} nats, more than {probe.tolerance:g}: "
            "it serves other weights, a stale prefix cache, or a lower precision than the tolerance allows for"
        )
        if isinstance(engine, _DistrustsWeights):
            engine.distrust_weights(reason)
        raise EngineError(reason)
    return None


def _describe(position: int, engine: object) -> str:
    return f"engine {position} ({type(engine).__name__})"


def _describe_failures(engines: Sequence[object], failures: Mapping[int, Exception], what: str) -> str:
    causes = [(position, failures[position]) for position in sorted(failures)]
    failed = "; ".join(f"{_describe(position, engines[position])}: {type(error).__name__}: {error}" for position, error in causes)
    updated = [_describe(position, engine) for position, engine in enumerate(engines) if position not in failures]
    state = "No engine is sure to have the new weights."
    if updated:
        state = f"These engines already have the new weights: {', '.join(updated)}."
    return (
        f"{len(failures)} of {len(engines)} engines did not take {what}. {failed}. {state} "
        "Do not generate until a sync of all engines succeeds: their samples would come from different policies."
    )


def _read_expected_version(path: Path) -> int | None:
    """The version that the directory says its weights have; None if it says nothing."""
    if not path.is_dir():
        raise CheckpointError(f"cannot sync weights from {path}: it is not a directory. Export the weights there first.")
    version_file = path / WEIGHT_VERSION_FILE
    if not version_file.exists():
        return None
    try:
        version = json.loads(version_file.read_text())["weight_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f'{version_file} cannot be read as {{"weight_version": int}}: {error}. Export the weights again.') from error
    if not isinstance(version, int) or isinstance(version, bool):
        raise CheckpointError(f"{version_file} has weight_version {version!r}, expected an integer. Export the weights again.")
    return version
