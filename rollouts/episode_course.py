"""The course of one episode: what is asked of policy and environment, in turn, and what is written down of it. See episodes.py."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rollouts.agent_policies import ActionRequest, AgentAction, AgentPolicy
from rollouts.chat_formats import ConversationFormat
from rollouts.environments.calls import open_environment, reset_environment, step_environment
from rollouts.environments.observations import copy_json, find_non_json, observation_to_json, observation_to_messages
from rollouts.environments.protocol import Environment, EnvironmentStep
from rollouts.episode_config import EpisodeConfig, Failure, StopReason
from rollouts.episode_openings import EpisodeSetting, ask_environment, create_conversation_format, describe_observation, open_conversation
from rollouts.errors import DataError, EngineContextError
from rollouts.generation import make_request_id
from rollouts.samples import derive_seed, describe_sample
from rollouts.steps import StepData, Steps, Trajectory
from rollouts.transcripts import Transcript, add_action, add_messages, begin_transcript, describe_turn, note_messages
from rollouts.types import Message, Prompt, Sample, Status


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What came of an episode."""

    sample: Sample  # FAILED where the episode was dropped; without tokens where the policy gives text only
    steps: Steps
    messages: tuple[Message, ...]  # the whole conversation, with what no model was shown any more
    stop_reason: StopReason
    failure: Failure | None = None
    error: str | None = None  # what failed, in words
    total_reward: float = 0.0  # sum of the environment's rewards
    num_retries: int = 0  # attempts before this one, which failed (EpisodeConfig.on_error is "retry")
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  # see the module's docstring

    @property
    def trajectory(self) -> Trajectory:
        """States, actions and rewards, for rewards and environments that know no tokens."""
        return Trajectory.from_steps(self.steps)


class Course:
    """One episode: its transcript, steps and end."""

    def __init__(
        self,
        policy: AgentPolicy,
        setting: EpisodeSetting,
        prompt: Prompt,
        sample_number: int,
        pending: Sample,
        conversation: ConversationFormat | None,
    ) -> None:
        self._policy, self._setting, self._config, self._prompt = policy, setting, setting.config, prompt
        self._sample_number, self._pending, self._conversation = sample_number, pending, conversation
        self._transcript = Transcript()
        self._steps: list[StepData] = []
        self._stop_reason: StopReason | None = None
        self._failure: Failure | None = None
        self._error: str | None = None
        self._temperature: float | None = None
        self._policy_metadata: dict[str, Any] = {}
        self._cuts: list[bool] = []  # of its actions, whether they reached their token budget
        self._action_places: list[int] = []  # of its actions, among the messages: prompts and environments may speak as assistants, too
        self._calls: dict[int, tuple[Mapping[str, Any], ...]] = {}  # of assistant messages, by their places: the template must not see them

    @property
    def _messages(self) -> tuple[Message, ...]:
        """The conversation with the tool calls that the environment has read in it."""
        calls = self._calls
        return tuple(
            replace(message, tool_calls=calls[k]) if calls.get(k) else message for k, message in enumerate(self._transcript.messages)
        )

    async def run(self) -> None:
        """Until something ends it. Raises what fails in it."""
        if self._conversation is None:
            self._conversation = create_conversation_format(self._policy, self._prompt, self._setting)
        config = self._config
        factory = self._setting.environment_factory
        async with open_environment(factory, timeout_s=config.timeout_s, in_thread=config.in_thread) as environment:
            observation = await self._begin(environment)
            while self._stop_reason is None:
                action = await self._act()
                if action is None:
                    return
                text = self._transcript.messages[-1].content or ""
                given = text if action.parsed is None else copy_json(action.parsed)
                state = self._setting.find_state_key(observation)
                step = await step_environment(environment, copy_json(given), timeout_s=config.timeout_s, in_thread=config.in_thread)
                self._transcript = describe_turn(self._transcript, state=state, reward=step.reward)
                self._note_step(environment, observation, action, given, step)
                observation = step.observation

    async def _begin(self, environment: Environment) -> Any:
        """The first observation, with the conversation begun."""
        config = self._config
        observation = await reset_environment(
            environment, self._setting.environment_config(self._prompt), timeout_s=config.timeout_s, in_thread=config.in_thread
        )
        if getattr(environment, "done", False) is True:
            raise DataError(
                f"the environment {type(environment).__name__} is done before the first action (its `done` is True after reset): the "
                "episode is empty. Leave such tasks out"
            )
        messages = open_conversation(
            self._prompt.content,
            ask_environment(environment, "get_prompt_prefix"),
            observation,
            describe_observation(environment, observation),
            self._config,
        )
        self._transcript = begin_transcript(self._conversation, messages)
        room = self._room()
        if room is not None and room < 1:
            raise DataError(
                f"the prompt has {len(self._transcript.context)} tokens, which leaves no room in max_context, {config.max_context}: raise "
                "it, or leave such prompts out"
            )
        return observation

    def _room(self) -> int | None:
        """Tokens that the next action may have by max_context."""
        most = self._config.max_context
        return None if most is None else most - len(self._transcript.context)

    async def _act(self) -> AgentAction | None:
        """The next action, in the transcript; None if the context has no room for it."""
        turn, index = len(self._steps), self._prompt.index
        config, transcript = self._config, self._transcript
        budget = None if config.max_tokens is None else config.max_tokens - transcript.num_sampled
        limits = [limit for limit in (config.max_turn_tokens, budget, self._room()) if limit is not None]
        request = ActionRequest(
            messages=self._messages,
            tokens=transcript.context,
            max_tokens=min(limits, default=None),
            seed=derive_seed(self._setting.seed, index, self._sample_number, turn),
            request_id=f"{make_request_id(index, self._sample_number)}-{turn:04d}",
            turn=turn,
            end_of_turn=None if self._conversation is None else self._conversation.end_of_turn,
            greedy=self._pending.metadata.get("trainable") is False,
        )
        try:
            action = await self._policy.get_action(request)
        except EngineContextError as error:
            if not self._steps:
                raise
            self._steps[-1] = replace(self._steps[-1], is_done=True)
            self._stop_reason, self._error = StopReason.CONTEXT, str(error)
            _logger.debug("%s ends before turn %d: %s", describe_sample(self._pending), turn, error)
            return None
        if self._conversation is not None and not action.tokens:
            raise DataError(
                f"the policy {type(self._policy).__name__} has a tokenizer, but its action has no tokens (text {action.text!r:.100}): an "
                "episode over tokens needs those that were sampled; a policy of text alone has no attribute `tokenizer`"
            )
        fault = find_non_json(action.parsed, "parsed") or find_non_json(action.metadata, "metadata")
        if fault is not None:
            raise DataError(
                f"the policy {type(self._policy).__name__} returned an action whose {fault}, expected JSON values (of NumPy's: .item() or "
                ".tolist()): samples are written to files"
            )
        self._cuts.append(action.was_cut)
        self._action_places.append(len(transcript.messages))
        self._transcript = add_action(
            transcript, self._conversation, action.tokens or (), action.log_probs, action.versions, text=action.text
        )
        assert self._temperature in (None, action.temperature), f"temperatures {self._temperature} and {action.temperature} in one episode"
        self._temperature = action.temperature
        self._policy_metadata.update(action.metadata)
        return action

    def _note_step(self, environment: Environment, observation: Any, action: AgentAction, given: Any, step: EnvironmentStep) -> None:
        """Write the step down, find whether it was the last one, and show the model what it led to where it was not."""
        text = self._transcript.messages[-1].content or ""
        self._calls[len(self._transcript.messages) - 1] = _read_tool_calls(step.info)
        if step.info.get("policy_error"):
            self._failure = Failure.POLICY
        self._stop_reason = _find_stop(self._config, step.done, action, text, len(self._steps) + 1, self._transcript.num_sampled)
        description = "" if self._stop_reason else describe_observation(environment, step.observation)
        role = self._config.observation_role
        messages = observation_to_messages(step.observation, role=role, description=description)
        if self._stop_reason is None:
            messages = messages or (Message(role=role, content=""),)
            may_branch = self._config.on_rewrite == "branch"
            before, self._transcript = (
                self._transcript,
                add_messages(self._transcript, self._conversation, messages, may_branch=may_branch),
            )
            room = self._room()
            if room is not None and room < 1:
                self._stop_reason, self._transcript = StopReason.CONTEXT, note_messages(before, messages)
        else:
            self._transcript = note_messages(self._transcript, messages)
        self._steps.append(
            StepData(
                system_step_index=len(self._steps),
                observation_data=observation_to_json(observation),
                action_taken=given,
                raw_policy_output=text,
                resulting_messages_history=self._messages,
                policy_tokens=action.tokens,
                policy_logprobs=action.log_probs if action.tokens else None,
                policy_value_estimate=action.value,
                is_done=self._stop_reason is not None,
                step_info=step.info,
                base_reward=step.reward,
                sample_index=self._pending.index,
                group_index=self._pending.group_index,
            )
        )
        _log_step(self._pending, self._steps[-1])

    def fail(self, failure: Failure, error: Exception) -> None:
        """It cannot go on, and is to be dropped."""
        self._stop_reason, self._failure, self._error = StopReason.ERROR, failure, f"{type(error).__name__}: {error}"
        _logger.warning("%s failed (%s): %s", describe_sample(self._pending), failure.value, error)

    def finish(self) -> Episode:
        """What came of it."""
        assert self._stop_reason is not None, "the episode has not ended"
        transcript, steps = self._transcript, tuple(self._steps)
        is_cut = self._config.cut_is_truncated and self._cuts[-1:] == [True]
        reward = sum(step.base_reward or 0.0 for step in steps)
        failed = self._stop_reason is StopReason.ERROR
        metadata: dict[str, Any] = {
            "messages": [message.to_dict() for message in self._messages],
            "stop_reason": self._stop_reason.value,
            "num_turns": len(steps),
            "num_cut_actions": sum(self._cuts),
            "action_messages": list(self._action_places),
            "environment_reward": reward,
            "failure": None if self._failure is None else self._failure.value,
            "steps": [_summarize_step(step) for step in steps],
        }
        if self._error is not None:
            metadata["error"] = self._error
        if transcript.num_reformatted:
            metadata["num_reformatted"] = transcript.num_reformatted
        sample = replace(
            self._pending,
            tokens=transcript.tokens,
            loss_mask=transcript.loss_mask,
            rollout_log_probs=transcript.log_probs,
            weight_versions=transcript.versions,
            response="\n".join(step.raw_policy_output for step in steps),
            reward=None if failed else reward,
            status=_status_of(self._stop_reason, is_cut=is_cut),
            temperature=1.0 if self._temperature is None else self._temperature,
            turns=transcript.turns,
            context_starts=transcript.context_starts,
            metadata={**self._pending.metadata, **self._policy_metadata, **metadata},
        )
        episode = Episode(
            sample=sample,
            steps=steps,
            messages=self._messages,
            stop_reason=self._stop_reason,
            failure=self._failure,
            error=self._error,
            total_reward=reward,
            metadata=metadata,
        )
        _logger.info(
            "episode of %s: %d steps, ended by %s, paid %g by its environment%s",
            describe_sample(sample),
            len(steps),
            self._stop_reason.value,
            reward,
            f", failure {self._failure.value}: {self._error or 'see its steps'}" if self._failure else "",
        )
        return episode


_logger = logging.getLogger(__name__)


def _status_of(reason: StopReason, *, is_cut: bool) -> Status:
    if reason is StopReason.ERROR:
        return Status.FAILED
    whole = (StopReason.DONE, StopReason.AGENT, StopReason.REGEX)
    return Status.COMPLETED if reason in whole and not is_cut else Status.TRUNCATED


def _find_stop(config: EpisodeConfig, done: bool, action: AgentAction, text: str, num_turns: int, num_tokens: int) -> StopReason | None:
    """What ends the episode after an action that was carried out, in the order of StopReason."""
    ends = (
        (StopReason.DONE, done),
        (StopReason.AGENT, action.wants_stop),
        (StopReason.REGEX, config.stop_regex is not None and re.search(config.stop_regex, text) is not None),
        (StopReason.MAX_TURNS, num_turns >= config.max_turns),
        (StopReason.MAX_TOKENS, config.max_tokens is not None and num_tokens >= config.max_tokens),
        (StopReason.CONTEXT, action.fills_context),
    )
    return next((reason for reason, applies in ends if applies), None)


def _read_tool_calls(info: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The calls that the environment has found in an action, in the OpenAI form."""
    calls: Any = info.get("tool_calls")
    return tuple(calls) if isinstance(calls, (list, tuple)) and all(isinstance(call, Mapping) for call in calls) else ()


def _summarize_step(step: StepData) -> dict[str, Any]:
    return {
        "observation": step.observation_data,
        "action": step.action_taken,
        "reward": step.base_reward,
        "done": step.is_done,
        "info": dict(step.step_info),
        "value": step.policy_value_estimate,
    }


def _log_step(sample: Sample, step: StepData) -> None:
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    _logger.debug(
        "%s, step %d: observation %r; action %r, written as %r; log-probs %s; value %s; reward %s; done %s; info %s; messages %s",
        describe_sample(sample),
        step.system_step_index,
        step.observation_data,
        step.action_taken,
        step.raw_policy_output,
        None if step.policy_logprobs is None else [round(x, 4) for x in step.policy_logprobs],
        step.policy_value_estimate,
        step.base_reward,
        step.is_done,
        dict(step.step_info),
        [message.to_dict() for message in step.resulting_messages_history],
    )
