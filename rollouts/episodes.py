"""Episodes: a policy acts in an environment until something ends it, and what came of it is one Sample.

    policy = EngineAgentPolicy(engine, tokenizer, SamplingParams(max_tokens=32))
    episode = await run_episode(policy, GridWorld, Prompt(content=""), EpisodeConfig(max_turns=8))
    episode.sample                    # tokens, loss_mask, log-probs and versions of each token, turns, reward, status
    episode.steps, episode.messages, episode.stop_reason

    group = await run_episode_group(policy, GridWorld, prompt, 8, EpisodeConfig())      # from the same first state, in parallel

    generate_fn = create_episode_generate_fn(engines, tokenizer, SamplingParams(max_tokens=32), GridWorld, EpisodeConfig())
    RolloutConfig(generate_fn=generate_fn, batch_size=8, n_samples_per_prompt=4)        # episode_groups.py; sync and async loops

- The environment is made anew for each episode, by a factory, and reset with EnvironmentConfig(seed=derive_seed(seed, prompt.index),
  parameters=a copy of prompt.metadata): equal for all episodes of a group.
- The conversation begins with the prompt's messages. The environment's prompt prefix and first observation become part of the last user
  message: prefix, then the prompt's text, then the observation. A prompt whose content is a non-empty text stays plain text, without a
  chat template (EpisodeConfig.chat); Prompt(content="") or content=() leaves everything to the environment.
- The environment is given the text of each action (AgentAction.parsed, where a policy sets it). Its rewards add up to Sample.reward.
- Sample.metadata has "messages" (the whole conversation, as dicts), "stop_reason", "num_turns", "num_cut_actions" (that reached their token
  budget), "environment_reward", "failure" (None, or whose fault), "steps" (observation, reward, done and info of each), and the prompt's
  metadata.
- info["tool_calls"] of a step (a list in the OpenAI form) are those of the assistant message before it; info["policy_error"] is what was
  wrong with the action (a call that is no JSON, an invalid move): such an episode is a whole one, with failure "policy".
- Status: done, agent and regex give COMPLETED, or TRUNCATED where the last action was cut and EpisodeConfig.cut_is_truncated says so;
  max_turns, max_tokens and context TRUNCATED. Faults of the environment and of the data
  follow EpisodeConfig.on_error: raised, begun again, or FAILED. What an engine raises always passes: loops have their own policy for it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import count

import trio

from rollouts.agent_policies import AgentPolicy
from rollouts.chat_formats import ConversationFormat
from rollouts.environments.protocol import EnvironmentFactory
from rollouts.episode_config import EpisodeConfig, Failure
from rollouts.episode_course import Course
from rollouts.episode_course import Episode as Episode
from rollouts.episode_openings import EpisodeSetting as EpisodeSetting
from rollouts.episode_openings import create_conversation_format
from rollouts.errors import DataError, EngineRequestError, EpisodeError, EpisodeInterrupted, SandboxError, raise_single_errors
from rollouts.samples import create_pending_group, describe_sample
from rollouts.types import Prompt, Sample, Status

_logger = logging.getLogger(__name__)


async def run_episode(
    policy: AgentPolicy,
    environment_factory: EnvironmentFactory | EpisodeSetting,
    prompt: Prompt,
    config: EpisodeConfig | None = None,
    *,
    seed: int = 0,
    sample_number: int = 0,
    pending: Sample | None = None,
    conversation: ConversationFormat | None = None,
) -> Episode:
    """One episode. See the module's docstring.

    Args:
        environment_factory: or an EpisodeSetting, which then has config and seed as well.
        config: None = EpisodeConfig().
        seed: of environment and sampling: equal arguments and weights give the same episode.
        sample_number: place in its group; from 0.
        pending: the Sample that is to be filled; None = that of this place in a group of sample_number + 1.
        conversation: see create_conversation_format, which makes it where it is None.

    Raises: EpisodeInterrupted if the policy was told to stop; EnvironmentFault, ToolFault, SandboxError, DataError and EngineRequestError
        unless EpisodeConfig.on_error is "drop"; what else the policy raises.
    """
    setting = create_setting(environment_factory, config, seed)
    if pending is None:
        pending = create_pending_group(prompt, sample_number + 1)[sample_number]
    for attempt in count():
        course = Course(policy, setting, prompt, sample_number, pending, conversation)
        try:
            await course.run()
        except (EpisodeError, SandboxError) as error:
            if setting.config.on_error == "retry" and attempt < setting.config.max_retries:
                _logger.warning("%s begins again after attempt %d: %s", describe_sample(pending), attempt + 1, error)
                continue
            if setting.config.on_error != "drop":
                raise
            course.fail(Failure.INFRASTRUCTURE, error)
        except (DataError, EngineRequestError) as error:  # another attempt would come to the same
            if setting.config.on_error != "drop":
                raise
            course.fail(Failure.DATA, error)
        return replace(course.finish(), num_retries=attempt)
    raise AssertionError("unreachable: the loop has no end")


async def run_episode_group(
    policy: AgentPolicy,
    environment_factory: EnvironmentFactory | EpisodeSetting,
    prompt: Prompt,
    n: int,
    config: EpisodeConfig | None = None,
    *,
    seed: int = 0,
    num_greedy: int = 0,
    partial: tuple[Sample, ...] = (),
) -> tuple[Episode | None, ...]:
    """The episodes of one prompt, in parallel, from the same first state.

    Args:
        n: that are trained on.
        num_greedy: further ones in which the policy acts greedily: baselines, with metadata trainable = False.
        partial: samples of an earlier call; those that are not PENDING or ABORTED are left out: None stands in their places.
        environment_factory, config, seed: see run_episode.

    Returns: in the order of their numbers, whichever ended first; None for an episode that was interrupted, and for those left out.
    Raises: as run_episode, the first failure alone.
    """
    setting = create_setting(environment_factory, config, seed)
    frame = create_pending_group(prompt, n, num_baseline=num_greedy)
    episodes: list[Episode | None] = [None] * len(frame)
    conversation = None if _drops(setting) else create_conversation_format(policy, prompt, setting)

    async def run(k: int) -> None:
        try:
            episodes[k] = await run_episode(policy, setting, prompt, sample_number=k, pending=frame[k], conversation=conversation)
        except EpisodeInterrupted as error:
            _logger.debug("%s was interrupted: %s", describe_sample(frame[k]), error)

    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            for k in range(len(frame)):
                if not partial or partial[k].status in (Status.PENDING, Status.ABORTED):
                    nursery.start_soon(run, k)
    return tuple(episodes)


def _drops(setting: EpisodeSetting) -> bool:
    """Whether a template that cannot be used must be found in each episode, where it is counted as its failure."""
    return setting.config.on_error == "drop"


def create_setting(environment_factory: EnvironmentFactory | EpisodeSetting, config: EpisodeConfig | None, seed: int) -> EpisodeSetting:
    """The setting itself, or one of a factory, a config (None = EpisodeConfig()) and a seed."""
    if isinstance(environment_factory, EpisodeSetting):
        assert config is None, "an EpisodeSetting has a config of its own"
        return environment_factory
    return EpisodeSetting(environment_factory=environment_factory, config=config or EpisodeConfig(), seed=seed)
