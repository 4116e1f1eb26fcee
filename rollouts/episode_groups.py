"""Episodes as the rollouts of the RL loops: a generate function for RolloutConfig, and a workflow for the same.

    generate_fn = create_episode_generate_fn(engines, tokenizer, SamplingParams(max_tokens=32), GridWorld, EpisodeConfig(max_turns=8))
    config = RolloutConfig(batch_size=8, n_samples_per_prompt=4, generate_fn=generate_fn)

The reward of a sample is the sum of its environment's rewards, unless RolloutConfig.reward_fn gives another. An episode that a weight
sync or checkpoint interrupts is begun anew, with the same seeds; those of its group that had ended stay as they are. So episodes that take
longer than the time between two syncs need engines that change weights under them: AsyncConfig.in_flight="continue", the default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollouts.agent_policies import AgentPolicy, EngineAgentPolicy, WantsStop
from rollouts.engines.protocol import InferenceEngine
from rollouts.environments.protocol import EnvironmentConfig, EnvironmentFactory
from rollouts.episode_config import EpisodeConfig, Failure
from rollouts.episode_openings import observation_key
from rollouts.episodes import EpisodeSetting, create_setting, run_episode_group
from rollouts.errors import ConfigError
from rollouts.samples import create_pending_group
from rollouts.types import Group, Prompt, SamplingParams, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def create_episode_generate_fn(
    engines: Sequence[InferenceEngine],
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    environment_factory: EnvironmentFactory,
    config: EpisodeConfig | None = None,
    *,
    seed: int = 0,
    template_kwargs: Mapping[str, Any] | None = None,
    num_greedy: int = 0,
    wants_stop: WantsStop | None = None,
    state_key: Callable[[Any], str | None] = observation_key,
    create_environment_config: Callable[[Prompt, int], EnvironmentConfig] | None = None,
) -> EpisodeGenerateFn:
    """The generate function of episodes, for RolloutConfig.generate_fn.

    Args:
        engines: at least one. The prompt with index i goes to engine i % len(engines).
        tokenizer: the engines'.
        params: of each action; EpisodeConfig has the limits of the whole.
        environment_factory: makes an environment for each episode.
        seed: of environments and sampling.
        template_kwargs: for the chat template, for example {"enable_thinking": False}.
        num_greedy: episodes beside the n of each call in which the model acts greedily; the same as RolloutConfig.n_baseline_samples.
        wants_stop: of the text of an action, whether the model has finished; None = environments and limits end episodes.
        state_key, create_environment_config: see EpisodeSetting.

    Returns: async generate_fn(prompt, n, partial=()) -> Group.
    Raises: ConfigError if there is no engine.
    """
    policies = tuple(EngineAgentPolicy(engine, tokenizer, params, wants_stop=wants_stop) for engine in engines)
    setting = EpisodeSetting(
        environment_factory=environment_factory,
        config=config or EpisodeConfig(),
        seed=seed,
        template_kwargs=dict(template_kwargs or {}),
        state_key=state_key,
        create_environment_config=create_environment_config,
    )
    return create_policy_generate_fn(policies, setting, num_greedy=num_greedy)


def create_policy_generate_fn(policies: Sequence[AgentPolicy], setting: EpisodeSetting, *, num_greedy: int = 0) -> EpisodeGenerateFn:
    """create_episode_generate_fn for policies of your own. The prompt with index i is played by policy i % len(policies).

    Raises: ConfigError if there is no policy.
    """
    return EpisodeGenerateFn(policies, setting, num_greedy=num_greedy)


class EpisodeGenerateFn:
    """A generate function of episodes, which counts what failed in them."""

    def __init__(
        self, policies: Sequence[AgentPolicy], setting: EpisodeSetting, *, num_greedy: int = 0, counts: Counter[str] | None = None
    ) -> None:
        """Args and Raises: see create_policy_generate_fn. counts: where it counts; None = a counter of its own."""
        if not policies:
            raise ConfigError("there are no engines or policies to act with (found 0): pass at least one")
        self._policies, self._setting, self._num_greedy = tuple(policies), setting, num_greedy
        self._counts: Counter[str] = Counter() if counts is None else counts

    async def __call__(self, prompt: Prompt, n: int, partial: Group = ()) -> Group:
        """The group of a prompt; see generate_fns."""
        policy = self._policies[prompt.index % len(self._policies)]
        frame = partial or create_pending_group(prompt, n, num_baseline=self._num_greedy)
        episodes = await run_episode_group(policy, self._setting, prompt, n, num_greedy=self._num_greedy, partial=partial)
        failed = [episode.failure for episode in episodes if episode is not None and episode.sample.status is Status.FAILED]
        self._counts.update(f"num_episodes_failed_{failure.value}" for failure in failed if failure is not None)
        self._counts["num_episodes_retried"] += sum(episode is not None and episode.num_retries > 0 for episode in episodes)
        return tuple(sample if episode is None else episode.sample for sample, episode in zip(frame, episodes, strict=True))

    def take_counts(self) -> dict[str, int]:
        """Episodes since the last call that failed through infrastructure and through data, and so dropped their groups; and those that
        ended well after attempts that failed (EpisodeConfig.on_error is "retry")."""
        return _take(self._counts)


_COUNTED = (*(f"num_episodes_failed_{failure.value}" for failure in (Failure.INFRASTRUCTURE, Failure.DATA)), "num_episodes_retried")


def _take(counts: Counter[str]) -> dict[str, int]:
    taken = {name: counts[name] for name in _COUNTED}
    counts.clear()
    return taken


class EpisodeWorkflow:
    """Episodes as a workflow: an object with arun_episode(engine, data), for create_workflow_generate_fn and what else takes workflows."""

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
            environment_factory: or an EpisodeSetting, which then has config and seed as well.
            tokenizer, params, config, seed, num_greedy, wants_stop: see create_episode_generate_fn, whose samples are the same.
        """
        self._tokenizer, self._params, self._wants_stop, self._num_greedy = tokenizer, params, wants_stop, num_greedy
        self._setting = create_setting(environment_factory, config, seed)
        self._counts: Counter[str] = Counter()

    def take_counts(self) -> dict[str, int]:
        """See EpisodeGenerateFn.take_counts; the generate functions of create_workflow_generate_fn pass it on to the metrics."""
        return _take(self._counts)

    async def arun_episode(self, engine: InferenceEngine, data: Any) -> Group:
        """The group of a prompt. data: an EpisodeData."""
        policy = EngineAgentPolicy(engine, self._tokenizer, self._params, wants_stop=self._wants_stop)
        generate = EpisodeGenerateFn((policy,), self._setting, num_greedy=self._num_greedy, counts=self._counts)
        return await generate(data.prompt, data.n_samples, data.partial)
