"""The main job behind integration.train: runs the stages and reports the results. Takes seconds to import."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

from integration.convert.export import export
from integration.convert.push import check_push
from integration.crash.watch import CRASHES
from integration.dry_run.checks import check_run
from integration.dry_run.describe import tell_run
from integration.expressions.loggers import RunIdentity, create_loggers
from integration.parts.engines import check_engine
from integration.parts.model_checks import describe_tokens
from integration.parts.model_settings import create_tokenizer
from integration.parts.models import describe_hardware, fix_hardware
from integration.parts.sharded_models import check_rank_settings
from integration.parts.teachers import check_teacher_fields
from integration.run.directory import (
    METRICS_FILE,
    StopRequest,
    measure_seconds,
    prepare_directory,
    read_facts,
    watch_ranks,
    watch_signals,
)
from integration.run.display import Progress
from integration.run.evaluation import check_best
from integration.run.exit_status import EXIT_STOPPED, EXIT_USAGE
from integration.run.launch import count_processes, launch, needs_launch, open_group, watch_launcher
from integration.run.preferences import run_dpo
from integration.run.profile import RunProfile
from integration.run.signal_watch import watch_beside
from integration.run.stages import CHECKPOINTS, RunControl, create_task, run_rl, run_sft
from integration.run.summary import draw_curves, summarize_run, tell_story
from integration.settings.command_line import CONFIG_FILE, CommandLine, Mode
from integration.settings.config import Config, create_output_dir
from integration.settings.help_text import name_as_started
from integration.settings.log_levels import keep_warnings, log_to_stderr
from integration.settings.option_effects import describe_doubts, describe_idle_options
from integration.settings.sections.episodes import EPISODE_TASKS
from integration.tasks.episodes import check_demonstrations
from integration.tasks.task import Task
from rollouts.backends.ranks.group import RankGroup
from rollouts.config_files import load_config, to_dict
from rollouts.errors import make_safe, raise_single_errors, redact
from rollouts.models.loading import parse_device
from rollouts.output_files import explain_writes, replace_file
from rollouts.training.metrics import CompositeLogger, JSONLLogger, read_metrics
from rollouts.training.saving.checkpoints import has_checkpoints, watch_saves
from rollouts.training.saving.run_lock import lock_run_directory
from rollouts.training.saving.run_state import RunInputs

_logger = logging.getLogger(__name__)
_SWITCH_INTERVAL_S = 2e-5
_NEW_OBJECTS = 10_000  # number of them at which the garbage collector runs; it visits them again and again while groups are in flight
LAST_FIRST = ("rl", "dpo", "sft")  # stages of a run
EXPORT = "export"  # subdirectory of a run with the model that is published
LIMITS_OF_ROLLOUTS = (  # settings that messages about failing, hanging or queued rollouts advise to change
    "max_concurrent_rollouts", "queue_size", "when_queue_full", "on_stale", "on_failure", "max_attempts", "max_stale_attempts",
    "retry_delay_s", "rollout_timeout_s", "patience_s", "checkpoint_in_flight",
)  # fmt: skip
MAY_CHANGE_ON_RESUME = (
    *(
        "output_dir",
        "num_threads",
        "crash_bundles",
        "loggers",
        "logger_timeout_s",
        "model.device",
        "sft.num_steps",
        "rl.num_steps",
        "preference.num_steps",
        "checkpoint.",
        "hardware.",
        "profile.",
    ),
    *("teacher.url", "backend.kind", "backend.num_processes", "backend.timeout_s", "backend.fsdp.", "on_bad."),
    *(f"rl.asynchronous.{name}" for name in LIMITS_OF_ROLLOUTS),
    *("reward.timeout_s", "reward.on_error", "reward.max_retries", "episode.timeout_s"),
    *("agent.timeout_s", "agent.on_error", "agent.max_retries"),
    *("engine.urls", "engine.startup_timeout_s", "engine.generate_timeout_s", "engine.sync_timeout_s", "engine.deadlines."),
    *(f"{stage}.max_tokens_per_microbatch" for stage in ("sft", "rl", "preference")),  # bounds memory
)


async def train(mode: Mode, config: Config, output_dir: Path, control: RunControl, task: Task) -> bool:
    """Run the stages of a mode, each from its last checkpoint. Returns whether all of them reached their end."""
    with favor_computation():
        return await _run_stages(mode, config, output_dir, control, task)


async def _run_stages(mode: Mode, config: Config, output_dir: Path, control: RunControl, task: Task) -> bool:
    if task.num_skipped_rows:
        control.say(f"{task.num_skipped_rows} bad rows were skipped")
    for note in task.notes:
        control.say(note)
    source: Path | None = None
    if "sft" in mode:
        with measure_seconds(output_dir, "sft", control.clock):
            source = await run_sft(config, output_dir / "sft", control, task=task)
        if source is None:
            return False
    if "dpo" in mode:
        with measure_seconds(output_dir, "dpo", control.clock):
            return await run_dpo(config, output_dir / "dpo", source, control, task=task) is not None
    if "rl" in mode:
        with measure_seconds(output_dir, "rl", control.clock):
            return await run_rl(config, output_dir / "rl", source, control, task=task) is not None
    return True


@contextmanager
def favor_computation() -> Generator[None]:
    """Let computing threads wait less for the interpreter in the block: generation and training share it in asynchronous runs.

    A thread that returns from a kernel gets the interpreter after one switch interval, by default 5 ms, in which a small model runs a
    hundred kernels. And torch and transformers hold some 400,000 permanent objects: a full pass of the garbage collector over them takes a
    fifth of a second, in which no thread runs. They are frozen without a collection, which would be such a pass. Objects that the caller
    has frozen stay frozen after the block. The collector runs at 10,000 new objects instead of 700: a group of samples alone has hundreds.
    """
    interval_s, was_frozen, thresholds = sys.getswitchinterval(), gc.get_freeze_count() > 0, gc.get_threshold()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.freeze()
    gc.set_threshold(max(thresholds[0], _NEW_OBJECTS) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not was_frozen:
            gc.unfreeze()
        sys.setswitchinterval(interval_s)


def prepare_run(command: CommandLine, output_dir: Path, tell: Callable[[str], None]) -> RunInputs:
    """Create a run directory, or restore that of an interrupted run to its newest checkpoint. Returns and raises as prepare_directory."""
    saved, checkpoint_dirs = output_dir / CONFIG_FILE, [output_dir / stage / CHECKPOINTS for stage in LAST_FIRST]
    if command.resume and "sft" in command.mode and command.config.task in EPISODE_TASKS and any(map(has_checkpoints, checkpoint_dirs)):
        check_demonstrations(load_config(Config, saved), command.config)
    return prepare_directory(
        output_dir,
        fix_hardware(command.config),
        {"mode": command.mode},
        resume=command.resume,
        may_change=MAY_CHANGE_ON_RESUME,
        checkpoint_dirs=checkpoint_dirs,
        tell=tell,
        accepts_changed_data=command.accept_changed_data,
    )


def describe_settings(config: Config) -> dict[str, Any]:
    """Return the settings for loggers, without the addresses of servers, which may contain keys."""
    settings = to_dict(config)
    del settings["engine"]["urls"]
    return settings


def find_logged(lines: Sequence[Mapping[str, Any]], output_dir: Path) -> dict[str, int]:
    """Return the last logged step of each stage before the one that a resumed run is in.

    Such a stage has all its lines, also those of steps that it trains again because its last checkpoint was damaged meanwhile.

    Args:
        lines: of the metrics file, which prepare_run has cut back to the checkpoint that the run goes on from.
    """
    behind = itertools.dropwhile(lambda stage: not has_checkpoints(output_dir / stage / CHECKPOINTS), LAST_FIRST)
    found = dict[str, int]()
    for stage in tuple(behind)[1:]:
        steps = [line["step"] for line in lines if line.get("stage") == stage and isinstance(line.get("step"), int)]
        found |= {stage: max(steps)} if steps else {}
    return found


async def run_until_stopped(
    command: CommandLine,
    output_dir: Path,
    task: Task,
    progress: Progress,
    *,
    group: RankGroup | None = None,
    inputs: RunInputs | None = None,
) -> bool:
    """Call train() with metrics, progress display and signal handling. Returns whether it reached its end.

    Args:
        inputs: marks of data and settings, for the checkpoints.
    """
    stop = StopRequest()
    metrics_file = output_dir / METRICS_FILE
    earlier = (read_metrics(metrics_file) if metrics_file.exists() else []) if command.resume else None
    identity = RunIdentity(directory=output_dir, settings=describe_settings(command.config), earlier=earlier)
    further = create_loggers(command.config.loggers, identity, timeout_s=command.config.logger_timeout_s)
    profile = RunProfile(command.config.profile, output_dir)
    logger = CompositeLogger([JSONLLogger(output_dir / METRICS_FILE), progress, *further, profile])
    control = RunControl(
        logger=logger,
        logged=find_logged(earlier or (), output_dir),
        should_stop=stop.is_requested,
        say=progress.say,
        group=group,
        watch_backend=profile.watch,
        inputs=inputs,
        abandonment=stop.abandonment,
    )
    saving = watch_saves([output_dir / stage / name for stage in LAST_FIRST for name in (CHECKPOINTS, CRASHES)])
    finished = False
    launcher_is_gone = watch_launcher(os.environ)
    cause = None if group is None and launcher_is_gone is None else partial(_find_cause, group, launcher_is_gone)
    with raise_single_errors(), watch_beside(command.patience, lambda: stop.num_steps, saving, cause):
        async with trio.open_nursery() as nursery:
            watch = partial(watch_signals, stop, progress.say, nursery.cancel_scope.cancel, command.patience.grace_s)
            await nursery.start(watch)
            if cause is not None:
                nursery.start_soon(watch_ranks, stop, cause, progress.say, command.patience.grace_s)
            if group is not None:
                nursery.start_soon(group.wait_for_loss)
            try:
                finished = await train(command.mode, command.config, output_dir, control, task)
            finally:
                logger.finish()
            nursery.cancel_scope.cancel()
    return finished


def _find_cause(group: RankGroup | None, launcher_is_gone: Callable[[], bool] | None) -> str | None:
    if launcher_is_gone is not None and launcher_is_gone():
        return "the process that started this one is gone"
    if group is not None and group.stop_asked_by is not None:
        return f"rank {group.stop_asked_by} was told to end"
    return None


def run(command: CommandLine, argv: Sequence[str] = ()) -> int:
    """Execute a command line. Returns the exit status.

    Args:
        argv: the arguments of the command line, for processes started by it.
    """
    if command.push_to_hub is not None:
        check_push(command.push_to_hub)
    recorded, config = check_run(command)
    if command.dry_run:
        return tell_run(command, config)
    parse_device(config.model.device)  # one that this machine lacks is told before a directory is made
    command = replace(command, config=recorded)
    num_processes = count_processes(config, os.environ)
    if "rl" in command.mode:
        check_engine(config.engine, os.environ, device=config.model.device)
    if config.backend.kind != "fsdp":
        return _run_in_directory(command, config, None)
    check_rank_settings(config)
    if needs_launch(config, os.environ):
        if recorded != config and recorded.model.revision is not None:  # all processes read the same files
            argv = [*argv, "--model.revision", recorded.model.revision]
        return launch("integration.train", argv, num_processes, stop_s=math.ceil(config.backend.timeout_s))
    with open_group(config, os.environ) as group:
        try:
            return _run_in_directory(command, config, group)
        finally:
            if num_processes > 1:  # torchrun sends SIGTERM when another rank ends first; the report is still to be printed
                signal.signal(signal.SIGTERM, signal.SIG_IGN)


def follow(command: CommandLine) -> int:
    """Serve the process with rank 0. Returns the exit status."""
    if command.dry_run:
        return 0
    if command.config.backend.kind != "fsdp":
        return EXIT_USAGE  # rank 0 reports the reason
    if "rl" in command.mode:
        _ = command.config.algorithm  # loads the user's functions
    _set_threads(command.config)
    with open_group(command.config, os.environ) as group:
        group.serve()
    return 0


def _set_threads(config: Config) -> None:
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)


def _run_in_directory(command: CommandLine, config: Config, group: RankGroup | None) -> int:
    """Run in the run directory. Returns the exit status.

    Args:
        config: that of the command, with the GPUs of this machine; the directory keeps the command's.
    """
    _set_threads(config)
    tokenizer = create_tokenizer(config)
    warnings = [text for name, text in describe_tokens(config, tokenizer).items() if name.startswith("warning")]
    task = create_task(config, tokenizer, command.mode)  # finds errors of the data before anything is written
    check_best(config, task, command.mode)
    if "rl" in command.mode:
        check_teacher_fields(config, task, tokenizer, os.environ)
    output_dir = create_output_dir(config, datetime.now().strftime("%Y%m%d-%H%M%S"))
    say: Callable[[str], None] = (lambda text: None) if command.quiet else partial(print, flush=True)
    with lock_run_directory(output_dir), log_to_stderr(command.log_levels), keep_warnings(output_dir) as tell:
        inputs = prepare_run(command, output_dir, tell)
        say(f"run directory: {output_dir}; {describe_hardware(config)}")
        for warning in warnings:
            _logger.warning("%s", warning)
        for warning in describe_doubts(config, command.mode).values():
            _logger.warning("%s", warning)
        if idle := command.find_idle_options():
            _logger.warning("%s", describe_idle_options(idle))
        progress = Progress(
            {"sft": config.sft.num_steps, "rl": config.rl.num_steps, "dpo": config.preference.num_steps},
            stream=sys.stdout,
            quiet=command.quiet,
            clock=time.monotonic,
        )
        go = partial(run_until_stopped, replace(command, config=config), output_dir, task, progress, group=group, inputs=inputs)
        finished = trio.run(go)
        if not finished:
            again = f"python -m integration.train --mode {command.mode} --output-dir {output_dir} --resume"
            print(f"stopped. To go on from the newest checkpoint:\n  {name_as_started(again)}", flush=True)
            return EXIT_STOPPED
        lines = read_metrics(output_dir / METRICS_FILE)
        facts = read_facts(output_dir)
        summary = summarize_run(lines, facts, config)
        replace_file(output_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        with explain_writes(output_dir / "curves.png"):
            drawn = draw_curves(lines, output_dir / "curves.png")
        print(make_safe(redact(tell_story(summary, output_dir, config))), flush=True)
        if command.push_to_hub is not None:
            target = output_dir / EXPORT
            shutil.rmtree(target, ignore_errors=True)  # an earlier end of this run wrote one
            print(export(output_dir, target, push_to_hub=command.push_to_hub), flush=True)
        print(f"curves: {output_dir / 'curves.png'}" if drawn else "no picture: pip install 'rollouts-rl[plots]' draws it", flush=True)
    return 0
