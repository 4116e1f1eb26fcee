"""The stage of preferences of a run: run_dpo(config, output_dir, source_checkpoint), beside those of SFT and RL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import cast

from integration.parts.engines import create_embedded_engine
from integration.parts.model_settings import check_companions, create_tokenizer
from integration.parts.models import Companions, open_companions
from integration.parts.rewards import open_task
from integration.parts.sharded_models import create_beside, create_policy, create_sampling_model
from integration.run.evaluation import Evaluation, create_best
from integration.run.stages import CHECKPOINTS, RunControl, check_num_rows, create_task, finished_checkpoint, read_step, restore_best
from integration.settings.config import Config, preference_training_config
from integration.tasks.task import Task
from rollouts.backends.futures import open_pipeline
from rollouts.backends.protocol import TrainingBackend
from rollouts.chat.tokenize import ensure_pad_token
from rollouts.config import PreferenceTrainingConfig
from rollouts.data.preference_pairs import PreferencePair
from rollouts.errors import CheckpointError
from rollouts.output_files import replace_file
from rollouts.preference_loop import STAGE, PreferenceParts, measure_preferences, score_reference, train_preferences
from rollouts.training.checkpoints import latest_checkpoint
from rollouts.training.metrics import StageLogger

REFERENCE_FILE = "reference.jsonl"  # log-probs of the reference: a line about the pairs, then one line for each pair
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
    start_step = 0 if source is None else read_step(source, STAGE)
    model = create_sampling_model(config, source_checkpoint, control.group, whole=True)
    optimizer, num_steps = section.optimizer, section.num_steps
    backend = create_policy(config, control.group, model, tokenizer, source_checkpoint, optimizer, num_steps, 2)
    is_known = all(isinstance(row, PreferencePair) and row.ref_log_probs for row in (*task.preferences, *task.heldout_preferences))
    own = section.reference == "precomputed" and config.reference.path is None  # the policy itself computes them
    requires = {"ref_log_probs"} if section.needs_reference and not (own or is_known) else set[str]()
    beside = create_beside(config, control.group, requires, model, tokenizer, source_checkpoint, 0)
    for name, some in (("policy", backend), ("reference", beside.reference)):
        if some is not None:
            control.watch_backend(some, name)
    training = preference_training_config(config)
    async with open_task(task) as task, open_pipeline(backend) as pipeline:
        if section.needs_reference and section.reference == "precomputed" and not is_known:
            task = await _score_once(config, output_dir, task, beside, pipeline, control)
            beside = Companions()
        async with open_companions(beside, pipeline) as companions:
            if source is not None:
                check_num_rows(source, len(task.preferences))
                restore_best(best, source)
                await pipeline.load_checkpoint(source).result()
                control.say(f"training on preferences goes on after step {start_step} of {num_steps}")
            engine = create_embedded_engine(config, model, tokenizer, is_trained=control.group is None)
            evaluation = Evaluation(engine, tokenizer, replace(task, heldout_samples=()), config, output_dir / "examples.jsonl")
            parts = PreferenceParts(
                backend=pipeline,
                reference=companions.reference,
                metrics_logger=None if control.logger is None else StageLogger(control.logger, STAGE),
                pad_id=ensure_pad_token(tokenizer),
                evaluate=partial(evaluation.measure_sft, pipeline) if task.heldout_prompts else None,
                checkpoint_dir=checkpoint_dir,
                keep_last_n=config.checkpoint.keep_last_n,
                should_stop=control.should_stop,
                clock=control.clock,
                best=best,
                inputs=control.inputs,
            )
            await _train(config, parts, task, training, start_step)
    last = finished_checkpoint(checkpoint_dir, num_steps, best)
    return last if last is None or best is None else best.find_checkpoint(checkpoint_dir) or last


async def _train(config: Config, parts: PreferenceParts, task: Task, training: PreferenceTrainingConfig, start_step: int) -> None:
    objective, heldout = config.preference.create_objective(), task.heldout_preferences
    if start_step == 0 and parts.metrics_logger is not None:
        parts.metrics_logger.log(await measure_preferences(parts, heldout, objective, training), 0)
    if start_step < training.num_steps:
        await train_preferences(parts, task.preferences, objective, training, heldout=heldout, start_step=start_step)


async def _score_once(
    config: Config, output_dir: Path, task: Task, beside: Companions, policy: TrainingBackend, control: RunControl
) -> Task:
    """Return the task whose pairs know their log-probs under the reference: read from a file of the run, or computed and written there.

    The policy has the weights of its start here, also in a resumed run, whose checkpoint is loaded afterwards.
    """
    pairs = [cast("PreferencePair", row) for row in (*task.preferences, *task.heldout_preferences)]
    origin = config.reference.path or config.model.path or "the built-in model"
    path, limit = output_dir / REFERENCE_FILE, config.preference.max_tokens_per_microbatch
    fingerprint = _fingerprint(pairs, origin)
    known = _read_scores(path, fingerprint)
    pairs[: len(known)] = [replace(pair, ref_log_probs=found) for pair, found in zip(pairs, known, strict=False)]
    if len(known) < len(pairs):
        control.say(f"log-probs of {len(pairs) - len(known):,} pairs under the reference are computed, once")
    async with open_companions(beside, policy) as opened:
        reference = opened.reference or policy
        pad_id = ensure_pad_token(create_tokenizer(config, None))
        for start in range(len(known), len(pairs), _SCORED_BETWEEN_WRITES):
            some = pairs[start : start + _SCORED_BETWEEN_WRITES]
            some = await score_reference(reference, some, pad_id=pad_id, max_tokens_per_microbatch=limit)
            pairs[start : start + len(some)] = some
            _write_scores(path, pairs[: start + len(some)], fingerprint)
    count = len(task.preferences)
    return replace(task, preferences=tuple(pairs[:count]), heldout_preferences=tuple(pairs[count:]))


def _fingerprint(pairs: Sequence[PreferencePair], origin: str) -> str:
    """Return a hash of the tokens of all pairs, and of the name of the model that scores them."""
    digest = blake2b(origin.encode(), digest_size=16)
    for pair in pairs:
        digest.update(repr((pair.chosen.tokens, pair.rejected.tokens)).encode())
    return digest.hexdigest()


def _read_scores(path: Path, fingerprint: str) -> list[tuple[float, float]]:
    """Return the scores in a file, as far as it goes; [] without one. Raises CheckpointError for scores of other pairs."""
    if not path.exists():
        return []
    try:
        first, *lines = path.read_text().splitlines()
        if json.loads(first)["pairs"] == fingerprint:
            return [(float(chosen), float(rejected)) for chosen, rejected in map(json.loads, lines)]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): delete it, and the log-probs are computed again") from error
    raise CheckpointError(
        f"{path} holds log-probs of other pairs or of another reference: restore the data and reference.path, or start a new run"
    )


def _write_scores(path: Path, pairs: Sequence[PreferencePair], fingerprint: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"pairs": fingerprint}), *(json.dumps(pair.ref_log_probs) for pair in pairs)]
    replace_file(path, "\n".join(lines) + "\n")
