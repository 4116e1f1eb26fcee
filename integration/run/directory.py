"""Run directories and the request to stop, shared by all commands that train."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import trio

from integration.settings.command_line import CONFIG_FILE, RUN_FILE, read_saved
from integration.settings.paths import has_moved, with_absolute_paths
from integration.tasks.data_marks import (
    ROWS_FILE,
    DataMarks,
    LineMarks,
    compare_data,
    find_changed_settings,
    mark_data,
    mark_settings,
    read_lines,
    write_lines,
)
from rollouts.checks import parse_json
from rollouts.config_files import read_json, save_config, to_dict
from rollouts.errors import ConfigError, DataError, OutputError
from rollouts.output_files import explain_writes, replace_file
from rollouts.training.abandonment import Abandonment
from rollouts.training.metrics import truncate_log
from rollouts.training.saving.checkpoints import MANIFEST_FILE, find_damaged, finish_save, has_checkpoints, latest_checkpoint
from rollouts.training.saving.run_state import RunInputs, RunState, read_run_state

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
_ASK_S = 0.5  # seconds between two looks at whether another rank was told to end, or the launcher is gone
REFERENCE_FILE = "reference.jsonl"
"""File of the stage of preferences with log-probs of the reference."""
_OWN_FILES = (
    "sft",
    "dpo",
    "rl",
    "checkpoints",
    "crash",
    "loggers",
    METRICS_FILE,
    RUN_FILE,
    ROWS_FILE,
    CONFIG_FILE,
)  # config.json, the mark of a run, last
_HELDOUT = ("data.eval_path", "preference.eval_path")


class StopRequest:
    """Whether the user has asked the run to stop, and how often the loops have asked for that."""

    def __init__(self) -> None:
        self.requested = False
        self.is_passed_on = False  # another rank was asked, or the launcher is gone: a signal of this process is still its first one
        self.num_steps = 0  # ended steps of this process, all stages together
        self.abandonment = Abandonment()

    def is_requested(self) -> bool:
        """Return whether to stop; loops ask after each step."""
        self.num_steps += 1
        return self.requested or self.is_passed_on


async def watch_signals(
    stop: StopRequest, say: Callable[[str], None], cancel: Callable[[], None], grace_s: float | None = None, *, task_status: Any
) -> None:
    """Finish the step, write a checkpoint and end at the first Ctrl-C (or SIGTERM); cancel at the second. watch_beside enforces the end.

    Args:
        grace_s: seconds from the first signal to the end of the run; after half of them a wait for rollouts or an evaluation is given up.
    """
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                if stop.requested:
                    cancel()
                    return
                stop.requested = True
                say("stopping after this step, with a checkpoint; once more to stop at once")
                if grace_s is not None:
                    nursery.start_soon(_abandon_after, grace_s / 2, stop, say)


async def watch_ranks(stop: StopRequest, find_cause: Callable[[], str | None], say: Callable[[str], None], grace_s: float | None) -> None:
    """Do as watch_signals at a first signal, once there is a cause to end that sends this process no signal.

    Args:
        find_cause: returns, for example, "rank 1 was told to end": its machine may be taken away, and no other be told.
    """
    while (cause := find_cause()) is None:
        await trio.sleep(_ASK_S)
    stop.is_passed_on = True
    if not stop.requested:
        say(f"{cause}: stopping after this step, with a checkpoint")
        if grace_s is not None:
            await _abandon_after(grace_s / 2, stop, say)


async def _abandon_after(seconds: float, stop: StopRequest, say: Callable[[str], None]) -> None:
    await trio.sleep(seconds)
    after = f"{seconds:g} s after the signal (half of --grace-s): --resume goes on behind the last finished step"
    stop.abandonment.request(lambda work: say(f"{work} is given up {after}"))


class measure_seconds:  # a context manager reads as a verb
    """Add the seconds of a block to run.json."""

    def __init__(self, output_dir: Path, stage: str, clock: Callable[[], float]) -> None:
        self._output_dir, self._key, self._clock, self._start = output_dir, f"seconds_{stage}", clock, clock()

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        facts = read_facts(self._output_dir)
        facts[self._key] = facts.get(self._key, 0.0) + self._clock() - self._start
        try:
            write_facts(self._output_dir, facts)
        except OutputError as problem:  # do not replace the error of the block
            if error is None:
                raise
            error.add_note(f"in addition, {problem}")


def read_facts(output_dir: Path) -> dict[str, Any]:
    """Read run.json. Raises ConfigError if it is damaged."""
    path = output_dir / RUN_FILE
    try:
        return dict(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): restore it, for example as {{}}, and go on with --resume") from error


def write_facts(output_dir: Path, facts: Mapping[str, Any]) -> None:
    """Write run.json. Raises OutputError."""
    replace_file(output_dir / RUN_FILE, json.dumps(dict(facts)) + "\n")


def prepare_directory(
    output_dir: Path,
    config: Any,
    facts: Mapping[str, Any],
    *,
    resume: bool,
    may_change: tuple[str, ...],
    checkpoint_dirs: Sequence[Path],
    tell: Callable[[str], None],
    accepts_changed_data: bool = False,
) -> RunInputs:
    """Create a run directory, or restore that of an interrupted run to its newest checkpoint.

    A directory without a checkpoint counts as new, with and without resume: a failed start has nothing to resume, and its corrected
    settings apply. Its files are moved to earlier_start_1 and so on.

    Args:
        config: a dataclass of settings with an output_dir; written to the directory.
        facts: contents of run.json of a new run.
        may_change: prefixes of the dotted names of settings that a resumed run may change.
        checkpoint_dirs: directories of checkpoints, that of the last stage first.
        tell: receives messages for the user, such as a loss of metrics.
        accepts_changed_data: go on although files of the data have changed since the checkpoint, with a warning.

    Returns: the marks of data and settings, for the checkpoints of the run.
    Raises: ConfigError if the directory holds a run and resume is False, or if settings differ from those of the interrupted run; DataError
        if files of the data have changed since its checkpoint;
        CheckpointError if it has checkpoints but none is intact; OutputError if it cannot be written.
    """
    config = with_absolute_paths(config)
    marks = mark_data(replace(config, output_dir=str(output_dir)))
    inputs = RunInputs(data=marks.files, settings=mark_settings(config, may_change))
    if not any(has_checkpoints(directory) for directory in checkpoint_dirs):
        aside = _move_aside(output_dir)
        if aside is not None:
            tell(f"{output_dir} holds a run without a checkpoint: this run starts from the beginning; the earlier files are now in {aside}")
        save_config(replace(config, output_dir=str(output_dir)), output_dir / CONFIG_FILE)
        write_facts(output_dir, facts)
        replace_file(output_dir / ROWS_FILE, write_lines(marks.lines))
        return inputs
    if not resume:
        raise ConfigError(f"{output_dir} already holds a run: add --resume to go on with it, or choose another --output-dir")
    saved = with_absolute_paths(read_saved(type(config), output_dir / CONFIG_FILE))  # defaults fill in settings that it lacks
    differing = sorted(compare_settings(to_dict(saved), to_dict(config)).items())
    differing = [(name, values) for name, values in differing if not name.startswith(may_change)]
    if changed := [f"{name}: {before!r} -> {after!r}" for name, (before, after) in differing if not has_moved(name, before, after)]:
        raise ConfigError(
            f"--resume with other settings than the run was started with: {'; '.join(changed)}. Leave them out, or give the first value "
            "of each"
        )
    checkpoint = next((c for directory in checkpoint_dirs if (c := latest_checkpoint(directory)) is not None), None)
    state = None if checkpoint is None else _check_inputs(output_dir, checkpoint, inputs, marks, tell, accepts_changed_data)
    for name, (before, after) in differing:
        tell(f"{name}: {before!r} is no longer there, and {after!r} is taken in its place")
    save_config(replace(config, output_dir=str(output_dir)), output_dir / CONFIG_FILE)
    replace_file(output_dir / ROWS_FILE, write_lines({**_lines_of(output_dir, state), **marks.lines}))
    for problem in (problem for directory in checkpoint_dirs for problem in find_damaged(directory)):
        tell(f"warning: a checkpoint is passed over, and the steps behind the one before it are trained again: {problem}")
    gap = truncate_log(output_dir / METRICS_FILE, 0 if state is None else state.metrics_bytes or 0)
    if gap is not None:  # metrics are lost, no training
        tell(f"warning: {gap}")
        known = read_facts(output_dir)
        write_facts(output_dir, known | {"metrics_gaps": [*known.get("metrics_gaps", ()), gap]})
    if checkpoint is not None:
        finish_save(checkpoint)
    return inputs


def _lines_of(output_dir: Path, state: RunState | None) -> dict[str, LineMarks]:
    """Return the known marks of the lines of the checkpoint's data, with which the next resumed run compares if this one saves nothing."""
    inputs = None if state is None else state.inputs
    hashes = set[str]() if inputs is None else {mark.hash for mark in inputs.data.values()}
    return {found: lines for found, lines in read_lines(output_dir / ROWS_FILE).items() if found in hashes}


def _check_inputs(
    output_dir: Path, checkpoint: Path, inputs: RunInputs, marks: DataMarks, tell: Callable[[str], None], accepts_changed_data: bool
) -> RunState:
    """Compare data and settings with those of the checkpoint that the run goes on from, and return its state.

    Held-out data may change, with a warning.
    """
    state = read_run_state(checkpoint)
    if state.inputs is None:  # by a version without marks, or by a program of the user's
        return state
    if edited := find_changed_settings(state.inputs, inputs.settings):
        raise ConfigError(
            f"--resume with other settings than {checkpoint} was written with: {', '.join(edited)}. They differ although {CONFIG_FILE} has "
            "the same values, so that file was edited: restore it from a copy, or start a new run directory from the weights (--model.path)"
        )
    lines = read_lines(output_dir / ROWS_FILE)
    changed = compare_data(state.inputs.data, lines, marks)
    for text in (text for name, text in changed.items() if accepts_changed_data or name.startswith(_HELDOUT)):
        tell(f"warning: {text} since {checkpoint}: the run goes on with it")
    told = [text for name, text in changed.items() if not name.startswith(_HELDOUT)]
    if told and not accepts_changed_data:
        raise DataError(
            f"the data are not those of {checkpoint}: {'; '.join(told)}. Restore them, or go on with them as they are "
            "(--accept-changed-data), with other numbers than the run would have had"
        )
    return state


def _move_aside(output_dir: Path) -> Path | None:
    """Move the files of a run without a checkpoint to a directory and return it; None if there was no run."""
    if not (output_dir / CONFIG_FILE).exists():
        return None
    aside = next(path for k in itertools.count(1) if not (path := output_dir / f"earlier_start_{k}").exists())
    with explain_writes(aside):
        aside.mkdir()
        for name in _OWN_FILES:  # nothing else: the directory may hold the user's files
            if (output_dir / name).exists():
                (output_dir / name).rename(aside / name)
        if (scores := aside / "dpo" / REFERENCE_FILE).exists():  # they know their reference and their pairs: none is computed twice
            (output_dir / "dpo").mkdir()
            scores.rename(output_dir / "dpo" / REFERENCE_FILE)
    return aside


def compare_settings(before: dict[str, Any], after: dict[str, Any], where: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the dotted names of settings that differ, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found.update(compare_settings(old, new, f"{where}{name}."))
        elif old != new:
            found[where + name] = (old, new)
    return found


def find_result(run: Path) -> Path | None:
    """Return the best checkpoint of the last stage of a run, if a finished run kept one, else the newest; None without one."""
    for stage in ("rl", "dpo", "sft"):
        newest = latest_checkpoint(run / stage / "checkpoints")
        if newest is not None:
            return _find_best(run, stage) or newest
    return None


def _find_best(run: Path, stage: str) -> Path | None:
    """Return the best checkpoint of a stage by the summary of a finished run; None if it kept none."""
    best = (read_json(run / SUMMARY_FILE).get("best") or {}).get(stage) if (run / SUMMARY_FILE).is_file() else None
    found = run / best["checkpoint"] if best else None
    return found if found is not None and (found / MANIFEST_FILE).is_file() else None
