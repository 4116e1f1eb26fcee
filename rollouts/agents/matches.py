"""Matches: several roles act in one environment, each with its policy, and each role's part is an episode of its own.

    class Signals:                                    # the speaker is shown a digit and writes a letter, the listener must guess the digit
        def reset(self, config):
            self.digit = random.Random(config.seed).randrange(3)
            return "speaker", str(self.digit)
        def step(self, role, action):
            if role == "speaker":
                return "listener", action[:1], {}, {}
            right = float(action[:1] == str(self.digit))
            return None, "", {"speaker": right, "listener": right}, {}
        def get_prompt_prefix(self, role):
            return role + ": "

    policy = EngineAgentPolicy(engine, tokenizer, SamplingParams(max_tokens=1))
    episodes = await run_match({"speaker": policy, "listener": policy}, MatchSetting(environment_factory=Signals), prompt)
    generate_fn = create_match_generate_fn({"speaker": policy, "listener": policy}, MatchSetting(environment_factory=Signals))

- Self-play gives the same policy to several roles. A role whose policy is not trained, such as a frozen opponent or a script, is left out
  of `trained`: it acts, and its samples are dropped.
- The sample of a role has its tokens, turns and rewards alone, and Sample.subgroup is the role: advantages compare it with the samples of
  the same role in the other matches of its prompt.
- Other trees of groups are made in the same way: `subgroup` of samples from a generate function of one's own, for example the number of the
  plan that workers carry out, is what they are compared within.
- A role that reaches a limit of EpisodeConfig leaves, which ends the match: the others are given no further turn, and are TRUNCATED, too.
- The estimators that compare within a group need at least two matches of a prompt. For ReMax, `num_greedy` further matches are baselines,
  in which the trained roles act greedily.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import trio

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.episode import Course, Episode
from rollouts.agents.policies import AgentPolicy
from rollouts.agents.setting import EpisodeSetting, observation_key
from rollouts.data.samples import create_pending_group, describe_sample
from rollouts.environments.calls import open_match_environment, reset_match, step_match
from rollouts.environments.protocol import EnvironmentConfig, EnvironmentStep, MultiAgentEnvironment, MultiAgentFactory
from rollouts.errors import ConfigError, DataError, EngineRequestError, EpisodeError, EpisodeInterrupted, SandboxError, raise_single_errors
from rollouts.outcomes import EpisodeOutcome, Failure, StopReason
from rollouts.types import Group, Prompt, Sample, Status

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MatchSetting:
    """Settings that the matches of a run share."""

    environment_factory: MultiAgentFactory
    config: EpisodeConfig = field(default_factory=EpisodeConfig)  # limits of each role's part; timeout_s is that of the environment's calls
    seed: int = 0  # seed of environments and of sampling
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # arguments of the chat template
    # observation before an action -> key, equal for equal states, and config of the environment: see EpisodeSetting
    state_key: Callable[[Any], str | None] = observation_key
    create_environment_config: Callable[[Prompt, int], EnvironmentConfig] | None = None


class _Table:
    """One match: the environment, the role whose turn it is, and what each role has been paid since its last action."""

    def __init__(self, environment: MultiAgentEnvironment, roles: Sequence[str], config: EpisodeConfig) -> None:
        self._environment, self._roles, self._config = environment, roles, config
        self._rewards = dict.fromkeys(roles, 0.0)
        self._turn: str | None = None
        self._observation: Any = ""
        self._is_over = False
        self._changed = trio.Event()
        self.left: str | None = None  # role that ended the match by its limits

    async def begin(self, config: EnvironmentConfig) -> None:
        """Reset the environment."""
        self._turn, self._observation = await reset_match(
            self._environment, config, self._roles, timeout_s=self._config.timeout_s, in_thread=self._config.in_thread
        )

    async def wait_turn(self, role: str) -> bool:
        """Wait for a role's first turn. Returns False if the match has ended without one."""
        await self._wait(role)
        return not self._is_over

    def look(self) -> Any:
        """Return the observation of the role whose turn it is."""
        return self._observation

    async def act(self, role: str, action: Any) -> EnvironmentStep:
        """Carry out a role's action, and wait for its next turn or the end of the match."""
        assert role == self._turn, f"{role!r} acts, but it is the turn of {self._turn!r}"
        step = await step_match(
            self._environment, role, action, self._roles, timeout_s=self._config.timeout_s, in_thread=self._config.in_thread
        )
        for one, reward in step.rewards.items():
            self._rewards[one] += reward
        self._turn, self._observation, self._is_over = step.role, step.observation, step.role is None
        self._note_change()
        await self._wait(role)
        reward, self._rewards[role] = self._rewards[role], 0.0
        return EnvironmentStep("" if self._is_over else self._observation, reward, self._is_over, step.info)

    def leave(self, role: str) -> None:
        """End the match, unless it has ended: the role takes no further turn."""
        if not self._is_over:
            self._is_over, self.left = True, role
            self._note_change()

    def get_prefix(self, role: str) -> str:
        """Return the text before a role's first observation."""
        return self._environment.get_prompt_prefix(role)

    async def _wait(self, role: str) -> None:
        while not self._is_over and self._turn != role:
            await self._changed.wait()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class _Seat:
    """The match as the environment of one role."""

    def __init__(self, table: _Table, role: str) -> None:
        self._table, self._role = table, role

    async def reset(self, config: EnvironmentConfig) -> Any:
        return self._table.look()

    async def step(self, action: Any) -> EnvironmentStep:
        return await self._table.act(self._role, action)

    def get_state_description(self) -> str:
        return ""

    def get_prompt_prefix(self) -> str:
        return self._table.get_prefix(self._role)


async def run_match(
    policies: Mapping[str, AgentPolicy],
    setting: MatchSetting,
    prompt: Prompt,
    *,
    pending: Mapping[str, tuple[int, Sample]] | None = None,
) -> Mapping[str, Episode]:
    """Play one match.

    Args:
        policies: policy of each role; one object may play several.
        pending: place in the group and Sample to fill, by role; None = those of a group with one match.

    Returns: the episode of each role that has acted, with the role as subgroup of its sample.
    Raises: as run_episode, for any role.
    """
    places = pending or dict(zip(policies, enumerate(create_pending_group(prompt, len(policies))), strict=True))
    config = setting.config
    for attempt in count():
        courses: dict[str, Course] = {}
        table: _Table | None = None
        try:
            with raise_single_errors():
                async with open_match_environment(
                    setting.environment_factory, timeout_s=config.timeout_s, in_thread=config.in_thread
                ) as environment:
                    table = _Table(environment, tuple(policies), config)
                    for role, policy in policies.items():
                        courses[role] = _create_course(policy, setting, prompt, places[role], _Seat(table, role))
                    await table.begin(_settings_of(setting, None).environment_config(prompt))
                    async with trio.open_nursery() as nursery:
                        for role in policies:
                            nursery.start_soon(_play, table, role, courses)
        except (EpisodeError, SandboxError, DataError, EngineRequestError) as error:
            may_retry = isinstance(error, EpisodeError | SandboxError)
            if may_retry and config.on_error == "retry" and attempt < config.max_retries:
                _logger.warning("the match of prompt %d begins again after attempt %d: %s", prompt.index, attempt + 1, error)
                continue
            if config.on_error != "drop":
                raise
            failure = Failure.INFRASTRUCTURE if may_retry else Failure.DATA
            for role in policies:
                course = courses.setdefault(role, _create_course(policies[role], setting, prompt, places[role], None))
                course.fail(failure, error)
            table = None
        episodes = _finish(courses, None if table is None else table.left)
        return {
            role: replace(episode, sample=replace(episode.sample, subgroup=role), num_retries=attempt) for role, episode in episodes.items()
        }
    raise AssertionError("unreachable: the loop has no end")


async def _play(table: _Table, role: str, courses: dict[str, Course]) -> None:
    """Play a role's part, and leave the table. A course that fails ends the match by its error; one without a turn is taken away."""
    if await table.wait_turn(role):
        await courses[role].run()
        table.leave(role)
    else:
        del courses[role]


def _finish(courses: Mapping[str, Course], left: str | None) -> dict[str, Episode]:
    """Return the episodes. Where a role left at a limit, the others were cut as well."""
    episodes = {role: course.finish() for role, course in courses.items()}
    if left is None or episodes[left].sample.status is not Status.TRUNCATED:
        return episodes
    reason = episodes[left].stop_reason
    for role, episode in episodes.items():
        if episode.stop_reason is StopReason.DONE:
            outcome = replace(episode.outcome, stop_reason=reason)
            sample = replace(episode.sample, status=Status.TRUNCATED, episode=outcome)
            episodes[role] = replace(episode, sample=sample, outcome=outcome)
    return episodes


def _create_course(policy: AgentPolicy, setting: MatchSetting, prompt: Prompt, place: tuple[int, Sample], seat: _Seat | None) -> Course:
    number, sample = place
    return Course(policy, _settings_of(setting, seat), prompt, number, sample, None)


def _settings_of(setting: MatchSetting, seat: _Seat | None) -> EpisodeSetting:
    """Return the settings of an episode at a seat, whose calls wait for other roles and have no deadline of their own; None = no seat."""
    return EpisodeSetting(
        environment_factory=lambda: seat,  # pyright: ignore[reportArgumentType]  # None where no episode is played
        config=replace(setting.config, timeout_s=None, in_thread=False),
        seed=setting.seed,
        template_kwargs=setting.template_kwargs,
        state_key=setting.state_key,
        create_environment_config=setting.create_environment_config,
    )


def create_match_generate_fn(
    policies: Mapping[str, AgentPolicy], setting: MatchSetting, *, trained: Sequence[str] | None = None, num_greedy: int = 0
) -> MatchGenerateFn:
    """Create a generate function of matches, for RolloutConfig.generate_fn.

    Args:
        policies: policy of each role.
        trained: roles whose samples are returned; None = all. n_samples_per_prompt is a multiple of their number: n / len(trained) matches
            are played for each prompt, and each role has so many samples to be compared.
        num_greedy: further matches of each prompt in which the trained roles act greedily and the others as always: baselines, with
            trainable = False. RolloutConfig.n_baseline_samples is num_greedy * len(trained); ReMax needs 1.

    Returns: async generate_fn(prompt, n, partial=()) -> Group, match after match, in each the roles in the order of `trained`; greedy
        matches are the last.
    Raises: ConfigError if there is no policy, or a trained role has none.
    """
    return MatchGenerateFn(policies, setting, tuple(policies) if trained is None else tuple(trained), num_greedy)


class MatchGenerateFn:
    """Generate function of matches, with counts of their failures."""

    gives_turns = True

    def __init__(self, policies: Mapping[str, AgentPolicy], setting: MatchSetting, trained: tuple[str, ...], num_greedy: int = 0) -> None:
        """Args and Raises: see create_match_generate_fn."""
        if not policies or not trained:
            raise ConfigError(f"a match has {len(policies)} roles with policies and {len(trained)} that are trained: give at least one")
        strange = [role for role in trained if role not in policies]
        if strange or len(set(trained)) < len(trained):
            raise ConfigError(f"the trained roles are {', '.join(trained)}, expected distinct ones of {', '.join(policies)}")
        assert num_greedy >= 0, f"num_greedy is {num_greedy}, expected at least 0"
        self._policies, self._setting, self._trained, self._num_greedy = dict(policies), setting, trained, num_greedy
        self._frozen = tuple(role for role in policies if role not in trained)
        self._counts: Counter[str] = Counter()

    async def __call__(self, prompt: Prompt, n: int, partial: Group = ()) -> Group:
        """Return the group of a prompt; matches of `partial` with an unfinished sample are played again."""
        num_roles = len(self._trained)
        if n % num_roles:
            raise ConfigError(
                f"n_samples_per_prompt is {n}, but each match gives {num_roles} samples ({', '.join(self._trained)}): set it to a multiple"
            )
        pending = create_pending_group(prompt, n, num_baseline=self._num_greedy * num_roles)
        frame = list(partial or pending)

        async def play(match: int) -> None:
            first = match * num_roles
            places = {role: (first + j, pending[first + j]) for j, role in enumerate(self._trained)}
            for j, role in enumerate(self._frozen):  # numbers behind the group's, so that no request has the id of another
                number = len(pending) + match * len(self._frozen) + j
                places[role] = (number, replace(pending[0], index=number))
            places = {role: places[role] for role in self._policies}
            try:
                episodes = await run_match(self._policies, self._setting, prompt, pending=places)
            except EpisodeInterrupted as error:
                _logger.debug("match %d of prompt %d was interrupted: %s", match, prompt.index, error)
                return
            failed = [episode.failure for episode in episodes.values() if episode.sample.status is Status.FAILED]
            if failed and failed[0] is not None:
                self._counts[f"num_episodes_failed_{failed[0].value}"] += 1
            self._counts["num_episodes_retried"] += any(episode.num_retries > 0 for episode in episodes.values())
            for j, role in enumerate(self._trained):
                frame[first + j] = episodes[role].sample if role in episodes else self._miss(places[role][1], role)

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for match in range(len(pending) // num_roles):
                    own = frame[match * num_roles : (match + 1) * num_roles]
                    if any(sample.status in (Status.PENDING, Status.ABORTED) for sample in own):
                        nursery.start_soon(play, match)
        _logger.debug("%d matches of %s", len(pending) // num_roles, describe_sample(frame[0]))
        return tuple(frame)

    def _miss(self, pending: Sample, role: str) -> Sample:
        """Return a failed sample of a role that never acted. Raises DataError unless such matches are dropped."""
        error = DataError(
            f"a match of prompt {pending.group_index} ended before the first turn of the role {role!r}, so it cannot be trained: "
            "let every trained role act at least once, leave it out of `trained`, or drop such matches (EpisodeConfig(on_error='drop'))"
        )
        if self._setting.config.on_error != "drop":
            raise error
        self._counts[f"num_episodes_failed_{Failure.DATA.value}"] += 1
        outcome = EpisodeOutcome(stop_reason=StopReason.ERROR, failure=Failure.DATA, error=str(error))
        return replace(pending, subgroup=role, status=Status.FAILED, episode=outcome)

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call, see EpisodeGenerateFn.take_counts; a match counts once."""
        names = (*(f"num_episodes_failed_{failure.value}" for failure in (Failure.INFRASTRUCTURE, Failure.DATA)), "num_episodes_retried")
        taken = {name: self._counts[name] for name in names}
        self._counts.clear()
        return taken
