"""Replay of a crash bundle: its updates executed again on one process, the numbers beside the recorded ones, and the first that is bad.

    python -m integration.train --replay runs/mine/rl/crash/step_0012

Exit status: 0 = the same numbers and the same end, 3 = others, 1 = the bundle cannot be read or its weights are not there, 2 = wrong usage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
import trio
from torch import Tensor

from integration.crash.bundle import CrashBundle, read_bundle, same_number
from integration.crash.parts import create_loss, create_replayed_backend, find_weights, read_settings
from integration.crash.recorder import RecordedCall, RecordedUpdate
from integration.crash.watch import describe_machine, describe_versions
from integration.settings.config import Config
from rollouts.backends.pytorch.files import restore_random_state
from rollouts.checks import find_non_finite
from rollouts.config import BadNumbers
from rollouts.data.filters import find_bad_log_probs, find_empty_answers, refuse_all_masked, sift_rows
from rollouts.errors import BadNumberError, make_safe
from rollouts.models.loading import find_device_name
from rollouts.training.rollout_batch import select_log_probs
from rollouts.training.steps import find_trained_rows, submit_forward
from rollouts.types import LossFn, TrainBatch

EXIT_DIFFERS = 3
_BAD_ROWS = MappingProxyType({"log_prob": find_bad_log_probs, "empty_answer": find_empty_answers})
TOLERANCE = 1e-3
"""Relative difference up to which numbers of the FSDP backend count as the same on one process, without it: its sums have another order."""
_MOST_NAMED = 5


@dataclass(frozen=True)
class Compared:
    """A number of the recorded step and of its replay."""

    name: str
    recorded: float
    replayed: float | None  # None = the replay has no such number

    @property
    def is_equal(self) -> bool:
        """Whether both are equal to the bit."""
        return self.replayed is not None and same_number(self.recorded, self.replayed)

    @property
    def difference(self) -> float:
        """Relative difference; 0 of equal numbers, infinity if unequal ones are not both finite, or one is missing."""
        if self.is_equal:
            return 0.0
        if self.replayed is None or not (math.isfinite(self.recorded) and math.isfinite(self.replayed)):
            return math.inf
        return abs(self.recorded - self.replayed) / max(abs(self.recorded), abs(self.replayed))


@dataclass(frozen=True)
class Replayed:
    """Result of a replay."""

    compared: tuple[Compared, ...]
    message: str  # message of the error that ended the replay, "" if there was none
    findings: tuple[str, ...]  # places at which numbers are not finite, the first ones first
    is_same_end: bool  # whether it ended as the step had

    def is_reproduced(self, tolerance: float) -> bool:
        """Whether the step was reproduced. tolerance: relative difference up to which numbers count as equal; 0 = to the bit."""
        return self.is_same_end and all(one.difference <= tolerance for one in self.compared)


class ModuleWatch:
    """Finds the first module of a model whose output is not finite, by hooks, which change no number."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.first: str | None = None
        self._handles = [
            module.register_forward_hook(partial(self._look, name or type(module).__name__)) for name, module in model.named_modules()
        ]

    def _look(self, name: str, module: torch.nn.Module, inputs: object, output: object) -> None:
        if self.first is None and any(not bool(x.isfinite().all()) for x in _list_floats(output)):
            self.first = name

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _list_floats(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()] if value.is_floating_point() and value.numel() else []
    if isinstance(value, Mapping):
        value = list(cast("Mapping[str, object]", value).values())
    return [x for part in cast("Sequence[object]", value) for x in _list_floats(part)] if isinstance(value, list | tuple) else []


async def replay_updates(backend: Any, losses: Sequence[LossFn], bundle: CrashBundle) -> Replayed:
    """Execute the updates of a bundle, and compare the numbers of each with the recorded ones."""
    compared: list[Compared] = []
    findings: list[str] = []
    message, kind = "", ""
    for number, (update, loss) in enumerate(zip(bundle.updates, losses, strict=True), 1):
        of = "" if len(bundle.updates) == 1 else f"update {number} of {len(bundle.updates)}, "
        told = await _repeat_calls(backend, loss, update, of, findings)
        compared += told
        gradient = describe_gradient(backend)
        if gradient and update.metrics is None:
            findings.append(f"{of}gradient of {gradient}")
        numbers: Mapping[str, float]
        try:
            numbers = await backend.optim_step().result()
        except BadNumberError as error:
            message, kind, numbers = str(error), error.kind, error.numbers
        recorded = bundle.numbers if update.metrics is None else update.metrics
        compared += [Compared(f"{of}{name}", value, numbers.get(name)) for name, value in recorded.items()]
        if kind:
            if kind == "parameter" and (bad := _name_bad(_list_parameters(backend))):
                findings.append(f"{of}after the update, parameter {bad}")
            is_last = number == len(bundle.updates)
            return Replayed(tuple(compared), message, tuple(findings), is_same_end=is_last and kind == bundle.kind)
    return Replayed(tuple(compared), "", tuple(findings), is_same_end=False)


async def _repeat_calls(backend: Any, loss: LossFn, update: RecordedUpdate, of: str, findings: list[str]) -> list[Compared]:
    """Execute the calls of an update before its optim_step."""
    compared: list[Compared] = []
    model = getattr(backend, "model", None)
    for number, call in enumerate(update.calls, 1):
        name = f"{of}micro-batch {number}"
        restore_random_state(call.random, torch.device(getattr(backend, "device", "cpu")))
        batch = replace(call.batch, recorded=None)  # columns of single tokens were not kept
        if call.loss is None:
            await backend.count_experts(batch).result()
            continue
        watch = ModuleWatch(model) if isinstance(model, torch.nn.Module) else None
        try:
            metrics = await backend.forward_backward(batch, loss, with_entropy=call.with_entropy).result()
        finally:
            if watch is not None:
                watch.close()
        recorded = call.metrics if isinstance(call.metrics, Mapping) else {}
        compared += [Compared(f"{name}: {key}", value, metrics.get(key)) for key, value in recorded.items()]
        findings += await _explain_loss(backend, call, name, metrics["loss"], watch)
    return compared


async def _explain_loss(backend: Any, call: RecordedCall, name: str, loss: float, watch: ModuleWatch | None) -> list[str]:
    """Say where a loss, or an output on its way, is not finite."""
    if watch is not None and watch.first is not None:
        return [f"{name}: output of module {watch.first}, the first that is not finite"]
    if math.isfinite(loss):
        return []
    bad: list[str] = []
    if "log_probs" in (getattr(backend, "computes", None) or ()):
        column = await backend.forward(replace(call.batch, recorded=None), select_log_probs).result()
        places = (~column.isfinite() & (call.batch.loss_mask > 0)).nonzero().tolist()
        bad = [f"row {row}, token {token}" for row, token in places[:_MOST_NAMED]]
    where = (
        f"log-probs at {'; '.join(bad)}" if bad else "all outputs of modules are finite, so it begins in the loss, from the batch's columns"
    )
    return [f"{name}: loss {loss}: {where}"]


def describe_gradient(backend: Any) -> str:
    """Name the parameters whose gradient is not finite; "" if there is none, or the backend does not show them."""
    model, state = getattr(backend, "model", None), getattr(backend, "state", None)
    found = getattr(state, "gradients", None)
    if isinstance(found, Mapping):
        return _name_bad([(name, x) for name, x in cast("Mapping[str, Any]", found).items() if isinstance(x, Tensor)])
    if not isinstance(model, torch.nn.Module):
        return ""
    return _name_bad([(name, p.grad) for name, p in model.named_parameters() if p.grad is not None])


def _list_parameters(backend: Any) -> list[tuple[str, Tensor]]:
    model = getattr(backend, "model", None)
    return [(name, p.detach()) for name, p in model.named_parameters()] if isinstance(model, torch.nn.Module) else []


def _name_bad(tensors: Sequence[tuple[str, Tensor]]) -> str:
    if find_non_finite(tensors) is None:
        return ""
    names = [name for name, x in tensors if not bool(x.isfinite().all())]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more} (of {len(tensors)})"


async def replay_rows(backend: Any, batch: TrainBatch, bundle: CrashBundle, config: Config) -> Replayed:
    """Judge a batch that was refused before its update again, and compute the policy's own log-probs of it again."""
    message, found = _judge_rows(batch, bundle.kind, config.on_bad)
    compared: list[Compared] = []
    if batch.old_log_probs is not None:
        trained, max_tokens = replace(batch, recorded=None), config.rl.max_tokens_per_microbatch
        column = await submit_forward(backend, trained, select_log_probs, max_tokens_per_microbatch=max_tokens).result()
        compared += compare_columns(batch.old_log_probs, column, batch.loss_mask > 0)
    return Replayed(tuple(compared), message, found, is_same_end=bool(message))


def _judge_rows(batch: TrainBatch, kind: str, policy: BadNumbers) -> tuple[str, tuple[str, ...]]:
    """Return the message with which a batch is refused, "" if it is accepted, and what is found in it."""
    if kind not in _BAD_ROWS:
        try:
            metrics = {} if find_trained_rows(batch) else refuse_all_masked(policy, "the rollout batch", batch)
        except BadNumberError as error:
            return str(error), ()
        return ("no token of the batch has loss_mask > 0" if metrics else ""), ()
    bad = _BAD_ROWS[kind](batch)
    rows = bad.nonzero().flatten().tolist()
    found = (f"rows {', '.join(map(str, rows))} of {batch.num_rows} have a bad {kind}",) if rows else ()
    try:
        sifted, _ = sift_rows(batch, bad, kind, policy)
    except BadNumberError as error:
        return str(error), found
    is_left_out = sifted is None or not find_trained_rows(sifted)
    return (f"the update of the batch is left out: {len(rows)} of {batch.num_rows} rows have a bad {kind}" if is_left_out else ""), found


def compare_columns(recorded: Tensor, replayed: Tensor, on: Tensor) -> list[Compared]:
    """Compare two columns of log-probs at the tokens of a mask, by the token that differs most; nothing if the mask has none. # [B, T]"""
    one, other = recorded[on].double(), replayed[on].double()
    if not one.numel():
        return []
    is_same = (one == other) | (one.isnan() & other.isnan())
    gaps = ((one - other).abs() / torch.maximum(one.abs(), other.abs())).nan_to_num(nan=math.inf).masked_fill(is_same, 0.0)
    worst = int(gaps.argmax())
    row, token = on.nonzero()[worst].tolist()
    name = f"log-prob of the policy at row {row}, token {token}: of {one.numel()} the one that differs most"
    return [Compared(name, float(one[worst]), float(other[worst]))]


def replay(path: Path) -> int:
    """Replay a bundle and print what is found. Returns the exit status."""
    bundle = read_bundle(path)
    config = read_settings(path, bundle)
    weights, start = find_weights(path, bundle)
    threads, before = bundle.machine.get("num_threads"), torch.get_num_threads()
    if isinstance(threads, int) and threads > 0:
        torch.set_num_threads(threads)  # sums depend on it
    try:
        result = _execute(path, config, bundle, weights, start)
    finally:
        torch.set_num_threads(before)
    is_sharded = bundle.num_processes > 1 or getattr(config.backend, "kind", "pytorch") == "fsdp"
    tolerance = TOLERANCE if is_sharded else 0.0
    print(make_safe(tell(path, bundle, result, tolerance, find_device_name(config.model.device))), flush=True)
    return 0 if result.is_reproduced(tolerance) else EXIT_DIFFERS


def _execute(path: Path, config: Any, bundle: CrashBundle, weights: Path | None, start: Path | None) -> Replayed:
    print(f"replaying {path}: step {bundle.step} of {bundle.stage}, {bundle.role}", flush=True)
    losses = [create_loss(config, bundle, update) for update in bundle.updates]
    backend = create_replayed_backend(config, bundle, weights, start)
    before = trio.run(replay_updates, backend, losses, bundle)
    if bundle.rows is None or before.message:
        return before
    assert isinstance(config, Config), "reward models refuse no rows"
    result = trio.run(replay_rows, backend, bundle.rows, bundle, config)
    return replace(result, compared=(*before.compared, *result.compared), findings=(*before.findings, *result.findings))


def tell(path: Path, bundle: CrashBundle, result: Replayed, tolerance: float, device: str) -> str:
    """Return the report of a replay."""
    accepted = "the update went through" if bundle.rows is None else "the batch is accepted"
    lines = [f"recorded: {bundle.message}", f"replayed: {result.message or accepted}", ""]
    width = max((len(one.name) for one in result.compared), default=0)
    lines += [f"{'':{width}}  {'recorded':>24}  {'replayed':>24}"] if result.compared else []
    for one in result.compared:
        same = "equal" if one.is_equal else f"differs by {one.difference:.2g}"
        lines.append(f"{one.name:{width}}  {one.recorded!r:>24}  {'missing' if one.replayed is None else repr(one.replayed):>24}  {same}")
    lines += ["", *(f"not finite: {text}" for text in (*_tell_places(bundle), *result.findings))]
    if bundle.num_processes > 1:
        lines.append(
            f"the step was computed by {bundle.num_processes} processes: on one, sums have another order, and dropout other numbers"
        )
    ours, machine = describe_versions(), describe_machine(device)
    lines += [f"other version: {name} {old}, here {ours.get(name)}" for name, old in bundle.versions.items() if ours.get(name) != old]
    lines += [f"other machine: {name} {old}, here {machine.get(name)}" for name, old in bundle.machine.items()
              if name != "num_threads" and machine.get(name) != old]  # fmt: skip
    exact = all(one.is_equal for one in result.compared)
    worst = max((one.difference for one in result.compared), default=0.0)
    if result.is_same_end and not result.compared:
        end = "the step ends" if bundle.rows is None else "the batch is refused"
        lines.append(f"reproduced: {end} for the same reason; no number was recorded to compare")
    elif result.is_reproduced(tolerance):
        lines.append("reproduced, equal to the bit" if exact else f"reproduced; numbers differ by at most {worst:.2g} of their size")
    else:
        lines.append(
            f"NOT reproduced: {'the end differs' if not result.is_same_end else f'numbers differ by up to {worst:.2g} of their size'}"
        )
    return "\n".join(lines)


def _tell_places(bundle: CrashBundle) -> list[str]:
    return ["in the batch, " + ", ".join(f"{name} {value}" for name, value in place.items()) for place in bundle.places[:_MOST_NAMED]]
