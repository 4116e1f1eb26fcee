"""The stage of preferences of a run: run_dpo(config, output_dir, source_checkpoint), beside those of SFT and RL."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from integration.parts.engines import create_embedded_engine
from integration.parts.model_settings import check_companions, create_tokenizer
from integration.parts.models import Companions, open_companions
from integration.parts.rewards import open_task
from integration.parts.sharded_models import create_beside, create_policy, create_sampling_model, drop_reference
from integration.run.directory import REFERENCE_FILE
from integration.run.evaluation import Evaluation, create_best
from integration.run.stages import CHECKPOINTS, RunControl, check_num_rows, create_task, read_stage, restore_stage
from integration.settings.config import Config
from integration.settings.made.library import preference_training_config
from integration.tasks.reference_scores import append_scores, hash_pair, mark_reference, open_scores
from integration.tasks.task import Task
from rollouts.backends.futures import open_pipeline
from rollouts.backends.protocol import TrainingBackend
from rollouts.chat.tokenize import ensure_pad_token
from rollouts.config import PreferenceTrainingConfig
from rollouts.data.preference_pairs import PreferencePair
from rollouts.preference_loop import STAGE, PreferenceParts, measure_preferences, score_reference, train_preferences
from rollouts.training.saving.checkpoints import latest_checkpoint
from rollouts.training.saving.run_state import RunState
from rollouts.training.steps import EvaluateFn

_SCORED_BETWEEN_WRITES = 1024  # pairs


async def run_dpo(
    config: Config, output_dir: Path, source_checkpoint: Path | None = None, control: RunControl | None = None, *, task: Task | None = None
) -> Path | None:
    """Train on preferences.

    Args:
        source_checkpoint: the model directory to start from, for example the last checkpoint of run_sft, which is also the reference;
            None = config.model.

    Returns: the last checkpoint, with checkpoint.best the best one; None if control.should_stop ended the stage before its last step.
    """
    control = control or RunControl()
    check_companions(config, source_checkpoint)
    tokenizer = create_tokenizer(config, source_checkpoint)
    task = create_task(config, tokenizer, STAGE) if task is None else task
    checkpoint_dir, section = output_dir / CHECKPOINTS, config.preference
    source, best = latest_checkpoint(checkpoint_dir), create_best(config, task, STAGE)
    state = None if source is None else read_stage(source, STAGE)
    model = create_sampling_model(config, source_checkpoint, control.group, whole=bool(task.heldout_prompts))
    optimizer, num_steps, rows_per_unit = section.optimizer, section.num_steps, 1 if section.loss == "kto" else 2
    backend = create_policy(config, control.group, model, tokenizer, source_checkpoint, optimizer, num_steps, rows_per_unit)
    is_known = all(isinstance(row, PreferencePair) and row.ref_log_probs for row in (*task.preferences, *task.heldout_preferences))
    is_scored = section.needs_reference and not is_known and section.reference == "precomputed"
    requires = {"ref_log_probs"} if section.needs_reference and not is_known else set[str]()
    create = partial(create_beside, config, control.group, requires, model, tokenizer, source_checkpoint, 0)
    beside = Companions() if is_scored else create()
    for name, some in (("policy", backend), ("reference", beside.reference)):
        if some is not None:
            control.watch_backend(some, name)
    crashes = control.watch_crashes(output_dir, STAGE, config, {"policy": backend}).begin_from(source_checkpoint)
    training, pad_id = preference_training_config(config), ensure_pad_token(tokenizer)
    async with open_task(task) as task, open_pipeline(backend) as pipeline:
        if is_scored:
            path, create = output_dir / REFERENCE_FILE, Companions if config.reference.path is None else create
            known = open_scores(path, mark_reference(config, source_checkpoint), is_used=source is not None)
            task = await _score_once(config, path, known, task, create, pipeline, control, pad_id=pad_id)
            drop_reference(control.group)
        async with open_companions(beside, pipeline) as companions:
            if source is not None and state is not None:
                check_num_rows(source, state, len(task.preferences))
                await restore_stage(source, state, pipeline, best)
                control.say(f"training on preferences goes on after step {state.step} of {num_steps}")
            evaluate: EvaluateFn | None = None
            if task.heldout_prompts:
                engine = create_embedded_engine(config, model, tokenizer, is_trained=control.group is None)
                evaluation = Evaluation(engine, tokenizer, replace(task, heldout_samples=()), config, output_dir / "examples.jsonl")
                evaluate = partial(evaluation.measure_sft, pipeline)
            parts = PreferenceParts(
                backend=pipeline,
                reference=companions.reference,
                metrics_logger=control.create_logger(STAGE),
                pad_id=pad_id,
                evaluate=evaluate,
                **control.loop_options(checkpoint_dir, config.checkpoint.keep_last_n, best),
            )
            async with crashes.guard(pipeline):
                await _train(config, parts, task, training, state)
    return control.find_result(checkpoint_dir, num_steps, best)


async def _train(config: Config, parts: PreferenceParts, task: Task, training: PreferenceTrainingConfig, state: RunState | None) -> None:
    start_step, unfinished = (0, None) if state is None else (state.step, state.metrics)
    objective, heldout = config.preference.create_objective(), task.heldout_preferences
    if start_step == 0 and parts.metrics_logger is not None:
        parts.metrics_logger.log(await measure_preferences(parts, heldout, objective, training), 0)
    if start_step < training.num_steps or unfinished is not None:
        rows = task.preferences
        await train_preferences(parts, rows, objective, training, heldout=heldout, start_step=start_step, unfinished=unfinished)


async def _score_once(
    config: Config,
    path: Path,
    known: dict[str, tuple[float, float]],
    task: Task,
    create: Callable[[], Companions],
    policy: TrainingBackend,
    control: RunControl,
    *,
    pad_id: int,
) -> Task:
    """Return the task whose pairs know their log-probs under the reference: known from a file, or computed and appended to it.

    Args:
        create: creates the reference, called if scores are missing. Without one the policy computes them: it has the weights of its start
            here, also in a resumed run, whose checkpoint is loaded afterwards.
        path, known: the file, and what open_scores has read from it.
    """
    rows = [cast("PreferencePair", row) for row in (*task.preferences, *task.heldout_preferences)]
    names = [hash_pair(pair) if pair.ref_log_probs is None else "" for pair in rows]
    missing = {name: pair for name, pair in zip(names, rows, strict=True) if name and name not in known}
    if missing:
        control.say(f"log-probs of {len(missing):,} pairs under the reference are computed, once")
        beside, limit = create(), config.preference.max_tokens_per_microbatch
        if beside.reference is not None:
            control.watch_backend(beside.reference, "reference")
        async with open_companions(beside, policy) as opened:
            for start in range(0, len(missing), _SCORED_BETWEEN_WRITES):
                some = dict(itertools.islice(missing.items(), start, start + _SCORED_BETWEEN_WRITES))
                scored = await score_reference(
                    opened.reference or policy, tuple(some.values()), pad_id=pad_id, max_tokens_per_microbatch=limit
                )
                found = {name: cast("tuple[float, float]", pair.ref_log_probs) for name, pair in zip(some, scored, strict=True)}
                append_scores(path, found)
                known = known | found
    pairs = tuple(replace(pair, ref_log_probs=known[name]) if name else pair for name, pair in zip(names, rows, strict=True))
    count = len(task.preferences)
    return replace(task, preferences=pairs[:count], heldout_preferences=pairs[count:])
