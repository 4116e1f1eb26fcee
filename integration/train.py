"""The main job: `python -m integration.train --mode sft+rl`. Reads arguments and the clock, starts the stages, tells what came of it."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

from integration.command_line import CONFIG_FILE, RUN_FILE, CommandLine, Mode, parse_command_line
from integration.config import Config, create_output_dir
from integration.display import Progress
from integration.dry_run import describe_run
from integration.engines import check_engine
from integration.models import check_companions, create_model
from integration.stages import CHECKPOINTS, RunControl, check_data_given, create_task, run_rl, run_sft
from integration.summary import draw_curves, summarize_run, tell_story
from integration.tasks import Task
from integration.trajectory_writer import load_condition
from rollouts.checkpoints import latest_checkpoint, load_run_state, lock_run_directory
from rollouts.config import load_config, save_config, to_dict
from rollouts.errors import ConfigError, DataError, RolloutsError, raise_single_errors
from rollouts.metrics import CompositeLogger, JSONLLogger, read_metrics, truncate_log

METRICS_FILE = "metrics.jsonl"
_SWITCH_INTERVAL_S = 2e-5
EXIT_USAGE, EXIT_FAILURE, EXIT_STOPPED = 2, 1, 130
LIMITS_OF_ROLLOUTS = (  # what messages about rollouts that fail, hang or pile up advise to change
    "max_concurrent_rollouts", "queue_size", "when_queue_full", "on_stale", "on_failure", "max_attempts", "max_stale_attempts",
    "retry_delay_s", "rollout_timeout_s", "patience_s", "checkpoint_in_flight",
)  # fmt: skip
MAY_CHANGE_ON_RESUME = (
    *("output_dir", "num_threads", "sft.num_steps", "rl.num_steps", "checkpoint."),
    *(f"rl.asynchronous.{name}" for name in LIMITS_OF_ROLLOUTS),
)


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


async def train(mode: Mode, config: Config, output_dir: Path, control: RunControl) -> bool:
    """Run the stages of a mode, each from where it is. Returns whether all of them reached their end."""
    _, tokenizer = create_model(config)
    with favor_computation():
        return await _run_stages(mode, config, output_dir, control, create_task(config, tokenizer, mode))


async def _run_stages(mode: Mode, config: Config, output_dir: Path, control: RunControl, task: Task) -> bool:
    if task.num_skipped_rows:
        control.say(f"{task.num_skipped_rows} bad rows were skipped")
    source: Path | None = None
    if "sft" in mode:
        with measure_seconds(output_dir, "sft", control.clock):
            source = await run_sft(config, output_dir / "sft", control, task=task)
        if source is None:
            return False
    if "rl" in mode:
        with measure_seconds(output_dir, "rl", control.clock):
            return await run_rl(config, output_dir / "rl", source, control, task=task) is not None
    return True


@contextmanager
def favor_computation() -> Generator[None]:
    """Let threads that compute wait less for the interpreter, in the block: generation and training share it in an asynchronous run.

    A thread that comes back from a kernel gets the interpreter after one switch interval, by default 5 ms, in which a small model runs a
    hundred kernels. And the modules of torch and transformers are some 400,000 objects that stay: a full pass of the garbage collector
    over all of them takes a fifth of a second, in which no thread goes on.
    """
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval_s)


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


def prepare_run(command: CommandLine, output_dir: Path) -> None:
    """Make a new run directory, or bring that of an interrupted run to its newest checkpoint.

    Raises: ConfigError if the directory holds a run and --resume was not given, or if settings differ from the interrupted run's.
    """
    metrics = output_dir / METRICS_FILE
    if not command.resume:
        if (output_dir / CONFIG_FILE).exists():
            raise ConfigError(f"{output_dir} already holds a run: add --resume to go on with it, or choose another --output-dir")
        save_config(replace(command.config, output_dir=str(output_dir)), output_dir / CONFIG_FILE)
        (output_dir / RUN_FILE).write_text(json.dumps({"mode": command.mode}) + "\n")
        return
    saved = to_dict(load_config(Config, output_dir / CONFIG_FILE))  # with defaults for settings that it does not have
    changed = [
        f"{name}: {before!r} -> {after!r}"
        for name, (before, after) in sorted(compare_settings(saved, to_dict(command.config)).items())
        if not name.startswith(MAY_CHANGE_ON_RESUME)
    ]
    if changed:
        raise ConfigError(f"--resume with other settings than the run was started with: {'; '.join(changed)}. Leave them out")
    save_config(replace(command.config, output_dir=str(output_dir)), output_dir / CONFIG_FILE)
    checkpoint = next((c for stage in ("rl", "sft") if (c := latest_checkpoint(output_dir / stage / CHECKPOINTS)) is not None), None)
    truncate_log(metrics, 0 if checkpoint is None else load_run_state(checkpoint)["metrics_bytes"])


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


async def run_until_stopped(command: CommandLine, output_dir: Path, say: Callable[[str], None], progress: Progress) -> bool:
    """train() with metrics, progress and signals around it. Returns whether it came to its end."""
    stop = StopRequest()
    logger = CompositeLogger([JSONLLogger(output_dir / METRICS_FILE), progress])
    control = RunControl(logger=logger, should_stop=stop.is_requested, say=say)
    finished = False
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            watch = partial(watch_signals, stop, say, nursery.cancel_scope.cancel)
            await nursery.start(watch)
            try:
                finished = await train(command.mode, command.config, output_dir, control)
            finally:
                logger.finish()
            nursery.cancel_scope.cancel()
    return finished


def run(command: CommandLine) -> int:
    """Carry out a command line. Returns the exit status."""
    config = command.config
    check_data_given(config)
    if "rl" in command.mode:
        _ = config.algorithm  # what is wrong with it must not be found out after the SFT stage
        check_companions(config)
        load_condition(config.trajectories)
    if command.dry_run:
        print(describe_run(config, command.mode))
        return 0
    if "rl" in command.mode:
        check_engine(config.engine, os.environ, device=config.model.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    output_dir = create_output_dir(config, datetime.now().strftime("%Y%m%d-%H%M%S"))
    say = (lambda text: None) if command.quiet else partial(print, flush=True)
    with lock_run_directory(output_dir):
        prepare_run(command, output_dir)
        say(f"run directory: {output_dir}")
        progress = Progress(
            {"sft": config.sft.num_steps, "rl": config.rl.num_steps}, stream=sys.stdout, quiet=command.quiet, clock=time.monotonic
        )
        finished = trio.run(partial(run_until_stopped, command, output_dir, progress.say, progress))
        if not finished:
            again = f"python -m integration.train --mode {command.mode} --output-dir {output_dir} --resume"
            print(f"stopped; everything up to the last finished step is saved. To go on:\n  {again}", flush=True)
            return EXIT_STOPPED
        lines = read_metrics(output_dir / METRICS_FILE)
        facts = json.loads((output_dir / RUN_FILE).read_text())
        summary = summarize_run(lines, facts, config)
        (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        drawn = draw_curves(lines, output_dir / "curves.png")
        print(tell_story(summary, output_dir, config), flush=True)
        print(f"curves: {output_dir / 'curves.png'}" if drawn else "no picture: pip install 'rollouts[plots]' draws the curves", flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Every error that a user can cause ends in one message on stderr and a non-zero exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a warning about forks that do not happen here
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models come from directories; nothing is fetched behind the user's back
    try:
        command = parse_command_line(sys.argv[1:] if argv is None else argv)
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


if __name__ == "__main__":
    sys.exit(main())
