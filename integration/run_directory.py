"""What every command that trains does with its run directory, with signals, and with errors that a user can cause."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import trio

from integration.command_line import CONFIG_FILE, RUN_FILE
from rollouts.checkpoints import latest_checkpoint, load_run_state
from rollouts.config import load_config, save_config, to_dict
from rollouts.errors import ConfigError, DataError, RolloutsError
from rollouts.metrics import truncate_log

T = TypeVar("T")
METRICS_FILE = "metrics.jsonl"
EXIT_USAGE, EXIT_FAILURE, EXIT_STOPPED = 2, 1, 130


class StopRequest:
    """Whether the user has asked the run to stop."""

    def __init__(self) -> None:
        self.requested = False

    def is_requested(self) -> bool:
        """For a loop to ask after each step."""
        return self.requested


async def watch_signals(stop: StopRequest, say: Callable[[str], None], cancel: Callable[[], None], *, task_status: Any) -> None:
    """First Ctrl-C (or SIGTERM): finish the step, write a checkpoint, end. Second: end now."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            if stop.requested:
                cancel()
                return
            stop.requested = True
            say("stopping after this step, with a checkpoint; once more to stop at once")


class measure_seconds:  # a context manager reads as a verb
    """Add the seconds of a block to those of earlier parts of the run, in run.json."""

    def __init__(self, output_dir: Path, stage: str, clock: Callable[[], float]) -> None:
        self._path, self._key, self._clock, self._start = output_dir / RUN_FILE, f"seconds_{stage}", clock, clock()

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(self, *error: object) -> None:
        facts = json.loads(self._path.read_text())
        facts[self._key] = facts.get(self._key, 0.0) + self._clock() - self._start
        self._path.write_text(json.dumps(facts) + "\n")


def prepare_directory(
    output_dir: Path,
    config: Any,
    facts: Mapping[str, Any],
    *,
    resume: bool,
    may_change: tuple[str, ...],
    checkpoint_dirs: Sequence[Path],
) -> None:
    """Make a new run directory, or bring that of an interrupted run to its newest checkpoint.

    Args:
        config: a dataclass of settings with an output_dir; written to the directory.
        facts: of a new run, for its run.json.
        may_change: beginnings of the dotted names of settings that a resumed run may have others of.
        checkpoint_dirs: the one that the newest checkpoint would be in first.

    Raises: ConfigError if the directory holds a run and resume was not given, or if settings differ from the interrupted run's.
    """
    if not resume:
        if (output_dir / CONFIG_FILE).exists():
            raise ConfigError(f"{output_dir} already holds a run: add --resume to go on with it, or choose another --output-dir")
        save_config(replace(config, output_dir=str(output_dir)), output_dir / CONFIG_FILE)
        (output_dir / RUN_FILE).write_text(json.dumps(dict(facts)) + "\n")
        return
    saved = to_dict(load_config(type(config), output_dir / CONFIG_FILE))  # with defaults for settings that it does not have
    changed = [
        f"{name}: {before!r} -> {after!r}"
        for name, (before, after) in sorted(compare_settings(saved, to_dict(config)).items())
        if not name.startswith(may_change)
    ]
    if changed:
        raise ConfigError(f"--resume with other settings than the run was started with: {'; '.join(changed)}. Leave them out")
    save_config(replace(config, output_dir=str(output_dir)), output_dir / CONFIG_FILE)
    checkpoint = next((c for directory in checkpoint_dirs if (c := latest_checkpoint(directory)) is not None), None)
    truncate_log(output_dir / METRICS_FILE, 0 if checkpoint is None else load_run_state(checkpoint)["metrics_bytes"])


def compare_settings(before: dict[str, Any], after: dict[str, Any], where: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted names of settings that differ, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found.update(compare_settings(old, new, f"{where}{name}."))
        elif old != new:
            found[where + name] = (old, new)
    return found


def run_command(parse: Callable[[], T], run: Callable[[T], int]) -> int:
    """The exit status of a command: what `run` returns, or that of the error that it ends with, which is told on stderr.

    Args:
        parse: what the user asked for; called before anything heavy is imported.
        run: gets what `parse` returned.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a warning about forks that do not happen here
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models come from directories; nothing is fetched behind the user's back
    try:
        command = parse()
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        return run(command)
    except (ConfigError, DataError) as error:
        return report_error(error, EXIT_USAGE)
    except RolloutsError as error:
        return report_error(error, EXIT_FAILURE)
    except BaseExceptionGroup as group:  # several tasks failed at once, for example the rewards of several samples
        errors, others = group.split(RolloutsError)
        if errors is None or others is not None:
            raise
        first, count = first_error(errors)
        return report_error(first, EXIT_FAILURE, f"\n  ({count - 1} more failed at the same time)")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_STOPPED


def first_error(group: BaseExceptionGroup[Any]) -> tuple[BaseException, int]:
    """The first error of a tree of groups, and how many there are."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            first, count = first_error(error)
            leaves += [first] * count
        else:
            leaves.append(error)
    return leaves[0], len(leaves)


def report_error(error: BaseException, status: int, more: str = "") -> int:
    """One message for people: what was wrong, and the notes that say where."""
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    print(f"error: {error}{notes}{more}", file=sys.stderr, flush=True)
    return status
