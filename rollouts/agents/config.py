"""Limits of an episode, and the handling of its failures."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from rollouts.config import check_choice, check_count, check_positive, check_setting
from rollouts.config_files import is_number
from rollouts.errors import ConfigError

OnRewrite = Literal["raise", "branch"]
OnEpisodeError = Literal["raise", "retry", "drop"]


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """Limits of an episode, checked after the environment has carried an action out."""

    max_turns: int = 8  # maximum number of actions
    max_tokens: int | None = None  # maximum number of tokens of all actions together; None = no limit
    max_turn_tokens: int | None = None  # maximum number of tokens of one action; None = the policy's sampling parameters decide
    max_context: int | None = None  # maximum number of tokens that the model sees and writes at once; None = the engine's limit
    stop_regex: str | None = None  # pattern (re.search) in the text of an action that ends the episode
    # whether an episode whose last action reached its token budget is TRUNCATED whatever ended it, like a single answer, so that overlong
    # filters apply; not useful if actions are as long as their budget, for example moves of one letter
    cut_is_truncated: bool = False
    system_prompt: str | None = None  # system message for a conversation without one
    observation_role: str = "user"  # role of the messages that observations become
    # text around observations without a chat template, and between texts joined to one message
    separator: str = "\n"
    chat: bool | None = None  # whether the chat template is used; None = unless the prompt is a text, or the tokenizer has none
    # if the chat template renders the history differently than the model saw it: a further context in the same sample, or a DataError.
    # Token ids and log-probs are exact either way, and one sampled answer can cause it, which must not end a run
    on_rewrite: OnRewrite = "branch"
    # a failure that is not the policy's: raise it, restart the episode, or mark its sample FAILED and drop its group
    on_error: OnEpisodeError = "raise"
    max_retries: int = 2  # retries with "retry"; after the last one the failure is raised
    timeout_s: float | None = 60.0  # seconds for each call of the environment; None = no limit
    in_thread: bool = False  # whether an environment's sync methods run in threads, so that a slow one does not block the event loop

    def __post_init__(self) -> None:
        check_positive(self, "max_turns")
        check_count(self, "max_retries")
        for name in ("max_tokens", "max_turn_tokens", "max_context"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        check_choice(self, "on_rewrite", get_args(OnRewrite))
        check_choice(self, "on_error", get_args(OnEpisodeError))
        timeout = self.timeout_s
        good = timeout is None or (is_number(timeout) and 0 < timeout < math.inf)
        check_setting(good, "EpisodeConfig.timeout_s", timeout, "a finite number of seconds above 0, or None for no limit")
        check_setting(bool(self.observation_role), "EpisodeConfig.observation_role", self.observation_role, "the name of a role")
        try:
            re.compile(self.stop_regex or "")
        except re.error as error:
            raise ConfigError(f"EpisodeConfig.stop_regex is {self.stop_regex!r}, which is no regular expression: {error}") from error
