"""Settings that the episodes of a run share, the first messages of an episode, and the keys of its states."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.policies import AgentPolicy
from rollouts.algorithms.anchors import hash_observation
from rollouts.chat.formats import ConversationFormat, create_chat_format, create_text_format
from rollouts.environments.observations import are_messages, copy_json, observation_to_json, observation_to_messages
from rollouts.environments.protocol import Environment, EnvironmentConfig, EnvironmentFactory
from rollouts.errors import ConfigError, DataError, EnvironmentFault, locate_error
from rollouts.seeds import derive_seed
from rollouts.types import Message, Prompt, PromptContent


def observation_key(observation: Any) -> str:
    """Return a short key, equal for equal observations: a hash of their canonical JSON, see anchors.hash_observation."""
    return hash_observation(observation_to_json(observation))


def observation_text(observation: Any) -> str:
    """Return an observation as text for similarity comparisons: a text as it is, else its JSON with sorted keys."""
    plain = observation_to_json(observation)
    return plain if isinstance(plain, str) else json.dumps(plain, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class EpisodeSetting:
    """Settings that the episodes of a run share."""

    environment_factory: EnvironmentFactory
    config: EpisodeConfig = field(default_factory=EpisodeConfig)
    seed: int = 0  # seed of environments and of sampling, keyed by prompt, sample and turn
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # arguments of the chat template
    # observation before an action -> key, equal for equal states: Turn.state, for algorithms that compare steps (GiGPO)
    state_key: Callable[[Any], str | None] = observation_key
    # minimum similarity, in (0, 1], for which keys of a group become one (gigpo_steps.merge_similar_states). With observation_key,
    # whose hashes are never similar, keys are then the texts of observations. None = equal keys only
    similarity: float | None = None
    # (copy of the prompt, seed) -> config of its environments; None = EnvironmentConfig(seed=seed, parameters=prompt.metadata)
    create_environment_config: Callable[[Prompt, int], EnvironmentConfig] | None = None

    def __post_init__(self) -> None:
        if self.similarity is not None and not 0 < self.similarity <= 1:
            raise ConfigError(f"EpisodeSetting.similarity is {self.similarity!r}, expected in (0, 1], or None")

    def environment_config(self, prompt: Prompt) -> EnvironmentConfig:
        """Return the config of an environment of a prompt. Its parameters are copies, which the environment may change.

        Raises: DataError for metadata that cannot be copied.
        """
        seed = derive_seed(self.seed, prompt.index)
        try:
            metadata = {key: copy.deepcopy(value) for key, value in prompt.metadata.items()}
        except Exception as error:  # an error in the user's own __deepcopy__
            raise DataError(
                f"the metadata of the prompt with index {prompt.index} cannot be copied for its environment ({type(error).__name__}: "
                f"{error}): give values that copy.deepcopy takes, best JSON values"
            ) from error
        if self.create_environment_config is not None:
            return self.create_environment_config(replace(prompt, metadata=metadata), seed)
        return EnvironmentConfig(seed=seed, parameters=metadata)

    def find_state_key(self, observation: Any) -> str | None:
        """Return state_key of an observation. Raises DataError if it raises, or returns neither a text nor None."""
        by_text = self.similarity is not None and self.state_key is observation_key
        try:
            key: Any = (observation_text if by_text else self.state_key)(copy_json(observation))
        except DataError:
            raise
        except (Exception, SystemExit) as error:  # an error in the user's function
            raise DataError(
                f"the state_key of the episodes raised {type(error).__name__} for the observation {observation!r:.200} "
                f"({locate_error(error)}): {error}"
            ) from error
        if inspect.iscoroutine(key):
            key.close()  # it is never awaited
        if key is not None and not isinstance(key, str):
            raise DataError(
                f"the state_key of the episodes gave {key!r:.100} ({type(key).__name__}) for the observation {observation!r:.200}, "
                "expected a text that is equal for equal states, or None"
            )
        return key


def create_conversation_format(policy: AgentPolicy, prompt: Prompt, setting: EpisodeSetting) -> ConversationFormat | None:
    """Create the format that turns conversations of a prompt's episodes into tokens; None if the policy has no tokenizer.

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
    """Return the text of get_prompt_prefix or get_state_description. Raises EnvironmentFault if it raises, or returns no text."""
    name = f"{type(environment).__name__}.{method}"
    try:
        text = getattr(environment, method)()
    except Exception as error:  # an error in the user's environment
        raise EnvironmentFault(f"{name} raised {type(error).__name__} ({locate_error(error)}): {error}") from error
    if not isinstance(text, str):
        raise EnvironmentFault(f'{name} returned {text!r:.200} ({type(text).__name__}), expected a text; "" = nothing to say')
    return text


def describe_observation(environment: Environment, observation: Any) -> str:
    """Return the environment's description of its state if the observation is neither a text nor messages, else ""."""
    is_shown = isinstance(observation, str) or are_messages(observation)
    return "" if is_shown else ask_environment(environment, "get_state_description")


def open_conversation(
    content: PromptContent, prefix: str, observation: Any, description: str, config: EpisodeConfig
) -> tuple[Message, ...]:
    """Return the messages before the first action.

    Args:
        content: content of the prompt; a text is a user message; "" and () are nothing.
        prefix: text of the environment before its first observation; "" = nothing.
        observation: first observation. A text or JSON value joins the last message if that is a user message; messages stay as they are.
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
