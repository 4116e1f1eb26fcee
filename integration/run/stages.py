"""The two stages of a run: run_sft(config, output_dir) and run_rl(config, output_dir, source_checkpoint).

Each stage builds its parts from the configuration, resumes from its newest intact checkpoint, if any, and writes
output_dir/checkpoints/step_NNNN. Metrics of both stages go to one file, so both may use the same logger.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from integration.crash.watch import CrashWatch
from integration.expressions.algorithm import learns_from_single_samples
from integration.expressions.filters import resolve_filter
from integration.expressions.mixture import parse_columns, parse_mixture
from integration.parts.agents import create_agents, has_reward
from integration.parts.engines import create_embedded_engine, open_engines, open_weight_channel
from integration.parts.model_settings import check_companions, create_tokenizer, find_directory, read_model_config
from integration.parts.models import Companions, open_companions
from integration.parts.rewards import open_task, open_training_reward, use_own_reward
from integration.parts.sharded_models import check_experts, create_beside, create_policy, create_sampling_model
from integration.parts.teachers import check_teacher_fields, open_teacher
from integration.run.display import name_measure
from integration.run.evaluation import Evaluation, create_best, sampling_params, template_kwargs
from integration.run.step_files import Ledger, TrajectoryWriter, open_files
from integration.settings.config import SELF_MADE_TASKS, Config
from integration.settings.made.budgets import response_tokens
from integration.settings.made.library import (
    count_critic_updates,
    count_greedy_samples,
    count_rl_updates,
    create_rl_algorithm,
    generation_config,
    reward_config,
    rl_training_config,
    sft_training_config,
)
from integration.tasks.episodes import create_calculator_task, create_environment_task, create_grid_world_task
from integration.tasks.own_data import OwnData, create_gsm8k_task, create_jsonl_task, create_recorded_task, leave_unscored
from integration.tasks.preference_pairs import add_preferences, create_empty_task
from integration.tasks.task import Task, create_sort_long_task, create_sort_task
from rollouts.agents.policies import EngineAgentPolicy
from rollouts.agents.run import create_policy_generate_fn
from rollouts.async_rl_loop import train_async_rl
from rollouts.asynchronous.executor import WorkflowExecutor, create_workflow_executor
from rollouts.asynchronous.recompute import score_with_engines
from rollouts.backends.futures import open_pipeline
from rollouts.backends.protocol import BackendFeature, CheckpointingBackend, TrainingBackend, get_backend_features
from rollouts.backends.ranks.group import RankGroup
from rollouts.chat.tokenize import ensure_pad_token
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data.model_limits import read_config_limits
from rollouts.data.prompts import DataBuffer
from rollouts.data.recorded import RecordedGroups, RecordedRollouts
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import CheckpointError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.rl_loop import train_rl
from rollouts.sft_loop import run_sft_training
from rollouts.training.abandonment import Abandonment
from rollouts.training.metrics import MetricsLogger, StageLogger
from rollouts.training.rl_parts import RLParts
from rollouts.training.saving.best import BestCheckpoint, add_to
from rollouts.training.saving.checkpoints import latest_checkpoint, list_checkpoints
from rollouts.training.saving.rl_checkpoints import restore_rl_run
from rollouts.training.saving.run_state import RunInputs, RunState, read_run_state
from rollouts.types import Algorithm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CHECKPOINTS = "checkpoints"


class LoopOptions(TypedDict):
    """Arguments that every loop takes by these names."""

    checkpoint_dir: Path
    keep_last_n: int
    should_stop: Callable[[], bool]
    clock: Callable[[], float]
    best: BestCheckpoint | None
    inputs: RunInputs | None
    abandonment: Abandonment


@dataclass(frozen=True, kw_only=True)
class RunControl:
    """The connections of a stage to its program. With the defaults a stage runs alone."""

    logger: MetricsLogger | None = None
    logged: Mapping[str, int] = field(default_factory=dict[str, int])  # last step of stages that have all their lines from before a kill
    should_stop: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = lambda text: None  # prints a message for the user
    clock: Callable[[], float] = time.monotonic
    watch_backend: Callable[[TrainingBackend, str], None] = lambda backend, name: None  # is given each backend before its first call
    group: RankGroup | None = None  # the training processes, led by this one; None = this process trains alone
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))  # environment variables of launched servers
    inputs: RunInputs | None = None  # marks of data and settings, written to each checkpoint
    abandonment: Abandonment = field(default_factory=Abandonment)  # request to give up what the run waits for

    def watch_crashes(self, output_dir: Path, stage: str, config: Any, backends: Mapping[str, TrainingBackend | None]) -> CrashWatch:
        """Create the watch that writes crash bundles of a stage; arguments as those of CrashWatch."""
        return CrashWatch(output_dir, stage, config, backends, num_processes=1 if self.group is None else self.group.num_ranks)

    def create_logger(self, stage: str) -> StageLogger | None:
        """Create the logger of a stage; None = there is none."""
        return None if self.logger is None else StageLogger(self.logger, stage, logged=self.logged.get(stage, -1))

    def loop_options(self, checkpoint_dir: Path, keep_last_n: int, best: BestCheckpoint | None) -> LoopOptions:
        """Return the arguments of a stage's loop that come from its program and say which checkpoints it keeps."""
        return {
            "checkpoint_dir": checkpoint_dir,
            "keep_last_n": keep_last_n,
            "should_stop": self.should_stop,
            "clock": self.clock,
            "best": best,
            "inputs": self.inputs,
            "abandonment": self.abandonment,
        }

    def find_result(self, checkpoint_dir: Path, num_steps: int, best: BestCheckpoint | None) -> Path | None:
        """Return the checkpoint that is the result of a stage: the best one, else the last; None if the stage has not reached its end."""
        last = None if self.abandonment.is_requested else finished_checkpoint(checkpoint_dir, num_steps, best)
        return last if last is None or best is None else best.find_checkpoint(checkpoint_dir) or last


async def run_sft(config: Config, output_dir: Path, control: RunControl | None = None, *, task: Task | None = None) -> Path | None:
    """Run supervised fine-tuning.

    Returns: the last checkpoint, with checkpoint.best the best one; None if control.should_stop ended the stage before its last step.
    """
    control = control or RunControl()
    tokenizer = create_tokenizer(config)
    model = create_sampling_model(config, None, control.group, whole=True)
    task = create_task(config, tokenizer, "sft") if task is None else task
    logger = control.create_logger("sft")
    backend = create_policy(config, control.group, model, tokenizer, None, config.sft.optimizer, config.sft.num_steps)
    check_experts(backend, config.sft, "sft")
    control.watch_backend(backend, "policy")
    crashes = control.watch_crashes(output_dir, "sft", config, {"policy": backend})
    checkpoint_dir = output_dir / CHECKPOINTS
    source = latest_checkpoint(checkpoint_dir)
    state = None if source is None else read_stage(source, "sft")
    start_step, unfinished = (0, None) if state is None else (state.step, state.metrics)
    async with open_task(task) as task, open_pipeline(backend) as pipeline:
        engine = create_embedded_engine(config, model, tokenizer, is_trained=control.group is None)
        evaluation, best = Evaluation(engine, tokenizer, task, config, output_dir / "examples.jsonl"), create_best(config, task, "sft")
        if source is not None and state is not None:
            await restore_stage(source, state, pipeline, best)
            control.say(f"SFT goes on after step {start_step} of {config.sft.num_steps}")
        elif before := await evaluation.measure_sft(pipeline):
            if logger is not None:
                logger.log(before, 0)
            if "eval_accuracy" in before:
                control.say(f"{name_measure(before)} before SFT: {before['eval_accuracy']:.3f}")
        if (start_step < config.sft.num_steps or unfinished is not None) and not (best is not None and best.has_ended):
            samples = task.sft_samples if task.demonstrate is None else (*task.sft_samples, *await task.demonstrate(control.say))
            if source is not None and state is not None:
                check_num_rows(source, state, len(samples))
            async with crashes.guard(pipeline):
                await run_sft_training(
                    pipeline,
                    samples,
                    sft_training_config(config),
                    logger,
                    pad_id=ensure_pad_token(tokenizer),
                    start_step=start_step,
                    evaluate=partial(evaluation.measure_sft, pipeline) if task.heldout_prompts or task.heldout_samples else None,
                    unfinished=unfinished,
                    **control.loop_options(checkpoint_dir, config.checkpoint.keep_last_n, best),
                )
    return control.find_result(checkpoint_dir, config.sft.num_steps, best)


async def run_rl(
    config: Config,
    output_dir: Path,
    source_checkpoint: Path | None = None,
    control: RunControl | None = None,
    *,
    task: Task | None = None,
) -> Path | None:
    """Run reinforcement learning.

    Args:
        source_checkpoint: the model directory to start from, for example the last checkpoint of run_sft; its architecture and
            tokenizer are used. None = config.model.

    Returns: the last checkpoint; None if control.should_stop ended the stage before its last step.
    """
    control = control or RunControl()
    checkpoint_dir, num_steps = output_dir / CHECKPOINTS, config.rl.num_steps
    source = latest_checkpoint(checkpoint_dir)
    async with _open_rl(config, output_dir, source_checkpoint, control, task) as stage:
        parts, resume = stage.parts, None
        if source is not None:
            resume = await restore_rl_run(
                source,
                parts.backend,
                stage.rollouts,
                parts.engines,
                stage.training,
                critic=parts.critic,
                weight_channel=parts.weight_channel,
            )
            control.say(f"RL goes on after step {resume.step} of {num_steps}")
        one_batch = stage.training.num_minibatches == 1  # weights of a part of a batch differ; a record of the update has them itself
        knows_weights = one_batch and BackendFeature.RECORDS not in get_backend_features(parts.backend)
        weigh = None if stage.training.algorithm is None or not knows_weights else stage.training.algorithm.weigh
        trajectories = TrajectoryWriter(output_dir / "trajectories", config.trajectories, weigh)
        ledger = Ledger(output_dir / "ledger.jsonl", finished_steps=0 if resume is None else resume.step)
        logger, measure, has_heldout = parts.metrics_logger, stage.evaluation.measure, bool(stage.evaluation.task.heldout_prompts)
        if resume is not None and resume.step >= num_steps:  # killed between the last checkpoint and its line
            line = dict(resume.metrics or {}) | (await measure() if has_heldout else {})
            if parts.best is not None:
                parts.best.load_state_dict(resume.best)
            add_to(parts.best, line, resume.step)
            if logger is not None:
                logger.log(line, resume.step)
            return finished_checkpoint(checkpoint_dir, num_steps)
        if resume is None and source_checkpoint is None and has_heldout and logger is not None:
            logger.log(await measure(), 0)
        async with stage.rollouts:
            with trajectories:
                async with open_files(parts, trajectories, ledger) as parts, stage.crashes.guard(parts.backend, parts.critic):
                    if isinstance(stage.rollouts, WorkflowExecutor):
                        by_engines = config.rl.segment_scores == "engines" and config.enable_segment_wise_ppo
                        score = score_with_engines(parts.engines) if by_engines else None
                        await train_async_rl(parts, stage.rollouts, stage.training, resume, score)
                    else:
                        await train_rl(parts, stage.rollouts, stage.training, resume)
    return None if control.abandonment.is_requested else finished_checkpoint(checkpoint_dir, num_steps, parts.best)


@dataclass(frozen=True, kw_only=True, eq=False)
class _RLStage:
    """The RL stage, opened."""

    parts: RLParts
    rollouts: AsyncRolloutManager | WorkflowExecutor | RecordedRollouts
    training: RLTrainingConfig
    evaluation: Evaluation
    crashes: CrashWatch


def _watch(control: RunControl, directory: Path, config: Config, policy: TrainingBackend, companions: Companions) -> CrashWatch:
    """Give the program each backend, under its name; return the watch over those that are trained."""
    backends = {"policy": policy, "reference": companions.reference, "critic": companions.critic}
    backends |= {f"teacher {name}".strip(): some for name, some in companions.teachers.items()}
    for name, some in backends.items():
        if some is not None:
            control.watch_backend(some, name)
    return control.watch_crashes(directory, "rl", config, {"policy": policy, "critic": companions.critic})


@asynccontextmanager
async def _open_rl(
    config: Config, output_dir: Path, source_checkpoint: Path | None, control: RunControl, task: Task | None
) -> AsyncGenerator[_RLStage]:
    """Make the parts of the RL stage, and open those that are to be closed at the end of the block."""
    check_companions(config, source_checkpoint)
    start, tokenizer = source_checkpoint, create_tokenizer(config, source_checkpoint)
    model = create_sampling_model(config, source_checkpoint, control.group, whole=not config.engine.is_server)
    task = create_task(config, tokenizer, "rl") if task is None else task
    check_teacher_fields(config, task, tokenizer, control.environment)
    budget = task.max_tokens if task.episodes is not None else generation_config(config, task.max_tokens).max_tokens
    algorithm = config.algorithm if budget == response_tokens(config) else create_rl_algorithm(config, budget)
    training = rl_training_config(config, algorithm, budget)
    backend = create_policy(config, control.group, model, tokenizer, start, config.rl.optimizer, count_rl_updates(config))
    check_experts(backend, config.rl, "rl")
    companions = create_beside(config, control.group, algorithm.requires, model, tokenizer, start, count_critic_updates(config))
    crashes, vocab_size = _watch(control, output_dir, config, backend, companions), int(model.config.get_text_config().vocab_size)
    if task.recorded is not None:
        training = replace(training, first_version=task.recorded.newest_version)
    prompts = task.train_prompts if task.recorded is None else task.recorded.prompts
    buffer = DataBuffer(prompts if task.train_prompts or task.episodes is None else None, seed=config.seed)
    async with (
        open_pipeline(backend) as pipeline,
        open_companions(companions, pipeline) as beside,
        open_teacher(config, beside.teachers, pipeline, tokenizer, vocab_size, control.environment) as teacher,
        open_engines(
            config,
            model,
            tokenizer,
            output_dir,
            source=find_directory(config, source_checkpoint),
            environment=control.environment,
            say=control.say,
            is_trained=control.group is None,
        ) as engines,
        open_weight_channel(config, engines, control.environment) as channel,
        open_task(task) as task,
        open_training_reward(config, task, tokenizer) as reward_fn,
    ):
        evaluation = Evaluation(engines[0], tokenizer, task, config, output_dir / "examples.jsonl")
        rollout = create_rollout_config(config, replace(task, reward_fn=reward_fn), algorithm, engines, tokenizer)
        parts = RLParts(
            backend=pipeline,
            data_buffer=buffer,
            engines=engines,
            metrics_logger=control.create_logger("rl"),
            reference=beside.reference,
            critic=beside.critic,
            teacher=teacher,
            pad_id=ensure_pad_token(tokenizer),
            evaluate=evaluation.measure if task.heldout_prompts else None,
            weight_channel=channel,
            **control.loop_options(output_dir / CHECKPOINTS, config.checkpoint.keep_last_n, create_best(config, task, "rl")),
        )
        rollouts = create_rollout_source(config, buffer, rollout, engines, task.recorded)
        yield _RLStage(parts=parts, rollouts=rollouts, training=training, evaluation=evaluation, crashes=crashes.begin_from(start, budget))


def create_task(config: Config, tokenizer: PreTrainedTokenizerBase, mode: str = "sft+rl") -> Task:
    """Create the task that config.task names, with preferences if the mode trains on some.

    Args:
        mode: sft, rl, sft+rl, dpo or sft+dpo: the user's rows must have the fields of these stages only.
    """
    if "dpo" in mode:
        alone = mode == "dpo" and config.task not in SELF_MADE_TASKS
        task = create_empty_task(config.task) if alone else create_task(config, tokenizer, "rl" if mode == "dpo" else "sft")
        return add_preferences(config, tokenizer, task, limits=read_config_limits(read_model_config(config)))
    num_heldout = config.evaluation.num_prompts
    if config.task == "sort":
        task = create_sort_task(tokenizer, num_heldout=num_heldout)
    elif config.task == "sort-long":
        task = create_sort_long_task(tokenizer, num_heldout=num_heldout)
    elif config.task == "grid_world":
        task = create_grid_world_task(config, tokenizer)
    elif config.task == "calculator":
        task = create_calculator_task(config, tokenizer)
    elif config.task == "environment":
        task = create_environment_task(config, tokenizer, mode)
    else:
        task = _create_own_task(config, tokenizer, mode)
    return use_own_reward(config.reward, task)


def _create_own_task(config: Config, tokenizer: PreTrainedTokenizerBase, mode: str) -> Task:
    """Create the task of the user's rows, or of recorded rollouts."""
    data, num_heldout = config.data, config.evaluation.num_prompts
    assert data.path is not None or data.mixture or data.rollouts, "Config checks that a task on the user's data has some"
    rows = OwnData(
        path=data.path,
        eval_path=data.eval_path,
        eval_fraction=data.eval_fraction,
        mixture=parse_mixture(data.mixture),
        columns=parse_columns(data.columns),
        lazy=data.streaming,
        needs_truth=config.reward.function is None and not config.agent.is_used and not learns_without_rewards(config, mode),
        num_heldout=num_heldout,
        max_length=data.max_length,
        truncate=data.truncate,
        skip_bad_rows=data.skip_bad_rows,
        limits=read_config_limits(read_model_config(config)),
    )
    if data.rollouts is not None:
        smallest = 1 if learns_from_single_samples(config.algorithm) else 2
        return create_recorded_task(tokenizer, data.rollouts, rows, smallest_group=smallest, max_tokens=response_tokens(config))
    if config.task == "gsm8k":  # its rows are problems in every mode; SFT alone reads their solutions
        task = create_gsm8k_task(tokenizer, replace(rows, with_sft="sft" in mode), max_tokens=response_tokens(config))
    else:
        rows = replace(rows, with_sft="sft" in mode, with_rl="rl" in mode)
        task = create_jsonl_task(tokenizer, rows, max_tokens=response_tokens(config))
        if config.reward.function is None and learns_without_rewards(config, mode):
            task = leave_unscored(task)
    return task


def learns_without_rewards(config: Config, mode: str) -> bool:
    """Whether a run trains by RL on the user's rows with an algorithm that reads no rewards."""
    return "rl" in mode and config.task == "jsonl" and not config.algorithm.reads_rewards


def create_rollout_config(
    config: Config, task: Task, algorithm: Algorithm, engines: Sequence[InferenceEngine], tokenizer: PreTrainedTokenizerBase
) -> RolloutConfig:
    """Return the configuration of rollouts of the task for the algorithm."""
    num_greedy = count_greedy_samples(algorithm)
    return RolloutConfig(
        batch_size=config.rl.prompts_per_step,
        n_samples_per_prompt=config.rl.samples_per_prompt,
        n_baseline_samples=num_greedy,
        over_sampling_factor=config.rl.over_sampling_factor,
        generate_fn=create_task_generate_fn(config, task, engines, tokenizer, num_greedy),
        reward_fn=None if config.agent.is_used and not has_reward(config) else task.reward_fn,
        filter_fn=resolve_filter(config.rl.filter),
        segment_log_probs=config.asynchronous.segment_wise,
        max_filter_attempts=config.rl.max_filter_attempts,
        reward=reward_config(config),
    )


def create_task_generate_fn(
    config: Config, task: Task, engines: Sequence[InferenceEngine], tokenizer: PreTrainedTokenizerBase, num_greedy: int
) -> Callable[..., Any]:
    """Return the function that generates a group: responses to a prompt, or episodes."""
    params = sampling_params(config, task)
    if config.agent.is_used:
        return create_agents(config, engines, tokenizer, params, template_kwargs(config), os.environ, num_greedy=num_greedy)
    if task.episodes is None:
        return create_generate_fn(
            engines,
            tokenizer,
            params,
            seed=config.seed,
            template_kwargs=template_kwargs(config),
            num_greedy=num_greedy,
            one_request_per_group=config.engine.one_request_per_group,
        )
    policies = [EngineAgentPolicy(engine, tokenizer, params) for engine in engines]
    return create_policy_generate_fn(policies, task.episodes, num_greedy=num_greedy)


def create_rollout_source(
    config: Config,
    buffer: DataBuffer,
    rollout: RolloutConfig,
    engines: Sequence[InferenceEngine],
    recorded: RecordedGroups | None = None,
) -> AsyncRolloutManager | WorkflowExecutor | RecordedRollouts:
    """Create the source of rollout batches: synchronous, or asynchronous to training, or recorded ones."""
    if recorded is not None:
        return RecordedRollouts(recorded, config.rl.prompts_per_step, config.seed)
    if not config.asynchronous.enabled:
        return AsyncRolloutManager(buffer, rollout, engines=engines)
    return create_workflow_executor(buffer, rollout, config.asynchronous, engines=engines, batches_per_version=config.rl.sync_every)


def read_stage(checkpoint: Path, stage: str) -> RunState:
    """Read the state of a checkpoint. Raises CheckpointError for a checkpoint of another stage."""
    state = read_run_state(checkpoint)
    if state.stage != stage:
        raise CheckpointError(f"{checkpoint} is a checkpoint of stage {state.stage!r}, expected {stage!r}")
    return state


async def restore_stage(checkpoint: Path, state: RunState, backend: CheckpointingBackend, best: BestCheckpoint | None) -> None:
    """Restore the backend of a stage, and what the run knew of its evaluations when it wrote the checkpoint."""
    if best is not None:
        best.load_state_dict(state.best)
    await backend.load_checkpoint(checkpoint).result()


def finished_checkpoint(checkpoint_dir: Path, num_steps: int, best: BestCheckpoint | None = None) -> Path | None:
    """Return the checkpoint of the last step, or of the step after which the patience of `best` ended; None if neither is reached."""
    checkpoints = list_checkpoints(checkpoint_dir)
    if not checkpoints:
        return None
    has_ended = best is not None and best.has_ended
    return checkpoints[-1] if has_ended or int(checkpoints[-1].name.removeprefix("step_")) >= num_steps else None


def check_num_rows(checkpoint: Path, state: RunState, num_rows: int) -> None:
    """Raise CheckpointError if the number of rows to train on has changed since the checkpoint: the order of rows depends on it."""
    before = state.num_rows
    if before is not None and before != num_rows:
        raise CheckpointError(
            f"{checkpoint} was trained on {before:,} rows, but the data now has {num_rows:,}: a resumed run must read the rows in the same "
            "order, which depends on their number. Restore the data (data.path, data.mixture, preference.path), or start a new run"
        )
