"""TrainerSession: the parts of a training by ConfigStore, opened, and its steps one by one or as a whole. Everything awaits.

    async with open_trainer(config, reward_fn=lambda t: sum(t.rewards), environment=Guess) as trainer:
        await trainer.fit(num_epochs=2, num_iters_per_epoch=10)
        await trainer.save_checkpoint("checkpoints")

PPOTrainer of rollouts.trainer.blocking is the same for programs without a trio loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.policies import EngineAgentPolicy
from rollouts.agents.run import create_policy_generate_fn
from rollouts.agents.setting import EpisodeSetting
from rollouts.backends.factory import create_critic_backend, create_pytorch_backend, create_reference_backend
from rollouts.backends.futures import open_pipeline
from rollouts.backends.protocol import TrainingBackend
from rollouts.chat.tokenize import Messages
from rollouts.config import HISTORY_STEPS, RLTrainingConfig, RolloutConfig, check_positive
from rollouts.data.datasets import load_rl_prompts
from rollouts.data.prompts import DataBuffer
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.text.batch import GeneratedTexts
from rollouts.engines.weights.server_weights import begin_weight_versions
from rollouts.environments.protocol import EnvironmentConfig
from rollouts.errors import CheckpointError, ConfigError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.models.loading import load_hf_model, parse_device
from rollouts.output_files import explain_writes
from rollouts.rewards.trajectory_rewards import adapt_trajectory_reward
from rollouts.rl_loop import train_rl
from rollouts.trainer.advantages import create_algorithm
from rollouts.trainer.config import ConfigStore, TrainingConfig
from rollouts.trainer.engines import TextEngine, find_model_directory, open_text_engine
from rollouts.trainer.environments import create_environment_factory
from rollouts.training.metrics import MetricsLogger, log_offset
from rollouts.training.rl_parts import RLParts
from rollouts.training.rl_run import RLRun
from rollouts.training.saving.checkpoints import MANIFEST_FILE, latest_checkpoint
from rollouts.training.saving.rl_checkpoints import ResumePoint, restore_rl_run
from rollouts.types import Algorithm, Prompt, RolloutBatch, Sample

Dataset = str | Path | Sequence[Any]
"""File or folder of rows, see data.load_rl_prompts; or prompts in one of the forms of data.prompts.parse_prompt."""


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """Task of a trainer: prompts, or an environment, or both, and their reward."""

    reward_fn: Callable[..., Any] | None = None  # f(trajectory) or f(trajectory, environment) -> reward; None = the environment's rewards
    environment: Any = None  # class, function that makes one, or object, of which each episode gets a copy; None = single answers
    dataset: Dataset | None = None  # prompts; None = the environment makes its tasks from seeds
    sample_reward_fn: Callable[[Sample], Any] | None = None  # f(Sample) -> reward, in place of reward_fn: a reward of rollouts.rewards
    episodes: EpisodeConfig | None = None  # further limits of episodes; max_turns and system_prompt are those of InferenceConfig

    def __post_init__(self) -> None:
        if self.reward_fn is not None and self.sample_reward_fn is not None:
            raise ConfigError("reward_fn and sample_reward_fn are both given: leave one of them out")
        if self.environment is None and self.dataset is None:
            raise ConfigError("there is nothing to train on: give an environment, or a dataset of prompts")
        if self.environment is None and self.reward_fn is None and self.sample_reward_fn is None:
            raise ConfigError("answers to a dataset's prompts need a reward: give reward_fn or sample_reward_fn")
        if self.episodes is not None and self.environment is None:
            raise ConfigError("episodes are given, but no environment: leave them out, or give an environment")


class _History:
    """Logger that keeps the last HISTORY_STEPS lines, and passes each on."""

    def __init__(self, logger: MetricsLogger | None) -> None:
        self.lines: deque[dict[str, float]] = deque(maxlen=HISTORY_STEPS)
        self.num_logged = 0  # lines of all iterations, those that are no longer kept included
        self.epoch_of: Callable[[int], int] | None = None  # iteration -> epoch of the present fit()
        self._logger = logger

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record the metrics of an iteration."""
        line: dict[str, float] = {**metrics, "iteration": step}
        if "loss" in metrics:  # an iteration without an update has none
            line["policy_loss"] = metrics["loss"]
        if self.epoch_of is not None:
            line["epoch"] = self.epoch_of(step)
        self.lines.append(line)
        self.num_logged += 1
        if self._logger is not None:
            self._logger.log(line, step)

    def cut(self, step: int) -> None:
        """Drop the lines of later iterations."""
        while self.lines and self.lines[-1]["iteration"] > step:
            self.lines.pop()

    def finish(self) -> None:
        """Finish the other logger."""
        if self._logger is not None:
            self._logger.finish()

    def offset(self) -> int | None:
        """Length of the other logger's file in bytes."""
        return log_offset(self._logger)


@dataclass(frozen=True, eq=False)
class _Given:
    """Source whose next batch is a given one."""

    rollouts: RolloutBatch
    manager: AsyncRolloutManager

    @property
    def config(self) -> RolloutConfig:
        return self.manager.config

    async def generate_batch(self) -> RolloutBatch:
        return self.rollouts

    def state_dict(self) -> dict[str, Any]:
        return self.manager.state_dict()


class TrainerSession:
    """Opened parts of a training. Made by open_trainer; one method at a time."""

    def __init__(
        self,
        config: ConfigStore,
        parts: RLParts,
        manager: AsyncRolloutManager,
        engine: TextEngine,
        algorithm: Algorithm,
        *,
        iters_per_epoch: int | None,
    ) -> None:
        """
        Args:
            parts, manager, engine: opened, and kept open by the caller.
            algorithm: see create_algorithm.
            iters_per_epoch: iterations that go once through the dataset; None = there is none.

        Raises: ConfigError if the parts do not fit together.
        """
        self.config = config
        self.engine = engine
        self.iteration = 0  # finished iterations
        self._history = _History(parts.metrics_logger)
        self._parts = replace(parts, metrics_logger=self._history)
        self._manager = manager
        self._iters_per_epoch = iters_per_epoch
        self._training = create_training_config(config, algorithm)
        RLRun(self._parts, manager, self._training)

    @property
    def metrics_history(self) -> list[dict[str, float]]:
        """Metrics of the last 1,000 iterations: "epoch" (of its fit(), from 0), "iteration" (from 1), "policy_loss", "reward_mean", ...

        A metrics_logger gets those of all.
        """
        return list(self._history.lines)

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the policy so far."""
        return self.iteration * self.config.training.updates_per_iteration

    async def fit(self, num_epochs: int | None = None, num_iters_per_epoch: int | None = None) -> list[dict[str, float]]:
        """Train for num_epochs * num_iters_per_epoch iterations, or until TrainingConfig.max_steps optimizer steps.

        An iteration is one rollout batch: generate, reward, train with ppo_epochs * num_minibatches optimizer steps, and hand the weights
        to the engine. Checkpoints are written as CheckpointConfig says.

        Args:
            num_epochs, num_iters_per_epoch: None = those of TrainingConfig.

        Returns: metrics_history.
        Raises: ConfigError for a number below 1, and if nothing says how many iterations an epoch has.
        """
        epochs, iterations = self._plan(num_epochs, num_iters_per_epoch)
        first = self.iteration
        last = first + epochs * iterations
        if self.config.training.max_steps is not None:
            last = min(last, self.config.training.max_steps // self.config.training.updates_per_iteration)
        if last <= first:
            return self.metrics_history
        checkpoint = self.config.checkpoint
        parts = self._parts if checkpoint.output_dir is None else replace(self._parts, checkpoint_dir=Path(checkpoint.output_dir))
        training = replace(self._training, num_steps=last, checkpoint_every=checkpoint.save_interval * iterations)
        self._history.epoch_of = lambda step: (step - 1 - first) // iterations
        try:
            await self._train(parts, self._manager, training)
        finally:
            self._history.epoch_of = None
        return self.metrics_history

    async def rollout(self) -> RolloutBatch:
        """Generate and score the next rollout batch: answers to the dataset's prompts, or episodes in the environment."""
        return await self._manager.generate_batch()

    async def train_step(self, rollouts: RolloutBatch | None = None) -> dict[str, float]:
        """Train on one rollout batch and hand the new weights to the engine.

        Args:
            rollouts: result of rollout(); None = generate the next one.

        Returns: the metrics of the iteration, the last of metrics_history.
        """
        source = self._manager if rollouts is None else _Given(rollouts, self._manager)
        await self._train(self._parts, source, replace(self._training, num_steps=self.iteration + 1))
        return self._history.lines[-1]

    async def generate(
        self,
        prompts: Sequence[str | Messages],
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> GeneratedTexts:
        """Generate with the present weights; see TextEngine.generate."""
        return await self.engine.generate(prompts, max_tokens, temperature, top_p, seed)

    async def save_checkpoint(self, path: str | Path | None = None) -> Path:
        """Write path/step_NNNN: weights in Hugging Face layout, optimizer, critic, random state and data position.

        Args:
            path: directory; None = CheckpointConfig.output_dir. The CheckpointConfig.keep_last_n newest checkpoints in it are kept.

        Returns: the checkpoint.
        Raises: ConfigError without a directory, or before the first iteration; CheckpointError if it cannot be written.
        """
        directory = self.config.checkpoint.output_dir if path is None else path
        if directory is None:
            raise ConfigError("there is no directory for a checkpoint: give path, or set CheckpointConfig.output_dir")
        if self.iteration == 0:
            raise ConfigError("nothing has been trained yet, so the checkpoint would be the model that it began with: call fit() first")
        run = RLRun(replace(self._parts, checkpoint_dir=Path(directory)), self._manager, replace(self._training, num_steps=self.iteration))
        async with run.writing():
            await run.begin(ResumePoint(self.iteration))
            lines = self._history.lines
            last = lines[-1] if lines and lines[-1]["iteration"] == self.iteration else {}
            await run.save(self.iteration, last, self._history.offset())
            return await run.wait_saved()

    async def load_checkpoint(self, path: str | Path) -> int:
        """Restore a checkpoint: training goes on as if it had not been interrupted, value for value on a CPU.

        Args:
            path: a step_NNNN directory, or one that holds such directories, of which the newest intact one counts.

        Returns: the number of finished iterations. Later lines of metrics_history are dropped.
        Raises: CheckpointError if there is none, or if it is damaged or of another kind of training.
        """
        directory = Path(path)
        checkpoint = directory if (directory / MANIFEST_FILE).is_file() else latest_checkpoint(directory)
        if checkpoint is None:
            raise CheckpointError(f"{directory} holds no checkpoint: give a step_NNNN directory, or one that holds some")
        parts = self._parts
        resume = await restore_rl_run(checkpoint, parts.backend, self._manager, parts.engines, self._training, critic=parts.critic)
        self.iteration = resume.step
        self._history.cut(resume.step)
        return resume.step

    async def _train(self, parts: RLParts, source: AsyncRolloutManager | _Given, training: RLTrainingConfig) -> None:
        """Train to the end of `training`; self.iteration follows also where an error ends it."""
        done = self._history.num_logged
        resume = ResumePoint(self.iteration) if self.iteration else None
        try:
            await train_rl(parts, source, training, resume)
        finally:
            self.iteration += self._history.num_logged - done

    def _plan(self, num_epochs: int | None, num_iters_per_epoch: int | None) -> tuple[int, int]:
        """Return epochs, and iterations of each. Raises ConfigError."""
        section = self.config.training
        epochs = section.num_epochs if num_epochs is None else num_epochs
        iterations = section.num_iters_per_epoch if num_iters_per_epoch is None else num_iters_per_epoch
        iterations = self._iters_per_epoch if iterations is None else iterations
        if iterations is None:
            raise ConfigError(
                "an environment without a dataset has no end, so nothing says how many iterations an epoch has: give num_iters_per_epoch, "
                "to fit() or in TrainingConfig"
            )
        check_positive(_FitLength(epochs, iterations), "num_epochs", "num_iters_per_epoch")
        return epochs, iterations


@dataclass(frozen=True)
class _FitLength:
    num_epochs: int
    num_iters_per_epoch: int


@asynccontextmanager
async def open_trainer(
    config: ConfigStore | None = None,
    task: TrainingTask | None = None,
    *,
    metrics_logger: MetricsLogger | None = None,
    **task_fields: Any,
) -> AsyncGenerator[TrainerSession]:
    """Open the parts of a training, and close them at the end of the block.

    The policy trains full weights with AdamW at a constant learning rate; a critic is created for adv_estimator "gae" only, a reference
    model for a KL term only. Both start as the policy.

    Args:
        config: settings; None = ConfigStore().
        task: reward, environment and prompts; None = a TrainingTask of the other arguments.
        metrics_logger: gets the line of each iteration, too.
        task_fields: reward_fn, environment, dataset, ...: the fields of TrainingTask.

    Raises: ConfigError for settings that do not fit together, before anything is generated; errors of loading.
    """
    config = config or ConfigStore()
    task = TrainingTask(**task_fields) if task is None else task
    check_task(config, task)
    training, device = config.training, parse_device(config.model.device)
    algorithm = create_algorithm(training, own_log_probs=config.inference.top_p < 1)
    directory = find_model_directory(config.model)
    buffer = DataBuffer(load_prompts(task.dataset), seed=training.seed)
    common: dict[str, Any] = {"device": device, "compute_dtype": config.model.dtype}
    adamw = {"weight_decay": training.weight_decay, "max_grad_norm": training.max_grad_norm}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(open_text_engine(directory, config=config))
        if config.inference.url is not None:
            await engine.engine.update_weights_from_checkpoint(create_initial_model(directory, Path(config.checkpoint.output_dir or "")))

        def load() -> Any:
            return load_hf_model(directory, device=device, trust_remote_code=config.model.trust_remote_code)

        policy = create_pytorch_backend(load(), lr=training.learning_rate, tokenizer=engine.tokenizer, **adamw, **common)
        reference: TrainingBackend | None = None
        critic: TrainingBackend | None = None
        if "ref_log_probs" in algorithm.requires:
            reference = create_reference_backend(load(), tokenizer=engine.tokenizer, **common)
        if "values" in algorithm.requires:
            optimizer = {"lr": training.critic_learning_rate, **adamw}
            critic = create_critic_backend(load(), seed=training.seed, tokenizer=engine.tokenizer, **optimizer, **common)
        parts = RLParts(
            backend=await stack.enter_async_context(open_pipeline(policy)),
            data_buffer=buffer,
            engines=[engine.engine],
            metrics_logger=metrics_logger,
            reference=None if reference is None else await stack.enter_async_context(open_pipeline(reference)),
            critic=None if critic is None else await stack.enter_async_context(open_pipeline(critic)),
            pad_id=int(engine.tokenizer.pad_token_id),  # pyright: ignore[reportArgumentType]
            checkpoint_dir=None if isinstance(engine.engine, InProcessEngine) else Path(config.checkpoint.output_dir or ""),
            keep_last_n=config.checkpoint.keep_last_n,
        )
        rollout = create_rollout_config(config, task, engine, algorithm)
        manager = await stack.enter_async_context(AsyncRolloutManager(buffer, rollout, engines=[engine.engine]))
        per_epoch = None if task.dataset is None else -(-len(buffer) // training.batch_size)
        yield TrainerSession(config, parts, manager, engine, algorithm, iters_per_epoch=per_epoch)


def create_initial_model(directory: Path, output_dir: Path) -> Path:
    """Create output_dir/initial_model, the model with weight version 0, for a server that runs already. Raises OutputError."""
    target = output_dir / "initial_model"
    with explain_writes(target):
        target.mkdir(parents=True, exist_ok=True)
        begin_weight_versions(target, directory)
    return target


def check_task(config: ConfigStore, task: TrainingTask) -> None:
    """Raise ConfigError for settings that do not fit the task, or cannot be trained with."""
    inference = config.inference
    if inference.multi_turn and task.environment is None:
        raise ConfigError("InferenceConfig.multi_turn is True, but there is no environment to answer the model: give environment=")
    if inference.temperature == 0:
        raise ConfigError(
            "InferenceConfig.temperature is 0: all responses to a prompt would be the same, and nothing could be learned from comparing "
            "them; use 1.0"
        )
    if inference.backend != "local" and config.checkpoint.output_dir is None:
        raise ConfigError(
            f"InferenceConfig.backend is {inference.backend!r}, and the new weights reach a server through a directory: set "
            "CheckpointConfig.output_dir"
        )
    fields = (EpisodeConfig().max_turns, inference.turns)
    if task.episodes is not None and task.episodes.max_turns not in fields:
        raise ConfigError(
            f"episodes.max_turns is {task.episodes.max_turns}, but InferenceConfig says {inference.turns} (multi_turn, max_turns): set it "
            "there"
        )


def load_prompts(dataset: Dataset | None) -> Sequence[Any] | None:
    """Return the prompts of a dataset: those of a file or folder, or the given ones. Raises DataError."""
    return load_rl_prompts(dataset, require_ground_truth=False) if isinstance(dataset, str | Path) else dataset


def create_rollout_config(config: ConfigStore, task: TrainingTask, engine: TextEngine, algorithm: Algorithm) -> RolloutConfig:
    """Return the configuration of rollout batches: answers, or episodes, and their rewards."""
    section = config.training
    num_greedy = int("greedy_rows" in algorithm.requires)  # ReMax
    if task.environment is None:
        generate_fn: Callable[..., Any] = create_generate_fn(
            [engine.engine], engine.tokenizer, engine.params, seed=section.seed, num_greedy=num_greedy
        )
    else:
        policy = EngineAgentPolicy(engine.engine, engine.tokenizer, engine.params)
        generate_fn = create_policy_generate_fn([policy], create_episode_setting(config, task), num_greedy=num_greedy)
    reward_fn = task.sample_reward_fn
    if task.reward_fn is not None:
        second = config.environment if task.environment is None or callable(task.environment) else task.environment
        reward_fn = adapt_trajectory_reward(task.reward_fn, second)
    return RolloutConfig(
        batch_size=section.batch_size,
        n_samples_per_prompt=section.n_samples_per_prompt,
        n_baseline_samples=num_greedy,
        generate_fn=generate_fn,
        reward_fn=reward_fn,
    )


def create_episode_setting(config: ConfigStore, task: TrainingTask) -> EpisodeSetting:
    """Return the setting of the task's episodes: its environments are reset with ConfigStore.environment."""
    limits = task.episodes or EpisodeConfig()
    prompt = config.inference.system_prompt
    own = config.environment

    def create_environment_config(prompt: Prompt, seed: int) -> EnvironmentConfig:
        return replace(own, seed=seed, parameters={**own.parameters, **prompt.metadata})

    return EpisodeSetting(
        environment_factory=create_environment_factory(task.environment),
        config=replace(limits, max_turns=config.inference.turns, system_prompt=limits.system_prompt if prompt is None else prompt),
        seed=config.training.seed,
        create_environment_config=create_environment_config,
    )


def create_training_config(config: ConfigStore, algorithm: Algorithm) -> RLTrainingConfig:
    """Return the schedule of one iteration; fit() sets its length."""
    section: TrainingConfig = config.training
    return RLTrainingConfig(
        num_steps=1,
        num_epochs=section.ppo_epochs,
        num_minibatches=section.num_minibatches,
        algorithm=algorithm,
        max_tokens_per_microbatch=section.max_tokens_per_microbatch,
        weight_sync="memory" if config.inference.backend == "local" else "checkpoint",
        seed=section.seed,
    )
