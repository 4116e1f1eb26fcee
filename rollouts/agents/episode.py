"""Course of one episode: policy and environment are asked in turn, and transcript and steps are recorded. See agents/run.py."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.policies import ActionRequest, AgentAction, AgentPolicy
from rollouts.agents.setting import EpisodeSetting, ask_environment, create_conversation_format, describe_observation, open_conversation
from rollouts.chat.formats import ConversationFormat
from rollouts.chat.transcript import Transcript, add_action, add_messages, begin_transcript, describe_turn, find_kept, note_messages
from rollouts.data.samples import describe_sample
from rollouts.environments.calls import open_environment, reset_environment, step_environment
from rollouts.environments.observations import copy_json, find_non_json, observation_to_json, observation_to_messages
from rollouts.environments.protocol import Environment, EnvironmentStep
from rollouts.errors import DataError, EngineContextError, redact
from rollouts.generation.single_turn import make_request_id
from rollouts.outcomes import EpisodeOutcome, EpisodeStep, Failure, StopReason
from rollouts.seeds import derive_seed
from rollouts.steps import StepData, Steps, Trajectory
from rollouts.types import LogProbKind, Message, Prompt, Sample, Status


@dataclass(frozen=True, kw_only=True)
class Episode:
    """An episode that has ended."""

    sample: Sample  # FAILED if the episode was dropped; without tokens if the policy gives text only
    outcome: EpisodeOutcome  # the same as sample.episode
    steps: Steps
    num_retries: int = 0  # failed attempts before this one (EpisodeConfig.on_error "retry")

    @property
    def messages(self) -> tuple[Message, ...]:
        """Whole conversation, including the last messages, which no model was shown."""
        return self.sample.messages or ()

    @property
    def stop_reason(self) -> StopReason:
        """Reason for the end of the episode."""
        return self.outcome.stop_reason

    @property
    def failure(self) -> Failure | None:
        """Cause of a failure; None = nothing went wrong."""
        return self.outcome.failure

    @property
    def error(self) -> str | None:
        """Description of the failure."""
        return self.outcome.error

    @property
    def total_reward(self) -> float:
        """Sum of the environment's rewards."""
        return self.outcome.environment_reward

    @property
    def trajectory(self) -> Trajectory:
        """States, actions and rewards, for rewards and environments that work without tokens."""
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
        self._truncated_sampling = False  # whether any action was sampled with truncation
        self._log_prob_kind: LogProbKind = "sampled"  # kind of the last action whose kind is not the default
        self._policy_metadata: dict[str, Any] = {}
        self._cuts: list[bool] = []  # one for each action: whether it reached its token budget
        self._calls: dict[int, tuple[Mapping[str, Any], ...]] = {}  # calls of assistant messages, by place, hidden from the template

    @property
    def _messages(self) -> tuple[Message, ...]:
        """Conversation with the tool calls that the environment has found in it."""
        calls = self._calls
        return tuple(
            replace(message, tool_calls=calls[k]) if calls.get(k) else message for k, message in enumerate(self._transcript.messages)
        )

    async def run(self) -> None:
        """Play the episode to its end. Raises the errors of environment, data and policy."""
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
        """Reset the environment and begin the conversation. Returns the first observation."""
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
        """Return the tokens that max_context leaves for the next action; None = no limit."""
        most = self._config.max_context
        return None if most is None else most - len(self._transcript.context)

    async def _act(self) -> AgentAction | None:
        """Ask for the next action and add it to the transcript. Returns None if the context has no room for it."""
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
            greedy=not self._pending.trainable,
        )
        try:
            action = await self._policy.get_action(request)
        except EngineContextError as error:
            if not self._steps:
                raise
            self._steps[-1] = replace(self._steps[-1], is_done=True)
            self._stop_reason, self._error = StopReason.CONTEXT, redact(str(error))
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
        self._transcript = add_action(
            transcript,
            self._conversation,
            action.tokens or (),
            action.log_probs,
            action.versions,
            action.routed_experts,
            find_kept(action.kept_tokens, len(action.tokens or ()), is_cut=action.truncated_sampling),
            text=action.text,
        )
        assert self._temperature in (None, action.temperature), f"temperatures {self._temperature} and {action.temperature} in one episode"
        self._temperature = action.temperature
        self._truncated_sampling = self._truncated_sampling or action.truncated_sampling
        self._log_prob_kind = self._log_prob_kind if action.log_prob_kind == "sampled" else action.log_prob_kind
        self._policy_metadata.update(action.metadata)
        return action

    def _note_step(self, environment: Environment, observation: Any, action: AgentAction, given: Any, step: EnvironmentStep) -> None:
        """Record the step, determine whether it was the last one, and add its observation to the conversation."""
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
                action_message=self._transcript.actions[-1],
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
        """End the episode as failed, to be dropped."""
        self._stop_reason, self._failure, self._error = StopReason.ERROR, failure, redact(f"{type(error).__name__}: {error}")
        _logger.warning("%s failed (%s): %s", describe_sample(self._pending), failure.value, error)

    def finish(self) -> Episode:
        """Return the ended episode."""
        assert self._stop_reason is not None, "the episode has not ended"
        transcript, steps = self._transcript, tuple(self._steps)
        is_cut = self._config.cut_is_truncated and self._cuts[-1:] == [True]
        reward = sum(step.base_reward or 0.0 for step in steps)
        failed = self._stop_reason is StopReason.ERROR
        outcome = EpisodeOutcome(
            stop_reason=self._stop_reason,
            environment_reward=reward,
            steps=tuple(_summarize_step(step) for step in steps),
            num_cut_actions=sum(self._cuts),
            num_reformatted=transcript.num_reformatted,
            failure=self._failure,
            error=self._error,
        )
        sample = replace(
            self._pending,
            tokens=transcript.tokens,
            loss_mask=transcript.loss_mask,
            rollout_log_probs=transcript.log_probs,
            weight_versions=transcript.versions,
            routed_experts=transcript.routed_experts,
            kept_tokens=transcript.cut_tokens,
            response="\n".join(step.raw_policy_output for step in steps),
            reward=None if failed else reward,
            status=_status_of(self._stop_reason, is_cut=is_cut),
            temperature=1.0 if self._temperature is None else self._temperature,
            truncated_sampling=self._truncated_sampling,
            log_prob_kind=self._log_prob_kind,
            turns=transcript.turns,
            context_starts=transcript.context_starts,
            messages=self._messages,
            action_messages=tuple(transcript.actions),
            episode=outcome,
            metadata={**self._pending.metadata, **self._policy_metadata},
        )
        _logger.info(
            "episode of %s: %d steps, ended by %s, paid %g by its environment%s",
            describe_sample(sample),
            len(steps),
            self._stop_reason.value,
            reward,
            f", failure {self._failure.value}: {self._error or 'see its steps'}" if self._failure else "",
        )
        return Episode(sample=sample, outcome=outcome, steps=steps)


_logger = logging.getLogger(__name__)


def _status_of(reason: StopReason, *, is_cut: bool) -> Status:
    if reason is StopReason.ERROR:
        return Status.FAILED
    whole = (StopReason.DONE, StopReason.AGENT, StopReason.REGEX)
    return Status.COMPLETED if reason in whole and not is_cut else Status.TRUNCATED


def _find_stop(config: EpisodeConfig, done: bool, action: AgentAction, text: str, num_turns: int, num_tokens: int) -> StopReason | None:
    """Return the stop reason after an action, the first in the order of StopReason; None if the episode continues."""
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
    """Return the calls that the environment has found in an action, in the OpenAI form."""
    calls: Any = info.get("tool_calls")
    return tuple(calls) if isinstance(calls, (list, tuple)) and all(isinstance(call, Mapping) for call in calls) else ()


def _summarize_step(step: StepData) -> EpisodeStep:
    return EpisodeStep(
        observation=step.observation_data,
        action=step.action_taken,
        reward=step.base_reward,
        done=step.is_done,
        info=dict(step.step_info),
        value=step.policy_value_estimate,
    )


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
