"""Sampling of responses, and their rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rollouts.config import LEAST_TEMPERATURE, check_positive, check_setting


@dataclass(frozen=True, kw_only=True)
class GenerationSection:
    """Sampling of responses, in RL and in sampled evaluation."""

    max_tokens: int | None = None  # token budget of a response, or of each action of an episode; None = the task's default
    temperature: float = 1.0  # sampling temperature, at least 1e-6
    enable_thinking: bool | None = None  # enable_thinking argument of the chat template; None = the template's default
    stop: tuple[str, ...] = ()  # strings that end a response
    # sample from the fewest tokens whose probability together reaches this, more than 0; 1 = from all. Training then compares log-probs
    # over the same tokens, which the embedded engine records, and SGLang with a top_k from 2 to 4096; with vLLM it does not train on them
    top_p: float = 1.0
    top_k: int = 0  # number of most probable tokens to sample from; 0 = all. Answers are trained on as with top_p
    # smallest probability of a token that is sampled, as a share of the largest one; 0 = all tokens. Answers are trained on as with top_p
    min_p: float = 0.0

    def __post_init__(self) -> None:
        check_setting(self.max_tokens is None or self.max_tokens >= 1, "generation.max_tokens", self.max_tokens, "at least 1, or None")
        check_setting(
            LEAST_TEMPERATURE <= self.temperature < math.inf,
            "generation.temperature",
            self.temperature,
            f"a finite number, at least {LEAST_TEMPERATURE:g}: greedy samples of a group are all equal",
        )
        check_setting(0 < self.top_p <= 1, "generation.top_p", self.top_p, "more than 0, at most 1")
        check_setting(self.top_k >= 0, "generation.top_k", self.top_k, "at least 0")
        check_setting(0 <= self.min_p < 1, "generation.min_p", self.min_p, "at least 0, less than 1")

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the whole distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """The reward function and its error policy."""

    # reward function, file.py:name or module:name, also of TRL or verl; several with weights: 'a.py:right*0.8,a.py:brief*0.2'; None = the
    # task's reward
    function: str | None = None
    sandboxed: bool = False  # call the reward function in a sandbox, for files you do not trust
    timeout_s: float | None = 30.0  # seconds to wait for a reward; None = no limit
    # reaction to a reward that fails: raise = end the run; retry = call the function again, up to max_retries times; drop = drop the group
    # of the answer; zero = count it as reward 0, and mark it
    on_error: Literal["raise", "retry", "drop", "zero"] = "raise"
    max_retries: int = 2  # further calls after a failure, with on_error retry
    model: str | None = None  # directory of a reward model to train on instead of `function`; evaluations still use `function`
    model_device: str | None = None  # torch device of the reward model; None = the policy's device
    model_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # dtype of the reward model's weights
    model_tokens_per_batch: int = 16384  # maximum tokens of one forward pass of the reward model

    def __post_init__(self) -> None:
        check_positive(self, "model_tokens_per_batch")
