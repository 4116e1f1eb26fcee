"""The main job, see train: starts the stages, tells what came of it. Takes seconds to import."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
import trio

from integration.command_line import CONFIG_FILE, RUN_FILE, CommandLine, Mode
from integration.config import Config, create_output_dir
from integration.display import Progress
from integration.dry_run import describe_run
from integration.engines import check_engine
from integration.episode_settings import EPISODE_TASKS
from integration.episode_tasks import check_demonstrations, check_task
from integration.launch import count_processes, launch, needs_launch, open_group
from integration.log_levels import log_to_stderr
from integration.models import check_backend, check_companions, create_tokenizer
from integration.rewards import check_reward
from integration.run_directory import (
    EXIT_STOPPED,
    EXIT_USAGE,
    METRICS_FILE,
    StopRequest,
    measure_seconds,
    prepare_directory,
    watch_signals,
)
from integration.sharded_models import check_loss_travels, check_rank_settings
from integration.stages import CHECKPOINTS, RunControl, check_data_given, create_task, run_rl, run_sft
from integration.summary import draw_curves, summarize_run, tell_story
from integration.task_rewards import load_task_reward
from integration.tasks import Task
from integration.trajectory_writer import load_condition
from rollouts.backends.rank_group import RankGroup
from rollouts.checkpoints import lock_run_directory
from rollouts.config import load_config
from rollouts.errors import raise_single_errors
from rollouts.metrics import CompositeLogger, JSONLLogger, read_metrics

_SWITCH_INTERVAL_S = 2e-5
LIMITS_OF_ROLLOUTS = (  # what messages about rollouts that fail, hang or pile up advise to change
    "max_concurrent_rollouts", "queue_size", "when_queue_full", "on_stale", "on_failure", "max_attempts", "max_stale_attempts",
    "retry_delay_s", "rollout_timeout_s", "patience_s", "checkpoint_in_flight",
)  # fmt: skip
MAY_CHANGE_ON_RESUME = (
    *("output_dir", "num_threads", "sft.num_steps", "rl.num_steps", "checkpoint.", "hardware."),
    *("backend.kind", "backend.num_processes", "backend.timeout_s", "backend.fsdp."),
    *(f"rl.asynchronous.{name}" for name in LIMITS_OF_ROLLOUTS),
)


async def train(mode: Mode, config: Config, output_dir: Path, control: RunControl) -> bool:
    """Run the stages of a mode, each from where it is. Returns whether all of them reached their end."""
    with favor_computation():
        return await _run_stages(mode, config, output_dir, control, create_task(config, create_tokenizer(config), mode))


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
    over all of them takes a fifth of a second, in which no thread goes on. They are set aside as they are: looking for garbage among
    them first would be such a pass. What the caller has set aside stays so after the block.
    """
    interval_s, was_frozen = sys.getswitchinterval(), gc.get_freeze_count() > 0
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        sys.setswitchinterval(interval_s)


def prepare_run(command: CommandLine, output_dir: Path) -> None:
    """Make a new run directory, or bring that of an interrupted run to its newest checkpoint. Raises as prepare_directory."""
    saved = output_dir / CONFIG_FILE
    if command.resume and "sft" in command.mode and command.config.task in EPISODE_TASKS and saved.exists():
        check_demonstrations(load_config(Config, saved), command.config)
    prepare_directory(
        output_dir,
        command.config,
        {"mode": command.mode},
        resume=command.resume,
        may_change=MAY_CHANGE_ON_RESUME,
        checkpoint_dirs=[output_dir / stage / CHECKPOINTS for stage in ("rl", "sft")],
    )


async def run_until_stopped(
    command: CommandLine, output_dir: Path, say: Callable[[str], None], progress: Progress, group: RankGroup | None = None
) -> bool:
    """train() with metrics, progress and signals around it. Returns whether it came to its end."""
    stop = StopRequest()
    logger = CompositeLogger([JSONLLogger(output_dir / METRICS_FILE), progress])
    control = RunControl(logger=logger, should_stop=stop.is_requested, say=say, group=group)
    finished = False
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            watch = partial(watch_signals, stop, say, nursery.cancel_scope.cancel)
            await nursery.start(watch)
            if group is not None:
                nursery.start_soon(group.wait_for_loss)
            try:
                finished = await train(command.mode, command.config, output_dir, control)
            finally:
                logger.finish()
            nursery.cancel_scope.cancel()
    return finished


def run(command: CommandLine, argv: Sequence[str] = ()) -> int:
    """Carry out a command line. Returns the exit status.

    Args:
        argv: what the command line was read from, for the processes that it may start.
    """
    config = command.config
    num_processes = count_processes(config, os.environ)
    check_data_given(config)
    check_backend(config)
    check_task(config)
    load_task_reward(config.reward)
    if "rl" in command.mode:
        _ = config.algorithm  # what is wrong with it must not be found out after the SFT stage
        if num_processes > 1:
            check_loss_travels(config)
        check_companions(config)
        check_reward(config)
        load_condition(config.trajectories)
    if command.dry_run:
        print(describe_run(config, command.mode))
        return 0
    if "rl" in command.mode:
        check_engine(config.engine, os.environ, device=config.model.device)
    if config.backend.kind != "fsdp":
        return _run_in_directory(command, None)
    check_rank_settings(config)
    if needs_launch(config, os.environ):
        return launch("integration.train", argv, num_processes, stop_s=math.ceil(config.backend.timeout_s))
    with open_group(config, os.environ) as group:
        try:
            return _run_in_directory(command, group)
        finally:
            if num_processes > 1:  # torchrun sends SIGTERM when another rank ends first, and what happened is yet to be told
                signal.signal(signal.SIGTERM, signal.SIG_IGN)


def follow(command: CommandLine) -> int:
    """What a process does that another one leads."""
    if command.dry_run:
        return 0
    if command.config.backend.kind != "fsdp":
        return EXIT_USAGE  # rank 0 says why
    if "rl" in command.mode:
        _ = command.config.algorithm  # so that the user's functions are known here, too
    _set_threads(command.config)
    with open_group(command.config, os.environ) as group:
        group.serve()
    return 0


def _set_threads(config: Config) -> None:
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)


def _run_in_directory(command: CommandLine, group: RankGroup | None) -> int:
    """The run, in its directory. Returns the exit status."""
    config = command.config
    _set_threads(config)
    output_dir = create_output_dir(config, datetime.now().strftime("%Y%m%d-%H%M%S"))
    say = (lambda text: None) if command.quiet else partial(print, flush=True)
    with lock_run_directory(output_dir), log_to_stderr(command.log_levels):
        prepare_run(command, output_dir)
        say(f"run directory: {output_dir}")
        progress = Progress(
            {"sft": config.sft.num_steps, "rl": config.rl.num_steps}, stream=sys.stdout, quiet=command.quiet, clock=time.monotonic
        )
        finished = trio.run(partial(run_until_stopped, command, output_dir, progress.say, progress, group))
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
