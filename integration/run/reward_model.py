"""The training of a reward model from its settings to its run directory: model, pairs, training, summary."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import trio

from integration.crash.watch import CRASHES
from integration.expressions.loggers import RunIdentity, check_loggers, create_loggers
from integration.expressions.mixture import parse_columns
from integration.parts.hub_models import find_models
from integration.parts.model_settings import check_optimizers
from integration.parts.models import create_model, describe_hardware, fix_hardware, set_master_dtype
from integration.run.directory import METRICS_FILE, StopRequest, measure_seconds, prepare_directory, read_facts, watch_signals
from integration.run.display import Progress
from integration.run.exit_status import EXIT_STOPPED
from integration.run.signal_watch import Patience, watch_beside
from integration.run.stages import CHECKPOINTS, RunControl, create_task, read_stage, restore_stage
from integration.run.summary import describe_best, draw_curves, find_best
from integration.settings.command_line import MODEL_DIRECTORY
from integration.settings.config import Config, create_output_dir, find_kernels
from integration.settings.help_text import name_as_started
from integration.settings.log_levels import DEFAULT_LEVEL, keep_warnings, log_to_stderr, parse_log_level
from integration.settings.reward_model import RewardModelConfig
from integration.tasks.preference_pairs import create_task_pairs, load_own_rows
from rollouts.backends.factory import create_reward_model_backend
from rollouts.backends.futures import open_pipeline
from rollouts.backends.protocol import CheckpointingBackend
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.chat.tokenize import ensure_pad_token
from rollouts.config import CheckpointConfig
from rollouts.config_files import to_dict
from rollouts.data.model_limits import read_limits
from rollouts.data.preference_pairs import PreferencePair, load_preference_pairs
from rollouts.errors import DataError, raise_single_errors
from rollouts.models.heads import create_reward_model, load_reward_start, reads_turn_end
from rollouts.models.loading import load_tokenizer, parse_device
from rollouts.models.prepare import recompute_activations
from rollouts.output_files import explain_writes, replace_file
from rollouts.reward_model_loop import STAGE, evaluate_reward_model, train_reward_model
from rollouts.training.metrics import CompositeLogger, JSONLLogger, read_metrics
from rollouts.training.saving.best import BestCheckpoint
from rollouts.training.saving.checkpoints import latest_checkpoint, watch_saves
from rollouts.training.saving.run_lock import lock_run_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROGRAM = "python -m integration.train_reward_model"
MAY_CHANGE_ON_RESUME = (
    "output_dir",
    "num_threads",
    "crash_bundles",
    "loggers",
    "logger_timeout_s",
    "training.num_steps",
    "training.checkpoint_every",
    "training.keep_last_n",
    "training.best",
    "training.patience",
    "on_bad.",
)

Pairs = tuple[tuple[PreferencePair, ...], tuple[PreferencePair, ...]]
"""(training, held-out) pairs."""

Start: TypeAlias = "tuple[PreTrainedModel, PreTrainedTokenizerBase, Pairs]"
"""The initial model, tokenizer and data of a run."""


def create_start(config: RewardModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Create the initial reward model and its tokenizer."""
    section = config.model
    if section.path is not None:
        model = load_reward_start(section.path, seed=config.seed, trust_remote_code=section.trust_remote_code)
        return model, load_tokenizer(section.path, trust_remote_code=section.trust_remote_code)
    model, tokenizer = create_model(Config(model=section, seed=config.seed))
    return create_reward_model(model, seed=config.seed), tokenizer


def create_reward_backend(config: RewardModelConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PyTorchTrainingBackend:
    """Create the backend of a reward model."""
    set_master_dtype(config.backend, model)
    backend = create_reward_model_backend(
        model,
        tokenizer=tokenizer,
        total_steps=config.training.num_steps,
        device=parse_device(config.model.device),
        compute_dtype=config.backend.precision(config.model.device),
        kernels=find_kernels(config.model),
        bad_numbers=config.on_bad,
        **vars(config.training.optimizer),
    )
    if config.backend.gradient_checkpointing:
        recompute_activations(backend.model)
    return backend


def create_pairs(
    config: RewardModelConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]
) -> Pairs:
    """Create the training and held-out pairs."""
    data = config.data
    if data.path is None:
        task = create_task(Config(task=config.task), tokenizer, "rl")
        counts = {name: getattr(data, name) for name in ("num_pairs", "num_heldout", "pairs_per_problem")}
        return create_task_pairs(tokenizer, task, seed=config.seed, **counts)
    options: dict[str, Any] = {
        "to_turn_end": reads_turn_end(model),
        "max_length": data.max_length,
        "skip_bad_rows": data.skip_bad_rows,
        "limits": read_limits(model, tokenizer),
    }
    load = partial(load_preference_pairs, tokenizer, **options)
    train, heldout, num_bad = load_own_rows(load, data.path, data.eval_path, parse_columns(data.columns), num_heldout=data.num_heldout)
    if num_bad:
        say(f"{num_bad} bad rows were skipped")
    return train, heldout


def create_parts(config: RewardModelConfig, say: Callable[[str], None]) -> Start:
    """Create the parts of a run: the initial model, its tokenizer, the pairs."""
    model, tokenizer = create_start(config)
    return model, tokenizer, create_pairs(config, model, tokenizer, say)


async def run_reward_model(
    config: RewardModelConfig, output_dir: Path, control: RunControl | None = None, *, start: Start | None = None
) -> Path | None:
    """Train, and save the model in output_dir/model.

    Args:
        start: what create_parts made of the configuration; None = it is made here.

    Returns: that directory; None if control.should_stop ended the run before its last step.
    """
    control = control or RunControl()
    model, tokenizer, (train, heldout) = create_parts(config, control.say) if start is None else start
    backend = create_reward_backend(config, model, tokenizer)
    control.watch_backend(backend, "policy")
    crashes = control.watch_crashes(output_dir, STAGE, config, {"policy": backend})
    logger, checkpoint_dir, pad_id = control.create_logger(STAGE), output_dir / CHECKPOINTS, ensure_pad_token(tokenizer)
    best = None if config.training.best is None else BestCheckpoint(config.training.best, patience=config.training.patience)
    source = latest_checkpoint(checkpoint_dir)
    state = None if source is None else read_stage(source, STAGE)
    start_step, unfinished = (0, None) if state is None else (state.step, state.metrics)
    async with open_pipeline(backend) as pipeline:
        if source is not None and state is not None:
            await restore_stage(source, state, pipeline, best)
            control.say(f"training goes on after step {start_step} of {config.training.num_steps}")
        elif logger is not None:
            limit = config.loop.max_tokens_per_microbatch
            logger.log(await evaluate_reward_model(pipeline, heldout, pad_id=pad_id, max_tokens_per_microbatch=limit), 0)
        if start_step < config.training.num_steps or unfinished is not None:
            async with crashes.guard(pipeline):
                await train_reward_model(
                    pipeline,
                    train,
                    config.loop,
                    logger,
                    heldout=heldout,
                    pad_id=pad_id,
                    start_step=start_step,
                    unfinished=unfinished,
                    **control.loop_options(checkpoint_dir, config.training.keep_last_n, best),
                )
        result = control.find_result(checkpoint_dir, config.training.num_steps, best)
        if result is None:
            return None
        if best is not None:
            await pipeline.load_checkpoint(result).result()
        await _export(pipeline, output_dir)
    return output_dir / MODEL_DIRECTORY


async def _export(backend: CheckpointingBackend, output_dir: Path) -> None:
    """Write the model to output_dir/model, whole or not at all."""
    unfinished, target = output_dir / f".{MODEL_DIRECTORY}", output_dir / MODEL_DIRECTORY
    with explain_writes(target):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        await backend.export_weights(unfinished).result()
        shutil.rmtree(target, ignore_errors=True)  # the result of an earlier part of this run, removed only after the new one is complete
        unfinished.rename(target)


async def _run_until_stopped(config: RewardModelConfig, output_dir: Path, start: Start, control: RunControl, patience: Patience) -> bool:
    """Call run_reward_model with signal handling. Returns whether it reached its end."""
    stop = StopRequest()
    control = replace(control, should_stop=stop.is_requested, abandonment=stop.abandonment)
    model: Path | None = None
    with raise_single_errors(), watch_beside(patience, is_saving=watch_saves([output_dir / CHECKPOINTS, output_dir / CRASHES])):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(watch_signals, stop, control.say, nursery.cancel_scope.cancel, patience.grace_s))
            with measure_seconds(output_dir, STAGE, control.clock):
                model = await run_reward_model(config, output_dir, control, start=start)
            nursery.cancel_scope.cancel()
    return model is not None


def summarize(lines: Sequence[dict[str, Any]], facts: dict[str, Any], config: RewardModelConfig) -> dict[str, Any]:
    """Return the contents of summary.json from the lines of metrics.jsonl and the facts of run.json."""
    evaluated = [line for line in lines if "eval_accuracy" in line]
    if not evaluated:
        raise DataError("metrics.jsonl has no evaluation, so there is no summary; the checkpoints contain the model")
    last = evaluated[-1]
    if last.get("best_step"):  # the result is the best checkpoint
        last = next(line for line in evaluated if line["step"] == last["best_step"])
    return {
        "accuracy_before": evaluated[0]["eval_accuracy"] if evaluated[0]["step"] == 0 else None,
        "accuracy": last["eval_accuracy"],
        "num_held_out": last.get("eval_num_pairs"),
        "margin": last["eval_margin"],
        "loss": last["eval_loss"],
        "steps": last["step"],
        "seconds": facts.get(f"seconds_{STAGE}"),
        "seed": config.seed,
        "best": find_best(
            [line for line in lines if line["step"] > 0],
            CheckpointConfig(best=config.training.best, patience=config.training.patience),
            CHECKPOINTS,
            config.training.num_steps,
        ),
        "pairs": config.data.path or f"made from the task {config.task}",
    }


def run(
    config: RewardModelConfig, *, resume: bool, quiet: bool, accepts_changed_data: bool = False, patience: Patience | None = None
) -> int:
    """Train a reward model in its run directory. Returns the exit status.

    Args:
        resume: go on with the interrupted run there.
        quiet: print only the summary.
        accepts_changed_data: see prepare_directory.
        patience: limits of the time after a signal; None = without limit.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    named = Config(output_dir=config.output_dir)
    parse_device(config.model.device)  # one that this machine lacks is told before a directory is made
    precision = config.backend.precision(config.model.device)
    check_optimizers(config.backend, {"training": config.training.optimizer}, precision=precision)
    check_loggers(config.loggers)
    say = cast("Callable[[str], None]", (lambda text: None) if quiet else partial(print, flush=True))  # pyright: ignore
    recorded, config = find_models(config, quiet=quiet)
    start = create_parts(config, say)  # finds errors of the data before anything is written
    output_dir = create_output_dir(named, datetime.now().strftime("%Y%m%d-%H%M%S") + "-reward-model")
    with lock_run_directory(output_dir), log_to_stderr(parse_log_level(DEFAULT_LEVEL)), keep_warnings(output_dir) as tell:
        inputs = prepare_directory(
            output_dir,
            fix_hardware(recorded),
            {"mode": STAGE},
            resume=resume,
            may_change=MAY_CHANGE_ON_RESUME,
            checkpoint_dirs=[output_dir / CHECKPOINTS],
            tell=tell,
            accepts_changed_data=accepts_changed_data,
        )
        say(f"run directory: {output_dir}; {describe_hardware(config)}")
        progress = Progress({STAGE: config.training.num_steps}, stream=sys.stdout, quiet=quiet, clock=time.monotonic)
        earlier = (read_metrics(output_dir / METRICS_FILE) if (output_dir / METRICS_FILE).exists() else []) if resume else None
        identity = RunIdentity(directory=output_dir, settings=to_dict(config), earlier=earlier)
        further = create_loggers(config.loggers, identity, timeout_s=config.logger_timeout_s)
        logger = CompositeLogger([JSONLLogger(output_dir / METRICS_FILE), progress, *further])
        try:
            control = RunControl(logger=logger, say=progress.say, inputs=inputs)
            finished = trio.run(_run_until_stopped, config, output_dir, start, control, patience or Patience())
        finally:
            logger.finish()
        if not finished:
            again = f"{PROGRAM} --output-dir {output_dir} --resume"
            print(f"stopped. To go on from the newest checkpoint:\n  {name_as_started(again)}", flush=True)
            return EXIT_STOPPED
        _report(config, output_dir)
    return 0


def _report(config: RewardModelConfig, output_dir: Path) -> None:
    """Write the summary and the curves of a finished run, and print its result."""
    lines = read_metrics(output_dir / METRICS_FILE)
    summary = summarize(lines, read_facts(output_dir), config)
    replace_file(output_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    with explain_writes(output_dir / "curves.png"):
        draw_curves(lines, output_dir / "curves.png")
    if summary["best"] is not None:
        print(describe_best("reward model", summary["best"]), flush=True)
    print(_tell_result(summary, output_dir), flush=True)


def _tell_result(summary: Mapping[str, Any], output_dir: Path) -> str:
    return (
        f"held-out pairs ranked right: {summary['accuracy']:.1%}, by {summary['margin']:.1f} on average "
        f"({summary['steps']} steps, {summary['seconds']:.0f} s)\nthe model: {output_dir / MODEL_DIRECTORY}\n"
        f"its scores in place of the rule: python -m integration.train --reward.model {output_dir}"
    )
