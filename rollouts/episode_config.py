"""EpisodeConfig: how long an episode over an environment may go on, and what happens where it cannot. How it ended, by name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from rollouts.config import check_choice, check_count, check_positive, check_setting
from rollouts.config_json import is_number
from rollouts.errors import ConfigError

OnRewrite = Literal["raise", "branch"]
OnEpisodeError = Literal["raise", "retry", "drop"]


class StopReason(StrEnum):
    """What ended an episode. Where several things did, the first of them in this order."""

    DONE = "done"  # the environment said so
    AGENT = "agent"  # the policy said so
    REGEX = "regex"  # stop_regex was found in an action
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # of all actions together
    CONTEXT = "context"  # what comes next does not fit into the context
    ERROR = "error"  # see Failure


class Failure(StrEnum):
    """Whose fault it is that an episode went wrong."""

    INFRASTRUCTURE = "infrastructure"  # the environment, a tool or a sandbox: raised, too slow, or returned what it must not
    DATA = "data"  # the prompt or the chat template: nothing can be generated from them
    POLICY = "policy"  # actions that the environment could not read; the episode is a whole one all the same


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """The limits of an episode. Every action is carried out by the environment before the limits are looked at."""

    max_turns: int = 8  # actions
    max_tokens: int | None = None  # of all actions together; None = no limit
    max_turn_tokens: int | None = None  # of one action; None = what the policy's sampling parameters say
    max_context: int | None = None  # tokens that the model may see and write at once; None = what the engine allows
    stop_regex: str | None = None  # found in the text of an action (re.search): it is the last one
    # whether an episode whose last action reached its token budget is TRUNCATED whatever ended it, as a single answer is, so that overlong
    # filters see it; not where actions are as long as their budget, as a move of one letter is
    cut_is_truncated: bool = False
    system_prompt: str | None = None  # put before a conversation that has no system message
    observation_role: str = "user"  # of the messages that observations become
    # what stands around observations where there is no chat template, and between texts that become one message
    separator: str = "\n"
    chat: bool | None = None  # whether the chat template is used; None = unless the prompt is a text, or the tokenizer has none
    # the chat template renders the history otherwise than the model saw it: a further context in the same sample, or a DataError. Numbers
    # are exact either way, and one sampled answer can be enough for it, which must not end a run
    on_rewrite: OnRewrite = "branch"
    # a failure that is not the policy's: it is raised, the episode is begun again, or its sample is FAILED, and its group dropped
    on_error: OnEpisodeError = "raise"
    max_retries: int = 2  # with "retry"; then it is raised
    timeout_s: float | None = 60.0  # for each call of the environment; None = no limit
    in_thread: bool = False  # whether an environment's sync methods run in threads, so that a slow one does not stop everything

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
