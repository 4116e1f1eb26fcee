"""Evaluation of a run on held-out problems and demonstrations, and the keeper of its best checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from integration.parts.agents import create_agents, has_reward
from integration.run.display import GRADED
from integration.settings.config import Config
from integration.settings.made.budgets import turn_tokens
from integration.settings.made.library import generation_config, reward_config
from integration.tasks.task import Task
from rollouts.agents.policies import ActionRequest, AgentAction, AgentPolicy, EngineAgentPolicy
from rollouts.agents.run import run_episode_group
from rollouts.agents.setting import EpisodeSetting
from rollouts.backends.protocol import TrainingBackend
from rollouts.chat.tokenize import ensure_pad_token
from rollouts.config import RewardConfig, parse_metric
from rollouts.data.trajectories import write_samples
from rollouts.engines.protocol import EngineFeature, InferenceEngine, require_engine_feature
from rollouts.errors import ConfigError, raise_single_errors
from rollouts.generation.contract import note_prompt, score_generated_group
from rollouts.generation.evaluation import EVALUATION_PREFIX, evaluate_prompts, summarize_evaluation
from rollouts.generation.single_turn import GroupSettings
from rollouts.rewards.evaluate import RewardFn, score_group
from rollouts.seeds import derive_seed
from rollouts.sft_loop import evaluate_sft
from rollouts.training.saving.best import BestCheckpoint
from rollouts.types import Group, Prompt, Sample, SamplingParams, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


NUM_EXAMPLES = 16
_EVALUATION_SEED = 10_000


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on held-out problems, measured by an engine with the backend's weights, and loss on held-out demonstrations."""

    engine: InferenceEngine
    tokenizer: PreTrainedTokenizerBase
    task: Task
    config: Config
    examples_path: Path  # file for the greedy answers to the first problems

    async def measure(self) -> dict[str, float]:
        """Measure greedy and, if configured, sampled accuracy of the engine's weights as the mean reward.

        The metric GRADED marks rewards other than 0 and 1.
        """
        params = sampling_params(self.config, self.task)
        greedy, samples = await self._run(params.new(greedy=True))
        write_samples(self.examples_path, samples[:NUM_EXAMPLES])
        metrics = {
            f"eval_{name}": greedy[name] for name in ("accuracy", "response_length_mean", "response_length_max", "truncated_fraction")
        }
        metrics["eval_num_prompts"] = greedy["num_samples"]
        graded = greedy.get("graded_fraction", 0.0)
        if self.config.evaluation.sampled:
            sampled, _ = await self._run(params)
            metrics["eval_accuracy_sampled"] = sampled["accuracy"]
            graded = max(graded, sampled.get("graded_fraction", 0.0))
        return metrics | ({GRADED: graded} if graded else {})

    async def measure_sft(self, backend: TrainingBackend) -> dict[str, float]:
        """Measure the accuracy of a backend's weights and their loss on held-out demonstrations, whichever the task has."""
        metrics = dict[str, float]()
        if self.task.heldout_prompts:
            engine = require_engine_feature(self.engine, EngineFeature.MEMORY_UPDATES, "an evaluation of the backend's weights")
            await engine.update_weights(await backend.get_weights().result(), await self.engine.get_weight_version())
            metrics |= await self.measure()
        if self.task.heldout_samples:
            limit = self.config.sft.max_tokens_per_microbatch
            samples, pad_id = self.task.heldout_samples, ensure_pad_token(self.tokenizer)
            metrics |= await evaluate_sft(backend, samples, pad_id=pad_id, max_tokens_per_microbatch=limit)
        return metrics

    async def _run(self, params: SamplingParams) -> tuple[dict[str, float], tuple[Sample, ...]]:
        if self.config.agent.is_used:
            return await self._run_agents(params)
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
            settings=GroupSettings(seed=self.config.seed, template_kwargs=template_kwargs(self.config)),
            reward=reward_config(self.config),
        )

    async def _run_agents(self, params: SamplingParams) -> tuple[dict[str, float], tuple[Sample, ...]]:
        """Evaluate one run of the user's program per prompt, as evaluate_prompts does answers."""
        config, prompts = self.config, self.task.heldout_prompts
        generate = create_agents(config, [self.engine], self.tokenizer, params, template_kwargs(config), os.environ)
        reward_fn = self.task.reward_fn if has_reward(config) else None
        groups: dict[int, Group | None] = {}

        async def evaluate_one(prompt: Prompt) -> None:
            group = await generate(prompt, 1)
            groups[prompt.index] = await score_generated_group(group, reward_fn, reward_config(config))

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for i, prompt in enumerate(prompts):
                    nursery.start_soon(evaluate_one, replace(prompt, index=i))
        return summarize_evaluation([groups[i] for i in range(len(prompts))], 1)


def sampling_params(config: Config, task: Task) -> SamplingParams:
    """Return the sampling parameters of a response, or of each action of an episode."""
    return generation_config(config, task.max_tokens if task.episodes is None else turn_tokens(config)).sampling_params()


def template_kwargs(config: Config) -> Mapping[str, Any]:
    """Return the arguments of the chat template besides the messages."""
    thinking = config.generation.enable_thinking
    return {} if thinking is None else {"enable_thinking": thinking}


def list_measured(config: Config, task: Task, stage: str) -> list[str]:
    """List the metrics that the evaluations of a stage, sft, rl or dpo, always have."""
    names = list[str]()
    if task.heldout_prompts:
        names += ["eval_accuracy", *(["eval_accuracy_sampled"] if config.evaluation.sampled else []), "eval_response_length_mean"]
    if task.heldout_samples and stage == "sft":
        names += ["eval_loss", "eval_perplexity"]
    if stage == "dpo":
        names += ["eval_loss", "eval_pair_accuracy", "eval_pair_margin", "eval_reward_chosen", "eval_reward_rejected"]
    return names


def check_best(config: Config, task: Task, mode: str) -> None:
    """Raise ConfigError if checkpoint.best is a metric that no stage of the mode measures."""
    if config.checkpoint.best is None:
        return
    measured = {stage: list_measured(config, task, stage) for stage in ("sft", "rl", "dpo") if stage in mode}
    if not any(parse_metric(config.checkpoint.best)[0] in names for names in measured.values()):
        found = "; ".join(f"{stage.upper()} measures {', '.join(names) or 'nothing'}" for stage, names in measured.items())
        raise ConfigError(
            f"checkpoint.best is {config.checkpoint.best!r}, which is not measured on held-out data here: {found}. Choose one of these, or "
            "give data for it (--data.eval-path, whose rows have answers or conversations)"
        )


def create_best(config: Config, task: Task, stage: str) -> BestCheckpoint | None:
    """Create the keeper of the best checkpoint of a stage; None without checkpoint.best, or if the stage does not measure it."""
    best = config.checkpoint.best
    if best is None or parse_metric(best)[0] not in list_measured(config, task, stage):
        return None
    return BestCheckpoint(best, patience=config.checkpoint.patience)


class _NamedApart:
    """A policy with its own request ids, distinct from those of rollouts that the engine may serve at the same time."""

    def __init__(self, policy: AgentPolicy) -> None:
        self._policy = policy
        self.tokenizer = getattr(policy, "tokenizer", None)

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """Return the policy's action."""
        return await self._policy.get_action(replace(request, request_id=f"{EVALUATION_PREFIX}{request.request_id}"))


async def evaluate_episode_group(
    policy: AgentPolicy,
    setting: EpisodeSetting,
    prompt: Prompt,
    n: int,
    reward_fn: RewardFn | None,
    *,
    reward: RewardConfig | None = None,
) -> Group | None:
    """Evaluate n episodes of a prompt, with environment seeds other than those of rollouts; None if one of them failed. See below."""
    own = replace(setting, seed=derive_seed(setting.seed, _EVALUATION_SEED))
    with note_prompt(prompt):
        episodes = await run_episode_group(_NamedApart(policy), own, prompt, n)
        group: list[Sample] = []
        for episode in episodes:
            assert episode is not None, "nothing interrupts an evaluation"
            if episode.sample.status is Status.FAILED:
                return None
            group.append(episode.sample)
        return tuple(group) if reward_fn is None else await score_group(tuple(group), reward_fn, reward)


async def evaluate_episodes(
    policy: AgentPolicy,
    setting: EpisodeSetting,
    prompts: Sequence[Prompt],
    reward_fn: RewardFn | None,
    *,
    reward: RewardConfig | None = None,
) -> tuple[dict[str, float], tuple[Sample, ...]]:
    """Evaluate one episode per prompt, with environment seeds other than those of rollouts.

    Args:
        prompts: numbered by their position here instead of their index, so that equal prompts and settings give equal episodes.
        reward_fn: None = the sum of the environment's rewards.
        reward: timeout and error policy of reward_fn.

    Returns: the metrics of evaluate_prompts (accuracy = mean reward), and the samples in the order of the prompts.
    Raises: GenerationError if all episodes were dropped; see run_episode.
    """
    groups: dict[int, Group | None] = {}

    async def evaluate_one(prompt: Prompt) -> None:
        groups[prompt.index] = await evaluate_episode_group(policy, setting, prompt, 1, reward_fn, reward=reward)

    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            for i, prompt in enumerate(prompts):
                nursery.start_soon(evaluate_one, replace(prompt, index=i))
    return summarize_evaluation([groups[i] for i in range(len(prompts))], 1)
