"""What the episodes of a run have in common, and how one begins: what the model is told first, and by which key a state is known."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollouts.agent_policies import AgentPolicy
from rollouts.chat_formats import ConversationFormat, create_chat_format, create_text_format
from rollouts.environments.observations import are_messages, copy_json, observation_to_json, observation_to_messages
from rollouts.environments.protocol import Environment, EnvironmentConfig, EnvironmentFactory
from rollouts.episode_config import EpisodeConfig
from rollouts.errors import DataError, EnvironmentFault, locate_error
from rollouts.gigpo import hash_observation
from rollouts.samples import derive_seed
from rollouts.types import Message, Prompt, PromptContent


def observation_key(observation: Any) -> str:
    """A short key that is equal for equal observations: a hash of their canonical JSON, see gigpo.hash_observation."""
    return hash_observation(observation_to_json(observation))


@dataclass(frozen=True, kw_only=True)
class EpisodeSetting:
    """What the episodes of a run have in common."""

    environment_factory: EnvironmentFactory
    config: EpisodeConfig = field(default_factory=EpisodeConfig)
    seed: int = 0  # of environments and of sampling, keyed by prompt, sample and turn
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for the chat template
    # of an observation before an action, equal for equal states: Turn.state, for algorithms that compare steps (GiGPO)
    state_key: Callable[[Any], str | None] = observation_key
    # of a copy of the prompt and the seed of its environments; None = EnvironmentConfig(seed=seed, parameters=prompt.metadata)
    create_environment_config: Callable[[Prompt, int], EnvironmentConfig] | None = None

    def environment_config(self, prompt: Prompt) -> EnvironmentConfig:
        """What an environment of a prompt is reset with. Its metadata are copies: an environment may do with them what it likes.

        Raises: DataError for metadata that cannot be copied.
        """
        seed = derive_seed(self.seed, prompt.index)
        try:
            metadata = {key: copy.deepcopy(value) for key, value in prompt.metadata.items()}
        except Exception as error:  # values of the user's own classes copy themselves
            raise DataError(
                f"the metadata of the prompt with index {prompt.index} cannot be copied for its environment ({type(error).__name__}: "
                f"{error}): give values that copy.deepcopy takes, best JSON values"
            ) from error
        if self.create_environment_config is not None:
            return self.create_environment_config(replace(prompt, metadata=metadata), seed)
        return EnvironmentConfig(seed=seed, parameters=metadata)

    def find_state_key(self, observation: Any) -> str | None:
        """state_key of an observation. Raises DataError if it raises, or gives neither a text nor None."""
        try:
            key: Any = self.state_key(copy_json(observation))
        except DataError:
            raise
        except Exception as error:  # the function is the user's
            raise DataError(
                f"the state_key of the episodes raised {type(error).__name__} for the observation {observation!r:.200} "
                f"({locate_error(error)}): {error}"
            ) from error
        if key is not None and not isinstance(key, str):
            raise DataError(
                f"the state_key of the episodes gave {key!r:.100} ({type(key).__name__}) for the observation {observation!r:.200}, "
                "expected a text that is equal for equal states, or None"
            )
        return key


def create_conversation_format(policy: AgentPolicy, prompt: Prompt, setting: EpisodeSetting) -> ConversationFormat | None:
    """How the conversations of a prompt's episodes become tokens; None where the policy has no tokenizer.

    Raises: DataError if the tokenizer's chat template cannot be used, see create_chat_format.
    """
    tokenizer: Any = getattr(policy, "tokenizer", None)
    if tokenizer is None:
        return None
    config, is_text = setting.config, isinstance(prompt.content, str)
    has_template = bool(getattr(tokenizer, "chat_template", None)) or "chat_template" in setting.template_kwargs
    wants_chat = not (prompt.content and is_text) and (has_template or bool(prompt.content))
    if wants_chat if config.chat is None else config.chat:
        return create_chat_format(tokenizer, setting.template_kwargs)
    return create_text_format(tokenizer, config.separator)


def ask_environment(environment: Environment, method: str) -> str:
    """What get_prompt_prefix or get_state_description says. Raises EnvironmentFault if it raises, or says no text."""
    name = f"{type(environment).__name__}.{method}"
    try:
        text = getattr(environment, method)()
    except Exception as error:  # the environment is the user's
        raise EnvironmentFault(f"{name} raised {type(error).__name__} ({locate_error(error)}): {error}") from error
    if not isinstance(text, str):
        raise EnvironmentFault(f'{name} returned {text!r:.200} ({type(text).__name__}), expected a text; "" = nothing to say')
    return text


def describe_observation(environment: Environment, observation: Any) -> str:
    """The environment's description of its state where the observation is no text of its own; else ""."""
    is_shown = isinstance(observation, str) or are_messages(observation)
    return "" if is_shown else ask_environment(environment, "get_state_description")


def open_conversation(
    content: PromptContent, prefix: str, observation: Any, description: str, config: EpisodeConfig
) -> tuple[Message, ...]:
    """The messages before the first action.

    Args:
        content: of the prompt; a text is a user message; "" and () are nothing.
        prefix: what the environment tells before its first observation; "" = nothing.
        observation: the first one. A text or JSON value joins the last message where that is a user's; messages come as they are.
        description: see observation_to_messages.

    Returns: at least one message.
    Raises: DataError if there is nothing to show.
    """
    messages = [Message(role="user", content=content)] if isinstance(content, str) else list(content)
    messages = [message for message in messages if message.content or message.tool_calls]
    shown = observation_to_messages(observation, role=config.observation_role, description=description)
    if are_messages(observation):
        messages += shown
        shown = ()
    texts = [prefix, *(message.content or "" for message in shown)]
    if any(texts):
        at = len(messages) - 1
        if messages and messages[at].role == "user":
            texts.insert(1, messages[at].content or "")
            messages[at] = replace(messages[at], content=_join(texts, config.separator))
        else:
            messages.append(Message(role="user", content=_join(texts, config.separator)))
    if not messages:
        raise DataError(
            "there is nothing that the model could be shown: the prompt is empty, and the environment has neither a prompt prefix nor a "
            "first observation"
        )
    if config.system_prompt is not None and all(message.role != "system" for message in messages):
        messages.insert(0, Message(role="system", content=config.system_prompt))
    return tuple(messages)


def _join(texts: Sequence[str], separator: str) -> str:
    return separator.join(text for text in texts if text)
