"""MultiTurnInferenceEngine: conversations with a model, one answer at a time, or a whole episode. Token in, token out.

    chat = MultiTurnInferenceEngine(engine, tokenizer, max_turns=4, system_prompt="Be brief.")
    conversation = chat.start_conversation("What is 2 + 3?")
    conversation = await chat.step(conversation)                     # the model answers
    conversation.reply, conversation.transcript.tokens
    conversation = await chat.step(conversation, "And 4 + 5?")       # a message, and the model's answer to it
    print(chat.format_conversation(conversation))

    episode = await chat.run_episode(GridWorld, prompt)              # an environment speaks in your place

A conversation is a value: a step returns a new one, and the old one can be continued again, with another message or seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.episode import Episode
from rollouts.agents.policies import ActionRequest, AgentAction, EngineAgentPolicy
from rollouts.agents.run import run_episode
from rollouts.agents.setting import EpisodeSetting, create_conversation_format, open_conversation
from rollouts.chat.formats import ConversationFormat
from rollouts.chat.tokenize import Messages, parse_messages
from rollouts.chat.transcript import Transcript, add_action, add_messages, begin_transcript, find_kept
from rollouts.engines.protocol import InferenceEngine
from rollouts.environments.protocol import EnvironmentFactory
from rollouts.errors import DataError, GenerationError
from rollouts.seeds import derive_seed
from rollouts.types import Message, Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Conversation so far."""

    transcript: Transcript
    conversation_format: ConversationFormat
    seed: int = 0  # seed of sampling; answers depend on it, the turn, the messages and the weights only
    last: AgentAction | None = None  # policy action of the last answer

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages."""
        return self.transcript.messages

    @property
    def num_turns(self) -> int:
        """Number of answers of the model."""
        return len(self.transcript.turns)

    @property
    def reply(self) -> str:
        """Last answer; "" = none yet."""
        return (self.messages[self.transcript.actions[-1]].content or "") if self.transcript.actions else ""

    @property
    def awaits_reply(self) -> bool:
        """True if the model is the next to speak."""
        return self.messages[-1].role != "assistant"


class MultiTurnInferenceEngine:
    """Engine and tokenizer as a partner in conversation."""

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        max_turns: int = 8,
        system_prompt: str | None = None,
        *,
        params: SamplingParams | None = None,
        config: EpisodeConfig | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            tokenizer: the engine's.
            max_turns: maximum number of answers of the model in a conversation or an episode; replaces config's.
            system_prompt: system message of each conversation; None = config's.
            params: sampling parameters of each answer.
            config: further limits.
            template_kwargs: arguments of the chat template.
        """
        config = config or EpisodeConfig()
        prompt = config.system_prompt if system_prompt is None else system_prompt
        self._config = replace(config, max_turns=max_turns, system_prompt=prompt)
        self._policy = EngineAgentPolicy(engine, tokenizer, params)
        self._template_kwargs = dict(template_kwargs or {})

    def start_conversation(self, messages: str | Messages, *, seed: int = 0) -> Conversation:
        """Return a conversation before the model's first answer.

        Args:
            messages: first messages; a text is a user's.
            seed: seed of sampling.

        Raises: DataError if the tokenizer's chat template cannot be used, or the last message is the assistant's.
        """
        opening = open_conversation(self._parse(messages), "", "", "", self._config)
        if opening[-1].role == "assistant":
            raise DataError(
                f"the first {len(opening)} messages end with one of the assistant, so there is nothing to answer: put one of the user "
                "behind it"
            )
        setting = EpisodeSetting(environment_factory=_no_environment, config=self._config, template_kwargs=self._template_kwargs)
        conversation_format = create_conversation_format(self._policy, Prompt(content=opening), setting)
        assert conversation_format is not None, "the policy has a tokenizer"
        transcript = begin_transcript(conversation_format, opening)
        return Conversation(transcript=transcript, conversation_format=conversation_format, seed=seed)

    async def step(self, conversation: Conversation, messages: str | Messages | None = None) -> Conversation:
        """Return the conversation with the model's next answer.

        Args:
            messages: messages before the answer; a text is a user's; None = none.

        Raises: GenerationError if the conversation has reached a limit of its EpisodeConfig (max_turns, max_tokens, max_context, or
            stop_regex in the last answer), or it is not the model's turn to speak; DataError if the template rewrites history (see
            EpisodeConfig.on_rewrite); errors of the engine.
        """
        config, transcript = self._config, conversation.transcript
        self._check_open(conversation)
        if messages is not None and conversation.awaits_reply:
            raise GenerationError("a message was given, but the model has yet to answer the one before it: call step without a message")
        if messages is None and not conversation.awaits_reply:
            raise GenerationError("the model spoke last: give step the message that it is to answer")
        if messages is not None:
            may_branch = config.on_rewrite == "branch"
            added = self._parse(messages)
            transcript = add_messages(transcript, conversation.conversation_format, added, may_branch=may_branch)
        budget = None if config.max_tokens is None else config.max_tokens - transcript.num_sampled
        room = None if config.max_context is None else config.max_context - len(transcript.context)
        if room is not None and room < 1:
            raise GenerationError(
                f"the conversation has {len(transcript.context)} tokens, which leaves no room in max_context, {config.max_context}: raise "
                "it, or begin another conversation"
            )
        limits = [limit for limit in (config.max_turn_tokens, budget, room) if limit is not None]
        request = ActionRequest(
            messages=transcript.messages,
            tokens=transcript.context,
            max_tokens=min(limits, default=None),
            seed=derive_seed(conversation.seed, conversation.num_turns),
            turn=conversation.num_turns,
            end_of_turn=conversation.conversation_format.end_of_turn,
        )
        action = await self._policy.get_action(request)
        transcript = add_action(
            transcript,
            conversation.conversation_format,
            action.tokens or (),
            action.log_probs,
            action.versions,
            action.routed_experts,
            find_kept(action.kept_tokens, len(action.tokens or ()), is_cut=action.truncated_sampling),
            text=action.text,
        )
        return replace(conversation, transcript=transcript, last=action)

    async def run_episode(
        self, environment_factory: EnvironmentFactory, prompt: Prompt | None = None, *, seed: int = 0, sample_number: int = 0
    ) -> Episode:
        """Play an episode in an environment. prompt: None = the environment writes all messages. See agents.run.run_episode."""
        setting = EpisodeSetting(
            environment_factory=environment_factory, config=self._config, seed=seed, template_kwargs=self._template_kwargs
        )
        return await run_episode(self._policy, setting, prompt or Prompt(content=""), sample_number=sample_number)

    def format_conversation(self, conversation: Conversation | Sequence[Message]) -> str:
        """Return a conversation for people: each message begins a line with its role."""
        messages = conversation.messages if isinstance(conversation, Conversation) else conversation
        return "\n".join(f"{message.role}: {message.content or ''}" for message in messages)

    def _check_open(self, conversation: Conversation) -> None:
        """Raise GenerationError if the conversation has reached a limit."""
        config, num_turns, num_tokens = self._config, conversation.num_turns, conversation.transcript.num_sampled
        if num_turns >= config.max_turns:
            raise GenerationError(f"the conversation has {num_turns} answers, and max_turns is {config.max_turns}: raise it")
        if config.max_tokens is not None and num_tokens >= config.max_tokens:
            raise GenerationError(f"the answers have {num_tokens} tokens together, and max_tokens is {config.max_tokens}: raise it")
        if num_turns and config.stop_regex is not None and re.search(config.stop_regex, conversation.reply):
            raise GenerationError(
                f"stop_regex, {config.stop_regex!r}, is found in the last answer, {conversation.reply!r:.100}: it ends the conversation"
            )

    def _parse(self, messages: str | Messages) -> tuple[Message, ...]:
        return (Message(role="user", content=messages),) if isinstance(messages, str) else parse_messages(messages)


def _no_environment() -> Any:
    raise AssertionError("a conversation has no environment")
