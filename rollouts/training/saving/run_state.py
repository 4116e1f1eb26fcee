"""RunState, the one value that a checkpoint holds of its run besides weights and optimizer; and how older versions of its file are read.

The file, run_state.json, is an object with a number `schema` and every field of RunState. A file without the number is of schema 1. A
migration is a pure function from the object of one schema to that of the next, so a checkpoint of any earlier version can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from rollouts.checks import parse_json
from rollouts.errors import CheckpointError
from rollouts.training.saving.checkpoints import RUN_STATE_FILE, verify_checkpoint

SCHEMA = 2
"""Schema of the files that are written."""

_Raw: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FileMark:
    """Size and hash of one file of the data."""

    size: int  # bytes
    hash: str  # see integration/tasks/data_marks.py; equal for equal content


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Marks of what a run is made from: a resumed run compares them with what it finds."""

    data: Mapping[str, FileMark]  # by setting and file, such as data.path or data.mixture[1]/part.jsonl
    settings: Mapping[str, str]  # hash of each setting that must not change, by section.field


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run after a step. Values are JSON values."""

    stage: str  # sft, rl, reward_model or dpo
    step: int  # finished steps
    metrics_bytes: int | None = (
        None  # length of the metrics file, with `metrics` before the line of the step, else behind it; None = no file
    )
    metrics: Mapping[str, float] | None = None  # metrics of the step, whose line may not have been written: in RL, and of other stages
    # if the evaluation of the step was given up; the resumed run evaluates and writes the line. None = the line was written
    rollouts: Mapping[str, Any] | None = None  # RL: state of the source of rollouts, position in the data included
    weight_version: int | None = None  # RL: version of the policy
    kl_coef: float | None = None  # RL: coefficient of the KL controller; None = there is none
    num_rows: int | None = None  # SFT: rows of the data; None = not known
    best: Mapping[str, Any] | None = None  # state of the keeper of the best checkpoint; None = there is none
    inputs: RunInputs | None = None  # None = the run was not started by a command, or by one before schema 2

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the file, as JSON values."""
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"schema": SCHEMA, **state, "inputs": None if self.inputs is None else asdict(self.inputs)}


def _add_inputs(raw: _Raw) -> _Raw:
    """Migrate schema 1, which leaves out what a stage has not, to 2, which writes every field."""
    return {**{field.name: None for field in fields(RunState) if field.name not in ("stage", "step")}, **raw}


MIGRATIONS: Mapping[int, Callable[[_Raw], _Raw]] = MappingProxyType({1: _add_inputs})
"""The function that makes an object of the next schema from one of this schema, without its number."""

_KINDS: Mapping[str, tuple[type, ...]] = MappingProxyType({
    "stage": (str,),
    "step": (int,),
    "metrics_bytes": (int, type(None)),
    "metrics": (dict, type(None)),
    "rollouts": (dict, type(None)),
    "weight_version": (int, type(None)),
    "kl_coef": (int, float, type(None)),
    "num_rows": (int, type(None)),
    "best": (dict, type(None)),
    "inputs": (dict, type(None)),
})  # fmt: skip
_NEEDED_BY_RL = ("rollouts", "metrics")
_RESTORE = "restore the checkpoint from a copy, or move its directory away, so that --resume takes the one before it"


def read_run_state(checkpoint: Path) -> RunState:
    """Verify a checkpoint and read the state of its run.

    Raises: CheckpointError if the checkpoint is damaged, if a newer version of this library wrote it, or naming file and key if a key is
        missing, unknown or of another type.
    """
    verify_checkpoint(checkpoint)
    file = checkpoint / RUN_STATE_FILE
    try:
        raw = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): {_RESTORE}") from error
    return parse_run_state(raw, str(file))


def parse_run_state(raw: object, file: str) -> RunState:
    """Migrate and check the content of a file. Raises CheckpointError as read_run_state; file: its name, for messages."""
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} holds {type(raw).__name__}, expected a JSON object: {_RESTORE}")
    known = migrate(cast("dict[str, Any]", raw), file)
    expected = {field.name for field in fields(RunState)}
    for name in sorted(expected - known.keys()):
        raise CheckpointError(f"{file} lacks the key {name!r}: {_RESTORE}")
    for name in sorted(known.keys() - expected):
        raise CheckpointError(f"{file} has the key {name!r}, which schema {SCHEMA} does not know: {_RESTORE}")
    for name, kinds in _KINDS.items():
        _check_kind(known, name, kinds, file)
    if known["step"] < 0:
        raise CheckpointError(f"{file} has the step {known['step']}, expected at least 0: {_RESTORE}")
    for name in _NEEDED_BY_RL if known["stage"] == "rl" else ():
        if known[name] is None:
            raise CheckpointError(f"{file} is of stage rl, but its key {name!r} is null: {_RESTORE}")
    if known["best"] is not None:
        for name, kinds in {"metric": (str,), "value": (int, float, type(None)), "step": (int, type(None)), "num_since": (int,)}.items():
            _check_kind(known["best"], name, kinds, f"{file}, best")
    inputs = known["inputs"]
    values: dict[str, Any] = {**known, "inputs": None if inputs is None else _parse_inputs(inputs, f"{file}, inputs")}
    return RunState(**values)


def migrate(raw: _Raw, file: str) -> _Raw:
    """Return the object as one of SCHEMA, without the number. Raises CheckpointError for a schema that this version does not know."""
    found = raw.get("schema", 1)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise CheckpointError(f"{file} has the schema {found!r}, expected a whole number from 1 to {SCHEMA}: {_RESTORE}")
    if found > SCHEMA:
        raise CheckpointError(
            f"{file} has schema {found}, but this version of rollouts reads schemas up to {SCHEMA}: a newer version wrote it. Go on with "
            "that version, or begin a new run from its weights: --model.path"
        )
    state: _Raw = {name: value for name, value in raw.items() if name != "schema"}
    for number in range(found, SCHEMA):
        state = MIGRATIONS[number](state)
    return state


def _check_kind(values: _Raw, name: str, kinds: tuple[type, ...], file: str) -> None:
    if name not in values:
        raise CheckpointError(f"{file} lacks the key {name!r}: {_RESTORE}")
    value = values[name]
    if not isinstance(value, kinds) or isinstance(value, bool):
        told = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise CheckpointError(f"{file}: the key {name!r} has the value {str(value)[:80]!r}, expected {told}: {_RESTORE}")


def _parse_inputs(raw: _Raw, file: str) -> RunInputs:
    for name in ("data", "settings"):
        _check_kind(raw, name, (dict,), file)
    marks: dict[str, FileMark] = {}
    for name, mark in raw["data"].items():
        _check_kind(raw["data"], name, (dict,), f"{file}, data")
        _check_kind(mark, "size", (int,), f"{file}, data, {name}")
        _check_kind(mark, "hash", (str,), f"{file}, data, {name}")
        marks[name] = FileMark(size=mark["size"], hash=mark["hash"])
    for name in raw["settings"]:
        _check_kind(raw["settings"], name, (str,), f"{file}, settings")
    return RunInputs(data=marks, settings=dict(raw["settings"]))
