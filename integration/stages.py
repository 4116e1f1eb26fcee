"""The two stages of a run: run_sft(config, output_dir) and run_rl(config, output_dir, source_checkpoint).

Each builds its parts from the configuration, goes on from its newest intact checkpoint if the run directory has one, and leaves
output_dir/checkpoints/step_NNNN. Metrics of both go to one file, so a stage can be given a logger that another stage used before it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from integration.config import (
    SELF_MADE_TASKS,
    Config,
    count_critic_updates,
    count_greedy_samples,
    count_rl_updates,
    create_rl_algorithm,
    generation_config,
    response_tokens,
    reward_config,
    rl_training_config,
    sft_training_config,
    turn_tokens,
)
from integration.engines import create_embedded_engine, open_engines
from integration.episode_evaluation import evaluate_episodes
from integration.episode_tasks import create_calculator_task, create_environment_task, create_grid_world_task
from integration.ledger import Ledger
from integration.models import check_companions, create_tokenizer, find_directory, open_companions
from integration.rewards import open_training_reward
from integration.sections import resolve_filter
from integration.sharded_models import create_beside, create_policy, create_sampling_model
from integration.task_rewards import open_task, use_own_reward
from integration.tasks import Task, create_gsm8k_task, create_jsonl_task, create_sort_long_task, create_sort_task
from integration.trajectory_writer import TrajectoryWriter
from integration.weight_channels import open_weight_channel
from rollouts.agent_policies import EngineAgentPolicy
from rollouts.async_rollouts import WorkflowExecutor, create_workflow_executor
from rollouts.backends.futures import open_pipeline
from rollouts.backends.protocol import TrainingBackend
from rollouts.backends.rank_group import RankGroup
from rollouts.chat import ensure_pad_token
from rollouts.checkpoints import find_damaged, latest_checkpoint, list_checkpoints, load_run_state
from rollouts.config import RolloutConfig
from rollouts.data_buffer import DataBuffer
from rollouts.engines.protocol import InferenceEngine, InMemoryWeightUpdates
from rollouts.episode_groups import create_policy_generate_fn
from rollouts.errors import CheckpointError, ConfigError
from rollouts.generation import create_generate_fn, evaluate_prompts
from rollouts.metrics import MetricsLogger, StageLogger
from rollouts.rl_loop import restore_rl_run, run_async_rl_training, run_rl_training
from rollouts.rollout_manager import AsyncRolloutManager
from rollouts.sft_loop import run_sft_training
from rollouts.trajectories import write_samples
from rollouts.types import Algorithm, RolloutBatch, Sample, SamplingParams, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECKPOINTS = "checkpoints"
NUM_EXAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class RunControl:
    """What a stage gets from the program around it. The defaults make a stage run by itself."""

    logger: MetricsLogger | None = None
    should_stop: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = lambda text: None  # for people
    clock: Callable[[], float] = time.monotonic
    group: RankGroup | None = None  # the processes that train together, led by this one; None = it trains alone
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))  # for servers that are started


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on held-out problems, measured by an engine that is given the backend's weights first."""

    engine: InferenceEngine
    tokenizer: PreTrainedTokenizerBase
    task: Task
    config: Config
    examples_path: Path  # gets the greedy answers to the first problems

    async def measure(self, backend: TrainingBackend | None = None) -> dict[str, float]:
        """Greedy and, if configured, sampled accuracy. backend: whose weights the engine takes; None = those it has."""
        if backend is not None:
            assert isinstance(self.engine, InMemoryWeightUpdates), f"{type(self.engine).__name__} takes no weights in memory"
            await self.engine.update_weights(await backend.get_weights().result(), await self.engine.get_weight_version())
        params = sampling_params(self.config, self.task)
        greedy, samples = await self._run(params.new(greedy=True))
        write_samples(self.examples_path, samples[:NUM_EXAMPLES])
        metrics = {"eval_accuracy": greedy["accuracy"], "eval_response_length_mean": greedy["response_length_mean"]}
        if self.config.evaluation.sampled:
            sampled, _ = await self._run(params)
            metrics["eval_accuracy_sampled"] = sampled["accuracy"]
        return metrics

    async def _run(self, params: SamplingParams) -> tuple[dict[str, float], tuple[Sample, ...]]:
        if self.task.episodes is not None:
            return await evaluate_episodes(
                EngineAgentPolicy(self.engine, self.tokenizer, params),
                self.task.episodes,
                self.task.heldout_prompts,
                self.task.reward_fn,
                reward=reward_config(self.config),
            )
        assert self.task.reward_fn is not None, f"the task {self.task.name!r} has no reward"
        return await evaluate_prompts(
            self.engine,
            self.tokenizer,
            self.task.heldout_prompts,
            self.task.reward_fn,
            params,
            seed=self.config.seed,
            reward=reward_config(self.config),
            template_kwargs=template_kwargs(self.config),
        )


async def run_sft(config: Config, output_dir: Path, control: RunControl | None = None, *, task: Task | None = None) -> Path | None:
    """Supervised fine-tuning.

    Returns: the last checkpoint; None if control.should_stop ended the stage before its last step.
    """
    control = control or RunControl()
    tokenizer = create_tokenizer(config)
    model = create_sampling_model(config, None, control.group, whole=True)
    task = create_task(config, tokenizer, "sft") if task is None else task
    logger = None if control.logger is None else StageLogger(control.logger, "sft")
    backend = create_policy(config, control.group, model, tokenizer, None, config.sft.optimizer, config.sft.num_steps)
    checkpoint_dir = output_dir / CHECKPOINTS
    source = find_checkpoint(checkpoint_dir, control)
    start_step = 0
    async with open_task(task) as task, open_pipeline(backend) as pipeline:
        engine = create_embedded_engine(config, model, tokenizer, is_trained=control.group is None)
        evaluation = Evaluation(engine, tokenizer, task, config, output_dir / "examples.jsonl")
        if source is not None:
            start_step = read_step(source, "sft")
            await pipeline.load_checkpoint(source).result()
            control.say(f"SFT goes on after step {start_step} of {config.sft.num_steps}")
        elif task.heldout_prompts:
            before = await evaluation.measure(pipeline)
            if logger is not None:
                logger.log(before, 0)
            control.say(f"accuracy before SFT: {before['eval_accuracy']:.3f}")
        if start_step < config.sft.num_steps:
            samples = task.sft_samples if task.demonstrate is None else (*task.sft_samples, *await task.demonstrate(control.say))
            await run_sft_training(
                pipeline,
                samples,
                sft_training_config(config),
                logger,
                pad_id=ensure_pad_token(tokenizer),
                start_step=start_step,
                evaluate=partial(evaluation.measure, pipeline) if task.heldout_prompts else None,
                checkpoint_dir=checkpoint_dir,
                keep_last_n=config.checkpoint.keep_last_n,
                should_stop=control.should_stop,
                clock=control.clock,
            )
    return finished_checkpoint(checkpoint_dir, config.sft.num_steps)


async def run_rl(
    config: Config,
    output_dir: Path,
    source_checkpoint: Path | None = None,
    control: RunControl | None = None,
    *,
    task: Task | None = None,
) -> Path | None:
    """Reinforcement learning.

    Args:
        source_checkpoint: a model directory to start from, for example the last checkpoint of run_sft; its architecture and its
            tokenizer are used. None = config.model.

    Returns: the last checkpoint; None if control.should_stop ended the stage before its last step.
    """
    control = control or RunControl()
    check_companions(config, source_checkpoint)
    tokenizer = create_tokenizer(config, source_checkpoint)
    model = create_sampling_model(config, source_checkpoint, control.group, whole=not config.engine.is_server)
    task = create_task(config, tokenizer, "rl") if task is None else task
    logger = None if control.logger is None else StageLogger(control.logger, "rl")
    budget = task.max_tokens if task.episodes is not None else generation_config(config, task.max_tokens).max_tokens
    algorithm = config.algorithm if budget == response_tokens(config) else create_rl_algorithm(config, budget)
    training = rl_training_config(config, algorithm, budget)
    start = source_checkpoint
    backend = create_policy(config, control.group, model, tokenizer, start, config.rl.optimizer, count_rl_updates(config))
    companions = create_beside(config, control.group, algorithm, model, tokenizer, start, count_critic_updates(config))
    checkpoint_dir = output_dir / CHECKPOINTS
    source = find_checkpoint(checkpoint_dir, control)
    buffer = DataBuffer(task.train_prompts if task.train_prompts or task.episodes is None else None, seed=config.seed)
    async with (
        open_pipeline(backend) as pipeline,
        open_companions(companions, pipeline) as beside,
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
        rollouts = create_rollout_source(config, buffer, rollout, engines)
        resume = None
        if source is not None:
            resume = await restore_rl_run(source, pipeline, rollouts, engines, training, critic=beside.critic, weight_channel=channel)
            control.say(f"RL goes on after step {resume.step} of {config.rl.num_steps}")
        trajectories = TrajectoryWriter(output_dir / "trajectories", config.trajectories)
        ledger = Ledger(output_dir / "ledger.jsonl", finished_steps=0 if resume is None else resume.step)

        async def keep(step: int, batch: RolloutBatch) -> None:
            trajectories.hold(step, batch)
            await trio.to_thread.run_sync(ledger.add, step, batch)

        async def keep_estimates(step: int, rollouts: RolloutBatch, batch: TrainBatch) -> None:
            await trio.to_thread.run_sync(trajectories.write, step, rollouts, batch)

        if resume is not None and resume.step >= config.rl.num_steps:  # killed between the last checkpoint and its line
            if logger is not None:
                logger.log(dict(resume.metrics) | await evaluation.measure(), resume.step)
            return finished_checkpoint(checkpoint_dir, config.rl.num_steps)
        if resume is None and source_checkpoint is None and task.heldout_prompts and logger is not None:
            logger.log(await evaluation.measure(), 0)
        options: dict[str, Any] = {
            "reference": beside.reference,
            "critic": beside.critic,
            "pad_id": ensure_pad_token(tokenizer),
            "evaluate": evaluation.measure,
            "checkpoint_dir": checkpoint_dir,
            "keep_last_n": config.checkpoint.keep_last_n,
            "resume": resume,
            "should_stop": control.should_stop,
            "on_rollouts": keep,
            "on_estimates": keep_estimates,
            "clock": control.clock,
            "weight_channel": channel,
        }
        async with rollouts:
            with trajectories:
                if isinstance(rollouts, WorkflowExecutor):
                    await run_async_rl_training(pipeline, buffer, rollouts, engines, training, logger, **options)
                else:
                    await run_rl_training(pipeline, buffer, rollouts, engines, training, logger, **options)
    return finished_checkpoint(checkpoint_dir, config.rl.num_steps)


def create_task(config: Config, tokenizer: PreTrainedTokenizerBase, mode: str = "sft+rl") -> Task:
    """The task of a name. The one place where the string becomes an object.

    Args:
        mode: sft, rl or sft+rl: the user's rows must have what these stages need, and nothing else.
    """
    num_heldout, data = config.evaluation.num_prompts, config.data
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
        assert data.path is not None, "Config checks that a task on the user's data has data.path"
        own_data: dict[str, Any] = {
            "num_heldout": num_heldout,
            "max_tokens": response_tokens(config),
            "max_length": data.max_length,
            "truncate": data.truncate,
            "skip_bad_rows": data.skip_bad_rows,
        }
        path, eval_path = Path(data.path), None if data.eval_path is None else Path(data.eval_path)
        if config.task == "gsm8k":  # its rows always serve both stages
            task = create_gsm8k_task(tokenizer, path, eval_path, **own_data)
        else:
            task = create_jsonl_task(tokenizer, path, eval_path, with_sft="sft" in mode, with_rl="rl" in mode, **own_data)
    return use_own_reward(config.reward, task)


def create_rollout_config(
    config: Config, task: Task, algorithm: Algorithm, engines: Sequence[InferenceEngine], tokenizer: PreTrainedTokenizerBase
) -> RolloutConfig:
    """How rollouts of the task are produced for the algorithm."""
    num_greedy = count_greedy_samples(algorithm)
    return RolloutConfig(
        batch_size=config.rl.prompts_per_step,
        n_samples_per_prompt=config.rl.samples_per_prompt,
        n_baseline_samples=num_greedy,
        over_sampling_factor=config.rl.over_sampling_factor,
        generate_fn=create_task_generate_fn(config, task, engines, tokenizer, num_greedy),
        reward_fn=task.reward_fn,
        filter_fn=resolve_filter(config.rl.filter),
        segment_log_probs=config.asynchronous.segment_wise,
        max_filter_attempts=config.rl.max_filter_attempts,
        reward=reward_config(config),
    )


def create_task_generate_fn(
    config: Config, task: Task, engines: Sequence[InferenceEngine], tokenizer: PreTrainedTokenizerBase, num_greedy: int
) -> Callable[..., Any]:
    """What generates a group: answers to a prompt, or episodes."""
    params = sampling_params(config, task)
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


def sampling_params(config: Config, task: Task) -> SamplingParams:
    """Of a response, or of each action of an episode."""
    return generation_config(config, task.max_tokens if task.episodes is None else turn_tokens(config)).sampling_params()


def create_rollout_source(
    config: Config, buffer: DataBuffer, rollout: RolloutConfig, engines: Sequence[InferenceEngine]
) -> AsyncRolloutManager | WorkflowExecutor:
    """What produces the batches: one after another, or while training goes on."""
    if not config.asynchronous.enabled:
        return AsyncRolloutManager(buffer, rollout, engines=engines)
    return create_workflow_executor(buffer, rollout, config.asynchronous, engines=engines, batches_per_version=config.rl.sync_every)


def template_kwargs(config: Config) -> Mapping[str, Any]:
    """What the chat template gets besides the messages."""
    thinking = config.generation.enable_thinking
    return {} if thinking is None else {"enable_thinking": thinking}


def find_checkpoint(checkpoint_dir: Path, control: RunControl) -> Path | None:
    """The newest intact checkpoint; says which newer ones are damaged. Raises CheckpointError if there are some and all are damaged."""
    for problem in find_damaged(checkpoint_dir):
        control.say(f"skipping a damaged checkpoint: {problem}")
    return latest_checkpoint(checkpoint_dir)


def finished_checkpoint(checkpoint_dir: Path, num_steps: int) -> Path | None:
    """The checkpoint after the last step, if the stage has got there."""
    checkpoints = list_checkpoints(checkpoint_dir)
    return checkpoints[-1] if checkpoints and int(checkpoints[-1].name.removeprefix("step_")) >= num_steps else None


def read_step(checkpoint: Path, stage: str) -> int:
    """Finished steps of a checkpoint of this stage."""
    state = load_run_state(checkpoint)
    if state.get("stage") != stage:
        raise CheckpointError(f"{checkpoint} is a checkpoint of stage {state.get('stage')!r}, expected {stage!r}")
    return int(state["step"])


def check_data_given(config: Config) -> None:
    """Raise ConfigError if data were given to a task that makes its own, or none to one that needs some."""
    if config.data.path is not None and config.task in SELF_MADE_TASKS:
        raise ConfigError(
            f"the task {config.task!r} makes its own data, but --data.path is {config.data.path}: add --task jsonl (or gsm8k)"
        )
    if config.task == "environment" and config.environment.factory is None:
        raise ConfigError(
            "the task 'environment' needs an environment: give --environment FILE.py:NAME of a function or class that makes one"
        )
