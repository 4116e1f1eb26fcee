"""Evaluation of episodes on held-out problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import trio

from rollouts.agents.policies import ActionRequest, AgentAction, AgentPolicy
from rollouts.agents.run import run_episode_group
from rollouts.agents.setting import EpisodeSetting
from rollouts.config import RewardConfig
from rollouts.errors import raise_single_errors
from rollouts.generation.contract import note_prompt
from rollouts.generation.evaluation import EVALUATION_PREFIX, summarize_evaluation
from rollouts.rewards.evaluate import RewardFn, score_group
from rollouts.seeds import derive_seed
from rollouts.types import Group, Prompt, Sample, Status

_EVALUATION_SEED = 10_000


class _NamedApart:
    """A policy with its own request ids, distinct from those of rollouts that the engine may serve at the same time."""

    def __init__(self, policy: AgentPolicy) -> None:
        self._policy = policy
        self.tokenizer = getattr(policy, "tokenizer", None)

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """Return the policy's action."""
        return await self._policy.get_action(replace(request, request_id=f"{EVALUATION_PREFIX}{request.request_id}"))


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
    own = replace(setting, seed=derive_seed(setting.seed, _EVALUATION_SEED))
    named = _NamedApart(policy)
    groups: dict[int, Group | None] = {}

    async def evaluate_one(prompt: Prompt) -> None:
        with note_prompt(prompt):
            (episode,) = await run_episode_group(named, own, prompt, 1)
            assert episode is not None, "nothing interrupts an evaluation"
            if episode.sample.status is Status.FAILED:
                groups[prompt.index] = None
            else:
                group = (episode.sample,)
                groups[prompt.index] = group if reward_fn is None else await score_group(group, reward_fn, reward)

    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            for i, prompt in enumerate(prompts):
                nursery.start_soon(evaluate_one, replace(prompt, index=i))
    return summarize_evaluation([groups[i] for i in range(len(prompts))], 1)
