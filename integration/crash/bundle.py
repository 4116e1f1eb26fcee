"""CrashBundle, the content of a crash bundle, and its files.

    crash/step_0012/        in the directory of a stage
      run_state.json        schema, stage, step, error, numbers, versions, environment; everything but tensors
      config.json           settings of the run
      batches.safetensors   batches as the backend was given them, and states of the random generators
      weights/              checkpoint of the backend; absent if the bundle only names one
      manifest.json         size and CRC-32 of every file; written last

It is written as a checkpoint is: into a temporary directory, whole or not at all. Nothing is pickled but the optimizer in a checkpoint of
the backend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from integration.crash.recorder import RecordedCall, RecordedUpdate
from rollouts.backends.unread_metrics import UnreadMetrics
from rollouts.checks import parse_json
from rollouts.errors import CheckpointError
from rollouts.training.saving.checkpoints import RUN_STATE_FILE, verify_checkpoint
from rollouts.types import KeptSets, LossFn, RewardComponents, TrainBatch, TurnLevels, Turns

SCHEMA = 1
TENSORS_FILE, WEIGHTS = "batches.safetensors", "weights"
_MOST_PLACES = 20
_PARTS: Mapping[str, type[Any]] = MappingProxyType(
    {"kept": KeptSets, "turns": Turns, "reward_components": RewardComponents, "levels": TurnLevels}
)
_DAMAGED = "take another bundle: crash bundles are of one piece"


@dataclass(frozen=True, kw_only=True, eq=False)
class CrashBundle:
    """Everything that executes a step again which a bad number ended, but its weights and settings."""

    stage: str  # sft, rl, dpo or reward_model
    step: int  # step of the run, counted from 1
    role: str  # model whose update failed: policy or critic
    message: str  # message of the error
    kind: str  # field of config.BadNumbers, or parameter
    numbers: Mapping[str, float]  # numbers that were judged, such as grad_norm
    places: Sequence[Mapping[str, Any]]  # numbers of the last batch that are not finite: column, row and token
    max_tokens: int | None  # RL: token budget of a response, which some algorithms depend on
    weights: str  # before the first of `updates`: "saved" = in the bundle, "named" = in the directory weights_from, "start" = of the
    # beginning of the stage, "lost"
    weights_from: str | None  # directory of these weights, if they are not in the bundle
    start: str | None  # directory of the model that the stage began with; None = that of the settings
    num_processes: int  # processes that trained together
    versions: Mapping[str, str]  # versions of packages
    environment: Mapping[str, str]  # variables that change numbers or speed
    machine: Mapping[str, Any]  # Python, platform, device, threads
    updates: tuple[RecordedUpdate, ...] = ()  # to be executed in order; the last one raised the error
    rows: TrainBatch | None = None  # batch that was refused before an update, after `updates`


def describe_loss(update: RecordedUpdate) -> tuple[str, tuple[str, ...]]:
    """Describe the loss of an update; return the text, and the columns that it takes from its own pass."""
    loss = next((call.loss for call in update.calls if call.loss is not None), None)
    if loss is None:
        return "", ()
    own, columns = strip_loss(loss)
    return describe_function(own), columns


def strip_loss(loss: LossFn) -> tuple[LossFn, tuple[str, ...]]:
    """Return the loss without what the loop put around it, and the columns that it takes from its own pass."""
    columns: tuple[str, ...] = ()
    while isinstance(loss, partial) and loss.func.__name__ in ("_loss_with_tokens", "_loss_anchored_to_self"):
        columns = tuple(loss.keywords.get("columns", columns))
        loss = cast("LossFn", loss.keywords["loss"])
    return loss, columns


def describe_function(value: object) -> str:
    """Describe a function, or a partial one with its arguments: equal text for equal functions, in any process."""
    if isinstance(value, partial):
        arguments = [*map(describe_function, value.args), *(f"{name}={describe_function(x)}" for name, x in sorted(value.keywords.items()))]
        return f"{describe_function(value.func)}({', '.join(arguments)})"
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{field.name}={describe_function(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inner})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{cast('Any', value).__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def find_places(batch: TrainBatch) -> list[dict[str, Any]]:
    """Find the numbers of a batch that are not finite: column, row, and at a trained token its position; the first ones of each column."""
    found: list[dict[str, Any]] = []
    for field in fields(batch):
        value = getattr(batch, field.name)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() > 2:
            continue
        bad = ~value.isfinite() & (batch.loss_mask > 0 if value.dim() == 2 else True)
        names = ("row", "token")[: value.dim()]
        found += [{"column": field.name, **dict(zip(names, place, strict=True))} for place in bad.nonzero().tolist()[:_MOST_PLACES]]
    return found


def write_bundle(directory: Path, bundle: CrashBundle) -> dict[str, Any]:
    """Write the tensors of a bundle into a directory; return the content of run_state.json."""
    tensors: dict[str, Tensor] = {}
    losses = [describe_loss(update) for update in bundle.updates]
    updates = [
        {
            "loss": losses[u][0],
            "own_columns": losses[u][1],
            "calls": [_flatten_call(call, tensors, f"{u}.{c}.") for c, call in enumerate(update.calls)],
            "metrics": None if update.metrics is None else dict(update.metrics),
        }
        for u, update in enumerate(bundle.updates)
    ]
    rows = None if bundle.rows is None else _flatten(bundle.rows, tensors, "rows.")
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, directory / TENSORS_FILE)
    plain = {field.name: getattr(bundle, field.name) for field in fields(bundle) if field.name not in ("updates", "rows")}
    return {"schema": SCHEMA, **plain, "updates": updates, "rows": rows}


def read_bundle(path: Path) -> CrashBundle:
    """Verify a bundle and read it.

    Raises: CheckpointError if it is cut, damaged, of another schema, or no crash bundle.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory: give that of a crash bundle, for example runs/mine/rl/crash/step_0012")
    verify_checkpoint(path)
    try:
        raw = cast("dict[str, Any]", parse_json((path / RUN_STATE_FILE).read_text(encoding="utf-8")))
        if not (path / TENSORS_FILE).is_file() or "updates" not in raw:
            raise CheckpointError(f"{path} is a checkpoint, not a crash bundle: bundles are in the directory crash of a stage")
        if raw["schema"] != SCHEMA:
            raise CheckpointError(
                f"{path} is a crash bundle of schema {raw['schema']!r}, but this version of rollouts reads schema {SCHEMA}: replay it with "
                "the version that wrote it, which its run_state.json names"
            )
        tensors = load_file(path / TENSORS_FILE)
        updates = tuple(
            RecordedUpdate(
                tuple(_build_call(call, tensors, f"{u}.{c}.") for c, call in enumerate(update["calls"])),
                update["metrics"],
                update["loss"],
                tuple(update["own_columns"]),
            )
            for u, update in enumerate(raw["updates"])
        )
        rows = None if raw["rows"] is None else _build(TrainBatch, raw["rows"], tensors, "rows.")
        plain = {field.name: raw[field.name] for field in fields(CrashBundle) if field.name not in ("updates", "rows")}
        values: dict[str, Any] = {**plain, "updates": updates, "rows": rows}
        return CrashBundle(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, AssertionError, SafetensorError) as error:
        raise CheckpointError(f"{path} is no crash bundle that can be read ({type(error).__name__}: {error}): {_DAMAGED}") from error


def _flatten_call(call: RecordedCall, tensors: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    plain = _flatten(call.batch, tensors, prefix)
    tensors.update({f"{prefix}random.{name}": state for name, state in call.random.items() if state is not None})
    metrics = call.metrics
    if isinstance(metrics, UnreadMetrics):
        metrics = metrics.read()
    return {
        "batch": plain,
        "trains": call.loss is not None,
        "with_entropy": call.with_entropy,
        "metrics": None if metrics is None else dict(metrics),
    }


def _build_call(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> RecordedCall:
    random = {name: tensors.get(f"{prefix}random.{name}") for name in ("cpu", "cuda")}
    batch = _build(TrainBatch, raw["batch"], tensors, prefix)
    return RecordedCall(batch, _unknown_loss if raw["trains"] else None, raw["with_entropy"], random, raw["metrics"])


def _unknown_loss(outputs: Any, batch: TrainBatch) -> Any:
    raise AssertionError("a bundle describes its loss; the replay makes it from the settings")


def _flatten(value: Any, tensors: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    """Put the tensors of a dataclass into `tensors`, and return its other fields as JSON values."""
    plain: dict[str, Any] = {}
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            tensors[prefix + field.name] = part
        elif is_dataclass(part):
            plain[field.name] = _flatten(part, tensors, f"{prefix}{field.name}.")
        elif part is not None:
            plain[field.name] = part
    return plain


def _build(kind: type[Any], plain: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> Any:
    values: dict[str, Any] = {}
    for field in fields(kind):
        value: Any = tensors.get(prefix + field.name, plain.get(field.name))
        if field.name in _PARTS and value is not None:
            value = _build(_PARTS[field.name], value, tensors, f"{prefix}{field.name}.")
        if value is not None:
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def same_number(one: float, other: float) -> bool:
    """Whether two numbers are equal to the bit; NaN is equal to NaN."""
    return one == other or (one != one and other != other)
