"""Episodes: a policy acts in an environment until something ends it, and the result is one Sample.

    policy = EngineAgentPolicy(engine, tokenizer, SamplingParams(max_tokens=32))
    episode = await run_episode(policy, GridWorld, Prompt(content=""), EpisodeConfig(max_turns=8))
    episode.sample                    # tokens, loss_mask, log-probs and versions of each token, turns, reward, status
    episode.steps, episode.messages, episode.stop_reason

    group = await run_episode_group(policy, GridWorld, prompt, 8, EpisodeConfig())      # from the same first state, in parallel

    generate_fn = create_episode_generate_fn(engines, tokenizer, SamplingParams(max_tokens=32), GridWorld, EpisodeConfig())
    RolloutConfig(generate_fn=generate_fn, batch_size=8, n_samples_per_prompt=4)        # agents/run.py; sync and async loops

- The environment is made anew for each episode, by a factory, and reset with EnvironmentConfig(seed=derive_seed(seed, prompt.index),
  parameters=a copy of prompt.metadata): equal for all episodes of a group.
- The conversation begins with the prompt's messages. The environment's prompt prefix and first observation become part of the last user
  message: prefix, then the prompt's text, then the observation. A prompt whose content is a non-empty text stays plain text, without a
  chat template (EpisodeConfig.chat); Prompt(content="") or content=() leaves everything to the environment.
- The environment is given the text of each action (AgentAction.parsed, if a policy sets it). Its rewards add up to Sample.reward.
- Sample.messages is the whole conversation, Sample.episode the course and the end of the episode (an EpisodeOutcome), and Sample.metadata
  the metadata of the prompt.
- info["tool_calls"] of a step (a list in the OpenAI form) are the calls of the assistant message before it; info["policy_error"] describes
  an action that the environment could not read (a call that is not JSON, an invalid move): such an episode is complete, with failure
  "policy".
- Status: done, agent and regex give COMPLETED, or TRUNCATED if the last action was cut and EpisodeConfig.cut_is_truncated is True;
  max_turns, max_tokens and context give TRUNCATED. Faults of the environment and of the data follow EpisodeConfig.on_error: raised, begun
  again, or FAILED. Errors of an engine are always raised: loops have their own policy for them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import trio

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.episode import Course, Episode
from rollouts.agents.policies import AgentPolicy, EngineAgentPolicy, WantsStop
from rollouts.agents.setting import EpisodeSetting, create_conversation_format
from rollouts.algorithms.gigpo_steps import merge_similar_states
from rollouts.chat.formats import ConversationFormat
from rollouts.data.samples import create_pending_group, describe_sample
from rollouts.engines.protocol import InferenceEngine
from rollouts.environments.protocol import EnvironmentFactory
from rollouts.errors import ConfigError, DataError, EngineRequestError, EpisodeError, EpisodeInterrupted, SandboxError, raise_single_errors
from rollouts.generation.contract import is_finished
from rollouts.outcomes import Failure
from rollouts.types import Group, Prompt, Sample, SamplingParams, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """Play one episode. See the module's docstring.

    Args:
        environment_factory: maker of environments, or an EpisodeSetting, which then has config and seed as well.
        config: limits; None = EpisodeConfig().
        seed: seed of environment and sampling: equal arguments and weights give the same episode.
        sample_number: place in its group, from 0.
        pending: Sample to fill; None = the one of this place in a group of sample_number + 1.
        conversation: format of the conversation; None = create_conversation_format makes it.

    Raises: EpisodeInterrupted if the policy was told to stop; EnvironmentFault, ToolFault, SandboxError, DataError and EngineRequestError
        unless EpisodeConfig.on_error is "drop"; other errors of the policy.
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
        except (DataError, EngineRequestError) as error:  # another attempt would fail in the same way
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
    """Play the episodes of one prompt, in parallel, from the same first state.

    Args:
        n: number of trainable episodes.
        num_greedy: number of further episodes in which the policy acts greedily: baselines, with trainable = False.
        partial: samples of an earlier call; finished and failed ones are left out: None stands in their places.
        environment_factory, config, seed: see run_episode.

    Returns: episodes in the order of their numbers; None for an episode that was interrupted or left out.
    Raises: the first failure, see run_episode.
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
    """Whether each episode checks the template itself, so that an unusable one is the episode's failure."""
    return setting.config.on_error == "drop"


def create_setting(environment: EnvironmentFactory | EpisodeSetting, config: EpisodeConfig | None, seed: int) -> EpisodeSetting:
    """Return the setting itself, or one of a factory, a config (None = EpisodeConfig()) and a seed."""
    if isinstance(environment, EpisodeSetting):
        assert config is None, "an EpisodeSetting has a config of its own"
        return environment
    return EpisodeSetting(environment_factory=environment, config=config or EpisodeConfig(), seed=seed)


def create_episode_generate_fn(
    engines: Sequence[InferenceEngine],
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    environment: EnvironmentFactory | EpisodeSetting,
    config: EpisodeConfig | None = None,
    *,
    seed: int = 0,
    num_greedy: int = 0,
    wants_stop: WantsStop | None = None,
) -> EpisodeGenerateFn:
    """Create the generate function of episodes, for RolloutConfig.generate_fn.

    Args:
        engines: at least one. The prompt with index i goes to engine i % len(engines).
        tokenizer: the engines' tokenizer.
        params: sampling of each action; EpisodeConfig has the limits of the whole.
        environment: makes an environment for each episode; or an EpisodeSetting, which then has config and seed as well.
        seed: seed of environments and sampling.
        num_greedy: greedy episodes in addition to the n of each call; the same as RolloutConfig.n_baseline_samples.
        wants_stop: (text of an action) -> whether the model has finished; None = environments and limits end episodes.

    Returns: async generate_fn(prompt, n, partial=()) -> Group.
    Raises: ConfigError if there is no engine.
    """
    policies = tuple(EngineAgentPolicy(engine, tokenizer, params, wants_stop=wants_stop) for engine in engines)
    return create_policy_generate_fn(policies, create_setting(environment, config, seed), num_greedy=num_greedy)


def create_policy_generate_fn(policies: Sequence[AgentPolicy], setting: EpisodeSetting, *, num_greedy: int = 0) -> EpisodeGenerateFn:
    """Create a generate function of episodes for policies of your own. Policy i % len(policies) plays the prompt with index i.

    Raises: ConfigError if there is no policy.
    """
    return EpisodeGenerateFn(policies, setting, num_greedy=num_greedy)


class EpisodeGenerateFn:
    """Generate function of episodes, with counts of their failures."""

    def __init__(
        self, policies: Sequence[AgentPolicy], setting: EpisodeSetting, *, num_greedy: int = 0, counts: Counter[str] | None = None
    ) -> None:
        """Args and Raises: see create_policy_generate_fn. counts: counter of failures; None = a new one."""
        if not policies:
            raise ConfigError("there are no engines or policies to act with (found 0): pass at least one")
        self._policies, self._setting, self._num_greedy = tuple(policies), setting, num_greedy
        self._counts: Counter[str] = Counter() if counts is None else counts

    async def __call__(self, prompt: Prompt, n: int, partial: Group = ()) -> Group:
        """Return the group of a prompt; see generation/contract.py."""
        policy = self._policies[prompt.index % len(self._policies)]
        frame = partial or create_pending_group(prompt, n, num_baseline=self._num_greedy)
        episodes = await run_episode_group(policy, self._setting, prompt, n, num_greedy=self._num_greedy, partial=partial)
        failed = [episode.failure for episode in episodes if episode is not None and episode.sample.status is Status.FAILED]
        self._counts.update(f"num_episodes_failed_{failure.value}" for failure in failed if failure is not None)
        self._counts["num_episodes_retried"] += sum(episode is not None and episode.num_retries > 0 for episode in episodes)
        group = tuple(sample if episode is None else episode.sample for sample, episode in zip(frame, episodes, strict=True))
        if self._setting.similarity is None or not is_finished(group):  # the first keys depend on all samples of the group
            return group
        return merge_similar_states(group, threshold=self._setting.similarity)

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call: episodes that failed through infrastructure and through data, which dropped their
        groups; and episodes that ended well after failed attempts (EpisodeConfig.on_error "retry")."""
        return _take(self._counts)


_COUNTED = (*(f"num_episodes_failed_{failure.value}" for failure in (Failure.INFRASTRUCTURE, Failure.DATA)), "num_episodes_retried")


def _take(counts: Counter[str]) -> dict[str, int]:
    taken = {name: counts[name] for name in _COUNTED}
    counts.clear()
    return taken


class EpisodeWorkflow:
    """Episodes as a workflow: an object with arun_episode(engine, data), for create_workflow_generate_fn."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        environment_factory: EnvironmentFactory | EpisodeSetting,
        config: EpisodeConfig | None = None,
        *,
        seed: int = 0,
        num_greedy: int = 0,
        wants_stop: WantsStop | None = None,
    ) -> None:
        """
        Args:
            environment_factory: maker of environments, or an EpisodeSetting, which then has config and seed as well.
            tokenizer, params, config, seed, num_greedy, wants_stop: see create_episode_generate_fn, whose samples are the same.
        """
        self._tokenizer, self._params, self._wants_stop, self._num_greedy = tokenizer, params, wants_stop, num_greedy
        self._setting = create_setting(environment_factory, config, seed)
        self._counts: Counter[str] = Counter()

    def take_counts(self) -> dict[str, int]:
        """Return the counts of EpisodeGenerateFn.take_counts; create_workflow_generate_fn passes them on to the metrics."""
        return _take(self._counts)

    async def arun_episode(self, engine: InferenceEngine, data: Any) -> Group:
        """Return the group of a prompt. data: a WorkflowData."""
        policy = EngineAgentPolicy(engine, self._tokenizer, self._params, wants_stop=self._wants_stop)
        generate = EpisodeGenerateFn((policy,), self._setting, num_greedy=self._num_greedy, counts=self._counts)
        return await generate(data.prompt, data.n_samples, data.partial)
